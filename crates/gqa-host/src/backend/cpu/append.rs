//! The KV cache: past rows are kept or copied, new rows are appended, K is normalised and rotated.

use super::element::Element;
use super::executor::{Executor, each, threads_for};
use super::norm::{Norm, round};
use super::quantized::{Codes, encode_by_itself};
use super::rope::Rope;
use super::sequence::Sequence;
use gqa_plan::{CacheBinding, Problem, Quantization, RowLayout};

/// The new rows of a cache, with QK-norm and RoPE of K.
pub(super) struct Append<'a, T> {
    pub(super) problem: &'a Problem,
    pub(super) sequences: &'a [Sequence],
    /// The tensor with the new rows.
    pub(super) new: &'a [T],
    /// Their layout in that tensor.
    pub(super) layout: RowLayout,
    /// Elements of one head.
    pub(super) size: usize,
    /// QK-norm of K.
    pub(super) norm: Option<Norm<'a, T>>,
    /// RoPE of K.
    pub(super) rope: Option<&'a Rope>,
    pub(super) executor: &'a dyn Executor,
}

impl<T: Element> Append<'_, T> {
    /// Writes a present tensor. `past` is empty if there is none, or if past and present share
    /// memory.
    pub(super) fn run(&self, past: &[T], present: &mut [T]) {
        self.update(past, present, self.size, T::ZERO, |place, buffer, row| {
            if self.norm.is_none() && self.rope.is_none() {
                row.copy_from_slice(self.new_row(place));
            } else {
                self.turn(place, buffer);
                T::narrow(buffer, row);
            }
        });
    }

    /// The same for a quantized cache.
    pub(super) fn run_quantized(&self, codes: Codes<'_>, past: &[u8], present: &mut [u8]) {
        self.update(past, present, codes.bytes(self.size), 0, |[b, head, s], buffer, row| {
            self.turn([b, head, s], buffer);
            round::<T>(buffer);
            codes.encode(head, buffer, row);
        });
    }

    /// Writes a present tensor with per-token scales. Past and present share memory, or there is no
    /// past.
    pub(super) fn run_with_scales(
        &self,
        how: Quantization,
        present: &mut [u8],
        scales: &mut [f32],
    ) {
        let (p, size) = (self.problem, self.size / how.codes_per_element());
        if present.is_empty() {
            return;
        }
        let work = p.batch * p.kv_heads * p.new_len * self.size * size_of::<T>();
        let scales = scales.chunks_exact_mut(p.capacity);
        let heads = present.chunks_exact_mut(p.capacity * size).zip(scales).enumerate();
        each(threads_for(work, self.executor), heads, |(i, (present, scales))| {
            let sequence = self.sequences[i / p.kv_heads];
            let rows = sequence.kept(p)..sequence.total;
            let mut buffer = vec![0.0; self.size];
            for (s, row) in rows.enumerate() {
                self.turn([i / p.kv_heads, i % p.kv_heads, s], &mut buffer);
                round::<T>(&mut buffer);
                let to = &mut present[row * size..][..size];
                scales[row] = encode_by_itself(how.format, &buffer, to);
            }
        });
    }

    /// Writes a present tensor with rows of `size` elements: `new` writes the new row of a batch
    /// entry, a KV head and a row index, and gets a buffer for its values.
    fn update<C: Copy + Send + Sync>(
        &self,
        past: &[C],
        present: &mut [C],
        size: usize,
        zero: C,
        new: impl Fn([usize; 3], &mut [f32], &mut [C]) + Sync,
    ) {
        let p = self.problem;
        if present.is_empty() {
            return;
        }
        let copied = if p.cache == CacheBinding::Separate { p.capacity } else { p.new_len };
        let work = p.batch * p.kv_heads * copied * self.size * size_of::<T>();
        let heads = present.chunks_exact_mut(p.capacity * size).enumerate();
        each(threads_for(work, self.executor), heads, |(i, present)| {
            let sequence = self.sequences[i / p.kv_heads];
            let kept = sequence.kept(p);
            if p.cache == CacheBinding::Separate {
                let past = &past[i * p.past_capacity * size..];
                present[..kept * size].copy_from_slice(&past[..kept * size]);
                present[sequence.total * size..].fill(zero);
            }
            let rows = present[kept * size..sequence.total * size].chunks_exact_mut(size);
            let mut buffer = vec![0.0; self.size];
            let place = |s| [i / p.kv_heads, i % p.kv_heads, s];
            rows.enumerate().for_each(|(s, row)| new(place(s), &mut buffer, row));
        });
    }

    fn new_row(&self, [b, head, s]: [usize; 3]) -> &[T] {
        &self.new[self.layout.at(b, head, s)..][..self.size]
    }

    /// A new row, normalised and rotated.
    fn turn(&self, [b, head, s]: [usize; 3], row: &mut [f32]) {
        T::widen(self.new_row([b, head, s]), row);
        if let Some(norm) = self.norm {
            norm.normalise(row);
        }
        if let Some(rope) = self.rope {
            rope.rotate(b, s, row);
        }
    }
}
