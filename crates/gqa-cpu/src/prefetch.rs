//! Memory that is asked for before it is read: decode waits for memory, not for arithmetic.
//!
//! While a tile's keys are read its values are asked for, and meanwhile the keys of the next tile:
//! row by row, so that memory is read in its order. Processors would see that order only where rows
//! lie one behind the other and are read once.

use super::row_starts::Starts;
use std::ptr;

/// Rows that are read later.
#[derive(Clone, Copy)]
pub(super) struct Later<'a> {
    first: *const u8,
    /// Elements before each row.
    starts: &'a Starts,
    /// Bytes of an element.
    element: usize,
    /// Bytes of a row.
    row: usize,
}

impl Default for Later<'_> {
    /// No rows.
    fn default() -> Self {
        const NONE: &Starts = &Starts::Strided { first: 0, stride: 0, count: 0 };
        Self { first: ptr::null(), starts: NONE, element: 0, row: 0 }
    }
}

impl<'a> Later<'a> {
    /// Rows of `size` elements that start there.
    pub(super) fn new<E>(elements: &'a [E], starts: &'a Starts, size: usize) -> Self {
        let element = size_of::<E>();
        Self { first: elements.as_ptr().cast(), starts, element, row: size * element }
    }

    /// Asks for a row, if there is one of that number.
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize) {
        const LINE: usize = 64;
        if let Some(start) = self.starts.get(row) {
            let row = self.first.wrapping_add(start * self.element);
            let mut byte = 0;
            while byte < self.row {
                prefetch(row.wrapping_add(byte));
                byte += LINE;
            }
        }
    }
}

/// Rows that are asked for one by one while others are read in several passes.
pub(super) struct Spread<'a> {
    rows: Later<'a>,
    /// Which is next.
    row: usize,
    /// Rows that are read between two.
    every: usize,
}

impl<'a> Spread<'a> {
    /// About as many as are read in each of the passes.
    pub(super) fn new(rows: Later<'a>, passes: usize) -> Self {
        Self { rows, row: 0, every: passes }
    }

    /// Asks for another row before so many rows are read, whose number is returned: at most
    /// `left`. Not an iterator: what it calls would be called, with all sums in memory meanwhile.
    #[inline(always)]
    pub(super) fn ask(&mut self, left: usize) -> usize {
        self.rows.prefetch(self.row);
        self.row += 1;
        self.every.min(left)
    }
}

/// Asks for the memory at an address, whatever is there.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, of which any address is fine; nothing is read
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
