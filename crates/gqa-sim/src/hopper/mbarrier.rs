//! Transaction barriers: a phase completes when its arrivals have come and its bytes have landed.

use crate::block::{self, Block, Waiting};
use crate::fault::{Agent, FaultKind, Hazard};
use crate::shared::{Checked, Stamp, View, raise};
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
    initialised: Stamp,
    /// Since when the copy engine may know of the barrier.
    fenced: Option<Stamp>,
    /// The copy engine's writes that complete here, for the vector clocks: those of phase n have time n.
    agent: u32,
    /// What those who have arrived have done and seen.
    arrived: View,
    /// As much of it as those who wait may see.
    completed: View,
    /// Phases up to the last one that copies complete.
    loaded: u32,
    /// Phases that somebody has waited for.
    waited: u32,
}

fn misuse<T>(block: &Block, address: u32, what: impl Into<String>) -> Checked<T> {
    let thread = block.who.thread;
    Err(Box::new(FaultKind::Mbarrier { thread, address, what: what.into() }))
}

fn initialise(block: &mut Block, address: u32, arrivals: u32) -> Checked {
    if arrivals == 0 || arrivals >= 1 << 20 {
        return misuse(block, address, format!("cannot wait for {arrivals} arrivals"));
    }
    if block.hopper.mbarriers.contains_key(&address) {
        return misuse(block, address, "initialised again");
    }
    let thread = block.who.thread;
    let clocks = block.vector_clocks();
    let (initialised, agent) = (clocks.now(thread), clocks.add(Agent::Load { mbarrier: address }));
    block.shared.initialise(block.who, address)?;
    let fresh = Mbarrier {
        count: arrivals,
        arrivals,
        bytes: 0,
        phases: 0,
        initialised,
        fenced: None,
        agent,
        arrived: View::new(),
        completed: View::new(),
        loaded: 0,
        waited: 0,
    };
    block.hopper.mbarriers.insert(address, fresh);
    Ok(())
}

/// The barrier at that address.
fn get(block: &mut Block, address: u32) -> Checked<&mut Mbarrier> {
    if !block.hopper.mbarriers.contains_key(&address) {
        return misuse(block, address, "not initialised");
    }
    Ok(block.hopper.mbarriers.get_mut(&address).expect("just seen"))
}

/// As [`get`], for the running thread, which must know that the barrier is initialised.
fn find(block: &mut Block, address: u32) -> Checked<&mut Mbarrier> {
    let second = block.who.thread;
    let stamp = get(block, address)?.initialised;
    if !block.vector_clocks().sees(second, stamp) {
        let (hazard, first) = (Hazard::ReadAfterWrite, stamp.agent);
        return Err(Box::new(FaultKind::Race { address, hazard, first, second }));
    }
    get(block, address)
}

/// Expects a copy of the running thread onto the barrier; returns whose write it is and when.
pub(super) fn begin_load(block: &mut Block, address: u32) -> Checked<Stamp> {
    let thread = block.who.thread;
    let barrier = find(block, address)?;
    let (fenced, writer) = (barrier.fenced, barrier.initialised.agent);
    let write = Stamp { agent: barrier.agent, time: barrier.phases };
    barrier.loaded = barrier.phases + 1;
    if !fenced.is_some_and(|fence| block.vector_clocks().sees(thread, fence)) {
        let what = format!("tma_load without a fence_mbarrier_init of thread {writer} before");
        return misuse(block, address, what);
    }
    Ok(write)
}

fn fence(block: &mut Block) {
    let thread = block.who.thread;
    let now = block.vector_clocks().now(thread);
    for barrier in block.hopper.mbarriers.values_mut() {
        if barrier.initialised.agent == thread {
            barrier.fenced.get_or_insert(now);
        }
    }
    block.vector_clocks().tick(thread);
}

fn arrive(block: &mut Block, address: u32, bytes: u32) -> Checked {
    let barrier = find(block, address)?;
    let Some(arrivals) = barrier.arrivals.checked_sub(1) else {
        let count = barrier.count;
        return misuse(block, address, format!("more than {count} arrivals in a phase"));
    };
    barrier.arrivals = arrivals;
    barrier.bytes += bytes as i64;
    let mut arrived = std::mem::take(&mut barrier.arrived);
    let thread = block.who.thread;
    block.vector_clocks().release(thread, &mut arrived);
    get(block, address)?.arrived = arrived;
    settle(block, address)
}

/// Bytes of a copy have landed.
pub(super) fn receive(block: &mut Block, address: u32, bytes: u32) -> Checked {
    get(block, address)?.bytes -= bytes as i64;
    settle(block, address)
}

/// Completes the phase if nothing is missing.
fn settle(block: &mut Block, address: u32) -> Checked {
    let underway = block.hopper.loads.iter().filter(|load| load.barrier == address).count();
    let barrier = get(block, address)?;
    if barrier.arrivals > 0 || barrier.bytes > 0 {
        return Ok(());
    }
    if barrier.bytes == 0 && underway > 0 {
        let what = format!("its phase completes while {underway} copies to it are under way");
        return misuse(block, address, what);
    }
    if barrier.bytes < 0 {
        let excess = -barrier.bytes;
        return misuse(block, address, format!("{excess} bytes more than expected have landed"));
    }
    barrier.arrivals = barrier.count;
    barrier.phases += 1;
    barrier.completed.clone_from(&barrier.arrived);
    raise(&mut barrier.completed, barrier.agent, barrier.phases);
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
    if !has_passed(block, address, parity) {
        return Ok(false);
    }
    let barrier = get(block, address)?;
    barrier.waited = barrier.phases;
    let completed = std::mem::take(&mut barrier.completed);
    let thread = block.who.thread;
    block.vector_clocks().acquire(thread, &completed);
    get(block, address)?.completed = completed;
    Ok(true)
}

/// Faults if copies complete a phase that nobody has waited for: the block's memory may be another's when they land.
pub(super) fn check_waited(block: &mut Block) -> Checked {
    let mbarriers = block.hopper.mbarriers.iter();
    let unwaited = mbarriers.filter(|(_, barrier)| barrier.loaded > barrier.waited);
    match unwaited.map(|(address, _)| *address).next() {
        Some(address) => {
            misuse(block, address, "the block ends and nobody has waited for its copies")
        }
        None => Ok(()),
    }
}

/// Makes the barrier at `address` wait for `arrivals` per phase.
pub fn mbarrier_init(address: u32, arrivals: u32) {
    block::checked(|block| initialise(block, address, arrivals));
}

/// Makes initialised barriers visible to the copy engine; a block barrier must follow.
pub fn fence_mbarrier_init() {
    block::with(fence);
}

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
#[inline]
pub fn mbarrier_wait(address: u32, parity: u32) {
    let site = Location::caller();
    while !block::checked(|block| try_wait(block, address, parity)) {
        block::with(|block| block.lane().waiting = Waiting::Phase { address, parity, site });
        block::suspend();
    }
}
