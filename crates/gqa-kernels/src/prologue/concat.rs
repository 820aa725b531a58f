//! Separate past and present: present becomes the valid rows of past, then the new rows, then
//! zeros.
//!
//! One thread writes one 16-byte vector of present; the grid strides over present in memory order,
//! K and V together:
//!
//! | cache row `j` of batch entry `b` | receives |
//! |---|---|
//! | `0 .. past_b` | row `j` of past |
//! | `past_b .. total_b` | new row `j - past_b`, K rotated |
//! | `total_b .. capacity` | 0 |
//!
//! So every row of present is written, whatever it held. Without new rows (`new_len` 0) all
//! `total_b` rows come from past.
//!
//! `concat_rows` does the same for K or V alone, element by element: for rows of any size, where
//! all sequences have the same number of past rows.

use super::rope::Rope;
use super::seqlen;
use super::walk::Walk;
use crate::concept::seqlen::Seqlen;
use crate::num::Element;
use crate::params::PrologueParams;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// Rows of a sequence that are not new; all rows if none is new.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn rows_before(seqlen: Seqlen, p: &PrologueParams) -> u32 {
    if p.new_len == 0 { seqlen.total } else { seqlen.past }
}

/// Source of a row of present.
pub(super) enum Source {
    /// The row of past with the same number.
    Past,
    /// A new row.
    New(u32),
    /// Zeros.
    Nothing,
}

impl Source {
    /// The source of row `row` of present. No length on the device, however wrong, causes an access
    /// outside past or the new rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of(row: u32, seqlen: Seqlen, p: &PrologueParams) -> Self {
        let copied = rows_before(seqlen, p);
        if row < copied {
            if row < p.past_capacity { Self::Past } else { Self::Nothing }
        } else if row < seqlen.total && row - copied < p.new_len {
            Self::New(row - copied)
        } else {
            Self::Nothing
        }
    }
}

/// Index space of [`concat_new_to_past_kv`]: (batch, key heads and then value heads, row of
/// present, vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn concat_new_to_past_kv_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.kv_heads + p.value_heads, p.capacity, p.head_size / per_vec]
}

/// Copies past and appends new K and V rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn concat_new_to_past_kv<T: Element>(
    past_k: Global<T>,
    past_v: Global<T>,
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
    for [b, head, row, vector] in Walk::over(concat_new_to_past_kv_size(&p, T::PER_VEC)) {
        let is_key = head < p.kv_heads;
        let head = if is_key { head } else { head - p.kv_heads };
        let (past, present) = if is_key { (past_k, present_k) } else { (past_v, present_v) };
        let (e, seqlen) = (vector * T::PER_VEC, seqlen(&p, seqlens, b));
        let words = match Source::of(row, seqlen, &p) {
            Source::Past => past.load_vec(p.past.at(b, head, row) + e as usize),
            Source::New(s) if is_key => {
                rope.vector(k, p.k.at(b, head, s), e, rope.position(b, s, seqlen.past))
            }
            Source::New(s) => v.load_vec(p.v.at(b, head, s) + e as usize),
            Source::Nothing => [0; 4],
        };
        present.store_vec(p.kv_out.at(b, head, row) + e as usize, words);
    }
}

/// Index space of [`concat_rows`]: (batch, head, row of present, element).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn concat_rows_size(p: &PrologueParams) -> [u32; 4] {
    [p.batch, p.kv_heads, p.capacity, p.head_size]
}

/// Copies past and appends new rows, of K or of V; every sequence has the same number of `past`
/// rows, all valid.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn concat_rows<T: Element>(
    past: Global<T>,
    new: Global<T>,
    present: Global<T>,
    p: PrologueParams,
) {
    for [b, head, row, e] in Walk::over(concat_rows_size(&p)) {
        let (from, at) = if row < p.past_capacity {
            (past, p.past.at(b, head, row))
        } else {
            (new, p.k.at(b, head, row - p.past_capacity))
        };
        present.store(p.kv_out.at(b, head, row) + e as usize, from.load(at + e as usize));
    }
}
