//! An open GPU: its planner, and the streams of its callers.

use gqa_host::driver::{Device, Stream};
use gqa_host::plan::{PlanOptions, Planner};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

pub struct OpenGpu {
    pub ordinal: u32,
    pub device: Device,
    pub planner: Planner,
    /// By their handle; kept, because each may keep a second stream.
    streams: Mutex<HashMap<usize, Arc<Stream>>>,
}

impl OpenGpu {
    /// # Errors
    ///
    /// If there is no such GPU, or an option has a wrong value.
    pub fn open(ordinal: u32) -> gqa_host::Result<Self> {
        let device = Device::open(ordinal)?;
        let planner = device.planner(PlanOptions::from_env()?);
        Ok(Self { ordinal, device, planner, streams: Mutex::default() })
    }

    /// The stream of another owner, by its handle.
    pub fn stream(&self, raw: usize) -> gqa_host::Result<Arc<Stream>> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.get(&raw) {
            return Ok(Arc::clone(stream));
        }
        // SAFETY: the package's functions pass streams that exist as long as the GPU is open, as
        // torch's do
        let stream = Arc::new(unsafe { Stream::from_raw(&self.device, raw as *mut c_void) }?);
        streams.insert(raw, Arc::clone(&stream));
        Ok(stream)
    }
}
