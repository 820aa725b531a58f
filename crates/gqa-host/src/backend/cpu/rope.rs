//! Rotary embedding of rows.

use super::element::Element;
use super::sequence::Sequence;
use gqa_plan::{Problem, Rotary};

/// The RoPE angles of a call's tokens, in `f32`: all heads share them.
pub(super) struct Rope {
    rotary: Rotary,
    /// (rows of all sequences, half of the rotated elements)
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Whether the row has angles. Only padding may have positions outside of the tables.
    inside: Vec<bool>,
    /// The first row of each sequence.
    first: Vec<usize>,
}

impl Rope {
    /// The angles of the sequences' rows, from the tables `cos` and `sin`.
    pub(super) fn new<T: Element>(
        p: &Problem,
        rotary: Rotary,
        sequences: &[Sequence],
        [cos, sin]: [&[T]; 2],
        position_ids: &[i64],
    ) -> Self {
        let half = rotary.dim / 2;
        let mut rope = Self {
            rotary,
            cos: Vec::new(),
            sin: Vec::new(),
            inside: Vec::new(),
            first: Vec::new(),
        };
        for (b, sequence) in sequences.iter().enumerate() {
            rope.first.push(rope.inside.len());
            let rows = sequence.rows.max(sequence.total.saturating_sub(sequence.kept(p)));
            for s in 0..rows {
                let position = match rotary.explicit {
                    Some(row_length) => position_ids.get(b * row_length + s).copied(),
                    None => Some(sequence.position + s as i64),
                };
                let position = position.and_then(|position| usize::try_from(position).ok());
                let position = position.filter(|position| *position < rotary.max_positions);
                rope.inside.push(position.is_some());
                for (to, table) in [(&mut rope.cos, cos), (&mut rope.sin, sin)] {
                    let old = to.len();
                    to.resize(old + half, 0.0);
                    if let Some(position) = position {
                        T::widen(&table[position * half..][..half], &mut to[old..]);
                    }
                }
            }
        }
        rope
    }

    /// Rotates row `s` of a sequence, without rounding. Padding stays unrotated.
    pub(super) fn rotate(&self, sequence: usize, s: usize, row: &mut [f32]) {
        let Rotary { dim, offset, interleaved, .. } = self.rotary;
        let (half, place) = (dim / 2, self.first[sequence] + s);
        let end = self.first.get(sequence + 1).copied().unwrap_or(self.inside.len());
        debug_assert!(place < end, "row {s} of sequence {sequence}");
        if self.inside[place] {
            let [cos, sin] = [&self.cos, &self.sin].map(|table| &table[place * half..][..half]);
            gqa_cpu::rotate(&mut row[offset..][..dim], cos, sin, interleaved);
        }
    }
}
