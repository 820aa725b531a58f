//! Small calls with random tensors, by which kernels are compared.

mod agree;
mod small;
mod tensors;
mod trial;

pub use agree::agree;
pub use small::small;
pub use tensors::tensors;
pub use trial::Trial;
