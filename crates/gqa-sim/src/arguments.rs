//! What a launch hands to every thread of a kernel.

use crate::device::{Global, outside_kernel};
use bytemuck::Pod;

/// A kernel's arguments, in the order of its parameters.
#[derive(Debug)]
pub struct Arguments(());

impl Arguments {
    /// Parameter `i`, a pointer to elements of `T`, which may be null.
    pub fn global<T: Pod>(&self, i: usize) -> Global<T> {
        Global::new(i as u32)
    }

    /// Parameter `i`, a struct passed by value.
    pub fn params<P: Pod>(&self, _i: usize) -> P {
        outside_kernel()
    }
}
