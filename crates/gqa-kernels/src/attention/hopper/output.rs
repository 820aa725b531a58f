//! The way out of a work tile: normalisation, log-sum-exp, 16-byte stores.

use super::producer::lse_index;
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::{AttentionParams, sink};
use crate::simt::*;

/// A finished work tile, as a thread with the rows `row` and `row + 8` of it sees it.
pub(super) struct Output<'a> {
    pub(super) p: &'a AttentionParams,
    /// Batch entry, head and first row.
    pub(super) place: [u32; 3],
    pub(super) seqlen: Seqlen,
    pub(super) row: u32,
}

impl Output<'_> {
    /// Joins the sink, writes log-sum-exp, and returns what each row must be multiplied by.
    #[inline(always)]
    pub(super) fn normalise<T: MmaElement>(
        &self,
        rows: [SoftmaxState; 2],
        head_sink: Global<T>,
        lse: Global<f32>,
    ) -> [f32; 2] {
        let [batch, head, first] = self.place;
        let mut factors = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            let mut state = rows[half];
            state.sum += shfl_xor_f32(state.sum, 1);
            state.sum += shfl_xor_f32(state.sum, 2);
            factors[half] = 1.0;
            if self.p.sink != sink::NONE {
                let logit = if self.p.sink == sink::PER_HEAD {
                    head_sink.load(head as usize).to_f32()
                } else {
                    0.0
                };
                factors[half] = state.join_sink(logit * LOG2_E);
            }
            factors[half] *= state.normaliser();
            let s = first + self.row + 8 * half as u32;
            if !lse.is_null() && s < self.p.q_len && lane() % 4 == 0 {
                let value =
                    if self.seqlen.is_token(s) { state.log_sum_exp() } else { f32::NEG_INFINITY };
                lse.store(lse_index(batch, head, s, self.p), value);
            }
            half += 1;
        }
        factors
    }

    /// Writes the rows that there are; those that are no tokens as zeros.
    #[inline(always)]
    pub(super) fn store<T: MmaElement, const O: usize>(&self, o: &[f32; O], out: Global<T>) {
        let [batch, head, first] = self.place;
        // Opaque, or what follows from it would be hoisted out of the loop over work and spilled.
        let lane = opaque(lane());
        let column = lane % 4 * 8;
        let mut half = 0;
        while half < 2 {
            let s = first + self.row + 8 * half as u32;
            let token = self.seqlen.is_token(s);
            let at = self.p.out.at(batch, head, s) + column as usize;
            let mut group = 0;
            while group < O.div_ceil(16) {
                let mut words = [0; 4];
                let mut i = 0;
                while i < 4 {
                    let pair = 16 * group + 4 * i + 2 * half;
                    if pair < O {
                        words[i] = T::pack(o[pair], o[pair + 1]);
                    }
                    i += 1;
                }
                let words = transpose(words, lane);
                let words = if token { words } else { [0; 4] };
                let ahead = group as u32 * 32;
                if s < self.p.q_len && column + ahead < self.p.head_size {
                    out.store_vec(at + ahead as usize, words);
                }
                group += 1;
            }
            half += 1;
        }
    }
}

/// Word `i` of lane `t` among four neighbours becomes word `t` of lane `i`.
#[inline(always)]
fn transpose([a, b, c, d]: [u32; 4], lane: u32) -> [u32; 4] {
    let [a, b] = exchange([a, b], lane, 1);
    let [c, d] = exchange([c, d], lane, 1);
    let [a, c] = exchange([a, c], lane, 2);
    let [b, d] = exchange([b, d], lane, 2);
    [a, b, c, d]
}

/// The upper word of the lower lane and the lower word of the upper lane change places; the lanes are `distance` apart.
#[inline(always)]
fn exchange([low, high]: [u32; 2], lane: u32, distance: u32) -> [u32; 2] {
    let upper = lane & distance != 0;
    let got = shfl_xor_u32(if upper { low } else { high }, distance);
    if upper { [got, high] } else { [low, got] }
}
