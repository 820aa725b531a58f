//! Numbers the row tiles of all sequences over a paged KV cache consecutively. Sequences that
//! another launch attends to have no row tiles here, so that every number is a work tile.
//!
//! One warp counts the row tiles of 32 neighbouring sequences at a time, one per lane: a *window*.
//! The window stays in shared memory, to save registers, until a row tile outside of it is needed.

use super::shape::Tile;
use crate::concept::pages::Sequence;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::pages::Sequences;

/// Sequences of a window.
const LANES: u32 = 32;
/// Bytes of a sequence's entry: its first token, new tokens, past length, and the inclusive prefix
/// sum of row tiles in the window.
const SEQUENCE_BYTES: u32 = 16;
/// Bytes of shared memory: the window's entries, its [`Span`], and the number of all row tiles.
pub(super) const BYTES: u32 = (LANES + 2) * SEQUENCE_BYTES;

/// The row tiles of a call, for one warp.
pub(super) struct RowTiles {
    sequences: Sequences,
    /// Shared-memory address of the window.
    window: u32,
}

/// A row tile's sequence, and its number within the sequence.
pub(super) struct Found {
    pub(super) batch: u32,
    pub(super) sequence: Sequence,
    pub(super) tile: u32,
}

/// The sequences and row tiles of a window.
#[derive(Clone, Copy)]
struct Span {
    /// Its first sequence.
    first: u32,
    /// Its row tiles are numbers `begin..end`.
    begin: u32,
    end: u32,
}

impl RowTiles {
    /// Counts the row tiles. The window ends at the last ones, which are drawn first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new<S: Tile>(base: u32, sequences: Sequences, p: &AttentionParams) -> Self {
        let row_tiles = Self { sequences, window: base + S::BYTES };
        let mut span = Span { first: 0, begin: 0, end: 0 };
        for first in Rolled(0..p.batch, LANES) {
            span = row_tiles.look_at::<S>(first, |_| span.end, p);
        }
        if lane() == 0 {
            st_shared(row_tiles.window + (LANES + 1) * SEQUENCE_BYTES, span.end);
        }
        sync_warp();
        row_tiles
    }

    /// Row tiles of all sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count(&self) -> u32 {
        ld_shared(self.window + (LANES + 1) * SEQUENCE_BYTES)
    }

    /// The sequence of row tile number `tile`, which must exist.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find<S: Tile>(&self, tile: u32, p: &AttentionParams) -> Found {
        let span = self.move_to::<S>(tile, p);
        let nth = tile - span.begin;
        let (lane, lanes) = (opaque(lane()), (p.batch - span.first).min(LANES));
        let [.., up_to] = self.of_lane(lane);
        let lane = sum(u32::from(lane < lanes && up_to <= nth), lanes).min(lanes - 1);
        let [start, new, past, up_to] = self.of_lane(lane);
        let sequence = Sequence { start, new, past };
        Found { batch: span.first + lane, sequence, tile: nth + tiles::<S>(new) - up_to }
    }

    /// Moves the window to row tile `tile`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn move_to<S: Tile>(&self, tile: u32, p: &AttentionParams) -> Span {
        let mut span = self.span();
        let is_behind = |span: Span| tile >= span.end && span.first + LANES < p.batch;
        while tile < span.begin || is_behind(span) {
            let Span { first, begin, end } = span;
            let (next, back) = (first + LANES, tile < begin);
            let first = if back { first - LANES } else { next };
            span = self.look_at::<S>(first, |count| if back { begin - count } else { end }, p);
        }
        span
    }

    /// Moves the window to the sequences from `first` on. With `count` row tiles in the window,
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
        let b = first + lane;
        let none = Sequence { start: 0, new: 0, past: 0 };
        let Sequence { start, new, past } =
            if b < p.batch { self.sequences.get(b, p) } else { none };
        let up_to = sum_up_to(lane, tiles::<S>(new));
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
        let [first, begin, end, _] = self.of_lane(LANES);
        Span { first, begin, end }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_lane(&self, lane: u32) -> [u32; 4] {
        ld_shared_vec(self.window + lane * SEQUENCE_BYTES)
    }
}

/// Row tiles of `tokens` tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tiles<S: Tile>(tokens: u32) -> u32 {
    tokens.div_ceil(S::ROWS)
}

/// Sum over the first `lanes` lanes; the others must hold 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum(mut value: u32, lanes: u32) -> u32 {
    let mut mask = 1;
    while mask < lanes {
        value += shfl_xor_u32(value, mask);
        mask *= 2;
    }
    shfl_idx_u32(value, 0)
}

/// Inclusive prefix sum over the lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_up_to(lane: u32, mut value: u32) -> u32 {
    for log in Rolled(0..LANES.ilog2(), 1) {
        let other = shfl_idx_u32(value, lane.wrapping_sub(1 << log) % LANES);
        value += if lane >> log > 0 { other } else { 0 };
    }
    value
}
