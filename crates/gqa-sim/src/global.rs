//! A kernel's view of global memory.

use crate::device::outside_kernel;
use bytemuck::Pod;
use std::marker::PhantomData;

/// A kernel's pointer parameter; indices and offsets count elements.
pub struct Global<T> {
    argument: u32,
    start: i64,
    element: PhantomData<T>,
}

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Global<T> {}

impl<T: Pod> Global<T> {
    pub(crate) fn new(argument: u32) -> Self {
        Self { argument, start: 0, element: PhantomData }
    }

    /// Whether the launch bound nothing.
    pub fn is_null(self) -> bool {
        self.argument == u32::MAX
    }

    /// The place `elements` further on.
    pub fn offset(self, elements: usize) -> Self {
        Self { start: self.start.wrapping_add_unsigned(elements as u64), ..self }
    }

    /// Element `i`.
    pub fn load(self, _i: usize) -> T {
        outside_kernel()
    }

    /// Writes element `i`.
    pub fn store(self, _i: usize, _value: T) {
        outside_kernel()
    }

    /// The 16 bytes that start at element `i`, which must lie on a 16-byte boundary.
    pub fn load_vec(self, _i: usize) -> [u32; 4] {
        outside_kernel()
    }

    /// Writes the 16 bytes that start at element `i`, which must lie on a 16-byte boundary.
    pub fn store_vec(self, _i: usize, _value: [u32; 4]) {
        outside_kernel()
    }

    /// The 8 bytes that start at element `i`, which must lie on an 8-byte boundary.
    pub fn load_vec8(self, _i: usize) -> [u32; 2] {
        outside_kernel()
    }
}
