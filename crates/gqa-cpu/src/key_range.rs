//! Attention over a range of keys: what is asked, and what each row gets.

use super::panel::Rows;
use std::ops::Range;

/// A number that is about a row's largest score, and its sum of weights relative to that.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// At most a little less than the largest score; the smallest finite number where there is
    /// none.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
}

/// Takes a row, its softmax, and the weighted mean of its values, as many numbers as a value has in
/// a tile; zeros where its weights are 0.
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
