//! Scratch memory of a task, kept by its thread for the next one. The allocator would return memory
//! of this size to the system after each task, and the system would clear every page again.

use bytemuck::{Pod, Zeroable};
use std::cell::Cell;
use std::mem;

/// The size and alignment of the widest vector.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; Line::NUMBERS]);

impl Line {
    const NUMBERS: usize = 16;
}

thread_local! {
    static KEPT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// The thread's memory, until it is dropped.
pub(super) struct Scratch(Vec<Line>);

impl Scratch {
    /// What the thread has.
    pub(super) fn new() -> Self {
        Self(KEPT.take())
    }

    /// Slices of these lengths, aligned for vectors. Contents are arbitrary.
    pub(super) fn slices<const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [f32]; N] {
        let lines = |length: usize| length.div_ceil(Line::NUMBERS);
        let all = lengths.into_iter().map(lines).sum();
        self.0.resize(self.0.len().max(all), Line::zeroed());
        let mut rest = &mut self.0[..];
        lengths.map(|length| {
            let (own, others) = mem::take(&mut rest).split_at_mut(lines(length));
            rest = others;
            &mut bytemuck::cast_slice_mut(own)[..length]
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        KEPT.set(mem::take(&mut self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_apart_and_begin_where_vectors_may() {
        for lengths in [[3, 0, 40], [1000, 17, 16], [1, 1, 1]] {
            let mut scratch = Scratch::new();
            let slices = scratch.slices(lengths);
            for (number, slice) in slices.into_iter().enumerate() {
                assert_eq!(slice.len(), lengths[number]);
                assert_eq!(slice.as_ptr().align_offset(align_of::<Line>()), 0);
                slice.fill(number as f32);
            }
            let kept: &[f32] = bytemuck::cast_slice(&scratch.0);
            for (number, length) in lengths.into_iter().enumerate() {
                let same = kept.iter().filter(|x| **x == number as f32).count();
                assert!(same >= length, "{same} of {length}");
            }
        }
        assert!(!KEPT.take().is_empty(), "the thread keeps its memory");
    }
}
