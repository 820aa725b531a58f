//! The loop over keys where warpgroups multiply: 64 rows by 64 keys at once, operands in shared
//! memory.
//!
//! The four warps of a warpgroup share its tiles: each copies a quarter of the keys, and has 16 of
//! the rows. So an SM reads keys from shared memory once for all rows, and registers hold 64 rows
//! of output where one warp's hold 16.

use super::Decode;
use super::cached::Cached;
use super::layout::{Heads, Layout};
use super::stream::{Cache, Share};
use super::tree::Tree;
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::DecodeParams;
use crate::simt::{
    Shared, cp_async_wait, fence_proxy_async, lane, named_barrier_sync, sync_threads, sync_warp,
    warp, wgmma_commit, wgmma_fence, wgmma_wait,
};
use crate::tile::copy::wait_for_all_but;
use crate::tile::fragment::{Fragments, column_of, pack, row_of};
use crate::tile::rows::Rows;
use crate::tile::softmax::{ScoreScale, States, mask, total, weigh_and_rescale};
use crate::tile::swizzle::Swizzled;

/// Scores of a thread.
const SCORES: usize = 32;

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H>
{
    /// The team's part of the rank's share.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn attend_together<C: Cached, L: Layout>(
        p: &DecodeParams,
        rows: &Rows,
        share: &Share,
        cache: Cache<C, L, UNITS>,
        tree: Tree,
    ) -> (States<1>, Fragments<1, D8>) {
        let a = &p.attention;
        let scale = ScoreScale::new(a.scale, a.softcap);
        let first_row = warp() % Self::TEAM * 16;
        let has_rows = first_row < rows.count();
        let visible = [0, 1].map(|half| rows.row(first_row + row_of(half)).visible);
        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]], [[[0.0; 4]; D8]]);
        let (team, step) = (Self::team(), share.step(Self::TEAMS));
        let (start, end) = (share.start(team), share.end(team, Self::TEAMS));
        let (mut tile, mut slot) = (start, 0);
        let mut spots = Self::find_tile(cache.layout, share, start + STAGES * step);
        while tile < end {
            let is_fresh = tile >= share.tiles;
            let begin = if is_fresh { share.past } else { share.begin(tile) };
            let after = tile + STAGES * step;

            wait_for_all_but(2 * STAGES - 1);
            Self::sync_team();
            let keys = if is_fresh { Self::fresh_keys() } else { Self::keys(slot) };
            let mut weights = Self::multiply_keys::<C>(keys);
            Self::sync_team();
            Self::copy(Self::keys(slot), &cache, cache.k, spots, share, after);

            if has_rows {
                scale.adjust(&mut weights);
                let limit = if is_fresh { u32::MAX } else { share.old_end };
                let is_partial = share.span.is_partial(begin, Self::KEYS);
                if is_partial || begin + Self::KEYS > limit {
                    if tree.is_none() {
                        mask(&mut weights, begin, |_, half| {
                            let Visible { first, end } = visible[half];
                            Visible { first, end: end.min(limit) }
                        });
                    } else {
                        let bounds = [begin, share.past, limit.min(share.span.some.end)];
                        let word = |_, half| Self::word(first_row + row_of(half));
                        tree.mask(&mut weights, bounds, word);
                    }
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
            let values = if is_fresh { Self::fresh_values() } else { Self::values(slot) };
            Self::add_values::<C>(&mut acc[0], &weights[0], values);
            Self::sync_team();
            Self::copy(Self::values(slot), &cache, cache.v, spots, share, after);

            tile += step;
            spots = Self::find_tile(cache.layout, share, tile + STAGES * step);
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        Self::sync_team();
        (states, acc)
    }

    /// Queries times a tile of keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_keys<C: Cached>(keys: Swizzled<C::Cell, UNITS>) -> Fragments<1, N8> {
        let (q, k) = (Self::queries::<C::Operand>().address(), keys.address());
        wgmma_fence();
        let mut scores: [f32; SCORES] = C::Operand::wgmma(descriptor(q, 16), descriptor(k, 16));
        for depth in 1..D8 as u32 / 2 {
            let (chunk, within) = (depth / 4 * 128, depth % 4 * 32);
            let at = |start, rows| descriptor(start + chunk * rows + within, 16);
            C::Operand::wgmma_add(&mut scores, at(q, Self::ROWS), at(k, Self::KEYS));
        }
        wgmma_commit();
        wgmma_wait::<0>();
        [core::array::from_fn(|block| core::array::from_fn(|i| scores[4 * block + i]))]
    }

    /// Adds weights times a tile of values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add_values<C: Cached>(
        acc: &mut [[f32; 4]; D8],
        weights: &[[f32; 4]; N8],
        values: Swizzled<C::Cell, UNITS>,
    ) {
        let acc = acc.as_flattened_mut();
        match D8 {
            8 => add_values::<C::Operand, 32, N8>(acc, weights, values.address()),
            10 => add_values::<C::Operand, 40, N8>(acc, weights, values.address()),
            12 => add_values::<C::Operand, 48, N8>(acc, weights, values.address()),
            _ => add_values::<C::Operand, 64, N8>(acc, weights, values.address()),
        }
    }

    /// Waits for the team, whose copies the products then read, or who have read what copies then
    /// overwrite.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sync_team() {
        if Self::BY_WARPGROUPS {
            fence_proxy_async();
            named_barrier_sync(1 + Self::team(), 32 * Self::TEAM);
        } else {
            sync_warp();
        }
    }

    /// Waits for the block, whose new rows the products then read.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sync_block() {
        if Self::BY_WARPGROUPS {
            fence_proxy_async();
        }
        sync_threads();
    }

    /// Leaves the team's result where all can read it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn publish_together(states: States<1>, acc: &Fragments<1, D8>) {
        let first_row = warp() % Self::TEAM * 16;
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

/// `acc += weights · values`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_values<T: MmaElement, const O: usize, const N8: usize>(
    acc: &mut [f32],
    weights: &[[f32; 4]; N8],
    values: u32,
) {
    let Some(acc) = acc.first_chunk_mut::<O>() else { return };
    let chunk_bytes = 8 * N8 as u32 * 128;
    let weights: [_; SCORES / 8] = core::array::from_fn(|depth| pack::<T, N8>(weights, depth));
    wgmma_fence();
    for depth in 0..SCORES / 8 {
        let values = descriptor(values + depth as u32 * 16 * 128, chunk_bytes);
        T::wgmma_registers(acc, true, weights[depth], values);
    }
    wgmma_commit();
    wgmma_wait::<0>();
}

/// What `wgmma` is told of an operand in chunks with the 128-byte swizzle: eight-row groups 1024
/// bytes apart, chunks `chunk_bytes` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn descriptor(address: u32, chunk_bytes: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    const GROUP: u64 = (1024 >> 4) << 32;
    SWIZZLE_128 | GROUP | u64::from(chunk_bytes >> 4) << 16 | u64::from(address >> 4 & 0x3fff)
}
