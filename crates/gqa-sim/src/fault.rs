//! Faults: what the machine reports in place of undefined behaviour.

use std::fmt;
use std::panic::Location;

/// Why a launch was stopped. One fault is reported: that of the CTA with the lowest index.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Name given to the launch.
    pub kernel: String,
    /// CTA in which it happened; `None` where it concerns the launch as a whole.
    pub block: Option<[u32; 3]>,
    /// What happened.
    pub kind: FaultKind,
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            Some([x, y, z]) => write!(f, "{}, block ({x}, {y}, {z}): {}", self.kernel, self.kind),
            None => write!(f, "{}: {}", self.kernel, self.kind),
        }
    }
}

/// A broken rule of a kernel or a launch. Threads are numbered within their CTA; shared addresses
/// are the kernel's.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// The launch itself is impossible.
    #[error("impossible launch: {0}")]
    Launch(String),
    /// The kernel reads an argument as another kind than the launch passed.
    #[error("argument {argument}: {what}")]
    Argument {
        /// Position of the argument.
        argument: usize,
        /// The difference.
        what: String,
    },
    /// Lanes of a warp are at different instructions, and the instruction needs all of them.
    #[error("divergence: {0}")]
    Divergence(Standstill),
    /// A CTA barrier that exited threads of the CTA never reach.
    #[error("partial barrier: {0}")]
    PartialBarrier(Standstill),
    /// Threads wait for each other at different instructions.
    #[error("deadlock: {0}")]
    Deadlock(Standstill),
    /// A read of shared memory that nothing has written since the CTA started.
    #[error("thread {thread} reads shared memory at {address} that was never written")]
    UninitialisedShared {
        /// The reader.
        thread: u32,
        /// First unwritten place.
        address: u32,
    },
    /// A read of the destination of an asynchronous copy that has not been waited for.
    #[error(
        "thread {thread} reads shared memory at {address} while thread {copier}'s copy to it is in flight"
    )]
    CopyInFlight {
        /// The reader.
        thread: u32,
        /// The thread whose copy it is.
        copier: u32,
        /// First such place.
        address: u32,
    },
    /// A shared-memory access outside the CTA's memory.
    #[error(
        "thread {thread} accesses {bytes} bytes of shared memory at {address}, outside {base}..{end}"
    )]
    SharedBounds {
        /// Who.
        thread: u32,
        /// Where.
        address: u32,
        /// How many.
        bytes: u32,
        /// First address of the CTA's memory.
        base: u32,
        /// One past its last.
        end: u32,
    },
    /// A shared-memory access that is not aligned to its size.
    #[error(
        "thread {thread} accesses {bytes} bytes of shared memory at {address}, which is not a multiple of {bytes}"
    )]
    SharedAlignment {
        /// Who.
        thread: u32,
        /// Where.
        address: u32,
        /// Size and required alignment.
        bytes: u32,
    },
    /// Two threads access the same place, at least one writes, and no barrier orders them.
    #[error(
        "race on shared memory at {address}: {hazard}, thread {second} after thread {first} without a barrier between"
    )]
    Race {
        /// Where.
        address: u32,
        /// Which two accesses.
        hazard: Hazard,
        /// Thread of the access that was simulated first.
        first: u32,
        /// Thread of the other access.
        second: u32,
    },
    /// As [`FaultKind::Race`], where one access or both are made by an asynchronous unit: no wait
    /// orders them.
    #[error(
        "race on shared memory at {address}: {hazard}, {second} after {first} without a wait between"
    )]
    AsyncRace {
        /// Where.
        address: u32,
        /// Which two accesses.
        hazard: Hazard,
        /// Whose access was simulated first.
        first: Agent,
        /// Whose the other is.
        second: Agent,
    },
    /// An asynchronous unit accesses what a thread wrote before, without a proxy fence of that
    /// thread in between.
    #[error(
        "{reader} accesses shared memory at {address}, which thread {writer} wrote without fence_proxy_async"
    )]
    MissingProxyFence {
        /// Where.
        address: u32,
        /// The thread that wrote.
        writer: u32,
        /// Whose access it is.
        reader: Agent,
    },
    /// A global-memory access outside the bounds of its argument.
    #[error(
        "thread {thread} accesses {bytes} bytes at byte {offset} of argument {argument}, which has {limit}"
    )]
    GlobalBounds {
        /// Who.
        thread: u32,
        /// Position of the argument.
        argument: u32,
        /// Where, from the start of the argument.
        offset: i64,
        /// How many.
        bytes: u32,
        /// Size of the argument.
        limit: usize,
    },
    /// A global-memory access that is not aligned to its size.
    #[error(
        "thread {thread} accesses {bytes} bytes at byte {offset} of argument {argument}, whose address is not a multiple of {bytes}"
    )]
    GlobalAlignment {
        /// Who.
        thread: u32,
        /// Position of the argument.
        argument: u32,
        /// Where, from the start of the argument.
        offset: i64,
        /// Size and required alignment.
        bytes: u32,
    },
    /// An access through a pointer that the launch left null.
    #[error("thread {thread} accesses argument {argument}, which is null")]
    NullPointer {
        /// Who.
        thread: u32,
        /// Position of the argument.
        argument: u32,
    },
    /// A store to memory that the launch bound for reading.
    #[error("thread {thread} stores to byte {offset} of argument {argument}, which is read-only")]
    ReadOnly {
        /// Who.
        thread: u32,
        /// Position of the argument.
        argument: u32,
        /// Where, from the start of the argument.
        offset: i64,
    },
    /// Two accesses to global memory in a launch whose CTAs communicate, at least one a write,
    /// that nothing orders.
    #[error(
        "race on global memory at byte {offset} of argument {argument}: {hazard}, thread {second} after {first} and nothing orders them"
    )]
    GlobalRace {
        /// Position of the argument.
        argument: u32,
        /// Where, from the start of the argument.
        offset: i64,
        /// Which two accesses.
        hazard: Hazard,
        /// Whose access was simulated first.
        first: Agent,
        /// Thread of the other access.
        second: u32,
    },
    /// CTAs communicate in a way that the launch does not allow.
    #[error("thread {thread}, global memory: {what}")]
    Communication {
        /// Who.
        thread: u32,
        /// Which rule.
        what: String,
    },
    /// A rule of clusters was broken.
    #[error("thread {thread}, cluster: {what}")]
    Cluster {
        /// Who.
        thread: u32,
        /// Which rule.
        what: String,
    },
    /// Two CTAs of one launch write the same element.
    #[error("blocks {} and {} both write byte {offset} of argument {argument}", blocks[0], blocks[1])]
    WriteConflict {
        /// Position of the argument.
        argument: usize,
        /// Lowest such place.
        offset: usize,
        /// The two lowest of these CTAs, numbered in x, then y, then z.
        blocks: [u32; 2],
    },
    /// An mbarrier was used against its rules.
    #[error("thread {thread}, mbarrier at {address}: {what}")]
    Mbarrier {
        /// Who.
        thread: u32,
        /// Where the barrier is or should be.
        address: u32,
        /// Which rule.
        what: String,
    },
    /// A named barrier was used against its rules.
    #[error("warp {warp}, named barrier {id}: {what}")]
    NamedBarrier {
        /// Who.
        warp: u32,
        /// Number of the barrier.
        id: u32,
        /// Which rule.
        what: String,
    },
    /// A warpgroup broke a rule of warpgroup instructions.
    #[error("warpgroup {warpgroup}: {what}")]
    Warpgroup {
        /// Which four warps.
        warpgroup: u32,
        /// Which rule.
        what: String,
    },
    /// A warpgroup waits for registers that no warpgroup will release.
    #[error("warpgroup {warpgroup} waits forever for {wanted} more registers; {free} are free")]
    RegisterPool {
        /// Which four warps.
        warpgroup: u32,
        /// Registers it waits for.
        wanted: u32,
        /// Registers the CTA has left.
        free: u32,
    },
    /// An impossible copy between a tensor and shared memory.
    #[error("thread {thread}, tensor copy: {what}")]
    TensorCopy {
        /// Who.
        thread: u32,
        /// What is impossible.
        what: String,
    },
    /// A rule of tensor memory or of `tcgen05` was broken.
    #[error("thread {thread}, tensor memory: {what}")]
    TensorMemory {
        /// Who.
        thread: u32,
        /// Which rule.
        what: String,
    },
    /// Two accesses to the same place of tensor memory, at least one a write, that nothing orders.
    #[error(
        "race on tensor memory at lane {lane}, column {column}: {hazard}, {second} after {first} without {missing} between"
    )]
    TensorRace {
        /// First of the 16 lanes.
        lane: u32,
        /// Column.
        column: u32,
        /// Which two accesses.
        hazard: Hazard,
        /// Whose access was simulated first.
        first: Agent,
        /// Whose the other is.
        second: Agent,
        /// What would have ordered them.
        missing: &'static str,
    },
    /// The kernel called `trap()`.
    #[error("thread {thread} trapped")]
    Trap {
        /// Who.
        thread: u32,
    },
    /// Rust code of the kernel panicked.
    #[error("thread {thread} panicked: {message}")]
    Panic {
        /// Who.
        thread: u32,
        /// The panic's message and place.
        message: String,
    },
}

impl FaultKind {
    /// A race of two accesses to shared memory.
    pub(crate) fn race(address: u32, hazard: Hazard, first: Agent, second: Agent) -> Self {
        match (first, second) {
            (Agent::Thread(first), Agent::Thread(second)) => {
                Self::Race { address, hazard, first, second }
            }
            _ => Self::AsyncRace { address, hazard, first, second },
        }
    }
}

/// Who accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// A thread.
    Thread(u32),
    /// A thread of another CTA.
    Peer {
        /// Number of the CTA, counted in x, then y, then z.
        block: u32,
        /// The thread.
        thread: u32,
    },
    /// An asynchronous unit that works for threads of another CTA.
    PeerUnit {
        /// Number of the CTA, counted in x, then y, then z.
        block: u32,
    },
    /// Threads that cannot be told apart any more.
    Everyone,
    /// The TMA, or peers' `st_async`, for copies that complete on the mbarrier at that address.
    Load {
        /// Address of the mbarrier.
        mbarrier: u32,
    },
    /// The TMA, for stores that the thread started.
    Store {
        /// The thread.
        thread: u32,
    },
    /// The tensor cores, for this warp's part of a warpgroup's products.
    Wgmma {
        /// The warp.
        warp: u32,
    },
    /// The tensor cores, for `tcgen05.mma` of the thread.
    Product {
        /// The thread.
        thread: u32,
    },
    /// `tcgen05.ld` of a warp.
    TensorLoad {
        /// The warp.
        warp: u32,
    },
    /// `tcgen05.st` of a warp.
    TensorStore {
        /// The warp.
        warp: u32,
    },
    /// A warp that gives tensor memory back.
    TensorDealloc {
        /// The warp.
        warp: u32,
    },
}

impl fmt::Display for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread(thread) => write!(f, "thread {thread}"),
            Self::Peer { block, thread } => write!(f, "thread {thread} of block {block}"),
            Self::PeerUnit { block } => write!(f, "a copy or product of block {block}"),
            Self::Everyone => f.write_str("some thread"),
            Self::Load { mbarrier } => write!(f, "a copy onto the mbarrier at {mbarrier}"),
            Self::Store { thread } => write!(f, "tma_store of thread {thread}"),
            Self::Wgmma { warp } => write!(f, "wgmma of warp {warp}"),
            Self::Product { thread } => write!(f, "tcgen05_mma of thread {thread}"),
            Self::TensorLoad { warp } => write!(f, "tcgen05_ld of warp {warp}"),
            Self::TensorStore { warp } => write!(f, "tcgen05_st of warp {warp}"),
            Self::TensorDealloc { warp } => write!(f, "tcgen05_dealloc of warp {warp}"),
        }
    }
}

/// Order of two accesses that race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hazard {
    /// The second access reads what the first wrote.
    ReadAfterWrite,
    /// The second access overwrites what the first read.
    WriteAfterRead,
    /// Both write.
    WriteAfterWrite,
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadAfterWrite => "read after write",
            Self::WriteAfterRead => "write after read",
            Self::WriteAfterWrite => "write after write",
        })
    }
}

/// The place of threads that cannot continue: a group for each place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standstill(pub Vec<(Threads, Place)>);

impl fmt::Display for Standstill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (threads, place)) in self.0.iter().enumerate() {
            write!(f, "{}threads {threads} {place}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Threads of a CTA, ascending; prints as ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Threads(pub Vec<u32>);

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, run) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                _ => write!(f, "{comma}{}-{}", run[0], run[run.len() - 1])?,
            }
        }
        Ok(())
    }
}

/// Where a thread stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nothing holds it.
    Ready,
    /// It has returned from the kernel.
    Exited,
    /// It waits for its CTA.
    Barrier(&'static Location<'static>),
    /// It waits for its warp at an instruction of that name.
    Warp(&'static str, &'static Location<'static>),
    /// It waits for its cluster.
    Cluster {
        /// Threads of the cluster that have not arrived.
        missing: u32,
        /// Where in the kernel.
        site: &'static Location<'static>,
    },
    /// It waits for a phase of an mbarrier.
    Phase {
        /// Address of the barrier.
        address: u32,
        /// Parity of the phase.
        parity: u32,
        /// Arrivals that the running phase misses.
        arrivals: u32,
        /// Bytes that the running phase misses.
        bytes: i64,
        /// Where in the kernel.
        site: &'static Location<'static>,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("can run"),
            Self::Exited => f.write_str("have exited"),
            Self::Barrier(site) => write!(f, "wait at sync_threads ({site})"),
            Self::Warp(name, site) => write!(f, "wait at {name} ({site})"),
            Self::Cluster { missing, site } => {
                write!(f, "wait at cluster_wait, which misses {missing} threads ({site})")
            }
            Self::Phase { address, parity, arrivals, bytes, site } => write!(
                f,
                "wait for parity {parity} of the mbarrier at {address}, whose phase misses {arrivals} arrivals and {bytes} bytes ({site})"
            ),
        }
    }
}
