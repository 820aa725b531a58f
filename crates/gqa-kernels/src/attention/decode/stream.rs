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

use super::cached::{Cached, first_channel};
use super::{Decode, Place};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::params::{AttentionParams, DecodeParams};
use crate::simt::{
    Global, Shared, cp_async_commit, cp_async_wait, fma, lane, opaque, sync_warp, warp,
};
use crate::tile::columns::{Columns, load_depth, load_queries, weigh};
use crate::tile::copy::{UNIT, wait_for_all_but};
use crate::tile::fragment::row_of;
use crate::tile::rows::{Rows, Span};
use crate::tile::softmax::{ScoreScale, States, mask, total};
use crate::tile::swizzle::{Swizzled, WarpCopy, WarpRead};
use bytemuck::Pod;

/// What a rank attends to.
pub(super) struct Share {
    /// The keys that the row tile sees; in a cache of blocks from the first key of a tile on.
    pub span: Span,
    /// One past the last key of the cache that may be read.
    pub old_end: u32,
    /// Tiles of old keys, from the first visible key on, of all ranks together.
    pub tiles: u32,
    /// Position of the first new key.
    pub past: u32,
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
    pub fn new(p: &DecodeParams, rows: &Rows, place: Place, keys: u32, in_blocks: bool) -> Self {
        let mut span = rows.span();
        if in_blocks {
            span.some.first = span.some.first / keys * keys;
        }
        let cached = if p.new_len > 0 { rows.seqlen.past } else { rows.seqlen.total };
        let old_end = span.some.end.min(cached);
        let (ranks, index) = place.among(p);
        Self {
            span,
            old_end,
            tiles: old_end.saturating_sub(span.some.first).div_ceil(keys),
            past: rows.seqlen.past,
            has_fresh: place.has_fresh(p),
            ranks,
            index,
            keys,
        }
    }

    /// A team's first tile.
    #[inline(always)]
    pub fn start(&self, team: u32) -> u32 {
        team * self.ranks + self.index
    }

    /// Position of the first key of a tile.
    #[inline(always)]
    pub fn begin(&self, tile: u32) -> u32 {
        self.span.some.first + tile * self.keys
    }

    /// From one of a team's tiles to the next, of `teams` teams.
    #[inline(always)]
    pub fn step(&self, teams: u32) -> u32 {
        teams * self.ranks
    }

    /// One past the team's last tile; the tile of new rows is behind those of the last team.
    #[inline(always)]
    pub fn end(&self, team: u32, teams: u32) -> u32 {
        let is_last = self.has_fresh && team + 1 == teams;
        self.tiles + if is_last { self.step(teams) } else { 0 }
    }
}

/// The cache rows of one head.
#[derive(Clone, Copy)]
pub(super) struct Cache<C: Cached, const UNITS: usize> {
    pub k: Global<C::Cell>,
    pub v: Global<C::Cell>,
    pub lanes: WarpCopy<UNITS>,
    pub places: C::Places,
}

impl<C: Cached, const UNITS: usize> Cache<C, UNITS> {
    /// Those of the row tile's head; where lanes copy to is found out later.
    #[inline(always)]
    pub fn of(
        a: &AttentionParams,
        rows: &Rows,
        k: Global<C::Cell>,
        v: Global<C::Cell>,
        scales: C::Scales,
    ) -> Self {
        Self {
            k: k.offset(a.k.at(rows.batch, rows.kv_head, 0)),
            v: v.offset(a.v.at(rows.batch, rows.kv_head, 0)),
            lanes: WarpCopy::default(),
            places: C::places(scales, a.k, rows),
        }
    }
}

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES>
{
    /// Whether queries and accumulators leave so few registers that queries stay in shared memory, and lanes find out anew what they otherwise
    /// remember.
    pub(super) const IS_TIGHT: bool = M == 2 || Self::ROWS * D8 as u32 > 384 && M == 1;
    /// Warps that share a tile of keys: one, or those of a warpgroup, which multiplies 64 rows at once.
    pub(super) const TEAM: u32 = if Self::BY_WARPGROUPS { 4 } else { 1 };
    /// Teams of a block.
    pub(super) const TEAMS: u32 = WARPS / Self::TEAM;
    /// f32 from one row of accumulators to the next: padded against bank conflicts where the ring has room.
    pub(super) const ACC_PITCH: u32 = {
        let padded = Self::HEAD_SIZE + UNIT;
        if Self::ROWS * padded * 4 <= Self::RING_BYTES { padded } else { Self::HEAD_SIZE }
    };

    /// Where lanes copy to.
    #[inline(always)]
    pub(super) fn lanes<C: Cached>() -> WarpCopy<UNITS> {
        WarpCopy::of(lane(), Self::keys::<C::Cell>(0))
    }

    /// Starts copying the team's first keys before it is known how many there are: those that turn out not to exist are masked as all that no
    /// query sees. The copies belong to the next group.
    #[inline(always)]
    pub(super) fn start_ahead<C: Cached>(p: &DecodeParams, place: Place, cache: &Cache<C, UNITS>) {
        let (ranks, index) = place.among(p);
        let begin = (Self::team() * ranks + index) * Self::KEYS;
        let end = p.attention.capacity;
        Self::copy_rows::<C>(Self::keys(0), cache.places, &cache.lanes, cache.k, begin, end);
    }

    /// Keys that ranks ask for ahead of their time, of all together.
    #[inline(always)]
    pub(super) fn keys_ahead(p: &DecodeParams, place: Place) -> u32 {
        if p.ahead != 0 { place.among(p).0 * Self::TEAMS * Self::KEYS } else { 0 }
    }

    /// Starts the first copies of the warp; `ahead` if its first keys are on their way.
    #[inline(always)]
    pub(super) fn start<C: Cached>(share: &Share, cache: &Cache<C, UNITS>, ahead: bool) {
        for slot in 0..STAGES {
            let tile = share.start(Self::team()) + slot * share.step(Self::TEAMS);
            if slot == 0 && ahead {
                cp_async_commit();
            } else {
                Self::copy::<C>(Self::keys(slot), cache.places, &cache.lanes, cache.k, share, tile);
            }
            Self::copy::<C>(Self::values(slot), cache.places, &cache.lanes, cache.v, share, tile);
        }
    }

    /// Starts copying a tile, if it is of the rank's share, as a group of its own.
    #[inline(always)]
    pub(super) fn copy<C: Cached>(
        place: Swizzled<C::Cell, UNITS>,
        places: C::Places,
        lanes: &WarpCopy<UNITS>,
        source: Global<C::Cell>,
        share: &Share,
        tile: u32,
    ) {
        if tile < share.tiles {
            let (begin, end) = (share.begin(tile), share.old_end);
            Self::copy_rows::<C>(place, places, lanes, source, begin, end);
        }
        cp_async_commit();
    }

    /// Starts copying the warp's part of the tile whose first row is row `begin` of `source`; rows from `end` on become zero.
    #[inline(always)]
    fn copy_rows<C: Cached>(
        place: Swizzled<C::Cell, UNITS>,
        places: C::Places,
        lanes: &WarpCopy<UNITS>,
        source: Global<C::Cell>,
        begin: u32,
        end: u32,
    ) {
        let lanes = if Self::IS_TIGHT { &WarpCopy::of(opaque(lane()), place) } else { lanes };
        let rows = Self::KEYS / Self::TEAM;
        let first = warp() % Self::TEAM * rows;
        let begin = begin + first;
        let source = C::row::<UNITS>(places, source, begin);
        let valid = end.saturating_sub(begin);
        C::start(places, lanes, place.from(first), rows, source, valid);
    }

    /// The warp's part of the rank's share; a product with the prepared queries is to be multiplied by `unit`.
    #[inline(always)]
    pub(super) fn attend<C: Cached>(
        p: &DecodeParams,
        rows: &Rows,
        share: &Share,
        cache: Cache<C, UNITS>,
        unit: f32,
    ) -> (States<M>, Columns<M, D8>) {
        let a = &p.attention;
        let scale = ScoreScale::new(a.scale * unit, a.softcap);
        let visible_of = |m: usize, r: u32| rows.row(16 * m as u32 + r).visible;
        let visible: [[_; 2]; M] =
            core::array::from_fn(|m| core::array::from_fn(|half| visible_of(m, row_of(half))));
        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]; M], [[[[0.0; 2]; 2]; M]; D8]);
        let read = WarpRead::of_this_lane();
        let queries = if Self::IS_TIGHT {
            [[[0; 2]; M]; D8]
        } else {
            load_queries::<C::Operand, M, HALVES, D8>(Self::queries())
        };
        let (mut tile, mut slot) = (share.start(Self::team()), 0);
        while tile < share.end(Self::team(), Self::TEAMS) {
            let is_fresh = tile >= share.tiles;
            let begin = if is_fresh { share.past } else { share.begin(tile) };
            let after = tile + STAGES * share.step(Self::TEAMS);

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            let keys = if is_fresh { Self::fresh_keys() } else { Self::keys(slot) };
            let mut weights = if !Self::IS_TIGHT {
                let of_depth = |depth| [queries[2 * depth], queries[2 * depth + 1]];
                C::scores::<M, UNITS, N8>(of_depth, keys, &read)
            } else {
                let of_depth =
                    |depth| load_depth::<C::Operand, M, HALVES, D8>(Self::queries(), depth);
                C::scores::<M, UNITS, N8>(of_depth, keys, &read)
            };
            sync_warp();
            Self::copy::<C>(Self::keys(slot), cache.places, &cache.lanes, cache.k, share, after);

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
            let read = if Self::IS_TIGHT { WarpRead::of(opaque(lane())) } else { read };
            C::accumulate::<M, HALVES, D8, UNITS, N8>(&mut acc, &weights, values, &read);
            sync_warp();
            Self::copy::<C>(Self::values(slot), cache.places, &cache.lanes, cache.v, share, after);

            tile += share.step(Self::TEAMS);
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        sync_warp();
        (states, acc)
    }

    /// New keys, unrotated ones no longer.
    #[inline(always)]
    pub(super) fn fresh_keys<E: Pod>() -> Swizzled<E, UNITS> {
        Self::tile(Self::FRESH, Self::KEYS)
    }

    /// New values.
    #[inline(always)]
    pub(super) fn fresh_values<E: Pod>() -> Swizzled<E, UNITS> {
        Self::tile(Self::FRESH + Self::STAGE_BYTES / 2, Self::KEYS)
    }

    /// The keys of one of the team's stages.
    #[inline(always)]
    pub(super) fn keys<E: Pod>(slot: u32) -> Swizzled<E, UNITS> {
        Self::tile(Self::ring_of(Self::team()) + slot * Self::STAGE_BYTES, Self::KEYS)
    }

    /// The values of one of the team's stages.
    #[inline(always)]
    pub(super) fn values<E: Pod>(slot: u32) -> Swizzled<E, UNITS> {
        let half = Self::STAGE_BYTES / 2;
        Self::tile(Self::ring_of(Self::team()) + slot * Self::STAGE_BYTES + half, Self::KEYS)
    }

    /// A tile of rows of `W` units, as the products read it.
    #[inline(always)]
    pub(super) fn tile<E: Pod, const W: usize>(bytes: u32, rows: u32) -> Swizzled<E, W> {
        if Self::BY_WARPGROUPS { Swizzled::in_chunks_at(bytes, rows) } else { Swizzled::at(bytes) }
    }

    /// This thread's team.
    #[inline(always)]
    pub(super) fn team() -> u32 {
        warp() / Self::TEAM
    }

    /// Where row `r` of a team's accumulators is after the loop, in its ring.
    #[inline(always)]
    pub(super) fn acc_of(team: u32, r: u32) -> Shared<f32> {
        Shared::at(Self::ring_of(team)).offset(r * Self::ACC_PITCH)
    }

    /// Where the ring of a team starts.
    #[inline(always)]
    pub(super) fn ring_of(team: u32) -> u32 {
        Self::RINGS + team * Self::RING_BYTES
    }

    /// Where a team leaves the state of a row.
    #[inline(always)]
    pub(super) fn state_of(team: u32, r: u32) -> Shared<[f32; 2]> {
        Shared::at(Self::STATES).offset(team * Self::ROWS + r)
    }

    /// Leaves the warp's result where all can read it.
    #[inline(always)]
    pub(super) fn publish<C: Cached>(states: States<M>, acc: &Columns<M, D8>) {
        for m in 0..M {
            for half in 0..HALVES {
                let first = 16 * m as u32 + 8 * half as u32;
                let SoftmaxState { max, sum } = total(states[m][half]);
                if lane() % 4 == 0 {
                    Self::state_of(warp(), first + lane() / 4).store(0, [max, sum]);
                }
                for block in 0..D8 {
                    let start = first_channel(block as u32, C::GROUP);
                    for i in 0..2 {
                        let row = Self::acc_of(warp(), first + lane() % 4 * 2 + i);
                        row.store(start + lane() / 4 * C::GROUP, acc[block][m][half][i as usize]);
                    }
                }
            }
        }
    }

    /// The block's state of row `r`, and the teams' weights in it.
    #[inline(always)]
    pub(super) fn merge_states(r: u32) -> (SoftmaxState, [f32; 16]) {
        let mut state = SoftmaxState::EMPTY;
        let parts: [[f32; 2]; 16] = core::array::from_fn(|w| {
            if (w as u32) < Self::TEAMS {
                Self::state_of(w as u32, r).load(0)
            } else {
                [f32::NEG_INFINITY, 0.0]
            }
        });
        for w in 0..Self::TEAMS as usize {
            state.raise(parts[w][0]);
        }
        let weights = parts.map(|[max, _]| state.weight(max));
        for w in 0..Self::TEAMS as usize {
            state.sum += weights[w] * parts[w][1];
        }
        (state, weights)
    }

    /// What the block accumulated in four columns of row `r`.
    #[inline(always)]
    pub(super) fn merge_columns(r: u32, column: u32, weights: &[f32; 16]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        for w in 0..Self::TEAMS {
            let columns = Self::acc_of(w, r).load_vec(column);
            for i in 0..4 {
                sums[i] = fma(weights[w as usize], f32::from_bits(columns[i]), sums[i]);
            }
        }
        sums
    }
}
