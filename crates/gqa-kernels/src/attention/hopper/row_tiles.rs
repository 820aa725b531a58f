//! The row tiles of sequences over a paged KV cache, numbered one behind the other. Sequences that
//! are another launch's have none, so that no number is without work, however few are this one's.
//!
//! A warp counts them, 32 neighbouring sequences at a time, a lane each: a *window*. It stays in
//! shared memory, for want of registers, until a number leads out of it.

use super::shape::Tile;
use crate::concept::pages::Sequence;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::pages::Sequences;

/// Sequences of a window.
const LANES: u32 = 32;
/// Bytes of one of them: first token, tokens, rows before them, row tiles of the window up to it.
const SEQUENCE_BYTES: u32 = 16;
/// Bytes of shared memory: the window's sequences, its [`Span`], and how many row tiles there are.
pub(super) const BYTES: u32 = (LANES + 2) * SEQUENCE_BYTES;

/// Row tiles as a warp sees them.
pub(super) struct RowTiles {
    sequences: Sequences,
    /// Where the window is.
    window: u32,
}

/// A row tile's sequence, and its number there.
pub(super) struct Found {
    pub(super) batch: u32,
    pub(super) sequence: Sequence,
    pub(super) tile: u32,
}

/// Of a window.
#[derive(Clone, Copy)]
struct Span {
    /// Its first sequence.
    first: u32,
    /// Numbers of its row tiles.
    begin: u32,
    end: u32,
}

impl RowTiles {
    /// Counts them. The last ones, which are drawn first, are in the window then.
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

    /// Those of all sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count(&self) -> u32 {
        ld_shared(self.window + (LANES + 1) * SEQUENCE_BYTES)
    }

    /// Whose row tile number `tile` is, of those that there are.
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

    /// Moves the window to that row tile.
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

    /// The window from sequence `first` on, whose row tiles, `count` of them, have numbers from
    /// `begin(count)` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn look_at<S: Tile>(
        &self,
        first: u32,
        begin: impl FnOnce(u32) -> u32,
        p: &AttentionParams,
    ) -> Span {
        // Opaque, or what follows from it would be kept over the loop over work, and spilled.
        let lane = opaque(lane());
        let b = first + lane;
        let none = Sequence { start: 0, new: 0, past: 0 };
        let Sequence { start, new, past } =
            if b < p.batch { self.sequences.get(b, p) } else { none };
        let up_to = sum_up_to(lane, tiles::<S>(new));
        let count = shfl_idx_u32(up_to, LANES - 1);
        let begin = begin(count);
        // All lanes have read what was there.
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

/// Row tiles of so many tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tiles<S: Tile>(tokens: u32) -> u32 {
    tokens.div_ceil(S::ROWS)
}

/// The sum over the first `lanes` lanes; others have 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum(mut value: u32, lanes: u32) -> u32 {
    let mut mask = 1;
    while mask < lanes {
        value += shfl_xor_u32(value, mask);
        mask *= 2;
    }
    shfl_idx_u32(value, 0)
}

/// The sum over the lanes up to this one.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_up_to(lane: u32, mut value: u32) -> u32 {
    for log in Rolled(0..LANES.ilog2(), 1) {
        let other = shfl_idx_u32(value, lane.wrapping_sub(1 << log) % LANES);
        value += if lane >> log > 0 { other } else { 0 };
    }
    value
}
