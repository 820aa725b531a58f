//! Describes attention calls and plans them.
//!
//! A call is described as an engine does ([`engine`]) or field by field ([`ProblemFields`]); what
//! passes its checks is a [`Problem`]; and a problem becomes a [`plan::Plan`], a list of kernel
//! launches that says why each kernel was chosen. No tensor, driver or GPU is needed for that.
//! Where lengths and tables are in host memory, [`contents`] checks them.

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
