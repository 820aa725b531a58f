//! Merges the results of KV splits that [`split_kv`](super::split_kv), `hopper_split` and
//! [`tiled_wide`](super::tiled_wide) write.
//!
//! **One CTA** merges one row of out at a time; where splits are few, each of its warps merges a
//! row. Each warp turns the splits' log-sum-exps into weights, a few splits per lane, and stores
//! them in shared memory. Then the threads sum: a thread sums eight columns, and spare threads
//! share the same columns and each sum some of the splits. Shuffles add the sums of a warp's lanes,
//! shared memory the sums of the warps.
//!
//! **Grid**: any number of CTAs in x, which stride over the rows. **CTA**: 128 threads.
//!
//! **Tensors**: partial_out (split, batch, query head, S, head size), not read where partial_lse
//! (split, batch, query head, S) is -inf; out (batch, query head, S, head size) with its strides,
//! which may be f32; lse (batch, query head, S) or null.
//!
//! **Shared memory**: `per warp: 128 weights | per warp: 32 lanes × 8 sums`, all f32.
//!
//! **Order**: each warp has its own weights, so that `sync_warp` suffices for them. Where the whole
//! CTA sums, one barrier precedes the first warp's reads of the warps' sums, and another one
//! precedes the next sums.
//!
//! **Numerics**: weights are `exp2` of differences to the largest log-sum-exp; all sums are f32.
//! The attention sink is added here, once.

use super::out::Results;
use super::split_kv::MAX_SPLITS;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::{
    Global, Shared, block_idx_x, fma, grid_dim_x, lane, max, shfl_xor_f32, sync_threads, sync_warp,
    thread_idx, warp,
};
use crate::tile::copy::UNIT;
use crate::tile::rows::close;
use crate::tile::seqlens::Seqlens;

/// Threads of a CTA.
pub const THREADS: u32 = 32 * WARPS;
/// Shared memory of a CTA, in bytes.
pub const SHARED_BYTES: u32 = SUMS + WARPS * 32 * UNIT * 4;

const WARPS: u32 = 4;
/// Offset of the warps' sums, after their weights.
const SUMS: u32 = WARPS * MAX_SPLITS * 4;
/// Splits whose weights one lane computes.
const PER_LANE: usize = MAX_SPLITS as usize / 32;
/// Splits whose values a thread keeps in flight.
const UNROLL: u32 = 4;

/// The threads that merge a row: a warp where splits are few, and rows perhaps many, or the whole
/// CTA.
struct Team<const IS_WARP: bool>;

impl<const IS_WARP: bool> Team<IS_WARP> {
    /// Threads of a team.
    const THREADS: u32 = if IS_WARP { 32 } else { THREADS };

    /// This thread's team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn number() -> u32 {
        if IS_WARP { block_idx_x() * WARPS + warp() } else { block_idx_x() }
    }

    /// Teams of the grid.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count() -> u32 {
        if IS_WARP { grid_dim_x() * WARPS } else { grid_dim_x() }
    }

    /// This thread's number in its team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn thread() -> u32 {
        if IS_WARP { lane() } else { thread_idx() }
    }
}

/// Grid of a call: a row for each team, at most `most` CTAs.
pub fn grid(p: &AttentionParams, most: u32) -> [u32; 3] {
    let rows = u64::from(p.batch) * u64::from(p.q_heads) * u64::from(p.q_len);
    let blocks = if has_few_splits(p) { rows.div_ceil(u64::from(WARPS)) } else { rows };
    [blocks.min(u64::from(most)) as u32, 1, 1]
}

/// Whether a warp merges a row by itself.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn has_few_splits(p: &AttentionParams) -> bool {
    const FEW: u32 = 8;
    p.splits <= FEW
}

/// The kernel. Output is in the element type, or in f32 where `out_f32` is not null.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn combine<T: MmaElement>(
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    seqlens: Seqlens,
    head_sink: Global<T>,
    out: Global<T>,
    out_f32: Global<f32>,
    lse: Global<f32>,
    p: AttentionParams,
) {
    let out = Results::unscaled(out, out_f32);
    if has_few_splits(&p) {
        combine_rows::<T, true>(&p, partial_out, partial_lse, seqlens, head_sink, out, lse);
    } else {
        combine_rows::<T, false>(&p, partial_out, partial_lse, seqlens, head_sink, out, lse);
    }
}

/// Merges the rows of this thread's team.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn combine_rows<T: MmaElement, const IS_WARP: bool>(
    p: &AttentionParams,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    seqlens: Seqlens,
    head_sink: Global<T>,
    out: Results<T>,
    lse: Global<f32>,
) {
    // A call has rows and heads: max(1) spares the division by zero check. The number of all rows
    // fits 32 bits.
    let (q_len, q_heads) = (p.q_len.max(1), p.q_heads.max(1));
    let rows = p.batch * q_heads * q_len;
    let weights = Shared::<f32>::at(0).offset(warp() * MAX_SPLITS);
    let mut index = Team::<IS_WARP>::number();
    while index < rows {
        let (s, head) = (index % q_len, index / q_len % q_heads);
        let (batch, place) = (index / q_len / q_heads, index as usize);
        let seqlen = seqlens.get(batch, p);

        let (state, shares) = weigh(p, partial_lse.offset(place), rows as usize);
        let (factor, log_sum_exp) = close(p, seqlen.is_token(s), head, head_sink, state);
        for i in 0..PER_LANE {
            weights.store(
                lane() + 32 * i as u32,
                if factor == 0.0 { 0.0 } else { shares[i] * factor },
            );
        }
        sync_warp();

        let source = partial_out.offset(place * p.head_size as usize);
        let stride = rows as usize * p.head_size as usize;
        add_up::<T, IS_WARP>(p, weights, source, stride, out, p.out.at(batch, head, s));
        if Team::<IS_WARP>::thread() == 0 && !lse.is_null() {
            lse.store(place, log_sum_exp);
        }
        if IS_WARP {
            // Other lanes may still read the weights.
            sync_warp();
        }
        index = index.saturating_add(Team::<IS_WARP>::count());
    }
}

/// The row's state over all splits, and the weights of splits `lane`, `lane + 32`, …
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weigh(
    p: &AttentionParams,
    partial_lse: Global<f32>,
    rows: usize,
) -> (SoftmaxState, [f32; PER_LANE]) {
    let mut logs = [f32::NEG_INFINITY; PER_LANE];
    for i in 0..PER_LANE {
        let split = lane() + 32 * i as u32;
        if split < p.splits {
            logs[i] = partial_lse.load(split as usize * rows) * LOG2_E;
        }
    }
    let mut state = SoftmaxState::EMPTY;
    let largest = over_lanes(logs.into_iter().fold(f32::NEG_INFINITY, max), max);
    state.raise(largest);
    let shares = logs.map(|log| state.weight(log));
    state.sum = over_lanes(shares.into_iter().sum(), |a, b| a + b);
    (state, shares)
}

/// Reduces the values of all lanes of the warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_lanes(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, mask| join(value, shfl_xor_f32(value, mask)))
}

/// Sums the row, `weights[split] · partial_out[split · stride ..]`, in passes of 32 units of eight
/// columns, and writes it to `out` from element `at` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_up<T: MmaElement, const IS_WARP: bool>(
    p: &AttentionParams,
    weights: Shared<f32>,
    partial_out: Global<f32>,
    stride: usize,
    out: Results<T>,
    at: usize,
) {
    let units = p.head_size / UNIT;
    let across = units.next_power_of_two().min(32);
    let mut unit = lane() % across;
    while unit - lane() % across < units {
        let column = (unit * UNIT) as usize;
        let mine = if unit < units {
            add_splits::<IS_WARP>(p, weights, partial_out.offset(column), stride, across)
        } else {
            [0.0; 8]
        };
        let of_warp = add_lanes(mine, across);
        if IS_WARP {
            if lane() < across && unit < units {
                out.store(at + column, of_warp);
            }
        } else {
            add_warps(of_warp, lane() < across && unit < units, out, at + column);
        }
        unit += across;
    }
}

/// Adds the sums of the CTA's warps for the same columns; threads with `writes` write the result.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_warps<T: MmaElement>(of_warp: [f32; 8], writes: bool, out: Results<T>, at: usize) {
    let sums_of = |warp: u32| Shared::<f32>::at(SUMS).offset((warp * 32 + lane()) * UNIT);
    store(sums_of(warp()), of_warp);
    sync_threads();
    if warp() == 0 && writes {
        let mut sums = [0.0; 8];
        for warp in 0..WARPS {
            add(&mut sums, 1.0, [sums_of(warp).load_vec(0), sums_of(warp).load_vec(4)]);
        }
        out.store(at, sums);
    }
    sync_threads();
}

/// Sums this thread's share of the splits: from split `thread / across` on, where `thread` is its
/// number in the team, in steps of the number of shares.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_splits<const IS_WARP: bool>(
    p: &AttentionParams,
    weights: Shared<f32>,
    partial_out: Global<f32>,
    stride: usize,
    across: u32,
) -> [f32; 8] {
    let mut sums = [0.0; 8];
    let shares = Team::<IS_WARP>::THREADS / across;
    let mut split = Team::<IS_WARP>::thread() / across;
    while split < p.splits {
        for i in 0..UNROLL {
            let split = split + i * shares;
            let weight = if split < p.splits { weights.load(split) } else { 0.0 };
            if weight != 0.0 {
                let values = partial_out.offset(split as usize * stride);
                add(&mut sums, weight, [values.load_vec(0), values.load_vec(4)]);
            }
        }
        split += UNROLL * shares;
    }
    sums
}

/// `sums += weight · values`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add(sums: &mut [f32; 8], weight: f32, values: [[u32; 4]; 2]) {
    for i in 0..8 {
        sums[i] = fma(weight, f32::from_bits(values[i / 4][i % 4]), sums[i]);
    }
}

/// Adds the sums of lanes that are `across` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_lanes(mut sums: [f32; 8], across: u32) -> [f32; 8] {
    let mut mask = across;
    while mask < 32 {
        sums = sums.map(|sum| sum + shfl_xor_f32(sum, mask));
        mask *= 2;
    }
    sums
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store(place: Shared<f32>, sums: [f32; 8]) {
    let words = sums.map(f32::to_bits);
    place.store_vec(0, [words[0], words[1], words[2], words[3]]);
    place.store_vec(4, [words[4], words[5], words[6], words[7]]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    #[test]
    fn a_team_takes_a_row_or_more() {
        let p = AttentionParams { batch: 2, q_heads: 12, q_len: 3, ..AttentionParams::zeroed() };
        assert_eq!(grid(&p, 1000), [72 / 4, 1, 1]);
        let many = AttentionParams { splits: 9, ..p };
        assert_eq!(grid(&many, 1000), [72, 1, 1]);
        assert_eq!(grid(&many, 50), [50, 1, 1]);
    }
}
