//! `append_dequantized`: a shared and quantized cache gets new rows, and attention the numbers of
//! all its rows, in one pass over both.
//!
//! | cache row `j` of batch entry `b` | present | numbers |
//! |---|---|---|
//! | `0 .. past_b` | as it was | those of its quantized values |
//! | `past_b .. total_b` | quantized values of new rows, K rotated | the same of these |
//! | `total_b .. capacity` | as it was | as it was |
//!
//! So attention sees what a later call would see. One thread has two 16-byte vectors of numbers of
//! one new row, then a vector of each of four old rows, again and again. Tensors: k, v (batch, KV
//! head, new row, head size); present_k, present_v (batch, KV head, capacity, head size), quantized
//! values in half words; k_scale, v_scale of one element, (KV head) or (KV head, head size);
//! k_numbers, v_numbers as present, but of numbers. All strides count numbers.

use super::append::append_quantized_size;
use super::concat::rows_before;
use super::quantize::{Divisors, HeadDivisors, load_vector, numbers, store_vector};
use super::rope::{Rope, Unturned};
use super::seqlen;
use super::walk::Walk;
use crate::concept::scales::ScalesPer;
use crate::num::{Element, MmaCode};
use crate::params::PrologueParams;
use crate::simt::Global;

/// Old rows of a thread, whose quantized values it asks for together.
const ROWS: u32 = 4;

/// Index space of the old rows: (batch, key heads and then value heads, four rows, vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn old_rows_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let most = p.capacity.saturating_sub(p.new_len.min(p.q_len));
    [p.batch, 2 * p.kv_heads, most.div_ceil(ROWS), p.head_size / per_vec]
}

/// The larger of the two index spaces, (batch, heads, rows, vectors).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn append_dequantized_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let [batch, rows, heads, pairs] = append_quantized_size(p, per_vec);
    let [_, _, fours, vectors] = old_rows_size(p, per_vec);
    [batch, heads, rows.max(fours), pairs.max(vectors)]
}

/// Appends new K and V rows, and writes numbers.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn append_dequantized<T: Element, C: MmaCode>(
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    seqlens_k: Global<i32>,
    present_k: Global<u16>,
    present_v: Global<u16>,
    k_numbers: Global<T>,
    v_numbers: Global<T>,
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary };
    let per = ScalesPer::new(p.scales);
    let keys =
        Cache { present: present_k, numbers: k_numbers, scales: Divisors::new(k_scale, per) };
    let values =
        Cache { present: present_v, numbers: v_numbers, scales: Divisors::new(v_scale, per) };
    for [b, s, head, pair] in Walk::over(append_quantized_size(&p, T::PER_VEC)) {
        let seqlen = seqlen(&p, seqlens_k, b);
        if !seqlen.is_token(s) {
            continue;
        }
        let row = seqlen.past + s;
        if head < p.kv_heads {
            let position = rope.position(b, s, seqlen.past);
            let from = (k, p.k.at(b, head, s));
            let to = keys.row::<C>([b, head, row], &p);
            rope.rotate_pair(from, (pair, p.head_size), position, |e, vector| {
                to.append::<C>(e, vector)
            });
        } else {
            let head = head - p.kv_heads;
            let from = (v, p.v.at(b, head, s));
            let to = values.row::<C>([b, head, row], &p);
            let vectors = Unturned::load(from, 0, pair, p.head_size);
            vectors.each(|e, vector| to.append::<C>(e, vector));
        }
    }
    for [b, head, four, vector] in Walk::over(old_rows_size(&p, T::PER_VEC)) {
        let rows = rows_before(seqlen(&p, seqlens_k, b), &p).min(p.capacity);
        let first = four * ROWS;
        if first >= rows {
            continue;
        }
        let (cache, head) =
            if head < p.kv_heads { (keys, head) } else { (values, head - p.kv_heads) };
        let e = (vector * T::PER_VEC) as usize;
        let at = |i: usize| cache.row::<C>([b, head, first + i as u32], &p);
        let is_row = |i: usize| first + (i as u32) < rows;
        let words: [_; ROWS as usize] = core::array::from_fn(|i| {
            if is_row(i) { load_vector::<T, C>(e, at(i).codes) } else { [0; 2] }
        });
        for i in 0..ROWS as usize {
            if is_row(i) {
                at(i).dequantize::<C>(e, words[i]);
            }
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy)]
struct Cache<T> {
    present: Global<u16>,
    numbers: Global<T>,
    scales: Divisors,
}

impl<T: Element> Cache<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row<C: MmaCode>(&self, [b, head, row]: [u32; 3], p: &PrologueParams) -> Row<T> {
        let number = p.kv_out.at(b, head, row);
        Row {
            codes: self.present.offset(number * C::BITS as usize / 16),
            numbers: self.numbers.offset(number),
            scales: self.scales.of_head(head, p.head_size),
        }
    }
}

/// A KV head's row, where it starts.
#[derive(Clone, Copy)]
struct Row<T> {
    codes: Global<u16>,
    numbers: Global<T>,
    scales: HeadDivisors,
}

impl<T: Element> Row<T> {
    /// A vector of numbers from element `element` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append<C: MmaCode>(&self, element: usize, vector: [u32; 4]) {
        let words = store_vector::<T, C>(element, vector, &self.scales, self.codes);
        self.dequantize::<C>(element, words);
    }

    /// Quantized values from element `element` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn dequantize<C: MmaCode>(&self, element: usize, words: [u32; 2]) {
        let scale = |i: usize| self.scales.scale((element + i) as u32);
        self.numbers.store_vec(element, numbers::<T, C>(words, scale));
    }
}
