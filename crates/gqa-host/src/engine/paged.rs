//! Calls over a paged KV cache.

use super::{Layer, count, f32s, i32s};
use crate::op::{Bounds, PagedAttention, PagedShapes};
use crate::{Error, Problem, Result, RowStrides, Sink, Strided, TensorDesc};

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
    /// rows, at most `blocks_per_sequence` of them for one sequence.
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
    /// it; where it is not said, one may have them all.
    pub const fn most_tokens(self, tokens: usize) -> Self {
        Self { most_tokens: tokens, ..self }
    }

    /// No sequence is longer than that after the call; where it is not said, none is longer than
    /// its blocks are.
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
        let heads = self.heads;
        if self.sink == Sink::Zero {
            let allowed = "Sink::None or Sink::PerHead over a paged KV cache";
            return Err(Error::invalid("sink", "Sink::Zero", allowed));
        }
        let width = |heads: usize| heads.saturating_mul(self.heads.size);
        let all = heads.kv.saturating_mul(2).saturating_add(heads.query);
        let query = [call.tokens, width(if call.packed { all } else { heads.query })];
        let new = [call.tokens, width(heads.kv)];
        let key = (!call.packed).then(|| self.desc(&new));
        let cache = [call.blocks, call.block_size, heads.kv, self.cached_size()];
        let (rotations, scales) = (self.rotations(), self.scales(cache));
        let cache = TensorDesc { dtype: self.cache_dtype(), shape: &cache };
        let rotations = rotations.as_ref().map(|shape| self.desc(shape));
        let scales = scales.as_ref().map(|shape| f32s(shape));
        let (sink, norm) = ([heads.query], [heads.size]);
        let norm = self.qk_norm.map(|_| self.desc(&norm));
        let starts = [call.sequences.saturating_add(1)];
        let operator = self.paged_operator().log_sum_exp(call.lse);
        let problem = operator.problem_from_shapes(&PagedShapes {
            query: self.desc(&query),
            key,
            value: key,
            key_cache: cache,
            value_cache: cache,
            cumulative_sequence_length: i32s(&starts),
            past_seqlens: i32s(&[call.sequences]),
            block_table: i32s(&[call.sequences, call.blocks_per_sequence]),
            cos_cache: rotations,
            sin_cache: rotations,
            slot_mapping: call.slots.then_some(i32s(&[call.tokens])),
            head_sink: self.has_head_sink().then(|| self.desc(&sink)),
            q_norm_weight: norm,
            k_norm_weight: norm,
            k_scale: scales,
            v_scale: scales,
            bounds: Bounds { query_rows: call.most_tokens, keys: call.longest },
        })?;
        let problem = if call.counts_new { problem.with_total_lengths()? } else { problem };
        let problem = if call.tree_mask { problem.with_tree_mask()? } else { problem };
        let problem = if call.appended { self.appended(&problem)? } else { problem };
        problem.with_strides(call.strided)
    }

    /// The call when its new rows are in the cache already.
    fn appended(&self, problem: &Problem) -> Result<Problem> {
        let brings = [
            ("packed", problem.packed),
            ("slot_mapping", problem.pages.is_some_and(|pages| pages.slots)),
            ("qk_norm", self.qk_norm.is_some()),
        ];
        match brings.into_iter().find(|(_, has)| *has) {
            Some((argument, _)) => {
                Err(Error::invalid(argument, "one", "none, as nothing is appended"))
            }
            None => Ok(problem.appended()),
        }
    }

    /// The operator that computes the layer over a paged KV cache.
    fn paged_operator(&self) -> PagedAttention {
        let dtype = if self.bits() == 4 { "int4" } else { "" };
        PagedAttention::new(count(self.heads.query), count(self.heads.kv))
            .scale(self.scale.unwrap_or_default())
            .softcap(self.softcap.unwrap_or_default())
            .local_window_size(self.local_window())
            .is_causal(self.causal.into())
            .do_rotary(self.rope.is_some())
            .rotary_interleaved(self.rope.is_some_and(|rope| rope.interleaved))
            .qk_norm_epsilon(self.qk_norm.unwrap_or(1e-6))
            .k_quant_type(self.quant_type())
            .v_quant_type(self.quant_type())
            .k_cache_dtype(dtype)
            .v_cache_dtype(dtype)
    }
}
