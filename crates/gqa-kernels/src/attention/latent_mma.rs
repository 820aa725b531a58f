//! Decode over a latent KV cache by `mma.sync`, on every GPU from SM 80 on: all query heads share
//! one row per token, whose 576 channels are the key and whose first 512 are the value.
//!
//! **One CTA** attends with `ROWS` packed query rows of one sequence (tokens times query heads) to
//! one split of its keys, in tiles of `KEYS` cache rows, each of which is read from global memory
//! once for both products. Four or eight warps are a *group*, which has 16 of the rows: each of
//! them computes the scores of its share of a tile's keys, and accumulates its share of the
//! output's columns over all of the tile's keys. Queries stay in registers, as left operands.
//!
//! **Grid**: (row tiles, splits, sequences); CTAs of one sequence's row tiles are neighbours and
//! read the same keys from L2.
//!
//! **Tensors**: q (entry, query head, row, 576) with any strides that are multiples of 8; over
//! blocks the tokens of all sequences are the rows of one entry. k: rows of the cache, `k.batch`
//! cells from one block to the next and `k.row` from one row of a block to the next, multiples of
//! 16 bytes; of a contiguous cache a batch entry is a block. Over blocks, starts (batch + 1) and
//! past_seqlens (batch) as in [`Sequences`](crate::tile::pages::Sequences), and block_table (batch,
//! blocks of a sequence); else starts is null, and past_seqlens and query_seqlens are the lengths
//! of [`Seqlens`](crate::tile::seqlens::Seqlens). out (entry, query head, row, 512) with its
//! strides, and lse (entry, query head, row) or null, where keys are not split; else partial_out
//! (split, entry, query head, row, 512) and partial_lse (split, entry, query head, row), which
//! [`merge()`](super::latent::merge) merges.
//!
//! **Shared memory**: a ring of `STAGES` tiles, swizzled rows of 576 cells, the last of which has
//! the queries first; P of each group, swizzled rows of `KEYS` elements; the description of each
//! row; for each row one f32 per warp of its group, for reductions;
//! whether each stage has rows outside of the cache; over float8 a factor of each row's scores.
//!
//! **Pipeline**: for key tile `j`:
//!
//! ```text
//! wait for tile j ‖ barrier (all are done with tile j - 1 and its P)    start tile j + STAGES - 1
//!     S = Q Kᵀ of some keys, mask, maxima and P to shared memory
//!     barrier of the group (they are stored)
//!     O += P V of some columns
//! ```
//!
//! P is stored relative to the maximum of the previous tiles, before the other warps' maxima are
//! known. Only if a score exceeds that maximum by much, as in the first tile, all warps of the
//! group raise it and store P again, between barriers.
//!
//! **Over float8** (`cached.rs`) warps convert quantized values to float16 in registers: each key
//! once, in the warp that scores it, and each value once, in the warp that has its column. Queries
//! become float16, each row divided by a power of two. That power and the cache's scale multiply
//! the scores; the scale multiplies the output.
//!
//! **Gaps**: the block table may hold indices outside of the cache. Such rows are zeros, and their
//! keys are masked.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the type of the products.

mod cached;
mod output;
mod warpgroup;

pub use cached::{Cached, Codes, Elements};
pub use warpgroup::Float8Keys;

use super::latent::{CONTIGUOUS, LengthTensors, VALUE_SIZE};
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::LatentParams;
use crate::simt::*;
use crate::tile::copy::wait_for_all_but;
use crate::tile::fragment::{Fragments, row_of, zeros};
use crate::tile::rows::{Row, Rows, row_tiles};
use crate::tile::softmax::{SLACK, ScoreScale, hide, mask, row_max, total};
use crate::tile::swizzle::{Swizzled, swizzled_bytes};
use crate::tile::wide::store_weights;
use cached::{QUERY_UNITS, Queries};
use core::marker::PhantomData;
use core::ops::Range;

/// Channels of a key.
pub const KEY_SIZE: u32 = 576;

/// Query rows of a group.
const GROUP_ROWS: u32 = 16;
/// Stands for a row that query and output do not have.
const ABSENT: u32 = u32::MAX;

/// A shape: cache rows of `UNITS` times 16 bytes; `GROUPS` groups of `MEMBERS` warps, each with 16
/// rows; a warp scores `N8` of the `K8` 8-key MMA tiles of a key tile, and accumulates `D8`
/// 8-column MMA tiles of the output; a ring of `STAGES` tiles.
pub struct LatentMma<
    C,
    const UNITS: usize,
    const GROUPS: u32,
    const MEMBERS: u32,
    const D8: usize,
    const N8: usize,
    const K8: usize,
    const STAGES: u32,
>(PhantomData<C>);

/// Up to 16 query rows, with 147 KB of shared memory.
pub type Rows16 = LatentMma<Elements, 72, 1, 8, 8, 1, 8, 2>;
/// The same with 74 KB.
pub type Rows16W4 = LatentMma<Elements, 72, 1, 4, 16, 1, 4, 2>;
/// 32 query rows per CTA, with 75 KB: keys are read from L2 half as often.
pub type Rows32 = LatentMma<Elements, 72, 2, 4, 16, 1, 4, 2>;
/// Up to 16 query rows over float8: SMs with 163 KB hold two CTAs, which is faster than one of
/// eight warps.
pub type Float8Rows16 = LatentMma<Codes, 36, 1, 4, 16, 2, 8, 2>;
/// 32 query rows per CTA, over float8.
pub type Float8Rows32 = LatentMma<Codes, 36, 2, 4, 16, 2, 8, 2>;

/// The pointers of a call.
#[derive(Clone, Copy)]
struct Pointers<T> {
    q: Global<T>,
    /// The scale of a float8 cache.
    scale: Global<f32>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
}

/// What a CTA computes.
struct Work<'a, T, K> {
    p: &'a LatentParams,
    to: Pointers<T>,
    k: Global<K>,
    rows: Rows,
    tiles: Range<u32>,
    /// Keys that some row sees.
    end: u32,
    /// Keys that every token of the tile sees.
    seen_by_all: u32,
}

/// What a warp accumulates.
struct Sums<const D8: usize> {
    /// States of a lane's rows. The maxima are equal in all warps of the group; the sums cover the
    /// lane's own keys.
    states: [SoftmaxState; 2],
    out: Fragments<1, D8>,
}

impl<
    C: Cached,
    const UNITS: usize,
    const GROUPS: u32,
    const MEMBERS: u32,
    const D8: usize,
    const N8: usize,
    const K8: usize,
    const STAGES: u32,
> LatentMma<C, UNITS, GROUPS, MEMBERS, D8, N8, K8, STAGES>
{
    /// Lowest compute capability, times ten.
    pub const MIN_SM: u32 = 80;
    /// Query rows of a CTA.
    pub const ROWS: u32 = GROUPS * GROUP_ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = K8 as u32 * 8;
    /// Threads of a CTA.
    pub const THREADS: u32 = GROUPS * Self::GROUP;
    /// Shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = Self::FACTORS + if C::CONVERTS { Self::ROWS * 4 } else { 0 };

    /// Threads of a group.
    const GROUP: u32 = 32 * MEMBERS;
    /// Independent sums of a score: a warp with fewer columns has registers for more.
    const SUMS: usize = 32 / D8 / N8;
    /// Columns of a warp.
    const COLUMNS: u32 = VALUE_SIZE / MEMBERS;
    const STAGE_BYTES: u32 = swizzled_bytes(Self::KEYS, UNITS);
    /// Offset of the queries: the last stage of the ring, which is filled last.
    const QUERIES: u32 = (STAGES - 1) * Self::STAGE_BYTES;
    const WEIGHTS: u32 = STAGES * Self::STAGE_BYTES;
    const KEPT: u32 = Self::WEIGHTS + swizzled_bytes(Self::ROWS, K8);
    const NUMBERS: u32 = Self::KEPT + Self::ROWS * 16;
    const GAPS: u32 = Self::NUMBERS + Self::ROWS * MEMBERS * 4;
    const FACTORS: u32 = Self::GAPS + (STAGES * 4).next_multiple_of(16);
    /// Threads that copy a row together.
    const ACROSS: u32 = if UNITS.is_multiple_of(8) { 8 } else { 4 };
    /// Rows that the CTA copies at a time.
    const DOWN: u32 = Self::THREADS / Self::ACROSS;

    /// The kernel over elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: Global<T>,
        k: Global<C::Cell<T>>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        query_seqlens: Global<i32>,
        block_table: Global<i32>,
        out: Global<T>,
        lse: Global<f32>,
        partial_out: Global<f32>,
        partial_lse: Global<f32>,
        p: LatentParams,
    ) {
        let scale = Global::null();
        let to = Pointers { q, scale, block_table, out, lse, partial_out, partial_lse };
        Self::attend_all(to, k, LengthTensors { starts, past_seqlens, query_seqlens }, &p);
    }

    /// The kernel over quantized values with one scale, `k_scale`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_quantized<T: MmaElement>(
        q: Global<T>,
        k: Global<C::Cell<T>>,
        k_scale: Global<f32>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        query_seqlens: Global<i32>,
        block_table: Global<i32>,
        out: Global<T>,
        lse: Global<f32>,
        partial_out: Global<f32>,
        partial_lse: Global<f32>,
        p: LatentParams,
    ) {
        let to = Pointers { q, scale: k_scale, block_table, out, lse, partial_out, partial_lse };
        Self::attend_all(to, k, LengthTensors { starts, past_seqlens, query_seqlens }, &p);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_all<T: MmaElement>(
        to: Pointers<T>,
        k: Global<C::Cell<T>>,
        lengths: LengthTensors,
        p: &LatentParams,
    ) {
        const {
            assert!(K8 == MEMBERS as usize * N8 && STAGES > 1);
            assert!(VALUE_SIZE == MEMBERS * 8 * D8 as u32 && MEMBERS.is_multiple_of(4));
            assert!(swizzled_bytes(Self::ROWS, QUERY_UNITS) <= Self::STAGE_BYTES);
        }
        grid_dependency_wait();
        launch_dependents();
        let (work, exist) = Self::work(to, k, lengths, p);
        if thread_idx() < Self::ROWS {
            let row = work.rows.row(thread_idx());
            let s = if row.s < exist { work.rows.start + row.s } else { ABSENT };
            Row { s, ..row }.keep(Self::kept(thread_idx()));
        }
        sync_threads();
        Self::copy_queries(&work);
        cp_async_commit();
        for nth in 0..STAGES - 1 {
            let tile = work.tiles.start + nth;
            let blocks = Self::look_up(&work, tile);
            Self::copy(&work, tile, nth, blocks);
            cp_async_commit();
        }
        wait_for_all_but(STAGES - 1);
        sync_threads();
        let at = Swizzled::<T, QUERY_UNITS>::at(Self::QUERIES).from(GROUP_ROWS * Self::group());
        let (queries, divisors) = C::queries(at);
        if C::CONVERTS && Self::member() == 0 && lane() % 4 == 0 {
            let scale = work.to.scale.load(0);
            for half in 0..2 {
                Self::factor(half).store(0, divisors[half] * scale);
            }
        }
        let sums = Self::attend(&work, &queries);
        Self::finish(&work, sums);
    }

    /// What the CTA computes, and how many rows the sequence has in query and output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn work<'a, T: MmaElement>(
        to: Pointers<T>,
        k: Global<C::Cell<T>>,
        lengths: LengthTensors,
        p: &'a LatentParams,
    ) -> (Work<'a, T, C::Cell<T>>, u32) {
        let batch = block_idx_z();
        let (sequence, exist) = lengths.sequence(true, batch, p);
        let rows = Rows::of(&p.attention, block_idx_x(), 0, batch, Self::ROWS)
            .of_sequence(sequence.start, sequence.seqlen());
        let has_tokens = rows.query(0).0 < sequence.new;
        let span = rows.span_of_tokens().below(if has_tokens { u32::MAX } else { 0 });
        let tiles = span.share(Self::KEYS, block_idx_y(), p.attention.splits);
        let (end, seen_by_all) = (span.some.end, span.all.end);
        (Work { p, to, k, rows, tiles, end, seen_by_all }, exist)
    }

    /// This warp's group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn group() -> u32 {
        warp() / MEMBERS
    }

    /// This warp's number in its group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn member() -> u32 {
        warp() % MEMBERS
    }

    /// Waits for the warps of the group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sync_group() {
        if GROUPS == 1 {
            sync_threads();
        } else {
            named_barrier_sync(1 + Self::group(), Self::GROUP);
        }
    }

    /// Where row `r` of the tile is described.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept(r: u32) -> Shared<u32> {
        Shared::at(Self::KEPT + 16 * r)
    }

    /// A lane's row, of which `s` is the row of query and output, or [`ABSENT`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(half: usize) -> Row {
        Row::kept(Self::kept(GROUP_ROWS * Self::group() + row_of(half)))
    }

    /// Where the group's warps exchange their values of a lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn numbers(half: usize) -> Shared<f32> {
        Shared::at(Self::NUMBERS).offset((GROUP_ROWS * Self::group() + row_of(half)) * MEMBERS)
    }

    /// Whether the tile in a stage has rows outside of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn gaps(slot: u32) -> Shared<u32> {
        Shared::at(Self::GAPS).offset(slot)
    }

    /// Where the factor of a lane's row of scores is, over quantized values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn factor(half: usize) -> Shared<f32> {
        Shared::at(Self::FACTORS).offset(GROUP_ROWS * Self::group() + row_of(half))
    }

    /// The group's P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weights<T: MmaElement>() -> Swizzled<C::Operand<T>, K8> {
        Swizzled::at(Self::WEIGHTS).from(GROUP_ROWS * Self::group())
    }

    /// Starts copying the queries; rows that do not exist become zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy_queries<T: MmaElement>(work: &Work<'_, T, C::Cell<T>>) {
        let tile = Swizzled::<T, QUERY_UNITS>::at(Self::QUERIES);
        for first in Rolled(thread_idx() / 8..Self::ROWS, Self::THREADS / 8) {
            let row = Row::kept(Self::kept(first));
            let exists = row.s != ABSENT;
            let [entry, head, s] = work.indices(row);
            let from = if exists { work.p.attention.q.at(entry, head, s) } else { 0 };
            let unit = thread_idx() % 8;
            for further in (0..QUERY_UNITS as u32).step_by(8) {
                let place = tile.place(first, unit + further).address();
                cp_async_16(place, work.to.q, from + (8 * (unit + further)) as usize, exists);
            }
        }
    }

    /// Looks up the blocks of a tile's rows, one row per lane, 32 rows at a time. Table entries
    /// past the last visible row are undefined, so rows past it get the block of the last visible
    /// row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn look_up<T: MmaElement>(work: &Work<'_, T, C::Cell<T>>, tile: u32) -> [u32; 2] {
        let mut blocks = [block_idx_z(); 2];
        if tile < work.tiles.end && work.p.log_block_size != CONTIGUOUS {
            for i in 0..Self::KEYS / 32 {
                blocks[i as usize] = work.block_of(tile * Self::KEYS + 32 * i + lane());
            }
        }
        blocks
    }

    /// Starts copying a tile to a stage, if the split has it. Rows that no query row sees, and
    /// those outside of the cache, become zeros: what they hold may be NaN, and 0 · NaN is NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy<T: MmaElement>(work: &Work<'_, T, C::Cell<T>>, tile: u32, slot: u32, blocks: [u32; 2]) {
        if tile >= work.tiles.end {
            return;
        }
        let k = work.p.attention.k;
        let stage = Self::stage::<T>(slot);
        let mut lacks_rows = blocks[0] >= work.p.blocks;
        if Self::KEYS > 32 {
            lacks_rows |= blocks[1] >= work.p.blocks;
        }
        let lacks_rows = any_sync(lacks_rows);
        if thread_idx() == 0 {
            Self::gaps(slot).store(0, lacks_rows.into());
        }
        let unit = thread_idx() % Self::ACROSS;
        for first in (0..Self::KEYS).step_by(Self::DOWN as usize) {
            let r = thread_idx() / Self::ACROSS + first;
            let row = tile * Self::KEYS + r;
            let held = if r < 32 { blocks[0] } else { blocks[1] };
            let block = shfl_idx_u32(held, r % 32);
            let valid = row < work.end && block < work.p.blocks;
            let within = row & ((1 << work.p.log_block_size) - 1);
            let from = if valid { k.at(block, 0, within) } else { 0 };
            let place = stage.place(r, unit);
            for further in (0..UNITS as u32).step_by(Self::ACROSS as usize) {
                let place = place.offset(further * C::PER_UNIT).address();
                let cell = (C::PER_UNIT * (unit + further)) as usize;
                cp_async_16(place, work.k, from + cell, valid);
            }
        }
    }

    /// A stage of the ring.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage<T: MmaElement>(slot: u32) -> Swizzled<C::Cell<T>, UNITS> {
        Swizzled::at(slot * Self::STAGE_BYTES)
    }

    /// The mainloop over key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<T: MmaElement>(work: &Work<'_, T, C::Cell<T>>, queries: &Queries) -> Sums<D8> {
        let scale = ScoreScale::new(work.p.attention.scale, work.p.attention.softcap);
        let mut sums = Sums { states: [SoftmaxState::EMPTY; 2], out: zeros() };
        let mut slot = 0;
        let mut blocks = Self::look_up(work, work.tiles.start + STAGES - 1);
        for tile in Rolled(work.tiles.clone(), 1) {
            if STAGES == 2 {
                cp_async_wait::<0>();
            } else {
                wait_for_all_but(STAGES - 2);
            }
            sync_threads();
            let last = if slot == 0 { STAGES - 1 } else { slot - 1 };
            Self::copy(work, tile + STAGES - 1, last, blocks);
            cp_async_commit();
            blocks = Self::look_up(work, tile + STAGES);

            let stage = Self::stage::<T>(slot);
            let mine = 8 * N8 as u32 * Self::member();
            let mut scores = C::scores::<T, UNITS, N8>(queries, stage.from(mine), Self::SUMS);
            if C::CONVERTS {
                let factors = [0, 1].map(|half| Self::factor(half).load(0));
                for block in 0..N8 {
                    for i in 0..4 {
                        scores[0][block][i] *= factors[i / 2];
                    }
                }
            }
            scale.adjust(&mut scores);
            let begin = tile * Self::KEYS + mine;
            if begin + 8 * N8 as u32 > work.seen_by_all {
                mask(&mut scores, begin, |_, half| Self::row(half).visible);
            }
            if Self::gaps(slot).load(0) != 0 {
                hide(&mut scores, begin, |row| work.block_of(row) >= work.p.blocks);
            }
            Self::weigh::<T>(&mut sums, scores, scale);

            let values = stage.from_unit(Self::COLUMNS / C::PER_UNIT * Self::member());
            C::accumulate::<T, UNITS, D8, K8>(&mut sums.out, Self::weights::<T>(), values);
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        sums
    }

    /// Turns the warp's scores into P in shared memory, relative to the same maxima in all warps of
    /// the group, and waits for theirs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh<T: MmaElement>(sums: &mut Sums<D8>, scores: Fragments<1, N8>, scale: ScoreScale) {
        let tile = Self::weights::<T>();
        Self::publish(|half| row_max(&scores[0], half) * scale.factor());
        let (mut weights, mut parts) = weights_of(&sums.states, &scores, scale);
        store_weights(&weights, tile, N8 as u32 * Self::member());
        Self::sync_group();
        let maxima = [0, 1].map(|half| Self::join(half, max));
        let exceeds = |half: usize| maxima[half] > sums.states[half].max + SLACK;
        if any_sync(exceeds(0) || exceeds(1)) {
            let factors = [0, 1].map(|half| sums.states[half].raise(maxima[half]));
            for block in 0..D8 {
                for i in 0..4 {
                    sums.out[0][block][i] *= factors[i / 2];
                }
            }
            (weights, parts) = weights_of(&sums.states, &scores, scale);
            store_weights(&weights, tile, N8 as u32 * Self::member());
            Self::sync_group();
        }
        for half in 0..2 {
            sums.states[half].sum += parts[half];
        }
    }

    /// Shares with the group a value that the four lanes of each row hold.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn publish(number: impl Fn(usize) -> f32) {
        for half in 0..2 {
            let number = number(half);
            if lane() % 4 == 0 {
                Self::numbers(half).store(Self::member(), number);
            }
        }
    }

    /// Reduces what the group's warps have published of a lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn join(half: usize, join: impl Fn(f32, f32) -> f32) -> f32 {
        let of = |i| {
            let [a, b, c, d] = Self::numbers(half).load_vec(4 * i).map(f32::from_bits);
            join(join(a, b), join(c, d))
        };
        (1..MEMBERS / 4).fold(of(0), |joined, i| join(joined, of(i)))
    }

    /// Adds up the sums of the group's warps, and writes the output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish<T: MmaElement>(work: &Work<'_, T, C::Cell<T>>, sums: Sums<D8>) {
        let mut states = sums.states.map(total);
        // Wait until all warps have read the last maxima.
        sync_threads();
        Self::publish(|half| states[half].sum);
        Self::sync_group();
        for half in 0..2 {
            states[half].sum = Self::join(half, |a, b| a + b);
        }
        let column = Self::COLUMNS * Self::member();
        for half in 0..2 {
            output::write::<C, T, D8>(
                work,
                Self::row(half),
                half,
                states[half],
                &sums.out,
                (column, Self::member() == 0),
            );
        }
    }
}

/// P of the warp's scores, relative to the row maxima, and the lane's sums of P.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weights_of<const N8: usize>(
    states: &[SoftmaxState; 2],
    scores: &Fragments<1, N8>,
    scale: ScoreScale,
) -> (Fragments<1, N8>, [f32; 2]) {
    let (mut weights, mut sums) = (zeros::<1, N8>(), [0.0; 2]);
    for block in 0..N8 {
        for i in 0..4 {
            let weight = states[i / 2].scaled_weight(scores[0][block][i], scale.factor());
            weights[0][block][i] = weight;
            sums[i / 2] += weight;
        }
    }
    (weights, sums)
}

impl<T: MmaElement, K> Work<'_, T, K> {
    /// The block of a row of the sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block_of(&self, row: u32) -> u32 {
        let nth = row.min(self.end - 1) >> self.p.log_block_size;
        let entry = block_idx_z() as usize * self.p.per_sequence as usize + nth as usize;
        self.to.block_table.load(entry) as u32
    }

    /// Batch entry of query and output, query head and row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn indices(&self, row: Row) -> [u32; 3] {
        [block_idx_z().min(self.p.entries - 1), row.head, row.s]
    }

    /// Index of a row in (split, batch entry, query head, row).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn index(&self, row: Row) -> usize {
        let [entry, head, row] = self.indices(row);
        let heads = (block_idx_y() * self.p.entries + entry) * self.p.attention.q_heads + head;
        heads as usize * self.p.tokens as usize + row as usize
    }
}

/// Grid of a call whose kernel has tiles of `rows` rows.
pub fn grid(p: &LatentParams, rows: u32) -> [u32; 3] {
    [row_tiles(&p.attention, rows), p.attention.splits, p.attention.batch]
}

const _: () = {
    /// Shared memory of compute capabilities 8.6, 8.9 and 12, and of 8.0.
    const LEAST: u32 = 99 << 10;
    const MORE: u32 = 163 << 10;
    assert!(Rows16::SHARED_BYTES <= MORE && Rows16W4::SHARED_BYTES <= LEAST);
    assert!(Rows32::SHARED_BYTES <= LEAST && Float8Rows32::SHARED_BYTES <= LEAST);
    assert!(2 * (Float8Rows16::SHARED_BYTES + 1024) <= MORE + 1024);
};
