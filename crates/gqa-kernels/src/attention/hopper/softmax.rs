//! From scores to weights, two rows of a tile per thread.

use super::mask;
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::params::AttentionParams;
use crate::simt::*;

/// What a consumer thread keeps of its two rows, `row` and `row + 8`.
#[derive(Clone, Copy)]
pub(super) struct RowPair {
    /// What exponents count from: the running maximum times `factor`, or at most [`SLACK`] less; 0 before the first score.
    reference: [f32; 2],
    /// Exponents above it raise the reference: bits of a float, compared as integers, of which all but the greatest negative one are
    /// bits of floats.
    limit: [i32; 2],
    /// This thread's share of the running sums.
    sum: [f32; 2],
}

/// How far exponents may exceed the reference: weights up to 2^8 cost no precision, and few tiles raise a maximum by more than that.
const SLACK: f32 = 8.0;
/// The limit that every exponent exceeds.
const UNSET: i32 = i32::MIN;

impl RowPair {
    pub(super) const EMPTY: Self = Self { reference: [0.0; 2], limit: [UNSET; 2], sum: [0.0; 2] };

    /// Counted from the greatest of their first scores.
    #[inline(always)]
    pub(super) fn start<const C: usize>(s: &[f32; C], factor: f32) -> Self {
        let mut rows = Self::EMPTY;
        let mut half = 0;
        while half < 2 {
            let top = greatest(half, s);
            if top > f32::NEG_INFINITY {
                rows.reference[half] = top * factor;
                rows.limit[half] = bits(SLACK);
            }
            half += 1;
        }
        rows
    }

    /// Whether exponents count from nothing yet, or from so far down that they might be coarse.
    #[inline(always)]
    fn is_low(&self, half: usize) -> bool {
        const LOW: f32 = -1024.0;
        self.limit[half] == UNSET || self.reference[half] < LOW
    }

    /// Counts from `top` if that is a score and far above what has been counted from. Returns the factor for what was accumulated.
    #[inline(always)]
    fn start_anew(&mut self, half: usize, top: f32) -> f32 {
        const FAR: f32 = 64.0;
        let (unset, old) = (self.limit[half] == UNSET, self.reference[half]);
        let starts = top > if unset { f32::NEG_INFINITY } else { old + FAR };
        let factor = if starts && !unset { exp2(old - top) } else { 1.0 };
        if starts {
            self.reference[half] = top;
            self.limit[half] = bits(SLACK);
        }
        self.sum[half] *= factor;
        factor
    }

    /// As states, of whose sums each thread has its share.
    #[inline(always)]
    pub(super) fn states(&self) -> [SoftmaxState; 2] {
        let mut states = [SoftmaxState::EMPTY; 2];
        let mut half = 0;
        while half < 2 {
            if self.limit[half] != UNSET {
                states[half] = SoftmaxState { max: self.reference[half], sum: self.sum[half] };
            }
            half += 1;
        }
        states
    }
}

/// What raised references leave to be done: the output so far counts from the old ones.
#[derive(Clone, Copy)]
pub(super) struct Raised {
    /// Whether any row of the warp was raised.
    pub(super) any: bool,
    factors: [f32; 2],
}

impl Raised {
    pub(super) const NONE: Self = Self { any: false, factors: [1.0; 2] };

    /// Rescales the output.
    #[inline(always)]
    pub(super) fn apply<const O: usize>(&self, o: &mut [f32; O]) {
        if self.any {
            scale(o, self.factors);
        }
    }
}

/// Multiplies each row by its factor.
#[inline(always)]
pub(super) fn scale<const O: usize>(o: &mut [f32; O], factors: [f32; 2]) {
    let mut i = 0;
    while i < O {
        o[i] *= factors[i / 2 % 2];
        i += 1;
    }
}

/// What a thread needs to weigh scores.
pub(super) struct Softmax<'a> {
    pub(super) p: &'a AttentionParams,
    /// Scores times this are exponents of 2.
    pub(super) factor: f32,
    /// First of this thread's two rows in the block's tile.
    pub(super) row: u32,
    /// Weights are summed here, and not by the tensor cores.
    pub(super) adds: bool,
}

impl Softmax<'_> {
    /// Scores of keys that their row does not see become -inf; the tile's rows start at `row`, its keys at `key`.
    #[inline(always)]
    pub(super) fn mask<const C: usize>(
        &self,
        s: &mut [f32; C],
        seqlen: Seqlen,
        row: u32,
        key: u32,
    ) {
        let mut visible = [0; 2];
        let mut half = 0;
        while half < 2 {
            let position = seqlen.past + row + self.row + 8 * half as u32;
            let end =
                if self.p.causal != 0 { (position + 1).min(seqlen.total) } else { seqlen.total };
            let first =
                if self.p.window > 0 { (position + 1).saturating_sub(self.p.window) } else { 0 };
            visible[half] = keys_below(end, key) & !keys_below(first, key);
            half += 1;
        }
        let mut i = 0;
        while i < C {
            if visible[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1 == 0 {
                s[i] = f32::NEG_INFINITY;
            }
            i += 1;
        }
    }

    /// Scores become `softcap · tanh(score · scale / softcap)`.
    #[inline(always)]
    pub(super) fn cap<const C: usize>(&self, s: &mut [f32; C]) {
        let inner = 2.0 * LOG2_E * self.p.scale / self.p.softcap;
        let mut i = 0;
        while i < C {
            // tanh(x) = 1 - 2 / (1 + e^(2x))
            s[i] = fma(-2.0 * self.p.softcap, rcp(1.0 + exp2(s[i] * inner)), self.p.softcap);
            i += 1;
        }
    }

    /// What a bias asks for before the first step: rows start with their first scores, and start anew where scores exceed a very low
    /// reference by far, because exponents that count from there are coarse. The lowest scores are folded.
    #[inline(always)]
    pub(super) fn settle<const C: usize>(&self, s: &mut [f32; C], rows: &mut RowPair) -> Raised {
        let mut raised = Raised::NONE;
        // A vote, so that the assembler sees that a warp's lanes agree; so is the other.
        if any_sync(rows.is_low(0) || rows.is_low(1)) {
            raised.any = true;
            let mut tops = [greatest(0, s), greatest(1, s)];
            if any_sync(mask::is_foldable(tops[0]) || mask::is_foldable(tops[1])) {
                let mut i = 0;
                while i < C {
                    s[i] = mask::fold(s[i]);
                    i += 1;
                }
                tops = [mask::fold(tops[0]), mask::fold(tops[1])];
            }
            raised.factors = [
                rows.start_anew(0, tops[0] * self.factor),
                rows.start_anew(1, tops[1] * self.factor),
            ];
        }
        raised
    }

    /// Online softmax, first step: the scores of one of the two rows become exponents of 2 relative to its reference, which is
    /// raised where they exceed it by too much. Only exponents that do are positive, and positive floats are ordered like their
    /// bits, of which one instruction finds the greatest of three.
    #[inline(always)]
    pub(super) fn relate<const C: usize>(
        &self,
        half: usize,
        s: &mut [f32; C],
        rows: &mut RowPair,
        raised: &mut Raised,
    ) {
        // Independent chains, because one after the other comparisons only wait for each other.
        let mut tops = [UNSET; 2];
        let mut i = 0;
        while i < C / 4 {
            let at = 4 * i + 2 * half;
            s[at] = fma(s[at], self.factor, -rows.reference[half]);
            s[at + 1] = fma(s[at + 1], self.factor, -rows.reference[half]);
            tops[i % 2] = tops[i % 2].max(bits(s[at])).max(bits(s[at + 1]));
            i += 1;
        }
        // A vote, so that the assembler sees that a warp's lanes agree.
        if any_sync(tops[0].max(tops[1]) > rows.limit[half]) {
            raised.any = true;
            raised.factors[half] *= self.raise(half, s, rows);
        }
    }

    /// Raises the reference of a row to its greatest exponent, which becomes 0, where that exceeds the limit. Returns the factor
    /// for what was accumulated.
    #[inline(always)]
    fn raise<const C: usize>(&self, half: usize, s: &mut [f32; C], rows: &mut RowPair) -> f32 {
        let mut top = greatest(half, s);
        let empty = rows.limit[half] == UNSET;
        if top <= if empty { f32::NEG_INFINITY } else { SLACK } {
            top = 0.0;
        } else {
            rows.limit[half] = bits(SLACK);
        }
        rows.reference[half] += top;
        let mut i = 0;
        while i < C / 4 {
            s[4 * i + 2 * half] -= top;
            s[4 * i + 2 * half + 1] -= top;
            i += 1;
        }
        let factor = exp2(-max(top, 0.0));
        if self.adds {
            rows.sum[half] *= factor;
        }
        factor
    }

    /// Second step: the exponents of one of the two rows become weights.
    #[inline(always)]
    pub(super) fn weigh<const C: usize>(&self, half: usize, s: &mut [f32; C], rows: &mut RowPair) {
        // Independent chains here too.
        let mut sums = [0.0; 4];
        let mut i = 0;
        while i < C / 4 {
            let mut j = 0;
            while j < 2 {
                let at = 4 * i + 2 * half + j;
                s[at] = exp2(s[at]);
                let chain = i % 2 * 2 + j;
                if self.adds {
                    sums[chain] = if i < 2 { s[at] } else { sums[chain] + s[at] };
                }
                j += 1;
            }
            i += 1;
        }
        if self.adds {
            rows.sum[half] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }
}

/// One bit for each of this thread's keys of a row, in their order, if it is below `end`; the tile's keys start at `key`.
#[inline(always)]
fn keys_below(end: u32, key: u32) -> u32 {
    let ahead = end.saturating_sub(key + lane() % 4 * 2);
    let count = ahead / 8 * 2 + (ahead % 8).min(2);
    if count < 32 { (1 << count) - 1 } else { u32::MAX }
}

/// The greatest value of one of the two rows.
#[inline(always)]
fn greatest<const C: usize>(half: usize, s: &[f32; C]) -> f32 {
    // Independent chains, because one after the other comparisons only wait for each other.
    let mut tops = [s[2 * half], s[2 * half + 1], s[2 * half + 4], s[2 * half + 5]];
    let mut i = 2;
    while i < C / 4 {
        let (chain, at) = (i % 2 * 2, 4 * i + 2 * half);
        tops[chain] = max(tops[chain], s[at]);
        tops[chain + 1] = max(tops[chain + 1], s[at + 1]);
        i += 1;
    }
    let mut top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    top = max(top, shfl_xor_f32(top, 1));
    max(top, shfl_xor_f32(top, 2))
}

#[inline(always)]
fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}
