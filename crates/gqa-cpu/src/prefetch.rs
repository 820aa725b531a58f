//! Software prefetch of keys and values: decode is bound by memory.
//!
//! While the keys of a tile are read, its values are prefetched, and meanwhile the keys of the next
//! tile: row by row, in the order of memory. Hardware prefetchers see that order only where rows
//! are contiguous and read once.

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

    /// Prefetches a row, if the row exists.
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

/// Prefetches rows one by one while other rows are read in several passes.
pub(super) struct Spread<'a> {
    rows: Later<'a>,
    /// Which is next.
    row: usize,
    /// Rows that are read between two.
    every: usize,
}

impl<'a> Spread<'a> {
    /// Spreads the prefetches evenly over the passes.
    pub(super) fn new(rows: Later<'a>, passes: usize) -> Self {
        Self { rows, row: 0, every: passes }
    }

    /// Prefetches another row. Returns how many rows to read before the next call: at most `left`.
    /// Not an iterator: calls would not be inlined, and all sums would spill.
    #[inline(always)]
    pub(super) fn ask(&mut self, left: usize) -> usize {
        self.rows.prefetch(self.row);
        self.row += 1;
        self.every.min(left)
    }
}

/// Prefetches the cache line at an address, which may be invalid.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetch is a hint; any address is allowed, and nothing is read
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
