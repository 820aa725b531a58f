//! The loop over keys: every warp streams tiles of its own through a ring of its own.
//!
//! Copies are groups K_j, V_j, K_{j+1}, …, and the warp waits for the oldest only:
//!
//! ```text
//! wait for K_j    S = Q K_jᵀ            then start K_{j+STAGES} in its place
//! wait for V_j    softmax, O += P V_j   then start V_{j+STAGES} in its place
//! ```
//!
//! The tile of new rows, where the rank has it, comes behind its last tile of old ones and was never copied.

use super::{Decode, Place};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::DecodeParams;
use crate::simt::{
    Global, Shared, cp_async_commit, cp_async_wait, fma, lane, opaque, sync_warp, warp,
};
use crate::tile::columns::{Columns, accumulate, load_depth, load_queries, scores, weigh};
use crate::tile::copy::{UNIT, wait_for_all_but};
use crate::tile::fragment::row_of;
use crate::tile::rows::{Rows, Span};
use crate::tile::softmax::{ScoreScale, States, mask, total};
use crate::tile::swizzle::{Swizzled, WarpCopy, WarpRead};

/// What a rank attends to.
pub(super) struct Share {
    /// The keys that the row tile sees.
    span: Span,
    /// One past the last key of the cache that may be read.
    old_end: u32,
    /// Tiles of old keys, from the first visible key on, of all ranks together.
    tiles: u32,
    /// Position of the first new key.
    past: u32,
    /// Whether the new rows are this rank's.
    pub has_fresh: bool,
    /// Ranks that share the tiles.
    ranks: u32,
    /// Which of them this is.
    index: u32,
    /// Keys of a tile.
    keys: u32,
}

impl Share {
    /// Every rank's warps take turns, so that all of them together go through the cache side by side; the new rows are the last rank's.
    #[inline(always)]
    pub fn new(p: &DecodeParams, rows: &Rows, place: Place, keys: u32) -> Self {
        let span = rows.span();
        let cached = if p.new_len > 0 { rows.seqlen.past } else { rows.seqlen.total };
        let old_end = span.some.end.min(cached);
        let (ranks, index) = place.among(p);
        Self {
            span,
            old_end,
            tiles: old_end.saturating_sub(span.some.first).div_ceil(keys),
            past: rows.seqlen.past,
            has_fresh: p.new_len > 0 && index + 1 == ranks,
            ranks,
            index,
            keys,
        }
    }

    /// The warp's first tile.
    #[inline(always)]
    fn start(&self) -> u32 {
        warp() * self.ranks + self.index
    }

    /// Position of the first key of a tile.
    #[inline(always)]
    fn begin(&self, tile: u32) -> u32 {
        self.span.some.first + tile * self.keys
    }

    /// From one of the warp's tiles to the next, of `warps` warps.
    #[inline(always)]
    fn step(&self, warps: u32) -> u32 {
        warps * self.ranks
    }

    /// One past the warp's last tile; the tile of new rows is behind those of the last warp.
    #[inline(always)]
    fn end(&self, warps: u32) -> u32 {
        let is_last = self.has_fresh && warp() + 1 == warps;
        self.tiles + if is_last { self.step(warps) } else { 0 }
    }
}

/// The cache rows of one head.
#[derive(Clone, Copy)]
pub(super) struct Cache<T, const D8: usize> {
    k: Global<T>,
    v: Global<T>,
    lanes: WarpCopy<D8>,
}

impl<
    const D8: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
> Decode<D8, M, HALVES, N8, WARPS, STAGES>
{
    /// Whether queries and accumulators leave so few registers that queries stay in shared memory, and lanes find out anew what they otherwise
    /// remember.
    pub(super) const IS_TIGHT: bool = M > 1 || Self::ROWS * D8 as u32 > 384;
    /// f32 from one row of accumulators to the next: padded against bank conflicts where the ring has room.
    const ACC_PITCH: u32 = {
        let padded = Self::HEAD_SIZE + UNIT;
        if Self::ROWS * padded * 4 <= Self::RING_BYTES { padded } else { Self::HEAD_SIZE }
    };

    /// Starts the first copies of the warp.
    #[inline(always)]
    pub(super) fn start<T: MmaElement>(
        p: &DecodeParams,
        rows: &Rows,
        share: &Share,
        k: Global<T>,
        v: Global<T>,
    ) -> Cache<T, D8> {
        let a = &p.attention;
        let cache = Cache {
            k: k.offset(a.k.at(rows.batch, rows.kv_head, 0)),
            v: v.offset(a.v.at(rows.batch, rows.kv_head, 0)),
            lanes: WarpCopy::of(lane()),
        };
        for slot in 0..STAGES {
            let tile = share.start() + slot * share.step(WARPS);
            Self::copy(Self::keys(slot), &cache.lanes, cache.k, share, tile);
            Self::copy(Self::values(slot), &cache.lanes, cache.v, share, tile);
        }
        cache
    }

    /// Starts copying a tile, if it is of the rank's share, as a group of its own.
    #[inline(always)]
    fn copy<T: MmaElement>(
        place: Swizzled<T, D8>,
        lanes: &WarpCopy<D8>,
        source: Global<T>,
        share: &Share,
        tile: u32,
    ) {
        if tile < share.tiles {
            let lanes = if Self::IS_TIGHT { &WarpCopy::of(opaque(lane())) } else { lanes };
            let begin = share.begin(tile);
            let source = source.offset(begin as usize * Self::HEAD_SIZE as usize);
            lanes.start(place, Self::KEYS, source, share.old_end - begin);
        }
        cp_async_commit();
    }

    /// The warp's part of the rank's share.
    #[inline(always)]
    pub(super) fn attend<T: MmaElement>(
        p: &DecodeParams,
        rows: &Rows,
        share: &Share,
        cache: Cache<T, D8>,
    ) -> (States<M>, Columns<M, D8>) {
        let a = &p.attention;
        let scale = ScoreScale::new(a.scale, a.softcap);
        let visible_of = |m: usize, r: u32| rows.row(16 * m as u32 + r).visible;
        let visible: [[_; 2]; M] =
            core::array::from_fn(|m| core::array::from_fn(|half| visible_of(m, row_of(half))));
        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]; M], [[[[0.0; 2]; 2]; M]; D8]);
        let read = WarpRead::of_this_lane();
        let queries = if Self::IS_TIGHT {
            [[[0; 2]; M]; D8]
        } else {
            load_queries::<T, M, HALVES, D8>(Self::queries())
        };
        let (mut tile, mut slot) = (share.start(), 0);
        while tile < share.end(WARPS) {
            let is_fresh = tile >= share.tiles;
            let begin = if is_fresh { share.past } else { share.begin(tile) };
            let after = tile + STAGES * share.step(WARPS);

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            let keys = if is_fresh { Self::fresh_keys() } else { Self::keys(slot) };
            let mut weights = if !Self::IS_TIGHT {
                let of_depth = |depth| [queries[2 * depth], queries[2 * depth + 1]];
                scores::<T, M, D8, N8>(of_depth, keys, &read)
            } else {
                let of_depth = |depth| load_depth::<T, M, HALVES, D8>(Self::queries(), depth);
                scores::<T, M, D8, N8>(of_depth, keys, &read)
            };
            sync_warp();
            Self::copy(Self::keys(slot), &cache.lanes, cache.k, share, after);

            scale.adjust(&mut weights);
            let limit = if is_fresh { u32::MAX } else { share.old_end };
            if share.span.is_partial(begin, Self::KEYS) || begin + Self::KEYS > limit {
                mask(&mut weights, begin, |m, half| {
                    let Visible { first, end } = if Self::IS_TIGHT {
                        visible_of(m, opaque(row_of(half)))
                    } else {
                        visible[m][half]
                    };
                    Visible { first, end: end.min(limit) }
                });
            }
            weigh::<M, HALVES, N8, D8>(&mut states, &mut weights, &mut acc, scale);

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            let values = if is_fresh { Self::fresh_values() } else { Self::values(slot) };
            accumulate::<T, M, HALVES, D8, N8>(&mut acc, &weights, values, &read);
            sync_warp();
            Self::copy(Self::values(slot), &cache.lanes, cache.v, share, after);

            tile += share.step(WARPS);
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        sync_warp();
        (states, acc)
    }

    /// New keys, unrotated ones no longer.
    #[inline(always)]
    pub(super) fn fresh_keys<T: MmaElement>() -> Swizzled<T, D8> {
        Swizzled::at(Self::FRESH)
    }

    /// New values.
    #[inline(always)]
    pub(super) fn fresh_values<T: MmaElement>() -> Swizzled<T, D8> {
        Swizzled::at(Self::FRESH + Self::STAGE_BYTES / 2)
    }

    /// The keys of one of the warp's stages.
    #[inline(always)]
    fn keys<T: MmaElement>(slot: u32) -> Swizzled<T, D8> {
        Swizzled::at(Self::ring_of(warp()) + slot * Self::STAGE_BYTES)
    }

    /// The values of one of the warp's stages.
    #[inline(always)]
    fn values<T: MmaElement>(slot: u32) -> Swizzled<T, D8> {
        Swizzled::at(Self::ring_of(warp()) + slot * Self::STAGE_BYTES + Self::STAGE_BYTES / 2)
    }

    /// Where the ring of a warp starts; its accumulators after the loop.
    #[inline(always)]
    fn ring_of(warp: u32) -> u32 {
        Self::RINGS + warp * Self::RING_BYTES
    }

    /// Where a warp leaves the state of a row.
    #[inline(always)]
    fn state_of(warp: u32, r: u32) -> Shared<[f32; 2]> {
        Shared::at(Self::STATES).offset(warp * Self::ROWS + r)
    }

    /// Leaves the warp's result where all can read it.
    #[inline(always)]
    pub(super) fn publish(states: States<M>, acc: &Columns<M, D8>) {
        let acc_rows = Shared::<f32>::at(Self::ring_of(warp()));
        for m in 0..M {
            for half in 0..HALVES {
                let first = 16 * m as u32 + 8 * half as u32;
                let SoftmaxState { max, sum } = total(states[m][half]);
                if lane() % 4 == 0 {
                    Self::state_of(warp(), first + lane() / 4).store(0, [max, sum]);
                }
                for block in 0..D8 {
                    for i in 0..2 {
                        let row = acc_rows.offset((first + lane() % 4 * 2 + i) * Self::ACC_PITCH);
                        row.store(8 * block as u32 + lane() / 4, acc[block][m][half][i as usize]);
                    }
                }
            }
        }
    }

    /// The block's state of row `r`, and the warps' weights in it.
    #[inline(always)]
    pub(super) fn merge_states(r: u32) -> (SoftmaxState, [f32; 16]) {
        let mut state = SoftmaxState::EMPTY;
        let parts: [[f32; 2]; 16] = core::array::from_fn(|w| {
            if (w as u32) < WARPS {
                Self::state_of(w as u32, r).load(0)
            } else {
                [f32::NEG_INFINITY, 0.0]
            }
        });
        for w in 0..WARPS as usize {
            state.raise(parts[w][0]);
        }
        let weights = parts.map(|[max, _]| state.weight(max));
        for w in 0..WARPS as usize {
            state.sum += weights[w] * parts[w][1];
        }
        (state, weights)
    }

    /// What the block accumulated in four columns of row `r`.
    #[inline(always)]
    pub(super) fn merge_columns(r: u32, column: u32, weights: &[f32; 16]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        for w in 0..WARPS {
            let acc = Shared::<f32>::at(Self::ring_of(w)).offset(r * Self::ACC_PITCH + column);
            let columns = acc.load_vec(0);
            for i in 0..4 {
                sums[i] = fma(weights[w as usize], f32::from_bits(columns[i]), sums[i]);
            }
        }
        sums
    }
}
