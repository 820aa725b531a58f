//! Typed addresses in the CTA's dynamic shared memory and in distributed shared memory (DSMEM).

use super::{
    ld_peer, ld_peer_vec, ld_shared, ld_shared_vec, peer_address, shared_base, st_async,
    st_async_vec, st_peer, st_peer_vec, st_shared, st_shared_vec,
};
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

    /// The address `bytes` bytes after the start of the CTA's dynamic shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(bytes: u32) -> Self {
        Self { address: shared_base() + bytes, element: PhantomData }
    }

    /// The address `elements` further on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn offset(self, elements: u32) -> Self {
        Self { address: self.address + elements * Self::SIZE, element: PhantomData }
    }

    /// Byte address in the shared window, as `ldmatrix` and `cp.async` take it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn address(self) -> u32 {
        self.address
    }

    /// Element `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load(self, i: u32) -> T {
        ld_shared(self.offset(i).address)
    }

    /// Writes element `i`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store(self, i: u32, value: T) {
        st_shared(self.offset(i).address, value);
    }

    /// The 16 bytes that start at element `i`, which must be aligned to 16 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load_vec(self, i: u32) -> [u32; 4] {
        ld_shared_vec(self.offset(i).address)
    }

    /// Writes the 16 bytes that start at element `i`, which must be aligned to 16 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store_vec(self, i: u32, value: [u32; 4]) {
        st_shared_vec(self.offset(i).address, value);
    }
    /// The same address in the CTA of rank `rank` of the cluster. SM 90.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn on(self, rank: u32) -> Peer<T> {
        Peer { address: peer_address(self.address, rank), element: PhantomData }
    }
}

/// `T` values in the shared memory of a CTA of the cluster (DSMEM); indices and offsets count
/// elements. SM 90.
pub struct Peer<T> {
    address: u32,
    element: PhantomData<T>,
}

impl<T> Clone for Peer<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Peer<T> {}

impl<T: Pod> Peer<T> {
    /// The address `elements` further on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn offset(self, elements: u32) -> Self {
        let bytes = elements * size_of::<T>() as u32;
        Self { address: self.address + bytes, element: PhantomData }
    }

    /// Byte address in the cluster's shared window.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn address(self) -> u32 {
        self.address
    }

    /// Element `i`, of 4 or 8 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load(self, i: u32) -> T {
        ld_peer(self.offset(i).address)
    }

    /// Writes element `i`, of 4 or 8 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store(self, i: u32, value: T) {
        st_peer(self.offset(i).address, value);
    }

    /// The 16 bytes that start at element `i`, which must be aligned to 16 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load_vec(self, i: u32) -> [u32; 4] {
        ld_peer_vec(self.offset(i).address)
    }

    /// Writes the 16 bytes that start at element `i`, which must be aligned to 16 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store_vec(self, i: u32, value: [u32; 4]) {
        st_peer_vec(self.offset(i).address, value);
    }

    /// Writes element `i`, of 4 bytes, asynchronously (st.async); completes the bytes on the
    /// mbarrier at `barrier`, in the same CTA.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store_async(self, i: u32, value: T, barrier: u32) {
        const { assert!(size_of::<T>() == 4) };
        st_async(self.offset(i).address, bytemuck::cast(value), barrier);
    }

    /// As [`store_async`](Self::store_async), the 16 bytes that start at element `i`, which must be
    /// aligned to 16 bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store_async_vec(self, i: u32, value: [u32; 4], barrier: u32) {
        st_async_vec(self.offset(i).address, value, barrier);
    }
}
