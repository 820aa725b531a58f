//! The epilogue of a work tile: normalisation, log-sum-exp, 16-byte stores. A split of the keys
//! writes its own result, in f32, for [`combine`](crate::attention::combine).

use super::mask;
use super::packing::{PackedRow, Packing};
use super::shape::Tile;
use super::work::Place;
use crate::attention::out::{self, Quantized};
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::{AttentionParams, sink};
use crate::simt::*;
use crate::tile::quad::{exchange, transpose};

/// Output tensors.
#[derive(Clone, Copy)]
pub(super) struct Destination<T> {
    /// (batch, query head, S, head size); unused with splits of the keys.
    pub(super) out: Global<T>,
    /// Quantized output, written instead of `out`.
    pub(super) quantized: Option<Quantized>,
    /// (split, batch, query head, S, head size); unused without splits of the keys.
    pub(super) partial_out: Global<f32>,
    /// (split, batch, query head, S), or over a paged KV cache (query head, tokens).
    pub(super) lse: Global<f32>,
    /// Columns of a row: the head size of values.
    pub(super) columns: u32,
}

impl<T> Destination<T> {
    /// Output in the element type with `columns` columns, and log-sum-exps unless `lse` is null.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(out: Global<T>, lse: Global<f32>, columns: u32) -> Self {
        Self { out, quantized: None, partial_out: lse, lse, columns }
    }
}

/// Index of query row `s` in (split, batch, query head, S).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn row_index(place: Place, s: u32, p: &AttentionParams) -> usize {
    index_among(p.q_len, place, s, p)
}

/// The same, where each query head has `rows` rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn index_among(rows: u32, place: Place, s: u32, p: &AttentionParams) -> usize {
    let pair = (place.split * p.batch + place.batch) * p.q_heads + place.head;
    pair as usize * rows as usize + s as usize
}

/// A finished work tile, seen by a thread that holds its rows `row` and `row + 8`.
pub(super) struct Output<'a> {
    pub(super) p: &'a AttentionParams,
    pub(super) place: Place,
    pub(super) seqlen: Seqlen,
    /// The sequence's first row in the output.
    pub(super) start: u32,
    /// The sequence's number of rows.
    pub(super) rows: u32,
    /// Rows of a query head in the log-sum-exps.
    pub(super) lse_rows: u32,
    /// Whether rows without a key of their own, too, see all keys.
    pub(super) all_see: bool,
    pub(super) row: u32,
    /// Columns of a row: the head size of values.
    pub(super) columns: u32,
    pub(super) packing: Packing,
}

/// A row of the output.
#[derive(Clone, Copy)]
struct OutputRow {
    /// Token of the sequence.
    s: u32,
    /// Query head.
    head: u32,
    exists: bool,
}

impl Output<'_> {
    /// Row `row` or `row + 8` of the work tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(&self, half: u32) -> OutputRow {
        let Place { head: first_head, row: first, .. } = self.place;
        let PackedRow { token, head, is_empty } = self.packing.find(first, self.row, 8 * half);
        OutputRow { s: token, head: first_head + head, exists: !is_empty && token < self.rows }
    }

    /// Whether the warp has a row that exists.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn has_rows(&self) -> bool {
        any_sync(self.find(0).exists || self.find(1).exists)
    }

    /// Adds the attention sink if there is one and the keys are not split, writes the log-sum-exp,
    /// and returns the factor that normalises each row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn normalise<T: MmaElement, S: Tile>(
        &self,
        rows: [SoftmaxState; 2],
        head_sink: Global<T>,
        lse: Global<f32>,
    ) -> [f32; 2] {
        let mut factors = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            let mut state = rows[half];
            if !S::SUM_COLUMNS {
                state.sum += shfl_xor_f32(state.sum, 1);
                state.sum += shfl_xor_f32(state.sum, 2);
            }
            let OutputRow { s, head, exists } = self.find(half as u32);
            factors[half] = 1.0;
            if !S::SPLITS && self.p.sink != sink::NONE {
                let logit = if self.p.sink == sink::PER_HEAD {
                    head_sink.load(head as usize).to_f32()
                } else {
                    0.0
                };
                factors[half] = state.join_sink(logit * LOG2_E);
            }
            factors[half] *= state.normaliser();
            if !lse.is_null() && exists && lane() % 4 == 0 {
                let value = if self.sees(s) { state.log_sum_exp() } else { f32::NEG_INFINITY };
                // With a mask scores may be folded.
                let value = if S::MASK_STAGES > 0 { mask::unfold(value) } else { value };
                let place = Place { head, ..self.place };
                lse.store(index_among(self.lse_rows, place, self.start + s, self.p), value);
            }
            half += 1;
        }
        factors
    }

    /// Writes the existing rows; padding rows become zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store<T: MmaElement, S: Tile, const O: usize>(
        &self,
        o: &mut [f32; O],
        out: Global<T>,
    ) {
        let store = |at, words| out.store_vec(at, words);
        self.store_rows::<S, O>(o, T::pack, store);
    }

    /// [`store`](Self::store) of quantized output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store_quantized<S: Tile, const O: usize>(&self, o: &mut [f32; O], to: Quantized) {
        self.store_rows::<S, O>(o, out::pair, |at, [a, b, c, d]| {
            to.out.store_vec8(at, [out::join([a, b]), out::join([c, d])]);
        });
    }

    /// Packs pairs of columns, gathers eight neighbouring columns per lane, and stores them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_rows<S: Tile, const O: usize>(
        &self,
        o: &mut [f32; O],
        pack: impl Fn(f32, f32) -> u32,
        store: impl Fn(usize, [u32; 4]),
    ) {
        self.clear_padding(o);
        // opaque(): otherwise derived values are hoisted out of the loop over work tiles and spill.
        let lane = opaque(lane());
        let column = lane % 4 * 8;
        let mut half = 0;
        while half < 2 {
            let OutputRow { s, head, exists } = self.find(half as u32);
            let at = self.p.out.at(self.place.batch, head, self.start + s) + column as usize;
            let mut group = 0;
            while group < S::DV.div_ceil(32) as usize {
                let mut words = [0; 4];
                let mut i = 0;
                while i < 4 {
                    let pair = 16 * group + 4 * i + 2 * half;
                    if pair < S::DV as usize / 2 {
                        words[i] = pack(o[pair], o[pair + 1]);
                    }
                    i += 1;
                }
                let words = transpose(words, lane);
                let ahead = group as u32 * 32;
                if exists && column + ahead < self.columns {
                    store(at + ahead as usize, words);
                }
                group += 1;
            }
            half += 1;
        }
    }

    /// Whether row `s`, which exists, sees keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sees(&self, s: u32) -> bool {
        self.all_see || self.seqlen.is_token(s)
    }

    /// Sets padding rows to zero, whatever they hold.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clear_padding<const O: usize>(&self, o: &mut [f32; O]) {
        let tokens = [0, 1].map(|half| self.sees(self.find(half).s));
        // A vote, so that the assembler sees that a warp's lanes agree.
        if any_sync(!(tokens[0] && tokens[1])) {
            let mut i = 0;
            while i < O {
                if !tokens[i / 2 % 2] {
                    o[i] = 0.0;
                }
                i += 1;
            }
        }
    }

    /// Writes the rows of a split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store_part<const O: usize>(&self, o: &[f32; O], partial_out: Global<f32>) {
        let columns = self.columns;
        self.store_columns(o, columns, partial_out, |half| {
            let s = self.place.row + self.row + 8 * half;
            (s < self.rows).then(|| row_index(self.place, s, self.p) * columns as usize)
        });
    }

    /// Writes the first `columns` columns in f32; row `row` or `row + 8` to where `at` says, if
    /// anywhere.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store_columns<const O: usize>(
        &self,
        o: &[f32; O],
        columns: u32,
        to: Global<f32>,
        at: impl Fn(u32) -> Option<usize>,
    ) {
        // opaque(): as in `store_rows`.
        let lane = opaque(lane());
        let column = lane % 2 * 8 + lane % 4 / 2 * 4;
        let mut half = 0;
        while half < 2 {
            let at = at(half as u32);
            let mut group = 0;
            while group < O / 8 {
                let pair = 8 * group + 2 * half;
                let bits = |i: usize| o[pair + i].to_bits();
                let [a, c] = exchange([bits(0), bits(4)], lane, 1);
                let [b, d] = exchange([bits(1), bits(5)], lane, 1);
                let column = column + group as u32 * 16;
                if let Some(at) = at
                    && column < columns
                {
                    to.store_vec(at + column as usize, [a, b, c, d]);
                }
                group += 1;
            }
            half += 1;
        }
    }
}
