//! Calls over a paged KV cache.

use super::Layer;
use crate::problem::{Pages, Phase, Problem, ProblemFields, RowStrides, Strided};
use gqa_tensor::{Error, Result};

/// A call over a paged KV cache, with any number of new tokens in each sequence. The cache,
/// `present_key` and `present_value`, has shape (blocks, block size, KV heads, size). A
/// [latent](Layer::latent) layer has `key` and `present_key` only.
///
/// The new tokens of all sequences are concatenated (varlen): `query` has shape (tokens, heads ·
/// size), `key` and `value` (tokens, KV heads · size). The GPU reads lengths and block tables from
/// int32 tensors: `cumulative_sequence_length`, of shape (sequences + 1), has the first token of
/// each sequence, and then the number of tokens (cu_seqlens); `seqlens_k`, of shape (sequences),
/// the number of tokens of each sequence before the call; `block_table`, of shape (sequences,
/// blocks of a sequence), the cache blocks of each sequence.
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
    one_each: bool,
    scheduled: bool,
    consecutive: bool,
    value_size: Option<usize>,
}

impl Paged {
    /// `tokens` new tokens of `sequences` sequences in all, over `blocks` blocks of `block_size`
    /// rows, at most `blocks_per_sequence` of them for one sequence. A sequence may have no new
    /// token, and padding tokens may follow the last sequence.
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
            strided: Strided::NONE,
            lse: false,
            tree_mask: false,
            one_each: false,
            scheduled: false,
            consecutive: false,
            value_size: None,
        }
    }

    /// Attention of `tokens` tokens of `sequences` sequences over concatenated keys and values
    /// without a cache (varlen). `present_key` has shape (`key_rows`, 1, KV heads, size), and
    /// `present_value` (`key_rows`, 1, KV heads, [value size](Self::value_size)). The int32 tensor
    /// `block_table`, of shape (sequences, 1), has the row of each sequence's first key: cu_seqlens
    /// of the keys without the last element. `seqlens_k` has the number of keys of each sequence
    /// ([`total_lengths`](Self::total_lengths)), which may be more or less than its tokens. Nothing
    /// is [appended](Self::appended). The last token has the position of the last key.
    ///
    /// `hopper_paged` and `blackwell_paged` read keys and values in place, causal or not, and write
    /// 0 to rows of `output` that belong to no sequence, and -inf to their log-sum-exps. Other
    /// kernels leave such rows unwritten, and read a copy, which requires equal strides of keys and
    /// values.
    pub const fn in_rows(sequences: usize, tokens: usize, key_rows: usize) -> Self {
        // A sequence with few keys may have many tokens.
        let rows = if key_rows > tokens { key_rows } else { tokens };
        let call = Self::new(sequences, tokens, [key_rows, 1, rows]);
        Self { consecutive: true, appended: true, counts_new: true, ..call }
    }

    /// In a call [in rows](Self::in_rows), heads of `present_value` and `output` have this many
    /// elements, rather than as many as the layer's queries and keys: 128 beside 192 in prefill of
    /// multi-head latent attention.
    pub const fn value_size(self, size: usize) -> Self {
        Self { value_size: Some(size), ..self }
    }

    /// In a call [in rows](Self::in_rows), strides of heads (`head`) and rows (`row`) of
    /// `present_key` and of `present_value` in elements, multiples of 16 bytes: so the two may be
    /// parts of one tensor. `batch` is not used.
    pub const fn row_strides(mut self, [keys, values]: [RowStrides; 2]) -> Self {
        self.strided.pages = Some(RowStrides { batch: keys.row, ..keys });
        self.strided.page_values = Some(RowStrides { batch: values.row, ..values });
        self
    }

    /// One new token of each sequence; `cumulative_sequence_length` is not read.
    pub const fn decode(sequences: usize, cache: [usize; 3]) -> Self {
        Self { most_tokens: 1, one_each: true, ..Self::new(sequences, sequences, cache) }
    }

    /// An upper bound of the new tokens of a sequence, which sizes launches and scratch memory. By
    /// default, or if 0, one sequence may have all tokens, or as many as its blocks have rows. A
    /// bound above these rows is refused.
    pub const fn most_tokens(self, tokens: usize) -> Self {
        Self { most_tokens: tokens, ..self }
    }

    /// An upper bound of the length of a sequence after the call. By default, or if 0, the rows of
    /// its blocks.
    pub const fn longest(self, tokens: usize) -> Self {
        Self { longest: tokens, ..self }
    }

    /// Query, key and value are one tensor, `query`, of shape
    /// (tokens, (heads + 2 · KV heads) · size).
    pub const fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    /// Strides of the query's heads (`head`) and tokens (`row`) in elements, multiples of 16 bytes,
    /// instead of a contiguous query. `batch` is not used.
    pub const fn query_strides(mut self, strides: RowStrides) -> Self {
        self.strided.query = Some(strides);
        self
    }

    /// The same for key and value.
    pub const fn key_value_strides(mut self, strides: RowStrides) -> Self {
        (self.strided.key, self.strided.value) = (Some(strides), Some(strides));
        self
    }

    /// The strides of both `present_key` and `present_value`, in elements; `batch` is the stride of
    /// blocks. Strides are multiples of 16 bytes, below 2^32 bytes. So the two may be views of one
    /// allocation, and a block may be (row, head) or (head, row). Caches with per-token scales must
    /// be contiguous.
    pub const fn cache_strides(mut self, strides: RowStrides) -> Self {
        self.strided.pages = Some(strides);
        self
    }

    /// The int32 tensor `slot_mapping`, of shape (tokens), has the cache row of each token, counted
    /// through all blocks; -1: the token is not written.
    pub const fn slot_mapping(self) -> Self {
        Self { slots: true, ..self }
    }

    /// `seqlens_k` has the length of each sequence after the call, including the new tokens, rather
    /// than before it.
    pub const fn total_lengths(self) -> Self {
        Self { counts_new: true, ..self }
    }

    /// The cache already holds the new tokens, at their places in `block_table`: the call has no
    /// tensors `key` and `value`. RoPE applies to queries only.
    ///
    /// A sequence may then have fewer keys than tokens: `seqlens_k` is negative, or with
    /// [`total_lengths`](Self::total_lengths) less than the number of its tokens. In a causal call
    /// its first tokens have no visible key: their output is 0, and their log-sum-exp -inf. In a
    /// call that is not causal and has no RoPE, they see all keys. Its row of `block_table` must
    /// have blocks for as many rows as tokens, -1 where there are no keys: tokens beyond these are
    /// not computed.
    pub const fn appended(self) -> Self {
        Self { appended: true, ..self }
    }

    /// `lse`, float32 of shape (heads, tokens), receives natural logarithms of the softmax
    /// denominators.
    pub const fn log_sum_exp(self) -> Self {
        Self { lse: true, ..self }
    }

    /// The int64 tensor `tree_mask`, of shape (tokens), is a mask among the new tokens: a token
    /// attends to new token `j` of its sequence if bit `j` of its element is set, also to itself
    /// and to later tokens. All tokens attend to the past. One call verifies a tree of up to 64
    /// draft tokens per sequence; [`most_tokens`](Self::most_tokens) must say so. The output of a
    /// token without keys is 0.
    ///
    /// RoPE uses consecutive positions, in the order in which tokens are appended; rotate tokens
    /// before the call if their positions in the tree differ.
    pub const fn tree_mask(self) -> Self {
        Self { tree_mask: true, ..self }
    }

    /// The int32 tensor `schedule`, of the shape in its [`TensorSpec`](crate::plan::TensorSpec),
    /// says how the work of decode steps or of split kernels is divided among CTAs.
    /// [`Plan::schedule`](crate::plan::Plan::schedule) writes it for these lengths, once for all
    /// layers of a step. Without it every CTA computes the division itself, which takes longer the
    /// more sequences there are. A call whose plan divides no work does not read the tensor.
    ///
    /// A schedule for other lengths, another layer or another GPU affects the time but not the
    /// results. The program must not write to the tensor: forged contents can give wrong results
    /// and leave counters of the workspace nonzero, but no access outside of the call's memory.
    pub const fn scheduled(self) -> Self {
        Self { scheduled: true, ..self }
    }
}

impl Layer {
    /// Checks a call over a paged KV cache.
    ///
    /// # Errors
    /// As [`dense`](Self::dense). Smooth softmax is not supported.
    pub fn paged(&self, call: Paged) -> Result<Problem> {
        self.check_paged(&call)?;
        let (pages, rows, longest) = (call.pages(), call.most_rows(), call.most_keys());
        let fields = self.fields("PagedAttention", 8)?;
        let problem = Problem::new(ProblemFields {
            v_head_size: call.value_size.unwrap_or(fields.v_head_size),
            batch: call.sequences,
            q_len: rows,
            new_len: if call.consecutive { 0 } else { rows },
            total_len: longest,
            past_capacity: longest,
            capacity: longest,
            phase: if rows == 1 { Phase::TokenGeneration } else { Phase::SubsequentPrompt },
            pages: Some(pages),
            packed: call.packed,
            strided: self.strided(call.strided),
            window: self.window_within(longest),
            causal: self.causal && !call.tree_mask,
            tree_mask: call.tree_mask,
            lse: call.lse,
            ..fields
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
        if call.value_size.is_some() && !call.consecutive {
            return Err(Error::invalid("value_size", "one", "none, except in rows"));
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
        // Tokens that have no row in their sequence's blocks are not computed. Without blocks the
        // problem is refused.
        if rows > 0 && most > rows {
            let (blocks, size) = (self.blocks_per_sequence, self.block_size);
            let allowed = format!("up to {rows}, the rows of {blocks} blocks of {size}");
            return Err(Error::invalid("most_tokens", most, allowed));
        }
        // Where the cache already holds the tokens, some of them may have no visible key.
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
            one_each: self.one_each && self.most_tokens == 1,
            scheduled: self.scheduled,
            consecutive: self.consecutive,
        }
    }

    /// New tokens of a sequence at most.
    fn most_rows(&self) -> usize {
        match self.most_tokens {
            0 => self.tokens.min(self.rows_of_blocks().max(1)),
            most => most,
        }
    }

    /// Tokens of a sequence at most.
    fn most_keys(&self) -> usize {
        match self.longest {
            0 => self.rows_of_blocks().max(1),
            // Kernels have as many rows for a sequence's tokens.
            longest if self.consecutive => longest.max(self.most_rows()),
            longest => longest.max(self.most_tokens.min(self.rows_of_blocks())),
        }
    }
}
