//! Calls over contiguous KV caches, one for each sequence.

use super::{Layer, phase};
use crate::problem::{Bias, Layout, Phase, Problem, ProblemFields, Rotary, RowStrides, Strided};
use gqa_tensor::{DType, Error, Result};

/// A call in which all sequences have the same number of new tokens. These are appended in place to
/// a KV cache of shape (batch, KV heads, capacity, size): `present_key` and `present_value`. A
/// [latent](Layer::latent) layer has `key` and `present_key` only.
///
/// `query` has shape (batch, rows, heads · size), `key` and `value` (batch, rows, KV heads · size),
/// unless [`packed`](Self::packed) or in another [`layout`](Self::layout). The int32 tensor
/// `seqlens_k`, of shape (batch), has the index of each sequence's last token after the call. It
/// is read on the GPU, so that one plan, and one CUDA graph, serves all decode steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dense {
    batch: usize,
    rows: usize,
    new_rows: usize,
    capacity: usize,
    longest: usize,
    mean: Option<usize>,
    layout: Layout,
    strided: Strided,
    packed: bool,
    positions: bool,
    bias: Option<[bool; 2]>,
    padded: bool,
    tree_mask: bool,
    lse: bool,
    float32_output: bool,
    float8_output: bool,
    prefetch_cache: bool,
    float8_products: bool,
}

impl Dense {
    /// One new token of each of `batch` sequences.
    pub const fn decode(batch: usize, capacity: usize) -> Self {
        Self::chunk(batch, 1, capacity)
    }

    /// Up to `rows` tokens of each of `batch` sequences that begin with this call. Shorter
    /// sequences are padded at the right.
    pub const fn prefill(batch: usize, rows: usize, capacity: usize) -> Self {
        Self { longest: rows, ..Self::chunk(batch, rows, capacity) }
    }

    /// `rows` further tokens of each of `batch` sequences: chunked prefill, speculative decoding.
    pub const fn chunk(batch: usize, rows: usize, capacity: usize) -> Self {
        Self {
            batch,
            rows,
            new_rows: rows,
            capacity,
            longest: capacity,
            mean: None,
            layout: Layout::Bsnh,
            strided: Strided::NONE,
            packed: false,
            positions: false,
            bias: None,
            padded: false,
            tree_mask: false,
            lse: false,
            float32_output: false,
            float8_output: false,
            prefetch_cache: false,
            float8_products: false,
        }
    }

    /// An upper bound of the length of every sequence after the call, for which kernels are chosen.
    /// The default is the cache's capacity.
    pub const fn longest(self, tokens: usize) -> Self {
        Self { longest: tokens, ..self }
    }

    /// Expects that sequences have so many tokens on average after the call, fewer than the
    /// [longest](Self::longest). Where that pays, a decode step divides the keys of all sequences
    /// among the SMs by their lengths, as over a paged KV cache. Other lengths cost time only; each
    /// mean has a plan of its own.
    pub const fn mean(self, tokens: usize) -> Self {
        Self { mean: Some(tokens), ..self }
    }

    /// The cache already holds the call's tokens, as in models whose layers share a cache: the call
    /// has no `key` and no `value`.
    pub const fn nothing_new(self) -> Self {
        Self { new_rows: 0, ..self }
    }

    /// Order of the dimensions of query, key, value and output.
    pub const fn layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// Query has these strides, in elements, instead of being contiguous: multiples of 16 bytes.
    pub const fn query_strides(mut self, strides: RowStrides) -> Self {
        self.strided.query = Some(strides);
        self
    }

    /// The same for key and value.
    pub const fn key_value_strides(mut self, strides: RowStrides) -> Self {
        (self.strided.key, self.strided.value) = (Some(strides), Some(strides));
        self
    }

    /// The same for output.
    pub const fn output_strides(mut self, strides: RowStrides) -> Self {
        self.strided.output = Some(strides);
        self
    }

    /// Query, key and value are one tensor, `query`, of shape
    /// (batch, rows, (heads + 2 · KV heads) · size): a token's queries, then its keys and values.
    pub const fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    /// The int64 tensor `position_ids`, of shape (batch, rows), has the RoPE positions of the
    /// tokens.
    pub const fn explicit_positions(self) -> Self {
        Self { positions: true, ..self }
    }

    /// `attention_bias`, of shape (batch or 1, heads or 1, rows, longest), is added to scores.
    pub const fn bias(self, per_sequence: bool, per_head: bool) -> Self {
        Self { bias: Some([per_sequence, per_head]), ..self }
    }

    /// The int32 tensor `query_seqlens`, of shape (batch), has the number of new tokens of each
    /// sequence. The rows after them are padding: their output is 0, and they are not appended. A
    /// sequence with 0 new tokens is idle, and its cache stays as it is. Sequences may be new, or
    /// have tokens from earlier calls; `seqlens_k` counts new tokens but not padding. The cache
    /// must have room for `rows` rows after each sequence's past.
    pub const fn padded(self) -> Self {
        Self { padded: true, ..self }
    }

    /// The int64 tensor `tree_mask`, of shape (batch, rows), is a mask among the new tokens: token
    /// `i` attends to new token `j` of its sequence if bit `j` of element `i` is set, also to
    /// itself and to later tokens. All tokens attend to the past. One call verifies a tree of up to
    /// 64 draft tokens. The output of a token without keys is 0. If the layer has RoPE,
    /// [positions](Self::explicit_positions) must be those in the tree.
    pub const fn tree_mask(self) -> Self {
        Self { tree_mask: true, ..self }
    }

    /// `lse`, float32 of shape (batch, heads, rows), receives natural logarithms of the softmax
    /// denominators.
    pub const fn log_sum_exp(self) -> Self {
        Self { lse: true, ..self }
    }

    /// `output` is float32, for every element type of the layer.
    pub const fn float32_output(self) -> Self {
        Self { float32_output: true, ..self }
    }

    /// `output` is float8e4m3fn, quantized by the float32 tensor `output_scale` of one element:
    /// true output = stored output * output_scale.
    pub const fn float8_output(self) -> Self {
        Self { float8_output: true, ..self }
    }

    /// Promises that the preceding kernel in the stream writes no input of the call except query,
    /// key and value. The KV cache is then prefetched while that kernel still runs (programmatic
    /// dependent launch). If the promise is broken, results may be wrong.
    pub const fn prefetch_cache(self) -> Self {
        Self { prefetch_cache: true, ..self }
    }

    /// Allows float8 matrix products over a float8e4m3fn cache.
    pub const fn float8_products(self) -> Self {
        Self { float8_products: true, ..self }
    }
}

impl Layer {
    /// Checks a call.
    ///
    /// # Errors
    /// Where a value of the layer or of the call is not supported: the error names it as this
    /// module does, as in `heads.kv`, and a tensor by its ONNX name.
    pub fn dense(&self, call: Dense) -> Result<Problem> {
        let Dense { batch, rows, capacity, longest, layout, .. } = call;
        self.check_dense(&call)?;
        let fields = self.fields("GroupQueryAttention", 8)?;
        let explicit = call.positions.then_some(rows);
        Problem::new(ProblemFields {
            out_dtype: call.output_type(self.dtype)?,
            batch,
            q_len: rows,
            new_len: call.new_rows,
            total_len: longest,
            mean_len: call.mean,
            past_capacity: capacity,
            capacity,
            phase: if call.padded { Phase::PaddedChunk } else { phase(rows, longest) },
            packed: call.packed,
            layout,
            strided: self.strided(call.strided),
            rotary: fields.rotary.map(|rotary| Rotary { explicit, ..rotary }),
            window: self.window_within(capacity.max(longest)),
            causal: self.causal && !call.tree_mask,
            bias: call.bias_of_rows(self.heads.query),
            tree_mask: call.tree_mask,
            lse: call.lse,
            prefetch_cache: call.prefetch_cache,
            float8_products: call.float8_products,
            ..fields
        })
    }

    /// Errs where parts of the layer and of the call contradict each other.
    fn check_dense(&self, call: &Dense) -> Result<()> {
        if call.new_rows == 0 && call.packed {
            let allowed = "one of the two: packed tensors have new tokens";
            return Err(Error::invalid("query", "packed() and nothing_new()", allowed));
        }
        let Dense { rows, capacity, longest, .. } = *call;
        if capacity < rows {
            return Err(Error::invalid("capacity", capacity, format!("{rows} rows or more")));
        }
        if !(rows..=capacity).contains(&longest) {
            let allowed = format!("{rows} to {capacity}, the capacity of the cache");
            return Err(Error::invalid("longest", longest, allowed));
        }
        if call.mean.is_some_and(|mean| mean > longest) {
            let allowed = format!("{longest} or less, the tokens of the longest sequence");
            return Err(Error::invalid("mean", call.mean.unwrap_or_default(), allowed));
        }
        if !self.causal && call.tree_mask {
            return Err(Error::invalid("causal", "false", "true, with tree_mask"));
        }
        if let (Some(window), false) = (self.window, self.causal) {
            let allowed = "none, as the layer is bidirectional and each sequence has a cache";
            return Err(Error::invalid("window", window, allowed));
        }
        match self.rope {
            Some(rope) if rope.positions < longest => {
                let allowed = format!("{longest} or more, the tokens of the longest sequence");
                Err(Error::invalid("rope.positions", rope.positions, allowed))
            }
            _ => Ok(()),
        }
    }
}

impl Dense {
    /// The bias, broadcast over sequences and heads or not.
    fn bias_of_rows(&self, heads: usize) -> Option<Bias> {
        self.bias.map(|[per_sequence, per_head]| Bias {
            batch: !per_sequence && self.batch != 1,
            head: !per_head && heads != 1,
            row: false,
            columns: self.longest,
            boolean: false,
        })
    }

    fn output_type(&self, dtype: DType) -> Result<DType> {
        match (self.float32_output, self.float8_output) {
            (true, true) => {
                let allowed = "one of the two";
                Err(Error::invalid("output", "float32_output() and float8_output()", allowed))
            }
            (true, false) => Ok(DType::F32),
            (false, true) => Ok(DType::F8E4M3),
            (false, false) => Ok(dtype),
        }
    }
}
