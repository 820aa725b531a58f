//! The mainloop over keys: every warp streams its own tiles through its own pipeline stages.
//!
//! Copy groups are K_j, V_j, K_{j+1}, …, and the warp waits for the oldest only:
//!
//! ```text
//! wait for K_j    S = Q K_jᵀ            then start K_{j+STAGES} in its place
//! wait for V_j    softmax, O += P V_j   then start V_{j+STAGES} in its place
//! ```
//!
//! A rank with new tokens attends to their tile last. They are in shared memory already, so that
//! tile is not copied.

use super::cached::{Cached, first_channel};
use super::layout::{Heads, Layout, Offsets};
use super::new_tokens::new_rows;
use super::products::{self, Products, is_tight};
use super::range::{Cache, KvRange};
use super::row_scales::{self, RowScales};
use super::tree::Tree;
use super::{Decode, Place};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::params::{AttentionParams, DecodeParams};
use crate::simt::{
    Global, Shared, any_sync, cp_async_commit, cp_async_wait, fma, lane, opaque, sync_warp, warp,
};
use crate::tile::columns::{Columns, load_depth, load_queries, weigh};
use crate::tile::copy::{UNIT, wait_for_all_but};
use crate::tile::flipped;
use crate::tile::fragment::{Fragments, column_of, row_of};
use crate::tile::pages::is_somewhere;
use crate::tile::rows::Rows;
use crate::tile::softmax::{ScoreScale, States, hide, mask, total};
use crate::tile::swizzle::{Swizzled, WarpCopy, WarpRead};
use bytemuck::Pod;

/// Most pipeline stages.
const MAX_STAGES: usize = 4;

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    /// Whether queries and accumulators leave so few registers that the queries stay in shared
    /// memory, and lanes recompute what they otherwise hold.
    pub(super) const IS_TIGHT: bool = M == 2 || is_tight(Self::ROWS / Self::TEAM, D8);
    /// Warps that share a tile of keys: four with 64 rows, else one.
    pub(super) const TEAM: u32 = if Self::IN_TEAMS { products::TEAM } else { 1 };
    /// Teams of a CTA.
    pub(super) const TEAMS: u32 = WARPS / Self::TEAM;
    /// Distance of two rows of accumulators in f32: padded against bank conflicts if the stages
    /// have room.
    pub(super) const ACC_PITCH: u32 = {
        let padded = Self::HEAD_SIZE + UNIT;
        if Self::ROWS * padded * 4 <= Self::RING_BYTES { padded } else { Self::HEAD_SIZE }
    };

    /// Whether scores are transposed, with keys as rows.
    pub(super) const fn flips<C: Cached>() -> bool {
        C::FLIPS && flipped::fits(M, HALVES)
    }

    /// The shared-memory addresses that lanes copy to.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lanes<C: Cached>() -> WarpCopy<UNITS> {
        WarpCopy::of(lane(), Self::keys::<C::Cell>(0))
    }

    /// Starts copying the team's first keys before the length is known. Keys past the end are
    /// masked later, like all keys that no query sees. The copies belong to the next group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn start_ahead<C: Cached>(p: &DecodeParams, place: Place, cache: &Cache<C, UNITS>) {
        let (ranks, index) = place.among();
        let begin = (Self::team() * ranks + index) * Self::KEYS;
        let end = p.attention.capacity;
        let offsets = Self::find(cache.layout, begin, end);
        Self::copy_rows(Self::keys(0), cache, cache.k, offsets, begin, end);
    }

    /// Number of keys that all ranks together load before they know the length.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys_ahead(p: &DecodeParams, place: Place) -> u32 {
        if p.ahead != 0 { place.among().0 * Self::TEAMS * Self::KEYS } else { 0 }
    }

    /// Starts the copies of the warp's first tiles; with `ahead`, those of the first keys are in
    /// flight already. Returns whether one of the tiles has a row without a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn start<C: Cached>(range: &KvRange, cache: &Cache<C, UNITS>, ahead: bool) -> bool {
        let tile_of = |slot| range.start(Self::team()) + slot * range.step(Self::TEAMS);
        // All lookups are in flight before the first copy waits for its own.
        let offsets: [Offsets; MAX_STAGES] =
            core::array::from_fn(|slot| Self::find_tile(cache.layout, range, tile_of(slot as u32)));
        let mut lacks_rows = false;
        for slot in 0..STAGES {
            let (tile, offsets) = (tile_of(slot), offsets[slot as usize]);
            if slot == 0 && ahead {
                cp_async_commit();
            } else {
                Self::copy(Self::keys(slot), cache, cache.k, offsets, range, tile);
            }
            Self::copy(Self::values(slot), cache, cache.v, offsets, range, tile);
            lacks_rows |= Self::tile_lacks_rows(cache.layout, range, tile, offsets);
        }
        lacks_rows
    }

    /// Whether a tile of the team has rows without a block; `offsets` is the warp's part of it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tile_lacks_rows(
        layout: Layout,
        range: &KvRange,
        tile: u32,
        offsets: Offsets,
    ) -> bool {
        if !layout.is_paged() || Self::TEAM == 1 {
            return layout.lacks_rows(offsets);
        }
        layout.lacks_rows(layout.find(range.begin(tile), range.old_end, Self::KEYS))
    }

    /// Whether the new token that this lane looks up has no block. Together the lanes of a warp
    /// look up every block that new tokens are appended to.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new_row_is_nowhere(
        p: &DecodeParams,
        rows: &Rows,
        range: &KvRange,
        layout: Layout,
    ) -> bool {
        const { assert!(Self::KEYS <= 31 * Layout::PIECE) }
        let new = new_rows(p, rows);
        if !layout.is_paged() || !range.has_new_tokens || new == 0 {
            return false;
        }
        let further = (lane() * Layout::PIECE).min(new - 1);
        !layout.is_somewhere(layout.place(range.past + further))
    }

    /// Masks keys without a block in the tile that starts at row `begin`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn hide_nowhere<const BLOCKS: usize>(
        a: &AttentionParams,
        layout: Layout,
        begin: u32,
        scores: &mut Fragments<BLOCKS, N8>,
    ) {
        hide(scores, begin, |row| Self::is_nowhere(a, layout, row));
    }

    /// Whether a row has no block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_nowhere(a: &AttentionParams, layout: Layout, row: u32) -> bool {
        !layout.is_somewhere(layout.place(row.min(a.capacity - 1)))
    }

    /// Looks up the page offsets of the warp's part of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find_tile(layout: Layout, range: &KvRange, tile: u32) -> Offsets {
        Self::find(layout, range.begin(tile), range.old_end)
    }

    /// Looks up the page offsets of the warp's part of the tile that starts at row `begin`. Rows
    /// from `end` on need no block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(layout: Layout, begin: u32, end: u32) -> Offsets {
        let (first, rows) = Self::part();
        layout.find(begin + first, end, rows)
    }

    /// The warp's part of a tile: its first row, and the number of rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn part() -> (u32, u32) {
        let rows = Self::KEYS / Self::TEAM;
        (warp() % Self::TEAM * rows, rows)
    }

    /// Starts copying a tile as one group, which is empty if the rank's KV range has no such tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn copy<C: Cached>(
        place: Swizzled<C::Cell, UNITS>,
        cache: &Cache<C, UNITS>,
        source: Global<C::Cell>,
        offsets: Offsets,
        range: &KvRange,
        tile: u32,
    ) {
        if tile < range.tiles {
            let (begin, end) = (range.begin(tile), range.old_end);
            Self::copy_rows(place, cache, source, offsets, begin, end);
        }
        cp_async_commit();
    }

    /// Starts copying the warp's part of the tile that starts at row `begin`; rows from `end` on
    /// become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy_rows<C: Cached>(
        place: Swizzled<C::Cell, UNITS>,
        cache: &Cache<C, UNITS>,
        source: Global<C::Cell>,
        offsets: Offsets,
        begin: u32,
        end: u32,
    ) {
        let lanes =
            if Self::IS_TIGHT { &WarpCopy::of(opaque(lane()), place) } else { &cache.lanes };
        let ((first, rows), layout) = (Self::part(), cache.layout);
        // A lane copies the same unit of each of its rows, or nothing.
        let is_padding = H::PAD && lane() % UNITS as u32 >= layout.head_size / Self::PER_UNIT;
        let start = |piece: [u32; 2], place_of: u32, mut valid: u32| {
            let [within, height] = piece;
            let source = source.offset(layout.offset(place_of));
            if is_padding {
                valid = 0;
            }
            if layout.is_paged() || H::PAD {
                lanes.start_apart(place.from(within), height, source, layout.stride, valid);
            } else {
                lanes.start(place.from(within), height, source, valid);
            }
        };
        if !layout.is_paged() {
            let begin = begin + first;
            return start([first, rows], begin, end.saturating_sub(begin));
        }
        let height = Layout::PIECE.min(rows);
        for piece in 0..rows / height {
            let within = first + piece * height;
            let place_of = offsets[piece as usize];
            let valid = end.saturating_sub(begin + within);
            // opaque(): otherwise the size of each copy is selected, not that of the piece.
            let valid = opaque(if is_somewhere(place_of) { valid } else { 0 });
            start([within, height], place_of, valid);
        }
    }

    /// Attends to the warp's tiles. S is the product with the prepared queries, times `unit`.
    /// `lacks_rows` says whether a row of the first tiles, or a new token, has no block; from the
    /// first such tile on, every tile is tested. Returns the softmax states, the accumulators, and
    /// with per-token scales the factor of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn attend<C: Cached>(
        p: &DecodeParams,
        rows: &Rows,
        range: &KvRange,
        cache: Cache<C, UNITS>,
        of_rows: RowScales<C>,
        unit: f32,
        tree: Tree,
        lacks_rows: bool,
    ) -> (States<M>, Columns<M, D8>, f32) {
        let a = &p.attention;
        let mut lacks_rows = cache.layout.is_paged() && any_sync(lacks_rows);
        let RowScales { coding, staging } = of_rows;
        let scale = ScoreScale::new(a.scale * unit, a.softcap);
        let visible_of = |m: usize, r: u32| rows.row(16 * m as u32 + r).visible;
        let flips = Self::flips::<C>();
        let row_of = |i: usize| if flips { column_of() + i as u32 } else { row_of(i) };
        let visible: [[_; 2]; M] =
            core::array::from_fn(|m| core::array::from_fn(|i| visible_of(m, row_of(i))));
        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]; M], [[[[0.0; 2]; 2]; M]; D8]);
        let read = WarpRead::of_this_lane();
        let queries = if Self::IS_TIGHT {
            [[[0; 2]; M]; D8]
        } else {
            load_queries::<C::Operand, M, HALVES, D8>(Self::queries())
        };
        let load = |depth| load_depth::<C::Operand, M, HALVES, D8>(Self::queries(), depth);
        let kept = |depth: usize| [queries[2 * depth], queries[2 * depth + 1]];
        let zero_scores = if Self::IS_TIGHT {
            C::zero_scores::<M, HALVES, D8>(coding, load)
        } else {
            C::zero_scores::<M, HALVES, D8>(coding, kept)
        };
        let (mut tile, mut slot) = (range.start(Self::team()), 0);
        let ahead = STAGES * range.step(Self::TEAMS);
        let mut offsets = Self::find_tile(cache.layout, range, tile + ahead);
        lacks_rows |= Self::tile_lacks_rows(cache.layout, range, tile + ahead, offsets);
        let scales_of = |tile| Self::load_row_scales(p, rows, range, &cache, coding, tile);
        let by_row = C::by_row(coding);
        let (mut loaded, mut value_unit) = ([[0.0; 2]; 2], row_scales::LEAST_UNIT);
        if by_row {
            loaded = scales_of(tile);
        }
        while tile < range.end(Self::team(), Self::TEAMS) {
            let is_new = tile >= range.tiles;
            let begin = if is_new { range.past } else { range.begin(tile) };
            let after = tile + ahead;
            let mut of_tile = loaded;
            if by_row {
                if is_new {
                    of_tile = Self::new_row_scales(staging);
                }
                loaded = scales_of(tile + range.step(Self::TEAMS));
            }

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            let keys = if is_new { Self::new_keys() } else { Self::keys(slot) };
            let mut weights = if Self::IS_TIGHT {
                C::scores::<M, HALVES, UNITS, N8>(coding, load, &zero_scores, keys, &read)
            } else {
                C::scores::<M, HALVES, UNITS, N8>(coding, kept, &zero_scores, keys, &read)
            };
            sync_warp();
            Self::copy(Self::keys(slot), &cache, cache.k, offsets, range, after);

            if by_row {
                Self::times_row_scales::<C>(&mut weights, &of_tile, row_scales::KEYS, 1.0);
            }
            scale.adjust(&mut weights);
            let limit = if is_new { u32::MAX } else { range.old_end };
            let is_partial = range.span.is_partial(begin, Self::KEYS);
            if is_partial || begin + Self::KEYS > limit {
                let sees = |m: usize, i: usize| {
                    let Visible { first, end } = if Self::IS_TIGHT {
                        visible_of(m, opaque(row_of(i)))
                    } else {
                        visible[m][i]
                    };
                    Visible { first, end: end.min(limit) }
                };
                if flips {
                    flipped::mask(&mut weights, begin, |i| sees(0, i));
                } else if tree.is_none() {
                    mask(&mut weights, begin, sees);
                } else {
                    let bounds = [begin, range.past, limit.min(range.span.some.end)];
                    let word = |m, half| Self::word(16 * m as u32 + opaque(row_of(half)));
                    tree.mask(&mut weights, bounds, word);
                }
            }
            if cache.layout.is_paged() && lacks_rows {
                if flips {
                    flipped::hide(&mut weights, begin, |row| {
                        Self::is_nowhere(a, cache.layout, row)
                    });
                } else {
                    Self::hide_nowhere(a, cache.layout, begin, &mut weights);
                }
            }
            if flips {
                flipped::weigh(&mut states, &mut weights, &mut acc, scale);
            } else {
                weigh::<M, HALVES, N8, D8>(&mut states, &mut weights, &mut acc, scale);
            }
            if by_row {
                value_unit = Self::raise_unit(&mut acc, &of_tile, value_unit);
                let inverse = 1.0 / value_unit;
                Self::times_row_scales::<C>(&mut weights, &of_tile, row_scales::VALUES, inverse);
            }

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            let values = if is_new { Self::new_values() } else { Self::values(slot) };
            let read = if Self::IS_TIGHT { WarpRead::of(opaque(lane())) } else { read };
            C::accumulate::<M, HALVES, D8, UNITS, N8>(coding, &mut acc, &weights, values, &read);
            sync_warp();
            Self::copy(Self::values(slot), &cache, cache.v, offsets, range, after);

            tile += range.step(Self::TEAMS);
            offsets = Self::find_tile(cache.layout, range, tile + ahead);
            lacks_rows |= Self::tile_lacks_rows(cache.layout, range, tile + ahead, offsets);
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        sync_warp();
        (states, acc, value_unit)
    }

    /// The tile of new keys, rotated.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new_keys<E: Pod>() -> Swizzled<E, UNITS> {
        Self::tile(Self::NEW_TILES, Self::KEYS)
    }

    /// The tile of new values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new_values<E: Pod>() -> Swizzled<E, UNITS> {
        Self::tile(Self::NEW_TILES + Self::STAGE_BYTES / 2, Self::KEYS)
    }

    /// The keys of one of the team's stages.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys<E: Pod>(slot: u32) -> Swizzled<E, UNITS> {
        Self::tile(Self::ring_of(Self::team()) + slot * Self::STAGE_BYTES, Self::KEYS)
    }

    /// The values of one of the team's stages.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn values<E: Pod>(slot: u32) -> Swizzled<E, UNITS> {
        let half = Self::STAGE_BYTES / 2;
        Self::tile(Self::ring_of(Self::team()) + slot * Self::STAGE_BYTES + half, Self::KEYS)
    }

    /// A tile with rows of `W` units, in the layout of the products.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tile<E: Pod, const W: usize>(bytes: u32, rows: u32) -> Swizzled<E, W> {
        if P::IN_CHUNKS { Swizzled::in_chunks_at(bytes, rows) } else { Swizzled::at(bytes) }
    }

    /// This thread's team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn team() -> u32 {
        warp() / Self::TEAM
    }

    /// Row `r` of a team's accumulators, which overwrite its stages after the mainloop.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn acc_of(team: u32, r: u32) -> Shared<f32> {
        Shared::at(Self::ring_of(team)).offset(r * Self::ACC_PITCH)
    }

    /// Shared-memory address of a team's stages.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn ring_of(team: u32) -> u32 {
        Self::RINGS + team * Self::RING_BYTES
    }

    /// A team's softmax state of row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn state_of(team: u32, r: u32) -> Shared<[f32; 2]> {
        Shared::at(Self::STATES).offset(team * Self::ROWS + r)
    }

    /// Stores the warp's result in shared memory for the merge.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn publish<C: Cached>(states: States<M>, acc: &Columns<M, D8>) {
        for m in 0..M {
            for half in 0..HALVES {
                let first = 16 * m as u32 + 8 * half as u32;
                if Self::flips::<C>() {
                    for i in 0..2 {
                        let SoftmaxState { max, sum } = flipped::total(states[0][i]);
                        if lane() < 4 {
                            Self::state_of(warp(), column_of() + i as u32).store(0, [max, sum]);
                        }
                    }
                } else {
                    let SoftmaxState { max, sum } = total(states[m][half]);
                    if lane() % 4 == 0 {
                        Self::state_of(warp(), first + lane() / 4).store(0, [max, sum]);
                    }
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

    /// The CTA's softmax state of row `r`, and each team's factor in it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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

    /// The CTA's sum over its teams of four columns of row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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
