//! Host tensors: `ndarray` arrays of one of the operator's element types.

use crate::{Error, Result};
use float8::F8E4M3;
use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};

/// Element type of a [`Tensor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Lengths.
    I32,
    /// Positions.
    I64,
    /// IEEE double precision (ONNX Attention on the CPU).
    F64,
    /// Masks.
    Bool,
    /// Codes of a quantised cache.
    I8,
    /// Two 4-bit codes of a quantised cache.
    U8,
    /// 8-bit floating point without infinities, 4 bits of it exponent: codes of a quantised cache.
    F8E4M3,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 | Self::F8E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether query, key and value of some operator may have the type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::F64)
    }
}

impl std::fmt::Display for DType {
    /// The name ONNX uses.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F64 => "float64",
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::U8 => "uint8",
            Self::F8E4M3 => "float8e4m3fn",
        })
    }
}

/// Type and shape of a tensor, wherever its data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDesc<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
}

/// An owned tensor in host memory, row-major and contiguous.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// float32
    F32(ArrayD<f32>),
    /// float16
    F16(ArrayD<f16>),
    /// bfloat16
    BF16(ArrayD<bf16>),
    /// int32
    I32(ArrayD<i32>),
    /// int64
    I64(ArrayD<i64>),
    /// float64
    F64(ArrayD<f64>),
    /// bool
    Bool(ArrayD<bool>),
    /// int8
    I8(ArrayD<i8>),
    /// uint8
    U8(ArrayD<u8>),
    /// float8e4m3fn
    F8E4M3(ArrayD<F8E4M3>),
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

    /// Type and shape of the operator's input `name`, whose elements must be in row-major order.
    pub(crate) fn desc(&self, name: &'static str) -> Result<TensorDesc<'_>> {
        if with_array!(self, a => a.is_standard_layout()) {
            return Ok(TensorDesc { dtype: self.dtype(), shape: self.shape() });
        }
        Err(Error::invalid(
            name,
            "a transposed or strided array",
            "row-major order, which `Tensor::from` makes",
        ))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether some dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A tensor of zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Self {
        let shape = IxDyn(shape);
        match dtype {
            DType::F32 => Self::F32(ArrayD::zeros(shape)),
            DType::F16 => Self::F16(ArrayD::from_elem(shape, f16::ZERO)),
            DType::BF16 => Self::BF16(ArrayD::from_elem(shape, bf16::ZERO)),
            DType::I32 => Self::I32(ArrayD::zeros(shape)),
            DType::I64 => Self::I64(ArrayD::zeros(shape)),
            DType::F64 => Self::F64(ArrayD::zeros(shape)),
            DType::Bool => Self::Bool(ArrayD::from_elem(shape, false)),
            DType::I8 => Self::I8(ArrayD::zeros(shape)),
            DType::U8 => Self::U8(ArrayD::zeros(shape)),
            DType::F8E4M3 => Self::F8E4M3(ArrayD::from_elem(shape, F8E4M3::ZERO)),
        }
    }

    /// A tensor of zeros named `argument`, or [`Error::OutOfMemory`] where there is no room for it.
    pub fn try_zeros(argument: &'static str, dtype: DType, shape: &[usize]) -> Result<Self> {
        fn array<T: bytemuck::Zeroable>(
            argument: &'static str,
            shape: &[usize],
        ) -> Result<ArrayD<T>> {
            let bytes = shape.iter().fold(size_of::<T>(), |all, &n| all.saturating_mul(n));
            let no_room = || Error::OutOfMemory { argument, bytes };
            let count = bytes / size_of::<T>();
            let values = bytemuck::allocation::try_zeroed_vec(count).map_err(|()| no_room())?;
            ArrayD::from_shape_vec(IxDyn(shape), values).map_err(|_| no_room())
        }
        Ok(match dtype {
            DType::F32 => Self::F32(array(argument, shape)?),
            DType::F16 => Self::F16(array(argument, shape)?),
            DType::BF16 => Self::BF16(array(argument, shape)?),
            DType::I32 => Self::I32(array(argument, shape)?),
            DType::I64 => Self::I64(array(argument, shape)?),
            DType::F64 => Self::F64(array(argument, shape)?),
            DType::Bool => Self::Bool(array(argument, shape)?),
            DType::I8 => Self::I8(array(argument, shape)?),
            DType::U8 => Self::U8(array(argument, shape)?),
            DType::F8E4M3 => Self::F8E4M3(array(argument, shape)?),
        })
    }

    /// A floating-point tensor rounded from `f32` values; integer types are a caller's mistake and give `None`.
    pub fn from_f32(dtype: DType, shape: &[usize], values: &[f32]) -> Option<Self> {
        let array = ArrayD::from_shape_vec(IxDyn(shape), values.to_vec()).ok()?;
        match dtype {
            DType::F32 => Some(Self::F32(array)),
            DType::F16 => Some(Self::F16(array.mapv(f16::from_f32))),
            DType::BF16 => Some(Self::BF16(array.mapv(bf16::from_f32))),
            DType::F64 => Some(Self::F64(array.mapv(f64::from))),
            DType::F8E4M3 => Some(Self::F8E4M3(array.mapv(F8E4M3::from_f32))),
            DType::I32 | DType::I64 | DType::Bool | DType::I8 | DType::U8 => None,
        }
    }

    /// The values in double precision.
    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Self::F32(a) => a.iter().map(|&x| x.into()).collect(),
            Self::F16(a) => a.iter().map(|x| x.to_f64()).collect(),
            Self::BF16(a) => a.iter().map(|x| x.to_f64()).collect(),
            Self::I32(a) => a.iter().map(|&x| x.into()).collect(),
            Self::I64(a) => a.iter().map(|&x| x as f64).collect(),
            Self::F64(a) => a.iter().copied().collect(),
            Self::Bool(a) => a.iter().map(|&x| f64::from(u8::from(x))).collect(),
            Self::I8(a) => a.iter().map(|&x| x.into()).collect(),
            Self::U8(a) => a.iter().map(|&x| x.into()).collect(),
            Self::F8E4M3(a) => a.iter().map(|x| x.to_f64()).collect(),
        }
    }

    /// The elements' bytes in row-major order.
    pub fn bytes(&self) -> &[u8] {
        with_array!(self, a => bytemuck::cast_slice(a.as_slice().unwrap_or_default()))
    }

    /// The elements' bytes in row-major order, to be written; none of a bool tensor, which not all bytes make.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::F16(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::BF16(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::I32(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::I64(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::F64(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::Bool(_) => &mut [],
            Self::I8(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
            Self::U8(a) => a.as_slice_mut().unwrap_or_default(),
            Self::F8E4M3(a) => bytemuck::cast_slice_mut(a.as_slice_mut().unwrap_or_default()),
        }
    }
}

macro_rules! from_array {
    ($($variant:ident($t:ty)),*) => {$(
        impl<D: ndarray::Dimension> From<ndarray::Array<$t, D>> for Tensor {
            /// Copies only where the array is not in row-major order.
            fn from(array: ndarray::Array<$t, D>) -> Self {
                let array = array.into_dyn();
                Self::$variant(if array.is_standard_layout() { array } else { array.as_standard_layout().into_owned() })
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
