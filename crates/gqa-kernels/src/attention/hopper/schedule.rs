//! Divides the work of the kernels that split keys: every CTA takes a range of equal work, whatever
//! the lengths are that the device finds (stream-K, Osama et al., 2023).
//!
//! **A kernel of one CTA**, [`schedule`], describes the row tiles of all sequences, and where each
//! CTA's range begins. The attention kernel behind it reads both, and has nothing to compute before
//! it loads: one warp that numbers row tiles for itself takes longer than short ones do.
//!
//! **Order of the work**: row tile, group of query heads that share it, key tile. The work of a row
//! tile is its key tiles and [`BEGINNING`]. Ranges begin at row tiles, or at multiples of the
//! fewest key tiles of a piece.
//!
//! **Memory**: row_tiles (row tile, [`TILE_WORDS`]) as [`Work`] has them; range_starts (CTA + 1,
//! 4): row tile, group, key tile and 0. The last one is behind all work.

use super::packing::Packing;
use super::shape::WARPGROUP_ROWS;
use super::work::Work;
use crate::num::quotient;
use crate::params::{AttentionParams, PagedHopperParams};
use crate::simt::*;
use crate::tile::pages::{Sequences, row_tiles};
use crate::tile::warp::{LANES, sum_up_to};

/// Threads of the kernel.
pub const THREADS: u32 = 1024;
/// Most sequences, whose row tiles are counted in shared memory.
pub const MOST_SEQUENCES: u32 = 4096;
/// Most row tiles, whose work is summed up in shared memory.
pub const MOST_ROW_TILES: u32 = 8192;
/// Shared memory of the kernel, in bytes.
pub const SHARED_BYTES: u32 = WORK + 4 * MOST_ROW_TILES;

/// Rows of a row tile.
pub(super) const ROWS: u32 = 2 * WARPGROUP_ROWS;
/// Words of a row tile.
pub(super) const TILE_WORDS: u32 = 12;
/// Words of a place where a range begins.
pub(super) const START_WORDS: u32 = 4;

/// What the beginning of a row tile costs, in key tiles.
const BEGINNING: u32 = 2;
/// Offset of the row tiles of the sequences up to each one, behind the sums of the warps.
const ROW_TILES: u32 = 4 * LANES;
/// Offset of the work of the row tiles up to each one.
const WORK: u32 = ROW_TILES + 4 * MOST_SEQUENCES;

/// What the kernel reads besides lengths.
struct Call<'a> {
    p: &'a PagedHopperParams,
    sequences: Sequences,
    row_tiles: Global<u32>,
    /// Tokens of a row tile.
    tokens: u32,
    /// Groups of query heads.
    groups: u32,
}

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn schedule(
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    row_tiles: Global<u32>,
    range_starts: Global<u32>,
    p: PagedHopperParams,
) {
    grid_dependency_wait();
    launch_dependents();
    let sequences = Sequences {
        starts,
        past_seqlens,
        tokens: p.tokens,
        least: p.least,
        counts_new: p.counts_new != 0,
    };
    let call = Call {
        p: &p,
        sequences,
        row_tiles,
        tokens: tokens_of(Packing::Heads(p.tile_heads)),
        groups: quotient(p.hopper.attention.q_heads, p.tile_heads),
    };
    // Lengths that do not fit each other may ask for more than there is room for.
    let count = call.count_row_tiles().min(most_row_tiles(&p)).min(MOST_ROW_TILES);
    let work = call.describe_row_tiles(count);
    sync_threads();
    for cta in Rolled(thread_idx()..p.ctas + 1, THREADS) {
        let start = if cta < p.ctas { call.range_start(cta, work, count) } else { [count, 0, 0] };
        let [row_tile, group, keys] = start;
        range_starts.store_vec((START_WORDS * cta) as usize, [row_tile, group, keys, 0]);
    }
}

/// Row tiles of all sequences for a group of query heads, at most.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn most_row_tiles(p: &PagedHopperParams) -> u32 {
    let AttentionParams { batch, q_len, .. } = p.hopper.attention;
    let tokens = tokens_of(Packing::Heads(p.tile_heads));
    // Saturates: a call of more is not divided.
    batch.saturating_mul(q_len.div_ceil(tokens)).min(row_tiles(p.tokens, batch, tokens))
}

/// Tokens of a row tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tokens_of(packing: Packing) -> u32 {
    ROWS / WARPGROUP_ROWS * packing.tokens()
}

impl Call<'_> {
    /// Counts the row tiles of the sequences up to each one. Returns how many all have.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count_row_tiles(&self) -> u32 {
        let (batch, sums) = (self.p.hopper.attention.batch, Shared::<u32>::at(ROW_TILES));
        let mut before = 0;
        for first in Rolled(0..batch.min(MOST_SEQUENCES), THREADS) {
            let b = first + thread_idx();
            let own = if b < batch { self.of_sequence(b) } else { 0 };
            let up_to = before + sum_up_to_thread(own, &mut before);
            if b < MOST_SEQUENCES {
                sums.store(b, up_to);
            }
        }
        sync_threads();
        before
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_sequence(&self, b: u32) -> u32 {
        self.sequences.get(b, &self.p.hopper.attention).new.div_ceil(self.tokens)
    }

    /// Describes the row tiles, and sums up the work of those up to each one. Returns that of all.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn describe_row_tiles(&self, count: u32) -> u32 {
        let a = &self.p.hopper.attention;
        let sums = Shared::<u32>::at(WORK);
        let mut before = 0;
        for first in Rolled(0..count, THREADS) {
            let row_tile = first + thread_idx();
            let mut own = 0;
            if row_tile < count {
                let batch = self.sequence_of(row_tile);
                let sequence = self.sequences.get(batch, a);
                let nth = row_tile - self.row_tiles_before(batch);
                let rows = [nth * self.tokens, self.tokens];
                let work = Work::of_row_tile(batch, rows, sequence, self.p.keys, a);
                let words = work.words();
                for i in 0..3 {
                    let at = TILE_WORDS * row_tile + 4 * i as u32;
                    self.row_tiles.store_vec(at as usize, words[i]);
                }
                own = work.keys.count() + BEGINNING;
            }
            let up_to = before + sum_up_to_thread(own, &mut before);
            if row_tile < count {
                sums.store(row_tile, up_to);
            }
        }
        before
    }

    /// The sequence of a row tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sequence_of(&self, row_tile: u32) -> u32 {
        let batch = self.p.hopper.attention.batch.min(MOST_SEQUENCES);
        first_above(Shared::at(ROW_TILES), batch, row_tile)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_tiles_before(&self, batch: u32) -> u32 {
        if batch == 0 { 0 } else { Shared::<u32>::at(ROW_TILES).load(batch - 1) }
    }

    /// Where the range of a CTA begins, with so much work in each group's row tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn range_start(&self, cta: u32, work: u32, count: u32) -> [u32; 3] {
        let all = u64::from(work) * u64::from(self.groups);
        let position = all * u64::from(cta) / u64::from(self.p.ctas);
        let sums = Shared::<u32>::at(WORK);
        let row_tile = first_above(sums, count, (position / u64::from(self.groups)) as u32);
        if row_tile >= count {
            return [count, 0, 0];
        }
        let before = if row_tile == 0 { 0 } else { sums.load(row_tile - 1) };
        let own = sums.load(row_tile) - before;
        let rest = (position - u64::from(before) * u64::from(self.groups)) as u32;
        let group = quotient(rest, own);
        let (rest, count) = (rest - group * own, own - BEGINNING);
        let shortest = self.p.shortest;
        let keys = quotient(rest.saturating_sub(BEGINNING), shortest) * shortest;
        match () {
            () if count >= 2 * shortest && keys + shortest <= count => [row_tile, group, keys],
            // The row tile is not divided, or too little would be left of it.
            () if 2 * rest < own && count < 2 * shortest => [row_tile, group, 0],
            () if group + 1 < self.groups => [row_tile, group + 1, 0],
            () => [row_tile + 1, 0, 0],
        }
    }
}

/// The first of `count` rising numbers that is above `value`; `count` if none is.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn first_above(numbers: Shared<u32>, count: u32, value: u32) -> u32 {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = (low + high) / 2;
        if numbers.load(middle) > value {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// The sum of `own` up to this thread, and adds that of all threads to `all`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_up_to_thread(own: u32, all: &mut u32) -> u32 {
    let sums = Shared::<u32>::at(0);
    let up_to = sum_up_to(lane(), own);
    if lane() == LANES - 1 {
        sums.store(warp(), up_to);
    }
    sync_threads();
    let of_warps = sum_up_to(lane(), sums.load(lane()));
    let before = shfl_idx_u32(of_warps, warp().saturating_sub(1));
    *all += shfl_idx_u32(of_warps, LANES - 1);
    sync_threads();
    if warp() == 0 { up_to } else { before + up_to }
}

/// The range of a CTA, for one warp.
pub(super) struct WorkRange {
    row_tiles: Global<u32>,
    groups: u32,
    /// Query heads of a group.
    heads: u32,
    /// Row tile, group and first key tile of the next piece.
    row_tile: u32,
    group: u32,
    from: u32,
    /// Pieces that are left.
    left: u32,
    /// Where the last one ends, if another CTA has the rest of its row tile; else 0.
    end: u32,
    /// A word of the next piece's row tile, by lane.
    held: u32,
}

/// What the attention kernel reads of a schedule.
#[derive(Clone, Copy)]
pub(super) struct Schedule {
    pub(super) row_tiles: Global<u32>,
    pub(super) range_starts: Global<u32>,
}

impl Schedule {
    /// Where the range of a CTA begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn range_start(self, cta: u32) -> [u32; 3] {
        let [row_tile, group, keys, _] = self.range_starts.load_vec((START_WORDS * cta) as usize);
        [row_tile, group, keys]
    }

    /// The range of this CTA.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn range(self, packing: Packing, q_heads: u32) -> WorkRange {
        let [begin, end] = [0, 1].map(|next| self.range_start(block_idx_x() + next));
        let ([row_tile, group, from], [last, behind, rest]) = (begin, end);
        let (heads, groups) = (packing.heads(), quotient(q_heads, packing.heads()));
        let whole = (last - row_tile) * groups + behind - group;
        let left = if begin == end { 0 } else { whole + rest.min(1) };
        let (row_tiles, end) = (self.row_tiles, rest);
        let mut range =
            WorkRange { row_tiles, groups, heads, row_tile, group, from, left, end, held: 0 };
        range.hold();
        range
    }
}

impl WorkRange {
    /// The next piece; `None` behind the last.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn next(&mut self) -> Option<Work> {
        if self.left == 0 {
            return None;
        }
        let words = core::array::from_fn(|word| shfl_idx_u32(self.held, word as u32));
        let work = Work::of_words(words, self.group * self.heads);
        let from = self.from;
        self.step();
        let is_cut = self.left == 0 && self.end > 0;
        Some(work.piece([from, if is_cut { self.end } else { work.keys.count() }]))
    }

    /// To the next group, or the first one of the next row tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step(&mut self) {
        (self.left, self.group, self.from) = (self.left - 1, self.group + 1, 0);
        if self.group == self.groups {
            (self.row_tile, self.group) = (self.row_tile + 1, 0);
            self.hold();
        }
    }

    /// Loads the words of the next piece's row tile, if there is one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hold(&mut self) {
        // opaque(): otherwise the comparison occupies a predicate across the loop over pieces.
        let lane = opaque(lane());
        if self.left > 0 && lane < TILE_WORDS {
            self.held = self.row_tiles.load((TILE_WORDS * self.row_tile + lane) as usize);
        }
    }
}
