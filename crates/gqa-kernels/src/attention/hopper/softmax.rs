//! Online softmax: from scores to P, two rows of a tile per thread.

use super::mask;
use super::operand::Operand;
use super::packing::Packing;
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::{MmaElement, unpack};
use crate::params::AttentionParams;
use crate::simt::*;
use core::ops::Range;

/// Softmax state of a consumer thread's two rows, `row` and `row + 8`.
#[derive(Clone, Copy)]
pub(super) struct RowPair {
    /// The lagged row maximum, as an exponent of 2: a maximal score times `factor`, plus
    /// `headroom`. It starts from the row's first tile, and follows later scores only when
    /// exponents exceed the lazy-rescale threshold. -inf before the first score.
    pub(super) reference: [f32; 2],
    /// This thread's share of the row sums.
    pub(super) sum: [f32; 2],
}

/// Pairs of keys in flight in [`Softmax::weigh_in_turns`].
const AHEAD: usize = 3;

/// Loop-carried values of [`Softmax::weigh_in_turns`], for each of the two rows.
pub(super) struct Turns {
    /// Negated row maxima, one per pair in flight; each depends on P of the pair before it in its
    /// chain, which fixes the order of the instructions.
    origins: [[f32; AHEAD]; 2],
    /// Bits of the greatest P of even and of odd pairs; the bits of a NaN exceed those of any
    /// number.
    tops: [[i32; 2]; 2],
}

impl Turns {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(rows: &RowPair) -> Self {
        Self { origins: rows.reference.map(|reference| [-reference; AHEAD]), tops: [[0; 2]; 2] }
    }

    /// Bits of each row's greatest P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tops(&self) -> [i32; 2] {
        self.tops.map(|[even, odd]| even.max(odd))
    }
}

/// The top exponent bit of two packed elements of P: set from 2.0 on, in float16 and bfloat16.
const HIGHEST_EXPONENT_BITS: u32 = 0x4000_4000;

impl RowPair {
    pub(super) const EMPTY: Self = Self { reference: [f32::NEG_INFINITY; 2], sum: [0.0; 2] };

    /// Whether the row maximum is still unset.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_unset(&self, half: usize) -> bool {
        self.reference[half] == f32::NEG_INFINITY
    }

    /// The row maximum, or 0 while it is unset, which avoids inf - inf.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn origin(&self, half: usize) -> f32 {
        if self.is_unset(half) { 0.0 } else { self.reference[half] }
    }

    /// Whether the row maximum is unset, or so negative that differences from it are inexact.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_low(&self, half: usize) -> bool {
        const LOW: f32 = -1024.0;
        self.reference[half] < LOW
    }

    /// Sets the row maximum to `new` if that is a number far above the current one. Returns the
    /// rescale factor of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start_anew(&mut self, half: usize, new: f32) -> f32 {
        const FAR: f32 = 64.0;
        let (unset, old) = (self.is_unset(half), self.reference[half]);
        let starts = new > old + FAR;
        let factor = if starts && !unset { exp2(old - new) } else { 1.0 };
        if starts {
            self.reference[half] = new;
        }
        self.sum[half] *= factor;
        factor
    }

    /// Converts to [`SoftmaxState`]s, with this thread's share of the sums.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn states(&self) -> [SoftmaxState; 2] {
        let state = |half| SoftmaxState { max: self.reference[half], sum: self.sum[half] };
        [state(0), state(1)]
    }
}

/// A pending rescale: the output so far is still relative to the old row maxima.
#[derive(Clone, Copy)]
pub(super) struct Raised {
    /// Whether the maximum of any row of the warp has changed.
    pub(super) any: bool,
    factors: [f32; 2],
}

impl Raised {
    pub(super) const NONE: Self = Self { any: false, factors: [1.0; 2] };

    /// Rescales the output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn apply<const O: usize>(&self, o: &mut [f32; O]) {
        if self.any {
            scale(o, self.factors);
        }
    }
}

/// Multiplies each row by its factor.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn scale<const O: usize>(o: &mut [f32; O], factors: [f32; 2]) {
    let mut i = 0;
    while i < O {
        o[i] *= factors[i / 2 % 2];
        i += 1;
    }
}

/// Parameters for turning scores into P.
pub(super) struct Softmax<'a> {
    pub(super) p: &'a AttentionParams,
    /// Factors, of each of the two rows, from scores to exponents of 2.
    pub(super) factors: [f32; 2],
    /// First of this thread's two rows in the CTA's tile.
    pub(super) row: u32,
    /// When a row maximum is set, how many powers of two above the greatest score it lies.
    pub(super) headroom: f32,
    /// The lazy-rescale threshold: greatest exponent that causes no rescale.
    pub(super) limit: f32,
    /// Bits of the greatest P that causes no rescale.
    pub(super) limit_bits: i32,
    /// Whether P is summed here rather than by the tensor cores.
    pub(super) adds: bool,
    /// Whether [`RowPair::sum`] holds the row sums of earlier tiles; if not, the output registers
    /// do.
    pub(super) keeps: bool,
}

impl Softmax<'_> {
    /// The row maximum to set where `top` is the greatest score.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn reference(&self, half: usize, top: f32) -> f32 {
        fma(top, self.factors[half], self.headroom)
    }

    /// The state of two rows whose first tile has these scores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn start<const C: usize>(&self, s: &[f32; C]) -> RowPair {
        let reference = |half| self.reference(half, greatest(half, s));
        RowPair { reference: [reference(0), reference(1)], ..RowPair::EMPTY }
    }

    /// Sets scores of keys that their row does not see to -inf; the tile's rows start at `row`, its
    /// keys at `key`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn mask<const C: usize>(
        &self,
        s: &mut [f32; C],
        seqlen: Seqlen,
        packing: Packing,
        [row, key]: [u32; 2],
        window: u32,
    ) {
        // A bit for each of this thread's keys: 32 bits per 128 keys.
        let mut visible = [[0; 2]; 2];
        let mut half = 0;
        while half < 2 {
            // Padding rows: the value is unused.
            let first = seqlen.past.wrapping_add(row);
            let next = packing.find(first, self.row, 8 * half as u32).token.wrapping_add(1);
            let end = if self.p.causal != 0 { next.min(seqlen.total) } else { seqlen.total };
            let first = if window > 0 { next.saturating_sub(window) } else { 0 };
            let mut word = 0;
            while word < C.div_ceil(64) {
                let key = key + 128 * word as u32;
                visible[half][word] = keys_below(end, key) & !keys_below(first, key);
                word += 1;
            }
            half += 1;
        }
        let mut i = 0;
        while i < C {
            let n = i / 4 * 2 + i % 2;
            if visible[i / 2 % 2][n / 32] >> (n % 32) & 1 == 0 {
                s[i] = f32::NEG_INFINITY;
            }
            i += 1;
        }
    }

    /// Soft-capping: scores become `softcap · tanh(score · scale / softcap)`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn cap<const C: usize>(&self, s: &mut [f32; C]) {
        let inner = 2.0 * LOG2_E * self.p.scale / self.p.softcap;
        let mut i = 0;
        while i < C {
            // tanh(x) = 1 - 2 / (1 + e^(2x))
            s[i] = fma(-2.0 * self.p.softcap, rcp(1.0 + exp2(s[i] * inner)), self.p.softcap);
            i += 1;
        }
    }

    /// Prepares scores with a bias for the softmax. Sets the row maxima from the first scores, and
    /// resets very negative ones when scores far exceed them, because differences from them are
    /// inexact. Folds the lowest scores ([`mask::fold`]).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn settle<const C: usize>(&self, s: &mut [f32; C], rows: &mut RowPair) -> Raised {
        let mut raised = Raised::NONE;
        // Votes here and below, so that ptxas knows that the conditions are warp-uniform.
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
                rows.start_anew(0, self.reference(0, tops[0])),
                rows.start_anew(1, self.reference(1, tops[1])),
            ];
        }
        raised
    }

    /// Online softmax, first step: subtracts `reference` from the scaled scores of one of the two
    /// rows, which gives exponents of 2.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn relate<const C: usize>(&self, half: usize, s: &mut [f32; C], reference: f32) {
        let mut i = 0;
        while i < C / 4 {
            let at = 4 * i + 2 * half;
            s[at] = fma(s[at], self.factors[half], -reference);
            s[at + 1] = fma(s[at + 1], self.factors[half], -reference);
            i += 1;
        }
    }

    /// Subtracts the row maximum from the scaled scores, and rescales where exponents exceed the
    /// threshold. Exponents above it are positive, and positive floats are ordered like their bits,
    /// so one integer instruction gives the maximum of three.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn relate_and_raise<const C: usize>(
        &self,
        half: usize,
        s: &mut [f32; C],
        rows: &mut RowPair,
        raised: &mut Raised,
    ) {
        let limit = if rows.is_unset(half) { i32::MIN } else { bits(self.limit) };
        let origin = rows.origin(half);
        // Two independent chains: one would be bound by latency.
        let mut tops = [i32::MIN; 2];
        let mut i = 0;
        while i < C / 4 {
            let at = 4 * i + 2 * half;
            s[at] = fma(s[at], self.factors[half], -origin);
            s[at + 1] = fma(s[at + 1], self.factors[half], -origin);
            tops[i % 2] = tops[i % 2].max(bits(s[at])).max(bits(s[at + 1]));
            i += 1;
        }
        // A vote, so that ptxas knows that the condition is warp-uniform.
        if any_sync(tops[0].max(tops[1]) > limit) {
            raised.any = true;
            raised.factors[half] *= self.raise(half, s, rows);
        }
    }

    /// Rescales a row if one of its exponents `s` exceeds the threshold, and corrects `s`. Returns
    /// the rescale factor of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn raise<const C: usize>(&self, half: usize, s: &mut [f32; C], rows: &mut RowPair) -> f32 {
        let top = greatest(half, s);
        let unset = rows.is_unset(half);
        let rises = top > if unset { f32::NEG_INFINITY } else { self.limit };
        let mut rise = 0.0;
        if rises {
            let old = rows.origin(half);
            rows.reference[half] = old + (top + self.headroom);
            // The difference actually added: the sum is rounded if the maximum is large.
            rise = rows.reference[half] - old;
        }
        let mut i = 0;
        while i < C / 4 {
            s[4 * i + 2 * half] -= rise;
            s[4 * i + 2 * half + 1] -= rise;
            i += 1;
        }
        let factor = exp2(-max(rise, 0.0));
        if self.keeps {
            rows.sum[half] *= factor;
        }
        factor
    }

    /// Rescales rows of packed P that exceed the threshold: P falls by a power of two, which is
    /// exact, and the row maximum rises by as much. This tile adds sums of the rounded P: where few
    /// elements dominate a row, that makes the quotient more accurate. Returns the rescale factors
    /// of the accumulators, or `None` if P is (nearly) infinite.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lower<T: MmaElement, const W: usize>(
        &self,
        weights: &mut [u32; W],
        rows: &mut RowPair,
    ) -> Option<[f32; 2]> {
        let mut tops = [0; 2];
        let mut half = 0;
        while half < 2 {
            let mut top = greatest_weight(half, weights);
            top = top.max(shfl_xor_u32(top, 1));
            top = top.max(shfl_xor_u32(top, 2));
            let [top, ..] = unpack::<T>([top, 0, 0, 0]);
            tops[half] = top.to_bits();
            half += 1;
        }
        if any_sync(tops[0].max(tops[1]) >= exp2_bits(64)) {
            return None;
        }
        let mut factors = [1.0; 2];
        half = 0;
        while half < 2 {
            if tops[half] >= exp2_bits(<T as Operand>::LIMIT as u32) {
                let fall = (tops[half] >> 23) - T::headroom_exponent();
                let old = rows.reference[half];
                rows.reference[half] += fall as f32;
                // The sum above is rounded if the maximum is large.
                factors[half] = exp2(old - rows.reference[half]);
            }
            rows.sum[half] *= factors[half];
            half += 1;
        }
        let mut i = 0;
        while i < W {
            let [low, high, ..] = unpack::<T>([weights[i], 0, 0, 0]);
            let (low, high) = (low * factors[i % 2], high * factors[i % 2]);
            rows.sum[i % 2] += low + high;
            weights[i] = T::pack(low, high);
            i += 1;
        }
        Some(factors)
    }

    /// Rescales rows in which a score of `tops` exceeds the threshold. Returns the rescale factors
    /// of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn raise_to(&self, tops: [f32; 2], rows: &mut RowPair) -> [f32; 2] {
        let mut factors = [1.0; 2];
        let mut half = 0;
        while half < 2 {
            let old = rows.reference[half];
            if fma(tops[half], self.factors[half], -old) > self.limit {
                rows.reference[half] = self.reference(half, tops[half]);
                factors[half] = exp2(old - rows.reference[half]);
                rows.sum[half] *= factors[half];
            }
            half += 1;
        }
        factors
    }

    /// Online softmax, second step: exponentiates one of the two rows, which gives P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn weigh<const C: usize>(&self, half: usize, s: &mut [f32; C], rows: &mut RowPair) {
        // Independent chains against latency.
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

    /// Turns the scores of some pairs of keys into P: subtracts the row maximum and exponentiates.
    ///
    /// The exponents of a pair depend on P of the pair [`AHEAD`] before it. This interleaves them
    /// with the exponentials: the MUFU starts early and stays busy, where ptxas would compute all
    /// exponents first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn weigh_in_turns<const C: usize>(
        &self,
        pairs: Range<usize>,
        s: &mut [f32; C],
        turns: &mut Turns,
    ) {
        let mut i = pairs.start;
        while i < pairs.end {
            let mut half = 0;
            while half < 2 {
                let at = 4 * i + 2 * half;
                let origin = &mut turns.origins[half][i % AHEAD];
                s[at] = exp2(fma(s[at], self.factors[half], *origin));
                s[at + 1] = exp2(fma(s[at + 1], self.factors[half], *origin));
                // Same value, or NaN if P is infinite: this is the dependency.
                *origin = fma(s[at + 1], 0.0, *origin);
                let top = &mut turns.tops[half][i % 2];
                *top = (*top).max(bits(s[at])).max(bits(s[at + 1]));
                half += 1;
            }
            i += 1;
        }
    }

    /// Whether one of the warp's greatest elements of P, given as bits, exceeds the threshold.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn exceed_limit(&self, tops: [i32; 2]) -> bool {
        any_sync(tops[0].max(tops[1]) > self.limit_bits)
    }

    /// Rescales rows of unpacked P that exceed the threshold: P falls by a power of two, and the
    /// row maximum rises by as much. Returns the rescale factors of the accumulators, or `None` if
    /// P is infinite.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lower_wide<const C: usize>(
        &self,
        tops: [i32; 2],
        s: &mut [f32; C],
        rows: &mut RowPair,
    ) -> Option<[f32; 2]> {
        let tops = tops.map(|top| {
            let top = (top as u32).max(shfl_xor_u32(top as u32, 1));
            top.max(shfl_xor_u32(top, 2)) as i32
        });
        if any_sync(tops[0].max(tops[1]) >= bits(f32::INFINITY)) {
            return None;
        }
        let mut factors = [1.0; 2];
        let mut half = 0;
        while half < 2 {
            if tops[half] > self.limit_bits {
                let old = rows.reference[half];
                // The distance from the greatest P's exponent to the one that it gets.
                let fall = ((tops[half] >> 23) - 127) as f32 + self.headroom;
                rows.reference[half] = old + fall;
                // The sum above is rounded if the maximum is large.
                factors[half] = exp2(old - rows.reference[half]);
                rows.sum[half] *= factors[half];
            }
            let mut i = 0;
            while i < C / 4 {
                s[4 * i + 2 * half] *= factors[half];
                s[4 * i + 2 * half + 1] *= factors[half];
                i += 1;
            }
            half += 1;
        }
        Some(factors)
    }
}

/// Bitmask of this thread's keys of a row that are below `end`, among the 128 keys from `key` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn keys_below(end: u32, key: u32) -> u32 {
    let ahead = end.saturating_sub(key + lane() % 4 * 2);
    let count = ahead / 8 * 2 + (ahead % 8).min(2);
    if count < 32 { (1 << count) - 1 } else { u32::MAX }
}

/// Maximum of one of the two rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn greatest<const C: usize>(half: usize, s: &[f32; C]) -> f32 {
    // Independent chains: one would be bound by latency.
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

/// Whether any P of the warp's rows exceeds the threshold; infinities and NaN do.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn exceed<const W: usize>(weights: &[u32; W]) -> bool {
    // Independent chains against latency.
    let mut bits = [0; 2];
    let mut i = 0;
    while i < W {
        bits[i / 2 % 2] |= weights[i];
        i += 1;
    }
    any_sync((bits[0] | bits[1]) & HIGHEST_EXPONENT_BITS != 0)
}

/// Bits of the greatest of this thread's elements of P. They are not negative, so their bits order
/// them; NaN is the greatest.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn greatest_weight<const W: usize>(half: usize, weights: &[u32; W]) -> u32 {
    let mut tops = 0;
    let mut i = half;
    while i < W {
        tops = max_u16x2(tops, weights[i]);
        i += 2;
    }
    (tops >> 16).max(tops & 0xffff)
}

/// Bits of the f32 2^`exponent`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) const fn exp2_bits(exponent: u32) -> u32 {
    (127 + exponent) << 23
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}
