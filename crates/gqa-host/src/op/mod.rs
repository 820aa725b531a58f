//! Operators: attributes and inputs as ONNX has them.

mod gqa;
mod validate;

pub use gqa::{GroupQueryAttention, Inputs, KvCache, Outputs};
