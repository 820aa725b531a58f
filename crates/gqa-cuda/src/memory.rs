//! Tensors in device memory.

use super::device::Device;
use super::error::{Code, DriverError};
use super::raw::{self, report};
use super::stream::Stream;
use super::views::DeviceView;
use gqa_tensor::{DType, Error, Result, Tensor};

/// An owned tensor in device memory, row-major and contiguous. Freeing it waits for the kernels
/// that use it.
pub struct DeviceTensor {
    device: Device,
    pointer: u64,
    bytes: usize,
    dtype: DType,
    shape: Vec<usize>,
}

impl DeviceTensor {
    /// Allocates; the elements hold anything.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] where the GPU has not enough free memory.
    pub fn new(device: &Device, dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = shape.iter().fold(dtype.size(), |bytes, &n| bytes.saturating_mul(n));
        let pointer = if bytes == 0 { 0 } else { allocate(device, bytes)? };
        Ok(Self { device: device.clone(), pointer, bytes, dtype, shape: shape.to_vec() })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its place, type and shape.
    pub fn view(&self) -> DeviceView<'_> {
        DeviceView::new(self.pointer, self.dtype, &self.shape)
    }

    /// Copies a host tensor of the same type and number of elements and waits until it is there.
    ///
    /// # Errors
    /// Where the tensor has another type or size, or the stream belongs to another device.
    pub fn upload(&self, tensor: &Tensor, stream: &Stream) -> Result<()> {
        let bytes = tensor.bytes();
        if tensor.dtype() != self.dtype || bytes.len() != self.bytes {
            return Err(self.mismatch("upload", tensor));
        }
        self.copied(stream, || {
            // SAFETY: the sizes are equal, and the stream is waited for before the source can go.
            unsafe { raw::memory::copy_to_device(self.pointer, bytes, stream.raw()) }
        })?;
        stream.synchronize()
    }

    /// Fills this tensor with repeated copies of a smaller host tensor of the same type, and waits.
    /// Only the first copy comes from the host; the others stay on the GPU.
    ///
    /// # Errors
    /// Where the tensor has another type or no elements, or more than there is room for, or the
    /// stream belongs to another device.
    pub fn repeat(&self, tensor: &Tensor, stream: &Stream) -> Result<()> {
        let bytes = tensor.bytes();
        if tensor.dtype() != self.dtype || bytes.is_empty() || bytes.len() > self.bytes {
            return Err(self.mismatch("repeat", tensor));
        }
        self.copied(stream, || {
            // SAFETY: the tensor is large enough, and the stream is waited for before the source is
            // freed.
            unsafe { raw::memory::copy_to_device(self.pointer, bytes, stream.raw())? };
            let mut filled = bytes.len();
            while filled < self.bytes {
                let more = filled.min(self.bytes - filled);
                let to = self.pointer + filled as u64;
                // SAFETY: the source range has been written, and the destination range is large
                // enough.
                unsafe { raw::memory::copy(to, self.pointer, more, stream.raw())? };
                filled += more;
            }
            Ok(())
        })?;
        stream.synchronize()
    }

    /// Waits for the stream and copies the tensor to the host.
    ///
    /// # Errors
    /// As [`download_to`](Self::download_to), and where the host has no room.
    pub fn download(&self, stream: &Stream) -> Result<Tensor> {
        let mut tensor = Tensor::try_zeros("download", self.dtype, &self.shape)?;
        self.download_to(&mut tensor, stream)?;
        Ok(tensor)
    }

    /// As [`download`](Self::download), into a tensor of the same type and number of elements.
    ///
    /// # Errors
    /// Where the tensor has another type or size, the stream belongs to another device, or a
    /// kernel ahead in the stream has failed.
    pub fn download_to(&self, tensor: &mut Tensor, stream: &Stream) -> Result<()> {
        if tensor.dtype() != self.dtype || tensor.len() != self.shape.iter().product::<usize>() {
            return Err(self.mismatch("download", tensor));
        }
        tensor.with_bytes_mut(|bytes| {
            self.copied(stream, || {
                // SAFETY: the sizes are equal, and the stream is waited for before anything is
                // read.
                unsafe { raw::memory::copy_to_host(bytes, self.pointer, stream.raw()) }
            })?;
            stream.synchronize()
        })
    }

    /// Copies another tensor of the same size in bytes, in the stream's order; does not wait.
    ///
    /// # Errors
    /// Where the sizes differ, or the other tensor or the stream belongs to another device.
    pub fn copy_from(&self, source: &Self, stream: &Stream) -> Result<()> {
        self.device.expect_same("source", &source.device)?;
        if source.bytes != self.bytes {
            let allowed = format!("{} bytes", self.bytes);
            return Err(Error::invalid("copy", format!("{} bytes", source.bytes), allowed));
        }
        self.copied(stream, || {
            // SAFETY: both have that many bytes and are freed only after the copy, because
            // freeing waits.
            unsafe { raw::memory::copy(self.pointer, source.pointer, self.bytes, stream.raw()) }
        })
    }

    /// Sets every byte, in the stream's order.
    ///
    /// # Errors
    /// Where the stream belongs to another device.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<()> {
        self.copied(stream, || {
            // SAFETY: the memory has that many bytes.
            unsafe { raw::memory::fill(self.pointer, byte, self.bytes, stream.raw()) }
        })
    }

    /// Runs a driver call on the memory, unless the tensor is empty.
    fn copied(
        &self,
        stream: &Stream,
        call: impl FnOnce() -> Result<(), raw::Failure>,
    ) -> Result<()> {
        stream.expect_on(&self.device)?;
        if self.bytes == 0 { Ok(()) } else { stream.with(call) }
    }

    fn mismatch(&self, argument: &'static str, tensor: &Tensor) -> Error {
        let got = format!("{} {:?}", tensor.dtype(), tensor.shape());
        Error::invalid(argument, got, format!("{} {:?}", self.dtype, self.shape))
    }
}

impl Drop for DeviceTensor {
    fn drop(&mut self) {
        if self.pointer == 0 {
            return;
        }
        // SAFETY: allocated by `new` and owned by this tensor alone.
        report(self.device.enter().and_then(|_entered| unsafe { raw::memory::free(self.pointer) }));
    }
}

impl DeviceView<'_> {
    /// Waits for the stream and copies the tensor to the host.
    ///
    /// # Errors
    /// Where it is not contiguous, where the host has no room, and where a kernel ahead in the
    /// stream has failed.
    ///
    /// # Safety
    /// It is memory of the stream's device, of that type and shape.
    pub unsafe fn download(&self, stream: &Stream) -> Result<Tensor> {
        if let Some(strides) = self.strides {
            return Err(Error::invalid("download", format!("{strides:?}"), "what is contiguous"));
        }
        let mut tensor = Tensor::try_zeros("download", self.dtype, self.shape)?;
        if !tensor.is_empty() {
            tensor.with_bytes_mut(|bytes| {
                stream.with(|| {
                    // SAFETY: the caller's; the stream is waited for before anything is read.
                    unsafe { raw::memory::copy_to_host(bytes, self.pointer, stream.raw()) }
                })?;
                stream.synchronize()
            })?;
        }
        Ok(tensor)
    }
}

fn allocate(device: &Device, bytes: usize) -> Result<u64, DriverError> {
    let _entered = device.enter()?;
    raw::memory::allocate(bytes).map_err(|failure| match failure.code {
        Code::OUT_OF_MEMORY => DriverError::OutOfMemory {
            requested: bytes,
            free: raw::memory::free_bytes().unwrap_or_default(),
        },
        _ => failure.into(),
    })
}
