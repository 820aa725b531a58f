//! Where a call's rows stand in their sequences.

use crate::{Phase, Problem};
use std::ops::Range;

/// Rows of one batch entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// Keys before this call's; the position of query row 0.
    pub(super) past: usize,
    /// Keys after this call.
    pub(super) total: usize,
}

impl Sequence {
    /// From the entry's seqlens_k. Never more than the cache holds.
    pub(super) fn new(p: &Problem, last: i32) -> Self {
        let total = usize::try_from(i64::from(last) + 1).unwrap_or(0).min(p.capacity);
        let past = if p.phase == Phase::FirstPrompt { 0 } else { total.saturating_sub(p.q_len) };
        Self { past, total }
    }

    /// Rows of the cache that this call does not append.
    pub(super) fn kept(self, p: &Problem) -> usize {
        if p.new_len == 0 { self.total } else { self.past }
    }

    /// Keys that query row `s` sees.
    pub(super) fn visible(self, p: &Problem, s: usize) -> Range<usize> {
        if self.past + s >= self.total {
            return 0..0;
        }
        let end = if p.causal { self.past + s + 1 } else { self.total };
        p.window.map_or(0, |window| end.saturating_sub(window))..end
    }
}
