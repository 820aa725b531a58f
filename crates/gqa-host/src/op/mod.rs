//! Operators: attributes and inputs as ONNX has them.

mod attention;
mod cache;
mod gqa;
mod paged;
mod rotary;
mod shapes;
mod validate;
mod validate_attention;

pub use attention::{Attention, AttentionInputs, AttentionOutputs};
pub use gqa::{GroupQueryAttention, Inputs, KvCache, Outputs, QuantType};
pub use paged::{Bounds, PagedAttention, PagedCache, PagedInputs, PagedShapes};
pub use rotary::{RotaryEmbedding, RotaryInputs};
pub use shapes::Shapes;
pub use validate_attention::AttentionShapes;
