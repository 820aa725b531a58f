//! Building blocks of tensor-core kernels.
//!
//! - [`rows`]: which query rows a tile holds and which keys they see
//! - [`pages`]: sequences and pages of a paged KV cache
//! - [`seqlens`]: the tensors that say how long sequences are
//! - [`swizzle`]: swizzled tiles in shared memory and copies into them
//! - [`copy`]: common parts of copies
//! - [`fragment`]: products of tiles, spread over the lanes of a warp
//! - [`descriptor`]: operands of warpgroup products
//! - [`columns`]: products with the query rows as columns
//! - [`quantized`]: products over a quantized KV cache
//! - [`tf32`]: products of float32
//! - [`wide`]: products for heads larger than 256
//! - [`padded`]: tiles and products of `split_kv`
//! - [`softmax`]: the online softmax on fragments
//! - [`bias`]: bias and mask on fragments
//! - [`warp`]: sums over the lanes of a warp
//! - [`quad`]: exchanges among four lanes
//! - [`ring`]: position in a pipeline of stages

pub mod bias;
pub mod columns;
pub mod copy;
pub mod descriptor;
pub mod flipped;
pub mod fragment;
pub mod padded;
pub mod pages;
pub mod quad;
pub mod quantized;
pub mod ring;
pub mod rows;
pub mod seqlens;
pub mod softmax;
pub mod swizzle;
pub mod tf32;
pub mod warp;
pub mod wide;
