//! Executes a warp's instruction once its last lane has arrived.

use crate::blackwell;
use crate::block::{Block, Lane};
use crate::cluster;
use crate::hopper;
use crate::instruction::Collective;
use crate::matrix;
use crate::shared::Checked;

/// Executes the instruction for the warp whose first thread is `first`; all its lanes have
/// arrived.
pub(crate) fn execute(instruction: Collective, block: &mut Block, first: usize) -> Checked {
    match instruction {
        // Its effect is on the warp's clock, which the scheduler keeps.
        Collective::SyncWarp => {}
        Collective::ShflXor => shuffle(block, first, |lane, operand| lane ^ operand),
        Collective::ShflIdx => shuffle(block, first, |_, operand| operand),
        Collective::AnySync => {
            let lanes = warp(block, first);
            let any = lanes.iter().any(|lane| lane.registers[0] != 0);
            lanes.iter_mut().for_each(|lane| lane.registers[0] = any as u32);
        }
        Collective::LoadMatrices(matrices) => return matrix::load(block, first, matrices),
        Collective::Transpose => matrix::transpose(warp(block, first)),
        Collective::Product(product) => matrix::multiply(warp(block, first), product),
        Collective::ProductTf32 => matrix::multiply_tf32(warp(block, first)),
        Collective::NamedBarrier { id, threads, waits } => {
            return hopper::arrive_named(block, first, id, threads, waits);
        }
        Collective::Registers(_) | Collective::Wgmma(_) => {
            return hopper::arrive_warpgroup(block, first, instruction);
        }
        Collective::WgmmaFence => hopper::fence(block, first),
        Collective::WgmmaCommit => hopper::commit(block, first),
        Collective::WgmmaWait(newest) => hopper::wait(block, first, newest),
        Collective::ClusterArrive { relaxed } => return cluster::arrive(block, first, relaxed),
        Collective::ClusterWait => return cluster::wait(block, first),
        Collective::TensorAlloc => return blackwell::alloc(block, first),
        Collective::TensorDealloc => return blackwell::dealloc(block, first),
        Collective::TensorRelinquish => blackwell::relinquish(block),
        Collective::TensorMove(form) => return blackwell::transfer(block, first, form),
        Collective::TensorWait { stores } => blackwell::wait(block, first, stores),
    }
    Ok(())
}

fn warp(block: &mut Block, first: usize) -> &mut [Lane; 32] {
    block.lanes[first..].first_chunk_mut().expect("a block has whole warps")
}

/// Register 0 holds the value, register 1 the source lane or mask.
fn shuffle(block: &mut Block, first: usize, source: impl Fn(u32, u32) -> u32) {
    let lanes = warp(block, first);
    let values: [u32; 32] = std::array::from_fn(|lane| lanes[lane].registers[0]);
    for (lane, state) in lanes.iter_mut().enumerate() {
        let from = source(lane as u32, state.registers[1]) % 32;
        state.registers[0] = values[from as usize];
    }
}
