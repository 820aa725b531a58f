//! Up to 16 query rows over float8, on SM 90a: keys are multiplied by `wgmma` as they are.
//!
//! **One CTA** is one group of four warps, whose tiles of 64 keys are as in
//! [`latent_mma`](super). But a key need not become halves: the scores are `Sᵀ = K Qᵀ`, of 64 keys
//! by 32 columns, in products of e4m3. A query element is the sum of two e4m3 values, which is
//! exact for a bfloat16 that is at most 2^10 times smaller than the greatest of its row; the first
//! ones of the 16 rows are columns 0 to 15, the others columns 16 to 31. So a warp scores 16 keys,
//! of which a lane holds
//!
//! ```text
//! keys l/4 and l/4 + 8 of rows 8 j + 2 (l % 4) + i, for j and i of 0 and 1
//! ```
//!
//! P is transposed by `movmatrix` and stored as in `latent_mma`, and the second product is the
//! same: values become halves in registers, of each once. Registers hold no queries, so that many
//! operands are under way.
//!
//! **Shared memory**: a ring of two tiles in chunks of 128 bytes, as `wgmma` reads them, the second
//! of which has the queries first; their e4m3 values; P, rows of 64 elements; the description of
//! each row; for each row one f32 per warp, for reductions; for each warp whether it raises the
//! maxima; for each stage whether it has rows outside of the cache; a factor of each row's scores.
//!
//! **Pipeline**: for key tile `j`:
//!
//! ```text
//! wait for tile j ‖ barrier (all are done with tile j - 1 and its P)    start tile j + 1
//!     Sᵀ = K Qᵀ of 16 keys, mask, P to shared memory, and whether a score exceeds its row's
//!     maximum by much
//!     barrier (they are stored)
//!     if one does: maxima to shared memory ‖ barrier ‖ raise them, P once more ‖ barrier
//!     O += P V of 128 columns
//! ```
//!
//! **Numerics**: the tensor cores add products of e4m3 with some 14 bits. Scores are therefore sums
//! of three parts of the channels, each with an accumulator of its own.

use super::cached::{Cached, Codes, QUERY_UNITS};
use super::{ABSENT, Float8Rows16, Pointers, VALUE_SIZE, Work, output};
use crate::attention::hopper::{
    greatest_of_vector, power_of_two, row_exponent, row_factor, sums_of,
};
use crate::attention::latent::LengthTensors;
use crate::concept::softmax::SoftmaxState;
use crate::num::{MmaElement, f16, unpack};
use crate::params::LatentParams;
use crate::simt::*;
use crate::tile::copy::wait_for_all_but;
use crate::tile::descriptor::Descriptor;
use crate::tile::fragment::{Fragments, row_of, zeros};
use crate::tile::rows::Row;
use crate::tile::softmax::{SLACK, ScoreScale};
use crate::tile::swizzle::{Swizzled, WarpRead, chunked_bytes, swizzled_bytes};

/// 16-byte units of a cache row.
const UNITS: usize = 36;
/// Warps of a CTA.
const MEMBERS: u32 = 4;
/// 8-column MMA tiles of a warp's output.
const D8: usize = 16;
/// Stages of the ring.
const STAGES: u32 = 2;
/// Bytes of a row in a chunk.
const CHUNK: u32 = 128;
/// Columns of the scores: two e4m3 values of each row.
const COLUMNS: u32 = 2 * Float8Keys::ROWS;
/// Accumulators of a thread in a product of 64 by `COLUMNS`.
const SUMS: usize = COLUMNS as usize / 2;
/// Sums of a score.
const PARTS: usize = 3;
/// Channels that a product adds up, all of them, and those of a part.
const DEPTH: u32 = 32;
const DEPTHS: u32 = super::KEY_SIZE / DEPTH;
const PART: u32 = DEPTHS / PARTS as u32;

const STAGE_BYTES: u32 = chunked_bytes(Float8Keys::KEYS, UNITS);
/// Offset of the queries as they are given: the second stage.
const GIVEN: u32 = (STAGES - 1) * STAGE_BYTES;
const QUERIES: u32 = STAGES * STAGE_BYTES;
const WEIGHTS: u32 = QUERIES + chunked_bytes(COLUMNS, UNITS);
const KEPT: u32 = WEIGHTS + swizzled_bytes(Float8Keys::ROWS, K8);
const NUMBERS: u32 = KEPT + 16 * Float8Keys::ROWS;
const RAISES: u32 = NUMBERS + 4 * MEMBERS * Float8Keys::ROWS;
const GAPS: u32 = RAISES + 4 * MEMBERS;
const FACTORS: u32 = GAPS + 16;
/// 8-key MMA tiles of a key tile.
const K8: usize = Float8Keys::KEYS as usize / 8;

/// The kernel's shape.
pub struct Float8Keys;

/// Of a lane, for `j` and `i`: of its row `8 j + 2 (l % 4) + i` of the scores.
type OfRows<T> = [[T; 2]; 2];

/// What a lane accumulates.
struct Sums {
    /// Of its rows of scores; maxima are equal in all warps, sums are of the lane's own keys.
    states: OfRows<SoftmaxState>,
    /// Of its rows of the output, whose sums are not kept.
    tops: [SoftmaxState; 2],
    out: Fragments<1, D8>,
}

impl Float8Keys {
    /// Compute capability, times ten; no later one has `wgmma`.
    pub const MIN_SM: u32 = 90;
    /// Query rows of a CTA.
    pub const ROWS: u32 = Float8Rows16::ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = Float8Rows16::KEYS;
    /// Threads of a CTA.
    pub const THREADS: u32 = 32 * MEMBERS;
    /// Shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = FACTORS + 4 * Self::ROWS;

    /// The kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_quantized<T: MmaElement>(
        q: Global<T>,
        k: Global<u8>,
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
        const {
            assert!(Self::THREADS == Float8Rows16::THREADS && DEPTHS.is_multiple_of(PARTS as u32));
            assert!(swizzled_bytes(Self::ROWS, QUERY_UNITS) <= STAGE_BYTES);
        }
        grid_dependency_wait();
        launch_dependents();
        let to = Pointers { q, scale: k_scale, block_table, out, lse, partial_out, partial_lse };
        let lengths = LengthTensors { starts, past_seqlens, query_seqlens };
        let (work, exist) = Float8Rows16::work(to, k, lengths, &p);
        if thread_idx() < Self::ROWS {
            let row = work.rows.row(thread_idx());
            let s = if row.s < exist { work.rows.start + row.s } else { ABSENT };
            Row { s, ..row }.keep(kept(thread_idx()));
        }
        sync_threads();
        copy_queries(&work);
        cp_async_commit();
        let first = work.tiles.start;
        copy(&work, first, 0, Float8Rows16::look_up(&work, first));
        cp_async_commit();
        wait_for_all_but(1);
        sync_threads();
        divide_queries(&work);
        let sums = attend(&work);
        finish(&work, sums);
    }
}

type Calls<'a, T> = Work<'a, T, u8>;

/// Where row `r` of the tile is described.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn kept(r: u32) -> Shared<u32> {
    Shared::at(KEPT + 16 * r)
}

/// A lane's row of the scores.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn score_row(j: usize, i: usize) -> u32 {
    8 * j as u32 + lane() % 4 * 2 + i as u32
}

/// Where the warps exchange their values of row `r`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn numbers(r: u32) -> Shared<f32> {
    Shared::at(NUMBERS).offset(r * MEMBERS)
}

/// Whether the tile in a stage has rows outside of the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn gaps(slot: u32) -> Shared<u32> {
    Shared::at(GAPS).offset(slot)
}

/// Where the e4m3 values of the queries are.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn queries() -> Swizzled<u8, UNITS> {
    Swizzled::in_chunks_at(QUERIES, COLUMNS)
}

/// P.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weights() -> Swizzled<f16, K8> {
    Swizzled::at(WEIGHTS)
}

/// Starts copying the queries; rows that do not exist become zeros.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn copy_queries<T: MmaElement>(work: &Calls<'_, T>) {
    let given = Swizzled::<T, QUERY_UNITS>::at(GIVEN);
    let (r, unit) = (thread_idx() / 8, thread_idx() % 8);
    let row = Row::kept(kept(r));
    let exists = row.s != ABSENT;
    let [entry, head, s] = work.indices(row);
    let from = if exists { work.p.attention.q.at(entry, head, s) } else { 0 };
    for further in (0..QUERY_UNITS as u32).step_by(8) {
        let place = given.place(r, unit + further).address();
        cp_async_16(place, work.to.q, from + (8 * (unit + further)) as usize, exists);
    }
}

/// Makes the e4m3 values of the queries. A row is divided by a power of two; that, and the scale of
/// the cache, its scores are multiplied by.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn divide_queries<T: MmaElement>(work: &Calls<'_, T>) {
    let given = Swizzled::<T, QUERY_UNITS>::at(GIVEN);
    let (r, first) = (thread_idx() / 8, thread_idx() % 8);
    let mut vectors = [[0; 4]; QUERY_UNITS / 8];
    let mut top = 0;
    for i in 0..QUERY_UNITS / 8 {
        vectors[i] = ld_shared_vec(given.place(r, first + 8 * i as u32).address());
        top = max_u16x2(top, greatest_of_vector(vectors[i]));
    }
    for distance in [4, 2, 1] {
        top = max_u16x2(top, shfl_xor_u32(top, distance));
    }
    let [top, ..] = unpack::<T>([(top >> 16).max(top & 0xffff), 0, 0, 0]);
    let exponent = row_exponent(top);
    let factor = power_of_two(-exponent);
    for i in 0..QUERY_UNITS / 8 {
        let unit = first + 8 * i as u32;
        let sums = sums_of(unpack::<T>(vectors[i]).map(|x: f32| x * factor));
        for n in 0..2 {
            let place = queries().place(r + n * Float8Keys::ROWS, unit / 2);
            st_shared(place.offset(unit % 2 * 8).address(), sums[n as usize]);
        }
    }
    if first == 0 {
        let factor = row_factor(top, exponent) * work.to.scale.load(0);
        Shared::<f32>::at(FACTORS).store(r, factor);
    }
}

/// Starts copying a tile to a stage, if the split has it. Rows that no query row sees, and those
/// outside of the cache, become zeros: what they hold may be NaN, and 0 · NaN is NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn copy<T: MmaElement>(work: &Calls<'_, T>, tile: u32, slot: u32, blocks: [u32; 2]) {
    /// Threads that copy a row together, and rows that the CTA copies at a time.
    const ACROSS: u32 = 4;
    const DOWN: u32 = Float8Keys::THREADS / ACROSS;
    if tile >= work.tiles.end {
        return;
    }
    let k = work.p.attention.k;
    let lacks_rows = any_sync(blocks[0] >= work.p.blocks || blocks[1] >= work.p.blocks);
    if thread_idx() == 0 {
        gaps(slot).store(0, lacks_rows.into());
    }
    let (r, unit) = (thread_idx() / ACROSS, thread_idx() % ACROSS);
    let stage = Swizzled::<u8, UNITS>::in_chunks_at(slot * STAGE_BYTES, Float8Keys::KEYS);
    let place = stage.place(r, unit).address();
    for half in 0..Float8Keys::KEYS / DOWN {
        let row = tile * Float8Keys::KEYS + r + DOWN * half;
        let block = shfl_idx_u32(blocks[half as usize], r);
        let valid = row < work.end && block < work.p.blocks;
        let within = row & ((1 << work.p.log_block_size) - 1);
        let from = if valid { k.at(block, 0, within) } else { 0 };
        for further in (0..UNITS as u32).step_by(ACROSS as usize) {
            let place = further_on(place, Float8Keys::KEYS, further) + CHUNK * DOWN * half;
            cp_async_16(place, work.k, from + (16 * (unit + further)) as usize, valid);
        }
    }
}

/// The place of a unit of a row that is `units`, a multiple of 4, further on than `place`, that of
/// one of its first four units, in chunks of `rows` rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn further_on(place: u32, rows: u32, units: u32) -> u32 {
    (place ^ (units % 8 * 16)) + units / 8 * (CHUNK * rows)
}

/// The mainloop over key tiles.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn attend<T: MmaElement>(work: &Calls<'_, T>) -> Sums {
    let scale = ScoreScale::new(work.p.attention.scale, work.p.attention.softcap);
    let empty = SoftmaxState::EMPTY;
    let mut sums = Sums { states: [[empty; 2]; 2], tops: [empty; 2], out: zeros() };
    let mut slot = 0;
    let mut blocks = Float8Rows16::look_up(work, work.tiles.start + 1);
    for tile in Rolled(work.tiles.clone(), 1) {
        cp_async_wait::<0>();
        // Of the tile, and before the first one of the queries.
        fence_proxy_async();
        sync_threads();
        copy(work, tile + 1, slot ^ 1, blocks);
        cp_async_commit();
        blocks = Float8Rows16::look_up(work, tile + 2);

        let stage = slot * STAGE_BYTES;
        let mut scores = scores(stage);
        for j in 0..2 {
            for i in 0..2 {
                let factor = Shared::<f32>::at(FACTORS).load(score_row(j, i));
                for half in 0..2 {
                    scores[0][j][2 * half + i] *= factor;
                }
            }
        }
        scale.adjust(&mut scores);
        hide(work, &mut scores, tile, slot);
        weigh(&mut sums, scores, scale);
        add_values(&mut sums.out, stage);
        slot ^= 1;
    }
    cp_async_wait::<0>();
    sums
}

/// Scores of the warp's keys of a tile, as `[j][2 half + i]`: of the lane's rows, and of key
/// `l / 4 + 8 half`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn scores(stage: u32) -> Fragments<1, 2> {
    // Broadcast, so that the compiler knows that they are warp-uniform: descriptors are then made
    // in uniform registers.
    let [k, q] = [stage, QUERIES]
        .map(|offset| Descriptor::new(shfl_idx_u32(Shared::<u8>::at(offset).address(), 0), 16));
    let mut parts = [[0.0; SUMS]; PARTS];
    wgmma_fence();
    for part in 0..PARTS {
        for within in 0..PART {
            let byte = (part as u32 * PART + within) * DEPTH;
            let (chunk, byte) = (byte / CHUNK, byte % CHUNK);
            let k = k.at(chunk * CHUNK * Float8Keys::KEYS + byte);
            let q = q.at(chunk * CHUNK * COLUMNS + byte);
            if within == 0 {
                parts[part] = wgmma_e4m3(k, q);
            } else {
                wgmma_add_e4m3(&mut parts[part], k, q);
            }
        }
    }
    wgmma_commit();
    wgmma_wait::<0>();
    let mut scores = zeros();
    for j in 0..2 {
        for i in 0..4 {
            let sum = |at: usize| (parts[0][at] + parts[1][at]) + parts[2][at];
            scores[0][j][i] = sum(4 * j + i) + sum(4 * (j + 2) + i);
        }
    }
    scores
}

/// Hides keys that a row does not see, or that are outside of the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn hide<T: MmaElement>(work: &Calls<'_, T>, scores: &mut Fragments<1, 2>, tile: u32, slot: u32) {
    let begin = tile * Float8Keys::KEYS + 16 * warp();
    let key = |half: usize| begin + row_of(half);
    if begin + 16 > work.seen_by_all {
        for j in 0..2 {
            for i in 0..2 {
                let visible = Row::kept(kept(score_row(j, i))).visible;
                for half in 0..2 {
                    if key(half) < visible.first || key(half) >= visible.end {
                        scores[0][j][2 * half + i] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
    if gaps(slot).load(0) != 0 {
        for half in 0..2 {
            if work.block_of(key(half)) >= work.p.blocks {
                for j in 0..2 {
                    for i in 0..2 {
                        scores[0][j][2 * half + i] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Turns the warp's scores into P in shared memory, relative to the same maxima in all warps, and
/// waits for theirs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weigh(sums: &mut Sums, scores: Fragments<1, 2>, scale: ScoreScale) {
    let largest = |j: usize, i: usize| max(scores[0][j][i], scores[0][j][2 + i]) * scale.factor();
    let mut exceeds = false;
    for j in 0..2 {
        for i in 0..2 {
            exceeds |= largest(j, i) > sums.states[j][i].max + SLACK;
        }
    }
    let exceeds = any_sync(exceeds);
    let raises = Shared::<u32>::at(RAISES);
    if lane() == 0 {
        raises.store(warp(), exceeds.into());
    }
    let mut parts = store_weights(&sums.states, &scores, scale);
    sync_threads();
    let [a, b, c, d] = raises.load_vec(0);
    if any_sync(a | b | c | d != 0) {
        for j in 0..2 {
            for i in 0..2 {
                let largest = over_keys(largest(j, i), max);
                if lane() < 4 {
                    numbers(score_row(j, i)).store(warp(), largest);
                }
            }
        }
        sync_threads();
        for j in 0..2 {
            for i in 0..2 {
                sums.states[j][i].raise(join(score_row(j, i), max));
            }
        }
        let factors = [0, 1].map(|half| sums.tops[half].raise(join(row_of(half), max)));
        for block in 0..D8 {
            for i in 0..4 {
                sums.out[0][block][i] *= factors[i / 2];
            }
        }
        parts = store_weights(&sums.states, &scores, scale);
        sync_threads();
    }
    for j in 0..2 {
        for i in 0..2 {
            sums.states[j][i].sum += parts[j][i];
        }
    }
}

/// Stores P of the warp's scores; the lane's sums of it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store_weights(
    states: &OfRows<SoftmaxState>,
    scores: &Fragments<1, 2>,
    scale: ScoreScale,
) -> OfRows<f32> {
    let mut sums = [[0.0; 2]; 2];
    for j in 0..2 {
        for half in 0..2 {
            let mut pair = [0.0; 2];
            for i in 0..2 {
                pair[i] = states[j][i].scaled_weight(scores[0][j][2 * half + i], scale.factor());
                sums[j][i] += pair[i];
            }
            // Now a lane has keys 2 (l % 4) and the next one, of row l / 4.
            let turned = movmatrix_trans(f16::pack(pair[0], pair[1]));
            let place = weights().place(row_of(j), 2 * warp() + half as u32);
            st_shared(place.offset(lane() % 4 * 2).address(), turned);
        }
    }
    sums
}

/// Reduces what the lanes of a row have of it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_keys(of_lane: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [4, 8, 16].into_iter().fold(of_lane, |all, distance| join(all, shfl_xor_f32(all, distance)))
}

/// Reduces what the warps have left of row `r`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn join(r: u32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let [a, b, c, d] = numbers(r).load_vec(0).map(f32::from_bits);
    join(join(a, b), join(c, d))
}

/// `out += P V` of the warp's columns, which are a chunk.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_values(out: &mut Fragments<1, D8>, stage: u32) {
    let chunk = stage + warp() * CHUNK * Float8Keys::KEYS;
    let values = Swizzled::<u8, 8>::at(chunk).place(lane() % 16, lane() / 16).address();
    let read_weights = WarpRead::<K8>::by_columns(lane());
    for depth in 0..K8 / 2 {
        let a = ldmatrix_x4(read_weights.address(weights(), 0, depth));
        for pair in 0..D8 / 4 {
            let place = (values ^ (32 * pair as u32)) + 16 * CHUNK * depth as u32;
            let operands = Codes::values(ldmatrix_x4_trans(place));
            for i in 0..4 {
                f16::mma(&mut out[0][4 * pair + i], a, operands[i]);
            }
        }
    }
}

/// Adds up the sums of the warps, and writes the output.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn finish<T: MmaElement>(work: &Calls<'_, T>, sums: Sums) {
    // All have read the last maxima.
    sync_threads();
    for j in 0..2 {
        for i in 0..2 {
            let sum = over_keys(sums.states[j][i].sum, |a, b| a + b);
            if lane() < 4 {
                numbers(score_row(j, i)).store(warp(), sum);
            }
        }
    }
    sync_threads();
    let column = VALUE_SIZE / MEMBERS * warp();
    for half in 0..2 {
        let sum = join(row_of(half), |a, b| a + b);
        let state = SoftmaxState { sum, ..sums.tops[half] };
        let row = Row::kept(kept(row_of(half)));
        let place = (column, warp() == 0);
        output::write::<Codes, T, D8>(work, row, half, state, &sums.out, place);
    }
}

const _: () = assert!(2 * (Float8Keys::SHARED_BYTES + 1024) <= (227 << 10) + 1024);
