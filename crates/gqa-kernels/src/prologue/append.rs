//! New K and V rows go behind the rows that a shared cache already holds: `concat_kv_in_place`, and the part of
//! `unpack_qkv_with_rope_and_append_kv` that does the same.
//!
//! One thread moves two 16-byte vectors of one new row; K is rotated on the way. Row `s` of batch entry `b` lands in cache row
//! `past_b + s`. Rows of padding (`past_b + s` at or behind the entry's length) are not written, nor is any other cache row.

use super::rope::{Rope, move_rest, pairs};
use super::seqlen;
use super::walk::Walk;
use crate::concept::seqlen::Seqlen;
use crate::num::Element;
use crate::params::PrologueParams;
use crate::simt::Global;

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
    /// For K.
    pub rope: Rope<T>,
    /// The call.
    pub params: &'a PrologueParams,
}

impl<T: Element> Append<'_, T> {
    /// Pair number `pair` of the vectors of new row `s`: of key head `head`, or of value head `head - kv_heads`.
    #[inline(always)]
    pub fn pair(&self, [b, s, head, pair]: [u32; 4], seqlen: Seqlen) {
        if !seqlen.is_token(s) {
            return;
        }
        let p = self.params;
        if head < p.kv_heads {
            let position = self.rope.position(b, s, seqlen.past);
            let to = (self.present_k, p.kv_out.at(b, head, seqlen.past + s));
            self.rope.move_pair((self.k, p.k.at(b, head, s)), to, (pair, p.head_size), position);
        } else {
            let head = head - p.kv_heads;
            let to = (self.present_v, p.kv_out.at(b, head, seqlen.past + s));
            move_rest((self.v, p.v.at(b, head, s)), to, 0, pair, p.head_size);
        }
    }
}

/// Index space of [`concat_kv_in_place`]: (batch, new row, key heads and then value heads, pair of vectors).
#[inline(always)]
pub fn concat_kv_in_place_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.new_len, 2 * p.kv_heads, pairs(p.head_size, per_vec)]
}

/// Appends new K and V rows to a shared cache.
#[inline(always)]
pub fn concat_kv_in_place<T: Element>(
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    seqlens_k: Global<i32>,
    present_k: Global<T>,
    present_v: Global<T>,
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary };
    let append = Append { k, v, present_k, present_v, rope, params: &p };
    for [b, s, head, pair] in Walk::over(concat_kv_in_place_size(&p, T::PER_VEC)) {
        append.pair([b, s, head, pair], seqlen(&p, seqlens_k, b));
    }
}
