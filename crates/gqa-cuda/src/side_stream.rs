//! A second stream beside a caller's, for launches that those behind them do not wait for.

use super::raw::{self, Failure, report};
use super::sys::{RawEvent, RawStream};

/// A stream of the greatest priority that forks from another one and joins it again. Its blocks
/// take free SMs first: those of the other stream fill what they leave.
pub(super) struct SideStream {
    raw: RawStream,
    /// Where it forks from the other stream, and where it joins it.
    events: [RawEvent; 2],
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for SideStream {}
// SAFETY: as above. Of two threads that fork or join at once each waits for what it has recorded,
// or for more.
unsafe impl Sync for SideStream {}

impl SideStream {
    /// The context must be entered.
    pub(super) fn new() -> Result<Self, Failure> {
        let events = [raw::stream::create_mark()?, raw::stream::create_mark()?];
        Ok(Self { raw: raw::stream::create_urgent()?, events })
    }

    /// The stream, whose next work begins when all work that is in `main` has ended.
    pub(super) fn fork(&self, main: RawStream) -> Result<RawStream, Failure> {
        pass(self.events[0], main, self.raw)?;
        Ok(self.raw)
    }

    /// Lets the next work of `main` wait for the stream's.
    pub(super) fn join(&self, main: RawStream) -> Result<(), Failure> {
        pass(self.events[1], self.raw, main)
    }

    /// Ends it. The context must be entered.
    pub(super) fn destroy(self) {
        // SAFETY: made by `new`; the driver keeps them until their work is done.
        unsafe {
            report(raw::stream::destroy(self.raw));
            self.events.iter().for_each(|&event| report(raw::stream::destroy_event(event)));
        }
    }
}

fn pass(event: RawEvent, from: RawStream, to: RawStream) -> Result<(), Failure> {
    // SAFETY: all three live: their owner is borrowed, and whoever enqueues owns the other stream.
    unsafe {
        raw::stream::record(event, from)?;
        raw::stream::wait_for(event, to)
    }
}
