//! `quantize_output`: results as e4m3 times a scale, behind attention that leaves them in scratch
//! in another type.
//!
//! One thread has 8 elements. Tensors: rows, out (batch, query head, row, head size) with their
//! strides; out_scale, of one element.

use super::walk::Walk;
use crate::num::{Code, Element, Float8, e4m3, unpack};
use crate::params::QuantizeOutputParams;
use crate::simt::Global;

/// Elements of a thread.
const ELEMENTS: usize = 8;

/// Index space of [`quantize_output`]: (batch, row, query head, 8 elements).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_output_size(p: &QuantizeOutputParams) -> [u32; 4] {
    [p.batch, p.q_len, p.q_heads, p.eighths]
}

/// Divides by the scale and rounds.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_output<T: Element>(
    rows: Global<T>,
    out_scale: Global<f32>,
    out: Global<e4m3>,
    p: QuantizeOutputParams,
) {
    let (scale, per_vec) = (out_scale.load(0), T::PER_VEC as usize);
    for [b, row, head, eighth] in Walk::over(quantize_output_size(&p)) {
        let [from, to] =
            [p.rows, p.out].map(|rows| rows.at(b, head, row) + eighth as usize * ELEMENTS);
        let mut words = [0; 2];
        for vector in 0..ELEMENTS / per_vec {
            let values = unpack::<T>(rows.load_vec(from + vector * per_vec));
            for i in 0..per_vec {
                let at = vector * per_vec + i;
                words[at / 4] |= Float8.encode(values[i] / scale) << (at % 4 * 8);
            }
        }
        out.store_vec8(to, words);
    }
}
