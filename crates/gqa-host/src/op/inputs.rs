//! The inputs of GroupQueryAttention, with their data and without.

use super::schema::Kind::{Always, Cache, Element};
use super::schema::{Input, input, names, numbers};
use gqa_plan::plan::TensorId::{self, *};
use gqa_plan::plan::Tensors;
use gqa_tensor::{DType, Tensor, TensorDesc};

/// One row per optional input: its name, its role, and its shape in the comment.
macro_rules! optional {
    ($($(#[$doc:meta])* $name:ident: $role:ident;)*) => {
        /// The operator's inputs under their ONNX names; lengths and shapes are checked when the
        /// operator is applied.
        #[derive(Clone, Copy, Debug)]
        pub struct Inputs<'a> {
            /// (B, S, N·H), or packed (B, S, (N + 2·Nk)·H); with [`Layout::Bnsh`](gqa_plan::Layout)
            /// (B, N, S, H)
            pub query: &'a Tensor,
            /// int32 (B): index of each sequence's last valid token after this call
            pub seqlens_k: &'a Tensor,
            /// int32, one element: the longest sequence after this call
            pub total_sequence_length: &'a Tensor,
            $($(#[$doc])* pub $name: Option<&'a Tensor>,)*
        }

        impl<'a> Inputs<'a> {
            /// The required inputs; set the optional ones as fields.
            pub fn new(
                query: &'a Tensor,
                seqlens_k: &'a Tensor,
                total_sequence_length: &'a Tensor,
            ) -> Self {
                Self { query, seqlens_k, total_sequence_length, $($name: None,)* }
            }

            /// With the optional inputs that have a tensor by their name.
            pub fn with(self, named: impl Fn(&str) -> Option<&'a Tensor>) -> Self {
                Self { $($name: named(stringify!($name)),)* ..self }
            }

            /// By role.
            pub(super) fn tensors(&self) -> Tensors<&'a Tensor> {
                Tensors::default()
                    .with(TensorId::Query, self.query)
                    .with(TensorId::SeqlensK, self.seqlens_k)
                    $(.with(TensorId::$role, self.$name))*
            }
        }

        /// Types and shapes of the operator's inputs, under the names in [`Inputs`]: for tensors in
        /// GPU memory, whose contents the host does not read.
        #[derive(Clone, Copy, Debug)]
        pub struct Shapes<'a> {
            /// query, or packed QKV
            pub query: TensorDesc<'a>,
            /// seqlens_k
            pub seqlens_k: TensorDesc<'a>,
            /// The value of total_sequence_length
            pub total_sequence_length: usize,
            $($(#[$doc])* pub $name: Option<TensorDesc<'a>>,)*
        }

        impl<'a> Shapes<'a> {
            /// The required inputs; set the optional ones as fields.
            pub fn new(
                query: TensorDesc<'a>,
                seqlens_k: TensorDesc<'a>,
                total_sequence_length: usize,
            ) -> Self {
                Self { query, seqlens_k, total_sequence_length, $($name: None,)* }
            }

            /// With the optional inputs that have a tensor by their name.
            pub fn with(self, named: impl Fn(&str) -> Option<TensorDesc<'a>>) -> Self {
                Self { $($name: named(stringify!($name)),)* ..self }
            }

            /// Of tensors in host memory.
            pub(super) fn of(inputs: &Inputs<'a>, total_sequence_length: usize) -> Self {
                Self {
                    query: inputs.query.desc(),
                    seqlens_k: inputs.seqlens_k.desc(),
                    total_sequence_length,
                    $($name: inputs.$name.map(Tensor::desc),)*
                }
            }
        }
    };
}

optional! {
    /// (B, L, Nk·H); absent: packed
    key: Key;
    /// As key
    value: Value;
    /// (B, Nk, P, H), or H/2 for 4-bit values
    past_key: PastKey;
    /// As past_key
    past_value: PastValue;
    /// (max positions, rotary_dim/2)
    cos_cache: CosCache;
    /// As cos_cache
    sin_cache: SinCache;
    /// int64 (B, S or more)
    position_ids: PositionIds;
    /// (B or 1, N or 1, S, T)
    attention_bias: AttentionBias;
    /// (N)
    head_sink: HeadSink;
    /// float32, finite and not 0: one for all keys in a quantized cache, or (Nk·H) in any shape
    k_scale: KScale;
    /// The same for values
    v_scale: VScale;
    /// (H): QK-norm weight: each head of query is divided by its root mean square and multiplied by
    /// this, before RoPE
    q_norm_weight: QNormWeight;
    /// (H): the same for key
    k_norm_weight: KNormWeight;
    /// int32 (B): new tokens of each sequence, 0 where it is idle; the rows after them are padding
    query_seqlens: QuerySeqlens;
    /// float32, one element, finite and not 0: output is float8e4m3fn, with true output = stored
    /// output * output_scale (beyond ONNX)
    output_scale: OutputScale;
}

impl Inputs<'_> {
    /// In the order of ONNX's nodes.
    pub const ONNX: [Input; 17] = [
        input("query", Query, Element).required(),
        input("key", Key, Element),
        input("value", TensorId::Value, Element),
        input("past_key", PastKey, Cache),
        input("past_value", PastValue, Cache),
        input("seqlens_k", SeqlensK, Always(DType::I32)).required(),
        numbers("total_sequence_length").required(),
        input("cos_cache", CosCache, Element),
        input("sin_cache", SinCache, Element),
        input("position_ids", PositionIds, Always(DType::I64)),
        input("attention_bias", AttentionBias, Element),
        input("head_sink", HeadSink, Element),
        input("k_scale", KScale, Always(DType::F32)),
        input("v_scale", VScale, Always(DType::F32)),
        input("q_norm_weight", QNormWeight, Element),
        input("k_norm_weight", KNormWeight, Element),
        input("query_seqlens", QuerySeqlens, Always(DType::I32)),
    ];

    /// Their names.
    pub const NAMES: [&'static str; 17] = names(&Self::ONNX);
}
