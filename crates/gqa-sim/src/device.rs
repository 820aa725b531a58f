//! The device functions of kernels, as the simulated machine executes them. Each panics outside a
//! kernel.

use crate::block;
use crate::fault::FaultKind;
use bytemuck::Pod;

pub use crate::arithmetic::{
    bf16_high_to_f32, bf16_low_to_f32, bf16_to_f32, constant_of_bf16, constant_of_f16,
    e4m3x2_to_f16x2, exp2, f16_high_to_f32, f16_low_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16,
    f32x2_to_bf16x2, f32x2_to_e4m3x2, f32x2_to_f16x2, f32x4_to_e4m3x4, fma, fma_f16x2, log2, max,
    max_u16x2, mul_f16x2, multiply_add, prmt, rcp, rsqrt, select_bits, sub_f16x2,
};
pub use crate::blackwell::{
    TensorLoad, tcgen05_alloc, tcgen05_commit, tcgen05_dealloc, tcgen05_fence_after,
    tcgen05_fence_before, tcgen05_ld_16x256b, tcgen05_ld_32x32b, tcgen05_mma_f8f6f4,
    tcgen05_mma_f16, tcgen05_mma_tensor_f8f6f4, tcgen05_mma_tensor_f16, tcgen05_relinquish,
    tcgen05_st_16x256b, tcgen05_st_32x32b, tcgen05_wait_ld, tcgen05_wait_st,
};
pub use crate::cluster::{
    cluster_arrive, cluster_arrive_relaxed, cluster_rank, cluster_size, cluster_wait, ld_peer,
    ld_peer_vec, peer_address, st_peer, st_peer_vec,
};
pub use crate::collective::{
    any_sync, shfl_idx_f32, shfl_idx_u32, shfl_xor_f32, shfl_xor_u32, sync_threads, sync_warp,
};
pub use crate::communicate::{fence_gpu, grid_dependency_wait, launch_dependents, nanoseconds};
pub use crate::copy::{cp_async_16, cp_async_commit, cp_async_wait};
pub use crate::global::Global;
pub use crate::hopper::{
    CachePolicy, TensorMap, bulk_commit, bulk_load, bulk_load_hinted, bulk_wait_read, evict_first,
    evict_last, fence_mbarrier_init, fence_proxy_async, mbarrier_arrive, mbarrier_arrive_expect,
    mbarrier_arrive_expect_peer, mbarrier_arrive_peer, mbarrier_arrive_peer_after_reads,
    mbarrier_init, mbarrier_test, mbarrier_wait, mbarrier_wait_cluster, mbarrier_wait_unless,
    named_barrier_arrive, named_barrier_sync, prefetch_tensor_map, registers_lower,
    registers_raise, st_async, st_async_vec, st_async_vec2, tma_load, tma_load_multicast,
    tma_store, wgmma_add_bf16, wgmma_add_e4m3, wgmma_add_f16, wgmma_bf16, wgmma_commit, wgmma_e4m3,
    wgmma_f16, wgmma_fence, wgmma_k_major_bf16, wgmma_k_major_f16, wgmma_registers_bf16,
    wgmma_registers_e4m3, wgmma_registers_f16, wgmma_wait,
};
pub use crate::matrix::{
    ldmatrix_x2, ldmatrix_x2_trans, ldmatrix_x4, ldmatrix_x4_trans, mma_m16n8k8_tf32,
    mma_m16n8k16_bf16, mma_m16n8k16_f16, movmatrix_trans,
};

macro_rules! identity {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $name() -> u32 {
            block::with($value)
        }
    )*};
}
identity! {
    /// Thread within the CTA.
    thread_idx = |block| block.who.thread;
    /// Threads of a CTA.
    block_dim = |block| block.lanes.len() as u32;
    /// CTA within the grid, x.
    block_idx_x = |block| block.index[0];
    /// CTA within the grid, y.
    block_idx_y = |block| block.index[1];
    /// CTA within the grid, z.
    block_idx_z = |block| block.index[2];
    /// CTAs of the grid, x.
    grid_dim_x = |block| block.grid[0];
    /// CTAs of the grid, y.
    grid_dim_y = |block| block.grid[1];
    /// CTAs of the grid, z.
    grid_dim_z = |block| block.grid[2];
    /// Thread within the warp.
    lane = |block| block.who.thread % 32;
    /// Warp within the CTA.
    warp = |block| block.who.thread / 32;
    /// Byte address in the shared window at which the CTA's dynamic shared memory starts.
    shared_base = |block| block.shared.base();
}

/// Loads a value of 1, 2, 4 or 8 bytes, aligned to its size.
#[inline]
pub fn ld_shared<T: Pod>(address: u32) -> T {
    block::checked(|block| block.shared.load(block.who, address))
}

/// Stores a value of 1, 2, 4 or 8 bytes, aligned to its size.
#[inline]
pub fn st_shared<T: Pod>(address: u32, value: T) {
    block::checked(|block| block.shared.store(block.who, address, value));
}

/// Loads 16 bytes from a 16-byte boundary.
#[inline]
pub fn ld_shared_vec(address: u32) -> [u32; 4] {
    block::checked(|block| block.shared.load_vec(block.who, address))
}

/// Stores 16 bytes to a 16-byte boundary.
#[inline]
pub fn st_shared_vec(address: u32, value: [u32; 4]) {
    block::checked(|block| block.shared.store_vec(block.who, address, value));
}

/// The same value, opaque to the optimiser: values derived from it are recomputed.
#[inline]
pub fn opaque(value: u32) -> u32 {
    std::hint::black_box(value)
}

/// 1, which compilers for GPUs do not know.
#[inline]
pub fn hidden_one() -> u32 {
    1
}

/// Ends the kernel with an error.
pub fn trap() -> ! {
    let thread = block::with(|block| block.who.thread);
    block::fail(FaultKind::Trap { thread })
}
