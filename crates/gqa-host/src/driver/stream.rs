//! Streams and events.

use super::cust::{self, Failure, RawEvent, RawStream};
use super::device::Device;
use super::error::DriverError;
use crate::Result;

/// An owned stream. Work in it runs in order, and beside that of other streams.
pub struct Stream {
    device: Device,
    raw: RawStream,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    pub fn new(device: &Device) -> Result<Self> {
        let _entered = device.enter().map_err(DriverError::from)?;
        let raw = cust::create_stream().map_err(DriverError::from)?;
        Ok(Self { device: device.clone(), raw })
    }

    /// The driver's handle; valid as long as the stream.
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work in the stream is done. A kernel that failed shows here.
    pub fn synchronize(&self) -> Result<()> {
        self.with(|| {
            // SAFETY: the stream lives.
            unsafe { cust::synchronize(self.raw) }
        })
    }

    /// Seconds that the GPU takes for what `work` puts into the stream; waits for it.
    pub fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(self)?;
        work()?;
        end.record(self)?;
        end.seconds_since(&start)
    }

    /// Runs a driver call with the stream's context.
    pub(super) fn with<T>(&self, call: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
        let result = self.device.enter().and_then(|_entered| call());
        Ok(result.map_err(DriverError::from)?)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver keeps it until its work is done.
        report(self.device.enter().and_then(|_entered| unsafe { cust::destroy_stream(self.raw) }));
    }
}

/// A point in a stream, with its time.
pub struct Event {
    device: Device,
    raw: RawEvent,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is not in a stream yet.
    pub fn new(device: &Device) -> Result<Self> {
        let _entered = device.enter().map_err(DriverError::from)?;
        let raw = cust::create_event().map_err(DriverError::from)?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Puts the event behind all work that is in the stream now.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        stream.with(|| {
            // SAFETY: both live.
            unsafe { cust::record(self.raw, stream.raw) }
        })
    }

    /// Waits for this event; seconds since `start` happened.
    pub fn seconds_since(&self, start: &Self) -> Result<f64> {
        let _entered = self.device.enter().map_err(DriverError::from)?;
        // SAFETY: both live.
        let milliseconds =
            unsafe { cust::milliseconds(start.raw, self.raw) }.map_err(DriverError::from)?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver keeps it until it has happened.
        report(self.device.enter().and_then(|_entered| unsafe { cust::destroy_event(self.raw) }));
    }
}

/// A destructor cannot return its failure.
pub(super) fn report(result: Result<(), Failure>) {
    if let Err(failure) = result {
        tracing::error!("{} failed ({})", failure.call, failure.code);
    }
}
