//! Attention over a range of keys: the arguments, and the softmax state of each row.

use super::panel::Rows;
use std::ops::Range;

/// The state of a row's online softmax: a reference maximum and the sum of exponentials.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// The reference: at most slightly below the largest score. `f32::MIN` for a row without keys.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
}

/// Receives a row, its softmax state, and its normalised output, padded like a value of a tile;
/// zeros where the sum is 0.
pub type Write<'w> = dyn FnMut(usize, Softmax, &[f32]) + 'w;

/// Lets all rows see a range of keys.
pub(super) struct Attend<'a> {
    pub(super) rows: &'a dyn Rows,
    pub(super) keys: Range<usize>,
    pub(super) write: &'a mut Write<'a>,
}

/// `keys`, cut at multiples of `length`.
pub(super) fn tiles(keys: Range<usize>, length: usize) -> impl Iterator<Item = Range<usize>> {
    let first = keys.start / length * length;
    (first..keys.end)
        .step_by(length)
        .map(move |tile| tile.max(keys.start)..(tile + length).min(keys.end))
}
