//! The cache: past rows kept or copied, new rows appended, K normalised and rotated.

use super::element::Element;
use super::norm::Norm;
use super::rope::{MAX_HEAD_SIZE, Rope};
use super::sequence::Sequence;
use crate::{CacheBinding, Problem, RowLayout};
use rayon::prelude::*;

/// New rows for a cache, and what comes before them.
pub(super) struct Append<'a, T> {
    pub(super) problem: &'a Problem,
    pub(super) sequences: &'a [Sequence],
    /// past_key or past_value; empty where there is none or where it is shared.
    pub(super) past: &'a [T],
    /// The tensor with the new rows.
    pub(super) new: &'a [T],
    /// Where in it they are.
    pub(super) layout: RowLayout,
    /// Elements of one head.
    pub(super) size: usize,
    /// For K, where it is normalised.
    pub(super) norm: Option<Norm<'a, T>>,
    /// For K, where it rotates.
    pub(super) rope: Option<&'a Rope<'a, T>>,
}

impl<T: Element> Append<'_, T> {
    /// Writes a present tensor.
    pub(super) fn run(&self, present: &mut [T]) {
        let p = self.problem;
        present
            .par_chunks_exact_mut(p.capacity * self.size)
            .enumerate()
            .for_each(|(head, present)| self.head(head / p.kv_heads, head % p.kv_heads, present));
    }

    fn head(&self, b: usize, head: usize, present: &mut [T]) {
        let (p, size, sequence) = (self.problem, self.size, self.sequences[b]);
        let kept = sequence.kept(p);
        if p.cache == CacheBinding::Separate {
            let past = &self.past[(b * p.kv_heads + head) * p.past_capacity * size..];
            present[..kept * size].copy_from_slice(&past[..kept * size]);
            present[sequence.total * size..].fill(T::ZERO);
        }
        let rows = present[kept * size..sequence.total * size].chunks_exact_mut(size);
        for (s, row) in rows.enumerate() {
            let new = &self.new[self.layout.at(b, head, s)..][..size];
            if self.norm.is_none() && self.rope.is_none() {
                row.copy_from_slice(new);
                continue;
            }
            let mut buffer = [0.0; MAX_HEAD_SIZE];
            let buffer = &mut buffer[..size];
            T::widen(new, buffer);
            if let Some(norm) = self.norm {
                norm.normalise(buffer);
            }
            if let Some(rope) = self.rope {
                rope.rotate(b, s, sequence, buffer);
            }
            T::narrow(buffer, row);
        }
    }
}
