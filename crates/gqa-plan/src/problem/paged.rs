//! Sequences in a paged KV cache, and the call that remains after their rows are gathered.

use crate::problem::{CacheBinding, Layout, Pages, Problem, ProblemFields, Strided};
use gqa_kernels::prologue::dequantize;
use gqa_tensor::Result;

impl Problem {
    /// Attention alone, after the new rows were appended and every sequence's rows were gathered
    /// into contiguous memory: (batch, q_len) rotated query rows.
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

    /// Attention alone, after the new rows were appended and `paged_dequantize` wrote the cache's
    /// dequantized values to blocks in scratch memory.
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
            strided: Strided { pages: None, page_values: None, ..call.strided },
            ..call
        })
    }

    /// The new tokens of all sequences as one sequence, for normalization, rotation and appending.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn tokens(&self) -> Result<Self> {
        let tokens = self.pages.map_or(self.q_len, |pages| pages.tokens);
        self.derive(|call| ProblemFields {
            batch: 1,
            q_len: tokens,
            new_len: if self.reads_pages_only() { 0 } else { tokens },
            pages: None,
            tree_mask: false,
            strided: Strided { pages: None, page_values: None, ..call.strided },
            ..call
        })
    }

    /// Whether every sequence has one token, so that each token is a batch entry.
    pub fn has_single_tokens(&self) -> bool {
        self.pages.is_some_and(|pages| pages.one_each)
    }
}
