//! Takes the place of the crate of this name, whose functions it has, on gqa's kernels:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { git = "…", package = "candle-flash-attn" }
//! ```
//!
//! Then `candle-transformers` with feature `flash-attn` uses these kernels as it is, and builds
//! without CUTLASS.

pub use gqa_candle::flash::*;
