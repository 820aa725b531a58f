//! The mainloop over keys where teams of four warps have 64 rows.
//!
//! The warps of a team share its tiles: each copies a quarter of the keys and owns 16 of the rows.
//! So a CTA reads keys from global memory once for all rows, and registers hold the output of 64
//! rows instead of one warp's 16. `products.rs` says how a team multiplies.

use super::Decode;
use super::cached::Cached;
use super::layout::Heads;
use super::products::{Products, first_row};
use super::range::{Cache, KvRange};
use super::tree::Tree;
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::params::DecodeParams;
use crate::simt::{
    Shared, any_sync, cp_async_wait, lane, named_barrier_sync, opaque, sync_threads, sync_warp,
};
use crate::tile::copy::wait_for_all_but;
use crate::tile::fragment::{Fragments, column_of, row_of};
use crate::tile::rows::Rows;
use crate::tile::softmax::{ScoreScale, States, mask, total, weigh_and_rescale};

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
    /// Attends to the team's part of the rank's KV range; `lacks_rows` as in
    /// [`attend`](Self::attend).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn attend_together<C: Cached>(
        p: &DecodeParams,
        rows: &Rows,
        range: &KvRange,
        cache: Cache<C, UNITS>,
        tree: Tree,
        lacks_rows: bool,
    ) -> (States<1>, Fragments<1, D8>) {
        let a = &p.attention;
        let mut lacks_rows = cache.layout.is_paged() && any_sync(lacks_rows);
        let scale = ScoreScale::new(a.scale, a.softcap);
        let first_row = first_row();
        let lane = P::lane::<C::Operand, D8, UNITS>(Self::queries());
        let has_rows = first_row < rows.count();
        let visible_of = |r: u32| rows.row(first_row + r).visible;
        let visible = [0, 1].map(|half| visible_of(row_of(half)));
        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]], [[[0.0; 4]; D8]]);
        let (team, step) = (Self::team(), range.step(Self::TEAMS));
        let (start, end) = (range.start(team), range.end(team, Self::TEAMS));
        let (mut tile, mut slot) = (start, 0);
        let mut offsets = Self::find_tile(cache.layout, range, start + STAGES * step);
        lacks_rows |= Self::tile_lacks_rows(cache.layout, range, start + STAGES * step, offsets);
        while tile < end {
            let is_new = tile >= range.tiles;
            let begin = if is_new { range.past } else { range.begin(tile) };
            let after = tile + STAGES * step;

            wait_for_all_but(2 * STAGES - 1);
            Self::sync_team();
            let keys = if is_new { Self::new_keys() } else { Self::keys(slot) };
            let mut weights = P::scores::<C::Operand, D8, UNITS, N8>(&lane, Self::queries(), keys);
            Self::sync_team();
            Self::copy(Self::keys(slot), &cache, cache.k, offsets, range, after);

            if has_rows {
                scale.adjust(&mut weights);
                let limit = if is_new { u32::MAX } else { range.old_end };
                let is_partial = range.span.is_partial(begin, Self::KEYS);
                if is_partial || begin + Self::KEYS > limit {
                    if tree.is_none() {
                        mask(&mut weights, begin, |_, half| {
                            let Visible { first, end } = if Self::IS_TIGHT {
                                visible_of(opaque(row_of(half)))
                            } else {
                                visible[half]
                            };
                            Visible { first, end: end.min(limit) }
                        });
                    } else {
                        let bounds = [begin, range.past, limit.min(range.span.some.end)];
                        let word = |_, half| Self::word(first_row + row_of(half));
                        tree.mask(&mut weights, bounds, word);
                    }
                }
                if cache.layout.is_paged() && lacks_rows {
                    Self::hide_nowhere(a, cache.layout, begin, &mut weights);
                }
                let rescale = |_, half, factor| {
                    for block in 0..D8 {
                        for i in 2 * half..2 * half + 2 {
                            acc[0][block][i] *= factor;
                        }
                    }
                };
                weigh_and_rescale::<1, 2, N8>(&mut states, &mut weights, scale, rescale);
            }

            wait_for_all_but(2 * STAGES - 1);
            Self::sync_team();
            let values = if is_new { Self::new_values() } else { Self::values(slot) };
            P::add_values::<C::Operand, D8, UNITS, N8>(&lane, &mut acc, &weights, values);
            Self::sync_team();
            Self::copy(Self::values(slot), &cache, cache.v, offsets, range, after);

            tile += step;
            offsets = Self::find_tile(cache.layout, range, tile + STAGES * step);
            lacks_rows |= Self::tile_lacks_rows(cache.layout, range, tile + STAGES * step, offsets);
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        Self::sync_team();
        (states, acc)
    }

    /// Team barrier: the products after it read what the team has copied, and copies after it
    /// overwrite what the team has read.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sync_team() {
        if Self::IN_TEAMS {
            P::fence();
            named_barrier_sync(1 + Self::team(), 32 * Self::TEAM);
        } else {
            sync_warp();
        }
    }

    /// CTA barrier: the products after it read new tokens that any thread has copied.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sync_block() {
        if P::IN_CHUNKS {
            P::fence();
        }
        sync_threads();
    }

    /// Stores the team's result in shared memory for the merge.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn publish_together(states: States<1>, acc: &Fragments<1, D8>) {
        let first_row = first_row();
        for half in 0..2 {
            let r = first_row + row_of(half);
            let SoftmaxState { max, sum } = total(states[0][half]);
            if lane() % 4 == 0 {
                Self::state_of(Self::team(), r).store(0, [max, sum]);
            }
            let pairs = Shared::<[f32; 2]>::at(Self::ring_of(Self::team()));
            let row = pairs.offset((r * Self::ACC_PITCH + column_of()) / 2);
            for block in 0..D8 {
                let [low, high] = [acc[0][block][2 * half], acc[0][block][2 * half + 1]];
                row.store(4 * block as u32, [low, high]);
            }
        }
    }
}
