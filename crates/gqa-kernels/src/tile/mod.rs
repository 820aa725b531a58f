//! Building blocks of tensor-core kernels.
//!
//! [`rows`]: which query rows a tile holds and which keys they see; [`pages`]: the same over a
//! paged KV cache. [`swizzle`]: tiles in shared memory and the way in; [`copy`]: what copies share.
//! [`fragment`]: products of tiles, spread over the lanes of a warp; [`columns`]: those with the
//! query rows as columns; [`quantized`]: the same over a quantized KV cache; [`tf32`]: those of
//! float32; [`wide`]: what heads larger than 256 need; [`padded`]: tiles of `split_kv` and their
//! products. [`softmax`]: the online softmax on such fragments. [`bias`]: what is added to them
//! before.

pub mod bias;
pub mod columns;
pub mod copy;
pub mod fragment;
pub mod padded;
pub mod pages;
pub mod quantized;
pub mod rows;
pub mod softmax;
pub mod swizzle;
pub mod tf32;
pub mod wide;
