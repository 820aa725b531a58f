//! A CUDA-like machine on the CPU.

mod arguments;
mod arithmetic;
pub mod device;
mod global;

pub use arguments::Arguments;
