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
//! One thread has 8 numbers of a row. Where each row has a scale of its own, neighbouring lanes share
//! one, and the first of them writes the scale of a new row.
//!
//! Tensors: past_k, past_v, present_k, present_v (batch, KV head, row, head size), quantized values
//! in 32-bit words; past is not read where it is present; k, v, scratch, as present in numbers;
//! k_scale, v_scale of one element, (KV head), (KV head, head size) or, where past is present,
//! (batch, KV head, row). All strides count numbers.

use super::concat::Source;
use super::row_scales::{lanes, largest_of, largest_of_lanes};
use super::seqlen;
use super::walk::Walk;
use crate::concept::scales::{ScalesPer, are_of_rows};
use crate::num::{Code, Divisor, Element, pack_pairs, unpack};
use crate::params::PrologueParams;
use crate::simt::{Global, Rolled, any_sync};

/// Numbers of a thread: head sizes are multiples of it.
pub(super) const NUMBERS: usize = 8;

/// Index space of [`quantize_kv`]: (batch, key heads and then value heads, row, 8 numbers or lane
/// of those that share a row).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quantize_kv_size(p: &PrologueParams) -> [u32; 4] {
    let eighths = p.head_size / NUMBERS as u32;
    let parts = if are_of_rows(p.scales) { lanes(eighths) } else { eighths };
    [p.batch, 2 * p.kv_heads, p.capacity, parts]
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
    if are_of_rows(p.scales) {
        let rows =
            Rows { scales: [k_scale, v_scale], present: [present_k, present_v], numbers: [k, v] };
        return rows.quantize::<C>(seqlens_k, &p);
    }
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

/// A cache of keys and of values whose rows have scales of their own.
struct Rows<T> {
    scales: [Global<f32>; 2],
    present: [Global<u32>; 2],
    numbers: [Global<T>; 2],
}

impl<T: Element> Rows<T> {
    /// [`quantize_kv`] of them, in place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn quantize<C: Code>(&self, seqlens_k: Global<i32>, p: &PrologueParams) {
        let mut walk = Walk::over(quantize_kv_size(p));
        loop {
            let index = walk.next();
            // Lanes whose rows are done still take part in the shuffles of others.
            if !any_sync(index.is_some()) {
                return;
            }
            let share = index.and_then(|[b, head, row, lane]| {
                let is_new = match Source::of(row, seqlen(p, seqlens_k, b), p) {
                    Source::Past => false,
                    Source::New(_) => true,
                    Source::Nothing => return None,
                };
                Some(self.share([b, head, row, lane], is_new, p))
            });
            let largest = share.as_ref().map_or(0, |share| share.largest(p));
            let largest = largest_of_lanes(largest, lanes(p.head_size / NUMBERS as u32));
            if let Some(share) = share {
                share.write::<C>(largest, p);
            }
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn share(&self, [b, head, row, lane]: [u32; 4], is_new: bool, p: &PrologueParams) -> Share<T> {
        let (which, head) = if head < p.kv_heads { (0, head) } else { (1, head - p.kv_heads) };
        let first = p.kv_out.at(b, head, row);
        let number = (b * p.kv_heads + head) as usize * p.capacity as usize + row as usize;
        Share {
            scale: self.scales[which].offset(number),
            present: self.present[which],
            numbers: self.numbers[which],
            first,
            lane,
            is_new,
        }
    }
}

/// A lane's part of a row.
struct Share<T> {
    /// The row's.
    scale: Global<f32>,
    present: Global<u32>,
    numbers: Global<T>,
    /// Of both, where the row begins.
    first: usize,
    lane: u32,
    is_new: bool,
}

impl<T: Element> Share<T> {
    /// Where each eight of its numbers begin.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn eighths(&self, p: &PrologueParams) -> impl Iterator<Item = usize> {
        let step = lanes(p.head_size / NUMBERS as u32) * NUMBERS as u32;
        let first = self.first;
        Rolled(self.lane * NUMBERS as u32..p.head_size, step).map(move |e| first + e as usize)
    }

    /// The largest magnitude of its numbers, if the row is new.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(&self, p: &PrologueParams) -> u32 {
        if !self.is_new {
            return 0;
        }
        self.eighths(p).fold(0, |largest, at| {
            let vectors = (0..NUMBERS).step_by(T::PER_VEC as usize);
            vectors.fold(largest, |x, i| largest_of::<T>(x, self.numbers.load_vec(at + i)))
        })
    }

    /// Quantized values of a new row, whose largest magnitude that is, and numbers of them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write<C: Code>(&self, largest: u32, p: &PrologueParams) {
        let scale = if self.is_new { C::row_scale(largest) } else { self.scale.load(0) };
        if self.is_new && self.lane == 0 {
            self.scale.store(0, scale);
        }
        for at in self.eighths(p) {
            let numbers = self.numbers.offset(at);
            let codes = match self.is_new {
                true => store::<C>(self.present, at, encode::<T, C>(numbers, |_| scale)),
                false => load::<C>(self.present, at),
            };
            decode::<T, C>(codes, |_| scale, numbers);
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
}

/// Writes the quantized values of a vector of a head, from element `element` on. The head's start
/// at `to`, in half words.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn store_vector<T: Element, C: Code>(
    element: usize,
    vector: [u32; 4],
    scales: &HeadDivisors,
    to: Global<u16>,
) {
    let quotient = |i: usize, x: f32| scales.of((element + i) as u32).divide(x);
    store_quotients::<T, C>(element, vector, quotient, to);
}

/// The same of numbers that `quotient` divides by their scales; it is told which of the vector's
/// each is.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn store_quotients<T: Element, C: Code>(
    element: usize,
    vector: [u32; 4],
    quotient: impl Fn(usize, f32) -> f32,
    to: Global<u16>,
) {
    let (values, per_vec) = (unpack::<T>(vector), T::PER_VEC as usize);
    let mut words = [0; 2];
    for i in 0..per_vec {
        let bit = i * C::BITS as usize;
        words[bit / 32] |= C::encode(quotient(i, values[i])) << (bit % 32);
    }
    let first = element * C::BITS as usize / 16;
    match per_vec * C::BITS as usize {
        64 => to.store_vec8(first, words),
        32 => to.store_word(first, words[0]),
        _ => to.store(first, words[0] as u16),
    }
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
