//! A running CTA, as the device functions see it.

use crate::arguments::Arguments;
use crate::blackwell::Blackwell;
use crate::cluster::Membership;
use crate::communicate::Watch;
use crate::copy::Copies;
use crate::fault::FaultKind;
use crate::hopper::Hopper;
use crate::instruction::Collective;
use crate::shared::{Checked, Clocks, SharedMemory, Stamp, Who};
use corosensei::Yielder;
use std::cell::Cell;
use std::panic::Location;
use std::ptr::{self, NonNull};

/// What the threads of a CTA share.
pub(crate) struct Block {
    /// Position among the launch's CTAs, in x, then y, then z.
    pub(crate) number: u32,
    pub(crate) index: [u32; 3],
    pub(crate) grid: [u32; 3],
    /// The thread that runs now.
    pub(crate) who: Who,
    pub(crate) shared: SharedMemory,
    pub(crate) lanes: Vec<Lane>,
    /// The clock of each warp; `shared/shadow.rs` explains it.
    pub(crate) clocks: Vec<u32>,
    pub(crate) block_time: u32,
    /// What each warp waits for besides its lanes.
    pub(crate) holds: Vec<Hold>,
    /// An event has occurred that held warps may be waiting for.
    pub(crate) woken: bool,
    pub(crate) hopper: Hopper,
    /// Tensor memory, from its first use on.
    pub(crate) blackwell: Option<Box<Blackwell>>,
    pub(crate) membership: Membership,
    /// Checks of global memory that compare accesses with each other.
    pub(crate) watch: Option<Watch>,
    pub(crate) fault: Option<FaultKind>,
    /// What `nanoseconds` returned last.
    pub(crate) nanoseconds: u64,
    arguments: NonNull<Arguments>,
}

/// A thread.
#[derive(Default)]
pub(crate) struct Lane {
    /// Switches back to the scheduler; valid once the thread has started.
    pub(crate) yielder: Option<NonNull<Yielder<(), ()>>>,
    pub(crate) waiting: Waiting,
    /// Operands of the warp instruction the thread waits at, then its results.
    pub(crate) registers: [u32; 10],
    pub(crate) copies: Copies,
    /// Accumulators of the `wgmma` the thread waits at.
    pub(crate) accumulators: Option<NonNull<[f32]>>,
    /// Registers of the `tcgen05.ld` or `tcgen05.st` the thread waits at.
    pub(crate) moved: Option<NonNull<[u32]>>,
}

/// Why a thread does not run.
#[derive(Clone, Copy, Default)]
pub(crate) enum Waiting {
    /// It may run.
    #[default]
    No,
    /// For its CTA, here.
    Block(&'static Location<'static>),
    /// For its warp, here.
    Warp(Collective, &'static Location<'static>),
    /// It waits here for a phase of this parity, of the mbarrier at this address.
    Phase { address: u32, parity: u32, site: &'static Location<'static> },
    /// It has returned.
    Exited,
}

/// Why a warp does not continue although its lanes have met.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It may go on.
    #[default]
    No,
    /// Some lanes wait for a phase of an mbarrier; the others wait for these lanes or for nothing.
    Lanes,
    /// It waits for other warps at an instruction that spans several.
    Warp,
}

impl Block {
    pub(crate) fn new(arguments: &Arguments, number: u32, grid: [u32; 3], threads: u32) -> Self {
        Self {
            number,
            index: index(number, grid),
            grid,
            who: Who::default(),
            shared: SharedMemory::default(),
            lanes: (0..threads).map(|_| Lane::default()).collect(),
            clocks: vec![1; threads as usize / 32],
            block_time: 1,
            holds: vec![Hold::No; threads as usize / 32],
            woken: false,
            hopper: Hopper::new(threads),
            blackwell: None,
            membership: Membership::new(threads as usize / 32),
            watch: None,
            fault: None,
            nanoseconds: 0,
            arguments: NonNull::from(arguments),
        }
    }

    #[inline(always)]
    pub(crate) fn arguments(&self) -> &Arguments {
        // SAFETY: the launch keeps the arguments until its CTAs are done.
        unsafe { self.arguments.as_ref() }
    }

    /// Vector clocks, in use from now on.
    pub(crate) fn vector_clocks(&mut self) -> &mut Clocks {
        self.shared.refine(self.number, &self.clocks, self.block_time);
        self.shared.clocks().expect("just begun")
    }

    /// The running thread's accesses now.
    pub(crate) fn now(&mut self) -> Stamp {
        let Who { thread, time, .. } = self.who;
        let block = self.number;
        self.shared.clocks().map_or(Stamp { block, agent: thread, time }, |c| c.now(thread))
    }

    /// Whether an earlier access by a thread of this CTA is ordered before the running thread's
    /// next one.
    pub(crate) fn sees(&mut self, stamp: Stamp) -> bool {
        let Who { thread, time, block_time } = self.who;
        if let Some(clocks) = self.shared.clocks() {
            return clocks.sees(thread, stamp);
        }
        let before = if stamp.agent / 32 == thread / 32 { time } else { block_time };
        stamp.agent == thread || stamp.time < before
    }

    /// All threads have met.
    pub(crate) fn synchronise(&mut self) {
        self.block_time = self.clocks.iter().max().map_or(0, |latest| latest + 1);
        self.clocks.fill(self.block_time);
        let threads = 0..self.lanes.len() as u32;
        if let Some(clocks) = self.shared.clocks() {
            clocks.synchronise(threads);
        }
    }

    /// The lanes of a warp have met.
    pub(crate) fn synchronise_warp(&mut self, warp: usize) {
        self.clocks[warp] += 1;
        let first = warp as u32 * 32;
        if let Some(clocks) = self.shared.clocks() {
            clocks.synchronise(first..first + 32);
        }
    }

    /// Lets the four warps of a warpgroup go on.
    pub(crate) fn release_warpgroup(&mut self, warpgroup: usize) {
        self.holds[warpgroup * 4..][..4].fill(Hold::No);
        self.woken = true;
    }

    /// The thread that runs now.
    #[inline(always)]
    pub(crate) fn lane(&mut self) -> &mut Lane {
        &mut self.lanes[self.who.thread as usize]
    }
}

/// Index in x, y and z of a CTA's position among all.
pub(crate) fn index(number: u32, [x, y, _]: [u32; 3]) -> [u32; 3] {
    [number % x, number / x % y, number / x / y]
}

thread_local! {
    static CURRENT: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
}

/// Makes a CTA current on this host thread, until dropped.
pub(crate) struct Entered(*mut Block);

impl Entered {
    /// # Safety
    /// `block` must stay valid, and be used through [`with`] only, until the result is dropped.
    pub(crate) unsafe fn new(block: *mut Block) -> Self {
        Self(CURRENT.replace(block))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// Whether this host thread runs a kernel.
pub(crate) fn is_inside_kernel() -> bool {
    !CURRENT.get().is_null()
}

/// Lends the current CTA; `f` must neither suspend nor call this again.
#[inline(always)]
pub(crate) fn with<R>(f: impl FnOnce(&mut Block) -> R) -> R {
    let block = CURRENT.get();
    if block.is_null() {
        outside_kernel();
    }
    // SAFETY: the CTA is valid as long as it is current, and only one borrow exists at a time:
    // each lives in one call of this function, and no call contains another or a switch to another
    // thread.
    f(unsafe { &mut *block })
}

/// As [`with`], and stops the kernel where `f` finds a fault.
#[inline(always)]
pub(crate) fn checked<R>(f: impl FnOnce(&mut Block) -> Checked<R>) -> R {
    match with(f) {
        Ok(result) => result,
        Err(kind) => fail(*kind),
    }
}

/// Suspends this thread until the scheduler resumes it.
#[inline(always)]
pub(crate) fn suspend() {
    let yielder = with(|block| block.lane().yielder).expect("the thread has started");
    // SAFETY: the yielder lives on the stack of the thread that runs now.
    unsafe { yielder.as_ref() }.suspend(());
}

/// Reports a fault. The thread that calls this never runs again.
#[cold]
pub(crate) fn fail(kind: FaultKind) -> ! {
    with(|block| block.fault = Some(kind));
    loop {
        suspend();
    }
}

#[cold]
fn outside_kernel() -> ! {
    panic!("a device function was called outside a kernel; only gqa_sim::launch runs kernels")
}
