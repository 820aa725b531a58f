//! Small calls with random tensors, which compare kernels.

mod agree;
mod small;
mod tensors;
mod trial;

pub use agree::agree;
pub use small::small;
pub use tensors::tensors;
pub use trial::Trial;
