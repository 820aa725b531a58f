//! Streams and events.

use super::device::Device;
use super::raw::{self, Failure, report};
use super::side_stream::SideStream;
use super::sys::{RawEvent, RawStream};
use gqa_tensor::{Error, Result};
use std::ffi::c_void;
use std::sync::OnceLock;

/// A stream, owned or borrowed from another owner. Its work runs in order, concurrently with that
/// of other streams.
pub struct Stream {
    device: Device,
    raw: RawStream,
    owner: Owner,
    /// Created for the first plan with concurrent launches.
    side: OnceLock<SideStream>,
}

/// The owner of a stream.
enum Owner {
    /// This value's, which destroys it.
    This,
    /// Another owner's, which is kept alive here.
    #[cfg(feature = "cust")]
    Kept { _owner: Box<dyn std::any::Any + Send + Sync> },
    /// Another owner's.
    Other,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver's functions on streams are thread-safe.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream, which does not wait for the legacy default stream.
    ///
    /// # Errors
    /// Where the driver cannot make one.
    pub fn new(device: &Device) -> Result<Self> {
        let _entered = device.enter()?;
        let raw = raw::stream::create()?;
        Ok(Self { device: device.clone(), raw, owner: Owner::This, side: OnceLock::new() })
    }

    /// A stream of another owner, from its `CUstream` (which is what `cudaStream_t` is, too); null
    /// is the context's default stream. It is not destroyed with this value.
    ///
    /// A plan with concurrent launches uses a second stream, which this value makes once and
    /// keeps: keep the value as long as the stream is in use instead of making one for each call.
    ///
    /// # Errors
    /// Where the stream belongs to another context than the device's.
    ///
    /// # Safety
    /// The stream exists, and goes on to exist as long as this value. While it is captured, only
    /// such work is put into it whose memory lives as long as the graph.
    pub unsafe fn from_raw(device: &Device, raw: *mut c_void) -> Result<Self> {
        let _entered = device.enter()?;
        // SAFETY: the caller's.
        let context = unsafe { raw::stream::context(raw) }?;
        if context != device.raw_context() {
            return Err(Error::invalid(
                "stream",
                "a stream of another context",
                "a stream of the device's context",
            ));
        }
        Ok(Self { device: device.clone(), raw, owner: Owner::Other, side: OnceLock::new() })
    }

    /// As above, and keeps the stream's owner alive as long as this value.
    #[cfg(feature = "cust")]
    pub(super) fn keeping(mut self, owner: impl std::any::Any + Send + Sync) -> Self {
        self.owner = Owner::Kept { _owner: Box::new(owner) };
        self
    }

    /// The driver's handle, a `CUstream`; valid as long as the stream.
    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    /// The device whose context the stream belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work in the stream is done.
    ///
    /// # Errors
    /// Where a kernel that ran before has failed.
    pub fn synchronize(&self) -> Result<()> {
        self.with(|| {
            // SAFETY: the stream lives.
            unsafe { raw::stream::synchronize(self.raw) }
        })
    }

    /// Whether all work in the stream is done.
    pub(super) fn is_done(&self) -> Result<bool> {
        self.with(|| {
            // SAFETY: the stream lives.
            unsafe { raw::stream::is_done(self.raw) }
        })
    }

    /// Whether what is put into the stream is captured in a graph. Then plans are those of
    /// [`Planner::plan_in_capture`](gqa_plan::plan::Planner::plan_in_capture).
    ///
    /// # Errors
    /// Where the driver cannot tell.
    pub fn is_captured(&self) -> Result<bool> {
        self.with(|| {
            // SAFETY: the stream lives.
            unsafe { raw::stream::is_captured(self.raw) }
        })
    }

    /// Seconds that the GPU takes for the work that `work` enqueues; waits for it.
    ///
    /// # Errors
    /// Those of `work`, and where a kernel has failed.
    pub fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let (start, end) = (Event::new(&self.device)?, Event::new(&self.device)?);
        start.record(self)?;
        work()?;
        end.record(self)?;
        end.seconds_since(&start)
    }

    /// Runs a driver call in the stream's context.
    pub(super) fn with<T>(&self, call: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
        let _entered = self.device.enter()?;
        Ok(call()?)
    }

    /// Errs unless the stream is one of `device`.
    pub(super) fn expect_on(&self, device: &Device) -> Result<()> {
        device.expect_same("stream", &self.device)
    }

    /// The stream for concurrent launches. The context must be entered.
    pub(super) fn side(&self) -> Result<&SideStream, Failure> {
        if self.side.get().is_none()
            && let Err(unneeded) = self.side.set(SideStream::new()?)
        {
            unneeded.destroy();
        }
        Ok(self.side.get().expect("it was just set"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (side, owned) = (self.side.take(), matches!(self.owner, Owner::This));
        if !owned && side.is_none() {
            return;
        }
        report(self.device.enter().and_then(|_entered| {
            side.into_iter().for_each(SideStream::destroy);
            // SAFETY: created by `new`; the driver keeps it until its work is done.
            if owned { unsafe { raw::stream::destroy(self.raw) } } else { Ok(()) }
        }));
    }
}

/// A point in a stream, with its time.
pub struct Event {
    device: Device,
    raw: RawEvent,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver's functions on events are thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is not in a stream yet.
    ///
    /// # Errors
    /// Where the driver cannot make one.
    pub fn new(device: &Device) -> Result<Self> {
        let _entered = device.enter()?;
        let raw = raw::stream::create_event()?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Records the event behind all work that is in the stream now.
    ///
    /// # Errors
    /// Where the stream belongs to another device.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        stream.expect_on(&self.device)?;
        stream.with(|| {
            // SAFETY: both live.
            unsafe { raw::stream::record(self.raw, stream.raw) }
        })
    }

    /// Waits for this event; seconds since `start` happened.
    ///
    /// # Errors
    /// Where one of them was never recorded, or a kernel ahead of it has failed.
    pub fn seconds_since(&self, start: &Self) -> Result<f64> {
        self.device.expect_same("start", &start.device)?;
        let _entered = self.device.enter()?;
        // SAFETY: both live.
        let milliseconds = unsafe { raw::stream::milliseconds(start.raw, self.raw) }?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        report(self.device.enter().and_then(|_entered| {
            // SAFETY: created by `new`; the driver keeps it until it has happened.
            unsafe { raw::stream::destroy_event(self.raw) }
        }));
    }
}
