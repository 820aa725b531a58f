//! Kernels for packed QKV: `unpack_qkv`, and `unpack_qkv_with_rope_and_append_kv`, which does all
//! work before attention in one launch.
//!
//! A row of packed QKV is all Q heads, then all K heads, then all V heads. Only the addresses `q`,
//! `k`, `v` and their strides depend on that, so the second kernel also serves separate Q, K and V.
//! One thread moves one 16-byte vector of one head, or in the second kernel two that rotate
//! together.

use super::append::Append;
use super::rope::{Rope, pairs};
use super::seqlen;
use super::walk::Walk;
use crate::num::Element;
use crate::params::PrologueParams;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// Index space of [`unpack_qkv`]: (batch, row, Q heads and then K heads and then V heads, vector).
/// Without new K and V rows only Q heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unpack_qkv_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let new_heads = if p.new_len == 0 { 0 } else { p.kv_heads + p.value_heads };
    [p.batch, p.q_len, p.q_heads + new_heads, p.head_size / per_vec]
}

/// Index space of [`unpack_qkv_with_rope_and_append_kv`]: the last index counts pairs of vectors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unpack_qkv_with_rope_and_append_kv_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    let [batch, rows, heads, _] = unpack_qkv_size(p, per_vec);
    [batch, rows, heads, pairs(p.head_size, per_vec)]
}

/// Copies Q, K and V unchanged into separate tensors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unpack_qkv<T: Element>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    q_out: Global<T>,
    k_out: Global<T>,
    v_out: Global<T>,
    p: PrologueParams,
) {
    for [b, s, head, vector] in Walk::over(unpack_qkv_size(&p, T::PER_VEC)) {
        let (from, strides, to, out_strides, head) = if head < p.q_heads {
            (q, p.q, q_out, p.q_out, head)
        } else if head < p.q_heads + p.kv_heads {
            (k, p.k, k_out, p.kv_out, head - p.q_heads)
        } else {
            (v, p.v, v_out, p.kv_out, head - p.q_heads - p.kv_heads)
        };
        let e = (vector * T::PER_VEC) as usize;
        to.store_vec(out_strides.at(b, head, s) + e, from.load_vec(strides.at(b, head, s) + e));
    }
}

/// Rotates Q into `q_out`, padding rows included, and appends rotated K and V to a shared cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unpack_qkv_with_rope_and_append_kv<T: Element>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    seqlens: Seqlens,
    q_out: Global<T>,
    present_k: Global<T>,
    present_v: Global<T>,
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    let append = Append { k, v, present_k, present_v, rope, params: &p };
    for [b, s, head, pair] in Walk::over(unpack_qkv_with_rope_and_append_kv_size(&p, T::PER_VEC)) {
        let seqlen = seqlen(&p, seqlens, b);
        if head < p.q_heads {
            let position = rope.position(b, s, seqlen.past);
            let (from, to) = ((q, p.q.at(b, head, s)), (q_out, p.q_out.at(b, head, s)));
            rope.move_pair(from, to, (pair, p.head_size), position);
        } else {
            append.pair([b, s, head - p.q_heads, pair], seqlen);
        }
    }
}
