//! Tensors in ONNX Runtime's memory.

use crate::api::{Api, Failure};
use float8::F8E4M3;
use gqa_host::plan::{TensorId, TensorSpec};
use gqa_host::{DType, Error, TensorDesc, TensorView, TensorViewMut};
use half::{bf16, f16};
use ort_sys::{ONNXTensorElementDataType, OrtKernelContext, OrtMemoryInfo, OrtValue};
use std::ffi::c_void;
use std::ops::{Deref, Range};
use std::{ptr, slice};

/// ONNX Runtime's names of element types.
const TYPES: [(DType, ONNXTensorElementDataType); 8] = {
    use ONNXTensorElementDataType::*;
    [
        (DType::F32, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT),
        (DType::F16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16),
        (DType::BF16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16),
        (DType::I32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32),
        (DType::I64, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64),
        (DType::I8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8),
        (DType::U8, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8),
        (DType::F8E4M3, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN),
    ]
};

/// ONNX Runtime's name of a type.
pub fn element_type(dtype: DType) -> ONNXTensorElementDataType {
    let known = TYPES.iter().find(|(ours, _)| *ours == dtype);
    known.map_or(ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, |t| t.1)
}

/// Dimensions of a tensor, in no memory of their own: a call reads many.
#[derive(Clone, Copy)]
pub struct Dims {
    sizes: [usize; MOST_DIMS],
    rank: usize,
}

/// More than any input or output has.
const MOST_DIMS: usize = 8;

impl Dims {
    fn new(name: &'static str, dims: impl ExactSizeIterator<Item = usize>) -> Result<Self, Error> {
        let rank = dims.len();
        if rank > MOST_DIMS {
            let got = format!("{rank} dimensions");
            return Err(Error::invalid(name, got, format!("up to {MOST_DIMS}")));
        }
        let mut sizes = [0; MOST_DIMS];
        sizes.iter_mut().zip(dims).for_each(|(size, dim)| *size = dim);
        Ok(Self { sizes, rank })
    }
}

impl Deref for Dims {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.sizes[..self.rank]
    }
}

/// A tensor of a call: where it is, wherever that may be.
#[derive(Clone)]
pub struct Value {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Dims,
    /// The first element.
    pub data: *mut u8,
}

impl Value {
    /// Whether some dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether another tensor is this one, in the same memory.
    pub fn is(&self, other: &Self) -> bool {
        self.data == other.data && *self.shape == *other.shape
    }

    /// Whether some byte belongs to both tensors.
    pub fn overlaps(&self, other: &Self) -> bool {
        let [a, b] = [self.addresses(), other.addresses()];
        a.start.max(b.start) < a.end.min(b.end)
    }

    /// The addresses of its bytes.
    fn addresses(&self) -> Range<usize> {
        let first = self.data.addr();
        first..first + self.len() * self.dtype.size()
    }

    /// The int32 numbers that the host reads.
    ///
    /// # Safety
    ///
    /// As for [`Self::view`].
    pub unsafe fn numbers(&self, name: &'static str) -> Result<&[i32], Error> {
        match self.dtype {
            // SAFETY: as the caller says
            DType::I32 => unsafe { self.slice(name) },
            other => Err(Error::invalid(name, other, "int32")),
        }
    }

    /// Type and shape.
    pub fn desc(&self) -> TensorDesc<'_> {
        TensorDesc { dtype: self.dtype, shape: &self.shape }
    }

    /// The elements, to be read.
    ///
    /// # Safety
    ///
    /// The memory must be the host's and not be written as long as the view is used.
    pub unsafe fn view(&self, id: TensorId) -> Result<TensorView<'_>, Error> {
        let name = id.name();
        // SAFETY: as the caller says; ONNX Runtime made a tensor of that type and shape
        unsafe {
            Ok(match self.dtype {
                DType::F32 => self.slice::<f32>(name)?.into(),
                DType::F16 => self.slice::<f16>(name)?.into(),
                DType::BF16 => self.slice::<bf16>(name)?.into(),
                DType::I32 => self.slice::<i32>(name)?.into(),
                DType::I64 => self.slice::<i64>(name)?.into(),
                DType::I8 => self.slice::<i8>(name)?.into(),
                DType::U8 => self.slice::<u8>(name)?.into(),
                DType::F8E4M3 => self.slice::<F8E4M3>(name)?.into(),
                other => return Err(foreign(name, other)),
            })
        }
    }

    /// The elements, to be written.
    ///
    /// # Safety
    ///
    /// The memory must be the host's and be used by nobody else as long as the view is used.
    pub unsafe fn view_mut(&mut self, id: TensorId) -> Result<TensorViewMut<'_>, Error> {
        let name = id.name();
        // SAFETY: as the caller says; ONNX Runtime made a tensor of that type and shape
        unsafe {
            Ok(match self.dtype {
                DType::F32 => self.slice_mut::<f32>(name)?.into(),
                DType::F16 => self.slice_mut::<f16>(name)?.into(),
                DType::BF16 => self.slice_mut::<bf16>(name)?.into(),
                DType::I8 => self.slice_mut::<i8>(name)?.into(),
                DType::U8 => self.slice_mut::<u8>(name)?.into(),
                DType::F8E4M3 => self.slice_mut::<F8E4M3>(name)?.into(),
                other => return Err(foreign(name, other)),
            })
        }
    }

    /// # Safety
    ///
    /// As for [`Self::view`], of elements of type `T`.
    unsafe fn slice<T>(&self, name: &'static str) -> Result<&[T], Error> {
        match self.len() {
            0 => Ok(&[]),
            // SAFETY: aligned, and as the caller says
            len => Ok(unsafe { slice::from_raw_parts(self.aligned(name)?, len) }),
        }
    }

    /// # Safety
    ///
    /// As for [`Self::view_mut`], of elements of type `T`.
    unsafe fn slice_mut<T>(&mut self, name: &'static str) -> Result<&mut [T], Error> {
        match self.len() {
            0 => Ok(&mut []),
            // SAFETY: aligned, and as the caller says
            len => Ok(unsafe { slice::from_raw_parts_mut(self.aligned(name)?, len) }),
        }
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    fn aligned<T>(&self, name: &'static str) -> Result<*mut T, Error> {
        let data = self.data.cast::<T>();
        if data.is_null() || !data.is_aligned() {
            let allowed = format!("an address aligned for {}", self.dtype);
            return Err(Error::invalid(name, format!("memory at {data:p}"), allowed));
        }
        Ok(data)
    }
}

fn foreign(name: &'static str, dtype: DType) -> Error {
    Error::invalid(name, dtype, "a type that the operator has")
}

/// The tensors of a running call.
#[derive(Clone, Copy)]
pub struct Context {
    api: Api,
    context: *mut OrtKernelContext,
}

impl Context {
    /// # Safety
    ///
    /// `context` must be that of a call which has not returned as long as the value is used.
    pub unsafe fn new(api: Api, context: *mut OrtKernelContext) -> Self {
        Self { api, context }
    }

    /// How many inputs the node has at most.
    pub fn inputs(self) -> Result<usize, Failure> {
        let mut count = 0;
        let get = self.api.table().KernelContext_GetInputCount;
        // SAFETY: the call runs, and the result has room
        self.api.check(unsafe { get(self.context, &mut count) }).map(|()| count)
    }

    /// Calls a function `count` times on ONNX Runtime's threads, and waits until all calls have
    /// returned.
    ///
    /// # Safety
    ///
    /// The function must take `data` from any of them.
    pub unsafe fn parallel_for(
        self,
        count: usize,
        function: unsafe extern "C" fn(*mut c_void, usize),
        data: *mut c_void,
    ) -> Result<(), Failure> {
        let run = self.api.table().KernelContext_ParallelFor;
        // SAFETY: the call runs; as the caller says
        self.api.check(unsafe { run(self.context, function, count, 0, data) })
    }

    /// Input number `index`; `None` if the node does not have it.
    pub fn input(self, index: usize, name: &'static str) -> Result<Option<Value>, Failure> {
        let (get, mut value) = (self.api.table().KernelContext_GetInput, ptr::null());
        // SAFETY: the call runs, and the result has room
        self.api.check(unsafe { get(self.context, index, &mut value) })?;
        if value.is_null() {
            return Ok(None);
        }
        // SAFETY: the value is one of the call's
        unsafe {
            let (dtype, shape) = self.described(value, name)?;
            Ok(Some(Value { dtype, shape, data: self.data(value.cast_mut())? }))
        }
    }

    /// An output of that type and shape; `None` where the node has none there.
    ///
    /// # Safety
    ///
    /// The type must be the output's.
    pub unsafe fn output(
        self,
        index: usize,
        name: &'static str,
        TensorSpec { dtype, shape, .. }: TensorSpec,
    ) -> Result<Option<Value>, Failure> {
        let (table, mut count, mut value) = (self.api.table(), 0, ptr::null_mut());
        let shape = Dims::new(name, shape.into_iter())?;
        // Memory has no tensor whose dimensions are larger than that.
        let dims = shape.sizes.map(|n| n as i64);
        // SAFETY: the call runs, and the results have room
        unsafe {
            self.api.check((table.KernelContext_GetOutputCount)(self.context, &mut count))?;
            if index < count {
                let (dims, rank) = (dims.as_ptr(), shape.rank);
                let output = table.KernelContext_GetOutput;
                self.api.check(output(self.context, index, dims, rank, &mut value))?;
            }
            if value.is_null() {
                return Ok(None);
            }
            Ok(Some(Value { dtype, shape, data: self.data(value)? }))
        }
    }

    /// The `CUstream` that the call belongs to.
    pub fn stream(self) -> Result<*mut c_void, Failure> {
        let mut stream = ptr::null_mut();
        let get = self.api.table().KernelContext_GetGPUComputeStream;
        // SAFETY: the call runs, and the result has room
        self.api.check(unsafe { get(self.context, &mut stream) }).map(|()| stream)
    }

    /// Memory for the call, in the order of its stream, which goes back to the allocator that
    /// `memory` is of. Null for 0 bytes.
    ///
    /// # Safety
    ///
    /// `memory` must be ONNX Runtime's.
    pub unsafe fn scratch(
        self,
        memory: *const OrtMemoryInfo,
        bytes: usize,
    ) -> Result<*mut c_void, Failure> {
        let mut data = ptr::null_mut();
        let get = self.api.table().KernelContext_GetScratchBuffer;
        // SAFETY: the call runs, and the result has room; as the caller says
        self.api.check(unsafe { get(self.context, memory, bytes, &mut data) }).map(|()| data)
    }

    /// Where a tensor's elements are.
    ///
    /// # Safety
    ///
    /// The value must be one of the call's.
    unsafe fn data(self, value: *mut OrtValue) -> Result<*mut u8, Failure> {
        let mut data = ptr::null_mut();
        let get = self.api.table().GetTensorMutableData;
        // SAFETY: as the caller says, and the result has room
        self.api.check(unsafe { get(value, &mut data) }).map(|()| data.cast())
    }

    /// Type and shape of an input.
    ///
    /// # Safety
    ///
    /// The value must be one of the call's.
    unsafe fn described(
        self,
        value: *const OrtValue,
        name: &'static str,
    ) -> Result<(DType, Dims), Failure> {
        let (mut element, mut dims, mut rank) = (element_type(DType::F32), ptr::null(), 0);
        let get = self.api.table().GetTensorElementTypeAndShapeDataReference;
        // SAFETY: as the caller says, and the results have room
        self.api.check(unsafe { get(value, &mut element, &mut dims, &mut rank) })?;
        let known = TYPES.iter().find(|(_, theirs)| *theirs == element);
        let known = known.ok_or_else(|| {
            Error::invalid(name, format!("{element:?}"), "a type that the operator has")
        })?;
        let dims = match rank {
            0 => &[],
            // SAFETY: the dimensions are the value's, as many as the rank says
            _ => unsafe { slice::from_raw_parts(dims, rank) },
        };
        // A tensor that there is has no negative dimensions.
        Ok((known.0, Dims::new(name, dims.iter().map(|&n| n as usize))?))
    }
}
