//! Transaction barriers: a phase completes when its arrivals have come and its bytes have landed.

use crate::block::{self, Block, Waiting};
use crate::cluster::{self, Reached};
use crate::fault::{Agent, FaultKind, Hazard};
use crate::shared::{Checked, Clocks, Stamp, View};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;

/// A barrier in shared memory.
pub(super) struct Mbarrier {
    /// Arrivals of each phase.
    count: u32,
    /// Arrivals that the current phase still needs.
    arrivals: u32,
    /// Bytes that the current phase still needs; negative while bytes land before they are
    /// expected.
    bytes: i64,
    /// Phases completed.
    phases: u32,
    initialised: Stamp,
    /// The fence after initialisation: TMA, and threads that are ordered after it, may use the
    /// barrier.
    fenced: Option<Stamp>,
    /// TMA writes that complete here, as an agent of the vector clocks: writes of phase n have time
    /// n.
    agent: u32,
    /// The joined views of the threads that have arrived.
    arrived: View,
    /// The part of it that waiting threads may see.
    completed: View,
    /// The number of phases up to the last one that copies or commits complete.
    loaded: u32,
    /// Phases that some thread has waited for.
    waited: u32,
    /// Whether peers have arrived or stored in the current phase, and in the last completed one.
    peers: [bool; 2],
    /// The thread whose arrival alone completed the last phase.
    alone: Option<u32>,
}

fn misuse<T>(block: &Block, address: u32, what: impl Into<String>) -> Checked<T> {
    refuse(block.who.thread, address, what)
}

fn refuse<T>(thread: u32, address: u32, what: impl Into<String>) -> Checked<T> {
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
        arrived: View::default(),
        completed: View::default(),
        loaded: 0,
        waited: 0,
        peers: [false; 2],
        alone: None,
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

impl Mbarrier {
    /// Faults unless the initialisation is ordered before the thread with these clocks.
    fn check_known(&self, clocks: &Clocks, second: u32, address: u32) -> Checked {
        if clocks.sees(second, self.initialised) || self.is_fenced(clocks, second) {
            return Ok(());
        }
        let hazard = Hazard::ReadAfterWrite;
        let (first, second) = (clocks.name(self.initialised), Agent::Thread(second));
        Err(Box::new(FaultKind::race(address, hazard, first, second)))
    }

    /// Whether the thread is ordered after the fence of the initialisation.
    fn is_fenced(&self, clocks: &Clocks, thread: u32) -> bool {
        self.fenced.is_some_and(|fence| clocks.sees(thread, fence))
    }

    /// A copy or store of the current phase: its agent and time.
    fn expect(&mut self) -> Stamp {
        self.loaded = self.phases + 1;
        Stamp { agent: self.agent, time: self.phases, ..self.initialised }
    }
}

/// As [`get`], for the running thread; faults unless it is ordered after the initialisation.
fn find(block: &mut Block, address: u32) -> Checked<&mut Mbarrier> {
    get(block, address)?;
    let thread = block.who.thread;
    let clocks = block.shared.clocks().expect("mbarriers need vector clocks");
    let barrier = block.hopper.mbarriers.get_mut(&address).expect("just seen");
    barrier.check_known(clocks, thread, address)?;
    Ok(barrier)
}

/// As [`find`], for a barrier of a peer; the clocks are the running thread's.
fn find_in<'a>(
    other: &'a mut Block,
    clocks: &Clocks,
    thread: u32,
    address: u32,
) -> Checked<&'a mut Mbarrier> {
    let Some(barrier) = other.hopper.mbarriers.get_mut(&address) else {
        return refuse(thread, address, "not initialised in that block");
    };
    barrier.check_known(clocks, thread, address)?;
    barrier.peers[0] = true;
    Ok(barrier)
}

/// Registers a copy of the running thread that completes on the barrier; returns its agent and
/// time.
pub(super) fn begin_load(block: &mut Block, address: u32) -> Checked<Stamp> {
    let thread = block.who.thread;
    find(block, address)?;
    let clocks = block.shared.clocks().expect("mbarriers need vector clocks");
    let barrier = block.hopper.mbarriers.get_mut(&address).expect("just seen");
    if !barrier.is_fenced(clocks, thread) {
        let writer = barrier.initialised.agent;
        let what = format!("a copy without a fence_mbarrier_init of thread {writer} before");
        return misuse(block, address, what);
    }
    Ok(barrier.expect())
}

/// As [`begin_load`], for a store that completes on a peer's barrier, by a thread with these
/// clocks.
pub(super) fn begin_store(
    other: &mut Block,
    clocks: &Clocks,
    thread: u32,
    address: u32,
) -> Checked<Stamp> {
    find_in(other, clocks, thread, address)?;
    begin_remote(other, clocks, thread, address)
}

/// As [`begin_store`], for a copy of the TMA. Threads that wait for it need not acquire what peers
/// did.
pub(super) fn begin_multicast(
    other: &mut Block,
    clocks: &Clocks,
    thread: u32,
    address: u32,
) -> Checked<Stamp> {
    let Some(barrier) = other.hopper.mbarriers.get_mut(&address) else {
        return refuse(thread, address, "not initialised in that block");
    };
    barrier.check_known(clocks, thread, address)?;
    begin_remote(other, clocks, thread, address)
}

fn begin_remote(other: &mut Block, clocks: &Clocks, thread: u32, address: u32) -> Checked<Stamp> {
    let barrier = other.hopper.mbarriers.get_mut(&address).expect("just found");
    if !barrier.is_fenced(clocks, thread) {
        return refuse(thread, address, "a remote copy without a fence_mbarrier_init before");
    }
    let earlier = barrier.phases.checked_sub(1);
    let earlier = earlier.map(|time| Stamp { agent: barrier.agent, time, ..barrier.initialised });
    if earlier.is_some_and(|phase| !clocks.sees(thread, phase)) {
        let what = "a remote copy not ordered after the completion of the previous phase";
        return refuse(thread, address, what);
    }
    Ok(barrier.expect())
}

/// Adds the initialisations that these threads have fenced to `view`.
pub(crate) fn release_initialised(block: &Block, threads: Range<u32>, view: &mut View) {
    let barriers = block.hopper.mbarriers.values();
    for barrier in barriers.filter(|barrier| threads.contains(&barrier.initialised.agent)) {
        if let Some(fence) = barrier.fenced {
            view.raise(fence.agent, fence.time + 1);
        }
    }
}

fn fence(block: &mut Block) {
    let thread = block.who.thread;
    let is_new =
        |barrier: &&mut Mbarrier| barrier.initialised.agent == thread && barrier.fenced.is_none();
    let fence = block.vector_clocks().add(Agent::Thread(thread));
    let fence = block.vector_clocks().stamp(fence, 0);
    for barrier in block.hopper.mbarriers.values_mut().filter(is_new) {
        barrier.fenced = Some(fence);
    }
    block.vector_clocks().advance(thread, fence.agent, 1);
}

fn arrive(block: &mut Block, address: u32, bytes: u32) -> Checked {
    let thread = block.who.thread;
    find(block, address)?.count_arrival(thread, address, bytes)?;
    let clocks = block.shared.clocks().expect("mbarriers need vector clocks");
    let barrier = block.hopper.mbarriers.get_mut(&address).expect("just found");
    barrier.check_phase(clocks, thread, address)?;
    barrier.alone = (barrier.count == 1 && barrier.loaded <= barrier.phases).then_some(thread);
    clocks.release(thread, &mut barrier.arrived);
    settle(block, thread, address)
}

/// Registers an arrival of the running thread's products, once they are complete.
pub(super) fn begin_commit(block: &mut Block, address: u32) -> Checked {
    let thread = block.who.thread;
    find(block, address)?;
    let clocks = block.shared.clocks().expect("mbarriers need vector clocks");
    let barrier = block.hopper.mbarriers.get(&address).expect("just found");
    barrier.check_phase(clocks, thread, address)
}

/// Products of that thread are complete and arrive; threads that wait acquire `view`.
pub(super) fn complete(block: &mut Block, thread: u32, address: u32, view: &View) -> Checked {
    let barrier = get(block, address)?;
    barrier.count_arrival(thread, address, 0)?;
    barrier.alone = (barrier.count == 1 && barrier.loaded <= barrier.phases).then_some(thread);
    barrier.loaded = barrier.phases + 1;
    barrier.arrived.join(view);
    settle(block, thread, address)
}

/// As [`arrive`], at an address of the cluster's window.
fn arrive_peer(block: &mut Block, address: u32, bytes: u32) -> Checked {
    let thread = block.who.thread;
    let cluster = block.membership.cluster.clone();
    match cluster::visit_address(block, address)? {
        Reached::Own(block, address) => arrive(block, address, bytes),
        Reached::Other { clocks, other, address } => {
            let home = other.number;
            let barrier = find_in(other, clocks, thread, address)?;
            barrier.count_arrival(thread, address, bytes)?;
            barrier.arrived.join_known(home, &Rc::new(clocks.publish(thread)));
            settle(other, thread, address)?;
            cluster.woken.set(cluster.woken.get() | other.woken);
            Ok(())
        }
    }
}

impl Mbarrier {
    /// Faults if the arrival could also have counted in the preceding phase, which would then have
    /// one arrival too many, or complete without another thread's.
    fn check_phase(&self, clocks: &Clocks, thread: u32, address: u32) -> Checked {
        let Some(time) = self.phases.checked_sub(1) else { return Ok(()) };
        let before = Stamp { agent: self.agent, time, ..self.initialised };
        if self.alone == Some(thread) || clocks.sees(thread, before) {
            return Ok(());
        }
        let what = "an arrival that is not ordered after the completion of the previous phase";
        refuse(thread, address, what)
    }

    fn count_arrival(&mut self, thread: u32, address: u32, bytes: u32) -> Checked {
        let Some(arrivals) = self.arrivals.checked_sub(1) else {
            return refuse(
                thread,
                address,
                format!("more than {} arrivals in a phase", self.count),
            );
        };
        self.arrivals = arrivals;
        self.bytes += bytes as i64;
        Ok(())
    }
}

/// Bytes of a copy of that thread have landed.
pub(super) fn receive(block: &mut Block, thread: u32, address: u32, bytes: u32) -> Checked {
    get(block, address)?.bytes -= bytes as i64;
    settle(block, thread, address)
}

/// Completes the phase if nothing is missing; the running thread contributed last.
fn settle(block: &mut Block, thread: u32, address: u32) -> Checked {
    let copies = block.hopper.loads.iter().filter(|load| load.is_copy());
    let underway = copies.filter(|load| load.barrier == address).count();
    let barrier = get(block, address)?;
    if barrier.arrivals > 0 || barrier.bytes > 0 {
        return Ok(());
    }
    if barrier.bytes == 0 && underway > 0 {
        let what = format!("its phase completes while {underway} copies to it are under way");
        return refuse(thread, address, what);
    }
    if barrier.bytes < 0 {
        let excess = -barrier.bytes;
        return refuse(thread, address, format!("{excess} bytes more than expected have landed"));
    }
    barrier.arrivals = barrier.count;
    barrier.phases += 1;
    barrier.peers = [false, barrier.peers[0]];
    barrier.completed.clone_from(&barrier.arrived);
    barrier.completed.raise(barrier.agent, barrier.phases);
    block.woken = true;
    Ok(())
}

/// Whether the phase of that parity has completed.
pub(crate) fn has_passed(block: &Block, address: u32, parity: u32) -> bool {
    block.hopper.mbarriers.get(&address).is_some_and(|barrier| barrier.phases % 2 != parity)
}

/// Whose contributions a wait makes visible.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Block,
    Cluster,
}

/// Arrivals and bytes that the current phase still needs.
pub(crate) fn missing(block: &Block, address: u32) -> (u32, i64) {
    let barrier = block.hopper.mbarriers.get(&address);
    barrier.map_or((0, 0), |barrier| (barrier.arrivals, barrier.bytes))
}

fn try_wait(block: &mut Block, address: u32, parity: u32, scope: Scope) -> Checked<bool> {
    find(block, address)?;
    if parity > 1 {
        return misuse(block, address, format!("parity {parity}"));
    }
    if !has_passed(block, address, parity) {
        return Ok(false);
    }
    let thread = block.who.thread;
    let barrier = block.hopper.mbarriers.get_mut(&address).expect("just found");
    if barrier.peers[1] && scope == Scope::Block {
        let what = "peers take part in its phase: wait with mbarrier_wait_cluster";
        return refuse(thread, address, what);
    }
    barrier.waited = barrier.phases;
    let clocks = block.shared.clocks().expect("mbarriers need vector clocks");
    clocks.acquire(thread, &barrier.completed);
    Ok(true)
}

/// Faults if no thread has waited for a phase that copies or commits complete: the CTA's memory may
/// belong to another CTA when they land.
pub(super) fn check_waited(block: &mut Block) -> Checked {
    let mbarriers = block.hopper.mbarriers.iter();
    let unwaited = mbarriers.filter(|(_, barrier)| barrier.loaded > barrier.waited);
    match unwaited.map(|(address, _)| *address).next() {
        Some(address) => {
            misuse(block, address, "the block ends and nobody has waited for its copies or commits")
        }
        None => Ok(()),
    }
}

/// Initialises the barrier at `address` with `arrivals` per phase.
pub fn mbarrier_init(address: u32, arrivals: u32) {
    block::checked(|block| initialise(block, address, arrivals));
}

/// Makes initialised barriers visible to TMA; a CTA barrier must follow.
pub fn fence_mbarrier_init() {
    block::with(fence);
}

/// Arrives once.
pub fn mbarrier_arrive(address: u32) {
    block::checked(|block| arrive(block, address, 0));
}

/// Arrives once and adds `bytes` to the bytes that the phase expects.
pub fn mbarrier_arrive_expect(address: u32, bytes: u32) {
    block::checked(|block| arrive(block, address, bytes));
}

/// Arrives once at a peer's barrier and releases this thread's accesses to the threads that wait
/// there.
pub fn mbarrier_arrive_peer(address: u32) {
    block::checked(|block| arrive_peer(block, address, 0));
}

/// As [`mbarrier_arrive_peer`], but releases only reads. Writes are not told apart here.
pub fn mbarrier_arrive_peer_after_reads(address: u32) {
    mbarrier_arrive_peer(address);
}

/// As [`mbarrier_arrive_peer`], and adds `bytes` to the bytes that the phase expects.
pub fn mbarrier_arrive_expect_peer(address: u32, bytes: u32) {
    block::checked(|block| arrive_peer(block, address, bytes));
}

/// Waits until the phase of that parity has completed.
#[track_caller]
#[inline]
pub fn mbarrier_wait(address: u32, parity: u32) {
    wait(address, parity, Scope::Block, Location::caller());
}

/// Whether the phase of that parity has completed: 1 or 0. The result arrives late; the thread can
/// do other work meanwhile.
#[track_caller]
#[inline]
pub fn mbarrier_test(address: u32, parity: u32) -> u32 {
    block::checked(|block| try_wait(block, address, parity, Scope::Block)).into()
}

/// [`mbarrier_wait`], unless [`mbarrier_test`] returned 1.
#[track_caller]
#[inline]
pub fn mbarrier_wait_unless(tested: u32, address: u32, parity: u32) {
    if tested == 0 {
        wait(address, parity, Scope::Block, Location::caller());
    }
}

/// Waits until the phase of that parity has completed, and acquires what peers did before they
/// arrived.
#[track_caller]
#[inline]
pub fn mbarrier_wait_cluster(address: u32, parity: u32) {
    wait(address, parity, Scope::Cluster, Location::caller());
}

#[inline(always)]
fn wait(address: u32, parity: u32, scope: Scope, site: &'static Location<'static>) {
    while !block::checked(|block| try_wait(block, address, parity, scope)) {
        block::with(|block| block.lane().waiting = Waiting::Phase { address, parity, site });
        block::suspend();
    }
}
