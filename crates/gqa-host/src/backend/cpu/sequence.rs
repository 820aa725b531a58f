//! Positions of a call's rows in their sequences.

use gqa_plan::contents::Lengths;
use gqa_plan::{Alignment, Phase, Problem};
use std::ops::Range;

/// The rows of a batch entry, or of one of several concatenated sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// The first query row: a batch entry of query, and a row of that.
    pub(super) first: [usize; 2],
    /// Query rows.
    pub(super) rows: usize,
    /// Position of query row 0; negative if there are more rows than keys.
    pub(super) position: i64,
    /// Keys after this call.
    pub(super) total: usize,
}

impl Sequence {
    /// The rows of batch entry `b`. Keys are at most the capacity of the cache.
    pub(super) fn new(p: &Problem, b: usize, lengths: Lengths) -> Self {
        let total = usize::try_from(i64::from(lengths.last) + 1).unwrap_or(0).min(p.capacity);
        let position = match (p.alignment, p.phase) {
            (Alignment::Past(past), _) => past as i64,
            (Alignment::Phase, Phase::FirstPrompt) => 0,
            _ => total as i64 - lengths.rows as i64,
        };
        Self { first: [b, 0], rows: p.q_len, position, total }
    }

    /// The end of the query rows: a batch entry, and the row after the last.
    pub(super) fn end(self) -> [usize; 2] {
        let [b, first] = self.first;
        [b, first + self.rows]
    }

    /// Cache rows that precede this call.
    pub(super) fn kept(self, p: &Problem) -> usize {
        if p.new_len == 0 { self.total } else { self.position.max(0) as usize }
    }

    /// Keys that query row `s` attends to; a row before key 0 attends to none.
    pub(super) fn visible(self, p: &Problem, s: usize) -> Range<usize> {
        let (position, total) = (self.position + s as i64, self.total as i64);
        let is_padding = p.alignment == Alignment::Phase && position >= total;
        if is_padding || p.tree_mask && position < 0 {
            return 0..0;
        }
        let next = position + 1;
        let limit = p.bias.map_or(total, |bias| total.min(bias.columns as i64));
        let right = if p.causal { Some(0) } else { p.right_window };
        let end =
            right.map_or(limit, |right| next.saturating_add_unsigned(right as u64).min(limit));
        let first = p.window.map_or(0, |window| next.saturating_sub_unsigned(window as u64).max(0));
        if first < end { first as usize..end as usize } else { 0..0 }
    }
}
