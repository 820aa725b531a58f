//! The SM 100 units of a CTA: tensor memory and `tcgen05`, of one CTA (`cta_group::1`).
//!
//! From the text of the PTX ISA, version 9.2, section 9.7.16. What is not in its text but in its
//! figures is taken from programs that ran on such a GPU, as each file says.
//!
//! `tcgen05.mma` reads its operands and writes D at once here, and `tcgen05.ld` and `st` move
//! registers at once: what may come too early on hardware is found by comparing clocks
//! (`order.rs`), not by the values.

mod descriptor;
mod instruction;
mod memory;
mod movement;
mod order;
mod product;

pub use movement::{
    TensorLoad, tcgen05_ld_16x256b, tcgen05_ld_32x32b, tcgen05_st_16x256b, tcgen05_st_32x32b,
    tcgen05_wait_ld, tcgen05_wait_st,
};
pub use order::{tcgen05_fence_after, tcgen05_fence_before};
pub use product::{
    tcgen05_commit, tcgen05_mma_f8f6f4, tcgen05_mma_f16, tcgen05_mma_tensor_f8f6f4,
    tcgen05_mma_tensor_f16,
};

pub(crate) use movement::{transfer, wait};

use crate::block::Block;
use crate::collective::meet;
use crate::fault::FaultKind;
use crate::instruction::Collective;
use crate::shared::{Checked, Clocks};
use memory::TensorMemory;
use order::{Order, Viewer};

/// Tensor memory of a CTA, and who may access it.
pub(crate) struct Blackwell {
    memory: TensorMemory,
    order: Order,
    /// `tcgen05.mma` so far.
    products: u64,
}

impl Blackwell {
    fn new(threads: u32, clocks: &mut Clocks) -> Self {
        Self { memory: TensorMemory::new(), order: Order::new(threads, clocks), products: 0 }
    }
}

fn misuse<T>(thread: u32, what: impl Into<String>) -> Checked<T> {
    Err(Box::new(FaultKind::TensorMemory { thread, what: what.into() }))
}

/// Tensor memory, in use from now on, and the clocks.
fn begin(block: &mut Block) -> (&mut Blackwell, &mut Clocks) {
    let threads = block.lanes.len() as u32;
    block.vector_clocks();
    let clocks = block.shared.clocks().expect("just begun");
    let state = block.blackwell.get_or_insert_with(|| Box::new(Blackwell::new(threads, clocks)));
    (state, clocks)
}

/// Register `register` of a warp's lanes, which all must agree on.
fn uniform(block: &Block, first: usize, register: usize, what: &str) -> Checked<u32> {
    let lanes = &block.lanes[first..][..32];
    let value = lanes[0].registers[register];
    match lanes.iter().position(|lane| lane.registers[register] != value) {
        None => Ok(value),
        Some(lane) => misuse((first + lane) as u32, format!("lanes give different {what}")),
    }
}

/// Register 0 is where the address goes in shared memory, register 1 the number of columns.
pub(crate) fn alloc(block: &mut Block, first: usize) -> Checked {
    let place = uniform(block, first, 0, "places for the address")?;
    let columns = uniform(block, first, 1, "numbers of columns")?;
    let thread = first as u32;
    let (state, _) = begin(block);
    let address = state.memory.allocate(columns).or_else(|what| misuse(thread, what))?;
    block.who.thread = thread;
    block.shared.store(block.who, place, address)
}

/// Register 0 is the address, register 1 the number of columns.
pub(crate) fn dealloc(block: &mut Block, first: usize) -> Checked {
    let address = uniform(block, first, 0, "addresses")?;
    let columns = uniform(block, first, 1, "numbers of columns")?;
    let thread = first as u32;
    let (state, clocks) = begin(block);
    let viewer = Viewer::dealloc(&state.order, clocks, thread / 32);
    let given_back = state.memory.give_back(address, columns, &viewer)?;
    given_back.or_else(|what| misuse(thread, what))
}

/// The CTA allocates no more.
pub(crate) fn relinquish(block: &mut Block) {
    begin(block).0.memory.relinquish();
}

/// All threads have exited; returns the number of products.
pub(crate) fn end(block: &Block) -> Checked<u64> {
    let Some(state) = &block.blackwell else { return Ok(0) };
    match state.memory.allocated() {
        0 => Ok(state.products),
        columns => misuse(0, format!("the block ends and has not given back {columns} columns")),
    }
}

/// Allocates `columns` columns of tensor memory, a power of two from 32 to 512, and writes their
/// address to shared memory.
#[track_caller]
#[inline]
pub fn tcgen05_alloc(place: u32, columns: u32) {
    let [] = meet(Collective::TensorAlloc, [place, columns]);
}

/// Gives columns back.
#[track_caller]
#[inline]
pub fn tcgen05_dealloc(address: u32, columns: u32) {
    let [] = meet(Collective::TensorDealloc, [address, columns]);
}

/// Lets other CTAs of the SM allocate; this one must not any more.
#[track_caller]
#[inline]
pub fn tcgen05_relinquish() {
    let [] = meet(Collective::TensorRelinquish, []);
}
