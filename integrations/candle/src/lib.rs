//! Attention for [candle](https://github.com/huggingface/candle) on gqa's kernels.
//!
//! - [`KvCache`] is a layer's KV cache with room for a number of tokens. It is appended to in
//!   place: rotary embedding, append and attention are one call, and KV heads are never repeated.
//! - [`PagedKvCache`] is one of blocks, which sequences of any lengths share.
//! - [`LatentKvCache`] is one of multi-head latent attention, whose rows are keys and values.
//! - [`Attention::quantized`] makes either one of int8, float8 or 4-bit values.
//! - [`flash`] has the functions of candle-flash-attn under their names and with their arguments.
//!   The crate `candle-flash-attn` beside this one hands them on, so that
//!   `[patch.crates-io]` puts them into programs that call the original.
//!
//! Tensors are on the CPU, in float32, float16 or bfloat16, or, with feature `cuda`, on an NVIDIA
//! GPU. Errors are [`candle::Error`]s that name the argument, what was got and what is allowed.
//!
//! ```
//! use candle::{DType, Device, Result, Tensor};
//! use gqa_candle::{Attention, KvCache, Rope};
//!
//! # fn main() -> Result<()> {
//! let device = Device::Cpu;
//! let rope = Rope::of_frequency(10_000., 64, 512, DType::F32, &device)?;
//! // 9 query heads over 3 KV heads of 64. The KV cache of one sequence has room for 512 tokens.
//! let attention = Attention::new(9, 3, 64).rope(rope);
//! let mut cache = KvCache::new(&attention, 1, 512, DType::F32, &device)?;
//! for tokens in [5, 1, 1] {
//!     let heads = |n| Tensor::randn(0f32, 1., (1, tokens, n, 64), &device);
//!     let output = cache.attend(&heads(9)?, &heads(3)?, &heads(3)?)?;
//!     assert_eq!(output.dims(), [1, tokens, 9, 64]);
//! }
//! assert_eq!(cache.lengths(), [7]);
//! # Ok(())
//! # }
//! ```

mod attention;
mod blocks;
mod cache;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
pub mod flash;
mod latent;
mod paged;
mod rows;
mod tables;

pub use attention::{Attention, Rope};
pub use cache::KvCache;
pub use gqa_host::QuantFormat;
pub use latent::{LatentAttention, LatentKvCache};
pub use paged::PagedKvCache;
pub use tables::Sequence;

/// The README's programs are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
