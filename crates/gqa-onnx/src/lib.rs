//! Single-node ONNX models and their test cases.
//!
//! [`Model`] reads a model file, [`Model::call`] a data set for it, and [`Model::run`] computes the
//! outputs on any [`Backend`](gqa_host::backend::Backend). A [`Case`] is a folder in the layout of
//! ONNX's backend tests; [`Case::check`] runs it and compares with the outputs stored there. Files
//! are not trusted: any content gives a value or an [`Error`] of one line, and no allocation
//! depends on a size that a file only declares.

#![warn(clippy::missing_errors_doc)]

mod attributes;
mod case;
mod compare;
mod error;
mod file;
mod model;
mod operator;
mod opset;
mod proto;
mod tensor;

pub use case::{Case, Checked, OutputCheck, find_cases};
pub use compare::{Comparison, Limits, Region, Tolerance, Worst, compare};
pub use error::{Error, Result};
pub use file::read_file;
pub use model::Model;
pub use operator::{Call, Operator};
pub use tensor::{decode_tensor, encode_tensor, read_tensor};
