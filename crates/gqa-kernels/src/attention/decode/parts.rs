//! Divides the keys of all sequences among the blocks by the lengths that the device finds: equal
//! splits would leave most of them idle while a few read a long sequence.
//!
//! The keys of a sequence are one **part** or several equal ones, each a block's. Where there are
//! at least two places for blocks to a sequence, parts are about as short as they can be so that
//! all have a place at once. Elsewhere a sequence is split if it has more than two places' shares
//! of all keys, into parts of a share: half of the SMs read as fast as memory is, so that no more
//! is lost. Parts of split sequences come first: they take longest, and there are at most
//! [`places`] of them, so that scratch memory does not grow with the batch.
//!
//! The threads of a block look each at other sequences; then every warp finds the block's part by
//! itself. It goes over all sequences a few times by the same short loop: code that runs once is
//! fetched while it runs, and takes longer than what it computes.

use super::exchange::Mailbox;
use super::layout::{Heads, Layout};
use super::products::Products;
use super::{Decode, Place};
use crate::params::DecodeParams;
use crate::simt::{
    Rolled, Shared, block_idx_x, block_idx_y, block_idx_z, cluster_rank, cluster_size, lane,
    shfl_idx_u32, shfl_xor_u32, sync_threads, thread_idx,
};
use crate::tile::rows::{Rows, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::warp::{LANES, sum, sum_up_to};

/// Most parts of split sequences, of one KV head and row tile, for each place.
const PER_PLACE: u32 = 2;

/// Most parts of a sequence: one block merges them.
const MOST_PARTS: u32 = 64;

/// Passes over the sequences, the last but one with parts that are certainly long enough.
const PASSES: u32 = 6;

/// Most sequences whose keys lengths may divide: their tiles are counted where keys come later.
pub const MOST_DIVIDED: u32 = 4096;

/// Whether kernels of such heads divide keys by lengths: heads of 256 over quantized values leave
/// no registers for it.
pub const fn divides(head_size: u32, is_quantized: bool) -> bool {
    head_size < 256 || !is_quantized
}

/// Most parts of a KV head and row tile. A sequence that is split into parts of a share has fewer
/// more of them than it has shares, and there are as many shares as places.
pub(super) fn most(p: &DecodeParams) -> u32 {
    let (places, sequences) = (p.parts, p.attention.batch);
    if 2 * sequences <= places { places } else { sequences + places }
}

/// Partial results that scratch memory has room for, of all KV heads and row tiles.
pub(super) fn places(p: &DecodeParams) -> usize {
    let columns = p.attention.kv_heads * row_tiles(&p.attention, p.rows);
    columns as usize * (PER_PLACE * p.parts) as usize
}

/// Number of the block, in the order in which they begin.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn block(p: &DecodeParams) -> u32 {
    block_idx_y() * p.attention.kv_heads + block_idx_x()
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn place([batch, index, split, splits]: [u32; 4]) -> Place {
    let (kv_head, row_tile) = (block_idx_x(), block_idx_z());
    Place { kv_head, batch, row_tile, index, split, splits, stride: 1, rank: 0, ranks: 1 }
}

/// The sequences of a call, and how long parts of their keys are.
struct Division {
    sequences: u32,
    /// Key tiles of each sequence; none if another launch has it.
    tiles: Shared<u32>,
    /// A sequence with more tiles than that is split.
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
    /// Tiles of a lane's sequence among those from `first` on, and how many parts they are.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sequence(&self, first: u32) -> (u32, u32) {
        let b = first + lane();
        let tiles = if b < self.sequences { self.tiles.load(b) } else { 0 };
        let parts = tiles.div_ceil(self.part.max(1)).min(MOST_PARTS);
        (tiles, if tiles > self.longest { parts } else { tiles.min(1) })
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

    /// Finds how long parts are, and how many parts of split sequences there are.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn measure(&mut self, places: u32, shortest: u32) -> u32 {
        let (mut sequences, mut of_split) = (0, 0);
        for pass in Rolled(0..PASSES, 1) {
            let sums = self.sums();
            of_split = sums.of_split;
            let is_first = pass == 0;
            sequences = if is_first { sums.parts } else { sequences };
            let is_few = 2 * sequences <= places;
            let share = sums.tiles.div_ceil(places.max(1)).max(shortest);
            if is_first && !is_few {
                (self.longest, self.part) = (2 * share, share);
            } else if is_first {
                (self.longest, self.part) = (share, share);
            } else if !is_few || sums.parts <= places {
                break;
            } else {
                let longer = self.part as f32 * (sums.parts as f32 / places as f32);
                // Those behind whole parts are no more than sequences.
                let enough = sums.tiles.div_ceil((places - sequences).max(1));
                let is_last = pass + 2 == PASSES;
                let part = if is_last { enough } else { (longer as u32 + 1).min(enough) };
                (self.longest, self.part) = (part, part);
            }
        }
        // Whatever the lengths are: scratch memory has no room for more.
        if of_split > PER_PLACE * places {
            (self.longest, of_split) = (u32::MAX, 0);
        }
        of_split
    }

    /// Part number `nth`: its sequence, the number of that one's first part, which of its parts it
    /// is, and of how many. `None` behind the last one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(&self, nth: u32, of_split: u32) -> Option<[u32; 4]> {
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
                let split = left - before;
                return Some([first + here, nth - split, split, splits]);
            }
            left -= all;
        }
        None
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
    /// Fewest tiles of a part: two of each team, or what is merged costs more than it saves.
    const SHORTEST: u32 = 2 * Self::TEAMS;

    /// The block's part, if there is one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn part_of<L: Layout>(
        p: &DecodeParams,
        layout: L,
        lengths: Seqlens,
    ) -> Option<Place> {
        const { assert!(4 * MOST_DIVIDED <= Self::TEAMS * Self::RING_BYTES) }
        let (sequences, tiles) = (p.attention.batch, Shared::at(Self::RINGS));
        for b in Rolled(thread_idx()..sequences, Self::THREADS) {
            tiles.store(b, Self::tiles(p, layout, lengths, b));
        }
        sync_threads();
        let mut division = Division { sequences, tiles, longest: u32::MAX, part: u32::MAX };
        let of_split = division.measure(p.parts, Self::SHORTEST);
        let found = division.find(block_idx_y(), of_split);
        sync_threads();
        let [batch, first, split, splits] = found?;
        let column = block_idx_z() * p.attention.kv_heads + block_idx_x();
        Some(place([batch, column * PER_PLACE * p.parts + first, split, splits]))
    }

    /// Key tiles that sequence `b` sees; none if it has no tokens, or another launch has it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn tiles<L: Layout>(p: &DecodeParams, layout: L, lengths: Seqlens, b: u32) -> u32 {
        let a = &p.attention;
        // Both are asked for before either is there.
        let length = lengths.load(b, a.q_len);
        let rows = layout.rows(a, Rows::of(a, 0, 0, b, Self::ROWS));
        if L::MAY_BE_EMPTY && rows.count() == 0 {
            return 0;
        }
        let total = layout.seqlen(a, &rows, length).total;
        let window = if a.window > 0 { a.window.saturating_add(a.q_len) } else { u32::MAX };
        total.min(window).div_ceil(Self::KEYS).max(1)
    }

    /// Where the block's place is kept: behind the mailbox, or in it if no peer writes to it before
    /// all have come to their ends.
    const KEPT: u32 = {
        let at = if Self::SHARES_MAILBOX {
            16
        } else {
            Mailbox::<D8>::bytes(Self::ROWS).next_multiple_of(16)
        };
        assert!(at + 32 <= Self::MAILBOX_BYTES);
        at
    };

    /// Whether lengths may divide the keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn divides<L: Layout>(p: &DecodeParams) -> bool {
        L::DIVIDES && divides(Self::HEAD_SIZE, Self::IS_QUANTIZED) && p.parts > 0
    }

    /// Whether a block that forgets its place keeps it in shared memory, because finding it anew
    /// would be long.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keeps_place<L: Layout>() -> bool {
        L::DIVIDES && divides(Self::HEAD_SIZE, Self::IS_QUANTIZED) && Self::FORGETS
    }

    /// Keeps the block's place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keep(place: Place) {
        let Place { kv_head, batch, row_tile, index, split, splits, stride, .. } = place;
        if thread_idx() == 0 {
            let kept = Shared::<u32>::at(Self::KEPT);
            kept.store_vec(0, [kv_head, batch, row_tile, index]);
            kept.store_vec(4, [split, splits, stride, 0]);
        }
    }

    /// The block's place, as it was kept.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn kept() -> Place {
        let kept = Shared::<u32>::at(Self::KEPT);
        let [[kv_head, batch, row_tile, index], [split, splits, stride, _]] =
            [0, 4].map(|word| kept.load_vec(word));
        let (rank, ranks) = (cluster_rank(), cluster_size());
        Place { kv_head, batch, row_tile, index, split, splits, stride, rank, ranks }
    }
}
