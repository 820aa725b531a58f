//! From scores to weights, two rows of a tile per thread.

use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::LOG2_E;
use crate::params::AttentionParams;
use crate::simt::*;

/// What a consumer thread keeps of its two rows, `row` and `row + 8`.
#[derive(Clone, Copy)]
pub(super) struct RowPair {
    /// Running maxima times `factor`.
    pub(super) max: [f32; 2],
    /// This thread's share of the running sums.
    pub(super) sum: [f32; 2],
}

impl RowPair {
    pub(super) const EMPTY: Self = Self { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2] };
}

/// What a thread needs to weigh scores.
pub(super) struct Softmax<'a> {
    pub(super) p: &'a AttentionParams,
    /// Scores times this are exponents of 2.
    pub(super) factor: f32,
    /// First of this thread's two rows in the block's tile.
    pub(super) row: u32,
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
        let mut first = [0; 2];
        let mut end = [0; 2];
        let mut half = 0;
        while half < 2 {
            let position = seqlen.past + row + self.row + 8 * half as u32;
            end[half] =
                if self.p.causal != 0 { (position + 1).min(seqlen.total) } else { seqlen.total };
            first[half] =
                if self.p.window > 0 { (position + 1).saturating_sub(self.p.window) } else { 0 };
            half += 1;
        }
        let key = key + lane() % 4 * 2;
        let mut i = 0;
        while i < C {
            let key = key + (i / 4 * 8 + i % 2) as u32;
            let half = i / 2 % 2;
            if key >= end[half] || key < first[half] {
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

    /// Online softmax, first step: raises the maximum of one of the two rows to its scores'.
    #[inline(always)]
    pub(super) fn raise<const C: usize>(
        &self,
        half: usize,
        s: &[f32; C],
        rows: &mut RowPair,
    ) -> Raised {
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
        top = max(top, shfl_xor_f32(top, 2));
        let old = rows.max[half];
        let new = max(old, top * self.factor);
        rows.max[half] = new;
        let maximum = if new == f32::NEG_INFINITY { 0.0 } else { new };
        Raised { maximum, factor: exp2(old - maximum) }
    }

    /// Second step: the scores of one of the two rows become weights.
    #[inline(always)]
    pub(super) fn weigh<const C: usize>(
        &self,
        half: usize,
        s: &mut [f32; C],
        rows: &mut RowPair,
        raised: Raised,
    ) {
        let mut sums = [0.0; 2];
        let mut i = 0;
        while i < C / 4 {
            let mut j = 0;
            while j < 2 {
                let at = 4 * i + 2 * half + j;
                s[at] = exp2(fma(s[at], self.factor, -raised.maximum));
                sums[j] = if i == 0 { s[at] } else { sums[j] + s[at] };
                j += 1;
            }
            i += 1;
        }
        rows.sum[half] = fma(rows.sum[half], raised.factor, sums[0] + sums[1]);
    }
}

/// What raising a row's maximum gives.
#[derive(Clone, Copy)]
pub(super) struct Raised {
    /// The new maximum; 0 where nothing was seen.
    maximum: f32,
    /// Factor for what was accumulated.
    pub(super) factor: f32,
}
