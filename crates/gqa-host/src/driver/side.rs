//! Streams beside the caller's, for launches that those behind them do not wait for.

use super::cust::{self, Failure, RawEvent, RawStream};
use super::stream::report;
use std::collections::HashMap;
use std::sync::Arc;

/// A stream of its own for each stream that was asked for one, so that what is captured stays apart from what is not.
#[derive(Default)]
pub(super) struct Sides(HashMap<usize, Arc<Side>>);

impl Sides {
    /// The one beside `stream`. The context must be entered.
    pub(super) fn of(&mut self, stream: RawStream) -> Result<Arc<Side>, Failure> {
        let key = stream as usize;
        if let Some(side) = self.0.get(&key) {
            return Ok(side.clone());
        }
        let side = Arc::new(Side::new()?);
        self.0.insert(key, side.clone());
        Ok(side)
    }
}

/// A stream beside another one. Its blocks take free multiprocessors first: those of the other stream fill what they leave.
pub(super) struct Side {
    stream: RawStream,
    /// Where it leaves the other stream, and where it comes back.
    events: [RawEvent; 2],
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Side {}
// SAFETY: as above. Of two threads that fork or join at once each waits for what it has recorded, or for more.
unsafe impl Sync for Side {}

impl Side {
    fn new() -> Result<Self, Failure> {
        let events = [cust::create_mark()?, cust::create_mark()?];
        Ok(Self { stream: cust::create_urgent_stream()?, events })
    }

    /// The stream, whose next work begins when all work that is in `main` has ended.
    pub(super) fn fork(&self, main: RawStream) -> Result<RawStream, Failure> {
        self.pass(self.events[0], main, self.stream)?;
        Ok(self.stream)
    }

    /// Lets the next work of `main` wait for the stream's.
    pub(super) fn join(&self, main: RawStream) -> Result<(), Failure> {
        self.pass(self.events[1], self.stream, main)
    }

    fn pass(&self, event: RawEvent, from: RawStream, to: RawStream) -> Result<(), Failure> {
        // SAFETY: events and stream live as long as this, the other stream by whoever enqueues.
        unsafe {
            cust::record(event, from)?;
            cust::wait_for(event, to)
        }
    }
}

impl Drop for Side {
    /// The context must be entered.
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver keeps them until their work is done.
        unsafe {
            report(cust::destroy_stream(self.stream));
            self.events.iter().for_each(|&event| report(cust::destroy_event(event)));
        }
    }
}
