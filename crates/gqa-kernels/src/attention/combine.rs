//! Merges the results of the splits that [`split_kv`](super::split_kv) left.
//!
//! **One warp** computes one row of out at a time. Its lanes first turn the splits' log-sum-exps into weights, which they leave in
//! shared memory, then add up columns, eight to a lane; where a row has fewer than 32 such units, the lanes that are over take
//! other splits, and shuffles add their shares.
//!
//! **Grid**: any number of blocks in x; rows are taken in turn. **Block**: 128 threads, four rows.
//!
//! **Tensors**: partial_out (split, batch, query head, S, head size), not read where partial_lse (split, batch, query head, S) is -inf;
//! out (batch, query head, S, head size) with its strides; lse (batch, query head, S) or null.
//!
//! **Shared memory**: `per warp: 128 weights`. Two `sync_warp` per row stand between their writes and reads; nothing is shared among
//! warps.
//!
//! **Numerics**: weights are `exp2` of differences to the largest log-sum-exp, all sums f32. The sink joins here, once.

use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::{
    Global, Shared, block_dim, block_idx_x, fma, grid_dim_x, lane, max, shfl_xor_f32, sync_warp, warp,
};
use crate::tile::copy::UNIT;
use crate::tile::rows::{QueryRow, close};

use super::split_kv::MAX_SPLITS;

/// Threads of a block.
pub const THREADS: u32 = 128;
/// Shared memory of a block.
pub const SHARED_BYTES: u32 = THREADS / 32 * MAX_SPLITS * size_of::<f32>() as u32;

/// Splits that one lane weighs.
const PER_LANE: usize = MAX_SPLITS as usize / 32;
/// Loads that a lane has under way together.
const UNROLL: u32 = 4;

/// Blocks of a call: a warp for each row, up to `most` blocks.
pub fn grid(p: &AttentionParams, most: u32) -> [u32; 3] {
    let rows = u64::from(p.batch) * u64::from(p.q_heads) * u64::from(p.q_len);
    let blocks = rows.div_ceil(u64::from(THREADS / 32));
    [blocks.min(u64::from(most)) as u32, 1, 1]
}

/// The kernel.
#[inline(always)]
pub fn combine<T: MmaElement>(
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    seqlens_k: Global<i32>,
    head_sink: Global<T>,
    out: Global<T>,
    lse: Global<f32>,
    p: AttentionParams,
) {
    let rows = p.batch as usize * p.q_heads as usize * p.q_len as usize;
    let warps = block_dim() / 32;
    let weights = Shared::<f32>::at(0).offset(warp() * MAX_SPLITS);
    let mut index = (block_idx_x() * warps + warp()) as usize;
    while index < rows {
        let row = QueryRow { s: (index % p.q_len as usize) as u32, head: (index / p.q_len as usize) as u32 % p.q_heads };
        let batch = index / (p.q_len as usize * p.q_heads as usize);
        let seqlen = Seqlen::new(seqlens_k.load(batch), p.q_len, p.capacity, p.first_prompt != 0);

        let (state, shares) = weigh(&p, partial_lse.offset(index), rows);
        let (factor, log_sum_exp) = close(&p, seqlen, row, head_sink, state);
        sync_warp();
        for i in 0..PER_LANE {
            weights.store(lane() + 32 * i as u32, if factor == 0.0 { 0.0 } else { shares[i] * factor });
        }
        sync_warp();

        let target = out.offset(p.out.at(batch as u32, row.head, row.s));
        add_up(&p, weights, partial_out.offset(index * p.head_size as usize), rows * p.head_size as usize, target);
        if lane() == 0 && !lse.is_null() {
            lse.store(index, log_sum_exp);
        }
        index += (grid_dim_x() * warps) as usize;
    }
}

/// The row's state over all splits, and the shares of splits `lane`, `lane + 32`, … in its sum.
#[inline(always)]
fn weigh(p: &AttentionParams, partial_lse: Global<f32>, rows: usize) -> (SoftmaxState, [f32; PER_LANE]) {
    let mut logs = [f32::NEG_INFINITY; PER_LANE];
    for i in 0..PER_LANE {
        let split = lane() + 32 * i as u32;
        if split < p.splits {
            logs[i] = partial_lse.load(split as usize * rows) * LOG2_E;
        }
    }
    let largest = over_lanes(logs.into_iter().fold(f32::NEG_INFINITY, max), max);
    let mut state = SoftmaxState { max: largest, sum: 0.0 };
    let shares = logs.map(|log| state.weight(log));
    state.sum = over_lanes(shares.into_iter().sum(), |a, b| a + b);
    (state, shares)
}

/// Joins the values of all lanes of the warp.
#[inline(always)]
fn over_lanes(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, mask| join(value, shfl_xor_f32(value, mask)))
}

/// Adds up the row: `weights[split] · partial_out[split · stride ..]`.
#[inline(always)]
fn add_up<T: MmaElement>(
    p: &AttentionParams,
    weights: Shared<f32>,
    partial_out: Global<f32>,
    stride: usize,
    out: Global<T>,
) {
    let units = p.head_size / UNIT;
    let across = units.next_power_of_two().min(32);
    let (first_split, parts) = (lane() / across, 32 / across);
    for first_unit in (0..units).step_by(across as usize) {
        let unit = first_unit + lane() % across;
        let mut sums = [0.0; 8];
        let mut split = first_split;
        while split < p.splits {
            for i in 0..UNROLL {
                let this = split + i * parts;
                let weight = if this < p.splits && unit < units { weights.load(this) } else { 0.0 };
                if weight != 0.0 {
                    add(&mut sums, weight, partial_out.offset(this as usize * stride + (unit * UNIT) as usize));
                }
            }
            split += UNROLL * parts;
        }
        let x = add_parts(sums, across);
        if first_split == 0 && unit < units {
            let words = [T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])];
            out.store_vec((unit * UNIT) as usize, words);
        }
    }
}

#[inline(always)]
fn add(sums: &mut [f32; 8], weight: f32, values: Global<f32>) {
    let halves = [values.load_vec(0), values.load_vec(4)];
    for i in 0..8 {
        sums[i] = fma(weight, f32::from_bits(halves[i / 4][i % 4]), sums[i]);
    }
}

/// Adds up the shares of lanes that have the same columns, which are `across` lanes apart.
#[inline(always)]
fn add_parts(mut sums: [f32; 8], across: u32) -> [f32; 8] {
    let mut mask = across;
    while mask < 32 {
        sums = sums.map(|sum| sum + shfl_xor_f32(sum, mask));
        mask *= 2;
    }
    sums
}
