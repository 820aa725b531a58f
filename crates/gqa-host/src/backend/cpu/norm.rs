//! Normalisation of one row by its root mean square.

use super::element::Element;

/// Elements that are converted at a time.
const CHUNK: usize = 64;

/// One of q_norm_weight and k_norm_weight.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a, T> {
    pub(super) epsilon: f32,
    pub(super) weight: &'a [T],
}

impl<T: Element> Norm<'_, T> {
    /// Normalises a row; the result is rounded.
    pub(super) fn normalise(&self, row: &mut [f32]) {
        // Squares of large elements are beyond f32.
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
        let factor = (1.0 / (mean + f64::from(self.epsilon)).sqrt()) as f32;
        let mut weights = [0.0; CHUNK];
        for (row, weight) in row.chunks_mut(CHUNK).zip(self.weight.chunks(CHUNK)) {
            let weights = &mut weights[..row.len()];
            T::widen(weight, weights);
            row.iter_mut().zip(&*weights).for_each(|(x, weight)| *x = *x * factor * weight);
        }
        round::<T>(row);
    }
}

/// Rounds a row to the element type.
pub(super) fn round<T: Element>(row: &mut [f32]) {
    let mut rounded = [T::ZERO; CHUNK];
    for row in row.chunks_mut(CHUNK) {
        let rounded = &mut rounded[..row.len()];
        T::narrow(row, rounded);
        T::widen(rounded, row);
    }
}
