//! Arrays in host memory, of whatever library: numpy, torch, jax.

use crate::dlpack;
use crate::element::{Element, Known};
use crate::error::{invalid, mistyped, raised, room};
use crate::memory::Memory;
use gqa_host::DType;
use half::{bf16, f16};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::borrow::Cow;

/// What the elements of an argument are.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Queries, or outputs of merged parts: the first array of a call.
    Heads,
    /// Rows of heads of the type of the first array, which has this name.
    Like(DType, &'static str),
    /// A KV cache of q's type.
    Cache(DType),
    /// Lengths, places and bits.
    Integers,
    /// Numbers that are rounded to the type of heads, or float32.
    Numbers,
    /// What hides keys, or is added to their scores.
    Mask,
}

impl Kind {
    fn allows(self, dtype: DType) -> bool {
        match self {
            Self::Heads => matches!(dtype, DType::F32 | DType::F16 | DType::BF16),
            Self::Like(first, _) | Self::Cache(first) => dtype == first,
            Self::Integers => matches!(dtype, DType::I32 | DType::I64),
            Self::Numbers => dtype.is_float(),
            Self::Mask => dtype == DType::Bool || dtype.is_float(),
        }
    }

    fn allowed(self) -> Cow<'static, str> {
        match self {
            Self::Heads => "float32, float16 or bfloat16".into(),
            Self::Like(first, name) => format!("{first}, as {name}").into(),
            Self::Cache(first) => {
                format!("{first}, as q; quantized KV caches are torch's tensors on a GPU").into()
            }
            Self::Integers => "int32 or int64".into(),
            Self::Numbers => "float32, float16, bfloat16 or float64".into(),
            Self::Mask => "bool, float32, float16, bfloat16 or float64".into(),
        }
    }
}

/// What DLPack says of an array, wherever that is.
pub struct Described {
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<isize>,
    pub data: *mut u8,
    pub read_only: bool,
    /// DLPack's type of a device, and its number.
    pub device: (i32, i32),
    /// Keeps the memory.
    pub capsule: Py<PyCapsule>,
}

impl Described {
    /// Describes an object that has `__dlpack__`. If the array is in GPU memory, work in `stream`,
    /// a stream in DLPack's numbering, waits for the work that the array's owner has enqueued.
    ///
    /// # Errors
    ///
    /// If it has no `__dlpack__`, elements of an unknown type, of which `allowed` names the known
    /// ones, or elements that are nowhere, as those of torch's `FakeTensor`.
    pub fn of(
        name: &str,
        object: &Bound<'_, PyAny>,
        stream: Option<usize>,
        allowed: &str,
    ) -> PyResult<Self> {
        let capsule = capsule(name, object, stream)?;
        let (tensor, flags) = described(name, &capsule)?;
        let dtype = dtype(tensor).map_err(|got| invalid(name, got, allowed))?;
        let count = usize::try_from(tensor.dimensions).unwrap_or_default();
        let numbers = |at: *const i64| match count {
            0 => &[],
            // SAFETY: DLPack's: as many numbers as there are dimensions
            _ => unsafe { std::slice::from_raw_parts(at, count) },
        };
        let shape: Vec<usize> =
            numbers(tensor.shape).iter().map(|&n| n.try_into().unwrap_or_default()).collect();
        let elements = shape.iter().try_fold(8usize, |all, &n| all.checked_mul(n.max(1)));
        if elements.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(invalid(name, format!("{shape:?}"), "what can be addressed"));
        }
        let strides = match tensor.strides.is_null() {
            true => contiguous(&shape),
            false => numbers(tensor.strides).iter().map(|&n| n as isize).collect(),
        };
        if tensor.data.is_null() && !shape.contains(&0) {
            let got = "an array whose elements are not in memory, as torch's FakeTensor";
            return Err(invalid(name, got, "one that has elements"));
        }
        // Byte offset of the first element from the address.
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let read_only = flags & dlpack::READ_ONLY != 0;
        let device = (tensor.device_type, tensor.device_id);
        Ok(Self { dtype, shape, strides, data, read_only, device, capsule: capsule.unbind() })
    }
}

/// An array in host memory where its owner has it.
pub struct Array {
    pub name: &'static str,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// In elements.
    pub strides: Vec<isize>,
    data: *mut u8,
    read_only: bool,
    /// Keeps the memory.
    _capsule: Py<PyCapsule>,
}

// SAFETY: the capsule is only kept; the elements are read and written as the functions say that
// take the array, while its owner lends it to them
unsafe impl Send for Array {}
// SAFETY: likewise
unsafe impl Sync for Array {}

impl Array {
    /// Of an object that has `__dlpack__`.
    ///
    /// # Errors
    ///
    /// Unless it has that, in memory of the CPU, and elements of that kind.
    pub fn of(name: &'static str, object: &Bound<'_, PyAny>, kind: Kind) -> PyResult<Self> {
        let Described { dtype, shape, strides, data, read_only, device, capsule } =
            Described::of(name, object, None, &kind.allowed())?;
        if !kind.allows(dtype) {
            return Err(invalid(name, dtype, kind.allowed()));
        }
        if device.0 != dlpack::CPU {
            let got = format!("an array on device type {} of DLPack", device.0);
            return Err(invalid(name, got, "one in memory of the CPU, as the others"));
        }
        if data.align_offset(dtype.size()) != 0 && !shape.contains(&0) {
            let got = format!("an array at {data:p}");
            return Err(invalid(name, got, format!("a multiple of {} bytes", dtype.size())));
        }
        Ok(Self { name, dtype, shape, strides, data, read_only, _capsule: capsule })
    }

    /// The first element's address.
    pub fn data<T>(&self) -> *const T {
        self.data.cast()
    }

    /// The same, to be written.
    ///
    /// # Errors
    ///
    /// Where the array's owner does not allow that.
    pub fn data_mut<T>(&self) -> PyResult<*mut T> {
        match self.read_only {
            false => Ok(self.data.cast()),
            true => Err(invalid(self.name, "a read-only array", "one that can be written")),
        }
    }

    /// All `count` elements in row-major order: borrowed if contiguous, else a copy.
    ///
    /// # Errors
    ///
    /// Unless there are, of that type.
    pub fn elements<T: Known>(&self, count: usize) -> PyResult<Cow<'_, [T]>> {
        self.check::<T>(count)?;
        match (count, self.is_contiguous()) {
            (0, _) => Ok(Cow::Borrowed(&[])),
            // SAFETY: the array has `count` elements, and its owner does not write it during the
            // call
            (_, true) => Ok(unsafe { std::slice::from_raw_parts(self.data(), count) }.into()),
            // SAFETY: of that type
            (_, false) => Ok(unsafe { self.read(|element: T| element) }?.into()),
        }
    }

    fn check<T: Known>(&self, count: usize) -> PyResult<()> {
        let is_so = self.dtype == T::DTYPE && self.shape.iter().product::<usize>() == count;
        match is_so {
            true => Ok(()),
            false => {
                let got = format!("{} {:?}", self.dtype, self.shape);
                Err(invalid(self.name, got, format!("{count} elements of {}", T::DTYPE)))
            }
        }
    }

    /// All elements of a contiguous array, to be written.
    ///
    /// # Errors
    ///
    /// As [`elements`](Self::elements), and as [`data_mut`](Self::data_mut).
    #[expect(clippy::mut_from_ref, reason = "the memory is not the array's own")]
    pub fn elements_mut<T: Known>(&self, count: usize) -> PyResult<&mut [T]> {
        self.check::<T>(count)?;
        if !self.is_contiguous() {
            return Err(invalid(self.name, "an array with strides", "a contiguous one"));
        }
        let data = self.data_mut()?;
        match count {
            0 => Ok(&mut []),
            // SAFETY: the array has `count` elements, and was made for this call
            _ => Ok(unsafe { std::slice::from_raw_parts_mut(data, count) }),
        }
    }

    /// Where its elements are.
    pub fn memory(&self) -> Memory<'_> {
        Memory {
            address: self.data as usize,
            shape: &self.shape,
            strides: &self.strides,
            size: self.dtype.size(),
        }
    }

    pub fn is_contiguous(&self) -> bool {
        is_contiguous(&self.shape, &self.strides)
    }

    /// All numbers of an array of integers, row-major.
    ///
    /// # Errors
    ///
    /// Unless its elements are int32 or int64, and it has that many dimensions.
    pub fn integers(&self, dimensions: usize) -> PyResult<Vec<i64>> {
        if self.shape.len() != dimensions {
            let got = format!("{:?}", self.shape);
            return Err(invalid(self.name, got, format!("{dimensions} dimensions")));
        }
        match self.dtype {
            // SAFETY: the array's type
            DType::I32 => unsafe { self.read::<i32, _>(i64::from) },
            // SAFETY: likewise
            DType::I64 => unsafe { self.read::<i64, _>(|n| n) },
            other => Err(invalid(self.name, other, "int32 or int64")),
        }
    }

    /// All numbers of an array of any floating-point type, row-major.
    ///
    /// # Errors
    ///
    /// Where its elements are of another type.
    pub fn floats(&self) -> PyResult<Vec<f32>> {
        match self.dtype {
            // SAFETY: the array's type
            DType::F16 => unsafe { self.read(f16::to_f32) },
            // SAFETY: likewise
            DType::BF16 => unsafe { self.read(bf16::to_f32) },
            // SAFETY: likewise
            DType::F32 => unsafe { self.read(|n| n) },
            // SAFETY: likewise
            DType::F64 => unsafe { self.read(|n: f64| n as f32) },
            other => Err(invalid(self.name, other, "float16, bfloat16, float32 or float64")),
        }
    }

    /// The same, rounded to an element type.
    ///
    /// # Errors
    ///
    /// As [`floats`](Self::floats).
    pub fn numbers<T: Element>(&self) -> PyResult<Vec<T>> {
        Ok(self.floats()?.into_iter().map(T::from_f32).collect())
    }

    /// All elements of an array of booleans, row-major.
    ///
    /// # Errors
    ///
    /// Where its elements are of another type.
    pub fn booleans(&self) -> PyResult<Vec<bool>> {
        match self.dtype {
            // SAFETY: bytes, of which any that is not 0 is true
            DType::Bool => unsafe { self.read(|byte: u8| byte != 0) },
            other => Err(invalid(self.name, other, "bool")),
        }
    }

    /// # Safety
    ///
    /// The elements must be of type `T`.
    unsafe fn read<T: Copy, R>(&self, convert: impl Fn(T) -> R) -> PyResult<Vec<R>> {
        let mut all = room(self.name, self.shape.iter().product()).map_err(raised)?;
        // SAFETY: an offset of an element, by the strides
        let element = |at| unsafe { self.data::<T>().offset(at).read() };
        all.extend(self.offsets().map(|at| convert(element(at))));
        Ok(all)
    }

    /// Where each element is, row-major.
    fn offsets(&self) -> impl Iterator<Item = isize> {
        let count: usize = self.shape.iter().product();
        (0..count).map(|mut i| {
            let mut at = 0;
            for (&n, &stride) in self.shape.iter().zip(&self.strides).rev() {
                at += (i % n) as isize * stride;
                i /= n;
            }
            at
        })
    }
}

pub fn is_contiguous(shape: &[usize], strides: &[isize]) -> bool {
    let moves = shape.iter().map(|&n| n > 1);
    let mut pairs = strides.iter().zip(contiguous(shape)).zip(moves);
    shape.contains(&0) || pairs.all(|((got, wanted), moves)| !moves || *got == wanted)
}

/// Strides of an array whose elements lie side by side.
pub fn contiguous(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i] as isize;
    }
    strides
}

/// What `__dlpack__` returns: of version 1 where the library knows that, which allows arrays that
/// must not be written.
fn capsule<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    stream: Option<usize>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let py = object.py();
    if !object.hasattr("__dlpack__")? {
        let got = object.get_type().name()?.to_string();
        return Err(mistyped(name, got, "an array with __dlpack__: of numpy, torch, jax"));
    }
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item("stream", stream)?;
    }
    let of_older = options.copy()?;
    options.set_item("max_version", (1, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            object.call_method("__dlpack__", (), Some(&of_older))
        }
        result => result,
    };
    match capsule {
        Ok(capsule) => Ok(capsule.cast_into::<PyCapsule>()?),
        Err(error) => {
            let got = format!("an array whose __dlpack__ fails: {}", error.value(py));
            Err(invalid(name, got, "one that can be shared with others"))
        }
    }
}

/// The capsule's tensor and flags.
fn described<'a>(
    name: &str,
    capsule: &'a Bound<'_, PyCapsule>,
) -> PyResult<(&'a dlpack::Tensor, u64)> {
    if let Ok(tensor) = capsule.pointer_checked(Some(dlpack::NAME)) {
        // SAFETY: capsules of that name have a DLManagedTensor, which begins with its tensor
        return Ok((unsafe { tensor.cast::<dlpack::Tensor>().as_ref() }, 0));
    }
    let versioned = capsule.pointer_checked(Some(dlpack::VERSIONED_NAME))?;
    // SAFETY: capsules of that name have a DLManagedTensorVersioned
    let versioned = unsafe { versioned.cast::<dlpack::Versioned>().as_ref() };
    match versioned.major {
        1 => Ok((&versioned.tensor, versioned.flags)),
        other => Err(invalid(name, format!("DLPack {other}"), "DLPack 1 or older")),
    }
}

/// The element type that DLPack says, or the name of one that is not known here.
fn dtype(tensor: &dlpack::Tensor) -> Result<DType, String> {
    match (tensor.code, tensor.bits, tensor.lanes) {
        (0, 32, 1) => Ok(DType::I32),
        (0, 64, 1) => Ok(DType::I64),
        (2, 16, 1) => Ok(DType::F16),
        (2, 32, 1) => Ok(DType::F32),
        (2, 64, 1) => Ok(DType::F64),
        (4, 16, 1) => Ok(DType::BF16),
        (6, 8, 1) => Ok(DType::Bool),
        (code, bits, lanes) => {
            let lanes = if lanes == 1 { String::new() } else { format!(" x {lanes}") };
            let code = usize::from(code);
            Err(
                match (
                    dlpack::KINDS.get(code),
                    dlpack::SMALL.get(code.wrapping_sub(dlpack::KINDS.len())),
                ) {
                    (Some(kind), _) => format!("{kind}{bits}{lanes}"),
                    (None, Some(name)) => format!("{name}{lanes}"),
                    (None, None) => format!("{bits} bits of DLPack's type {code}{lanes}"),
                },
            )
        }
    }
}
