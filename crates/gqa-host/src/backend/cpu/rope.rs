//! Rotary embedding of one row.

use super::element::Element;
use super::sequence::Sequence;
use crate::Rotary;

/// Angles that are looked up at a time.
const CHUNK: usize = 64;

/// Angles and positions.
pub(super) struct Rope<'a, T> {
    pub(super) rotary: Rotary,
    pub(super) cos: &'a [T],
    pub(super) sin: &'a [T],
    pub(super) position_ids: &'a [i64],
}

impl<T: Element> Rope<'_, T> {
    /// Rotates new row `s` of batch entry `b`; the result is not rounded. Only rows of padding
    /// stand outside the tables, and stay as they are.
    pub(super) fn rotate(&self, b: usize, s: usize, sequence: Sequence, row: &mut [f32]) {
        let position = match self.rotary.explicit {
            Some(row_length) => self.position_ids[b * row_length + s],
            None => sequence.position + s as i64,
        };
        let inside = |position: &usize| *position < self.rotary.max_positions;
        let Some(position) = usize::try_from(position).ok().filter(inside) else { return };
        let half = self.rotary.dim / 2;
        for first in (0..half).step_by(CHUNK) {
            let mut angles = [[0.0; CHUNK]; 2];
            let count = CHUNK.min(half - first);
            for (table, angles) in [self.cos, self.sin].into_iter().zip(&mut angles) {
                T::widen(&table[position * half + first..][..count], &mut angles[..count]);
            }
            self.turn(&mut row[..2 * half], first, angles.each_ref().map(|x| &x[..count]));
        }
    }

    /// Rotates the pairs of a row from number `first` on, by as many angles.
    fn turn(&self, row: &mut [f32], first: usize, [cos, sin]: [&[f32]; 2]) {
        if self.rotary.interleaved {
            let pairs = row.as_chunks_mut::<2>().0[first..].iter_mut();
            for ((pair, cos), sin) in pairs.zip(cos).zip(sin) {
                let [x, y] = *pair;
                *pair = [x * cos - y * sin, y * cos + x * sin];
            }
        } else {
            let (left, right) = row.split_at_mut(row.len() / 2);
            let pairs = left[first..].iter_mut().zip(&mut right[first..]);
            for (((x, y), cos), sin) in pairs.zip(cos).zip(sin) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}
