//! Merges the results of KV splits.
//!
//! **One CTA** sums 128 columns of a row: each of its warps some of the splits, each lane four
//! columns. Shared memory has the weights of the splits, then the sums of the warps. Of up to
//! [`FEW`] splits it sums a whole row, each warp 128 columns on its own. **Grid**: (batch entry,
//! query head, row), then columns.

use super::{VALUE_SIZE, partial_rows};
use crate::attention::split_kv::MAX_SPLITS;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::LatentParams;
use crate::simt::*;

/// Threads of a CTA.
pub const MERGE_THREADS: u32 = 32 * WARPS;
/// Shared memory of a CTA, in bytes.
pub const MERGE_SHARED_BYTES: u32 = SUMS + WARPS * COLUMNS * 4;

const WARPS: u32 = 4;
/// Columns of a CTA.
const COLUMNS: u32 = 32 * 4;
/// Offset of the warps' sums, after the weights.
const SUMS: u32 = MAX_SPLITS * 4;
/// Splits of which a warp has no more than it keeps in flight.
const FEW: u32 = UNROLL;
/// Splits whose weights one lane computes.
const PER_LANE: usize = MAX_SPLITS as usize / 32;
/// Splits whose columns a lane keeps in flight.
const UNROLL: u32 = 8;

/// CTAs of each row.
pub(super) fn parts(splits: u32) -> u32 {
    if splits <= FEW { 1 } else { VALUE_SIZE / COLUMNS }
}

const _: () = assert!(WARPS * COLUMNS == VALUE_SIZE);

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn merge<T: MmaElement>(
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: LatentParams,
) {
    grid_dependency_wait();
    launch_dependents();
    let (row, splits) = (block_idx_x(), p.attention.splits);
    let rows = partial_rows(&p);
    if splits <= FEW {
        let to = (out, lse);
        merge_few(to, partial_out, partial_lse, &p);
        return;
    }
    let column = block_idx_y() * COLUMNS + 4 * lane();
    if warp() == 0 {
        let state = weigh(partial_lse.offset(row as usize), rows, splits);
        if lane() == 0 && block_idx_y() == 0 && !lse.is_null() {
            lse.store(row as usize, state.log_sum_exp());
        }
    }
    sync_threads();
    let from = partial_out.offset(row as usize * VALUE_SIZE as usize + column as usize);
    let sums = add_up(from, rows * VALUE_SIZE as usize, splits);
    Shared::<f32>::at(SUMS)
        .offset(warp() * COLUMNS + 4 * lane())
        .store_vec(0, sums.map(f32::to_bits));
    sync_threads();
    if warp() == 0 {
        store(out, column, add_warps(4 * lane()), &p);
    }
}

/// Sums all splits of the warp's columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn merge_few<T: MmaElement>(
    (out, lse): (Global<T>, Global<f32>),
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: &LatentParams,
) {
    let (row, splits, rows) = (block_idx_x() as usize, p.attention.splits, partial_rows(p));
    let (state, [weight]) = weights::<1>(partial_lse.offset(row), rows, splits);
    if thread_idx() == 0 && !lse.is_null() {
        lse.store(row, state.log_sum_exp());
    }
    let column = warp() * COLUMNS + 4 * lane();
    let from = partial_out.offset(row * VALUE_SIZE as usize + column as usize);
    let weights: [f32; FEW as usize] = core::array::from_fn(|i| shfl_idx_f32(weight, i as u32));
    let mut columns = [[0; 4]; FEW as usize];
    for i in 0..FEW as usize {
        if weights[i] != 0.0 {
            columns[i] = from.load_vec(i * rows * VALUE_SIZE as usize);
        }
    }
    let mut sums = [0.0; 4];
    for i in 0..FEW as usize {
        for c in 0..4 {
            sums[c] = fma(weights[i], f32::from_bits(columns[i][c]), sums[c]);
        }
    }
    store(out, column, sums, p);
}

/// Writes four columns of the CTA's row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store<T: MmaElement>(out: Global<T>, column: u32, sums: [f32; 4], p: &LatentParams) {
    let row = block_idx_x();
    let [heads, tokens] = [p.attention.q_heads.max(1), p.tokens.max(1)];
    let [head, token] = [row / tokens, row % tokens];
    let words = [T::pack(sums[0], sums[1]), T::pack(sums[2], sums[3])];
    let at = p.attention.out.at(head / heads, head % heads, token);
    out.store_vec8(at + column as usize, words);
}

/// Stores the weights of all splits, and returns the row's state.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weigh(partial_lse: Global<f32>, rows: usize, splits: u32) -> SoftmaxState {
    let (state, weights) = weights::<PER_LANE>(partial_lse, rows, splits);
    for i in 0..PER_LANE {
        Shared::<f32>::at(0).store(lane() + 32 * i as u32, weights[i]);
    }
    state
}

/// A row's state, and the weights of the splits `lane`, `lane + 32`, …: 0 of those that there are
/// not.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weights<const N: usize>(
    partial_lse: Global<f32>,
    rows: usize,
    splits: u32,
) -> (SoftmaxState, [f32; N]) {
    let mut logs = [f32::NEG_INFINITY; N];
    for i in 0..N {
        let split = lane() + 32 * i as u32;
        if split < splits {
            logs[i] = partial_lse.load(split as usize * rows) * LOG2_E;
        }
    }
    let mut state = SoftmaxState::EMPTY;
    state.raise(over_lanes(logs.into_iter().fold(f32::NEG_INFINITY, max), max));
    let shares = logs.map(|log| state.weight(log));
    state.sum = over_lanes(shares.into_iter().sum(), |a, b| a + b);
    let factor = state.normaliser();
    (state, shares.map(|share| share * factor))
}

/// Reduces the values of all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_lanes(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, mask| join(value, shfl_xor_f32(value, mask)))
}

/// The sums of this warp's splits, for four columns. Splits of weight 0 are not read: their results
/// may not have been written.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_up(from: Global<f32>, stride: usize, splits: u32) -> [f32; 4] {
    let weights = Shared::<f32>::at(0);
    let mut sums = [0.0; 4];
    for first in Rolled(warp()..splits, WARPS * UNROLL) {
        let mut columns = [[0; 4]; UNROLL as usize];
        for i in 0..UNROLL {
            let split = first + WARPS * i;
            if split < splits && weights.load(split) != 0.0 {
                columns[i as usize] = from.load_vec(split as usize * stride);
            }
        }
        for i in 0..UNROLL {
            let split = (first + WARPS * i).min(MAX_SPLITS - 1);
            for c in 0..4 {
                let value = f32::from_bits(columns[i as usize][c]);
                sums[c] = fma(weights.load(split), value, sums[c]);
            }
        }
    }
    sums
}

/// The sums of all warps for four columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_warps(column: u32) -> [f32; 4] {
    let mut sums = [0.0; 4];
    for warp in 0..WARPS {
        let of_warp = Shared::<f32>::at(SUMS).offset(warp * COLUMNS + column).load_vec(0);
        for c in 0..4 {
            sums[c] += f32::from_bits(of_warp[c]);
        }
    }
    sums
}
