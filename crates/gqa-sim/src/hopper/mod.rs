//! The SM 90 units of a CTA: transaction barriers, TMA, named barriers, warpgroups with `wgmma`,
//! and `setmaxnreg`.

mod descriptor;
mod mbarrier;
mod named_barrier;
mod registers;
mod tensor;
mod tma;
mod warpgroup;

pub use mbarrier::{
    fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect, mbarrier_arrive_expect_peer,
    mbarrier_arrive_peer, mbarrier_arrive_peer_after_reads, mbarrier_init, mbarrier_test,
    mbarrier_wait, mbarrier_wait_cluster, mbarrier_wait_unless,
};
pub use named_barrier::{named_barrier_arrive, named_barrier_sync};
pub use registers::{registers_lower, registers_raise};
pub use tensor::{Swizzle, TensorLayout};
pub use tma::{
    CachePolicy, TensorMap, bulk_commit, bulk_load, bulk_load_hinted, bulk_wait_read, evict_first,
    evict_last, fence_proxy_async, prefetch_tensor_map, st_async, st_async_vec, st_async_vec2,
    tma_load, tma_load_multicast, tma_store,
};
pub use warpgroup::{
    wgmma_add_bf16, wgmma_add_e4m3, wgmma_add_f16, wgmma_bf16, wgmma_commit, wgmma_e4m3, wgmma_f16,
    wgmma_fence, wgmma_k_major_bf16, wgmma_k_major_f16, wgmma_registers_bf16, wgmma_registers_e4m3,
    wgmma_registers_f16, wgmma_wait,
};

pub(crate) use mbarrier::{has_passed, missing, release_initialised};
pub(crate) use named_barrier::arrive as arrive_named;
pub(crate) use registers::shortage as register_shortage;
pub(crate) use tma::{land, start_commit};
pub(crate) use warpgroup::{arrive as arrive_warpgroup, commit, fence, wait};

use crate::block::Block;
use crate::shared::Checked;
use mbarrier::Mbarrier;
use named_barrier::NamedBarrier;
use registers::Pool;
use std::collections::BTreeMap;
use tma::{Load, Stores};
use warpgroup::{Queue, Warpgroup};

/// State of a CTA's asynchronous units.
pub(crate) struct Hopper {
    /// By address.
    mbarriers: BTreeMap<u32, Mbarrier>,
    /// Copies into shared memory in flight.
    pub(crate) loads: Vec<Load>,
    /// By thread.
    stores: BTreeMap<u32, Stores>,
    named_barriers: [NamedBarrier; 16],
    warpgroups: Vec<Warpgroup>,
    /// Wgmmas of each warp.
    queues: Vec<Queue>,
    pool: Pool,
}

impl Hopper {
    pub(crate) fn new(threads: u32) -> Self {
        Self {
            mbarriers: BTreeMap::new(),
            loads: Vec::new(),
            stores: BTreeMap::new(),
            named_barriers: Default::default(),
            warpgroups: vec![Warpgroup::default(); threads as usize / 128],
            queues: vec![Queue::default(); threads as usize / 32],
            pool: Pool::new(threads),
        }
    }
}

/// The warp exits.
#[inline]
pub(crate) fn exit(block: &Block, warp: usize) -> Checked {
    warpgroup::check_exit(block, warp)?;
    if block.hopper.stores.is_empty() {
        return Ok(());
    }
    (warp as u32 * 32..warp as u32 * 32 + 32).try_for_each(|thread| tma::check_exit(block, thread))
}

/// All warps have exited.
pub(crate) fn end(block: &mut Block) -> Checked {
    mbarrier::check_waited(block)
}
