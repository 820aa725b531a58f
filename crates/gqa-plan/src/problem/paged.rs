//! Sequences in a paged KV cache, and the call that remains after their rows are gathered.

use crate::problem::{CacheBinding, Layout, Pages, Problem, ProblemFields, Strided};
use gqa_kernels::prologue::dequantize;
use gqa_tensor::Result;

impl Problem {
    /// This call when the new rows are in the cache and every sequence's rows lie side by side:
    /// attention alone, of (batch, q_len) query rows that are rotated.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn gathered(&self) -> Result<Self> {
        self.derive(|call| ProblemFields {
            pages: None,
            packed: false,
            layout: Layout::Bsnh,
            cache: CacheBinding::Shared,
            new_len: 0,
            qk_norm: None,
            rotary: None,
            prefetch_cache: false,
            strided: Strided::default(),
            ..call
        })
    }

    /// This call when the new rows are in the cache and the its dequantized values in blocks of
    /// their own, where `paged_dequantize` leaves them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn dequantized(&self) -> Result<Self> {
        let per_sequence = self.capacity.div_ceil(dequantize::BLOCK as usize);
        let in_numbers = |pages| Pages {
            blocks: self.batch.saturating_mul(per_sequence),
            block_size: dequantize::BLOCK as usize,
            per_sequence,
            ..pages
        };
        self.derive(|call| ProblemFields {
            pages: self.pages.map(in_numbers),
            quantized: None,
            strided: Strided { pages: None, ..call.strided },
            ..call
        })
    }

    /// The new tokens of all sequences as those of one, to be normalized, rotated and appended.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn tokens(&self) -> Result<Self> {
        let tokens = self.pages.map_or(self.q_len, |pages| pages.tokens);
        self.derive(|call| ProblemFields {
            batch: 1,
            q_len: tokens,
            new_len: tokens,
            pages: None,
            tree_mask: false,
            strided: Strided { pages: None, ..call.strided },
            ..call
        })
    }

    /// Whether every sequence has one token, so that each token is a batch entry.
    pub fn has_single_tokens(&self) -> bool {
        self.pages.is_some_and(|pages| pages.one_each)
    }
}
