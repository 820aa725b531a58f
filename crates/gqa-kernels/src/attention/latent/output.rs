//! Writes a half's columns of the output.

use super::halves::{Half, OUTPUTS};
use super::merge_parts::{COLUMN_WORDS, STATE_WORDS};
use super::{COLUMNS, Shape, VALUE_SIZE, Work, row_of};
use crate::attention::hopper::{exponent, power_of_two};
use crate::concept::softmax::SoftmaxState;
use crate::num::{MmaElement, f16};
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
        let is_token =
            if S::DIVIDES { self.visible[half as usize].end > 0 } else { row.is_token() };
        let (factor, log_sum_exp) =
            close::<T>(&work.p.attention, is_token, row.head, Global::null(), state);
        let lse = if work.is_split() { work.to.partial_lse } else { work.to.lse };
        let writes = self.half == 0 && lane() % 4 == 0 && work.exists(row);
        if writes && !lse.is_null() {
            let at = match work.is_part() {
                true => (STATE_WORDS * work.place_of(r)) as usize,
                false => work.index(row),
            };
            lse.store(at, log_sum_exp);
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

    /// Writes the output of a piece: float16, each row's columns of this half divided by a power of
    /// two so that they fit it. Float16 has more bits than bfloat16, and takes half of the memory
    /// traffic of float32.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store_piece<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>) {
        // opaque(): otherwise derived values stay live across the main loop and spill.
        let lane = opaque(lane());
        let (out, column) = (&self.out, self.half * COLUMNS + lane % 4 * 8);
        for side in 0..2 {
            let r = opaque(row_of(side as u32));
            let row = work.row(r);
            let place = work.place_of(r);
            let exists = work.exists(row);
            let mut top = 0.0;
            for i in 0..OUTPUTS / 2 {
                top = max(top, out[4 * (i / 2) + 2 * side + i % 2].abs());
            }
            for distance in [1, 2] {
                top = max(top, shfl_xor_f32(top, distance));
            }
            let exponent = exponent(top);
            let factor = power_of_two(-exponent);
            if exists && lane % 4 == 0 {
                let at = (STATE_WORDS * place + 1 + self.half) as usize;
                work.to.partial_lse.store(at, power_of_two(exponent));
            }
            for group in 0..OUTPUTS / 16 {
                let words = core::array::from_fn(|i| {
                    let pair = 16 * group + 4 * i + 2 * side;
                    f16::pack(out[pair] * factor, out[pair + 1] * factor)
                });
                let words = transpose(words, lane);
                if exists {
                    let at = COLUMN_WORDS as usize * place as usize + column as usize / 2;
                    work.to.partial_out.store_vec(at + 16 * group, words);
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
