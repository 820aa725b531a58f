//! Host tensors: `ndarray` arrays of one of the operator's element types.

use crate::dtype::{DType, TensorDesc};
use crate::error::{Error, Result};
use bytemuck::Zeroable;
use float8::F8E4M3;
use half::{bf16, f16};
use ndarray::{ArrayD, ArrayViewMutD, IxDyn};
use std::ops::Deref;

/// An array whose elements are one slice in row-major order. `from` converts any array, and copies
/// only if its order differs.
///
/// ```
/// use gqa_tensor::RowMajor;
/// let array = ndarray::array![[1, 2, 3], [4, 5, 6]];
/// assert_eq!(RowMajor::from(array.reversed_axes()).as_slice(), [1, 4, 2, 5, 3, 6]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct RowMajor<T>(ArrayD<T>);

impl<T> RowMajor<T> {
    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        self.0.as_slice().expect("row-major since it was made")
    }

    /// The elements, to be written.
    pub fn as_slice_mut(&mut self) -> &mut [T] {
        self.0.as_slice_mut().expect("row-major since it was made")
    }

    /// The array; elements are writable, and their order is fixed.
    pub fn view_mut(&mut self) -> ArrayViewMutD<'_, T> {
        self.0.view_mut()
    }

    /// The array.
    pub fn into_array(self) -> ArrayD<T> {
        self.0
    }
}

impl<T> Deref for RowMajor<T> {
    type Target = ArrayD<T>;

    fn deref(&self) -> &ArrayD<T> {
        &self.0
    }
}

impl<T: Clone, D: ndarray::Dimension> From<ndarray::Array<T, D>> for RowMajor<T> {
    /// Copies only if the array is not in row-major order.
    fn from(array: ndarray::Array<T, D>) -> Self {
        let array = array.into_dyn();
        match array.is_standard_layout() {
            true => Self(array),
            false => Self(array.as_standard_layout().into_owned()),
        }
    }
}

/// An owned tensor in host memory, row-major and contiguous.
///
/// `Tensor::from` converts an `ndarray` array of any supported element type.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// float32
    F32(RowMajor<f32>),
    /// float16
    F16(RowMajor<f16>),
    /// bfloat16
    BF16(RowMajor<bf16>),
    /// int32
    I32(RowMajor<i32>),
    /// int64
    I64(RowMajor<i64>),
    /// float64
    F64(RowMajor<f64>),
    /// bool
    Bool(RowMajor<bool>),
    /// int8
    I8(RowMajor<i8>),
    /// uint8
    U8(RowMajor<u8>),
    /// float8e4m3fn
    F8E4M3(RowMajor<F8E4M3>),
}

/// Runs `$body` with `$array` bound to the array inside, whatever its element type.
macro_rules! with_array {
    ($tensor:expr, $array:ident => $body:expr) => {
        match $tensor {
            $crate::Tensor::F32($array) => $body,
            $crate::Tensor::F16($array) => $body,
            $crate::Tensor::BF16($array) => $body,
            $crate::Tensor::I32($array) => $body,
            $crate::Tensor::I64($array) => $body,
            $crate::Tensor::F64($array) => $body,
            $crate::Tensor::Bool($array) => $body,
            $crate::Tensor::I8($array) => $body,
            $crate::Tensor::U8($array) => $body,
            $crate::Tensor::F8E4M3($array) => $body,
        }
    };
}

impl Tensor {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
            Self::I32(_) => DType::I32,
            Self::I64(_) => DType::I64,
            Self::F64(_) => DType::F64,
            Self::Bool(_) => DType::Bool,
            Self::I8(_) => DType::I8,
            Self::U8(_) => DType::U8,
            Self::F8E4M3(_) => DType::F8E4M3,
        }
    }

    /// Dimensions.
    pub fn shape(&self) -> &[usize] {
        with_array!(self, a => a.shape())
    }

    /// Type and shape.
    pub fn desc(&self) -> TensorDesc<'_> {
        TensorDesc { dtype: self.dtype(), shape: self.shape() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_array!(self, a => a.len())
    }

    /// Whether some dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A tensor of zeros.
    ///
    /// # Panics
    ///
    /// Where memory does not suffice; [`try_zeros`](Self::try_zeros) returns an error instead.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Self {
        Self::try_zeros("shape", dtype, shape).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A tensor of zeros; errors name it `argument`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] where memory does not suffice; [`Error::Invalid`] where no memory
    /// could.
    pub fn try_zeros(argument: &'static str, dtype: DType, shape: &[usize]) -> Result<Self> {
        let count = count(argument, dtype, shape)?;
        let bytes = count * dtype.size();
        let no_room = |()| Error::OutOfMemory { argument, bytes };
        let zeros = Zeros { shape, count };
        Ok(match dtype {
            DType::F32 => Self::F32(zeros.array().map_err(no_room)?),
            DType::F16 => Self::F16(zeros.array().map_err(no_room)?),
            DType::BF16 => Self::BF16(zeros.array().map_err(no_room)?),
            DType::I32 => Self::I32(zeros.array().map_err(no_room)?),
            DType::I64 => Self::I64(zeros.array().map_err(no_room)?),
            DType::F64 => Self::F64(zeros.array().map_err(no_room)?),
            DType::Bool => Self::Bool(zeros.array().map_err(no_room)?),
            DType::I8 => Self::I8(zeros.array().map_err(no_room)?),
            DType::U8 => Self::U8(zeros.array().map_err(no_room)?),
            DType::F8E4M3 => Self::F8E4M3(zeros.array().map_err(no_room)?),
        })
    }

    /// A floating-point tensor rounded from `f32` values.
    ///
    /// # Errors
    ///
    /// Where `dtype` is not a floating-point type, or the number of `values` does not match
    /// `shape`.
    pub fn from_f32(dtype: DType, shape: &[usize], values: &[f32]) -> Result<Self> {
        let array = ArrayD::from_shape_vec(IxDyn(shape), values.to_vec()).map_err(|_| {
            let allowed = format!("as many as a tensor of shape {shape:?} has");
            Error::invalid("values", format!("{} elements", values.len()), allowed)
        })?;
        match dtype {
            DType::F32 => Ok(array.into()),
            DType::F16 => Ok(array.mapv(f16::from_f32).into()),
            DType::BF16 => Ok(array.mapv(bf16::from_f32).into()),
            DType::F64 => Ok(array.mapv(f64::from).into()),
            DType::F8E4M3 => Ok(array.mapv(F8E4M3::from_f32).into()),
            DType::I32 | DType::I64 | DType::Bool | DType::I8 | DType::U8 => {
                let allowed = "float32, float16, bfloat16, float64 or float8e4m3fn";
                Err(Error::invalid("dtype", dtype, allowed))
            }
        }
    }

    /// The values in double precision.
    pub fn to_f64(&self) -> Vec<f64> {
        self.view().to_f64()
    }

    /// The elements' bytes in row-major order.
    pub fn bytes(&self) -> &[u8] {
        self.view().bytes()
    }

    /// The elements' bytes in row-major order, mutable.
    ///
    /// # Errors
    ///
    /// For a bool tensor, for which not every byte is valid;
    /// [`with_bytes_mut`](Self::with_bytes_mut) takes that.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        self.view_mut().into_bytes()
    }

    /// Lets `write` write the elements' bytes in row-major order. For a bool tensor it writes to a
    /// copy, in which every nonzero byte becomes true.
    pub fn with_bytes_mut<R>(&mut self, write: impl FnOnce(&mut [u8]) -> R) -> R {
        if let Self::Bool(flags) = self {
            let mut bytes = bytemuck::cast_slice(flags.as_slice()).to_vec();
            let result = write(&mut bytes);
            flags.as_slice_mut().iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte != 0);
            return result;
        }
        write(self.bytes_mut().expect("only bool tensors have no bytes to be written"))
    }
}

/// Number of elements of the tensor `argument`; errs where no memory could hold them. A dimension
/// of 0 does not excuse others that overflow: strides are products of them.
fn count(argument: &'static str, dtype: DType, shape: &[usize]) -> Result<usize> {
    let bytes =
        shape.iter().filter(|&&n| n > 0).try_fold(dtype.size(), |all, &n| all.checked_mul(n));
    match bytes {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(shape.iter().product()),
        _ => {
            let allowed = format!("dimensions whose product is at most {} bytes", isize::MAX);
            Err(Error::invalid(argument, format!("{dtype} {shape:?}"), allowed))
        }
    }
}

/// Zeros to be made.
struct Zeros<'a> {
    shape: &'a [usize],
    count: usize,
}

impl Zeros<'_> {
    fn array<T: Zeroable>(&self) -> Result<RowMajor<T>, ()> {
        let values = bytemuck::allocation::try_zeroed_vec(self.count)?;
        ArrayD::from_shape_vec(IxDyn(self.shape), values).map(RowMajor).map_err(drop)
    }
}

macro_rules! from_array {
    ($($variant:ident($t:ty)),*) => {$(
        impl From<RowMajor<$t>> for Tensor {
            fn from(array: RowMajor<$t>) -> Self {
                Self::$variant(array)
            }
        }

        impl<D: ndarray::Dimension> From<ndarray::Array<$t, D>> for Tensor {
            /// Copies only if the array is not in row-major order.
            fn from(array: ndarray::Array<$t, D>) -> Self {
                Self::$variant(array.into())
            }
        }
    )*};
}
from_array!(
    F32(f32),
    F16(f16),
    BF16(bf16),
    I32(i32),
    I64(i64),
    F64(f64),
    Bool(bool),
    I8(i8),
    U8(u8),
    F8E4M3(F8E4M3)
);

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Axis, array, s};

    #[test]
    fn an_array_in_any_order_becomes_row_major() {
        let rows = array![[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]];
        let transposed = Tensor::from(rows.clone().reversed_axes());
        assert_eq!(transposed.shape(), [3, 2]);
        assert_eq!(transposed.to_f64(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let bytes: Vec<f32> = bytemuck::pod_collect_to_vec(transposed.bytes());
        assert_eq!(bytes, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let mut reversed = rows.clone();
        reversed.invert_axis(Axis(1));
        assert_eq!(Tensor::from(reversed).bytes()[..4], 3.0f32.to_ne_bytes());
        let columns = rows.slice_move(s![.., ..;2]);
        assert_eq!(Tensor::from(columns).bytes().len(), 16);
    }

    /// The variant's type guarantees a row-major array.
    #[test]
    fn a_variant_holds_its_elements_in_order() {
        let mut tensor = Tensor::F32(array![[1.0, 2.0], [3.0, 4.0]].reversed_axes().into());
        tensor.bytes_mut().unwrap()[4..8].copy_from_slice(&9.0f32.to_ne_bytes());
        let Tensor::F32(array) = &mut tensor else { unreachable!("made as float32") };
        array.view_mut()[[1, 0]] += 1.0;
        assert_eq!(array.as_slice(), [1.0, 9.0, 3.0, 4.0]);
    }

    #[test]
    fn bytes_become_bools() {
        let mut mask = Tensor::from(array![true, false, false]);
        assert!(mask.bytes_mut().is_err());
        let seen = mask.with_bytes_mut(|bytes| {
            let seen = bytes.to_vec();
            bytes.copy_from_slice(&[0, 1, 255]);
            seen
        });
        assert_eq!(seen, [1, 0, 0]);
        assert_eq!(mask, array![false, true, true].into());
    }

    #[test]
    fn every_type_takes_bytes() {
        let types = [
            DType::F32,
            DType::F16,
            DType::BF16,
            DType::I32,
            DType::I64,
            DType::F64,
            DType::Bool,
            DType::I8,
            DType::U8,
            DType::F8E4M3,
        ];
        for dtype in types {
            let mut tensor = Tensor::zeros(dtype, &[3, 2]);
            tensor.with_bytes_mut(|bytes| bytes.fill(1));
            assert_eq!(tensor.bytes(), vec![1; 6 * dtype.size()], "{dtype}");
        }
    }

    #[test]
    fn tensors_that_no_memory_holds_are_refused() {
        let refusal = |shape: &[usize]| {
            Tensor::try_zeros("output", DType::F32, shape).unwrap_err().to_string()
        };
        assert!(refusal(&[1 << 45]).starts_with("output: got 140737488355328 bytes"));
        for shape in [vec![usize::MAX, 2], vec![0, usize::MAX / 2, 3], vec![usize::MAX / 4, 1]] {
            let got = format!("output: got float32 {shape:?}; allowed: dimensions whose product");
            assert!(refusal(&shape).starts_with(&got), "{}", refusal(&shape));
        }
        let empty = Tensor::try_zeros("output", DType::F32, &[0, 1 << 40]).unwrap();
        assert_eq!(empty.shape(), [0, 1 << 40]);
    }

    #[test]
    fn numbers_that_do_not_fill_a_shape_are_refused() {
        let refusal = |dtype, shape: &[usize]| {
            Tensor::from_f32(dtype, shape, &[1.0, 2.0]).unwrap_err().to_string()
        };
        let got = "values: got 2 elements; allowed: as many as a tensor of shape [3] has";
        assert_eq!(refusal(DType::F16, &[3]), got);
        assert!(refusal(DType::F16, &[usize::MAX, 2]).starts_with("values: got 2 elements"));
        assert!(refusal(DType::I32, &[2]).starts_with("dtype: got int32"));
    }
}
