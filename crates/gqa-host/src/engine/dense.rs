//! Calls in which each sequence has a KV cache of its own.

use super::{Layer, f32s, i32s};
use crate::op::Shapes;
use crate::{CacheBinding, DType, Error, Layout, Problem, Result, RowStrides, Strided, TensorDesc};

/// A call of sequences with the same number of new tokens, which are appended in place to a KV
/// cache of shape (batch, KV heads, capacity, size): `present_key` and `present_value`.
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
    layout: Layout,
    strided: Strided,
    packed: bool,
    positions: bool,
    bias: Option<[bool; 2]>,
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

    /// Up to `rows` tokens of each of `batch` sequences that begin with this call. Those of shorter
    /// sequences are padded at the right.
    pub const fn prefill(batch: usize, rows: usize, capacity: usize) -> Self {
        Self { longest: rows, ..Self::chunk(batch, rows, capacity) }
    }

    /// `rows` more tokens of each of `batch` sequences: chunked prefill, speculative decoding.
    pub const fn chunk(batch: usize, rows: usize, capacity: usize) -> Self {
        Self {
            batch,
            rows,
            new_rows: rows,
            capacity,
            longest: capacity,
            layout: Layout::Bsnh,
            strided: Strided { query: None, key: None, value: None, output: None },
            packed: false,
            positions: false,
            bias: None,
            tree_mask: false,
            lse: false,
            float32_output: false,
            float8_output: false,
            prefetch_cache: false,
            float8_products: false,
        }
    }

    /// No sequence is longer than that after the call. Where it is not said, none is longer than
    /// the cache, and kernels are chosen for that.
    pub const fn longest(self, tokens: usize) -> Self {
        Self { longest: tokens, ..self }
    }

    /// The cache holds the call's tokens already, as where layers share a cache: there is no `key`
    /// and no `value`.
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

    /// Key and value have these strides, likewise.
    pub const fn key_value_strides(mut self, strides: RowStrides) -> Self {
        (self.strided.key, self.strided.value) = (Some(strides), Some(strides));
        self
    }

    /// Output has these strides, likewise.
    pub const fn output_strides(mut self, strides: RowStrides) -> Self {
        self.strided.output = Some(strides);
        self
    }

    /// Query, key and value are one tensor, `query`, of shape
    /// (batch, rows, (heads + 2 · KV heads) · size): all queries of a token, its keys, its values.
    pub const fn packed(self) -> Self {
        Self { packed: true, ..self }
    }

    /// The int64 tensor `position_ids`, of shape (batch, rows), says where tokens rotate to.
    pub const fn explicit_positions(self) -> Self {
        Self { positions: true, ..self }
    }

    /// `attention_bias`, of shape (batch or 1, heads or 1, rows, longest), is added to scores.
    pub const fn bias(self, per_sequence: bool, per_head: bool) -> Self {
        Self { bias: Some([per_sequence, per_head]), ..self }
    }

    /// The int64 tensor `tree_mask`, of shape (batch, rows), says which new tokens of its sequence
    /// each new token sees: number `j` where bit `j` is set, itself and later ones too. All see the
    /// keys before them. So a tree of drafts is checked at once, of up to 64 tokens. A token that
    /// sees no key at all has output 0. [Positions](Self::explicit_positions) are those of the
    /// tree, where the layer rotates.
    pub const fn tree_mask(self) -> Self {
        Self { tree_mask: true, ..self }
    }

    /// `lse`, float32 of shape (batch, heads, rows), receives natural logarithms of the softmax
    /// denominators.
    pub const fn log_sum_exp(self) -> Self {
        Self { lse: true, ..self }
    }

    /// `output` is float32 whatever the layer's element type.
    pub const fn float32_output(self) -> Self {
        Self { float32_output: true, ..self }
    }

    /// `output` is float8e4m3fn, and the float32 tensor `output_scale`, of one element, times it is
    /// meant.
    pub const fn float8_output(self) -> Self {
        Self { float8_output: true, ..self }
    }

    /// Promises that the kernel launched just before this call writes nothing that the call reads
    /// but query, key and value: the KV cache is fetched while that kernel still runs (programmatic
    /// dependent launch). If the promise is broken, results may be wrong.
    pub const fn prefetch_cache(self) -> Self {
        Self { prefetch_cache: true, ..self }
    }

    /// Over a cache of float8e4m3fn, products may be of float8, too.
    pub const fn float8_products(self) -> Self {
        Self { float8_products: true, ..self }
    }
}

impl Layer {
    /// Checks a call.
    ///
    /// # Errors
    /// Where a number of the layer or of the call is not what kernels take; the error names the
    /// tensor or the number by its ONNX name.
    pub fn dense(&self, call: Dense) -> Result<Problem> {
        let Dense { batch, rows, capacity, longest, .. } = call;
        let heads = self.heads;
        if call.new_rows == 0 && call.packed {
            return Err(Error::invalid("query", "packed, nothing new", "one of the two"));
        }
        let query_heads = if call.packed {
            heads.kv.saturating_mul(2).saturating_add(heads.query)
        } else {
            heads.query
        };
        let query = Rows::new(call.layout, batch, rows, query_heads, heads.size);
        let new = Rows::new(call.layout, batch, call.new_rows, heads.kv, heads.size);
        let cache = [batch, heads.kv, capacity, self.cached_size()];
        let (rotations, scales) = (self.rotations(), self.scales(cache));
        let cache = TensorDesc { dtype: self.cache_dtype(), shape: &cache };
        let rotations = rotations.as_ref().map(|shape| self.desc(shape));
        let scales = scales.as_ref().map(|shape| f32s(shape));
        let positions = [batch, rows];
        let extent = |own, n| if own { n } else { 1 };
        let bias = call.bias.map(|[sequence, head]| {
            [extent(sequence, batch), extent(head, heads.query), rows, longest]
        });
        let (sink, norm) = ([heads.query], [heads.size]);
        let norm = self.qk_norm.map(|_| self.desc(&norm));
        let key = (!call.packed).then(|| self.desc(new.shape()));
        let lengths = [batch];
        let shapes = Shapes {
            key,
            value: key,
            past_key: Some(cache),
            past_value: Some(cache),
            cos_cache: rotations,
            sin_cache: rotations,
            position_ids: call
                .positions
                .then_some(TensorDesc { dtype: DType::I64, shape: &positions }),
            attention_bias: bias.as_ref().map(|shape| self.desc(shape)),
            head_sink: self.has_head_sink().then(|| self.desc(&sink)),
            k_scale: scales,
            v_scale: scales,
            q_norm_weight: norm,
            k_norm_weight: norm,
            output_scale: call.float8_output.then_some(f32s(&[1])),
            ..Shapes::new(self.desc(query.shape()), i32s(&lengths), longest)
        };
        let problem = self
            .operator()
            .layout(call.layout)
            .log_sum_exp(call.lse)
            .float32_output(call.float32_output)
            .prefetch_cache(call.prefetch_cache)
            .float8_products(call.float8_products)
            .problem_from_shapes(&shapes, CacheBinding::Shared)?;
        let problem = if call.tree_mask { problem.with_tree_mask()? } else { problem };
        problem.with_strides(call.strided)
    }
}

/// Shape of query, key or value.
struct Rows {
    dims: [usize; 4],
    rank: usize,
}

impl Rows {
    fn new(layout: Layout, batch: usize, rows: usize, heads: usize, size: usize) -> Self {
        match layout {
            Layout::Bsnh => Self { dims: [batch, rows, heads.saturating_mul(size), 0], rank: 3 },
            Layout::Bnsh => Self { dims: [batch, heads, rows, size], rank: 4 },
        }
    }

    fn shape(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}
