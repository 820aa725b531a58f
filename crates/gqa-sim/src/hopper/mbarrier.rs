//! Transaction barriers: a phase completes when its arrivals have come and its bytes have landed.

use crate::block::{self, Block, Waiting};
use crate::fault::FaultKind;
use crate::shared::Checked;
use std::panic::Location;

/// A barrier in shared memory.
pub(super) struct Mbarrier {
    /// Arrivals of each phase.
    count: u32,
    /// Arrivals that the running phase still waits for.
    arrivals: u32,
    /// Bytes that the running phase still waits for; negative while they land before they are announced.
    bytes: i64,
    /// Phases completed.
    phases: u32,
}

fn misuse<T>(block: &Block, address: u32, what: impl Into<String>) -> Checked<T> {
    let thread = block.who.thread;
    Err(Box::new(FaultKind::Mbarrier { thread, address, what: what.into() }))
}

fn initialise(block: &mut Block, address: u32, arrivals: u32) -> Checked {
    block.shared.refine();
    block.shared.check_place(block.who, address, 8)?;
    if arrivals == 0 || arrivals >= 1 << 20 {
        return misuse(block, address, format!("cannot wait for {arrivals} arrivals"));
    }
    let fresh = Mbarrier { count: arrivals, arrivals, bytes: 0, phases: 0 };
    match block.hopper.mbarriers.insert(address, fresh) {
        None => Ok(()),
        Some(_) => misuse(block, address, "initialised again"),
    }
}

/// The barrier at that address.
pub(super) fn find(block: &mut Block, address: u32) -> Checked<&mut Mbarrier> {
    if !block.hopper.mbarriers.contains_key(&address) {
        return misuse(block, address, "not initialised");
    }
    Ok(block.hopper.mbarriers.get_mut(&address).expect("just seen"))
}

fn arrive(block: &mut Block, address: u32, bytes: u32) -> Checked {
    let barrier = find(block, address)?;
    let Some(arrivals) = barrier.arrivals.checked_sub(1) else {
        let count = barrier.count;
        return misuse(block, address, format!("more than {count} arrivals in a phase"));
    };
    barrier.arrivals = arrivals;
    barrier.bytes += bytes as i64;
    settle(block, address)
}

/// Bytes of a copy have landed.
pub(super) fn receive(block: &mut Block, address: u32, bytes: u32) -> Checked {
    find(block, address)?.bytes -= bytes as i64;
    settle(block, address)
}

/// Completes the phase if nothing is missing.
fn settle(block: &mut Block, address: u32) -> Checked {
    let barrier = find(block, address)?;
    if barrier.arrivals > 0 || barrier.bytes > 0 {
        return Ok(());
    }
    if barrier.bytes < 0 {
        let excess = -barrier.bytes;
        return misuse(block, address, format!("{excess} bytes more than expected have landed"));
    }
    barrier.arrivals = barrier.count;
    barrier.phases += 1;
    block.woken = true;
    Ok(())
}

/// Whether the phase of that parity has completed.
pub(crate) fn has_passed(block: &Block, address: u32, parity: u32) -> bool {
    block.hopper.mbarriers.get(&address).is_some_and(|barrier| barrier.phases % 2 != parity)
}

/// What the running phase still waits for: arrivals and bytes.
pub(crate) fn missing(block: &Block, address: u32) -> (u32, i64) {
    let barrier = block.hopper.mbarriers.get(&address);
    barrier.map_or((0, 0), |barrier| (barrier.arrivals, barrier.bytes))
}

fn try_wait(block: &mut Block, address: u32, parity: u32) -> Checked<bool> {
    find(block, address)?;
    if parity > 1 {
        return misuse(block, address, format!("parity {parity}"));
    }
    Ok(has_passed(block, address, parity))
}

/// Makes the barrier at `address` wait for `arrivals` per phase.
pub fn mbarrier_init(address: u32, arrivals: u32) {
    block::checked(|block| initialise(block, address, arrivals));
}

/// Makes initialised barriers visible to the copy engine; a block barrier must follow.
pub fn fence_mbarrier_init() {}

/// Arrives once.
pub fn mbarrier_arrive(address: u32) {
    block::checked(|block| arrive(block, address, 0));
}

/// Arrives once and adds `bytes` to what the phase waits for.
pub fn mbarrier_arrive_expect(address: u32, bytes: u32) {
    block::checked(|block| arrive(block, address, bytes));
}

/// Waits until the phase of that parity has completed.
#[track_caller]
pub fn mbarrier_wait(address: u32, parity: u32) {
    let site = Location::caller();
    while !block::checked(|block| try_wait(block, address, parity)) {
        block::with(|block| block.lane().waiting = Waiting::Phase { address, parity, site });
        block::suspend();
    }
}
