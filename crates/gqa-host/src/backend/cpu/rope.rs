//! Rotary embedding of one row.

use super::element::Element;
use super::sequence::Sequence;
use crate::Rotary;

/// Elements of the largest head.
pub(super) const MAX_HEAD_SIZE: usize = 512;

/// Angles and positions.
pub(super) struct Rope<'a, T> {
    pub(super) rotary: Rotary,
    pub(super) cos: &'a [T],
    pub(super) sin: &'a [T],
    pub(super) position_ids: &'a [i64],
}

impl<T: Element> Rope<'_, T> {
    /// Rotates new row `s` of batch entry `b`; the result is not rounded. Only rows of padding stand outside the tables, and stay as they are.
    pub(super) fn rotate(&self, b: usize, s: usize, sequence: Sequence, row: &mut [f32]) {
        let position = match self.rotary.explicit {
            Some(row_length) => self.position_ids[b * row_length + s],
            None => sequence.position + s as i64,
        };
        let inside = |position: &usize| *position < self.rotary.max_positions;
        let Some(position) = usize::try_from(position).ok().filter(inside) else { return };
        let half = self.rotary.dim / 2;
        let mut angles = [[0.0; MAX_HEAD_SIZE / 2]; 2];
        for (table, angles) in [self.cos, self.sin].into_iter().zip(&mut angles) {
            T::widen(&table[position * half..][..half], &mut angles[..half]);
        }
        let [cos, sin] = angles.each_ref().map(|angles| &angles[..half]);
        let row = &mut row[..2 * half];
        if self.rotary.interleaved {
            for ((pair, cos), sin) in row.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [x, y] = *pair;
                *pair = [x * cos - y * sin, y * cos + x * sin];
            }
        } else {
            let (first, second) = row.split_at_mut(half);
            for (((x, y), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}
