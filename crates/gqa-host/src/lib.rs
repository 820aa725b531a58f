//! Attention for language models: prefill and decode over KV caches, on GPUs and CPUs.
//!
//! A call, in an engine's terms ([`engine`]) or as an ONNX operator with its tensors ([`op`]),
//! becomes a checked [`Problem`]. A [`plan::Planner`] makes it a [`plan::Plan`]: a list of kernel
//! launches, with the reason for each kernel. A [`backend`] computes the call on host tensors: the
//! GPU and the simulated GPU run plans; the CPU and the float64 [`mod@reference`], with which all
//! others are compared, take the problem directly. On its own GPU memory and streams an engine runs
//! plans through `driver`.

#![warn(clippy::missing_errors_doc)]

pub mod backend;
mod merge;
pub mod op;
pub mod reference;

/// GPUs through the CUDA driver: devices, memory, streams, graphs, and loaded plans.
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

/// Tests the README's program.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// Tests the programs of docs/engines.md.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/engines.md")]
struct Engines;
