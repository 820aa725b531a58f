//! Appends new K and V rows to a shared cache: `concat_kv_in_place`, and the same part of
//! `unpack_qkv_with_rope_and_append_kv`; `append_quantized` if the cache holds quantized values,
//! which are stored in 16-bit words, with scales of one element, (KV head) or (KV head, head size).
//!
//! One thread moves two 16-byte vectors of one new row, in `concat_kv_in_place` of K and of V; K is
//! rotated on the way. A latent cache has no V. Row `s` of batch entry `b` lands in cache row
//! `past_b + s`. Rows of padding (`past_b + s` at or behind the entry's length) are not written,
//! nor is any other cache row.

use super::quantize::{Divisors, store_vector};
use super::rope::{Around, Rope, Unturned, pairs};
use super::seqlen;
use super::walk::Walk;
use crate::concept::scales::ScalesPer;
use crate::concept::seqlen::Seqlen;
use crate::num::{Code, Element};
use crate::params::PrologueParams;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// Moves new rows into a shared cache.
pub(super) struct Append<'a, T> {
    /// New keys, (batch, KV head, new row).
    pub k: Global<T>,
    /// New values, likewise.
    pub v: Global<T>,
    /// The key cache, (batch, KV head, capacity).
    pub present_k: Global<T>,
    /// The value cache, likewise.
    pub present_v: Global<T>,
    /// Rotary embedding of K.
    pub rope: Rope<T>,
    /// The call.
    pub params: &'a PrologueParams,
}

impl<T: Element> Append<'_, T> {
    /// Pair number `pair` of the vectors of new row `s`: of key head `head`, or of value head
    /// `head - kv_heads`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn pair(&self, [b, s, head, pair]: [u32; 4], seqlen: Seqlen) {
        if !seqlen.is_token(s) {
            return;
        }
        let p = self.params;
        if head < p.kv_heads {
            self.rotate_keys([b, s, head, pair], seqlen);
        } else {
            let head = head - p.kv_heads;
            self.load_values([b, s, head, pair]).store(self.values_to([b, s, head], seqlen));
        }
    }

    /// The same for key head and value head `head` together: the values are in flight while the
    /// keys wait for their angles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn both(&self, [b, s, head, pair]: [u32; 4], seqlen: Seqlen) {
        if !seqlen.is_token(s) {
            return;
        }
        if head >= self.params.value_heads {
            return self.rotate_keys([b, s, head, pair], seqlen);
        }
        let values = self.load_values([b, s, head, pair]);
        self.rotate_keys([b, s, head, pair], seqlen);
        values.store(self.values_to([b, s, head], seqlen));
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotate_keys(&self, [b, s, head, pair]: [u32; 4], seqlen: Seqlen) {
        let p = self.params;
        let position = self.rope.position(b, s, seqlen.past);
        let to = (self.present_k, p.kv_out.at(b, head, seqlen.past + s));
        self.rope.move_pair((self.k, p.k.at(b, head, s)), to, (pair, p.head_size), position);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_values(&self, [b, s, head, pair]: [u32; 4]) -> Unturned {
        let p = self.params;
        Unturned::load((self.v, p.v.at(b, head, s)), Around::NOTHING, pair, p.head_size)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values_to(&self, [b, s, head]: [u32; 3], seqlen: Seqlen) -> (Global<T>, usize) {
        (self.present_v, self.params.kv_out.at(b, head, seqlen.past + s))
    }
}

/// Index space of [`concat_kv_in_place`]: (batch, new row, KV head, pair of vectors).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn concat_kv_in_place_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.new_len, p.kv_heads, pairs(p.head_size, per_vec)]
}

/// Appends new K and V rows to a shared cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn concat_kv_in_place<T: Element>(
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    seqlens: Seqlens,
    present_k: Global<T>,
    present_v: Global<T>,
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    let append = Append { k, v, present_k, present_v, rope, params: &p };
    for [b, s, head, pair] in Walk::over(concat_kv_in_place_size(&p, T::PER_VEC)) {
        append.both([b, s, head, pair], seqlen(&p, seqlens, b));
    }
}

/// Index space of [`append_quantized`]: (batch, new row, key heads and then value heads, pair of
/// vectors).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn append_quantized_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.new_len, p.kv_heads + p.value_heads, pairs(p.head_size, per_vec)]
}

/// Appends new K and V rows to a shared cache of quantized values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn append_quantized<T: Element>(
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
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    let (scales, present) = ([k_scale, v_scale], [present_k, present_v]);
    with_code!(p.format, |code| append(code, (k, v), rope, scales, seqlens, present, &p));
}

/// The same for a format.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn append<T: Element, C: Code>(
    code: C,
    (k, v): (Global<T>, Global<T>),
    rope: Rope<T>,
    scales: [Global<f32>; 2],
    seqlens: Seqlens,
    [present_k, present_v]: [Global<u16>; 2],
    p: &PrologueParams,
) {
    let [k_scale, v_scale] = scales.map(|s| Divisors::new(s, ScalesPer::new(p.scales)));
    for [b, s, head, pair] in Walk::over(append_quantized_size(p, T::PER_VEC)) {
        let seqlen = seqlen(p, seqlens, b);
        if !seqlen.is_token(s) {
            continue;
        }
        let is_key = head < p.kv_heads;
        let head = if is_key { head } else { head - p.kv_heads };
        let (scales, cache) = if is_key { (k_scale, present_k) } else { (v_scale, present_v) };
        let scales = scales.of_head(head, p.head_size);
        let number = p.kv_out.at(b, head, seqlen.past + s);
        let to = cache.offset(number * C::BITS as usize / 16);
        let store = |e, vector| {
            store_vector::<T, C>(code, e, vector, &scales, to);
        };
        if is_key {
            let position = rope.position(b, s, seqlen.past);
            rope.rotate_pair((k, p.k.at(b, head, s)), (pair, p.head_size), position, store);
        } else {
            let from = (v, p.v.at(b, head, s));
            Unturned::load(from, Around::NOTHING, pair, p.head_size).each(store);
        }
    }
}
