//! Scratch memory of a plan.

use super::launch::Arg;
use gqa_tensor::{Error, Result};

/// Scratch memory handed out piece by piece.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) bytes: usize,
    /// Counters taken.
    pub(super) counters: usize,
}

impl Scratch {
    /// Pieces start at multiples of this.
    const ALIGNMENT: usize = 256;

    /// `elements` values of `size` bytes.
    pub(super) fn take(&mut self, elements: usize, size: usize) -> Result<Arg> {
        let offset = self.bytes.next_multiple_of(Self::ALIGNMENT);
        let end =
            elements.checked_mul(size).and_then(|bytes| Some((bytes, offset.checked_add(bytes)?)));
        let (bytes, end) = end
            .ok_or_else(|| Error::NoKernel("its workspace exceeds the address space".to_owned()))?;
        self.bytes = end;
        Ok(Arg::Workspace { offset, bytes })
    }

    /// `count` counters, which are zero before and after every call. Only one launch of a call may
    /// use counters.
    pub(super) fn count(&mut self, count: usize) -> Arg {
        self.counters = self.counters.max(count);
        Arg::Counters { count }
    }
}
