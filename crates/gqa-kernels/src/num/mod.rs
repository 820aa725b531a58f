//! Element types and their conversions; functions the hardware lacks.

mod element;
mod tanh;
mod vector;
pub use element::{DType, Element, MmaElement, bf16, f16};
pub use tanh::tanh;
pub use vector::{pack, pack_pairs, unpack};
