//! The online softmax: a running maximum and sum that meet new scores, or another such state, and
//! can be finished at any time (Milakov and Gimelshein, 2018; FlashAttention, 2022).

use crate::simt::{exp2, fma, log2, max, rcp};

/// log2(e): scores are scaled by it once so that each exponential is a single `exp2`.
pub const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;

/// Maximum and sum of one row's scores in the log2 domain; what it multiplied is the caller's to
/// rescale.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxState {
    /// Largest score so far times log2(e); -inf where none was seen.
    pub max: f32,
    /// Sum of `exp2(score·log2(e) - max)`.
    pub sum: f32,
}

impl SoftmaxState {
    /// No scores yet.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Raises the maximum to `new_max` and returns the factor that what was accumulated so far must
    /// be multiplied by.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn raise(&mut self, new_max: f32) -> f32 {
        let max = max(self.max, new_max);
        let factor = exp2(self.max - Self::finite(max));
        self.max = max;
        self.sum *= factor;
        factor
    }

    /// Weight of a score (times log2(e)) against the current maximum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn weight(&self, score: f32) -> f32 {
        exp2(score - Self::finite(self.max))
    }

    /// Weight of `score · factor` against the current maximum: one multiply-add and one
    /// exponential.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn scaled_weight(&self, score: f32, factor: f32) -> f32 {
        exp2(fma(score, factor, -Self::finite(self.max)))
    }

    /// A sink logit (times log2(e)) joins the denominator; returns the factor for what was
    /// accumulated.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn join_sink(&mut self, sink: f32) -> f32 {
        let factor = self.raise(sink);
        self.sum += self.weight(sink);
        factor
    }

    /// What the accumulator must be multiplied by in the end: 1/sum, or 0 where nothing was
    /// visible. NaN stays NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn normaliser(&self) -> f32 {
        if self.sum == 0.0 { 0.0 } else { rcp(self.sum) }
    }

    /// Natural logarithm of the denominator; -inf where nothing was visible. NaN stays NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn log_sum_exp(&self) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { (self.max + log2(self.sum)) * LN_2 }
    }

    /// -inf - -inf is NaN; a row without scores subtracts 0 instead.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finite(max: f32) -> f32 {
        if max == f32::NEG_INFINITY { 0.0 } else { max }
    }
}

/// The same state on scores as they are. The factor log2(e) is applied to differences only, so
/// scores of any size, a bias of -10000 or of the lowest number among them, lose nothing; it costs
/// a subtraction and a multiplication per score.
#[derive(Clone, Copy, Debug)]
pub struct PlainState {
    /// Largest score so far; -inf where none was seen.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
}

impl PlainState {
    /// No scores yet.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Raises the maximum to `new_max` and returns the factor that what was accumulated so far must
    /// be multiplied by.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn raise(&mut self, new_max: f32) -> f32 {
        let max = max(self.max, new_max);
        let factor = exp2((self.max - SoftmaxState::finite(max)) * LOG2_E);
        self.max = max;
        self.sum *= factor;
        factor
    }

    /// Weight of a score against the current maximum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn weight(&self, score: f32) -> f32 {
        exp2((score - SoftmaxState::finite(self.max)) * LOG2_E)
    }

    /// A sink logit joins the denominator; returns the factor for what was accumulated.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn join_sink(&mut self, sink: f32) -> f32 {
        let factor = self.raise(sink);
        self.sum += self.weight(sink);
        factor
    }

    /// As [`SoftmaxState::normaliser`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn normaliser(&self) -> f32 {
        SoftmaxState { max: 0.0, sum: self.sum }.normaliser()
    }

    /// As [`SoftmaxState::log_sum_exp`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn log_sum_exp(&self) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { self.max + log2(self.sum) * LN_2 }
    }
}
