//! GroupQueryAttention for Rust.
//!
//! An operator call ([`op::GroupQueryAttention`] and its [`op::Inputs`]) becomes a validated
//! [`Problem`]; a problem becomes a [`plan::Plan`], a list of kernel launches that says why each
//! kernel was chosen; and a plan runs on a [`backend`]: a GPU through CUDA, or the same kernels on
//! a simulated GPU. Two back ends take the problem directly: a fast CPU implementation and the f64
//! [`mod@reference`] that all others are compared with.

#![warn(clippy::missing_errors_doc)]

pub mod backend;
mod merge;
pub mod op;
pub mod reference;

/// GPUs through the CUDA driver: devices, memory, streams, graphs, and plans put into streams.
#[cfg(feature = "cuda")]
pub use gqa_cuda as driver;
pub use gqa_plan::{
    Alignment, Bias, CacheBinding, CallKind, Layout, Pages, Phase, Problem, ProblemFields, QkNorm,
    QkOutput, QuantFormat, Quantization, Rotary, RowLayout, RowStrides, Scales, Sink, Strided,
    WriteMode, engine, plan, sample,
};
pub use gqa_tensor::{
    CacheView, DType, Error, Result, RowMajor, Tensor, TensorDesc, TensorView, TensorViewMut,
    ndarray,
};
pub use merge::{State, merge_states};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So are those of the page for engines.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/engines.md")]
struct Engines;
