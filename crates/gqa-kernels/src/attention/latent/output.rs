//! Writes a half's columns of the output.

use super::halves::{Half, OUTPUTS};
use super::{COLUMNS, Shape, VALUE_SIZE, Work, row_of};
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::quad::transpose;
use crate::tile::rows::close;

impl Half {
    /// Finishes a row, and returns the factor that normalises its output. Half 0 writes its
    /// log-sum-exp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn close_row<S: Shape, T: MmaElement>(
        &self,
        work: &Work<'_, S, T>,
        half: u32,
        state: SoftmaxState,
    ) -> f32 {
        let r = row_of(half);
        let row = work.row(r);
        let (factor, log_sum_exp) =
            close::<T>(&work.p.attention, row.is_token(), row.head, Global::null(), state);
        let lse = if work.is_split() { work.to.partial_lse } else { work.to.lse };
        let writes = self.half == 0 && lane() % 4 == 0 && work.exists(row);
        if writes && !lse.is_null() {
            lse.store(work.index(row), log_sum_exp);
        }
        if S::CONVERTS { factor * work.to.scale.load(0) } else { factor }
    }

    /// Writes the output of rows that exist.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>) {
        let (out, column) = (&self.out, self.half * COLUMNS + lane() % 4 * 8);
        for side in 0..2 {
            let r = row_of(side as u32);
            let row = work.row(r);
            let [entry, head, s] = work.indices(row);
            let at = work.p.attention.out.at(entry, head, s);
            let exists = work.exists(row);
            for group in 0..OUTPUTS / 16 {
                let words = core::array::from_fn(|i| {
                    let pair = 16 * group + 4 * i + 2 * side;
                    T::pack(out[pair], out[pair + 1])
                });
                let words = transpose(words, lane());
                if exists {
                    work.to.out.store_vec(at + (column + group as u32 * 32) as usize, words);
                }
            }
        }
    }

    /// Writes the output of a split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store_part<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>) {
        let (out, column) = (&self.out, self.half * COLUMNS + lane() % 4 * 2);
        for side in 0..2 {
            let r = row_of(side as u32);
            let row = work.row(r);
            let at = work.index(row) * VALUE_SIZE as usize;
            if work.exists(row) && !work.tiles.is_empty() {
                for block in 0..OUTPUTS / 4 {
                    let pair = [0, 1].map(|i| out[4 * block + 2 * side + i].to_bits());
                    let at = at + (column + block as u32 * 8) as usize;
                    work.to.partial_out.store_vec8(at, pair);
                }
            }
        }
    }
}
