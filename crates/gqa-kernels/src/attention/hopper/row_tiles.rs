//! Numbers the work tiles of all sequences over a paged KV cache consecutively, for one query head.
//! Sequences that another launch attends to have none, so that every number is a work tile.
//!
//! **Windows**: one warp counts the work tiles of 32 neighbouring sequences at a time, one per
//! lane. The window stays in shared memory, to save registers, until a work tile outside of it is
//! needed.

use super::shape::{SEQUENCE_BYTES, Tile};
use crate::concept::pages::Sequence;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::warp::{LANES, sum, sum_up_to};

/// The work tiles of a call, for one warp.
pub(super) struct RowTiles {
    sequences: Sequences,
    /// Shared-memory address of the window.
    window: u32,
}

/// A work tile's sequence, and the number of its row tile within the sequence.
pub(super) struct Found {
    pub(super) batch: u32,
    pub(super) sequence: Sequence,
    pub(super) tile: u32,
}

/// The sequences and work tiles of a window.
#[derive(Clone, Copy)]
struct Span {
    /// Its first sequence.
    first: u32,
    /// Its work tiles are numbers `begin..end`.
    begin: u32,
    end: u32,
}

impl RowTiles {
    /// Counts the work tiles. The window ends with the last ones, which are drawn first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new<S: Tile>(base: u32, sequences: Sequences, p: &AttentionParams) -> Self {
        let tiles = Self { sequences, window: base + S::BYTES };
        let mut span = Span { first: 0, begin: 0, end: 0 };
        for first in Rolled(0..p.batch, LANES) {
            span = tiles.look_at::<S>(first, |_| span.end, p);
        }
        if lane() == 0 {
            st_shared(tiles.window + (LANES + 1) * SEQUENCE_BYTES, span.end);
        }
        sync_warp();
        tiles
    }

    /// Work tiles of all sequences and heads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count(&self, p: &AttentionParams) -> u32 {
        self.count_of_head() * p.q_heads
    }

    /// Work tiles of all sequences for a query head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count_of_head(&self) -> u32 {
        ld_shared(self.window + (LANES + 1) * SEQUENCE_BYTES)
    }

    /// Work tile number `nth`, which must exist.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find<S: Tile>(&self, nth: u32, p: &AttentionParams) -> Found {
        let span = self.move_to::<S>(nth, p);
        let nth = nth - span.begin;
        let (lane, lanes) = (opaque(lane()), (p.batch - span.first).min(LANES));
        let [.., up_to] = self.entry(lane);
        let lane = sum(u32::from(lane < lanes && up_to <= nth), lanes).min(lanes - 1);
        let [start, new, past, up_to] = self.entry(lane);
        let (batch, sequence) = (span.first + lane, Sequence { start, new, past });
        Found { batch, sequence, tile: nth + new.div_ceil(S::ROWS) - up_to }
    }

    /// Moves the window to work tile `nth`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn move_to<S: Tile>(&self, nth: u32, p: &AttentionParams) -> Span {
        let mut span = self.span();
        let is_behind = |span: Span| nth >= span.end && span.first + LANES < p.batch;
        while nth < span.begin || is_behind(span) {
            let Span { first, begin, end } = span;
            let (next, back) = (first + LANES, nth < begin);
            let first = if back { first - LANES } else { next };
            span = self.look_at::<S>(first, |count| if back { begin - count } else { end }, p);
        }
        span
    }

    /// Moves the window to the sequences from `first` on. With so many work tiles in the window,
    /// their numbers start at `begin(count)`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn look_at<S: Tile>(
        &self,
        first: u32,
        begin: impl FnOnce(u32) -> u32,
        p: &AttentionParams,
    ) -> Span {
        // opaque(): otherwise derived values stay live across the loop over work tiles and spill.
        let lane = opaque(lane());
        let none = Sequence { start: 0, new: 0, past: 0 };
        let b = first + lane;
        let sequence = if b < p.batch { self.sequences.get(b, p) } else { none };
        let Sequence { start, new, past } = sequence;
        let up_to = sum_up_to(lane, new.div_ceil(S::ROWS));
        let count = shfl_idx_u32(up_to, LANES - 1);
        let begin = begin(count);
        // All lanes have read the previous window.
        sync_warp();
        st_shared_vec(self.window + lane * SEQUENCE_BYTES, [start, new, past, up_to]);
        if lane == 0 {
            let at = self.window + LANES * SEQUENCE_BYTES;
            st_shared_vec(at, [first, begin, begin + count, 0]);
        }
        sync_warp();
        Span { first, begin, end: begin + count }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn span(&self) -> Span {
        let [first, begin, end, _] = self.entry(LANES);
        Span { first, begin, end }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn entry(&self, lane: u32) -> [u32; 4] {
        ld_shared_vec(self.window + lane * SEQUENCE_BYTES)
    }
}
