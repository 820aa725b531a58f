//! One KV head's query rows, from their keys to their outputs.

use super::attend::{Attend, Partial, Scores, Softmax};
use super::element::Element;
use super::panel::{KEYS, Rows, Tile, span};
use super::rope::{MAX_HEAD_SIZE, Rope};
use super::rows::OutputRow;
use super::sequence::Sequence;
use crate::{Problem, QkOutput, Sink};
use pulp::Arch;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of a task: their keys and values are read, and converted, once.
pub(super) const TASK_ROWS: usize = 256;

/// Where a task has at most this many rows, its keys are cut into parts of [`PART_KEYS`].
const FEW_ROWS: usize = 32;

/// Keys of a part; a multiple of [`KEYS`].
const PART_KEYS: usize = 16 * KEYS;

/// What attention reads.
pub(super) struct Call<'a, T> {
    pub(super) problem: &'a Problem,
    pub(super) sequences: &'a [Sequence],
    pub(super) query: &'a [T],
    pub(super) rope: Option<&'a Rope<'a, T>>,
    /// present_key
    pub(super) keys: &'a [T],
    /// present_value
    pub(super) values: &'a [T],
    pub(super) bias: Option<&'a [T]>,
    pub(super) head_sink: Option<&'a [T]>,
}

/// Query rows of one KV head, in the order of [`output_rows`](super::rows::output_rows), from `first` on.
pub(super) struct Task<'a, T> {
    pub(super) call: &'a Call<'a, T>,
    pub(super) b: usize,
    /// The KV head.
    pub(super) head: usize,
    pub(super) first: usize,
    pub(super) count: usize,
}

impl<T: Element> Task<'_, T> {
    /// Token and query head of a row.
    fn place(&self, row: usize) -> (usize, usize) {
        let (row, group) = (self.first + row, self.call.problem.group());
        (row / group, self.head * group + row % group)
    }

    /// Computes the rows.
    pub(super) fn run(&self, arch: Arch, rows: &mut [OutputRow<'_, T>]) {
        let visible: Vec<_> = (0..self.count).map(|row| self.visible(row)).collect();
        let span = span(&visible);
        let length = if self.count <= FEW_ROWS { PART_KEYS } else { usize::MAX };
        let parts: Vec<Partial> = (span.start / length..span.end.div_ceil(length))
            .into_par_iter()
            .map(|part| part * length..part.saturating_add(1).saturating_mul(length))
            .map(|keys| keys.start.max(span.start)..keys.end.min(span.end))
            .map(|keys| arch.dispatch(Attend { rows: self, keys }))
            .collect();
        let softmax: Vec<Softmax> =
            rows.iter_mut().enumerate().map(|(row, to)| self.finish(row, &parts, to)).collect();
        if self.call.problem.output_qk != QkOutput::None {
            rows.iter_mut().flat_map(|row| &mut row.scores).for_each(|scores| scores.fill(T::ZERO));
            let mut write = |row: usize, first: usize, line: &[f32]| {
                if let Some(scores) = &mut rows[row].scores {
                    T::narrow(line, &mut scores[first..][..line.len()]);
                }
            };
            arch.dispatch(Scores { rows: self, keys: span, softmax: &softmax, write: &mut write });
        }
    }

    /// Joins the parts of a row and writes its output.
    fn finish(&self, row: usize, parts: &[Partial], to: &mut OutputRow<'_, T>) -> Softmax {
        let sink = if self.visible(row).is_empty() { None } else { self.sink(row) };
        let states = || parts.iter().map(|part| part.softmax[row]);
        let max = states().map(|state| state.max).chain(sink).fold(f32::MIN, f32::max);
        let weight = |state: Softmax| (state.max - max).exp();
        let sum = states().map(|state| state.sum * weight(state)).sum::<f32>()
            + sink.map_or(0.0, |sink| (sink - max).exp());
        let mut output = [0.0; MAX_HEAD_SIZE];
        let output = &mut output[..self.call.problem.head_size];
        if sum != 0.0 {
            for part in parts {
                let factor = weight(part.softmax[row]) / sum;
                let values = &part.output[row * output.len()..][..output.len()];
                output.iter_mut().zip(values).for_each(|(to, value)| *to += factor * value);
            }
        }
        T::narrow(output, to.output);
        if let Some(lse) = &mut to.lse {
            **lse = if sum == 0.0 { f32::NEG_INFINITY } else { max + sum.ln() };
        }
        Softmax { max, sum }
    }

    fn sink(&self, row: usize) -> Option<f32> {
        match (self.call.problem.sink, self.call.head_sink) {
            (Sink::Zero, _) => Some(0.0),
            (Sink::PerHead, Some(sinks)) => {
                let (_, head) = self.place(row);
                let mut sink = [0.0];
                T::widen(&sinks[head..=head], &mut sink);
                Some(sink[0])
            }
            _ => None,
        }
    }
}

impl<T: Element> Rows for Task<'_, T> {
    fn problem(&self) -> &Problem {
        self.call.problem
    }

    fn count(&self) -> usize {
        self.count
    }

    fn visible(&self, row: usize) -> Range<usize> {
        self.call.sequences[self.b].visible(self.call.problem, self.place(row).0)
    }

    fn query(&self, row: usize, to: &mut [f32]) {
        let (s, head) = self.place(row);
        let start = self.call.problem.query_layout().at(self.b, head, s);
        T::widen(&self.call.query[start..][..to.len()], to);
        if let Some(rope) = self.call.rope {
            rope.rotate(self.b, s, self.call.sequences[self.b], to);
            let mut rounded = [T::ZERO; MAX_HEAD_SIZE];
            let rounded = &mut rounded[..to.len()];
            T::narrow(to, rounded);
            T::widen(rounded, to);
        }
        to.iter_mut().for_each(|x| *x *= self.call.problem.scale);
    }

    fn tile<'t>(
        &'t self,
        keys: Range<usize>,
        [key_buffer, value_buffer]: &'t mut [Vec<f32>; 2],
    ) -> Tile<'t> {
        let p = self.call.problem;
        let start = (self.b * p.kv_heads + self.head) * p.capacity;
        let elements = (start + keys.start) * p.head_size..(start + keys.end) * p.head_size;
        Tile {
            first: keys.start,
            keys: T::in_f32(&self.call.keys[elements.clone()], key_buffer),
            values: T::in_f32(&self.call.values[elements], value_buffer),
        }
    }

    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]) {
        let p = self.call.problem;
        let (Some(bias), Some(broadcast)) = (self.call.bias, p.bias) else { return };
        let (s, head) = self.place(row);
        let heads = if broadcast.head { 1 } else { p.q_heads };
        let (b, head) =
            (if broadcast.batch { 0 } else { self.b }, if broadcast.head { 0 } else { head });
        let start = ((b * heads + head) * p.q_len + s) * p.total_len + first;
        let mut line = [0.0; KEYS];
        let line = &mut line[..scores.len()];
        T::widen(&bias[start..][..line.len()], line);
        scores.iter_mut().zip(line).for_each(|(score, bias)| *score += *bias);
    }
}
