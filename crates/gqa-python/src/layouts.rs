//! The key of a call on a GPU: types, shapes, strides and devices of its tensors. Asking
//! torch for each of these in Python takes longer than to launch a kernel.

use crate::dlpack::{self, Describe, Tensor};
use pyo3::exceptions::PyAttributeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyTuple, PyType};
use std::mem::MaybeUninit;

/// Reads the layouts of tensors of one type: `torch.Tensor`.
#[pyclass(frozen)]
pub struct Layouts {
    tensor: Py<PyType>,
    describe: Describe,
}

/// The layouts of a call's tensors as bytes, which are equal where these are; and the addresses.
type Read<'py> = (Bound<'py, PyBytes>, Vec<usize>);

#[pymethods]
impl Layouts {
    /// None where the type has no DLPack functions for that, as before torch 2.10.
    #[staticmethod]
    fn of(tensor: Bound<'_, PyType>) -> PyResult<Option<Self>> {
        let capsule = match tensor.getattr("__dlpack_c_exchange_api__") {
            Err(error) if error.is_instance_of::<PyAttributeError>(tensor.py()) => return Ok(None),
            capsule => capsule?.cast_into::<PyCapsule>()?,
        };
        let exchange = capsule.pointer_checked(Some(dlpack::EXCHANGE_NAME))?;
        // SAFETY: capsules of that name have a DLPackExchangeAPI, which lasts as its type does;
        // its version comes first in all of them
        let exchange = unsafe { exchange.cast::<dlpack::Exchange>().as_ref() };
        let describe = exchange.describe.filter(|_| exchange.major == 1);
        Ok(describe.map(|describe| Self { tensor: tensor.unbind(), describe }))
    }

    /// None if an argument is neither None nor a tensor of exactly that type, requires a gradient
    /// while gradients are enabled, or is not 16-byte aligned: Python then checks the call.
    fn read<'py>(
        &self,
        arguments: &Bound<'py, PyTuple>,
        gradients: bool,
    ) -> PyResult<Option<Read<'py>>> {
        let py = arguments.py();
        let (mut layouts, mut addresses) = (Vec::with_capacity(1024), Vec::with_capacity(16));
        for argument in arguments.iter_borrowed() {
            if argument.is_none() {
                layouts.push(0);
                addresses.push(0);
                continue;
            }
            let is_known = argument.get_type().is(self.tensor.bind(py));
            if !is_known
                || gradients && argument.getattr(intern!(py, "requires_grad"))?.is_truthy()?
            {
                return Ok(None);
            }
            let mut tensor = MaybeUninit::<Tensor>::uninit();
            // SAFETY: the object has the type that the function belongs to, and the function fills
            // in the description
            let failed = unsafe { (self.describe)(argument.as_ptr().cast(), tensor.as_mut_ptr()) };
            if failed != 0 {
                // For example a tensor without memory: Python then reports it.
                drop(PyErr::take(py));
                return Ok(None);
            }
            // SAFETY: it was filled in
            let tensor = unsafe { tensor.assume_init_ref() };
            let address = tensor.data as usize + tensor.byte_offset as usize;
            if !address.is_multiple_of(16) {
                return Ok(None);
            }
            // SAFETY: the argument is alive
            unsafe { tensor.push_layout(&mut layouts) };
            addresses.push(address);
        }
        Ok(Some((PyBytes::new(py, &layouts), addresses)))
    }
}

impl Tensor {
    /// Puts into bytes all but where the tensor is: how many dimensions, then what those are.
    ///
    /// # Safety
    ///
    /// Whoever described the tensor must be alive.
    unsafe fn push_layout(&self, to: &mut Vec<u8>) {
        let count = usize::try_from(self.dimensions).unwrap_or_default();
        to.extend([1 + count as u8, self.code, self.bits, u8::from(self.strides.is_null())]);
        to.extend(self.lanes.to_ne_bytes());
        to.extend(self.device_type.to_ne_bytes());
        to.extend(self.device_id.to_ne_bytes());
        for numbers in [self.shape, self.strides].into_iter().filter(|at| !at.is_null()) {
            // SAFETY: DLPack's: as many numbers as there are dimensions
            let numbers = unsafe { std::slice::from_raw_parts(numbers, count) };
            numbers.iter().for_each(|number| to.extend(number.to_ne_bytes()));
        }
    }
}
