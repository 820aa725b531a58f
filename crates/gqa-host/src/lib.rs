//! GroupQueryAttention for Rust.
//!
//! An operator call ([`op::GroupQueryAttention`] and its [`op::Inputs`]) becomes a validated
//! [`Problem`]; a problem becomes a [`plan::Plan`], a list of kernel launches that says why each
//! kernel was chosen; and a plan runs on a [`backend`]: a GPU through CUDA, or the same kernels on
//! a simulated GPU. Two back ends take the problem directly: a fast CPU implementation and the f64
//! [`mod@reference`] that all others are compared with.

#![warn(clippy::missing_errors_doc)]

pub mod backend;
#[cfg(feature = "cuda")]
pub mod driver;
pub mod engine;
mod error;
mod merge;
pub mod op;
mod paged;
pub mod plan;
mod problem;
pub mod reference;
mod sliding;
mod tensor;
mod view;

/// Arrays become [`Tensor`]s, so that a program needs no version of its own of this crate.
pub use ndarray;

pub use error::{Error, Result};
pub use merge::{State, merge_states};
pub use problem::{
    Alignment, Bias, CacheBinding, CallKind, Layout, Pages, Phase, Problem, ProblemFields, QkNorm,
    QkOutput, QuantFormat, Quantization, Rotary, RowLayout, RowStrides, Scales, Sink, Strided,
    WriteMode,
};
pub use tensor::{DType, RowMajor, Tensor, TensorDesc};
pub use view::{CacheView, TensorView, TensorViewMut};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// So are those of the page for engines.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/engines.md")]
struct Engines;
