//! Transposed scores, with keys as rows: `Sᵀ = K Qᵀ`, for eight query rows.
//!
//! An MMA tile has 16 rows and 8 columns. Eight query rows fill half of its rows but all of its
//! columns, so the transposed product takes half as many instructions. Of eight keys a lane holds
//!
//! ```text
//! key l/4 and rows 2(l%4), 2(l%4)+1
//! ```
//!
//! and it also holds the output of these two rows ([`columns`](super::columns)). The scores are the
//! first two values of a tile of [`Fragments`], and a lane's softmax states belong to these rows.
//! [`operand`] rounds, packs and transposes P for the product with V.

use super::columns::Columns;
use super::fragment::Fragments;
use super::softmax::{SLACK, ScoreScale, States};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::simt::{any_sync, lane, max, movmatrix_trans, shfl_xor_f32};

/// Whether `M` MMA tiles of `halves` 8-row halves have eight rows.
pub const fn fits(m: usize, halves: usize) -> bool {
    m == 1 && halves == 1
}

/// The lane's key in a block of eight.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn key_of() -> u32 {
    lane() / 4
}

/// Hides keys from `begin` on that a row does not see; `visible(i)` are the keys that the lane's
/// row `i` sees.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn mask<const M: usize, const N8: usize>(
    scores: &mut Fragments<M, N8>,
    begin: u32,
    visible: impl Fn(usize) -> Visible,
) {
    for i in 0..2 {
        let Visible { first, end } = visible(i);
        for block in 0..N8 {
            let key = begin + 8 * block as u32 + key_of();
            if key < first || key >= end {
                scores[0][block][i] = f32::NEG_INFINITY;
            }
        }
    }
}

/// Hides keys from `begin` on that lie outside of the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn hide<const M: usize, const N8: usize>(
    scores: &mut Fragments<M, N8>,
    begin: u32,
    is_nowhere: impl Fn(u32) -> bool,
) {
    for block in 0..N8 {
        if is_nowhere(begin + 8 * block as u32 + key_of()) {
            for i in 0..2 {
                scores[0][block][i] = f32::NEG_INFINITY;
            }
        }
    }
}

/// Turns scores into P; rescales the accumulators where a score exceeds a row's maximum by more
/// than [`SLACK`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh<const M: usize, const N8: usize, const D8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    out: &mut Columns<M, D8>,
    scale: ScoreScale,
) {
    let largest = [0, 1].map(|i| largest(scores, i));
    let exceeds = |i: usize| largest[i] * scale.factor() > states[0][i].max + SLACK;
    if any_sync(exceeds(0) || exceeds(1)) {
        for i in 0..2 {
            let row = of_row(largest[i], max);
            let rescale = states[0][i].raise(row * scale.factor());
            for block in 0..D8 {
                out[block][0][0][i] *= rescale;
            }
        }
    }
    for i in 0..2 {
        let state = &mut states[0][i];
        for block in 0..N8 {
            let weight = state.scaled_weight(scores[0][block][i], scale.factor());
            state.sum += weight;
            scores[0][block][i] = weight;
        }
    }
}

/// The lane's largest score of its row `i`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn largest<const M: usize, const N8: usize>(scores: &Fragments<M, N8>, i: usize) -> f32 {
    let mut largest = f32::NEG_INFINITY;
    for block in 0..N8 {
        largest = max(largest, scores[0][block][i]);
    }
    largest
}

/// Reduces a value over the eight lanes that share a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_row(of_lane: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut all = of_lane;
    for distance in [4, 8, 16] {
        all = combine(all, shfl_xor_f32(all, distance));
    }
    all
}

/// The state of a whole row from the lane's share.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn total(state: SoftmaxState) -> SoftmaxState {
    SoftmaxState { sum: of_row(state.sum, |a, b| a + b), ..state }
}

/// P of eight keys as the part of a B operand whose rows are these keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn operand<T: MmaElement>(weights: [f32; 4]) -> u32 {
    movmatrix_trans(T::pack(weights[0], weights[1]))
}
