//! Where a call's rows stand in their sequences.

use gqa_plan::{Alignment, Phase, Problem};
use std::ops::Range;

/// Rows of one batch entry, or of one sequence of those that lie one behind the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// Where its query rows begin: a batch entry of query, and a row of that.
    pub(super) first: [usize; 2],
    /// Query rows.
    pub(super) rows: usize,
    /// Position of query row 0: before key 0 where there are more rows than keys.
    pub(super) position: i64,
    /// Keys after this call.
    pub(super) total: usize,
}

impl Sequence {
    /// Of batch entry `b`, from its seqlens_k. Never more than the cache holds.
    pub(super) fn new(p: &Problem, b: usize, last: i32) -> Self {
        let total = usize::try_from(i64::from(last) + 1).unwrap_or(0).min(p.capacity);
        let position = match (p.alignment, p.phase) {
            (Alignment::Past(past), _) => past as i64,
            (Alignment::Phase, Phase::FirstPrompt) => 0,
            _ => total as i64 - p.q_len as i64,
        };
        Self { first: [b, 0], rows: p.q_len, position, total }
    }

    /// Where its query rows end: a batch entry, and the row of that behind the last.
    pub(super) fn end(self) -> [usize; 2] {
        let [b, first] = self.first;
        [b, first + self.rows]
    }

    /// Rows of the cache that this call does not append.
    pub(super) fn kept(self, p: &Problem) -> usize {
        if p.new_len == 0 { self.total } else { self.position.max(0) as usize }
    }

    /// Keys that query row `s` sees; one of a tree that stands before key 0 sees none.
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
