//! The vocabulary of kernels on the simulated machine.

pub use crate::arithmetic::{
    exp2, f16_to_f32, f32_to_f16, f32x2_to_bf16x2, f32x2_to_f16x2, fma, log2, max, rcp,
};
pub use crate::global::Global;
use bytemuck::Pod;

pub(crate) fn outside_kernel() -> ! {
    panic!("a device function was called outside a kernel")
}

macro_rules! vocabulary {
    ($($name:ident($($x:ident: $t:ty),*) $(-> $out:ty)?;)*) => {$(
        /// Part of the vocabulary.
        pub fn $name($(_: $t),*) $(-> $out)? {
            outside_kernel()
        }
    )*};
}
vocabulary! {
    thread_idx() -> u32;
    block_dim() -> u32;
    block_idx_x() -> u32;
    block_idx_y() -> u32;
    block_idx_z() -> u32;
    grid_dim_x() -> u32;
    grid_dim_y() -> u32;
    grid_dim_z() -> u32;
    lane() -> u32;
    warp() -> u32;
    sync_threads();
    sync_warp();
    shfl_xor_f32(v: f32, mask: u32) -> f32;
    shfl_xor_u32(v: u32, mask: u32) -> u32;
    shfl_idx_f32(v: f32, lane: u32) -> f32;
    shfl_idx_u32(v: u32, lane: u32) -> u32;
    any_sync(vote: bool) -> bool;
    shared_base() -> u32;
    ld_shared_vec(address: u32) -> [u32; 4];
    st_shared_vec(address: u32, value: [u32; 4]);
    cp_async_commit();
    ldmatrix_x4(address: u32) -> [u32; 4];
    ldmatrix_x4_trans(address: u32) -> [u32; 4];
    ldmatrix_x2(address: u32) -> [u32; 2];
    ldmatrix_x2_trans(address: u32) -> [u32; 2];
    mma_m16n8k16_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
    mma_m16n8k16_bf16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
    trap() -> !;
}

/// Loads a value of 1, 2, 4 or 8 bytes, aligned to its size.
pub fn ld_shared<T: Pod>(_address: u32) -> T {
    outside_kernel()
}

/// Stores a value of 1, 2, 4 or 8 bytes, aligned to its size.
pub fn st_shared<T: Pod>(_address: u32, _value: T) {
    outside_kernel()
}

/// Starts copying 16 bytes.
pub fn cp_async_16<T: Pod>(_destination: u32, _source: Global<T>, _i: usize, _valid: bool) {
    outside_kernel()
}

/// Waits until at most the `N` newest groups of this thread are unfinished.
pub fn cp_async_wait<const N: u32>() {
    outside_kernel()
}
