//! Tensors in host memory: element types, owned arrays, borrowed views; and the error type of all
//! crates above.

#![warn(clippy::missing_errors_doc)]

mod dtype;
mod error;
mod tensor;
mod view;

/// Re-exported because arrays become [`Tensor`]s, so that programs use the same version.
pub use ndarray;

pub use dtype::{DType, POISON, TensorDesc};
pub use error::{Error, Result};
pub use tensor::{RowMajor, Tensor};
pub use view::{CacheView, TensorView, TensorViewMut};
