//! The operator's inputs without their data.

use super::Inputs;
use gqa_tensor::{Tensor, TensorDesc};

/// Types and shapes of the operator's inputs, which is all that the host knows of tensors in GPU
/// memory. ONNX names, as in [`Inputs`].
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'a> {
    /// query, or packed QKV
    pub query: TensorDesc<'a>,
    /// key
    pub key: Option<TensorDesc<'a>>,
    /// value
    pub value: Option<TensorDesc<'a>>,
    /// past_key, or the shared cache
    pub past_key: Option<TensorDesc<'a>>,
    /// As past_key
    pub past_value: Option<TensorDesc<'a>>,
    /// seqlens_k
    pub seqlens_k: TensorDesc<'a>,
    /// The value of total_sequence_length
    pub total_sequence_length: usize,
    /// cos_cache
    pub cos_cache: Option<TensorDesc<'a>>,
    /// sin_cache
    pub sin_cache: Option<TensorDesc<'a>>,
    /// position_ids
    pub position_ids: Option<TensorDesc<'a>>,
    /// attention_bias
    pub attention_bias: Option<TensorDesc<'a>>,
    /// head_sink
    pub head_sink: Option<TensorDesc<'a>>,
    /// k_scale
    pub k_scale: Option<TensorDesc<'a>>,
    /// v_scale
    pub v_scale: Option<TensorDesc<'a>>,
    /// q_norm_weight
    pub q_norm_weight: Option<TensorDesc<'a>>,
    /// k_norm_weight
    pub k_norm_weight: Option<TensorDesc<'a>>,
    /// output_scale
    pub output_scale: Option<TensorDesc<'a>>,
}

impl<'a> Shapes<'a> {
    /// The required inputs; set the optional ones as fields.
    pub fn new(
        query: TensorDesc<'a>,
        seqlens_k: TensorDesc<'a>,
        total_sequence_length: usize,
    ) -> Self {
        Self {
            query,
            key: None,
            value: None,
            past_key: None,
            past_value: None,
            seqlens_k,
            total_sequence_length,
            cos_cache: None,
            sin_cache: None,
            position_ids: None,
            attention_bias: None,
            head_sink: None,
            k_scale: None,
            v_scale: None,
            q_norm_weight: None,
            k_norm_weight: None,
            output_scale: None,
        }
    }

    /// Of tensors in host memory.
    pub(super) fn of(inputs: &Inputs<'a>, total_sequence_length: usize) -> Self {
        let desc = |tensor: Option<&'a Tensor>| tensor.map(Tensor::desc);
        Self {
            query: inputs.query.desc(),
            key: desc(inputs.key),
            value: desc(inputs.value),
            past_key: desc(inputs.past_key),
            past_value: desc(inputs.past_value),
            seqlens_k: inputs.seqlens_k.desc(),
            total_sequence_length,
            cos_cache: desc(inputs.cos_cache),
            sin_cache: desc(inputs.sin_cache),
            position_ids: desc(inputs.position_ids),
            attention_bias: desc(inputs.attention_bias),
            head_sink: desc(inputs.head_sink),
            k_scale: desc(inputs.k_scale),
            v_scale: desc(inputs.v_scale),
            q_norm_weight: desc(inputs.q_norm_weight),
            k_norm_weight: desc(inputs.k_norm_weight),
            output_scale: desc(inputs.output_scale),
        }
    }
}
