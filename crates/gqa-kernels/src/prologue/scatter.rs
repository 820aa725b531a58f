//! `scatter_rows`: writes the rows of an update into a cache in place, from a different first row
//! for each sequence. Rows are copied as bytes, whatever their type.
//!
//! Row `s` of batch entry `b` becomes cache row `first[b] + s`. In a circular cache row 0 follows
//! the last row; otherwise rows past the last one or before row 0 are not written.
//!
//! Tensors: k, v, the updates, (batch, head, row) with their strides, v null where one tensor is
//! updated; first (batch); present_k, present_v (batch, head, capacity) with their strides. One
//! thread moves 16 bytes of a row, or one byte where rows are no multiple of 16 bytes.

use super::walk::Walk;
use crate::params::ScatterParams;
use crate::simt::Global;

/// Bytes of a vector.
const VECTOR: u32 = 16;

/// Index space of [`scatter_rows`] for `tensors` tensors: (batch, new row, heads of all, unit).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scatter_rows_size(p: &ScatterParams, tensors: u32) -> [u32; 4] {
    [p.batch, p.rows, tensors * p.heads, p.row_bytes / unit(p)]
}

/// Bytes that a thread moves.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn unit(p: &ScatterParams) -> u32 {
    if p.row_bytes % VECTOR == 0 { VECTOR } else { 1 }
}

/// Copies the rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scatter_rows(
    k: Global<u8>,
    v: Global<u8>,
    first: Global<i32>,
    present_k: Global<u8>,
    present_v: Global<u8>,
    p: ScatterParams,
) {
    let tensors = if v.is_null() { 1 } else { 2 };
    for [b, s, head, index] in Walk::over(scatter_rows_size(&p, tensors)) {
        let Some(row) = place(first.load(b as usize), s, &p) else { continue };
        let is_key = head < p.heads;
        let head = if is_key { head } else { head - p.heads };
        let (from, to) = if is_key { (k, present_k) } else { (v, present_v) };
        let byte = (index * unit(&p)) as usize;
        let (from_at, to_at) = (p.new.at(b, head, s) + byte, p.cache.at(b, head, row) + byte);
        if unit(&p) == VECTOR {
            to.store_vec(to_at, from.load_vec(from_at));
        } else {
            to.store(to_at, from.load(from_at));
        }
    }
}

/// The cache row for row `s`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn place(first: i32, s: u32, p: &ScatterParams) -> Option<u32> {
    let capacity = p.capacity.max(1);
    if p.circular != 0 {
        let row = first.wrapping_rem_euclid(capacity as i32) as u32 + s;
        return Some(if row < capacity { row } else { row - capacity });
    }
    let row = first as i64 + s as i64;
    (row >= 0 && row < p.capacity as i64).then_some(row as u32)
}
