//! `append_dequantized`: appends to a shared quantized cache, and dequantizes the whole cache into
//! scratch memory for attention, in one pass.
//!
//! | cache row `j` of batch entry `b` | present | scratch |
//! |---|---|---|
//! | `0 .. past_b` | unchanged | dequantized |
//! | `past_b .. total_b` | new tokens, K rotated, quantized | the same, dequantized |
//! | `total_b .. capacity` | unchanged | unchanged |
//!
//! So attention reads new tokens rounded as later calls will read them. A thread takes two vectors
//! of 16 bytes (dequantized) of a new row; with per-token scales neighbouring lanes share a row.
//! Then it takes a vector of each of four cached rows. Tensors: k, v (batch, KV head, new row, head
//! size); present_k, present_v (batch, KV head, capacity, head size), quantized; k_scale, v_scale
//! of one element, (KV head), (KV head, head size) or, per token, (batch, KV head, capacity);
//! k_numbers, v_numbers as present, dequantized. All strides count dequantized elements.

use super::append::append_quantized_size;
use super::concat::rows_before;
use super::quantize::{
    Divisors, HeadDivisors, load_vector, numbers, store_quotients, store_vector,
};
use super::rope::{Rope, StoreVector};
use super::row_scales::{NewRow, each_row, lanes};
use super::seqlen;
use super::walk::Walk;
use crate::concept::scales::ScalesPer;
use crate::num::{Divisor, Element, MmaCode};
use crate::params::PrologueParams;
use crate::simt::{Global, opaque};
use crate::tile::seqlens::Seqlens;

/// Cached rows of a thread, whose loads are in flight at once.
const ROWS: u32 = 4;

/// Index space of the old rows: (batch, key heads and then value heads, four rows, vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn old_rows_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let most = p.capacity.saturating_sub(p.new_len.min(p.q_len));
    [p.batch, p.kv_heads + p.value_heads, most.div_ceil(ROWS), p.head_size / per_vec]
}

/// The union of the index spaces of old and new rows: (batch, heads, rows, vectors).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn append_dequantized_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let [batch, rows, heads, pairs] = append_quantized_size(p, per_vec);
    let [_, _, fours, vectors] = old_rows_size(p, per_vec);
    [batch, heads, rows.max(fours), pairs.max(vectors)]
}

/// Appends new K and V rows and writes all dequantized rows; with `BY_ROW`, for per-token scales.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn append_dequantized<T: Element, const BY_ROW: bool>(
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    seqlens: Seqlens,
    present_k: Global<u16>,
    present_v: Global<u16>,
    k_numbers: Global<T>,
    v_numbers: Global<T>,
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    let per = ScalesPer::new(p.scales);
    let cache = |present, numbers, scales| Cache { present, numbers, scales, per, by_row: BY_ROW };
    let keys = cache(present_k, k_numbers, k_scale);
    let values = cache(present_v, v_numbers, v_scale);
    let call = Call { k, v, keys, values, rope, seqlens };
    with_code!(p.format, |code| {
        call.dequantize(code, &p);
        if BY_ROW { call.append_with_scales(code, &p) } else { call.append(code, &p) }
    });
}

/// New rows and the cache.
struct Call<T> {
    k: Global<T>,
    v: Global<T>,
    keys: Cache<T>,
    values: Cache<T>,
    rope: Rope<T>,
    seqlens: Seqlens,
}

impl<T: Element> Call<T> {
    /// Appends new rows and writes their dequantized values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append<C: MmaCode>(&self, code: C, p: &PrologueParams) {
        let [keys, values] = [self.keys, self.values].map(|c| Divisors::new(c.scales, c.per));
        for [b, s, head, pair] in Walk::over(append_quantized_size(p, T::PER_VEC)) {
            let seqlen = seqlen(p, self.seqlens, b);
            if !seqlen.is_token(s) {
                continue;
            }
            let row = seqlen.past + s;
            let part = (pair, p.head_size);
            if head < p.kv_heads {
                let row = self.keys.row::<C>([b, head, row], p);
                let to = Appended { row, code, scales: keys.of_head(head, p.head_size) };
                let position = self.rope.position(b, s, seqlen.past);
                let from = (self.k, p.k.at(b, head, s));
                self.rope.rotate_pair(from, part, position, to);
            } else {
                let head = head - p.kv_heads;
                let (to, scales) =
                    (self.values.row::<C>([b, head, row], p), values.of_head(head, p.head_size));
                // Not by `Unturned`, which keeps the number of the second vector: that takes one
                // register too many.
                let half = (p.head_size / T::PER_VEC).div_ceil(2);
                let [low, high] = [pair, pair + half].map(|vector| vector * T::PER_VEC);
                let from = p.v.at(b, head, s);
                let load = |e: u32| self.v.load_vec(from + e as usize);
                let vectors = (load(low), (high < p.head_size).then(|| load(high)));
                to.append(code, low as usize, vectors.0, &scales);
                if let Some(vector) = vectors.1 {
                    to.append(code, high as usize, vector, &scales);
                }
            }
        }
    }

    /// The same for per-token scales.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_with_scales<C: MmaCode>(&self, code: C, p: &PrologueParams) {
        let heads = p.kv_heads + p.value_heads;
        let size = [p.batch, p.new_len, heads, lanes(p.head_size / T::PER_VEC)];
        let row = |index| self.new_row::<C>(p, index);
        each_row(size, &self.rope, row, |new, to, largest| {
            let scale = code.row_scale(largest);
            if new.lane == 0 {
                to.scale.store(0, scale);
            }
            let divisor = Divisor::new(scale);
            for e in new.elements() {
                let (e, vector) = (e as usize, new.vector(&self.rope, e));
                let quotient = |_, x| divisor.divide(x);
                let words = store_quotients::<T, C>(code, e, vector, quotient, to.codes);
                to.numbers.store_vec(e, numbers::<T, C>(code, words, |_| scale));
            }
        });
    }

    /// The new row that the lane takes part in, and its place in the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new_row<C: MmaCode>(
        &self,
        p: &PrologueParams,
        [b, s, head, lane]: [u32; 4],
    ) -> Option<(NewRow<T>, Row<T>)> {
        let seqlen = seqlen(p, self.seqlens, b);
        if !seqlen.is_token(s) {
            return None;
        }
        let row = seqlen.past + s;
        let is_key = head < p.kv_heads;
        let head = if is_key { head } else { head - p.kv_heads };
        let (cache, from) = match is_key {
            true => (self.keys, (self.k, p.k.at(b, head, s))),
            false => (self.values, (self.v, p.v.at(b, head, s))),
        };
        let position = is_key.then(|| self.rope.position(b, s, seqlen.past));
        let new = NewRow { from, position, head_size: p.head_size, lane };
        Some((new, cache.row::<C>([b, head, row], p)))
    }

    /// Dequantizes the old rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn dequantize<C: MmaCode>(&self, code: C, p: &PrologueParams) {
        for [b, head, four, vector] in Walk::over(old_rows_size(p, T::PER_VEC)) {
            let rows = rows_before(seqlen(p, self.seqlens, b), p).min(p.capacity);
            let first = four * ROWS;
            if first >= rows {
                continue;
            }
            let is_key = head < p.kv_heads;
            let head = if is_key { head } else { head - p.kv_heads };
            let cache = if is_key { self.keys } else { self.values };
            let e = vector * T::PER_VEC;
            let at = |i: usize| cache.row::<C>([b, head, first + i as u32], p);
            let is_row = |i: usize| first + (i as u32) < rows;
            let words: [_; ROWS as usize] = core::array::from_fn(|i| match is_row(i) {
                true => load_vector::<T, C>(e as usize, at(i).codes),
                false => [0; 2],
            });
            let of_channels = cache.channel_scales(head, e, p);
            for i in 0..ROWS as usize {
                if is_row(i) {
                    let row = at(i);
                    let of_row = if cache.by_row { row.scale.load(0) } else { 1.0 };
                    let vector = numbers::<T, C>(code, words[i], |n| of_row * of_channels[n]);
                    row.numbers.store_vec(e as usize, vector);
                }
            }
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy)]
struct Cache<T> {
    present: Global<u16>,
    numbers: Global<T>,
    scales: Global<f32>,
    per: ScalesPer,
    /// Whether scales are per token.
    by_row: bool,
}

impl<T: Element> Cache<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row<C: MmaCode>(&self, [b, head, row]: [u32; 3], p: &PrologueParams) -> Row<T> {
        let number = p.kv_out.at(b, head, row);
        let of_row = (b * p.kv_heads + head) as usize * p.capacity as usize + row as usize;
        Row {
            codes: self.present.offset(number * C::BITS as usize / 16),
            numbers: self.numbers.offset(number),
            scale: self.scales.offset(if self.by_row { of_row } else { 0 }),
        }
    }

    /// Scales of a vector's channels; 1 with per-token scales.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn channel_scales(&self, head: u32, element: u32, p: &PrologueParams) -> [f32; 8] {
        core::array::from_fn(|i| {
            if self.by_row || i >= T::PER_VEC as usize {
                return 1.0;
            }
            self.scales.load(self.per.number(head, p.head_size, element + i as u32))
        })
    }
}

/// The addresses of a KV head's row.
#[derive(Clone, Copy)]
struct Row<T> {
    codes: Global<u16>,
    numbers: Global<T>,
    /// The row's scale, with per-token scales.
    scale: Global<f32>,
}

/// A new row on its way into the cache.
struct Appended<T, C> {
    row: Row<T>,
    code: C,
    scales: HeadDivisors,
}

impl<T: Element, C: MmaCode> StoreVector for Appended<T, C> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store(&self, e: usize, vector: [u32; 4]) {
        self.row.append(self.code, e, vector, &self.scales);
    }
}

impl<T: Element> Row<T> {
    /// Quantizes the vector from element `e` on, and stores the quantized and the dequantized
    /// values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append<C: MmaCode>(&self, code: C, e: usize, vector: [u32; 4], scales: &HeadDivisors) {
        let words = store_vector::<T, C>(code, e, vector, scales, self.codes);
        // opaque(): otherwise all scales are loaded before the quantized values are written, which
        // takes so many registers that only three CTAs fit an SM.
        let e = opaque(e as u32) as usize;
        let scale = |i: usize| scales.scale((e + i) as u32);
        self.numbers.store_vec(e, numbers::<T, C>(code, words, scale));
    }
}
