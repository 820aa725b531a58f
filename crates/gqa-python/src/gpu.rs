//! Arrays in memory of an NVIDIA GPU, of whatever library, for callers without torch: `_arrays.py`.

use crate::array::{Described, contiguous};
use crate::device::OpenGpu;
use crate::dlpack::{self, Delete, Managed, Tensor, Versioned};
use crate::error::{invalid, raised};
use gqa_host::DType;
use gqa_host::driver::{DeviceTensor, DeviceView};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// An array in GPU memory, which belongs to another library's array or to the package.
#[pyclass(frozen)]
#[derive(Clone)]
pub struct GpuArray {
    name: String,
    gpu: Arc<OpenGpu>,
    address: u64,
    dtype: DType,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<isize>,
    read_only: bool,
    owner: Owner,
}

/// Who keeps the memory.
#[derive(Clone)]
enum Owner {
    Other { _capsule: Arc<Py<PyCapsule>> },
    This(Arc<DeviceTensor>),
}

impl GpuArray {
    /// Of an object that has `__dlpack__`, for work in that stream, as DLPack counts streams.
    /// Errors about its type say what is `allowed`.
    pub fn of(
        gpu: &Arc<OpenGpu>,
        name: &str,
        object: &Bound<'_, PyAny>,
        stream: usize,
        allowed: &str,
    ) -> PyResult<Self> {
        let index = gpu.ordinal;
        let found = Described::of(name, object, Some(stream), allowed)?;
        if found.device != (dlpack::CUDA, index as i32) {
            let got = format!(
                "an array on device {} of DLPack's type {}",
                found.device.1, found.device.0
            );
            return Err(invalid(name, got, format!("one on GPU {index}, as the others")));
        }
        let Described { dtype, shape, strides, data, read_only, capsule, .. } = found;
        let owner = Owner::Other { _capsule: Arc::new(capsule) };
        let (name, gpu, address) = (name.to_owned(), Arc::clone(gpu), data as u64);
        Ok(Self { name, gpu, address, dtype, shape, strides, read_only, owner })
    }

    /// The package's own.
    pub fn own(gpu: &Arc<OpenGpu>, dtype: DType, memory: DeviceTensor) -> Self {
        let view = memory.view();
        let (address, shape) = (view.pointer, view.shape.to_vec());
        Self {
            name: "output".to_owned(),
            gpu: Arc::clone(gpu),
            address,
            dtype,
            strides: contiguous(&shape),
            shape,
            read_only: false,
            owner: Owner::This(Arc::new(memory)),
        }
    }

    fn is_contiguous(&self) -> bool {
        crate::array::is_contiguous(&self.shape, &self.strides)
    }
}

#[pymethods]
impl GpuArray {
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn ndim(&self) -> usize {
        self.shape.len()
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    /// Strides of the first three dimensions as kernels read them, with which elements of the last
    /// one lie side by side; None where the array is contiguous.
    fn strides(&self) -> PyResult<Option<Vec<usize>>> {
        let size = self.dtype.size();
        let refuse = |got: String| {
            let allowed = "contiguous at a multiple of 16 bytes, or elements of a head side by \
                           side and all else multiples of 16 bytes apart";
            Err(invalid(&self.name, got, allowed))
        };
        if !self.address.is_multiple_of(16) && !self.shape.contains(&0) {
            return refuse(format!("an array at {:#x}", self.address));
        }
        if self.is_contiguous() {
            return Ok(None);
        }
        let Some((last, outer)) = self.strides.split_last() else { return Ok(None) };
        let moves = |(&n, &stride): (&usize, &isize)| if n > 1 { stride } else { 0 };
        let outer: Vec<isize> = self.shape.iter().zip(outer).map(moves).collect();
        let is_apart = |&stride: &isize| stride >= 0 && (stride as usize * size).is_multiple_of(16);
        let is_read = (*last == 1 || self.shape.last() == Some(&1)) && outer.iter().all(is_apart);
        match is_read {
            true => Ok(Some(outer.into_iter().map(|stride| stride as usize).collect())),
            false => refuse(format!("strides {:?}", self.strides)),
        }
    }

    /// Some of what the first dimension has.
    fn part(&self, first: usize, count: usize) -> Self {
        let (first, mut shape) = (first.min(self.shape[0]), self.shape.clone());
        shape[0] = count.min(self.shape[0] - first);
        let bytes = first as isize * self.strides[0] * self.dtype.size() as isize;
        let address = self.address.wrapping_add_signed(bytes as i64);
        Self { address, shape, ..self.clone() }
    }

    /// The same as the only one of a first dimension.
    fn alone(&self) -> Self {
        let shape = [&[1], &self.shape[..]].concat();
        let strides = [&[0], &self.strides[..]].concat();
        Self { shape, strides, ..self.clone() }
    }

    /// The same memory otherwise: all of it, with these strides.
    fn view(&self, shape: Vec<usize>, strides: Vec<isize>) -> PyResult<Self> {
        let reach = shape.iter().zip(&strides).try_fold(1, |reach: usize, (&n, &stride)| {
            let last = n.checked_sub(1)?.checked_mul(usize::try_from(stride).ok()?)?;
            reach.checked_add(last)
        });
        let elements = self.shape.iter().product();
        let fits = shape.len() == strides.len() && reach.is_some_and(|reach| reach <= elements);
        if !self.is_contiguous() || !fits && elements > 0 {
            let got = format!("{shape:?} by {strides:?}");
            return Err(invalid(&self.name, got, format!("what {elements} elements hold")));
        }
        Ok(Self { shape, strides, ..self.clone() })
    }

    /// All numbers of a contiguous array of integers, after what is in that stream.
    fn numbers(&self, py: Python<'_>, stream: usize) -> PyResult<Vec<i64>> {
        let is_known = matches!(self.dtype, DType::I32 | DType::I64) && self.is_contiguous();
        if !is_known {
            let got = format!("{} {:?}, strides {:?}", self.dtype, self.shape, self.strides);
            return Err(invalid(&self.name, got, "int32 or int64, contiguous"));
        }
        let view = DeviceView::new(self.address, self.dtype, &self.shape);
        let tensor = py.detach(|| {
            // SAFETY: DLPack's, of memory that the array keeps; streams last
            unsafe { view.download(&*self.gpu.stream(stream)?) }
        });
        Ok(tensor.map_err(raised)?.to_f64().into_iter().map(|number| number as i64).collect())
    }

    /// The package's own array for another library, which may read it in any stream.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<isize>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // All work on it has ended.
        let _ = stream;
        let Owner::This(memory) = &self.owner else {
            return Err(PyBufferError::new_err("the array is another library's"));
        };
        let here = self.__dlpack_device__();
        if copy == Some(true) || dl_device.is_some_and(|wanted| wanted != here) {
            return Err(PyBufferError::new_err("the array is shared where it is, or not at all"));
        }
        let shape: Vec<i64> = self.shape.iter().map(|&n| n as i64).collect();
        let strides: Vec<i64> = self.strides.iter().map(|&n| n as i64).collect();
        let shared = Shared { _memory: Arc::clone(memory), shape, strides };
        match max_version {
            Some((1.., _)) => shared.versioned(py, self),
            _ => shared.unversioned(py, self),
        }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CUDA, self.gpu.ordinal as i32)
    }
}

/// What a managed tensor refers to.
struct Shared {
    _memory: Arc<DeviceTensor>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// A managed tensor, and what it refers to.
#[repr(C)]
struct Exported<M> {
    managed: M,
    shared: Shared,
}

impl Shared {
    fn tensor(&self, of: &GpuArray) -> Tensor {
        let (code, bits) = match of.dtype {
            DType::BF16 => (4, 16),
            other => (2, 8 * other.size() as u8),
        };
        Tensor {
            data: of.address as *mut c_void,
            device_type: dlpack::CUDA,
            device_id: of.gpu.ordinal as i32,
            dimensions: self.shape.len() as i32,
            code,
            bits,
            lanes: 1,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            byte_offset: 0,
        }
    }

    fn unversioned<'py>(self, py: Python<'py>, of: &GpuArray) -> PyResult<Bound<'py, PyAny>> {
        let deleter: Option<Delete> = Some(delete::<Managed>);
        let managed = Managed { tensor: self.tensor(of), manager: null_mut(), deleter };
        capsule(py, Exported { managed, shared: self }, dlpack::NAME)
    }

    fn versioned<'py>(self, py: Python<'py>, of: &GpuArray) -> PyResult<Bound<'py, PyAny>> {
        let managed = Versioned {
            major: 1,
            minor: 0,
            manager: null_mut(),
            deleter: Some(delete::<Versioned>),
            flags: 0,
            tensor: self.tensor(of),
        };
        capsule(py, Exported { managed, shared: self }, dlpack::VERSIONED_NAME)
    }
}

/// A managed tensor's deleter.
///
/// # Safety
///
/// The tensor is an `Exported<M>` in a box of its own, and is not used again.
unsafe extern "C" fn delete<M>(managed: *mut c_void) {
    // SAFETY: the caller's; the managed tensor comes first in it
    drop(unsafe { Box::from_raw(managed.cast::<Exported<M>>()) });
}

/// A DLPack capsule. Its consumer renames it when it takes the tensor.
fn capsule<'py, M>(
    py: Python<'py>,
    exported: Exported<M>,
    name: &'static CStr,
) -> PyResult<Bound<'py, PyAny>> {
    /// Ends a tensor that nobody has taken.
    unsafe extern "C" fn destroy<M>(capsule: *mut pyo3::ffi::PyObject) {
        for name in [dlpack::NAME, dlpack::VERSIONED_NAME] {
            // SAFETY: called by Python as the capsule's destructor; a capsule that still has its
            // first name still owns the tensor
            unsafe {
                if pyo3::ffi::PyCapsule_IsValid(capsule, name.as_ptr()) != 0 {
                    delete::<M>(pyo3::ffi::PyCapsule_GetPointer(capsule, name.as_ptr()));
                }
            }
        }
    }
    let managed = Box::into_raw(Box::new(exported)).cast::<c_void>();
    // SAFETY: the pointer is not null, the name lasts; a new reference or null is an owned one
    let capsule = unsafe {
        let capsule = pyo3::ffi::PyCapsule_New(managed, name.as_ptr(), Some(destroy::<M>));
        Bound::from_owned_ptr_or_err(py, capsule)
    };
    if capsule.is_err() {
        // SAFETY: nobody has it
        unsafe { delete::<M>(managed) };
    }
    capsule
}
