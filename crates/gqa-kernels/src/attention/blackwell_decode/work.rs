//! The rows of a cluster, and the keys of each of its CTAs.

use super::layout::KEYS;
use crate::attention::decode::Layout as Sequences;
use crate::concept::mask::Visible;
use crate::params::DecodeParams;
use crate::simt::{block_idx_y, block_idx_z, cluster_rank, cluster_size};
use crate::tile::rows::{Rows, Span};
use crate::tile::seqlens::Seqlens;
use core::ops::Range;

/// What a CTA works on.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) rows: Rows,
    pub(super) span: Span,
    /// Position of its first key, and how many tiles follow.
    pub(super) begin: u32,
    pub(super) tiles: u32,
    /// CTAs of the cluster, and the number of this one.
    pub(super) ranks: u32,
    pub(super) rank: u32,
    /// Ranks that have keys: the first ones.
    pub(super) active: u32,
    /// Rows that each rank merges; the last ones have fewer.
    pub(super) merged: u32,
}

impl Work {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(sequences: Sequences, seqlens: Seqlens, p: &DecodeParams) -> Self {
        let a = &p.attention;
        // A call has sequences: max(1) spares the division by zero check.
        let batches = a.batch.max(1);
        let batch = block_idx_z() % batches;
        let rows = Rows::of(a, block_idx_z() / batches, block_idx_y(), batch, p.rows);
        let mut rows = sequences.rows(a, rows);
        rows.seqlen = sequences.seqlen(a, &rows, seqlens.load(batch, a.q_len));
        let nothing = Visible { first: 0, end: 0 };
        let nothing = Span { some: nothing, all: nothing };
        let span = if rows.count() > 0 { rows.span() } else { nothing };
        let (ranks, rank) = (cluster_size(), cluster_rank());
        let first = span.some.first / KEYS * KEYS;
        let whole = Span { some: Visible { first, ..span.some }, ..span };
        let Range { start, end } = whole.share(KEYS, rank, ranks);
        let all = whole.share(KEYS, 0, 1).end;
        Self {
            rows,
            span,
            begin: first + start * KEYS,
            tiles: end - start,
            ranks,
            rank,
            active: all.min(ranks),
            merged: rows.count().div_ceil(ranks.max(1)),
        }
    }

    /// The rows that this rank merges.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn own_rows(&self) -> Range<u32> {
        let (first, count) = (self.rank * self.merged, self.rows.count());
        first.min(count)..(first + self.merged).min(count)
    }
}
