//! Instructions that a warp executes together: every lane brings its operands and waits.

use crate::block::{self, Waiting};
use crate::instruction::Collective;
use std::panic::Location;

/// Waits for the warp at an instruction; returns the first result registers.
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

/// Waits for all threads of the CTA and orders their memory accesses.
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
