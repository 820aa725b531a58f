//! Calls over a paged KV cache.

use super::Layer;
use crate::problem::{Pages, Phase, Problem, ProblemFields, RowStrides, Strided};
use gqa_tensor::{Error, Result};

/// A call of sequences of any numbers of new tokens over a paged KV cache of shape
/// (blocks, block size, KV heads, size): `present_key` and `present_value`.
///
/// The new tokens of all sequences lie one behind the other: `query` has shape
/// (tokens, heads · size), `key` and `value` (tokens, KV heads · size). Where a sequence's tokens
/// and rows are is read on the GPU, from int32 tensors: `cumulative_sequence_length`, of shape
/// (sequences + 1), has the first token of each sequence and the number of tokens; `seqlens_k`, of
/// shape (sequences), the tokens that each had before the call; `block_table`, of shape
/// (sequences, blocks of a sequence), the block that holds each of its blocks of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paged {
    sequences: usize,
    tokens: usize,
    blocks: usize,
    block_size: usize,
    blocks_per_sequence: usize,
    most_tokens: usize,
    longest: usize,
    packed: bool,
    slots: bool,
    counts_new: bool,
    appended: bool,
    strided: Strided,
    lse: bool,
    tree_mask: bool,
}

impl Paged {
    /// `tokens` new tokens of `sequences` sequences in all, over `blocks` blocks of `block_size`
    /// rows, at most `blocks_per_sequence` of them for one sequence. There may be fewer tokens than
    /// sequences, as a sequence may have no new token, and tokens behind the last sequence's.
    pub const fn new(
        sequences: usize,
        tokens: usize,
        [blocks, block_size, blocks_per_sequence]: [usize; 3],
    ) -> Self {
        Self {
            sequences,
            tokens,
            blocks,
            block_size,
            blocks_per_sequence,
            most_tokens: 0,
            longest: 0,
            packed: false,
            slots: false,
            counts_new: false,
            appended: false,
            strided: Strided { query: None, key: None, value: None, output: None },
            lse: false,
            tree_mask: false,
        }
    }

    /// One new token of each sequence.
    pub const fn decode(sequences: usize, cache: [usize; 3]) -> Self {
        Self { most_tokens: 1, ..Self::new(sequences, sequences, cache) }
    }

    /// No sequence has more new tokens than that. Kernels are chosen and scratch memory is sized by
    /// it; where it is not said, or 0, one may have them all.
    pub const fn most_tokens(self, tokens: usize) -> Self {
        Self { most_tokens: tokens, ..self }
    }

    /// No sequence is longer than that after the call; where it is not said, or 0, none is longer
    /// than its blocks are.
    pub const fn longest(self, tokens: usize) -> Self {
        Self { longest: tokens, ..self }
    }

    /// Query, key and value are one tensor, `query`, of shape
    /// (tokens, (heads + 2 · KV heads) · size).
    pub const fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    /// Heads and tokens of the query are `head` and `row` elements apart, multiples of 16 bytes,
    /// instead of being contiguous. All tokens are in one batch entry: `batch` means nothing.
    pub const fn query_strides(mut self, strides: RowStrides) -> Self {
        self.strided.query = Some(strides);
        self
    }

    /// Those of key and value are, likewise.
    pub const fn key_value_strides(mut self, strides: RowStrides) -> Self {
        (self.strided.key, self.strided.value) = (Some(strides), Some(strides));
        self
    }

    /// The int32 tensor `slot_mapping`, of shape (tokens), says which row of the cache, counted
    /// through all blocks, takes a token's key and value; -1: none does.
    pub const fn slot_mapping(self) -> Self {
        Self { slots: true, ..self }
    }

    /// `seqlens_k` has the tokens that each sequence has after the call, the new ones among them,
    /// rather than those before it.
    pub const fn total_lengths(self) -> Self {
        Self { counts_new: true, ..self }
    }

    /// The new tokens' keys and values are in the cache already, where `block_table` says: there
    /// are no tensors `key` and `value`. Where the layer rotates, only queries do.
    ///
    /// A sequence of a causal call may have fewer keys than tokens then, so that `seqlens_k` is
    /// less than 0, or with [`total_lengths`](Self::total_lengths) less than its tokens: as many of
    /// its first tokens see no key. Their output is 0, and their log-sum-exp minus infinity.
    pub const fn appended(self) -> Self {
        Self { appended: true, ..self }
    }

    /// `lse`, float32 of shape (heads, tokens), receives natural logarithms of the softmax
    /// denominators. Prompts' rows are gathered for that.
    pub const fn log_sum_exp(self) -> Self {
        Self { lse: true, ..self }
    }

    /// The int64 tensor `tree_mask`, of shape (tokens), says which new tokens of its sequence each
    /// new token sees: number `j` where bit `j` is set, itself and later ones too. All see the keys
    /// before them. So a tree of drafts is checked at once, of up to 64 tokens a sequence, which
    /// [`most_tokens`](Self::most_tokens) promises. A token that sees no key at all has output 0.
    ///
    /// New tokens rotate, and are appended, one behind the other; whose positions are others come
    /// rotated.
    pub const fn tree_mask(self) -> Self {
        Self { tree_mask: true, ..self }
    }
}

impl Layer {
    /// Checks a call over a paged KV cache.
    ///
    /// # Errors
    /// As [`dense`](Self::dense). Paged calls take no smooth softmax.
    pub fn paged(&self, call: Paged) -> Result<Problem> {
        self.check_paged(&call)?;
        let (pages, rows, longest) = (call.pages(), call.most_rows(), call.most_keys());
        let problem = Problem::new(ProblemFields {
            batch: call.sequences,
            q_len: rows,
            new_len: rows,
            total_len: longest,
            past_capacity: longest,
            capacity: longest,
            phase: if rows == 1 { Phase::TokenGeneration } else { Phase::SubsequentPrompt },
            pages: Some(pages),
            packed: call.packed,
            strided: call.strided,
            window: self.window_within(longest),
            causal: self.causal && !call.tree_mask,
            tree_mask: call.tree_mask,
            lse: call.lse,
            ..self.fields("PagedAttention", 8)?
        })?;
        Ok(if call.appended { problem.appended() } else { problem })
    }

    /// Errs where parts of the layer and of the call contradict each other.
    fn check_paged(&self, call: &Paged) -> Result<()> {
        call.check_bounds()?;
        if !self.causal && call.tree_mask {
            return Err(Error::invalid("causal", "false", "true, with tree_mask"));
        }
        if call.tree_mask && self.window.is_some() {
            return Err(Error::invalid("window", "one", "none, with tree_mask"));
        }
        if call.sequences == 0 && call.tokens > 0 {
            return Err(Error::invalid("sequences", 0, "1 or more, as there are tokens"));
        }
        let brings = [
            ("packed", call.packed),
            ("slot_mapping", call.slots),
            ("qk_norm", self.qk_norm.is_some()),
        ];
        match brings.into_iter().find(|(_, has)| call.appended && *has) {
            Some((argument, _)) => {
                Err(Error::invalid(argument, "one", "none, as nothing is appended"))
            }
            None => Ok(()),
        }
    }
}

impl Paged {
    /// Errs where bounds contradict each other.
    fn check_bounds(&self) -> Result<()> {
        let (most, longest, rows) = (self.most_tokens, self.longest, self.rows_of_blocks());
        if most > self.tokens {
            let allowed = format!("up to {}, the tokens of the call", self.tokens);
            return Err(Error::invalid("most_tokens", most, allowed));
        }
        if longest > rows {
            let (blocks, size) = (self.blocks_per_sequence, self.block_size);
            let allowed = format!("up to {rows}, the rows of {blocks} blocks of {size}");
            return Err(Error::invalid("longest", longest, allowed));
        }
        // Where the cache has all tokens already, some of them may see no key.
        if longest > 0 && most > longest && !self.appended {
            let allowed = format!("up to {longest}, the longest sequence after the call");
            return Err(Error::invalid("most_tokens", most, allowed));
        }
        Ok(())
    }

    fn rows_of_blocks(&self) -> usize {
        self.blocks_per_sequence.saturating_mul(self.block_size)
    }

    fn pages(&self) -> Pages {
        Pages {
            tokens: self.tokens,
            blocks: self.blocks,
            block_size: self.block_size,
            per_sequence: self.blocks_per_sequence,
            slots: self.slots,
            counts_new: self.counts_new,
        }
    }

    /// New tokens of a sequence at most.
    fn most_rows(&self) -> usize {
        if self.most_tokens == 0 { self.tokens } else { self.most_tokens }
    }

    /// Tokens of a sequence at most.
    fn most_keys(&self) -> usize {
        if self.longest == 0 { self.rows_of_blocks().max(1) } else { self.longest }
    }
}
