//! Element types and their conversions.

mod element;
pub use element::{DType, Element, MmaElement, bf16, f16};
