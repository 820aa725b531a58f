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

use super::layout::Layout;
use super::products::TEAM;
use crate::params::{AttentionParams, DecodeParams};
use crate::simt::{Rolled, Shared, any_sync, lane, shfl_idx_u32, shfl_xor_u32};
use crate::tile::rows::{Rows, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::warp::{LANES, sum, sum_up_to};

/// Most parts of split sequences per slot.
pub(super) const PER_SLOT: u32 = 2;

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
    pub(super) const NONE: Self = Self { batch: 0, split: 0, splits: 0 };

    /// Number of the sequence's first part, where this one is that of CTA `cta`: a sequence's parts
    /// lie side by side.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn first(&self, cta: u32) -> u32 {
        cta.saturating_sub(self.split)
    }

    /// Whether CTA `cta` stays within `sequences` sequences and within scratch memory if this is
    /// its part. A part that is read from a schedule may hold anything.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_sound(&self, cta: u32, sequences: u32, slots: u32) -> bool {
        let left =
            || self.splits <= MOST_PARTS && self.first(cta) + self.splits <= PER_SLOT * slots;
        let is_in_sequence = self.split <= cta && self.split < self.splits;
        self.batch < sequences && is_in_sequence && (self.splits == 1 || left())
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
    /// The division of sequences with `tiles` key tiles each, before any is split.
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
        // In most cases no sequence is split, and the division is skipped.
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
                // Each sequence has at most one shorter part.
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

    /// Part number `nth`; `None` past the last part. If no sequence is split, the part's number is
    /// the sequence's, and a sequence without keys has no part.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find(&self, nth: u32, of_split: u32) -> Option<Part> {
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

    /// Calls `write` with each part and its number, the parts that [`find`](Self::find) returns.
    /// Warp `warp` of `warps` passes every `warps`-th group of [`LANES`] sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn for_each_part(
        &self,
        of_split: u32,
        [warp, warps]: [u32; 2],
        write: impl Fn(u32, Part),
    ) {
        // Number of parts before the group: of split sequences, and of the others.
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
pub(super) fn tiles_of(
    a: &AttentionParams,
    layout: Layout,
    lengths: Seqlens,
    b: u32,
    [rows, keys]: [u32; 2],
) -> u32 {
    // Both loads are in flight at once.
    let length = lengths.load(b, a.q_len);
    let rows = layout.rows(a, Rows::of(a, 0, 0, b, rows));
    if layout.is_paged() && rows.count() == 0 {
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
