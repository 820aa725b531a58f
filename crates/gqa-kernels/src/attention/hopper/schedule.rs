//! Divides the work of the kernels that split keys: every CTA takes a range of equal work, whatever
//! the lengths are that the device finds (stream-K, Osama et al., 2023).
//!
//! **Every CTA divides all work by itself**, [`divide`], before its warps go to their tasks: the
//! threads count the row tiles of all sequences and sum up their key tiles, and find where the
//! CTA's range begins and ends. Then they describe the row tiles of this range alone. A kernel of
//! one CTA ahead that did this once for all took 3 to 4 us of each call. Where an engine has all
//! ranges computed once a step, a CTA takes its own from there (`given.rs`).
//!
//! **Order of the work**: row tile, group of query heads that share it, key tile. The work of a row
//! tile is its key tiles and [`BEGINNING`]. Ranges begin at row tiles, or at multiples of the
//! fewest key tiles of a piece.
//!
//! **Memory**: row_tiles (row tile + CTA, [`TILE_WORDS`]) as [`Work`] has them, each written by the
//! CTAs that have some of its work: the last row tile of a CTA may be the first one of the next,
//! and has a place for each. range_starts (CTA + 1, [`LEFT_WORDS`]), which the merge reads: row
//! tile, group, key tile, 0, and where the row tile's rows are. The last one is behind all work.
//!
//! **Shared memory**: prefix sums, in the K and V stages, which are still empty; start and end of
//! the range, and its first row tile, in the place of the [window](super::row_tiles).

use super::packing::Packing;
#[cfg(not(target_arch = "nvptx64"))]
use super::pages::Pages;
use super::parts::Parts;
use super::shape::{Tile, WARPGROUP_ROWS};
use super::work::Work;
use crate::num::quotient;
use crate::params::AttentionParams;
#[cfg(not(target_arch = "nvptx64"))]
use crate::params::PagedHopperParams;
use crate::simt::*;
use crate::tile::pages::{Sequences, row_tiles};
use crate::tile::warp::{LANES, sum_up_to};
use core::marker::PhantomData;

/// Most sequences, whose row tiles are counted in shared memory.
pub const MOST_SEQUENCES: u32 = 4096;
/// Most row tiles, whose work is summed up in shared memory.
pub const MOST_ROW_TILES: u32 = 8192;

/// Rows of a row tile.
pub(super) const ROWS: u32 = 2 * WARPGROUP_ROWS;
/// Words of a row tile.
pub(super) const TILE_WORDS: u32 = 12;
/// Words of an entry of range_starts.
pub(super) const START_WORDS: u32 = 4;
/// Words of it in scratch memory, with those of its row tile that the merge needs.
pub(super) const LEFT_WORDS: u32 = 2 * START_WORDS;

/// Offset of the range's first row tile in words, after the start and end of the range.
const FIRST: u32 = 2 * START_WORDS;
/// Bytes of these, in the place of the window.
pub(super) const HERE: u32 = 4 * (FIRST + TILE_WORDS);
/// What the beginning of a row tile costs, in key tiles.
const BEGINNING: u32 = 2;
/// Offset of the inclusive prefix sums of row tiles per sequence; the sums of the warps come
/// before.
const ROW_TILES: u32 = 4 * LANES;
/// Offset of the inclusive prefix sums of work per row tile.
const WORK: u32 = ROW_TILES + 4 * MOST_SEQUENCES;
/// Bytes of all sums.
const SUMS: u32 = WORK + 4 * MOST_ROW_TILES;

/// Where a range begins: row tile, group and key tile.
pub(super) type Start = [u32; 3];

/// What divides the work of a call, in a CTA of `S`.
pub(super) struct Call<'a, S> {
    pub(super) p: &'a AttentionParams,
    pub(super) sequences: Sequences,
    pub(super) parts: Parts,
    /// Query heads of a group, which share row tiles.
    pub(super) heads: u32,
    /// Tokens of a row tile.
    pub(super) tokens: u32,
    /// Groups of query heads.
    pub(super) groups: u32,
    /// Keys of a tile.
    pub(super) keys: u32,
    shape: PhantomData<S>,
}

/// Finds the range of this CTA, or takes that of a schedule that fits, and describes its row tiles.
/// All threads take part; a barrier must follow.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn divide<S: Tile>(
    sequences: Sequences,
    packing: Packing,
    parts: Parts,
    p: &AttentionParams,
) {
    let given = parts.given;
    let call = Call::<S>::new(sequences, packing, parts, S::N, p);
    if given.is_given()
        && let Some([begin, end]) = given.range(&call)
    {
        call.leave(begin, end, |row_tile| given.row_tile(&call, row_tile - begin[0]));
    } else {
        let [begin, end] = call.divided();
        call.leave(begin, end, |row_tile| call.row_tile(row_tile));
    }
    // TMA fills the place of the sums next.
    fence_proxy_async();
}

/// Row tiles of all sequences for a group of query heads, at most.
#[cfg(not(target_arch = "nvptx64"))]
pub fn most_row_tiles(p: &PagedHopperParams) -> u32 {
    most_of(&p.hopper.attention, p.tokens, tokens_of(Packing::Heads(p.tile_heads)))
}

/// [`most_row_tiles`] of a call with that many tokens, in row tiles of `height` tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn most_of(p: &AttentionParams, tokens: u32, height: u32) -> u32 {
    // Saturates: the planner does not divide such a large call.
    let of_longest = p.batch.saturating_mul(p.q_len.div_ceil(height));
    of_longest.min(row_tiles(tokens, p.batch, height))
}

/// Tokens of a row tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tokens_of(packing: Packing) -> u32 {
    ROWS / WARPGROUP_ROWS * packing.tokens()
}

impl<'a, S: Tile> Call<'a, S> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(
        sequences: Sequences,
        packing: Packing,
        parts: Parts,
        keys: u32,
        p: &'a AttentionParams,
    ) -> Self {
        const { assert!(SUMS <= S::STAGES * S::STAGE_BYTES && S::THREADS <= LANES * LANES) }
        let (heads, tokens) = (packing.heads(), tokens_of(packing));
        let groups = quotient(p.q_heads, heads);
        Self { p, sequences, parts, heads, tokens, groups, keys, shape: PhantomData }
    }

    /// Row tiles for a group of query heads, at most. Lengths that do not fit each other may ask
    /// for more than there is room for.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn most(&self) -> u32 {
        most_of(self.p, self.sequences.tokens, self.tokens).min(MOST_ROW_TILES)
    }

    /// Where the range of this CTA begins, and that of the next one. All threads take part.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn divided(&self) -> [Start; 2] {
        let count = self.count_row_tiles().min(self.most());
        let work = self.sum_up_work(count);
        sync_threads();
        self.range(work, count)
    }

    /// The sums `bytes` bytes behind the first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sums(bytes: u32) -> Shared<u32> {
        Shared::at(S::KV + bytes)
    }

    /// Inclusive prefix sums of the row tiles per sequence. Returns the total.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count_row_tiles(&self) -> u32 {
        let (batch, sums) = (self.p.batch, Self::sums(ROW_TILES));
        let mut before = 0;
        for first in Rolled(0..batch.min(MOST_SEQUENCES), S::THREADS) {
            let b = first + thread_idx();
            let own = if b < batch { self.of_sequence(b) } else { 0 };
            let up_to = before + Self::sum_up_to_thread(own, &mut before);
            if b < MOST_SEQUENCES {
                sums.store(b, up_to);
            }
        }
        sync_threads();
        before
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_sequence(&self, b: u32) -> u32 {
        self.sequences.get(b, self.p).new.div_ceil(self.tokens)
    }

    /// Inclusive prefix sums of the work per row tile. Returns the total.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum_up_work(&self, count: u32) -> u32 {
        let sums = Self::sums(WORK);
        let mut before = 0;
        for first in Rolled(0..count, S::THREADS) {
            let row_tile = first + thread_idx();
            let exists = row_tile < count;
            let own = if exists { self.row_tile(row_tile).keys.count() + BEGINNING } else { 0 };
            let up_to = before + Self::sum_up_to_thread(own, &mut before);
            if exists {
                sums.store(row_tile, up_to);
            }
        }
        before
    }

    /// A row tile of the first query head, once all are counted.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn row_tile(&self, number: u32) -> Work {
        let sums = Self::sums(ROW_TILES);
        let batch = first_above(sums, self.p.batch.min(MOST_SEQUENCES), number);
        let before = if batch == 0 { 0 } else { sums.load(batch - 1) };
        let rows = [(number - before) * self.tokens, self.tokens];
        Work::of_row_tile(batch, rows, self.sequences.get(batch, self.p), self.keys, self.p)
    }

    /// Start and end of this CTA's range; `work` is the work of one group's row tiles, `count`
    /// their number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn range(&self, work: u32, count: u32) -> [Start; 2] {
        // Even lanes find the start, odd lanes the end.
        let cta = block_idx_x() + lane() % 2;
        let is_range = cta < self.parts.ctas;
        let start = if is_range { self.range_start(cta, work, count) } else { [count, 0, 0] };
        [0, 1].map(|lane| start.map(|word| shfl_idx_u32(word, lane)))
    }

    /// Where the range of a CTA begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn range_start(&self, cta: u32, work: u32, count: u32) -> Start {
        let all = u64::from(work) * u64::from(self.groups);
        let position = all * u64::from(cta) / u64::from(self.parts.ctas);
        let sums = Self::sums(WORK);
        let row_tile = first_above(sums, count, (position / u64::from(self.groups)) as u32);
        if row_tile >= count {
            return [count, 0, 0];
        }
        let before = if row_tile == 0 { 0 } else { sums.load(row_tile - 1) };
        let own = sums.load(row_tile) - before;
        let rest = (position - u64::from(before) * u64::from(self.groups)) as u32;
        let group = quotient(rest, own);
        let (rest, count) = (rest - group * own, own - BEGINNING);
        let shortest = self.parts.shortest;
        let keys = quotient(rest.saturating_sub(BEGINNING), shortest) * shortest;
        match () {
            () if count >= 2 * shortest && keys + shortest <= count => [row_tile, group, keys],
            // The row tile is too short to divide, or its rest would be too short: round to one of
            // its ends.
            () if 2 * rest < own && count < 2 * shortest => [row_tile, group, 0],
            () if group + 1 < self.groups => [row_tile, group + 1, 0],
            () => [row_tile + 1, 0, 0],
        }
    }

    /// Leaves the range and what `describe` says of its row tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave(&self, begin: Start, end: Start, describe: impl Fn(u32) -> Work) {
        let Parts { schedule, ctas, .. } = self.parts;
        let here = Shared::<u32>::at(S::BYTES);
        if thread_idx() == 0 {
            for (i, [row_tile, group, keys]) in [begin, end].into_iter().enumerate() {
                here.store_vec(START_WORDS * i as u32, [row_tile, group, keys, 0]);
            }
            schedule.leave_start(block_idx_x(), begin);
            if block_idx_x() + 1 == ctas {
                schedule.leave_start(ctas, end);
            }
        }
        for row_tile in Rolled(begin[0] + thread_idx()..behind(end), S::THREADS) {
            let words = describe(row_tile).words();
            for i in 0..3 {
                let at = tile_word(block_idx_x(), row_tile) + 4 * i as u32;
                schedule.row_tiles.store_vec(at as usize, words[i]);
                if row_tile == begin[0] {
                    here.store_vec(FIRST + 4 * i as u32, words[i]);
                }
            }
            if row_tile == begin[0] {
                let [_, [_, row, start, _], [past, total, ..]] = words;
                schedule.leave_cut(block_idx_x(), [row, start, past, total]);
            }
        }
    }

    /// Inclusive prefix sum of `own` over the threads; adds the total to `all`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum_up_to_thread(own: u32, all: &mut u32) -> u32 {
        let sums = Self::sums(0);
        let up_to = sum_up_to(lane(), own);
        if lane() == LANES - 1 {
            sums.store(warp(), up_to);
        }
        sync_threads();
        let of_warp = if lane() < S::THREADS / LANES { sums.load(lane()) } else { 0 };
        let of_warps = sum_up_to(lane(), of_warp);
        let before = shfl_idx_u32(of_warps, warp().saturating_sub(1));
        *all += shfl_idx_u32(of_warps, LANES - 1);
        sync_threads();
        if warp() == 0 { up_to } else { before + up_to }
    }
}

/// One past the last row tile of a range that ends there.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn behind([row_tile, group, keys]: Start) -> u32 {
    row_tile + u32::from((group | keys) > 0)
}

/// The first word of a row tile as a CTA leaves it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn tile_word(cta: u32, row_tile: u32) -> u32 {
    TILE_WORDS * (row_tile + cta)
}

/// Binary search: index of the first of `count` ascending numbers above `value`; `count` if there
/// is none.
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
    /// End of the last piece in key tiles, if another CTA has the rest of that row tile; else 0.
    end: u32,
    /// Lane `i` holds word `i` of the description of the next piece's row tile.
    held: u32,
}

/// The division in device memory.
#[derive(Clone, Copy)]
pub(super) struct Schedule {
    pub(super) row_tiles: Global<u32>,
    pub(super) range_starts: Global<u32>,
}

impl Schedule {
    /// Where the range of a CTA begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn range_start(self, cta: u32) -> Start {
        let [row_tile, group, keys, _] = self.range_starts.load_vec((LEFT_WORDS * cta) as usize);
        [row_tile, group, keys]
    }

    /// Of the row tile where the range of a CTA begins, the first token in its sequence, the
    /// sequence's first token, and its past and total keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn cut(self, cta: u32) -> [u32; 4] {
        self.range_starts.load_vec((LEFT_WORDS * cta + START_WORDS) as usize)
    }

    /// Leaves where the range of a CTA begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave_start(self, cta: u32, [row_tile, group, keys]: Start) {
        self.range_starts.store_vec((LEFT_WORDS * cta) as usize, [row_tile, group, keys, 0]);
    }

    /// Leaves what [`cut`](Self::cut) is for.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave_cut(self, cta: u32, words: [u32; 4]) {
        self.range_starts.store_vec((LEFT_WORDS * cta + START_WORDS) as usize, words);
    }

    /// The range of this CTA, which [`divide`] has stored in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn range<S: Tile>(self, packing: Packing, q_heads: u32) -> WorkRange {
        let here = Shared::<u32>::at(S::BYTES);
        let [begin, end] = [0, 1].map(|i| {
            let [row_tile, group, keys, _] = here.load_vec(START_WORDS * i);
            [row_tile, group, keys]
        });
        let ([row_tile, group, from], [last, behind, rest]) = (begin, end);
        let (heads, groups) = (packing.heads(), quotient(q_heads, packing.heads()));
        let whole = (last - row_tile) * groups + behind - group;
        let left = if begin == end { 0 } else { whole + rest.min(1) };
        let (row_tiles, end) = (self.row_tiles, rest);
        // From shared memory: loads from global memory would take longer.
        let held = if left > 0 && lane() < TILE_WORDS { here.load(FIRST + lane()) } else { 0 };
        WorkRange { row_tiles, groups, heads, row_tile, group, from, left, end, held }
    }
}

impl WorkRange {
    /// The next piece; `None` after the last.
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
        // A schedule may say anything.
        let to = if is_cut { self.end.min(work.keys.count()) } else { work.keys.count() };
        Some(work.piece([from, to]))
    }

    /// Moves to the next group, or to the first group of the next row tile.
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
            let at = tile_word(block_idx_x(), self.row_tile) + lane;
            self.held = self.row_tiles.load(at as usize);
        }
    }
}

/// What the CTAs of a call leave for these lengths, by the simulated machine: row tiles, and where
/// ranges begin. `starts` is (sequences + 1), `past_seqlens` (sequences); the CTAs are those of the
/// kernel for head size 128. They take their ranges from `given`, if that fits.
///
/// # Errors
/// Where a CTA accesses memory outside of its bounds, or several write one place.
#[cfg(not(target_arch = "nvptx64"))]
pub fn divided(
    starts: &[i32],
    past_seqlens: &[i32],
    given: Option<&[u32]>,
    p: &PagedHopperParams,
    seed: u64,
) -> Result<[Vec<u32>; 2], gqa_sim::Fault> {
    use super::schedule_words;
    use gqa_sim::Arg;
    let [mut row_tiles, mut range_starts] = schedule_words(p).map(|words| vec![u32::MAX; words]);
    let kernel = |arguments: &gqa_sim::Arguments| {
        let p: PagedHopperParams = arguments.params(5);
        let schedule = [arguments.global(2), arguments.global(3)];
        let parts = Parts::new(schedule, Global::null(), Global::null(), &p);
        let parts = parts.by(arguments.global(4));
        let pages = Pages::new(arguments.global(0), arguments.global(1), Global::null(), &p);
        let (packing, attention) = (Packing::Heads(p.tile_heads), &p.hopper.attention);
        divide::<Simulated>(pages.sequences, packing, parts, attention);
    };
    let arguments = [
        Arg::read(starts),
        Arg::read(past_seqlens),
        Arg::write(&mut row_tiles),
        Arg::write(&mut range_starts),
        given.map_or_else(Arg::null, Arg::read),
        Arg::params(p),
    ];
    gqa_sim::launch(&simulated("divide", p, seed), &kernel, &arguments)?;
    Ok([row_tiles, range_starts])
}

/// The schedule for these lengths, by the simulated machine.
///
/// # Errors
/// Where a CTA leaves its memory, or several write one place.
#[cfg(not(target_arch = "nvptx64"))]
pub fn made(
    starts: &[i32],
    past_seqlens: &[i32],
    p: &PagedHopperParams,
    seed: u64,
) -> Result<Vec<u32>, gqa_sim::Fault> {
    use gqa_sim::Arg;
    let mut words = vec![0; super::given_words(past_seqlens.len())];
    let kernel = |arguments: &gqa_sim::Arguments| {
        let [starts, past_seqlens] = [arguments.global(0), arguments.global(1)];
        let p: PagedHopperParams = arguments.params(3);
        super::given::make::<Simulated>(starts, past_seqlens, arguments.global(2), &p);
    };
    let arguments =
        [Arg::read(starts), Arg::read(past_seqlens), Arg::write(&mut words), Arg::params(p)];
    gqa_sim::launch(&simulated("make", p, seed), &kernel, &arguments)?;
    Ok(words)
}

/// The shape of simulated CTAs.
#[cfg(not(target_arch = "nvptx64"))]
type Simulated = super::D128<false>;

#[cfg(not(target_arch = "nvptx64"))]
fn simulated(name: &'static str, p: &PagedHopperParams, seed: u64) -> gqa_sim::Launch<'static> {
    gqa_sim::Launch {
        name,
        grid: [p.ctas, 1, 1],
        threads: Simulated::THREADS,
        shared_bytes: Simulated::PAGED_SHARED_BYTES,
        seed,
        communicates: true,
        ..gqa_sim::Launch::default()
    }
}
