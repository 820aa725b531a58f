//! The rows of a CTA, and the key tiles that they see.

use super::layout::{KEYS, ROWS};
use crate::concept::mask::{Mask, Visible};
use crate::concept::seqlen::Seqlen;
use crate::num::quotient;
use crate::params::AttentionParams;
use crate::tile::seqlens::Seqlens;
use core::ops::Range;

/// A work tile.
pub(super) struct Work {
    pub(super) batch: u32,
    /// Query head.
    pub(super) head: u32,
    /// First query row.
    pub(super) row: u32,
    pub(super) seqlen: Seqlen,
    /// Key tiles that some row sees.
    pub(super) keys: Range<u32>,
}

impl Work {
    /// Work tile number `index`: the last row tiles of all heads first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(index: u32, seqlens: Seqlens, p: &AttentionParams) -> Self {
        let (row_tiles, pairs) = (p.q_len.div_ceil(ROWS), p.q_heads * p.batch);
        let nth = quotient(index, pairs);
        let pair = index - nth * pairs;
        let batch = quotient(pair, p.q_heads);
        let row = (row_tiles - 1 - nth) * ROWS;
        let seqlen = seqlens.get(batch, p);
        let keys = keys(row, seqlen, p);
        Self { batch, head: pair - batch * p.q_heads, row, seqlen, keys }
    }

    /// KV head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn kv_head(&self, p: &AttentionParams) -> u32 {
        quotient(self.head, quotient(p.q_heads, p.kv_heads))
    }

    /// Row `row` of the CTA in (batch, query head, S), if it exists.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn row_index(&self, row: u32, p: &AttentionParams) -> Option<usize> {
        let s = self.row + row;
        let pair = (self.batch * p.q_heads + self.head) as usize;
        (s < p.q_len).then(|| pair * p.q_len as usize + s as usize)
    }

    /// The keys that row `row` of the CTA sees.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn visible(&self, row: u32, p: &AttentionParams) -> Visible {
        visible(self.row + row, self.seqlen, p)
    }
}

/// The keys that a row sees; none past the end of the call.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn visible(s: u32, seqlen: Seqlen, p: &AttentionParams) -> Visible {
    let mask = Mask { causal: p.causal != 0, window: p.window };
    if s < p.q_len { mask.visible(seqlen, s) } else { Visible { first: 0, end: 0 } }
}

/// The key tiles of the rows from `row` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn keys(row: u32, seqlen: Seqlen, p: &AttentionParams) -> Range<u32> {
    if !seqlen.is_token(row) {
        return 0..0;
    }
    let end = (row + ROWS).min(p.q_len).min(seqlen.new_rows());
    let (first, last) = (visible(row, seqlen, p), visible(end - 1, seqlen, p));
    first.first / KEYS..last.end.div_ceil(KEYS)
}
