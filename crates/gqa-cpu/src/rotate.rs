//! Rotary embedding.

use super::native;
use pulp::{Arch, Simd, WithSimd};

/// Rotates pairs of a row's elements by the given angles: adjacent elements if `interleaved`, else
/// an element of the first half with one of the second (NeoX style).
pub fn rotate(row: &mut [f32], cos: &[f32], sin: &[f32], interleaved: bool) {
    native::dispatch(Arch::new(), Rotate { row, cos, sin, interleaved });
}

/// [`rotate`], with the widest vectors of this processor.
struct Rotate<'a> {
    row: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    interleaved: bool,
}

impl WithSimd for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let angles = self.cos.iter().zip(self.sin);
        if self.interleaved {
            for ([x, y], (cos, sin)) in self.row.as_chunks_mut().0.iter_mut().zip(angles) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        } else {
            let (left, right) = self.row.split_at_mut(self.row.len() / 2);
            for ((x, y), (cos, sin)) in left.iter_mut().zip(right).zip(angles) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_stay_and_angles_turn() {
        for (pairs, interleaved) in (0..40).flat_map(|n| [(n, false), (n, true)]) {
            let angles: Vec<_> = (0..pairs).map(|i| 0.1 * i as f32).collect();
            let [cos, sin]: [Vec<_>; 2] =
                [f32::cos, f32::sin].map(|of| angles.iter().map(|x| of(*x)).collect());
            let before: Vec<_> = (0..2 * pairs).map(|i| (i * 37 % 11) as f32 - 5.0).collect();
            let mut row = before.clone();
            rotate(&mut row, &cos, &sin, interleaved);
            for i in 0..pairs {
                let [x, y] = if interleaved { [2 * i, 2 * i + 1] } else { [i, pairs + i] };
                let turned = [
                    before[x] * cos[i] - before[y] * sin[i],
                    before[y] * cos[i] + before[x] * sin[i],
                ];
                for (got, want) in [row[x], row[y]].iter().zip(turned) {
                    assert!((got - want).abs() < 1e-5, "pair {i} of {pairs}: {got} for {want}");
                }
            }
        }
    }
}
