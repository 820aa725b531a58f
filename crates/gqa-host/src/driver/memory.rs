//! Tensors in device memory.

use super::cust;
use super::device::Device;
use super::enqueue::DeviceView;
use super::error::{Code, DriverError};
use super::stream::Stream;
use crate::{DType, Error, Result, Tensor};

/// An owned tensor in device memory, row-major and contiguous. Freeing it waits for the kernels that use it.
pub struct DeviceTensor {
    device: Device,
    pointer: u64,
    dtype: DType,
    shape: Vec<usize>,
}

impl DeviceTensor {
    /// Allocates; the elements hold anything.
    pub fn new(device: &Device, dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let pointer = if bytes == 0 { 0 } else { allocate(device, bytes)? };
        Ok(Self { device: device.clone(), pointer, dtype, shape: shape.to_vec() })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// Its place, type and shape.
    pub fn view(&self) -> DeviceView<'_> {
        DeviceView { pointer: self.pointer, dtype: self.dtype, shape: &self.shape }
    }

    /// Copies a host tensor of the same type and number of elements and waits until it is there.
    pub fn upload(&self, tensor: &Tensor, stream: &Stream) -> Result<()> {
        let elements = self.shape.iter().product::<usize>();
        if tensor.dtype() != self.dtype || tensor.len() != elements {
            let got = format!("{} {:?}", tensor.dtype(), tensor.shape());
            return Err(Error::invalid("upload", got, format!("{} {:?}", self.dtype, self.shape)));
        }
        if !tensor.is_empty() {
            let _entered = self.device.enter().map_err(DriverError::from)?;
            // SAFETY: the sizes are equal, and the stream is waited for before the source can go.
            unsafe { cust::copy_to_device(self.pointer, tensor.bytes(), stream.raw()) }
                .map_err(DriverError::from)?;
        }
        stream.synchronize()
    }

    /// Waits for the stream and copies the tensor to the host.
    pub fn download(&self, stream: &Stream) -> Result<Tensor> {
        let mut tensor = Tensor::try_zeros("download", self.dtype, &self.shape)?;
        self.download_to(&mut tensor, stream)?;
        Ok(tensor)
    }

    /// As [`download`](Self::download), into a tensor of the same type and shape.
    pub fn download_to(&self, tensor: &mut Tensor, stream: &Stream) -> Result<()> {
        if tensor.dtype() != self.dtype || tensor.shape() != self.shape {
            let got = format!("{} {:?}", tensor.dtype(), tensor.shape());
            return Err(Error::invalid(
                "download",
                got,
                format!("{} {:?}", self.dtype, self.shape),
            ));
        }
        if !tensor.is_empty() {
            let _entered = self.device.enter().map_err(DriverError::from)?;
            // SAFETY: the sizes are equal, and the stream is waited for before the destination is read.
            unsafe { cust::copy_to_host(tensor.bytes_mut(), self.pointer, stream.raw()) }
                .map_err(DriverError::from)?;
        }
        stream.synchronize()
    }

    /// Copies another tensor of the same size in bytes, in the stream's order; does not wait.
    pub fn copy_from(&self, source: &Self, stream: &Stream) -> Result<()> {
        if source.bytes() != self.bytes() {
            let allowed = format!("{} bytes", self.bytes());
            return Err(Error::invalid("copy", format!("{} bytes", source.bytes()), allowed));
        }
        if self.bytes() > 0 {
            let _entered = self.device.enter().map_err(DriverError::from)?;
            // SAFETY: both have that many bytes and are freed only after the copy, because freeing waits.
            unsafe { cust::copy(self.pointer, source.pointer, self.bytes(), stream.raw()) }
                .map_err(DriverError::from)?;
        }
        Ok(())
    }

    /// Sets every byte, in the stream's order.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<()> {
        if self.bytes() > 0 {
            let _entered = self.device.enter().map_err(DriverError::from)?;
            // SAFETY: the memory has that many bytes.
            unsafe { cust::fill(self.pointer, byte, self.bytes(), stream.raw()) }
                .map_err(DriverError::from)?;
        }
        Ok(())
    }
}

impl Drop for DeviceTensor {
    fn drop(&mut self) {
        if self.pointer == 0 {
            return;
        }
        // SAFETY: allocated by `new` and owned by this tensor alone.
        let freed = self.device.enter().and_then(|_entered| unsafe { cust::free(self.pointer) });
        if let Err(failure) = freed {
            tracing::error!("{} failed ({})", failure.call, failure.code);
        }
    }
}

fn allocate(device: &Device, bytes: usize) -> Result<u64, DriverError> {
    let _entered = device.enter()?;
    cust::allocate(bytes).map_err(|failure| match failure.code {
        Code::OUT_OF_MEMORY => DriverError::OutOfMemory {
            requested: bytes,
            free: cust::free_memory().unwrap_or_default(),
        },
        _ => failure.into(),
    })
}
