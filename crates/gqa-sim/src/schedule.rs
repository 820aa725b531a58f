//! Runs the threads of a block: each is a coroutine, a warp runs until all its lanes wait, and the seed decides who is next.

use crate::arguments::Arguments;
use crate::block::{self, Block, Entered, Lane, Waiting};
use crate::fault::{FaultKind, Place, Standstill, Threads};
use crate::launch::{Launch, Report};
use crate::panics;
use crate::stack::ThreadStack;
use corosensei::Coroutine;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

/// A kernel: the body of one thread.
pub type Kernel<'a> = &'a (dyn Fn(&Arguments) + Sync);

/// Runs block `number` of a launch.
pub(crate) fn run(
    launch: &Launch<'_>,
    kernel: Kernel<'_>,
    arguments: &Arguments,
    number: u32,
) -> Result<Report, FaultKind> {
    let mut block = Block::new(arguments, number, launch.grid);
    block.shared.reset(launch.shared_bytes);
    block.lanes.resize_with(launch.threads as usize, Lane::default);
    // SAFETY: the block outlives the guard, and until then is used through the current block only.
    let entered = unsafe { Entered::new(&raw mut block) };
    let mut schedule = Schedule::new(launch, kernel, arguments, number);
    let outcome = catch_unwind(AssertUnwindSafe(|| schedule.run()));
    let outcome = outcome.unwrap_or_else(|payload| {
        let thread = block::with(|block| block.who.thread);
        Err(FaultKind::Panic { thread, message: panics::take_message(payload) })
    });
    let report = schedule.finish();
    drop(entered);
    outcome.map(|()| report)
}

struct Schedule {
    coroutines: Vec<Coroutine<(), (), (), ThreadStack>>,
    /// Clock of each warp; see the shadow of shared memory.
    clocks: Vec<u32>,
    block_time: u32,
    random: Random,
    report: Report,
}

/// How a warp's turn ended.
enum Turn {
    /// It may go on.
    Ready,
    Barrier,
    Exited,
}

impl Schedule {
    fn new(launch: &Launch<'_>, kernel: Kernel<'_>, arguments: &Arguments, number: u32) -> Self {
        Self {
            coroutines: (0..launch.threads).map(|_| coroutine(kernel, arguments)).collect(),
            clocks: vec![1; launch.threads as usize / 32],
            block_time: 1,
            random: Random::new(launch.seed, number),
            report: Report { blocks: 1, ..Report::default() },
        }
    }

    fn run(&mut self) -> Result<(), FaultKind> {
        loop {
            let (waiting, exited) = self.run_to_barrier()?;
            match (waiting, exited) {
                (0, _) => return Ok(()),
                (_, 0) => self.pass_barrier(),
                _ => {
                    return Err(FaultKind::PartialBarrier(block::with(|block| {
                        standstill(&block.lanes, 0)
                    })));
                }
            }
        }
    }

    /// Runs all warps until each waits for the block or has exited; returns how many of each.
    fn run_to_barrier(&mut self) -> Result<(u32, u32), FaultKind> {
        let mut ready: Vec<usize> = (0..self.clocks.len()).collect();
        let (mut waiting, mut exited) = (0, 0);
        while !ready.is_empty() {
            let choice = self.random.below(ready.len());
            match self.turn(ready[choice])? {
                Turn::Ready => continue,
                Turn::Barrier => waiting += 1,
                Turn::Exited => exited += 1,
            }
            ready.swap_remove(choice);
        }
        Ok((waiting, exited))
    }

    fn pass_barrier(&mut self) {
        self.block_time = self.clocks.iter().max().map_or(0, |latest| latest + 1);
        self.clocks.fill(self.block_time);
        self.report.barriers += 1;
    }

    /// Runs each lane of a warp until it waits, then what they wait for if it concerns the warp only.
    fn turn(&mut self, warp: usize) -> Result<Turn, FaultKind> {
        let (a, b) = self.random.permutation();
        for i in 0..32 {
            self.resume(warp, warp * 32 + (a * i + b) % 32)?;
        }
        self.report.turns += 1;
        block::with(|block| self.meeting(block, warp))
    }

    #[inline(always)]
    fn resume(&mut self, warp: usize, thread: usize) -> Result<(), FaultKind> {
        block::with(|block| {
            block.who.thread = thread as u32;
            block.who.time = self.clocks[warp];
            block.who.block_time = self.block_time;
        });
        let done = self.coroutines[thread].resume(()).as_return().is_some();
        block::with(|block| {
            if done {
                block.lane().waiting = Waiting::Exited;
            }
            block.fault.take().map_or(Ok(()), Err)
        })
    }

    /// All lanes of the warp wait or have exited.
    fn meeting(&mut self, block: &mut Block, warp: usize) -> Result<Turn, FaultKind> {
        let lanes = &block.lanes[warp * 32..][..32];
        if !lanes[1..].iter().all(|lane| lane.waiting.is_same(lanes[0].waiting)) {
            return Err(disagreement(standstill(lanes, warp * 32)));
        }
        match lanes[0].waiting {
            Waiting::No => unreachable!("a coroutine is suspended by a wait or a fault only"),
            Waiting::Block(_) => Ok(Turn::Barrier),
            Waiting::Exited => Ok(Turn::Exited),
            Waiting::Warp(instruction, _) => {
                instruction.execute(block, warp * 32).map_err(|kind| *kind)?;
                self.clocks[warp] += instruction.orders_memory() as u32;
                self.report.count(instruction);
                Ok(Turn::Ready)
            }
        }
    }

    /// Unwinds what a fault left suspended and keeps the stacks for later blocks.
    fn finish(self) -> Report {
        for mut coroutine in self.coroutines {
            // A destructor that panics while its kernel is taken down has nothing to add to the fault.
            let unwound = catch_unwind(AssertUnwindSafe(|| coroutine.force_unwind()));
            drop(unwound);
            coroutine.into_stack().give_back();
        }
        self.report
    }
}

/// A thread that has not started. It must not outlive `kernel` and `arguments`.
fn coroutine(kernel: Kernel<'_>, arguments: &Arguments) -> Coroutine<(), (), (), ThreadStack> {
    // SAFETY: `run` finishes its coroutines before it returns, and it borrows kernel and arguments for longer.
    unsafe {
        Coroutine::with_stack_unchecked(ThreadStack::take(), move |yielder, ()| {
            block::with(|block| block.lane().yielder = Some(NonNull::from(yielder)));
            kernel(arguments);
        })
    }
}

impl Waiting {
    #[inline(always)]
    fn is_same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Block(a), Self::Block(b)) => std::ptr::eq(a, b) || a == b,
            (Self::Warp(a, at), Self::Warp(b, bt)) => a == b && (std::ptr::eq(at, bt) || at == bt),
            (Self::Exited, Self::Exited) => true,
            _ => false,
        }
    }

    fn place(self) -> Place {
        match self {
            Self::No => Place::Ready,
            Self::Block(site) => Place::Barrier(site),
            Self::Warp(instruction, site) => Place::Warp(instruction.name(), site),
            Self::Exited => Place::Exited,
        }
    }
}

/// Where the lanes stand whose first is thread `first`.
fn standstill(lanes: &[Lane], first: usize) -> Standstill {
    let mut places: Vec<(Threads, Place)> = Vec::new();
    for (lane, state) in lanes.iter().enumerate() {
        let (thread, place) = ((first + lane) as u32, state.waiting.place());
        match places.iter_mut().find(|(_, known)| *known == place) {
            Some((threads, _)) => threads.0.push(thread),
            None => places.push((Threads(vec![thread]), place)),
        }
    }
    Standstill(places)
}

/// Names the way in which lanes of a warp fail to meet.
fn disagreement(standstill: Standstill) -> FaultKind {
    let has = |kind: fn(&Place) -> bool| standstill.0.iter().any(|(_, place)| kind(place));
    let barrier = has(|place| matches!(place, Place::Barrier(_)));
    let warp = has(|place| matches!(place, Place::Warp(..)));
    let exited = has(|place| matches!(place, Place::Exited));
    match (barrier, warp, exited) {
        (true, true, _) => FaultKind::Deadlock(standstill),
        (true, false, true) => FaultKind::PartialBarrier(standstill),
        _ => FaultKind::Divergence(standstill),
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    fn new(seed: u64, block: u32) -> Self {
        Self(seed ^ (block as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        if limit == 1 { 0 } else { (self.next() % limit as u64) as usize }
    }

    /// `i -> (a i + b) % 32` visits all lanes, as `a` is odd.
    fn permutation(&mut self) -> (usize, usize) {
        let bits = self.next() as usize;
        ((bits % 32) | 1, bits / 32 % 32)
    }
}
