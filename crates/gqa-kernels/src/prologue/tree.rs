//! Expands a mask over the new tokens to a mask over all keys, for attention kernels without tree
//! masks.
//!
//! `tree_mask_rows` writes, for row `s` of batch entry `b`, which keys its token sees: all keys
//! before the sequence's new tokens, and new token `j` where bit `j` of its word is set.
//!
//! Tensors: tree_mask (batch, S), or, if starts (batch + 1) is not null, a word for each token of
//! all sequences; seqlens_k (batch), the index of each sequence's last key; past_seqlens (batch),
//! if starts is not null; mask (batch, 1, S, columns), booleans.

use super::walk::Walk;
use crate::concept::pages::{Length, Sequence};
use crate::concept::seqlen::Seqlen;
use crate::params::TreeMaskParams;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// Keys per thread and store.
const VECTOR: u32 = 16;

/// Index space of [`tree_mask_rows`]: (batch, 1, row, 16 columns).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tree_mask_rows_size(p: &TreeMaskParams) -> [u32; 4] {
    [p.batch, 1, p.q_len, p.columns / VECTOR]
}

/// Writes the mask.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tree_mask_rows(
    tree_mask: Global<i64>,
    seqlens: Seqlens,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    mask: Global<u8>,
    p: TreeMaskParams,
) {
    for [b, _, s, vector] in Walk::over(tree_mask_rows_size(&p)) {
        let (word, past) = if starts.is_null() {
            let lengths = seqlens.load(b, p.q_len);
            let Seqlen { past, .. } = Seqlen::new(lengths, p.capacity, p.first_prompt != 0);
            (tree_mask.load((b * p.q_len + s) as usize) as u64, past)
        } else {
            let bounds = [b, b + 1].map(|i| starts.load(i as usize));
            let length =
                Length { rows: past_seqlens.load(b as usize), counts_new: p.counts_new != 0 };
            let sequence = Sequence::new(bounds, length, p.tokens, p.q_len, p.capacity);
            let word = match sequence.token(s, p.q_len) {
                Some(i) => tree_mask.load((sequence.start + i) as usize) as u64,
                None => 0,
            };
            (word, sequence.past)
        };
        let first = vector * VECTOR;
        let seen: [u32; VECTOR as usize] =
            core::array::from_fn(|i| sees(word, past, first + i as u32));
        let row = (b * p.q_len + s) as usize * p.columns as usize + first as usize;
        mask.store_vec(row, core::array::from_fn(|i| join(&seen, 4 * i)));
    }
}

/// 1 if a token with this word sees the key, else 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sees(word: u64, past: u32, key: u32) -> u32 {
    let new = key.wrapping_sub(past);
    let is_before = (key as i32) < past as i32;
    let is_seen = is_before || new < u64::BITS && word >> (new & 63) & 1 != 0;
    is_seen.into()
}

/// Four booleans, the first in the lowest byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn join(seen: &[u32; VECTOR as usize], first: usize) -> u32 {
    seen[first] | seen[first + 1] << 8 | seen[first + 2] << 16 | seen[first + 3] << 24
}
