//! Operators: attributes and inputs in ONNX's terms.

mod attention;
mod gqa;
mod inputs;
mod paged;
mod rotary;
mod scatter;
mod schema;
pub(crate) mod validate;
mod validate_attention;

pub use attention::{Attention, AttentionInputs, AttentionOutputs};
pub use gqa::{GroupQueryAttention, KvCache, Outputs, QuantType};
pub use inputs::{Inputs, Shapes};
pub use paged::{Bounds, PagedAttention, PagedCache, PagedInputs, PagedOutputs, PagedShapes};
pub use rotary::{RotaryEmbedding, RotaryInputs};
pub use scatter::{ScatterInputs, TensorScatter};
pub use schema::{Input, Kind};
pub use validate_attention::AttentionShapes;

use gqa_tensor::DType;

/// ONNX's number of an element type, `TensorProto.DataType`.
pub const fn element_type(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 1,
        DType::U8 => 2,
        DType::I8 => 3,
        DType::I32 => 6,
        DType::I64 => 7,
        DType::Bool => 9,
        DType::F16 => 10,
        DType::F64 => 11,
        DType::BF16 => 16,
        DType::F8E4M3 => 17,
    }
}
