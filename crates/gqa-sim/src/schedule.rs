//! Runs the threads of a block: each is a coroutine, a warp runs until all its lanes wait, and the seed decides who is next.

use crate::arguments::Arguments;
use crate::block::{self, Block, Entered, Hold, Lane, Waiting};
use crate::fault::{FaultKind, Place, Standstill, Threads};
use crate::hopper;
use crate::launch::{Launch, Report};
use crate::panics;
use crate::stack::ThreadStack;
use corosensei::Coroutine;
use std::ops::Range;
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
    let mut block = Block::new(arguments, number, launch.grid, launch.threads);
    block.shared.reset(launch.shared_bytes);
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
    warps: usize,
    random: Random,
    report: Report,
}

/// How a warp's turn ended.
enum Turn {
    /// It may go on.
    Ready,
    /// It may go on once others have done something.
    Held,
    Barrier,
    Exited,
}

impl Schedule {
    fn new(launch: &Launch<'_>, kernel: Kernel<'_>, arguments: &Arguments, number: u32) -> Self {
        Self {
            coroutines: (0..launch.threads).map(|_| coroutine(kernel, arguments)).collect(),
            warps: launch.threads as usize / 32,
            random: Random::new(launch.seed, number),
            report: Report { blocks: 1, ..Report::default() },
        }
    }

    fn run(&mut self) -> Result<(), FaultKind> {
        loop {
            let (waiting, exited) = self.run_to_barrier()?;
            match (waiting, exited) {
                (0, _) => return block::with(hopper::end).map_err(|kind| *kind),
                (_, 0) => self.pass_barrier(),
                _ => {
                    return Err(FaultKind::PartialBarrier(block::with(|block| {
                        standstill(block, 0..block.lanes.len())
                    })));
                }
            }
        }
    }

    /// Runs all warps until each waits for the block or has exited; returns how many of each.
    fn run_to_barrier(&mut self) -> Result<(u32, u32), FaultKind> {
        let mut ready: Vec<usize> = (0..self.warps).collect();
        let mut held = Vec::new();
        let (mut waiting, mut exited) = (0, 0);
        loop {
            let loads = block::with(|block| wake(block, &mut ready, &mut held));
            if ready.len() + loads == 0 {
                break;
            }
            let choice = self.random.below(ready.len() + loads);
            if choice >= ready.len() {
                self.land(choice - ready.len())?;
                continue;
            }
            match self.turn(ready[choice])? {
                Turn::Ready => continue,
                Turn::Held => held.push(ready[choice]),
                Turn::Barrier => waiting += 1,
                Turn::Exited => exited += 1,
            }
            ready.swap_remove(choice);
        }
        if held.is_empty() { Ok((waiting, exited)) } else { Err(block::with(deadlock)) }
    }

    /// Delivers one of the copies in flight.
    fn land(&mut self, load: usize) -> Result<(), FaultKind> {
        self.report.tensor_loads += 1;
        block::with(|block| hopper::land(block, load)).map_err(|kind| *kind)
    }

    fn pass_barrier(&mut self) {
        block::with(Block::synchronise);
        self.report.barriers += 1;
    }

    /// Runs each lane of a warp until it waits, then what they wait for if it concerns the warp only.
    fn turn(&mut self, warp: usize) -> Result<Turn, FaultKind> {
        let (a, b) = self.random.permutation();
        let runnable = block::with(|block| block.runnable(warp));
        for i in 0..32 {
            let lane = (a * i + b) % 32;
            if runnable >> lane & 1 == 1 {
                self.resume(warp, warp * 32 + lane)?;
            }
        }
        self.report.turns += 1;
        block::with(|block| self.meeting(block, warp))
    }

    #[inline(always)]
    fn resume(&mut self, warp: usize, thread: usize) -> Result<(), FaultKind> {
        block::with(|block| {
            block.who.thread = thread as u32;
            block.who.time = block.clocks[warp];
            block.who.block_time = block.block_time;
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
            return hold(block, warp);
        }
        block.holds[warp] = Hold::No;
        match block.lanes[warp * 32].waiting {
            Waiting::No | Waiting::Phase { .. } => {
                unreachable!("a coroutine is suspended by a wait or a fault only")
            }
            Waiting::Block(_) => Ok(Turn::Barrier),
            Waiting::Exited => {
                hopper::exit(block, warp).map_err(|kind| *kind)?;
                Ok(Turn::Exited)
            }
            Waiting::Warp(instruction, _) => {
                instruction.execute(block, warp * 32).map_err(|kind| *kind)?;
                if instruction.orders_memory() {
                    block.synchronise_warp(warp);
                }
                self.report.count(instruction);
                Ok(if block.holds[warp] == Hold::No { Turn::Ready } else { Turn::Held })
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

    fn place(self, block: &Block) -> Place {
        match self {
            Self::No => Place::Ready,
            Self::Block(site) => Place::Barrier(site),
            Self::Warp(instruction, site) => Place::Warp(instruction.name(), site),
            Self::Phase { address, parity, site } => {
                let (arrivals, bytes) = hopper::missing(block, address);
                Place::Phase { address, parity, arrivals, bytes, site }
            }
            Self::Exited => Place::Exited,
        }
    }
}

/// Moves held warps that may go on; returns how many copies are in flight.
#[inline(always)]
fn wake(block: &mut Block, ready: &mut Vec<usize>, held: &mut Vec<usize>) -> usize {
    if std::mem::take(&mut block.woken) {
        ready.extend(held.extract_if(.., |warp| block.runnable(*warp) != 0));
    }
    block.hopper.loads.len()
}

/// Lanes of the warp wait for different things. That is well if some wait for a phase of an mbarrier.
#[cold]
fn hold(block: &mut Block, warp: usize) -> Result<Turn, FaultKind> {
    let threads = warp * 32..warp * 32 + 32;
    let is_phase = |lane: &Lane| matches!(lane.waiting, Waiting::Phase { .. });
    if !block.lanes[threads.clone()].iter().any(is_phase) {
        return Err(disagreement(standstill(block, threads)));
    }
    block.holds[warp] = Hold::Lanes;
    Ok(if block.runnable(warp) == 0 { Turn::Held } else { Turn::Ready })
}

/// Nobody can run and somebody waits.
fn deadlock(block: &mut Block) -> FaultKind {
    hopper::register_shortage(block)
        .unwrap_or_else(|| FaultKind::Deadlock(standstill(block, 0..block.lanes.len())))
}

/// Where these threads stand.
fn standstill(block: &Block, threads: Range<usize>) -> Standstill {
    let mut places: Vec<(Threads, Place)> = Vec::new();
    for thread in threads {
        let (thread, place) = (thread as u32, block.lanes[thread].waiting.place(block));
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
