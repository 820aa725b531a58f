//! A typed place in the block's dynamic shared memory.

use super::{ld_shared, ld_shared_vec, shared_base, st_shared, st_shared_vec};
use bytemuck::Pod;
use core::marker::PhantomData;

/// `T` values in shared memory from a byte address on; indices and offsets count elements.
pub struct Shared<T> {
    address: u32,
    element: PhantomData<T>,
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T: Pod> Shared<T> {
    const SIZE: u32 = size_of::<T>() as u32;

    /// The place `bytes` bytes after the start of the block's dynamic shared memory.
    #[inline(always)]
    pub fn at(bytes: u32) -> Self {
        Self { address: shared_base() + bytes, element: PhantomData }
    }

    /// The place `elements` further on.
    #[inline(always)]
    pub fn offset(self, elements: u32) -> Self {
        Self { address: self.address + elements * Self::SIZE, element: PhantomData }
    }

    /// Byte address in the shared window, as `ldmatrix` and `cp.async` take it.
    #[inline(always)]
    pub fn address(self) -> u32 {
        self.address
    }

    /// Element `i`.
    #[inline(always)]
    pub fn load(self, i: u32) -> T {
        ld_shared(self.offset(i).address)
    }

    /// Writes element `i`.
    #[inline(always)]
    pub fn store(self, i: u32, value: T) {
        st_shared(self.offset(i).address, value);
    }

    /// The 16 bytes that start at element `i`, which must lie on a 16-byte boundary.
    #[inline(always)]
    pub fn load_vec(self, i: u32) -> [u32; 4] {
        ld_shared_vec(self.offset(i).address)
    }

    /// Writes the 16 bytes that start at element `i`, which must lie on a 16-byte boundary.
    #[inline(always)]
    pub fn store_vec(self, i: u32, value: [u32; 4]) {
        st_shared_vec(self.offset(i).address, value);
    }
}
