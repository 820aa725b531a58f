//! Loops that stay loops.

use super::opaque;
use core::ops::Range;

/// Every n-th number of a range, n being the second field, counted where the compiler does not see
/// it, so that it can neither unroll the loop nor peel it. Code that runs once in a launch is
/// fetched from memory as it runs, and a short loop is there sooner than a long straight line.
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
