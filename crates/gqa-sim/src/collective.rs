//! Instructions that a warp executes together: every lane brings its operands, the last one's
//! arrival executes it for all.

use crate::block::{self, Block, Lane, Waiting};
use crate::cluster;
use crate::hopper::{self, Change, Wgmma};
use crate::matrix::{self, Matrices, Product};
use crate::shared::Checked;
use std::panic::Location;

/// Which instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    SyncWarp,
    ShflXor,
    ShflIdx,
    AnySync,
    LoadMatrices(Matrices),
    Product(Product),
    ProductTf32,
    NamedBarrier { id: u32, threads: u32, waits: bool },
    Registers(Change),
    Wgmma(Wgmma),
    WgmmaFence,
    WgmmaCommit,
    WgmmaWait(u64),
    ClusterArrive { relaxed: bool },
    ClusterWait,
}

impl Collective {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SyncWarp => "sync_warp",
            Self::ShflXor => "shfl_xor",
            Self::ShflIdx => "shfl_idx",
            Self::AnySync => "any_sync",
            Self::LoadMatrices(matrices) => matrices.name(),
            Self::Product(product) => product.name(),
            Self::ProductTf32 => "mma_m16n8k8_tf32",
            Self::NamedBarrier { waits: true, .. } => "named_barrier_sync",
            Self::NamedBarrier { waits: false, .. } => "named_barrier_arrive",
            Self::Registers(change) => change.name(),
            Self::Wgmma(form) => form.name(),
            Self::WgmmaFence => "wgmma_fence",
            Self::WgmmaCommit => "wgmma_commit",
            Self::WgmmaWait(_) => "wgmma_wait",
            Self::ClusterArrive { relaxed: false } => "cluster_arrive",
            Self::ClusterArrive { relaxed: true } => "cluster_arrive_relaxed",
            Self::ClusterWait => "cluster_wait",
        }
    }

    /// Whether lanes may rely on each other's memory accesses after it. Shuffles, votes and matrix
    /// instructions promise nothing.
    pub(crate) fn orders_memory(self) -> bool {
        self == Self::SyncWarp
    }

    /// Executes the instruction for the warp whose first thread is `first`; all its lanes have
    /// arrived.
    pub(crate) fn execute(self, block: &mut Block, first: usize) -> Checked {
        match self {
            // Its effect is on the warp's clock, which the scheduler keeps.
            Self::SyncWarp => {}
            Self::ShflXor => shuffle(block, first, |lane, operand| lane ^ operand),
            Self::ShflIdx => shuffle(block, first, |_, operand| operand),
            Self::AnySync => {
                let lanes = warp(block, first);
                let any = lanes.iter().any(|lane| lane.registers[0] != 0);
                lanes.iter_mut().for_each(|lane| lane.registers[0] = any as u32);
            }
            Self::LoadMatrices(matrices) => return matrix::load(block, first, matrices),
            Self::Product(product) => matrix::multiply(warp(block, first), product),
            Self::ProductTf32 => matrix::multiply_tf32(warp(block, first)),
            Self::NamedBarrier { id, threads, waits } => {
                return hopper::arrive_named(block, first, id, threads, waits);
            }
            Self::Registers(_) | Self::Wgmma(_) => {
                return hopper::arrive_warpgroup(block, first, self);
            }
            Self::WgmmaFence => hopper::fence(block, first),
            Self::WgmmaCommit => hopper::commit(block, first),
            Self::WgmmaWait(newest) => hopper::wait(block, first, newest),
            Self::ClusterArrive { relaxed } => return cluster::arrive(block, first, relaxed),
            Self::ClusterWait => return cluster::wait(block, first),
        }
        Ok(())
    }
}

fn warp(block: &mut Block, first: usize) -> &mut [Lane; 32] {
    block.lanes[first..].first_chunk_mut().expect("a block has whole warps")
}

/// Register 0 is the value, register 1 says where from.
fn shuffle(block: &mut Block, first: usize, source: impl Fn(u32, u32) -> u32) {
    let lanes = warp(block, first);
    let values: [u32; 32] = std::array::from_fn(|lane| lanes[lane].registers[0]);
    for (lane, state) in lanes.iter_mut().enumerate() {
        let from = source(lane as u32, state.registers[1]) % 32;
        state.registers[0] = values[from as usize];
    }
}

/// Waits for the warp at an instruction; returns the first registers it leaves.
#[track_caller]
#[inline(always)]
pub(crate) fn meet<const N: usize, const M: usize>(
    instruction: Collective,
    operands: [u32; N],
) -> [u32; M] {
    let site = Location::caller();
    block::with(|block| {
        let lane = block.lane();
        lane.registers[..N].copy_from_slice(&operands);
        lane.waiting = Waiting::Warp(instruction, site);
    });
    block::suspend();
    block::with(|block| std::array::from_fn(|i| block.lane().registers[i]))
}

/// Waits for all threads of the block and orders their memory accesses.
#[track_caller]
#[inline(always)]
pub fn sync_threads() {
    let site = Location::caller();
    block::with(|block| block.lane().waiting = Waiting::Block(site));
    block::suspend();
}

/// Waits for all lanes of the warp and orders their memory accesses.
#[track_caller]
#[inline(always)]
pub fn sync_warp() {
    let [] = meet(Collective::SyncWarp, []);
}

/// `v` of lane `lane() ^ mask`.
#[track_caller]
#[inline(always)]
pub fn shfl_xor_f32(v: f32, mask: u32) -> f32 {
    f32::from_bits(shfl_xor_u32(v.to_bits(), mask))
}

/// `v` of lane `lane() ^ mask`.
#[track_caller]
#[inline(always)]
pub fn shfl_xor_u32(v: u32, mask: u32) -> u32 {
    let [value] = meet(Collective::ShflXor, [v, mask]);
    value
}

/// `v` of that lane.
#[track_caller]
#[inline(always)]
pub fn shfl_idx_f32(v: f32, lane: u32) -> f32 {
    f32::from_bits(shfl_idx_u32(v.to_bits(), lane))
}

/// `v` of that lane.
#[track_caller]
#[inline(always)]
pub fn shfl_idx_u32(v: u32, lane: u32) -> u32 {
    let [value] = meet(Collective::ShflIdx, [v, lane]);
    value
}

/// Whether any lane of the warp votes true.
#[track_caller]
#[inline(always)]
pub fn any_sync(vote: bool) -> bool {
    let [any] = meet(Collective::AnySync, [vote as u32]);
    any != 0
}
