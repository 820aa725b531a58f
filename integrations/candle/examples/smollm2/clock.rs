//! What a part of a model takes of its time.

#[cfg(feature = "cuda")]
use candle::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, sys::CUevent_flags};
use candle::{Device, Result};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Adds up spans of time: of this machine, or of a GPU's stream, which nothing waits for meanwhile.
pub enum Clock {
    Host(Duration),
    #[cfg(feature = "cuda")]
    Stream(Arc<CudaStream>, Vec<[CudaEvent; 2]>),
}

impl Clock {
    /// That of a device.
    pub fn of(device: &Device) -> Self {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Self::Stream(device.cuda_stream(), Vec::new()),
            _ => Self::Host(Duration::ZERO),
        }
    }

    /// Makes a call, and adds what it takes.
    pub fn span<T>(&mut self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        match self {
            Self::Host(total) => {
                let begun = Instant::now();
                let result = call();
                *total += begun.elapsed();
                result
            }
            #[cfg(feature = "cuda")]
            Self::Stream(stream, spans) => {
                let mark = || {
                    let event = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
                    event.map_err(candle::Error::wrap)
                };
                let begun = mark()?;
                let result = call();
                spans.push([begun, mark()?]);
                result
            }
        }
    }

    /// The sum, from which it begins anew; waits until all is done.
    pub fn take(&mut self) -> Result<Duration> {
        match self {
            Self::Host(total) => Ok(std::mem::take(total)),
            #[cfg(feature = "cuda")]
            Self::Stream(_, spans) => {
                let milliseconds = spans.drain(..).map(|[begun, ended]| begun.elapsed_ms(&ended));
                let total = milliseconds.sum::<std::result::Result<f32, _>>();
                Ok(Duration::from_secs_f32(total.map_err(candle::Error::wrap)? / 1e3))
            }
        }
    }
}
