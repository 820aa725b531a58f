//! Contexts, streams and device buffers of rust-cuda's cust, as types of this crate (feature
//! `cust`).

use super::device::Device;
use super::error::DriverError;
use super::raw::{self, context::Context};
use super::stream::Stream;
use super::views::DeviceView;
use cust::memory::{DeviceCopy, DeviceSlice};
use gqa_tensor::{DType, Error, Result};
use std::sync::Arc;

impl TryFrom<&cust::context::Context> for Device {
    type Error = DriverError;

    /// The GPU of that context. cust's contexts are primary contexts, so this is what
    /// [`Device::open`] gives.
    fn try_from(context: &cust::context::Context) -> Result<Self, DriverError> {
        raw::start()?;
        // SAFETY: the context lives as long as it is borrowed.
        let ordinal = unsafe { Context::borrow(context.as_raw().cast()) }?.device().unsigned_abs();
        Self::open(ordinal)
    }
}

impl Stream {
    /// A stream of cust's, which lives as long as this value.
    ///
    /// # Errors
    /// Where the stream belongs to another context than the device's.
    pub fn from_cust(device: &Device, stream: Arc<cust::stream::Stream>) -> Result<Self> {
        // SAFETY: the stream is kept with this value.
        let ours = unsafe { Self::from_raw(device, stream.as_inner().cast()) }?;
        Ok(ours.keeping(stream))
    }
}

impl<'a> DeviceView<'a> {
    /// The tensor of that type and shape at the beginning of a slice, or of a buffer, which derefs
    /// to one.
    ///
    /// # Errors
    /// Where the slice is shorter than the tensor.
    pub fn from_cust<T: DeviceCopy>(
        slice: &'a DeviceSlice<T>,
        dtype: DType,
        shape: &'a [usize],
    ) -> Result<Self> {
        let want = shape.iter().fold(dtype.size(), |bytes, &n| bytes.saturating_mul(n));
        let have = slice.len() * size_of::<T>();
        if have < want {
            let allowed = format!("at least {want}, for {dtype} {shape:?}");
            return Err(Error::invalid("slice", format!("{have} bytes"), allowed));
        }
        Ok(Self::new(slice.as_device_ptr().as_raw(), dtype, shape))
    }
}
