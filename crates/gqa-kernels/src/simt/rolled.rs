//! Loops that the compiler cannot unroll.

use super::opaque;
use core::ops::Range;

/// Every n-th number of a range, n being the second field. The counter is opaque to the compiler,
/// so that it neither unrolls the loop nor peels it. Code that runs once per launch is fetched from
/// memory while it runs, and a short loop arrives sooner than long straight-line code.
pub struct Rolled(pub Range<u32>, pub u32);

impl Iterator for Rolled {
    type Item = u32;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn next(&mut self) -> Option<u32> {
        let Self(Range { start, end }, step) = self;
        (*start < *end).then(|| {
            let next = *start;
            *start = opaque(next + *step);
            next
        })
    }
}
