//! Building blocks of tensor-core kernels.
//!
//! [`rows`]: which query rows a tile holds and which keys they see. [`copy`]: tiles in shared memory and the way in and out.
//! [`fragment`]: products of tiles, spread over the lanes of a warp; [`tf32`]: those of float32. [`softmax`]: the online softmax on such
//! fragments. [`bias`]: what is added to them before.

pub mod bias;
pub mod columns;
pub mod copy;
pub mod fragment;
pub mod rows;
pub mod softmax;
pub mod swizzle;
pub mod tf32;
pub mod wide;
