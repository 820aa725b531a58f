//! The online softmax on score fragments.
//!
//! A lane keeps the states of the rows that it holds a part of. Its sums cover its own columns;
//! [`total`] adds the sums of the four lanes of a row at the end. Row maxima are equal in these
//! lanes, which exchange them by shuffles: at every tile, or only when some score exceeds the row's
//! maximum by more than [`SLACK`]. P may then be as large as `2^SLACK`, which loses no precision,
//! and most steps need neither rescale nor shuffle (the lazy rescale of FlashAttention-4).

use super::fragment::{Fragments, column_of};
use crate::concept::mask::Visible;
use crate::concept::softmax::{LOG2_E, PlainState, SoftmaxState};
use crate::num::tanh;
use crate::simt::{any_sync, max, rcp, shfl_xor_f32};

/// States of a lane's rows: two in each of `M` MMA tiles.
pub type States<const M: usize> = [[SoftmaxState; 2]; M];

/// Lazy-rescale threshold: how far a score (times log2 e) may exceed the lagged row maximum.
pub const SLACK: f32 = 8.0;

/// Steps from q·k to the log2 domain: an adjustment that most calls do not need, then a positive
/// factor.
#[derive(Clone, Copy)]
pub struct ScoreScale {
    scale: f32,
    softcap: f32,
    factor: f32,
}

impl ScoreScale {
    /// For the factor of q·k and the softcap, 0 for none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(scale: f32, softcap: f32) -> Self {
        let plain = Self { scale, softcap, factor: 1.0 };
        Self { factor: plain.plain_factor() * LOG2_E, ..plain }
    }

    /// The factor to apply after [`adjust`](Self::adjust).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn factor(self) -> f32 {
        self.factor
    }

    /// The factor without log2(e), which gives scores in natural units.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn plain_factor(self) -> f32 {
        if self.softcap > 0.0 { self.softcap } else { self.scale.abs() }
    }

    /// Adjusts scores so that only the factor remains: tanh with a softcap; negation if the scale
    /// is negative, because maxima are taken before the factor.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn adjust<const M: usize, const N8: usize>(self, scores: &mut Fragments<M, N8>) {
        if self.softcap > 0.0 {
            let inner = self.scale * rcp(self.softcap);
            each(scores, |x| tanh(x * inner));
        } else if self.scale < 0.0 {
            each(scores, |x| -x);
        }
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn each<const M: usize, const N8: usize>(scores: &mut Fragments<M, N8>, f: impl Fn(f32) -> f32) {
    for m in 0..M {
        for block in 0..N8 {
            for i in 0..4 {
                scores[m][block][i] = f(scores[m][block][i]);
            }
        }
    }
}

/// Hides keys from `begin` on that a row does not see; `visible(m, half)` are the keys that a
/// lane's row sees.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn mask<const M: usize, const N8: usize>(
    scores: &mut Fragments<M, N8>,
    begin: u32,
    visible: impl Fn(usize, usize) -> Visible,
) {
    for m in 0..M {
        for half in 0..2 {
            let Visible { first, end } = visible(m, half);
            for block in 0..N8 {
                for i in 0..2 {
                    let key = begin + 8 * block as u32 + column_of() + i as u32;
                    if key < first || key >= end {
                        scores[m][block][2 * half + i] = f32::NEG_INFINITY;
                    }
                }
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
        for i in 0..2 {
            if is_nowhere(begin + 8 * block as u32 + column_of() + i as u32) {
                for m in 0..M {
                    for half in 0..2 {
                        scores[m][block][2 * half + i] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Turns scores into P with the rows' new maxima, and rescales the accumulators.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh<const M: usize, const N8: usize, const D8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    out: &mut Fragments<M, D8>,
    scale: ScoreScale,
) {
    for m in 0..M {
        for half in 0..2 {
            let rescale = weigh_row(&mut states[m][half], &mut scores[m], half, scale);
            for block in 0..D8 {
                for i in 2 * half..2 * half + 2 {
                    out[m][block][i] *= rescale;
                }
            }
        }
    }
}

/// Turns scores into P with lagged row maxima; rescales the accumulators where a score exceeds a
/// maximum by more than [`SLACK`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh_with_slack<const M: usize, const N8: usize, const D8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    out: &mut Fragments<M, D8>,
    scale: ScoreScale,
) {
    weigh_and_rescale::<M, 2, N8>(states, scores, scale, |m, half, rescale| {
        for block in 0..D8 {
            for i in 2 * half..2 * half + 2 {
                out[m][block][i] *= rescale;
            }
        }
    });
}

/// Turns scores into P with lagged row maxima; `rescale(m, half, factor)` rescales the accumulators
/// of a lane's row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh_and_rescale<const M: usize, const HALVES: usize, const N8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    scale: ScoreScale,
    rescale: impl FnMut(usize, usize, f32),
) {
    let mut exceeds = false;
    for m in 0..M {
        for half in 0..HALVES {
            exceeds |= largest(&scores[m], half) * scale.factor() > states[m][half].max + SLACK;
        }
    }
    if any_sync(exceeds) {
        raise::<M, HALVES, N8>(states, scores, scale, rescale);
    }
    for m in 0..M {
        for half in 0..HALVES {
            let state = &mut states[m][half];
            for block in 0..N8 {
                for i in 2 * half..2 * half + 2 {
                    let weight = state.scaled_weight(scores[m][block][i], scale.factor());
                    state.sum += weight;
                    scores[m][block][i] = weight;
                }
            }
        }
    }
}

/// Raises all row maxima to the largest score so far.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn raise<const M: usize, const HALVES: usize, const N8: usize>(
    states: &mut States<M>,
    scores: &Fragments<M, N8>,
    scale: ScoreScale,
    mut rescale: impl FnMut(usize, usize, f32),
) {
    for m in 0..M {
        for half in 0..HALVES {
            let lanes = largest(&scores[m], half);
            let lanes = max(lanes, shfl_xor_f32(lanes, 1));
            let row = max(lanes, shfl_xor_f32(lanes, 2));
            rescale(m, half, states[m][half].raise(row * scale.factor()));
        }
    }
}

/// The lane's largest score of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn largest<const N8: usize>(scores: &[[f32; 4]; N8], half: usize) -> f32 {
    let mut largest = f32::NEG_INFINITY;
    for block in 0..N8 {
        largest = max(largest, max(scores[block][2 * half], scores[block][2 * half + 1]));
    }
    largest
}

/// [`weigh_with_slack`] on scores in natural units, so that scores of any size stay exact. The
/// states' maxima lack the factor log2(e) too, until [`to_log2`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh_plain<const M: usize, const N8: usize, const D8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    out: &mut Fragments<M, D8>,
) {
    let mut exceeds = false;
    for m in 0..M {
        for half in 0..2 {
            exceeds |= largest(&scores[m], half) > states[m][half].max + SLACK / LOG2_E;
        }
    }
    if any_sync(exceeds) {
        for m in 0..M {
            for half in 0..2 {
                let mut state = plain(states[m][half]);
                let rescale = state.raise(row_max(&scores[m], half));
                states[m][half] = SoftmaxState { max: state.max, sum: state.sum };
                for block in 0..D8 {
                    for i in 2 * half..2 * half + 2 {
                        out[m][block][i] *= rescale;
                    }
                }
            }
        }
    }
    for m in 0..M {
        for half in 0..2 {
            let state = plain(states[m][half]);
            for block in 0..N8 {
                for i in 2 * half..2 * half + 2 {
                    let weight = state.weight(scores[m][block][i]);
                    states[m][half].sum += weight;
                    scores[m][block][i] = weight;
                }
            }
        }
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn plain(SoftmaxState { max, sum }: SoftmaxState) -> PlainState {
    PlainState { max, sum }
}

/// Converts states of [`weigh_plain`] to the log2 domain. A finite maximum stays finite: a row
/// whose keys all have the lowest f32 as their bias still has keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn to_log2<const M: usize>(states: States<M>) -> States<M> {
    let log2 = |state: SoftmaxState| {
        let product = state.max * LOG2_E;
        let at_least = product.max(f32::MIN);
        let is_finite = state.max.abs() <= f32::MAX;
        let max = if is_finite { at_least.min(f32::MAX) } else { product };
        SoftmaxState { max, ..state }
    };
    states.map(|block| block.map(log2))
}

/// Turns the scores of a lane's row into P with its new maximum; returns the rescale factor of the
/// accumulators.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh_row<const N8: usize>(
    state: &mut SoftmaxState,
    scores: &mut [[f32; 4]; N8],
    half: usize,
    scale: ScoreScale,
) -> f32 {
    let rescale = state.raise(row_max(scores, half) * scale.factor);
    weigh_against(state, scores, half, scale);
    rescale
}

/// Turns the scores of a lane's row into P with its maximum, which no score exceeds.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh_against<const N8: usize>(
    state: &mut SoftmaxState,
    scores: &mut [[f32; 4]; N8],
    half: usize,
    scale: ScoreScale,
) {
    for block in 0..N8 {
        for i in 2 * half..2 * half + 2 {
            let weight = state.scaled_weight(scores[block][i], scale.factor);
            state.sum += weight;
            scores[block][i] = weight;
        }
    }
}

/// The state of a whole row from the lane's share.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn total(state: SoftmaxState) -> SoftmaxState {
    let sum = state.sum + shfl_xor_f32(state.sum, 1);
    SoftmaxState { sum: sum + shfl_xor_f32(sum, 2), ..state }
}

/// Largest score of a lane's row, over the four lanes that hold it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn row_max<const N8: usize>(scores: &[[f32; 4]; N8], half: usize) -> f32 {
    let mut largest = f32::NEG_INFINITY;
    for block in 0..N8 {
        largest = max(largest, max(scores[block][2 * half], scores[block][2 * half + 1]));
    }
    largest = max(largest, shfl_xor_f32(largest, 1));
    max(largest, shfl_xor_f32(largest, 2))
}
