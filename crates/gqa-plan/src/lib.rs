//! Describes attention calls and plans them.
//!
//! A call is described in an engine's terms ([`engine`]) or field by field ([`ProblemFields`]). Its
//! checks make it a [`Problem`], and the planner makes that a [`plan::Plan`]: a list of kernel
//! launches, with the reason for each kernel. This needs no tensor, driver or GPU. [`contents`]
//! checks lengths and tables that are in host memory.

#![warn(clippy::missing_errors_doc)]

pub mod contents;
pub mod engine;
pub mod limits;
pub mod plan;
mod problem;
pub mod sample;
mod tensors;

pub use gqa_tensor::{DType, Error, Result, TensorDesc};
pub use problem::{
    Alignment, Bias, CacheBinding, CallKind, Layout, Pages, Phase, Problem, ProblemFields, QkNorm,
    QkOutput, QuantFormat, Quantization, Rotary, RowLayout, RowStrides, Scales, Sink, Strided,
    WriteMode,
};
