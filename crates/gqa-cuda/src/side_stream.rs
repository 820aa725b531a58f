//! A second stream beside a caller's, for launches that later launches do not wait for.

use super::raw::{self, Failure, report};
use super::sys::{RawEvent, RawStream};

/// A stream of the greatest priority that forks from the main stream and joins it again. Its CTAs
/// take free SMs first, and CTAs of the main stream fill the rest.
pub(super) struct SideStream {
    raw: RawStream,
    /// Events of the fork and of the join.
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

    /// The stream; its next work begins when all earlier work in `main` has ended.
    pub(super) fn fork(&self, main: RawStream) -> Result<RawStream, Failure> {
        pass(self.events[0], main, self.raw)?;
        Ok(self.raw)
    }

    /// Makes the next work of `main` wait for this stream.
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
    // SAFETY: all three exist: their owner is borrowed, and the caller that enqueues owns `main`.
    unsafe {
        raw::stream::record(event, from)?;
        raw::stream::wait_for(event, to)
    }
}
