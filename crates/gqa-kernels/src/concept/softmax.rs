//! The online softmax: a running maximum and sum, which new scores or another such state update,
//! and which can be finished at any time (Milakov and Gimelshein, 2018; FlashAttention, 2022).

use crate::simt::{exp2, fma, log2, max, rcp};

/// log2(e): scores are multiplied by it once so that each exponential is a single `exp2`.
pub const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;

/// Maximum and sum of one row's scores in the log2 domain; the caller rescales its accumulators.
#[derive(Clone, Copy, Debug)]
pub struct SoftmaxState {
    /// Largest score so far times log2(e); -inf before the first.
    pub max: f32,
    /// Sum of `exp2(score·log2(e) - max)`.
    pub sum: f32,
}

impl SoftmaxState {
    /// No scores yet.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Raises the maximum to `new_max` and returns the rescale factor of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn raise(&mut self, new_max: f32) -> f32 {
        let max = max(self.max, new_max);
        let factor = exp2(self.max - Self::finite(max));
        self.max = max;
        self.sum *= factor;
        factor
    }

    /// Element of P of a score (times log2(e)), with the current maximum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn weight(&self, score: f32) -> f32 {
        exp2(score - Self::finite(self.max))
    }

    /// Element of P of `score · factor`, with the current maximum: one multiply-add and one
    /// exponential.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn scaled_weight(&self, score: f32, factor: f32) -> f32 {
        exp2(fma(score, factor, -Self::finite(self.max)))
    }

    /// Adds an attention sink, a logit times log2(e), to the denominator; returns the rescale
    /// factor of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn join_sink(&mut self, sink: f32) -> f32 {
        let factor = self.raise(sink);
        self.sum += self.weight(sink);
        factor
    }

    /// The factor that normalises the accumulators: 1/sum, or 0 where no key was visible. NaN stays
    /// NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn normaliser(&self) -> f32 {
        if self.sum == 0.0 { 0.0 } else { rcp(self.sum) }
    }

    /// Natural logarithm of the denominator; -inf where no key was visible. NaN stays NaN.
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

/// [`SoftmaxState`] on scores in natural units. Only differences are multiplied by log2(e), so
/// scores of any size stay exact, including a bias of -10000 or of the lowest f32; it costs a
/// subtraction and a multiplication per score.
#[derive(Clone, Copy, Debug)]
pub struct PlainState {
    /// Largest score so far; -inf before the first.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
}

impl PlainState {
    /// No scores yet.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Raises the maximum to `new_max` and returns the rescale factor of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn raise(&mut self, new_max: f32) -> f32 {
        let max = max(self.max, new_max);
        let factor = exp2((self.max - SoftmaxState::finite(max)) * LOG2_E);
        self.max = max;
        self.sum *= factor;
        factor
    }

    /// Element of P of a score, with the current maximum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn weight(&self, score: f32) -> f32 {
        exp2((score - SoftmaxState::finite(self.max)) * LOG2_E)
    }

    /// Adds an attention sink's logit to the denominator; returns the rescale factor of the
    /// accumulators.
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
