//! Clusters of CTAs: the cluster barrier, and distributed shared memory.

use crate::block::{self, Block, Hold};
use crate::collective::meet;
use crate::fault::FaultKind;
use crate::instruction::Collective;
use crate::shared::{
    Checked, Clocks, Known, RANK_SHIFT, Stamp, View, address_of, join_known, raise,
};
use bytemuck::Pod;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::rc::Rc;

/// The most CTAs of a cluster, with the non-portable cluster size allowed.
pub(crate) const MAX_CLUSTER: u32 = 16;

/// What the CTAs of a cluster share.
#[derive(Default)]
pub(crate) struct Cluster {
    /// By rank.
    blocks: Box<[NonNull<Block>]>,
    barrier: RefCell<Barrier>,
    /// An event has occurred that CTAs may be waiting for.
    pub(crate) woken: Cell<bool>,
}

/// The barrier among all threads of a cluster.
#[derive(Default)]
struct Barrier {
    /// Threads that have arrived in the current phase.
    arrived: u32,
    /// Phases completed.
    phases: u32,
    /// Whether any thread has arrived with `.relaxed`.
    relaxed: bool,
    /// The view that arrived threads have released.
    released: Rc<Known>,
    /// As it was when the last phase completed.
    completed: Rc<Known>,
}

/// A CTA's side of the cluster.
#[derive(Default)]
pub(crate) struct Membership {
    pub(crate) cluster: Rc<Cluster>,
    pub(crate) rank: u32,
    /// For each warp, the phase in which it has arrived without waiting yet.
    arrived: Vec<Option<u32>>,
    /// Warps that wait.
    waiting: Vec<usize>,
    /// The last access of each thread of another CTA (CTA, thread) to this CTA's shared
    /// memory.
    visits: BTreeMap<(u32, u32), u32>,
    /// All threads have exited.
    pub(crate) ended: bool,
}

impl Membership {
    pub(crate) fn new(warps: usize) -> Self {
        Self { arrived: vec![None; warps], ..Self::default() }
    }
}

impl Cluster {
    /// # Safety
    /// The CTAs must live as long as the cluster and be lent, one at a time, through
    /// [`block::with`] only.
    pub(crate) unsafe fn new(blocks: Box<[NonNull<Block>]>) -> Self {
        Self { blocks, ..Self::default() }
    }

    pub(crate) fn size(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Threads that have not arrived in the current phase of the barrier.
    pub(crate) fn missing(&self, threads: u32) -> u32 {
        self.size() * threads - self.barrier.borrow().arrived
    }
}

fn misuse<T>(block: &Block, what: String) -> Checked<T> {
    Err(Box::new(FaultKind::Cluster { thread: block.who.thread, what }))
}

/// The running CTA and another one of its cluster.
fn pair(block: &mut Block, rank: u32) -> (&mut Block, &mut Block) {
    assert_ne!(rank, block.membership.rank, "a block is not its own peer");
    let mut other = block.membership.cluster.blocks[rank as usize];
    // SAFETY: it lives as long as the cluster; only the running CTA is lent, and this is another
    // one.
    (block, unsafe { other.as_mut() })
}

/// The warp whose first thread is `first` arrives.
pub(crate) fn arrive(block: &mut Block, first: usize, relaxed: bool) -> Checked {
    let warp = first / 32;
    if block.membership.arrived[warp].is_some() {
        return misuse(block, "cluster_arrive twice without cluster_wait between".to_owned());
    }
    let mut view = View::default();
    let lanes = first as u32..first as u32 + 32;
    block.vector_clocks();
    if relaxed {
        crate::hopper::release_initialised(block, lanes, &mut view);
    } else {
        let clocks = block.vector_clocks();
        clocks.release_all(lanes, &mut view);
    }
    let cluster = block.membership.cluster.clone();
    let mut barrier = cluster.barrier.borrow_mut();
    block.membership.arrived[warp] = Some(barrier.phases);
    barrier.arrived += 32;
    barrier.relaxed |= relaxed;
    join_known(&mut barrier.released, &Rc::new(view.publish(block.number)));
    if barrier.arrived == cluster.size() * block.lanes.len() as u32 {
        complete(block, &mut barrier, &cluster);
    }
    Ok(())
}

/// All threads of the cluster have arrived.
fn complete(block: &mut Block, barrier: &mut Barrier, cluster: &Cluster) {
    barrier.arrived = 0;
    barrier.phases += 1;
    barrier.completed = std::mem::take(&mut barrier.released);
    let all_released = !std::mem::take(&mut barrier.relaxed);
    let everyone = block.vector_clocks().everyone();
    if all_released {
        let first = block.number - block.membership.rank;
        let members = first..first + cluster.size();
        let known = Rc::make_mut(&mut barrier.completed);
        for (_, seen) in known.iter_mut().filter(|(number, _)| members.contains(number)) {
            raise(seen, everyone.agent, 1);
        }
    }
    for rank in 0..cluster.size() {
        let is_other = rank != block.membership.rank;
        let member = if is_other { pair(block, rank).1 } else { &mut *block };
        for warp in std::mem::take(&mut member.membership.waiting) {
            member.holds[warp] = Hold::No;
            pass(member, warp, &barrier.completed);
        }
        member.woken = true;
    }
    cluster.woken.set(true);
}

/// The warp goes on behind the barrier.
fn pass(block: &mut Block, warp: usize, completed: &Rc<Known>) {
    block.membership.arrived[warp] = None;
    let clocks = block.vector_clocks();
    for thread in warp as u32 * 32..warp as u32 * 32 + 32 {
        clocks.acquire_known(thread, completed);
    }
}

/// The warp whose first thread is `first` waits for the phase in which it has arrived.
pub(crate) fn wait(block: &mut Block, first: usize) -> Checked {
    let warp = first / 32;
    let Some(phase) = block.membership.arrived[warp] else {
        return misuse(block, "cluster_wait without cluster_arrive before".to_owned());
    };
    let cluster = block.membership.cluster.clone();
    let barrier = cluster.barrier.borrow();
    if barrier.phases > phase {
        pass(block, warp, &barrier.completed);
    } else {
        block.membership.waiting.push(warp);
        block.holds[warp] = Hold::Warp;
    }
    Ok(())
}

/// The rank in an address of the cluster's window, if it is that of another CTA.
fn other_rank(block: &Block, address: u32) -> Checked<Option<u32>> {
    let rank = address >> RANK_SHIFT;
    if rank >= block.membership.cluster.size() {
        return misuse(block, format!("{address:#x} is not an address of the cluster's window"));
    }
    Ok((rank != block.membership.rank).then_some(rank))
}

/// The clocks of the running CTA, and the CTA of that rank, if the running thread may access
/// it.
fn reach(block: &mut Block, rank: u32) -> Checked<(&mut Clocks, &mut Block)> {
    block.vector_clocks();
    let thread = block.who.thread;
    let (block, other) = pair(block, rank);
    let clocks = block.shared.clocks().expect("just begun");
    if !clocks.knows(thread, other.number) {
        let what = format!(
            "it accesses rank {rank} without a cluster barrier that orders the start of that CTA before"
        );
        return Err(Box::new(FaultKind::Cluster { thread, what }));
    }
    if other.membership.ended {
        let what = format!("it accesses rank {rank}, which has exited");
        return Err(Box::new(FaultKind::Cluster { thread, what }));
    }
    other.vector_clocks();
    Ok((clocks, other))
}

/// As [`reach`], and records the access: the other CTA must not exit before it is ordered after
/// the access.
pub(crate) fn visit(block: &mut Block, rank: u32) -> Checked<(&mut Clocks, &mut Block)> {
    let thread = block.who.thread;
    let (clocks, other) = reach(block, rank)?;
    let now = clocks.now(thread);
    other.membership.visits.insert((now.block, now.agent), now.time);
    Ok((clocks, other))
}

/// A place in the cluster's window that the running thread may access.
pub(crate) enum Reached<'a> {
    /// In its own CTA.
    Own(&'a mut Block, u32),
    /// In another CTA; the clocks are those of the running CTA.
    Other { clocks: &'a mut Clocks, other: &'a mut Block, address: u32 },
}

/// The destination of a store that returns at once. The mbarrier that it completes on orders it for
/// the other CTA.
pub(crate) fn reach_address(block: &mut Block, address: u32) -> Checked<Reached<'_>> {
    find(block, address, reach)
}

/// Where an access goes.
pub(crate) fn visit_address(block: &mut Block, address: u32) -> Checked<Reached<'_>> {
    find(block, address, visit)
}

fn find<'a>(
    block: &'a mut Block,
    address: u32,
    reach: impl FnOnce(&'a mut Block, u32) -> Checked<(&'a mut Clocks, &'a mut Block)>,
) -> Checked<Reached<'a>> {
    let Some(rank) = other_rank(block, address)? else { return Ok(Reached::Own(block, address)) };
    let (clocks, other) = reach(block, rank)?;
    Ok(Reached::Other { clocks, other, address })
}

/// Called when all threads of the CTA have exited. Faults if a peer may still access its memory.
pub(crate) fn end(block: &mut Block) -> Checked {
    block.membership.ended = true;
    let Some(clocks) = block.shared.clocks() else { return Ok(()) };
    let visits = block.membership.visits.iter();
    let stamps = visits.map(|(&(block, agent), &time)| Stamp { block, agent, time });
    match stamps.filter(|stamp| !clocks.anyone_sees(*stamp)).map(|stamp| clocks.name(stamp)).next()
    {
        Some(visitor) => {
            let what = format!(
                "its block exits and has not seen the accesses of {visitor} to its shared memory"
            );
            misuse(block, what)
        }
        None => Ok(()),
    }
}

/// CTA within the cluster.
#[inline]
pub fn cluster_rank() -> u32 {
    block::with(|block| block.membership.rank)
}

/// CTAs of the cluster.
#[inline]
pub fn cluster_size() -> u32 {
    block::with(|block| block.membership.cluster.size())
}

/// Arrives at the cluster's barrier and releases this thread's accesses to the cluster.
#[track_caller]
#[inline]
pub fn cluster_arrive() {
    let [] = meet(Collective::ClusterArrive { relaxed: false }, []);
}

/// Arrives at the cluster's barrier with `.relaxed`. Releases only that the CTA has started, and
/// the mbarrier initialisations that this thread has fenced.
#[track_caller]
#[inline]
pub fn cluster_arrive_relaxed() {
    let [] = meet(Collective::ClusterArrive { relaxed: true }, []);
}

/// Waits until all threads of the cluster have arrived.
#[track_caller]
#[inline]
pub fn cluster_wait() {
    let [] = meet(Collective::ClusterWait, []);
}

/// The address in the cluster's window of this shared-memory address in the CTA of that rank
/// (`mapa`).
pub fn peer_address(address: u32, rank: u32) -> u32 {
    block::checked(|block| {
        let size = block.membership.cluster.size();
        if rank >= size {
            return misuse(block, format!("rank {rank} of a cluster of {size}"));
        }
        Ok(address_of(rank, address))
    })
}

/// Loads a value of 4 or 8 bytes, aligned to its size, from a peer.
pub fn ld_peer<T: Pod>(address: u32) -> T {
    const { assert!(matches!(size_of::<T>(), 4 | 8)) };
    load(address)
}

/// Stores a value of 4 or 8 bytes, aligned to its size, in a peer.
pub fn st_peer<T: Pod>(address: u32, value: T) {
    const { assert!(matches!(size_of::<T>(), 4 | 8)) };
    store(address, value);
}

/// Loads 16 bytes from a 16-byte boundary of a peer.
pub fn ld_peer_vec(address: u32) -> [u32; 4] {
    load(address)
}

/// Stores 16 bytes to a 16-byte boundary of a peer.
pub fn st_peer_vec(address: u32, value: [u32; 4]) {
    store(address, value);
}

fn load<T: Pod>(address: u32) -> T {
    block::checked(|block| {
        let thread = block.who.thread;
        match visit_address(block, address)? {
            Reached::Own(block, address) => block.shared.load(block.who, address),
            Reached::Other { clocks, other, address } => {
                other.shared.load_peer(clocks, thread, address)
            }
        }
    })
}

fn store<T: Pod>(address: u32, value: T) {
    block::checked(|block| {
        let thread = block.who.thread;
        match visit_address(block, address)? {
            Reached::Own(block, address) => block.shared.store(block.who, address, value),
            Reached::Other { clocks, other, address } => {
                other.shared.store_peer(clocks, thread, address, value)
            }
        }
    });
}
