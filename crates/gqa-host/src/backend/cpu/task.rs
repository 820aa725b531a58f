//! Attention of one KV head's query rows: from keys to outputs.

use super::element::{Element, elements};
use super::instructions::Instructions;
use super::norm::{Norm, round};
use super::paged::Blocks;
use super::quantized::Codes;
use super::rope::Rope;
use super::rows::{OutputRow, OutputRows, QueryRows};
use super::sequence::Sequence;
use gqa_cpu::{KEYS, PADDED_TO, Rows, Shown, Softmax, Starts, StoredRows, StoredTile, Tile, span};
use gqa_plan::{Problem, QkOutput, RowLayout, Sink};
use gqa_tensor::{Result, TensorView};
use std::iter;
use std::ops::Range;

/// The keys of a task with at most this many rows are split into parts of [`PART_KEYS`].
const FEW_ROWS: usize = 32;

/// Keys of a part; a multiple of [`KEYS`].
const PART_KEYS: usize = 4 * KEYS;

/// The tensors that attention reads.
pub(super) struct Call<'a, T> {
    pub(super) problem: &'a Problem,
    pub(super) sequences: &'a [Sequence],
    pub(super) query: &'a [T],
    /// QK-norm of queries.
    pub(super) norm: Option<Norm<'a, T>>,
    pub(super) rope: Option<&'a Rope>,
    /// present_key, or key where the cache is external
    pub(super) keys: Cached<'a, T>,
    /// Likewise
    pub(super) values: Cached<'a, T>,
    pub(super) bias: Option<Bias<'a, T>>,
    /// tree_mask, or nothing
    pub(super) tree: &'a [i64],
    pub(super) head_sink: Option<&'a [T]>,
}

/// Keys or values.
#[derive(Clone, Copy)]
pub(super) enum Cached<'a, T> {
    /// Of the element type.
    Numbers(&'a [T]),
    /// Quantized.
    Codes(Codes<'a>, &'a [u8]),
    /// Of the element type, paged.
    Blocks(Blocks<'a>, &'a [T]),
    /// Quantized and paged.
    BlocksOfCodes(Blocks<'a>, Codes<'a>, &'a [u8]),
}

/// attention_bias or attn_mask.
#[derive(Clone, Copy)]
pub(super) enum Bias<'a, T> {
    /// A bias, which is added to scores.
    Numbers(&'a [T]),
    /// A mask, true for visible keys.
    Booleans(&'a [bool]),
}

impl<'a, T: Element> Bias<'a, T> {
    /// The tensor's elements.
    pub(super) fn of(tensor: TensorView<'a>) -> Result<Self> {
        match tensor {
            TensorView::Bool(mask) => Ok(Self::Booleans(mask)),
            numbers => elements("attention_bias", numbers).map(Self::Numbers),
        }
    }

    /// Adds the bias from element `start` on. Where a mask is false or a bias is -inf, the score
    /// becomes -inf, even if it was NaN.
    fn add(self, start: usize, scores: &mut [f32]) {
        let mut line = [0.0; KEYS];
        let line = &mut line[..scores.len()];
        match self {
            Self::Numbers(bias) => T::widen(&bias[start..][..line.len()], line),
            Self::Booleans(mask) => {
                let mask = &mask[start..][..line.len()];
                line.iter_mut().zip(mask).for_each(|(x, seen)| {
                    *x = if *seen { 0.0 } else { f32::NEG_INFINITY };
                });
            }
        }
        for (score, &bias) in scores.iter_mut().zip(&*line) {
            *score = if bias == f32::NEG_INFINITY { bias } else { *score + bias };
        }
    }
}

/// The results of a task's rows for a part of the keys.
#[derive(Debug, Default)]
pub(super) struct Partial {
    /// The softmax state of each row.
    softmax: Vec<Softmax>,
    /// (rows, padded size of a value): normalised outputs.
    output: Vec<f32>,
}

/// Query rows of one KV head of a sequence.
pub(super) struct Task<'a, T> {
    pub(super) call: &'a Call<'a, T>,
    /// The sequence.
    pub(super) b: usize,
    pub(super) rows: QueryRows,
}

impl<T: Element> Task<'_, T> {
    /// The keys that at least one row sees.
    fn span(&self) -> Range<usize> {
        let visible: Vec<_> = (0..self.rows.count).map(|row| self.visible(row)).collect();
        span(&visible)
    }

    /// The visible keys, split into at least one part. With many rows all keys count as visible,
    /// because finding the range would take too long.
    pub(super) fn parts(&self) -> Vec<Range<usize>> {
        if self.rows.count > FEW_ROWS {
            return iter::once(0..self.keys()).collect();
        }
        let (span, length) = (self.span(), PART_KEYS);
        if span.is_empty() {
            return vec![span];
        }
        let parts = (span.start / length..span.end.div_ceil(length))
            .map(|part| part * length..(part + 1) * length);
        parts.map(|keys| keys.start.max(span.start)..keys.end.min(span.end)).collect()
    }

    /// Computes the rows' results for a part of the keys.
    pub(super) fn attend(&self, instructions: Instructions, keys: Range<usize>) -> Partial {
        let mut partial = Partial::default();
        gqa_cpu::attend(instructions.0, self, keys, &mut |_, softmax, output| {
            partial.softmax.push(softmax);
            partial.output.extend_from_slice(output);
        });
        partial
    }

    /// Joins all parts and writes the rows.
    pub(super) fn join<O: Element>(
        &self,
        instructions: Instructions,
        parts: &[Partial],
        mut rows: OutputRows<'_, T, O>,
    ) {
        let mut line = vec![0.0; self.call.problem.v_head_size];
        let size = self.sizes()[1];
        let finish = |row| {
            let parts = parts.iter();
            let of_row = parts.map(|part| (part.softmax[row], &part.output[row * size..][..size]));
            self.finish(row, of_row, &mut line, rows.row(row))
        };
        let softmax: Vec<Softmax> = (0..self.rows.count).map(finish).collect();
        self.write_scores(instructions, &softmax, rows);
    }

    /// Computes and writes the rows, with all keys in one part.
    pub(super) fn run<O: Element>(
        &self,
        instructions: Instructions,
        keys: Range<usize>,
        mut rows: OutputRows<'_, T, O>,
    ) {
        let mut line = vec![0.0; self.call.problem.v_head_size];
        let mut softmax = Vec::with_capacity(self.rows.count);
        gqa_cpu::attend(instructions.0, self, keys, &mut |row, state, output| {
            let part = iter::once((state, output));
            softmax.push(self.finish(row, part, &mut line, rows.row(row)));
        });
        self.write_scores(instructions, &softmax, rows);
    }

    /// Writes the rows of output_qk.
    fn write_scores<O>(
        &self,
        instructions: Instructions,
        softmax: &[Softmax],
        mut rows: OutputRows<'_, T, O>,
    ) {
        let p = self.call.problem;
        if p.output_qk == QkOutput::None {
            return;
        }
        let (shown, hidden, keys) = match p.output_qk {
            QkOutput::Biased => (Shown::Biased, f32::NEG_INFINITY, self.span()),
            QkOutput::Scaled => (Shown::Scaled, 0.0, 0..p.total_len),
            QkOutput::Capped => (Shown::Capped, 0.0, 0..p.total_len),
            QkOutput::AfterSoftmax => (Shown::Weights, 0.0, self.span()),
            QkOutput::BeforeSoftmax | QkOutput::None => (Shown::Biased, 0.0, self.span()),
        };
        let mut fill = [T::ZERO];
        T::narrow(&[hidden], &mut fill);
        for row in 0..self.rows.count {
            if let Some(scores) = rows.row(row).scores {
                scores.fill(fill[0]);
            }
        }
        let mut write = |row: usize, first: usize, line: &[f32]| {
            if let Some(scores) = rows.row(row).scores {
                T::narrow(line, &mut scores[first..][..line.len()]);
            }
        };
        gqa_cpu::scores(instructions.0, self, keys, shown, softmax, &mut write);
    }

    /// Merges the parts of a row and writes its output. `line` is scratch memory.
    fn finish<'p, O: Element>(
        &self,
        row: usize,
        parts: impl Iterator<Item = (Softmax, &'p [f32])> + Clone,
        line: &mut [f32],
        to: OutputRow<'_, T, O>,
    ) -> Softmax {
        let sink = self.sink(row).filter(|_| !self.visible(row).is_empty());
        let states = || parts.clone().map(|(state, _)| state);
        let max = states().map(|state| state.max).chain(sink).fold(f32::MIN, f32::max);
        let weight = |state: Softmax| state.sum * (state.max - max).exp();
        let sum = states().map(weight).sum::<f32>() + sink.map_or(0.0, |sink| (sink - max).exp());
        let mut all = parts.clone();
        match (all.next(), all.next()) {
            // It has all the weight.
            (Some((state, values)), None) if weight(state) == sum => {
                O::narrow(&values[..line.len()], to.output);
            }
            _ => {
                line.fill(0.0);
                for (state, values) in parts.filter(|_| sum != 0.0) {
                    let share = weight(state) / sum;
                    line.iter_mut().zip(values).for_each(|(to, value)| *to += share * value);
                }
                O::narrow(line, to.output);
            }
        }
        if let Some(lse) = to.lse {
            *lse = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() };
        }
        Softmax { max, sum }
    }

    /// Masks the scores of the keys from `first` on that tree_mask hides.
    fn hide_new(&self, row: usize, first: usize, scores: &mut [f32]) {
        let (p, sequence) = (self.call.problem, self.call.sequences[self.b]);
        let [entry, start] = sequence.first;
        let word = self.call.tree[entry * p.q_len + start + self.rows.place(row).0];
        for (score, key) in scores.iter_mut().zip(first as i64..) {
            let new = key - sequence.position;
            if new >= 0 && word.wrapping_shr(new as u32) & 1 == 0 {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    /// The block table of a call that may have missing blocks.
    fn gaps(&self) -> Option<Blocks<'_>> {
        match self.call.keys {
            Cached::Blocks(blocks, _) | Cached::BlocksOfCodes(blocks, ..) => {
                blocks.has_gaps.then_some(blocks)
            }
            Cached::Numbers(_) | Cached::Codes(..) => None,
        }
    }

    fn sink(&self, row: usize) -> Option<f32> {
        match (self.call.problem.sink, self.call.head_sink) {
            (Sink::Zero, _) => Some(0.0),
            (Sink::PerHead, Some(sinks)) => {
                let (_, head) = self.rows.place(row);
                let mut sink = [0.0];
                T::widen(&sinks[head..=head], &mut sink);
                Some(sink[0])
            }
            _ => None,
        }
    }
}

impl<T: Element> Rows for Task<'_, T> {
    fn count(&self) -> usize {
        self.rows.count
    }

    fn keys(&self) -> usize {
        self.call.problem.total_len
    }

    fn scale(&self) -> f32 {
        self.call.problem.scale as f32
    }

    fn softcap(&self) -> f32 {
        self.call.problem.softcap_in_f32()
    }

    fn has_bias(&self) -> bool {
        self.call.problem.has_mask() || self.gaps().is_some()
    }

    fn sizes(&self) -> [usize; 2] {
        let p = self.call.problem;
        [p.head_size, p.v_head_size].map(|size| size.next_multiple_of(PADDED_TO))
    }

    fn visible(&self, row: usize) -> Range<usize> {
        self.call.sequences[self.b].visible(self.call.problem, self.rows.place(row).0)
    }

    fn query(&self, row: usize, to: &mut [f32]) {
        let (s, head) = self.rows.place(row);
        let to = &mut to[..self.call.problem.head_size];
        let [b, first] = self.call.sequences[self.b].first;
        let start = self.call.problem.query_layout().at(b, head, first + s);
        T::widen(&self.call.query[start..][..to.len()], to);
        if let Some(norm) = self.call.norm {
            norm.normalise(to);
        }
        if let Some(rope) = self.call.rope {
            rope.rotate(self.b, s, to);
            round::<T>(to);
        }
    }

    fn tile<'t>(
        &'t self,
        keys: Range<usize>,
        [key_buffer, value_buffer]: [&'t mut [f32]; 2],
    ) -> Tile<'t> {
        let p = self.call.problem;
        let rows = CachedRows { b: self.b, head: self.rows.head, rows: keys.clone() };
        let Call { keys: cached_keys, values, .. } = self.call;
        Tile {
            keys: cached_keys.in_f32(&rows, p.keys_read(), p.head_size, key_buffer),
            values: values.in_f32(&rows, p.values_read(), p.v_head_size, value_buffer),
        }
    }

    fn stored(&self, keys: &Range<usize>, lanes: usize) -> Option<StoredTile<'_>> {
        let (p, head) = (self.call.problem, self.rows.head);
        let sizes = [p.head_size, p.v_head_size];
        if lanes < 2 || sizes.iter().any(|size| size % PADDED_TO != 0) {
            return None;
        }
        let side_by_side = |layout: RowLayout| Starts::Strided {
            first: layout.at(self.b, head, keys.start),
            stride: layout.row,
            count: keys.len(),
        };
        let dense = || [p.keys_read(), p.values_read()].map(side_by_side);
        if self.gaps().is_some() {
            return None;
        }
        let in_blocks = |blocks: Blocks<'_>, size, numbers| {
            let starts = keys.clone().filter_map(|row| blocks.start([self.b, head, row], size));
            Starts::Each(starts.map(|start| start * numbers).collect())
        };
        match (self.call.keys, self.call.values) {
            (Cached::Numbers(k), Cached::Numbers(v)) => {
                let [of_keys, of_values] = dense();
                let keys = StoredRows::new(k, of_keys, sizes[0]);
                Some(T::stored([keys, StoredRows::new(v, of_values, sizes[1])]))
            }
            (Cached::Codes(codes, k), Cached::Codes(_, v)) => {
                Some(codes.stored([k, v], dense(), sizes))
            }
            (Cached::Blocks(blocks, k), Cached::Blocks(_, v)) => {
                let [k_width, v_width] = [p.keys_read().row, p.values_read().row];
                let rows = |elements, width, size| {
                    StoredRows::new(elements, in_blocks(blocks, width, 1), size)
                };
                Some(T::stored([rows(k, k_width, sizes[0]), rows(v, v_width, sizes[1])]))
            }
            (Cached::BlocksOfCodes(blocks, codes, k), Cached::BlocksOfCodes(_, _, v)) => {
                let starts = || in_blocks(blocks, codes.bytes(sizes[0]), codes.values_per_byte());
                Some(codes.stored([k, v], [starts(), starts()], sizes))
            }
            _ => None,
        }
    }

    fn scales(&self, lanes: usize) -> Option<[&[f32]; 2]> {
        self.stored(&(0..0), lanes)?;
        let codes_of = |cached| match cached {
            Cached::Codes(codes, _) | Cached::BlocksOfCodes(_, codes, _) => Some(codes),
            _ => None,
        };
        let (p, keys, values) =
            (self.call.problem, codes_of(self.call.keys)?, codes_of(self.call.values)?);
        Some([
            keys.scales_of(self.rows.head, p.head_size)?,
            values.scales_of(self.rows.head, p.v_head_size)?,
        ])
    }

    fn row_scales(
        &self,
        keys: &Range<usize>,
        lanes: usize,
        [of_keys, of_values]: [&mut [f32]; 2],
    ) -> bool {
        let rows = CachedRows { b: self.b, head: self.rows.head, rows: keys.clone() };
        let p = self.call.problem;
        p.has_row_scales()
            && self.stored(&(0..0), lanes).is_some()
            && self.call.keys.scales_of_rows(&rows, p, of_keys)
            && self.call.values.scales_of_rows(&rows, p, of_values)
    }

    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]) {
        let p = self.call.problem;
        if p.tree_mask {
            self.hide_new(row, first, scores);
        }
        if let Some(blocks) = self.gaps() {
            for (score, key) in scores.iter_mut().zip(first..) {
                if blocks.place(self.b, key).is_none() {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        let (Some(bias), Some(layout)) = (self.call.bias, p.bias_layout()) else { return };
        let (s, head) = self.rows.place(row);
        bias.add(layout.at(self.b, head, s) + first, scores);
    }
}

/// Pairs of a cache row and its destination; a row in no block becomes zeros.
fn or_zeros<R>((row, to): (Option<R>, &mut [f32])) -> Option<(R, &mut [f32])> {
    match row {
        Some(row) => Some((row, to)),
        None => {
            to.fill(0.0);
            None
        }
    }
}

/// Consecutive rows of a KV head.
struct CachedRows {
    /// The sequence.
    b: usize,
    head: usize,
    rows: Range<usize>,
}

impl<'a, T: Element> Cached<'a, T> {
    /// Rows of `size` elements as `f32`, each padded with zeros: the elements themselves, or
    /// converted into `buffer`.
    fn in_f32(
        self,
        of: &CachedRows,
        layout: RowLayout,
        size: usize,
        buffer: &'a mut [f32],
    ) -> &'a [f32] {
        let padded = size.next_multiple_of(PADDED_TO);
        let start = layout.at(of.b, of.head, of.rows.start);
        let buffer_size = of.rows.len() * padded;
        if let (Self::Numbers(elements), true) = (self, size == padded && layout.row == size) {
            return T::in_f32(&elements[start..][..buffer_size], buffer);
        }
        if size < padded {
            buffer.fill(0.0);
        }
        let places = || of.rows.clone().map(|row| [of.b, of.head, row]);
        let to = buffer[..buffer_size].chunks_exact_mut(padded).map(|row| &mut row[..size]);
        match self {
            Self::Numbers(elements) => {
                let starts = (0..of.rows.len()).map(|row| start + row * layout.row);
                T::widen_rows(starts.map(|start| &elements[start..][..size]).zip(to));
            }
            Self::Blocks(blocks, elements) => {
                let rows = places().map(|place| blocks.row(elements, place, [layout.row, size]));
                T::widen_rows(rows.zip(to).filter_map(or_zeros));
            }
            Self::Codes(codes, bytes) => {
                // A head's rows lie side by side; values may be the leading part of them.
                let row = codes.bytes(layout.row);
                let rows = bytes[codes.bytes(start)..].chunks_exact(row);
                let rows = rows.map(|row| &row[..codes.bytes(size)]);
                let rows = (start / layout.row..).zip(rows).zip(to);
                codes.decode(of.head, size, rows.map(|((number, row), to)| (number, row, to)));
            }
            Self::BlocksOfCodes(blocks, codes, bytes) => {
                let row = |place| {
                    let row =
                        blocks.row(bytes, place, [layout.row, size].map(|n| codes.bytes(n)))?;
                    Some((blocks.start(place, 1)?, row))
                };
                let rows = places().map(row).zip(to).filter_map(or_zeros);
                codes.decode(of.head, size, rows.map(|((number, row), to)| (number, row, to)));
            }
        }
        &buffer[..buffer_size]
    }

    /// The per-token scales of rows. Returns whether the cache has them.
    fn scales_of_rows(self, of: &CachedRows, p: &Problem, to: &mut [f32]) -> bool {
        match self {
            Self::Codes(codes, _) => {
                let first = (of.b * p.kv_heads + of.head) * p.capacity;
                codes.scales_of_rows(of.rows.clone().map(|row| first + row), to)
            }
            Self::BlocksOfCodes(blocks, codes, _) => {
                let number = |row| blocks.start([of.b, of.head, row], 1);
                codes.scales_of_rows(of.rows.clone().filter_map(number), to)
            }
            Self::Numbers(_) | Self::Blocks(..) => false,
        }
    }
}
