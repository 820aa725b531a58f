//! Element types and their conversions; functions the hardware lacks.

mod code;
mod divisor;
mod element;
mod mma_code;
mod quotient;
mod tanh;
mod vector;
pub use code::{Bits4, Bits8, Code, Float4, Float8, Format, Int4, Int8, magnitude};
pub use divisor::Divisor;
pub use element::{DType, Element, MmaElement, bf16, e4m3, f16};
pub use mma_code::MmaCode;
pub use quotient::quotient;
pub use tanh::tanh;
pub use vector::{pack, pack_pairs, unpack};
