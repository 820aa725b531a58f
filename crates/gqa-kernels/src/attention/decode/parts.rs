//! Load balancing between sequences of different lengths: divides the keys of all sequences among
//! the CTAs by the lengths in device memory. With equal splits of each sequence, most SMs would
//! idle while a few CTAs read a long one.
//!
//! A CTA attends to one **part**: all keys of a sequence, or one of several equal ranges of them. A
//! **slot** is room for one resident CTA.
//! - With at least two slots to a sequence, parts are nearly as short as they can be with all CTAs
//!   resident at once.
//! - With fewer, a sequence with more than twice a slot's share of all keys is split into parts of
//!   one share. Half of the SMs saturate memory, so smaller parts would gain nothing.
//!
//! Parts of split sequences have the lowest numbers: their CTAs start first, because they take
//! longest. Scratch memory for their results depends on the slots, not on the batch.
//!
//! **Every warp of every CTA computes the division by itself**, in a few passes of one short loop
//! over the tile counts in shared memory; straight-line code that runs once would be bound by
//! instruction fetch. So all CTAs must read the same lengths: while the kernel runs, nothing may
//! write them. Given a schedule (`schedule.rs`) that was made for these lengths, a CTA reads its
//! part there instead.

use super::exchange::Mailbox;
use super::layout::{Heads, Layout};
use super::products::{Products, TEAM};
use super::schedule::{NOTHING, Schedule, Shape};
use super::{Decode, Place};
use crate::params::{AttentionParams, DecodeParams};
use crate::simt::{
    Rolled, Shared, any_sync, block_idx_x, block_idx_y, block_idx_z, cluster_rank, cluster_size,
    lane, shfl_idx_u32, shfl_xor_u32, sync_threads, thread_idx,
};
use crate::tile::rows::{Rows, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::warp::{LANES, sum, sum_up_to};

/// Most parts of split sequences per slot.
const PER_SLOT: u32 = 2;

/// Most parts of a sequence: a single CTA merges them.
const MOST_PARTS: u32 = 64;

/// Most passes over the sequences. Before the last one, parts become so long that each has a slot.
const PASSES: u32 = 6;

/// Most sequences of a call: their tile counts use the shared memory of the K and V stages.
pub const MOST_DIVIDED: u32 = 4096;

/// Whether kernels for that head size divide keys. At head size 256 over a quantized KV cache they
/// would spill.
pub const fn divides(head_size: u32, is_quantized: bool) -> bool {
    head_size < 256 || !is_quantized
}

/// Most parts of a KV head and row tile. Parts of one share add less than the sequence's number of
/// shares to its first part, and all sequences together have as many shares as there are slots.
pub(super) fn most(p: &DecodeParams) -> u32 {
    let (slots, sequences) = (p.parts, p.attention.batch);
    if 2 * sequences <= slots { slots } else { sequences + slots }
}

/// Parts of split sequences that scratch memory has room for, of all KV heads and row tiles.
pub(super) fn most_partials(p: &DecodeParams) -> usize {
    let columns = p.attention.kv_heads * row_tiles(&p.attention, p.rows);
    columns as usize * (PER_SLOT * p.parts) as usize
}

/// Number of the CTA, in launch order.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn block(p: &DecodeParams) -> u32 {
    block_idx_y() * p.attention.kv_heads + block_idx_x()
}

/// What a CTA attends to, for a KV head and row tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The sequence.
    pub batch: u32,
    /// Which of the sequence's parts it is.
    pub split: u32,
    /// How many there are.
    pub splits: u32,
}

impl Part {
    /// No part.
    const NONE: Self = Self { batch: 0, split: 0, splits: 0 };

    /// Number of the sequence's first part, where this one is that of CTA `cta`: a sequence's parts
    /// lie side by side.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first(&self, cta: u32) -> u32 {
        cta.saturating_sub(self.split)
    }

    /// Whether CTA `cta` stays within `sequences` sequences and within scratch memory if this is
    /// its part. A part that is read from a schedule may hold anything.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_sound(&self, cta: u32, sequences: u32, slots: u32) -> bool {
        let left =
            || self.splits <= MOST_PARTS && self.first(cta) + self.splits <= PER_SLOT * slots;
        let is_in_sequence = self.split <= cta && self.split < self.splits;
        self.batch < sequences && is_in_sequence && (self.splits == 1 || left())
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(&self, p: &DecodeParams) -> Place {
        let (kv_head, row_tile) = (block_idx_x(), block_idx_z());
        let column = row_tile * p.attention.kv_heads + kv_head;
        let index = column * PER_SLOT * p.parts + self.first(block_idx_y());
        let Self { batch, split, splits } = *self;
        Place { kv_head, batch, row_tile, index, split, splits, stride: 1, rank: 0, ranks: 1 }
    }
}

/// The sequences of a call, and the length of a part.
pub(super) struct Division {
    sequences: u32,
    /// Key tiles of each sequence; 0 if another launch attends to it.
    tiles: Shared<u32>,
    /// Sequences with more tiles are split.
    longest: u32,
    /// Tiles of a part.
    part: u32,
}

/// Sums over all sequences.
struct Sums {
    tiles: u32,
    parts: u32,
    /// Parts of split sequences.
    of_split: u32,
}

impl Division {
    /// Of sequences with that many key tiles each; none is split yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(sequences: u32, tiles: Shared<u32>) -> Self {
        Self { sequences, tiles, longest: u32::MAX, part: u32::MAX }
    }

    /// Tiles and parts of sequence `first + lane`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sequence(&self, first: u32) -> (u32, u32) {
        let b = first + lane();
        let tiles = if b < self.sequences { self.tiles.load(b) } else { 0 };
        let is_split = tiles > self.longest;
        let mut parts = tiles.min(1);
        // Mostly none is, and no lane divides.
        if any_sync(is_split) {
            let of_split = tiles.div_ceil(self.part.max(1)).min(MOST_PARTS);
            parts = if is_split { of_split } else { parts };
        }
        (tiles, parts)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sums(&self) -> Sums {
        let mut sums = [0; 3];
        for first in Rolled(0..self.sequences, LANES) {
            let (tiles, parts) = self.sequence(first);
            let of_split = if parts > 1 { parts } else { 0 };
            sums = [sums[0] + tiles, sums[1] + parts, sums[2] + of_split];
        }
        for log in Rolled(0..LANES.ilog2(), 1) {
            sums = sums.map(|sum| sum + shfl_xor_u32(sum, 1 << log));
        }
        let [tiles, parts, of_split] = sums;
        Sums { tiles, parts, of_split }
    }

    /// Chooses the length of a part, `shortest` tiles or more. Returns the number of parts of split
    /// sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn measure(&mut self, slots: u32, shortest: u32) -> u32 {
        let (mut sequences, mut of_split) = (0, 0);
        for pass in Rolled(0..PASSES, 1) {
            let sums = self.sums();
            of_split = sums.of_split;
            let is_first = pass == 0;
            sequences = if is_first { sums.parts } else { sequences };
            let is_few = 2 * sequences <= slots;
            let share = sums.tiles.div_ceil(slots.max(1)).max(shortest);
            if is_first && !is_few {
                (self.longest, self.part) = (2 * share, share);
            } else if is_first {
                (self.longest, self.part) = (share, share);
            } else if !is_few || sums.parts <= slots {
                break;
            } else {
                let longer = self.part as f32 * (sums.parts as f32 / slots as f32);
                // Each sequence has at most one part that is shorter.
                let enough = sums.tiles.div_ceil((slots - sequences).max(1));
                let is_last = pass + 2 == PASSES;
                let part = if is_last { enough } else { (longer as u32 + 1).min(enough) };
                (self.longest, self.part) = (part, part);
            }
        }
        // Bounds scratch memory whatever the lengths are.
        if of_split > PER_SLOT * slots {
            (self.longest, of_split) = (u32::MAX, 0);
        }
        of_split
    }

    /// Part number `nth`; `None` past the last part. Where no sequence is split, they have their
    /// own numbers, also those without keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(&self, nth: u32, of_split: u32) -> Option<Part> {
        if of_split == 0 {
            let has_keys = nth < self.sequences && self.tiles.load(nth) > 0;
            return has_keys.then_some(Part { batch: nth, split: 0, splits: 1 });
        }
        let is_split = nth < of_split;
        let mut left = if is_split { nth } else { nth - of_split };
        for first in Rolled(0..self.sequences, LANES) {
            let (_, parts) = self.sequence(first);
            let own = if (parts > 1) == is_split { parts } else { 0 };
            let up_to = sum_up_to(lane(), own);
            let all = shfl_idx_u32(up_to, LANES - 1);
            if left < all {
                let before = up_to - own;
                let is_here = before <= left && left < up_to;
                let here = sum(if is_here { lane() } else { 0 }, LANES);
                let [splits, before] = [own, before].map(|count| shfl_idx_u32(count, here));
                return Some(Part { batch: first + here, split: left - before, splits });
            }
            left -= all;
        }
        None
    }

    /// Passes each part with its number to `write`: what [`find`](Self::find) finds for it. Warp
    /// `warp` of `warps` passes every `warps`-th group of [`LANES`] sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn for_each_part(
        &self,
        of_split: u32,
        [warp, warps]: [u32; 2],
        write: impl Fn(u32, Part),
    ) {
        // Parts of split sequences, and of all others, before the group.
        let (mut split_before, mut whole_before) = (0, of_split);
        for first in Rolled(0..self.sequences, LANES) {
            let (_, parts) = self.sequence(first);
            let (b, is_split) = (first + lane(), parts > 1);
            let [split_up_to, whole_up_to] = [true, false]
                .map(|split| sum_up_to(lane(), if is_split == split { parts } else { 0 }));
            let up_to =
                if is_split { split_before + split_up_to } else { whole_before + whole_up_to };
            let number = if of_split == 0 { b } else { up_to - parts };
            if (first / LANES) % warps == warp {
                for split in Rolled(0..parts, 1) {
                    write(number + split, Part { batch: b, split, splits: parts });
                }
            }
            split_before += shfl_idx_u32(split_up_to, LANES - 1);
            whole_before += shfl_idx_u32(whole_up_to, LANES - 1);
        }
    }
}

/// Visible key tiles, of `keys` keys each, of sequence `b`; 0 if it has no new tokens, or another
/// launch attends to it. `rows` is the height of a row tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn tiles_of<L: Layout>(
    a: &AttentionParams,
    layout: L,
    lengths: Seqlens,
    b: u32,
    [rows, keys]: [u32; 2],
) -> u32 {
    // Both loads are in flight at once.
    let length = lengths.load(b, a.q_len);
    let rows = layout.rows(a, Rows::of(a, 0, 0, b, rows));
    if L::MAY_BE_EMPTY && rows.count() == 0 {
        return 0;
    }
    let total = layout.seqlen(a, &rows, length).total;
    let window = if a.window > 0 { a.window.saturating_add(a.q_len) } else { u32::MAX };
    total.min(window).div_ceil(keys).max(1)
}

/// Fewest tiles of a part, in kernels with row tiles of `rows` rows and CTAs of `threads` threads:
/// two per team. Merging costs more than shorter parts save.
pub const fn shortest_part(rows: u32, threads: u32) -> u32 {
    let warps = threads / LANES;
    2 * if rows > 32 { warps / TEAM } else { warps }
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
    pub(super) fn part_of<L: Layout>(
        p: &DecodeParams,
        layout: L,
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
        Self::keep(part.place(p));
        sync_threads();
        let kept = Self::kept();
        (kept.splits > 0).then_some(kept)
    }

    /// Leaves in shared memory whether a thread of the warp votes.
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
    const KEPT: u32 = {
        let at = if Self::SHARES_MAILBOX {
            16
        } else {
            Mailbox::<D8>::bytes(Self::ROWS).next_multiple_of(16)
        };
        assert!(at + 32 <= Self::MAILBOX_BYTES);
        at
    };

    /// Whether this call divides keys by lengths.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn divides<L: Layout>(p: &DecodeParams) -> bool {
        L::DIVIDES && divides(Self::HEAD_SIZE, Self::IS_QUANTIZED) && p.parts > 0
    }

    /// Whether the place is read again from shared memory after the main loop, because it is too
    /// long to recompute.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keeps_place<L: Layout>() -> bool {
        L::DIVIDES && divides(Self::HEAD_SIZE, Self::IS_QUANTIZED) && Self::FORGETS
    }

    /// Saves the CTA's place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keep(place: Place) {
        let Place { kv_head, batch, row_tile, index, split, splits, stride, .. } = place;
        if thread_idx() == 0 {
            let kept = Shared::<u32>::at(Self::KEPT);
            kept.store_vec(0, [kv_head, batch, row_tile, index]);
            kept.store_vec(4, [split, splits, stride, 0]);
        }
    }

    /// The saved place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn kept() -> Place {
        let kept = Shared::<u32>::at(Self::KEPT);
        let [[kv_head, batch, row_tile, index], [split, splits, stride, _]] =
            [0, 4].map(|word| kept.load_vec(word));
        let (rank, ranks) = (cluster_rank(), cluster_size());
        Place { kv_head, batch, row_tile, index, split, splits, stride, rank, ranks }
    }
}
