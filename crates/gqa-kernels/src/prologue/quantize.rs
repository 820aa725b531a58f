//! `quantize_kv`: a quantized cache and what attention reads of it, in one pass over both.
//!
//! The launches before it have put the new rows into scratch as into a shared cache of numbers.
//! This one makes quantized values of them, and numbers of all quantized values, the new ones too,
//! so that attention sees what a later call would see:
//!
//! | cache row `j` of batch entry `b` | present | scratch |
//! |---|---|---|
//! | `0 .. past_b` | quantized values of past | their numbers |
//! | `past_b .. total_b` | quantized values of scratch | the dequantized values |
//! | `total_b .. capacity` | 0; as it was where past is present | as it was |
//!
//! One thread has 8 numbers of a row. Tensors: past_k, past_v, present_k, present_v (batch, KV
//! head, row, head size), quantized values in 32-bit words; past is not read where it is present;
//! k, v, scratch, as present in numbers; k_scale, v_scale of one element, (KV head) or
//! (KV head, head size).
//! All strides count numbers.

use super::concat::Source;
use super::seqlen;
use super::walk::Walk;
use crate::concept::scales::ScalesPer;
use crate::num::{Code, Divisor, Element, MmaCode, f16, pack_pairs, unpack};
use crate::params::PrologueParams;
use crate::simt::Global;

/// Numbers of a thread: head sizes are multiples of it.
pub(super) const NUMBERS: usize = 8;

/// Index space of [`quantize_kv`]: (batch, key heads and then value heads, row, 8 numbers).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_kv_size(p: &PrologueParams) -> [u32; 4] {
    [p.batch, 2 * p.kv_heads, p.capacity, p.head_size / NUMBERS as u32]
}

/// Makes quantized values of new rows and all dequantized values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_kv<T: Element, C: Code>(
    past_k: Global<u32>,
    past_v: Global<u32>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    seqlens_k: Global<i32>,
    present_k: Global<u32>,
    present_v: Global<u32>,
    k: Global<T>,
    v: Global<T>,
    p: PrologueParams,
) {
    for [b, head, row, eighth] in Walk::over(quantize_kv_size(&p)) {
        let is_key = head < p.kv_heads;
        let head = if is_key { head } else { head - p.kv_heads };
        let (past, present, scales, numbers) =
            if is_key { (past_k, present_k, k_scale, k) } else { (past_v, present_v, v_scale, v) };
        let e = eighth as usize * NUMBERS;
        let (to, from) = (p.kv_out.at(b, head, row) + e, p.past.at(b, head, row) + e);
        let per = ScalesPer::new(p.scales);
        let scale = |i| scales.load(per.number(head, p.head_size, (e + i) as u32));
        let is_shared = p.in_place != 0;
        let codes = match Source::of(row, seqlen(&p, seqlens_k, b), &p) {
            Source::Past if is_shared => Some(load::<C>(present, to)),
            Source::Past => Some(store::<C>(present, to, load::<C>(past, from))),
            Source::New(_) => {
                let codes = encode::<T, C>(numbers.offset(to), scale);
                Some(store::<C>(present, to, codes))
            }
            Source::Nothing => None,
        };
        match codes {
            Some(codes) => decode::<T, C>(codes, scale, numbers.offset(to)),
            None if is_shared => {}
            None => {
                store::<C>(present, to, [0; 2]);
            }
        }
    }
}

/// Scales of a quantized cache, as new rows are divided by them.
#[derive(Clone, Copy)]
pub(crate) struct Divisors {
    scales: Global<f32>,
    per: ScalesPer,
    /// The one of all of the cache, or any.
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

/// Those of a KV head's channels.
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
    element: usize,
    vector: [u32; 4],
    scales: &HeadDivisors,
    to: Global<u16>,
) -> [u32; 2] {
    let (values, per_vec) = (unpack::<T>(vector), T::PER_VEC as usize);
    let mut words = [0; 2];
    for i in (0..per_vec).step_by(2) {
        let bit = i * C::BITS as usize;
        let quotient = |i| scales.of((element + i) as u32).divide(values[i]);
        words[bit / 32] |= C::encode_two([quotient(i), quotient(i + 1)]) << (bit % 32);
    }
    let first = element * C::BITS as usize / 16;
    match per_vec * C::BITS as usize {
        64 => to.store_vec8(first, words),
        32 => to.store_word(first, words[0]),
        _ => to.store(first, words[0] as u16),
    }
    words
}

/// Such quantized values as [`store_vector`] has written.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_vector<T: Element, C: Code>(element: usize, from: Global<u16>) -> [u32; 2] {
    let first = element * C::BITS as usize / 16;
    match T::PER_VEC * C::BITS {
        64 => from.load_vec8(first),
        32 => [from.load_word(first), 0],
        _ => [from.load(first).into(), 0],
    }
}

/// The numbers that they stand for.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn numbers<T: Element, C: MmaCode>(
    element: usize,
    words: [u32; 2],
    scales: &HeadDivisors,
) -> [u32; 4] {
    let [a, b] = words.map(C::in_order);
    let halves = if C::BITS == 4 { a } else { [a[0], a[1], b[0], b[1]] };
    let codes = unpack::<f16>(halves);
    let mut values = [0.0; 8];
    for i in 0..T::PER_VEC as usize {
        values[i] = codes[i] * scales.scale((element + i) as u32);
    }
    pack_pairs::<T>(values)
}

/// Words of eight quantized values.
const fn word_count<C: Code>() -> usize {
    NUMBERS * C::BITS as usize / 32
}

/// The quantized values of the eight numbers from number `first` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load<C: Code>(codes: Global<u32>, first: usize) -> [u32; 2] {
    let codes = codes.offset(first / C::PER_WORD as usize);
    core::array::from_fn(|i| if i < word_count::<C>() { codes.load(i) } else { 0 })
}

/// Writes such quantized values, and returns them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store<C: Code>(codes: Global<u32>, first: usize, words: [u32; 2]) -> [u32; 2] {
    let codes = codes.offset(first / C::PER_WORD as usize);
    for i in 0..word_count::<C>() {
        codes.store(i, words[i]);
    }
    words
}

/// Eight numbers' quantized values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn encode<T: Element, C: Code>(numbers: Global<T>, scale: impl Fn(usize) -> f32) -> [u32; 2] {
    let mut words = [0; 2];
    let per_vec = T::PER_VEC as usize;
    for first in (0..NUMBERS).step_by(per_vec) {
        let values = unpack::<T>(numbers.load_vec(first));
        for i in first..first + per_vec {
            let bit = i * C::BITS as usize;
            words[bit / 32] |= C::encode(values[i - first] / scale(i)) << (bit % 32);
        }
    }
    words
}

/// Eight dequantized values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn decode<T: Element, C: Code>(
    words: [u32; 2],
    scale: impl Fn(usize) -> f32,
    to: Global<T>,
) {
    let per_vec = T::PER_VEC as usize;
    for first in (0..NUMBERS).step_by(per_vec) {
        let values = core::array::from_fn(|i| {
            let bit = (first + i) % NUMBERS * C::BITS as usize;
            C::decode(words[bit / 32] >> (bit % 32)) * scale((first + i) % NUMBERS)
        });
        to.store_vec(first, pack_pairs::<T>(values));
    }
}
