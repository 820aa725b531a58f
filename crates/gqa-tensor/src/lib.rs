//! Tensors in host memory: element types, owned arrays, views of a caller's memory; and the error
//! type of all crates above.

#![warn(clippy::missing_errors_doc)]

mod dtype;
mod error;
mod tensor;
mod view;

/// Arrays become [`Tensor`]s, so that a program needs no version of its own of this crate.
pub use ndarray;

pub use dtype::{DType, POISON, TensorDesc};
pub use error::{Error, Result};
pub use tensor::{RowMajor, Tensor};
pub use view::{CacheView, TensorView, TensorViewMut};
