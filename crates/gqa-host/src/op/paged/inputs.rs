//! The inputs of PagedAttention.

use super::Bounds;
use crate::op::schema::Kind::{Always, Cache, Element};
use crate::op::schema::{Input, input, names, numbers};
use crate::op::validate::row_scales;
use gqa_plan::plan::TensorId::{self, *};
use gqa_tensor::{DType, Tensor, TensorDesc};

/// The operator's inputs under ONNX Runtime's names, checked when the operator is applied. There
/// are B sequences with num_tokens new tokens in all.
#[derive(Clone, Copy, Debug)]
pub struct PagedInputs<'a> {
    /// (num_tokens, N·H), or packed (num_tokens, (N + 2·Nk)·H)
    pub query: &'a Tensor,
    /// (num_tokens, Nk·H); absent: packed
    pub key: Option<&'a Tensor>,
    /// As key; absent in the latent layout, too
    pub value: Option<&'a Tensor>,
    /// int32 (B + 1): the first token of each sequence, then num_tokens (cu_seqlens)
    pub cumulative_sequence_length: &'a Tensor,
    /// int32 (B): tokens of each sequence before this call
    pub past_seqlens: &'a Tensor,
    /// int32 (B, blocks of a sequence): the block table
    pub block_table: &'a Tensor,
    /// (max positions, rotary_dim/2)
    pub cos_cache: Option<&'a Tensor>,
    /// As cos_cache
    pub sin_cache: Option<&'a Tensor>,
    /// int32 (num_tokens): the cache row of each token, counted through all blocks, or -1: not
    /// written. Absent: block_table and the token's position determine it
    pub slot_mapping: Option<&'a Tensor>,
    /// (N)
    pub head_sink: Option<&'a Tensor>,
    /// (H): QK-norm weight: each head of query is divided by its root mean square and multiplied by
    /// this, before RoPE
    pub q_norm_weight: Option<&'a Tensor>,
    /// (H): the same for key
    pub k_norm_weight: Option<&'a Tensor>,
    /// float32, finite and not 0: one for all keys in a quantized cache, or (Nk·H) in any shape
    pub k_scale: Option<&'a Tensor>,
    /// The same for values
    pub v_scale: Option<&'a Tensor>,
    /// int32 (2) or (3): bounds on the new tokens and on the length of a sequence; and the least
    /// length that the longest sequence may have, which is checked and not used. 0: not known
    pub attention_metadata: Option<&'a Tensor>,
}

impl<'a> PagedInputs<'a> {
    /// The required inputs; set the optional ones as fields.
    pub fn new(
        query: &'a Tensor,
        cumulative_sequence_length: &'a Tensor,
        past_seqlens: &'a Tensor,
        block_table: &'a Tensor,
    ) -> Self {
        Self {
            query,
            key: None,
            value: None,
            cumulative_sequence_length,
            past_seqlens,
            block_table,
            cos_cache: None,
            sin_cache: None,
            slot_mapping: None,
            head_sink: None,
            q_norm_weight: None,
            k_norm_weight: None,
            k_scale: None,
            v_scale: None,
            attention_metadata: None,
        }
    }
}

impl PagedInputs<'_> {
    /// In the order of ONNX Runtime's nodes.
    pub const ONNX: [Input; 17] = [
        input("query", Query, Element).required(),
        input("key", Key, Element),
        input("value", TensorId::Value, Element),
        input("key_cache", PresentKey, Cache).required(),
        input("value_cache", PresentValue, Cache),
        input("cumulative_sequence_length", CumulativeSequenceLength, Always(DType::I32))
            .required(),
        input("past_seqlens", SeqlensK, Always(DType::I32)).required(),
        input("block_table", BlockTable, Always(DType::I32)).required(),
        input("cos_cache", CosCache, Element),
        input("sin_cache", SinCache, Element),
        input("slot_mapping", SlotMapping, Always(DType::I32)),
        input("head_sink", HeadSink, Element),
        input("q_norm_weight", QNormWeight, Element),
        input("k_norm_weight", KNormWeight, Element),
        input("k_scale", KScale, Always(DType::F32)),
        input("v_scale", VScale, Always(DType::F32)),
        numbers("attention_metadata"),
    ];

    /// Their names.
    pub const NAMES: [&'static str; 17] = names(&Self::ONNX);
}

/// A paged KV cache: (num_blocks, block_size, Nk, H) each, or H/2 for 4-bit values.
#[derive(Clone, Debug, PartialEq)]
pub struct PagedCache {
    /// Rotated keys.
    pub key: Tensor,
    /// Values; absent in the latent layout, where they are a part of the keys.
    pub value: Option<Tensor>,
    /// Per-token k_scale and v_scale, float32 (num_blocks, block_size, Nk); the inputs of these
    /// names are then absent.
    pub scales: Option<[Tensor; 2]>,
}

/// Types and shapes of the inputs, under the names in [`PagedInputs`]: for tensors in GPU memory,
/// whose contents the host does not read.
#[derive(Clone, Copy, Debug)]
pub struct PagedShapes<'a> {
    /// query, or packed QKV
    pub query: TensorDesc<'a>,
    /// key
    pub key: Option<TensorDesc<'a>>,
    /// value
    pub value: Option<TensorDesc<'a>>,
    /// key_cache
    pub key_cache: TensorDesc<'a>,
    /// value_cache
    pub value_cache: Option<TensorDesc<'a>>,
    /// cumulative_sequence_length
    pub cumulative_sequence_length: TensorDesc<'a>,
    /// past_seqlens
    pub past_seqlens: TensorDesc<'a>,
    /// block_table
    pub block_table: TensorDesc<'a>,
    /// cos_cache
    pub cos_cache: Option<TensorDesc<'a>>,
    /// sin_cache
    pub sin_cache: Option<TensorDesc<'a>>,
    /// slot_mapping
    pub slot_mapping: Option<TensorDesc<'a>>,
    /// head_sink
    pub head_sink: Option<TensorDesc<'a>>,
    /// q_norm_weight
    pub q_norm_weight: Option<TensorDesc<'a>>,
    /// k_norm_weight
    pub k_norm_weight: Option<TensorDesc<'a>>,
    /// k_scale
    pub k_scale: Option<TensorDesc<'a>>,
    /// v_scale
    pub v_scale: Option<TensorDesc<'a>>,
    /// The contents of attention_metadata.
    pub bounds: Bounds,
}

impl<'a> PagedShapes<'a> {
    /// Of tensors in host memory.
    pub(super) fn of(
        inputs: &PagedInputs<'a>,
        cache: &'a super::PagedCache,
        bounds: Bounds,
    ) -> Self {
        let desc = |tensor: Option<&'a Tensor>| tensor.map(Tensor::desc);
        let [k_scale, v_scale] = row_scales(cache.scales.as_ref());
        Self {
            query: inputs.query.desc(),
            key: desc(inputs.key),
            value: desc(inputs.value),
            key_cache: cache.key.desc(),
            value_cache: desc(cache.value.as_ref()),
            cumulative_sequence_length: inputs.cumulative_sequence_length.desc(),
            past_seqlens: inputs.past_seqlens.desc(),
            block_table: inputs.block_table.desc(),
            cos_cache: desc(inputs.cos_cache),
            sin_cache: desc(inputs.sin_cache),
            slot_mapping: desc(inputs.slot_mapping),
            head_sink: desc(inputs.head_sink),
            q_norm_weight: desc(inputs.q_norm_weight),
            k_norm_weight: desc(inputs.k_norm_weight),
            k_scale: desc(inputs.k_scale.or(k_scale)),
            v_scale: desc(inputs.v_scale.or(v_scale)),
            bounds,
        }
    }
}
