//! The rows of a CTA, and the key tiles that they see.

use super::layout::{KEYS, ROWS};
use crate::concept::mask::{Mask, Visible};
use crate::concept::pages::Sequence;
use crate::concept::seqlen::Seqlen;
use crate::num::quotient;
use crate::params::AttentionParams;
use crate::simt::{ld_shared_vec, st_shared_vec};
use crate::tile::pages::{self, Sequences};
use crate::tile::rows::in_order;
use crate::tile::seqlens::Seqlens;
use core::ops::Range;

/// A work tile.
pub(super) struct Work {
    /// Batch entry of queries and output; 0 where the tokens of all sequences are packed.
    pub(super) entry: u32,
    /// Sequence.
    pub(super) batch: u32,
    /// Query head.
    pub(super) head: u32,
    /// First query row within the sequence.
    pub(super) row: u32,
    pub(super) seqlen: Seqlen,
    /// Key tiles that some row sees.
    pub(super) keys: Range<u32>,
    /// The sequence's first row in the tensors of queries and output.
    start: u32,
    /// Its rows there.
    rows: u32,
    /// Rows of a query head in the log-sum-exps.
    lse_rows: u32,
    /// Whether rows without a key of their own, too, see all keys.
    all_see: bool,
}

impl Work {
    /// Work tile number `index`: heads whose K and V share the L2 cache follow each other, and of
    /// these the last row tiles come first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(index: u32, seqlens: Seqlens, p: &AttentionParams) -> Self {
        let pairs = p.q_heads * p.batch;
        let (tile, pair) = in_order(index, section(p, pairs), pairs, p.q_len.div_ceil(ROWS));
        let batch = quotient(pair, p.q_heads);
        let row = tile * ROWS;
        let seqlen = seqlens.get(batch, p);
        let work = Self {
            entry: batch,
            batch,
            head: pair - batch * p.q_heads,
            row,
            seqlen,
            keys: 0..0,
            start: 0,
            rows: p.q_len,
            lse_rows: p.q_len,
            all_see: false,
        };
        // Rows past the tokens are padding.
        let tokens = p.q_len.min(seqlen.new_rows());
        work.with_keys(tokens, p)
    }

    /// The same of packed tokens over a paged KV cache. A number past a sequence's rows has none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_tokens(index: u32, sequences: Sequences, p: &AttentionParams) -> Self {
        let tiles = pages::row_tiles(sequences.tokens, p.batch, ROWS);
        let (tile, head) = in_order(index, section(p, p.q_heads), p.q_heads, tiles);
        let (batch, tile) = sequences.find(tile, p.batch, 1, ROWS);
        let sequence = sequences.get(batch, p);
        let (row, seqlen) = (tile * ROWS, sequence.seqlen());
        let Sequence { start, new, .. } = sequence;
        let work = Self {
            entry: 0,
            batch,
            head,
            row,
            seqlen,
            keys: 0..0,
            start,
            rows: new,
            lse_rows: sequences.tokens,
            all_see: p.causal == 0,
        };
        work.with_keys(new, p)
    }

    /// Writes it to shared memory. By one thread; a CTA barrier must follow.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn store(&self, at: u32) {
        let Self { entry, batch, head, row, seqlen, .. } = *self;
        st_shared_vec(at, [entry, batch, head, row]);
        st_shared_vec(at + 16, [self.start, self.rows, self.lse_rows, self.all_see.into()]);
        st_shared_vec(at + 32, [seqlen.past, seqlen.total, self.keys.start, self.keys.end]);
    }

    /// Loads the work tile from shared memory. A role that needs it after its loop over key tiles
    /// loads it again, because registers that hold it across the loop would spill.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load(at: u32) -> Self {
        let [entry, batch, head, row] = ld_shared_vec(at);
        let [start, rows, lse_rows, all_see] = ld_shared_vec(at + 16);
        let [past, total, first, end] = ld_shared_vec(at + 32);
        Self {
            entry,
            batch,
            head,
            row,
            seqlen: Seqlen { past, total },
            keys: first..end,
            start,
            rows,
            lse_rows,
            all_see: all_see != 0,
        }
    }

    /// With the key tiles that its rows see, of `tokens` rows that may see some. Both ends of a
    /// row's range grow with the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn with_keys(self, tokens: u32, p: &AttentionParams) -> Self {
        if self.row >= tokens {
            return self;
        }
        let last = tokens.min(self.row + ROWS) - 1 - self.row;
        let (first, last) = (self.visible(0, p).first, self.visible(last, p).end);
        Self { keys: first / KEYS..last.div_ceil(KEYS), ..self }
    }

    /// KV head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn kv_head(&self, p: &AttentionParams) -> u32 {
        quotient(self.head, quotient(p.q_heads, p.kv_heads))
    }

    /// Whether it has rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn has_rows(&self) -> bool {
        self.row < self.rows
    }

    /// Where row `row` of the CTA is in the tensor of queries.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn query_row(&self, row: u32) -> u32 {
        self.start + self.row + row
    }

    /// The first element of row `row` of the CTA in the output, if the row exists.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn output(&self, row: u32, p: &AttentionParams) -> Option<usize> {
        let s = self.row + row;
        (s < self.rows).then(|| p.out.at(self.entry, self.head, self.start + s))
    }

    /// Row `row` of the CTA among the log-sum-exps, if it exists.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lse(&self, row: u32, p: &AttentionParams) -> Option<usize> {
        let s = self.row + row;
        let pair = (self.entry * p.q_heads + self.head) as usize;
        (s < self.rows).then(|| pair * self.lse_rows as usize + (self.start + s) as usize)
    }

    /// The keys that row `row` of the CTA sees; none if it does not exist.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn visible(&self, row: u32, p: &AttentionParams) -> Visible {
        let s = self.row + row;
        if s >= self.rows {
            return Visible { first: 0, end: 0 };
        }
        if self.all_see {
            return Visible { first: 0, end: self.seqlen.total };
        }
        Mask { causal: p.causal != 0, window: p.window }.visible(self.seqlen, s)
    }
}

/// Query heads whose K and V share the L2 cache, out of `pairs`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn section(p: &AttentionParams, pairs: u32) -> u32 {
    if p.l2_section == 0 { pairs } else { p.l2_section }
}
