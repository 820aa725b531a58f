//! Divides the key tiles of all sequences among CTAs, whatever their lengths are: each row tile of
//! a sequence has [`ctas`](LatentParams::ctas) CTAs, and each of these a range of equal work.
//!
//! **Order of the work**: sequence, key tile. The work of a sequence is its key tiles and
//! [`beginning`](LatentParams::beginning). A range ends at the end of a sequence, or inside of one
//! if both sides then have enough tiles. What a range has of one sequence is a **piece**. A CTA
//! has at most two pieces that are not whole sequences: its first and its last one. Each has a
//! place for its result in scratch memory, and [`merge_parts`](super::merge_parts) merges them.
//!
//! **Every CTA divides all work by itself**, before its warps go to their tasks: its threads load
//! the lengths, sum up the work, and find where the range begins and ends. So while the kernel
//! runs, nothing may write lengths.
//!
//! **Whole sequences**: if each can have a CTA of its own that takes hardly longer than an equal
//! share, none is cut, because a merge costs more than that.
//!
//! **Memory**: range_starts (CTA + 1, [`START_WORDS`]), which the merge reads: where a range
//! begins, as sequence and key tile, and the first token and the number of tokens of that sequence.
//! The last one is behind all work.
//!
//! **Shared memory**: prefix sums of the work, in the buffers, which are still empty.

use super::{KEYS, LengthTensors, Shape, THREADS};
use crate::concept::pages::Sequence;
use crate::params::LatentParams;
use crate::simt::*;
use crate::tile::warp::{LANES, sum, sum_up_to};

/// Most sequences, whose work is summed up in shared memory.
pub const MOST_SEQUENCES: u32 = 4096;
/// What the beginning of a sequence costs a CTA, in key tiles.
pub const BEGINNING: u32 = 5;
/// Words of an entry of range_starts.
pub(super) const START_WORDS: u32 = 4;

/// Key tiles beyond an equal share that a CTA may have if no sequence is cut then.
pub(super) const SLACK: u32 = 4;
/// Fewest tiles on both sides of a cut: that part of an equal share, but no more than so many.
const SHORTEST_PART: u32 = 8;
const SHORTEST: u32 = 8;
/// Offset of the sums in the buffers, after the sum and the maximum of each warp.
const SUMS: u32 = 2 * 4 * LANES;

/// Where a range begins: a sequence, and one of its key tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) batch: u32,
    pub(super) tile: u32,
}

impl Start {
    /// Whether it lies before the end of a range.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_before(self, end: Self) -> bool {
        self.batch < end.batch || (self.batch == end.batch && self.tile < end.tile)
    }
}

/// Key tiles of a sequence.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn tiles_of(sequence: Sequence) -> u32 {
    if sequence.new == 0 { 0 } else { sequence.seqlen().total.div_ceil(KEYS) }
}

/// What is divided.
struct Division {
    /// Inclusive prefix sums of the work per sequence.
    sums: Shared<u32>,
    sequences: u32,
    work: u32,
    /// Key tiles of the longest sequence.
    longest: u32,
    ctas: u32,
    beginning: u32,
}

/// Start and end of this CTA's range. All threads take part; a barrier must follow.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn range<S: Shape>(lengths: LengthTensors, p: &LatentParams) -> [Start; 2] {
    const { assert!(SUMS + 4 * MOST_SEQUENCES <= S::BUFFER_BYTES && THREADS <= LANES * LANES) }
    let division = Division::new::<S>(lengths, p);
    // Even lanes find the start, odd lanes the end.
    let start = division.start(block_idx_y() + lane() % 2);
    let [begin, end] = [0, 1].map(|lane| Start {
        batch: shfl_idx_u32(start.batch, lane),
        tile: shfl_idx_u32(start.tile, lane),
    });
    // TMA fills the place of the sums next.
    fence_proxy_async();
    [begin, end]
}

impl Division {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<S: Shape>(lengths: LengthTensors, p: &LatentParams) -> Self {
        let (of_warps, sums) = (Shared::<u32>::at(S::KV), Shared::<u32>::at(S::KV + SUMS));
        let sequences = p.attention.batch.min(MOST_SEQUENCES);
        let (mut work, mut longest) = (0, 0);
        for first in Rolled(0..sequences, THREADS) {
            let b = first + thread_idx();
            let exists = b < sequences;
            let tiles = if exists { tiles_of(lengths.sequence(false, b, p).0) } else { 0 };
            let own = if exists { tiles + p.beginning } else { 0 };
            let up_to = sum_up_to(lane(), own);
            let most = over_lanes(tiles);
            if first > 0 {
                // All have read what the warps left before.
                sync_threads();
            }
            if lane() == LANES - 1 {
                of_warps.store(warp(), up_to);
                of_warps.store(LANES + warp(), most);
            }
            sync_threads();
            let is_warp = lane() < THREADS / LANES;
            let [of_warp, most] =
                [0, LANES].map(|kind| if is_warp { of_warps.load(kind + lane()) } else { 0 });
            let before = sum(if lane() < warp() { of_warp } else { 0 }, LANES);
            if exists {
                sums.store(b, work + before + up_to);
            }
            work += sum(of_warp, LANES);
            longest = longest.max(over_lanes(most));
        }
        sync_threads();
        let [ctas, beginning] = [p.ctas, p.beginning];
        Self { sums, sequences, work, longest, ctas, beginning }
    }

    /// Where the range of a CTA begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start(&self, cta: u32) -> Start {
        let Self { sums, sequences, work, longest, ctas, beginning } = *self;
        let share = work / ctas.max(1);
        if sequences <= ctas && longest + beginning <= share + SLACK {
            return Start { batch: cta.min(sequences), tile: 0 };
        }
        // In 32 bits: a 64-bit division takes long.
        let position = cta * share + cta * (work - share * ctas) / ctas.max(1);
        let batch = if cta < ctas { self.sequence_at(position) } else { sequences };
        if batch >= sequences {
            return Start { batch: sequences, tile: 0 };
        }
        let before = if batch == 0 { 0 } else { sums.load(batch - 1) };
        let (own, rest) = (sums.load(batch) - before, position - before);
        let (tiles, tile) = (own - beginning, rest.saturating_sub(beginning));
        let shortest = (share / SHORTEST_PART).clamp(1, SHORTEST);
        // Of a sequence that is too short to be cut the nearer end. Otherwise the tile, unless it
        // is too near to an end.
        let is_cut = tiles >= 2 * shortest;
        let is_start = if is_cut { tile < shortest } else { 2 * rest < own };
        match is_start {
            true => Start { batch, tile: 0 },
            false if is_cut && tile + shortest <= tiles => Start { batch, tile },
            false => Start { batch: batch + 1, tile: 0 },
        }
    }

    /// The sequence whose work is at that position.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sequence_at(&self, position: u32) -> u32 {
        let (mut low, mut high) = (0, self.sequences);
        while low < high {
            let middle = (low + high) / 2;
            if self.sums.load(middle) > position {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }
}

/// The greatest value of all lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_lanes(value: u32) -> u32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |most, mask| most.max(shfl_xor_u32(most, mask)))
}
