//! The only interface to the hardware.
//!
//! Kernels call the free functions re-exported here and no other hardware operation. On the GPU
//! their bodies are LLVM intrinsics and inline PTX (`nvptx.rs` and the files in `nvptx/`, the only
//! ones with `asm!`); on the host they are instructions of the simulated machine
//! ([`gqa_sim::device`]). The two modules export the same names with the same signatures:
//!
//! | group | functions |
//! |---|---|
//! | identity | `thread_idx()`, `block_dim()`, `block_idx_{x,y,z}()`, `grid_dim_{x,y,z}()` (all `u32`; CTAs are one-dimensional), `lane()`, `warp()` |
//! | barriers | `sync_threads()`, `sync_warp()` |
//! | warp | `shfl_xor_f32(v, mask)`, `shfl_xor_u32(v, mask)`, `shfl_idx_f32(v, lane)`, `shfl_idx_u32(v, lane)`, `any_sync(bool) -> bool` |
//! | global memory | [`Global`]`<T>`: `is_null()`, `offset(elements)`, `load(i)`, `store(i, v)`, `load_vec(i)`, `store_vec(i, [u32; 4])`, `load_vec8(i)` (two words), `load_word(i)` |
//! | shared memory | `ld_shared::<T>(address)`, `st_shared::<T>(address, v)`, `ld_shared_vec(address)`, `st_shared_vec(address, [u32; 4])` on byte addresses that start at `shared_base()` |
//! | async copy | `cp_async_16(shared address, Global<T>, element index, valid)`, `cp_async_commit()`, `cp_async_wait::<N>()` |
//! | matrix | `ldmatrix_x4(address)`, `ldmatrix_x4_trans(address)`, `ldmatrix_x2(address)`, `ldmatrix_x2_trans(address)`, `movmatrix_trans(u32)`, `mma_m16n8k16_f16(&mut [f32; 4], [u32; 4], [u32; 2])`, `mma_m16n8k16_bf16(..)`, `mma_m16n8k8_tf32(..)` |
//! | arithmetic | `exp2(x)`, `log2(x)`, `rcp(x)`, `rsqrt(x)`, `fma(a, b, c)`, `max(a, b)`, `max_u16x2(a, b)` (SM 90), `sub_f16x2(a, b)`, `mul_f16x2(a, b)`, `fma_f16x2(a, b, c)` (SM 80), `prmt(a, b, selector)`, `multiply_add(a, b, c)`, `select_bits(mask, a, b)` |
//! | conversion | `f16_to_f32(u16)`, `f16_{low,high}_to_f32(u32)`, `f32_to_f16(f32)`, the same of `bf16`, `f32x2_to_f16x2(lo, hi) -> u32`, `f32x2_to_bf16x2(lo, hi) -> u32` (pairs: SM 80), `e4m3x2_to_f16x2(u16) -> u32`, `f32x2_to_e4m3x2(lo, hi) -> u16`, `f32x4_to_e4m3x4([f32; 4]) -> u32` (SM 89) |
//! | barriers in memory | `mbarrier_init(address, arrivals)`, `fence_mbarrier_init()`, `mbarrier_arrive(address)`, `mbarrier_arrive_expect(address, bytes)`, `mbarrier_wait(address, parity)` (SM 90) |
//! | TMA | [`TensorMap`], `tma_load(shared address, map, [u32; 4], mbarrier)`, `tma_load_multicast(.., mask)`, `tma_store(map, [u32; 4], shared address)`, `bulk_commit()`, `bulk_wait_read()`, `prefetch_tensor_map(map)`, `fence_proxy_async()` (SM 90) |
//! | cluster | `cluster_rank()`, `cluster_size()`, `cluster_arrive()`, `cluster_arrive_relaxed()`, `cluster_wait()`, [`sync_cluster`]; [`Peer`]`<T>` from [`Shared::on`], or `peer_address(address, rank)` with `ld_peer`, `st_peer`, `ld_peer_vec`, `st_peer_vec`, `st_async`, `st_async_vec2`, `st_async_vec`; `mbarrier_arrive_peer(address)`, `mbarrier_arrive_peer_after_reads(address)`, `mbarrier_arrive_expect_peer(address, bytes)`, `mbarrier_wait_cluster(address, parity)` (SM 90; before, the cluster is one CTA) |
//! | bulk copy | `bulk_load(shared address, Global<T>, element index, bytes, mbarrier)`, `bulk_load_hinted(.., CachePolicy)`, `evict_first()`, `evict_last()` (SM 90) |
//! | between CTAs | [`Global`]`<u32>`: `atomic_add`, `atomic_inc`, each also `_acq_rel`, `load_acquire`, `load_relaxed`, `store_release`, `store_relaxed`; `fence_gpu()` |
//! | between GPUs | [`Global`]`<u64>`: `load_pair_system(i)`, `store_pair_system(i, [u64; 2])`, two words, each in one piece; `nanoseconds()` |
//! | between grids | `grid_dependency_wait()`, `launch_dependents()` |
//! | warpgroup | `wgmma_{f16,bf16,e4m3}`, `wgmma_add_*`, `wgmma_registers_*`, `wgmma_k_major_{f16,bf16}`, `wgmma_fence()`, `wgmma_commit()`, `wgmma_wait::<N>()`, `registers_raise::<N>()`, `registers_lower::<N>()`, `named_barrier_sync(id, threads)`, `named_barrier_arrive(id, threads)` (SM 90a) |
//! | tensor memory | `tcgen05_alloc(shared address, columns)`, `tcgen05_dealloc(address, columns)`, `tcgen05_relinquish()`, `tcgen05_mma_{f16,f8f6f4}(d, a, b, instruction, keep)`, with A in tensor memory `tcgen05_mma_tensor_*`, `tcgen05_commit(mbarrier)`, `tcgen05_ld_{32x32b,16x256b}::<N>(address) -> `[`TensorLoad`]`<N>`, `tcgen05_st_*`, `tcgen05_wait_{ld,st}()`, `tcgen05_fence_{before,after}()` (SM 100a, 103a) |
//! | optimiser | `opaque(u32)`: the same value, hidden from the optimiser; `hidden_one()`: 1, with which products stay multiplications; `constant_of_{bf16,f16}::<BF16, F16>()`: a constant of that type, hidden likewise; [`Rolled`] |
//! | abort | `trap()` |
//!
//! Memory functions are safe to call inside a kernel: a [`Global`] exists only because a launch
//! bound it, the planner checks launches, and the simulator faults on every access outside a view.
//! No function here may be called outside a kernel.

mod rolled;
mod shared;
pub use rolled::Rolled;
pub use shared::{Peer, Shared};

#[cfg(target_arch = "nvptx64")]
mod nvptx;
#[cfg(target_arch = "nvptx64")]
pub use nvptx::*;

#[cfg(not(target_arch = "nvptx64"))]
pub use gqa_sim::device::*;

/// Cluster barrier: waits for all threads of the cluster and orders their memory accesses. SM 90.
#[track_caller]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sync_cluster() {
    cluster_arrive();
    cluster_wait();
}
