//! Operators: attributes and inputs as ONNX has them.

mod gqa;
mod shapes;
mod validate;

pub use gqa::{GroupQueryAttention, Inputs, KvCache, Outputs};
pub use shapes::Shapes;
