//! The part of the division (`division.rs`) that a CTA attends to.
//!
//! **Every warp of every CTA computes the division by itself**, in a few passes of one short loop
//! over the tile counts in shared memory; straight-line code that runs once would be bound by
//! instruction fetch. So all CTAs must read the same lengths: while the kernel runs, nothing may
//! write them. Given a schedule (`schedule.rs`) that was made for these lengths, a CTA reads its
//! part there instead.

use super::division::{Division, MOST_DIVIDED, PER_SLOT, Part, divides, shortest_part, tiles_of};
use super::exchange::ReductionBuffer;
use super::layout::{Heads, Layout};
use super::products::Products;
use super::schedule::{NOTHING, Schedule, Shape};
use super::{Decode, Place};
use crate::params::DecodeParams;
use crate::simt::{
    Rolled, Shared, any_sync, block_idx_x, block_idx_y, block_idx_z, cluster_rank, cluster_size,
    lane, sync_threads, thread_idx,
};
use crate::tile::seqlens::Seqlens;
use crate::tile::warp::LANES;

/// Number of the CTA, in launch order.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn block(p: &DecodeParams) -> u32 {
    block_idx_y() * p.attention.kv_heads + block_idx_x()
}

impl Part {
    /// The part's place in the grid.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(&self, p: &DecodeParams) -> Place {
        let (kv_head, row_tile) = (block_idx_x(), block_idx_z());
        let column = row_tile * p.attention.kv_heads + kv_head;
        let index = column * PER_SLOT * p.parts + self.first(block_idx_y());
        let Self { batch, split, splits } = *self;
        Place { kv_head, batch, row_tile, index, split, splits, stride: 1, rank: 0, ranks: 1 }
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
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    const SHORTEST: u32 = {
        let shortest = shortest_part(Self::ROWS, Self::THREADS);
        assert!(shortest == 2 * Self::TEAMS);
        shortest
    };

    /// Shared-memory address of the warps' votes on a schedule, behind the tile counts.
    const VOTES: u32 = Self::RINGS + 4 * MOST_DIVIDED;
    /// Shared-memory address of the CTA's part as the schedule has it.
    const SCHEDULED: u32 = Self::VOTES + 4 * LANES;

    /// The CTA's part; `None` if there are fewer parts than CTAs. It is read from the schedule if
    /// that was made for these shapes and lengths, and if it is sound there. All threads take it
    /// from shared memory, where it is saved: however it was found, the compiler sees one load.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn part_of(
        p: &DecodeParams,
        layout: Layout,
        lengths: Seqlens,
        schedule: Schedule,
    ) -> Option<Place> {
        const { assert!(4 * (MOST_DIVIDED + LANES + 4) <= Self::TEAMS * Self::RING_BYTES) }
        let (sequences, tiles) = (p.attention.batch, Shared::at(Self::RINGS));
        let [scheduled, mut differs] = [schedule.is_given(), false];
        let (reads_part, mut part) = (scheduled && thread_idx() == 0, Part::NONE);
        if reads_part {
            let (read, is_sealed) = schedule.part(sequences, block_idx_y());
            let is_nothing = read.batch == NOTHING;
            let is_sound = is_nothing || read.is_sound(block_idx_y(), sequences, p.parts);
            part = if is_nothing { Part::NONE } else { read };
            differs = !(is_sealed && is_sound)
                || schedule.is_of_other(&Shape::of(p, Self::KEYS, Self::SHORTEST));
        }
        for b in Rolled(thread_idx()..sequences, Self::THREADS) {
            let stored = if scheduled { schedule.tiles(b) } else { 0 };
            let count = tiles_of(&p.attention, layout, lengths, b, [Self::ROWS, Self::KEYS]);
            tiles.store(b, count);
            differs |= scheduled && stored != count;
        }
        if reads_part {
            let words = [part.batch, part.split, part.splits, 0];
            Shared::<u32>::at(Self::SCHEDULED).store_vec(0, words);
        }
        if scheduled {
            Self::vote(differs);
        }
        sync_threads();
        let part = if scheduled && !Self::has_vote() {
            let [batch, split, splits, _] = Shared::<u32>::at(Self::SCHEDULED).load_vec(0);
            Part { batch, split, splits }
        } else {
            let mut division = Division::new(sequences, tiles);
            let of_split = division.measure(p.parts, Self::SHORTEST);
            division.find(block_idx_y(), of_split).unwrap_or(Part::NONE)
        };
        Self::save_place(part.place(p));
        sync_threads();
        let kept = Self::saved_place();
        (kept.splits > 0).then_some(kept)
    }

    /// Stores in shared memory whether any thread of the warp votes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vote(votes: bool) {
        let any = any_sync(votes);
        if lane() == 0 {
            Shared::<u32>::at(Self::VOTES).store(thread_idx() / LANES, any.into());
        }
    }

    /// Whether a warp of the CTA has voted, after a barrier.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_vote() -> bool {
        let votes = Shared::<u32>::at(Self::VOTES);
        any_sync(lane() < WARPS && votes.load(lane().min(WARPS - 1)) != 0)
    }

    /// Shared-memory address of the saved place: after the DSMEM reduction buffer, or in it where
    /// peers write to it only after a cluster barrier past the main loop.
    const SAVED_PLACE: u32 = {
        let at = if Self::REDUCES_OVER_QUERIES {
            16
        } else {
            ReductionBuffer::<D8>::bytes(Self::ROWS).next_multiple_of(16)
        };
        assert!(at + 32 <= Self::REDUCTION_BYTES);
        at
    };

    /// Whether this call divides keys by lengths.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn divides(p: &DecodeParams) -> bool {
        divides(Self::HEAD_SIZE, Self::IS_QUANTIZED) && p.parts > 0
    }

    /// Whether the place is read again from shared memory after the main loop, because it is too
    /// long to recompute.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keeps_place() -> bool {
        divides(Self::HEAD_SIZE, Self::IS_QUANTIZED) && Self::FORGETS
    }

    /// Saves the CTA's place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn save_place(place: Place) {
        let Place { kv_head, batch, row_tile, index, split, splits, stride, .. } = place;
        if thread_idx() == 0 {
            let kept = Shared::<u32>::at(Self::SAVED_PLACE);
            kept.store_vec(0, [kv_head, batch, row_tile, index]);
            kept.store_vec(4, [split, splits, stride, 0]);
        }
    }

    /// The saved place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn saved_place() -> Place {
        let kept = Shared::<u32>::at(Self::SAVED_PLACE);
        let [[kv_head, batch, row_tile, index], [split, splits, stride, _]] =
            [0, 4].map(|word| kept.load_vec(word));
        let (rank, ranks) = (cluster_rank(), cluster_size());
        Place { kv_head, batch, row_tile, index, split, splits, stride, rank, ranks }
    }
}
