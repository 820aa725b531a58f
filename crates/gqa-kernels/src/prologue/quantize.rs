//! `quantize_kv`: makes the present quantized cache from a separate past and new tokens, and
//! dequantizes all of it into scratch memory for attention, in one pass.
//! [`append_dequantized`](mod@super::append_dequantized) does the same in place.
//!
//! Launches before it have written the new tokens, as elements, into their rows of scratch. This
//! kernel quantizes them and dequantizes them again, so that attention reads new tokens rounded as
//! later calls will read them:
//!
//! | cache row `j` of batch entry `b` | present | scratch |
//! |---|---|---|
//! | `0 .. past_b` | copied from past | dequantized |
//! | `past_b .. total_b` | quantized from scratch | the same, dequantized |
//! | `total_b .. capacity` | 0 | unchanged |
//!
//! A thread takes one 16-byte vector of a row of scratch. Tensors: past_k, past_v, present_k,
//! present_v (batch, KV head, row, head size), quantized; k, v, scratch, as present, dequantized;
//! k_scale, v_scale of one element, (KV head) or (KV head, head size). All strides count
//! dequantized elements.

use super::concat::Source;
use super::seqlen;
use super::walk::Walk;
use crate::concept::scales::ScalesPer;
use crate::num::{Code, Divisor, Element, MmaCode, f16, pack_pairs, unpack};
use crate::params::PrologueParams;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// Index space of [`quantize_kv`]: (batch, key heads and then value heads, row, vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_kv_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.kv_heads + p.value_heads, p.capacity, p.head_size / per_vec]
}

/// Makes quantized values of new rows and all dequantized values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_kv<T: Element>(
    past_k: Global<u16>,
    past_v: Global<u16>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    seqlens: Seqlens,
    present_k: Global<u16>,
    present_v: Global<u16>,
    k: Global<T>,
    v: Global<T>,
    p: PrologueParams,
) {
    let given = [past_k, past_v];
    let scales = [k_scale, v_scale];
    let written = ([present_k, present_v], [k, v]);
    with_code!(p.format, |code| quantize(code, given, scales, seqlens, written, &p));
}

/// The same for a format.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn quantize<T: Element, C: MmaCode>(
    code: C,
    [past_k, past_v]: [Global<u16>; 2],
    scales: [Global<f32>; 2],
    seqlens: Seqlens,
    ([present_k, present_v], [k, v]): ([Global<u16>; 2], [Global<T>; 2]),
    p: &PrologueParams,
) {
    let [k_scale, v_scale] = scales.map(|s| Divisors::new(s, ScalesPer::new(p.scales)));
    for [b, head, row, vector] in Walk::over(quantize_kv_size(p, T::PER_VEC)) {
        let is_key = head < p.kv_heads;
        let head = if is_key { head } else { head - p.kv_heads };
        let (past, present, scales, scratch) =
            if is_key { (past_k, present_k, k_scale, k) } else { (past_v, present_v, v_scale, v) };
        let codes_of = |cache: Global<u16>, number| cache.offset(number * C::BITS as usize / 16);
        let number = p.kv_out.at(b, head, row);
        let (to, scratch) = (codes_of(present, number), scratch.offset(number));
        let scales = scales.of_head(head, p.head_size);
        let e = (vector * T::PER_VEC) as usize;
        let words = match Source::of(row, seqlen(p, seqlens, b), p) {
            Source::Past => {
                let words = load_vector::<T, C>(e, codes_of(past, p.past.at(b, head, row)));
                store_words::<T, C>(e, words, to);
                words
            }
            Source::New(_) => store_vector::<T, C>(code, e, scratch.load_vec(e), &scales, to),
            Source::Nothing => {
                store_words::<T, C>(e, [0; 2], to);
                continue;
            }
        };
        let scale = |i: usize| scales.scale((e + i) as u32);
        scratch.store_vec(e, numbers::<T, C>(code, words, scale));
    }
}

/// Scales of a quantized cache, prepared for dividing new rows.
#[derive(Clone, Copy)]
pub(crate) struct Divisors {
    scales: Global<f32>,
    per: ScalesPer,
    /// The first scale: the only one if the whole cache has one scale.
    first: Divisor,
}

impl Divisors {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(scales: Global<f32>, per: ScalesPer) -> Self {
        Self { scales, per, first: Divisor::new(scales.load(0)) }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_head(&self, kv_head: u32, head_size: u32) -> HeadDivisors {
        HeadDivisors { scales: *self, kv_head, head_size }
    }
}

/// Divisors of a KV head's channels.
#[derive(Clone, Copy)]
pub(crate) struct HeadDivisors {
    scales: Divisors,
    kv_head: u32,
    head_size: u32,
}

impl HeadDivisors {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(&self, channel: u32) -> Divisor {
        let Divisors { scales, per, first } = self.scales;
        if per.is_one() {
            return first;
        }
        Divisor::new(scales.load(per.number(self.kv_head, self.head_size, channel)))
    }

    /// The scale itself.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn scale(&self, channel: u32) -> f32 {
        let Divisors { scales, per, first } = self.scales;
        if per.is_one() {
            return first.value();
        }
        scales.load(per.number(self.kv_head, self.head_size, channel))
    }
}

/// Writes the quantized values of a vector of a head, from element `element` on, into the head
/// that starts at `to`, in half words. Returns them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn store_vector<T: Element, C: Code>(
    code: C,
    element: usize,
    vector: [u32; 4],
    scales: &HeadDivisors,
    to: Global<u16>,
) -> [u32; 2] {
    let quotient = |i: usize, x: f32| scales.of((element + i) as u32).divide(x);
    store_quotients::<T, C>(code, element, vector, quotient, to)
}

/// The same; `quotient(i, x)` divides element `i` of the vector, `x`, by its scale.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn store_quotients<T: Element, C: Code>(
    code: C,
    element: usize,
    vector: [u32; 4],
    quotient: impl Fn(usize, f32) -> f32,
    to: Global<u16>,
) -> [u32; 2] {
    let (values, per_vec) = (unpack::<T>(vector), T::PER_VEC as usize);
    let mut words = [0; 2];
    for i in (0..per_vec).step_by(2) {
        let bit = i * C::BITS as usize;
        let quotients = [quotient(i, values[i]), quotient(i + 1, values[i + 1])];
        words[bit / 32] |= code.encode_two(quotients) << (bit % 32);
    }
    store_words::<T, C>(element, words, to);
    words
}

/// Writes quantized values as they are.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store_words<T: Element, C: Code>(element: usize, words: [u32; 2], to: Global<u16>) {
    let first = element * C::BITS as usize / 16;
    match T::PER_VEC * C::BITS {
        64 => to.store_vec8(first, words),
        32 => to.store_word(first, words[0]),
        _ => to.store(first, words[0] as u16),
    }
}

/// Loads quantized values as [`store_vector`] writes them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_vector<T: Element, C: Code>(element: usize, from: Global<u16>) -> [u32; 2] {
    let first = element * C::BITS as usize / 16;
    match T::PER_VEC * C::BITS {
        64 => from.load_vec8(first),
        32 => [from.load_word(first), 0],
        _ => [from.load(first).into(), 0],
    }
}

/// Dequantizes a vector; `scale(i)` is the scale of its element `i`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn numbers<T: Element, C: MmaCode>(
    code: C,
    words: [u32; 2],
    scale: impl Fn(usize) -> f32,
) -> [u32; 4] {
    let [a, b] = words.map(|word| code.in_order(word));
    let halves = if C::BITS == 4 { a } else { [a[0], a[1], b[0], b[1]] };
    let mut values = unpack::<f16>(halves);
    for i in 0..T::PER_VEC as usize {
        values[i] *= scale(i);
    }
    pack_pairs::<T>(values)
}
