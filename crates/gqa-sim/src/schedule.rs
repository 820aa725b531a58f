//! Runs the threads of CTAs: each thread is a coroutine, a warp runs until all its lanes wait,
//! and the seed determines which warp is next.

use crate::arguments::Arguments;
use crate::blackwell;
use crate::block::{self, Block, Entered, Hold, Lane, Waiting};
use crate::cluster::{self, Cluster};
use crate::communicate::{GlobalOrder, Watch};
use crate::execute::execute;
use crate::fault::{FaultKind, Place, Standstill, Threads};
use crate::hopper;
use crate::instruction::Collective;
use crate::launch::{Launch, Report};
use crate::panics;
use crate::shared::Checked;
use crate::stack::{Reserved, ThreadStack};
use corosensei::Coroutine;
use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::rc::Rc;

/// A kernel: the body of one thread.
pub type Kernel<'a> = &'a (dyn Fn(&Arguments) + Sync);

/// What all CTAs of a launch have in common.
#[derive(Clone, Copy)]
pub(crate) struct Machine<'a> {
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) kernel: Kernel<'a>,
    pub(crate) arguments: &'a Arguments,
}

/// Runs clusters, given by their numbers; at most `resident` of them take turns. A fault comes with
/// the number of its CTA.
pub(crate) fn run(
    machine: Machine<'_>,
    clusters: impl IntoIterator<Item = u32>,
    resident: usize,
    order: Option<GlobalOrder>,
) -> Result<Report, (u32, FaultKind)> {
    let blocks = resident * machine.launch.cluster as usize;
    let stacks = (blocks > 1).then(|| Reserved::new(blocks * machine.launch.threads as usize));
    let mut gang = Gang {
        machine,
        order: order.map(|order| Rc::new(RefCell::new(order))),
        random: Random::new(machine.launch.seed, u32::MAX),
        teams: Vec::new(),
        turn: (0, 0),
        report: Report::default(),
        stacks,
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| gang.run(&mut clusters.into_iter(), resident)));
    outcome.unwrap_or_else(|payload| {
        let (number, thread) = gang.running();
        Err((number, FaultKind::Panic { thread, message: panics::take_message(payload) }))
    })?;
    Ok(gang.report)
}

/// Clusters that take turns.
struct Gang<'a> {
    machine: Machine<'a>,
    order: Option<Rc<RefCell<GlobalOrder>>>,
    random: Random,
    teams: Vec<Team>,
    /// Team and CTA that run.
    turn: (usize, usize),
    report: Report,
    /// Set where more than one CTA is resident. Dropped after the CTAs.
    stacks: Option<Reserved>,
}

/// The CTAs of a cluster.
struct Team {
    cluster: Rc<Cluster>,
    runs: Vec<Run>,
    /// CTAs that may go on.
    active: Vec<usize>,
    /// CTAs that wait for events from other CTAs.
    stuck: Vec<usize>,
}

impl Gang<'_> {
    fn run(
        &mut self,
        clusters: &mut dyn Iterator<Item = u32>,
        resident: usize,
    ) -> Result<(), (u32, FaultKind)> {
        loop {
            while self.teams.len() < resident
                && let Some(number) = clusters.next()
            {
                let team = Team::new(self.machine, number, &self.order, self.stacks.as_ref());
                self.teams.push(team);
            }
            let active: usize = self.teams.iter().map(|team| team.active.len()).sum();
            if active == 0 {
                return self.teams.first().map_or(Ok(()), |team| Err(team.deadlock()));
            }
            self.turn(active)?;
        }
    }

    /// Runs one of the active CTAs for a turn, or until it cannot continue if it is alone.
    fn turn(&mut self, active: usize) -> Result<(), (u32, FaultKind)> {
        let mut choice = self.random.below(active);
        let mut team = 0;
        while choice >= self.teams[team].active.len() {
            choice -= self.teams[team].active.len();
            team += 1;
        }
        self.turn = (team, choice);
        let team = &mut self.teams[team];
        let number = team.active[choice];
        let alone = active + team.stuck.len() == 1;
        match team.runs[number].run(alone).map_err(|kind| (team.runs[number].number(), kind))? {
            Progress::Ran => {}
            Progress::Stuck => team.stuck.push(team.active.swap_remove(choice)),
            Progress::Done => _ = team.active.swap_remove(choice),
        }
        team.wake();
        if team.active.is_empty() && team.stuck.is_empty() {
            let team = self.teams.swap_remove(self.turn.0);
            self.report = team.runs.iter().fold(self.report, |sum, run| sum.plus(run.report));
        }
        Ok(())
    }

    /// CTA and thread that were running.
    fn running(&self) -> (u32, u32) {
        let team = &self.teams[self.turn.0];
        let run = &team.runs[team.active[self.turn.1]];
        // SAFETY: the CTA lives, and nobody else uses it.
        let block = unsafe { run.block.as_ref() };
        (block.number, block.who.thread)
    }
}

impl Team {
    fn new(
        machine: Machine<'_>,
        number: u32,
        order: &Option<Rc<RefCell<GlobalOrder>>>,
        stacks: Option<&Reserved>,
    ) -> Self {
        let size = machine.launch.cluster;
        let numbers = number * size..number * size + size;
        let runs: Vec<_> = numbers.map(|block| Run::new(machine, block, order, stacks)).collect();
        // SAFETY: the team's CTAs live as long as each other, and are lent as the running CTA
        // only.
        let cluster = Rc::new(unsafe { Cluster::new(runs.iter().map(|run| run.block).collect()) });
        for (rank, run) in runs.iter().enumerate() {
            let mut block = run.block;
            // SAFETY: nobody else uses the CTA yet.
            let block = unsafe { block.as_mut() };
            block.shared.set_rank(rank as u32);
            let membership = &mut block.membership;
            membership.cluster = cluster.clone();
            membership.rank = rank as u32;
        }
        Self { cluster, active: (0..runs.len()).collect(), stuck: Vec::new(), runs }
    }

    /// Wakes CTAs that other CTAs have signalled.
    fn wake(&mut self) {
        if self.cluster.woken.take() {
            let woken = self.stuck.extract_if(.., |number| self.runs[*number].is_woken());
            self.active.extend(woken);
        }
    }

    /// No thread can run, and at least one waits.
    fn deadlock(&self) -> (u32, FaultKind) {
        let first = self.stuck.iter().min().expect("a team without active blocks waits");
        let run = &self.runs[*first];
        // SAFETY: the CTA lives, and nobody else uses it.
        (run.number(), unsafe { deadlock(&mut *run.block.as_ptr()) })
    }
}

/// The average number of consecutive turns of a warp that nothing holds.
const TURNS: usize = 16;

/// A CTA and its threads.
struct Run {
    block: NonNull<Block>,
    coroutines: Vec<Coroutine<(), (), (), ThreadStack>>,
    /// Warps that may run.
    ready: Vec<usize>,
    /// Warps that wait for events from other warps.
    held: Vec<usize>,
    /// Warps that wait for the CTA.
    waiting: u32,
    exited: u32,
    random: Random,
    report: Report,
}

/// State of a CTA after its turn.
enum Progress {
    Ran,
    /// None of its warps can run.
    Stuck,
    /// All its threads have exited.
    Done,
}

/// How a warp's turn ended.
enum Turn {
    /// It may go on.
    Ready,
    /// The CTA waits for events from other CTAs.
    Held,
    Barrier,
    Exited,
}

impl Run {
    fn new(
        machine: Machine<'_>,
        number: u32,
        order: &Option<Rc<RefCell<GlobalOrder>>>,
        stacks: Option<&Reserved>,
    ) -> Self {
        let stack = || stacks.map_or_else(ThreadStack::take, Reserved::take);
        let Machine { launch, kernel, arguments } = machine;
        let mut block = Block::new(arguments, number, launch.grid, launch.threads);
        block.shared.reset(launch.shared_bytes);
        block.watch = Watch::new(order.clone(), launch.programmatic);
        Self {
            block: NonNull::from(Box::leak(Box::new(block))),
            coroutines: (0..launch.threads)
                .map(|_| coroutine(kernel, arguments, stack()))
                .collect(),
            ready: (0..launch.threads as usize / 32).collect(),
            held: Vec::new(),
            waiting: 0,
            exited: 0,
            random: Random::new(launch.seed, number),
            report: Report { blocks: 1, ..Report::default() },
        }
    }

    fn number(&self) -> u32 {
        // SAFETY: the CTA lives, and nobody else uses it.
        unsafe { self.block.as_ref() }.number
    }

    fn is_woken(&self) -> bool {
        // SAFETY: as above.
        unsafe { self.block.as_ref() }.woken
    }

    /// Runs for a turn; alone, until it cannot continue.
    fn run(&mut self, alone: bool) -> Result<Progress, FaultKind> {
        // SAFETY: the CTA outlives the guard, and until then is used through the current CTA
        // only.
        let _entered = unsafe { Entered::new(self.block.as_ptr()) };
        loop {
            match self.step()? {
                Progress::Ran if alone => {}
                progress => return Ok(progress),
            }
        }
    }

    /// One turn: a warp runs, a copy arrives, or the CTA barrier completes.
    fn step(&mut self) -> Result<Progress, FaultKind> {
        let loads = block::with(|block| wake(block, &mut self.ready, &mut self.held));
        if self.ready.len() + loads == 0 {
            return self.rest();
        }
        let choice = self.random.below(self.ready.len() + loads);
        if choice >= self.ready.len() {
            self.land(choice - self.ready.len())?;
            return Ok(Progress::Ran);
        }
        match self.turns(self.ready[choice])? {
            Turn::Ready => return Ok(Progress::Ran),
            Turn::Held => self.held.push(self.ready[choice]),
            Turn::Barrier => self.waiting += 1,
            Turn::Exited => self.exited += 1,
        }
        self.ready.swap_remove(choice);
        Ok(Progress::Ran)
    }

    /// No warp can run, and no copy is under way.
    fn rest(&mut self) -> Result<Progress, FaultKind> {
        if !self.held.is_empty() {
            return Ok(Progress::Stuck);
        }
        match (self.waiting, self.exited) {
            (0, _) => {
                let products = block::with(end).map_err(|kind| *kind)?;
                self.report.tensor_products += products;
                Ok(Progress::Done)
            }
            (_, 0) => {
                self.pass_barrier();
                Ok(Progress::Ran)
            }
            _ => Err(FaultKind::PartialBarrier(block::with(|block| {
                standstill(block, 0..block.lanes.len())
            }))),
        }
    }

    /// Delivers one of the copies and commits in flight.
    fn land(&mut self, load: usize) -> Result<(), FaultKind> {
        let is_copy = block::with(|block| hopper::land(block, load)).map_err(|kind| *kind)?;
        self.report.tensor_loads += u64::from(is_copy);
        Ok(())
    }

    fn pass_barrier(&mut self) {
        block::with(Block::synchronise);
        self.report.barriers += 1;
        self.ready.extend(0..std::mem::take(&mut self.waiting) as usize);
    }

    /// Several turns of a warp while nothing holds it: its threads' stacks are in the cache by
    /// then.
    fn turns(&mut self, warp: usize) -> Result<Turn, FaultKind> {
        loop {
            match self.turn(warp)? {
                Turn::Ready if self.random.below(TURNS) > 0 => {}
                turn => return Ok(turn),
            }
        }
    }

    /// Runs each lane of a warp until it waits, then executes the warp's instruction if all wait
    /// for one.
    fn turn(&mut self, warp: usize) -> Result<Turn, FaultKind> {
        let (a, b) = self.random.permutation();
        let runnable = block::with(|block| runnable(block, warp));
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
                execute(instruction, block, warp * 32).map_err(|kind| *kind)?;
                if instruction.orders_memory() {
                    block.synchronise_warp(warp);
                }
                self.report.count(instruction);
                Ok(if block.holds[warp] == Hold::No { Turn::Ready } else { Turn::Held })
            }
        }
    }
}

impl Drop for Run {
    /// Unwinds threads that a fault left suspended, and keeps the stacks for later CTAs.
    fn drop(&mut self) {
        // SAFETY: as in `run`; the guard is dropped before the CTA.
        let entered = unsafe { Entered::new(self.block.as_ptr()) };
        for mut coroutine in self.coroutines.drain(..) {
            // A destructor that panics during the unwinding adds nothing to the fault.
            let unwound = catch_unwind(AssertUnwindSafe(|| coroutine.force_unwind()));
            drop(unwound);
            coroutine.into_stack().give_back();
        }
        drop(entered);
        // SAFETY: leaked by `new`, and no longer the running CTA.
        drop(unsafe { Box::from_raw(self.block.as_ptr()) });
    }
}

/// A thread that has not started. It must not outlive `kernel` and `arguments`.
fn coroutine(
    kernel: Kernel<'_>,
    arguments: &Arguments,
    stack: ThreadStack,
) -> Coroutine<(), (), (), ThreadStack> {
    // SAFETY: the CTA's `Run` drops its coroutines, and `run` borrows kernel and arguments for
    // longer.
    unsafe {
        Coroutine::with_stack_unchecked(stack, move |yielder, ()| {
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
            Self::Warp(Collective::ClusterWait, site) => {
                let missing = block.membership.cluster.missing(block.lanes.len() as u32);
                Place::Cluster { missing, site }
            }
            Self::Warp(instruction, site) => Place::Warp(instruction.name(), site),
            Self::Phase { address, parity, site } => {
                let (arrivals, bytes) = hopper::missing(block, address);
                Place::Phase { address, parity, arrivals, bytes, site }
            }
            Self::Exited => Place::Exited,
        }
    }
}

/// All threads have exited; returns the number of products into tensor memory.
fn end(block: &mut Block) -> Checked<u64> {
    hopper::end(block)?;
    cluster::end(block)?;
    blackwell::end(block)
}

/// Requeues held warps that may continue; returns the number of copies in flight.
#[inline(always)]
fn wake(block: &mut Block, ready: &mut Vec<usize>, held: &mut Vec<usize>) -> usize {
    if std::mem::take(&mut block.woken) {
        ready.extend(held.extract_if(.., |warp| runnable(block, *warp) != 0));
    }
    block.hopper.loads.len()
}

/// Lanes of the warp wait for different things. That is legal if some wait for a phase of an
/// mbarrier.
#[cold]
fn hold(block: &mut Block, warp: usize) -> Result<Turn, FaultKind> {
    let threads = warp * 32..warp * 32 + 32;
    let is_phase = |lane: &Lane| matches!(lane.waiting, Waiting::Phase { .. });
    if !block.lanes[threads.clone()].iter().any(is_phase) {
        return Err(disagreement(standstill(block, threads)));
    }
    block.holds[warp] = Hold::Lanes;
    Ok(if runnable(block, warp) == 0 { Turn::Held } else { Turn::Ready })
}

/// No thread can run, and at least one waits.
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

/// The fault of lanes of a warp that do not meet.
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
pub(crate) struct Random(u64);

impl Random {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    pub(crate) fn new(seed: u64, block: u32) -> Self {
        Self(seed ^ (block as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::STEP);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        if limit == 1 { 0 } else { (self.next() % limit as u64) as usize }
    }

    /// `i -> (a i + b) % 32` visits all lanes, as `a` is odd.
    fn permutation(&mut self) -> (usize, usize) {
        let bits = self.next() as usize;
        ((bits % 32) | 1, bits / 32 % 32)
    }
}

/// Lanes of the warp that can run, one bit each.
fn runnable(block: &Block, warp: usize) -> u32 {
    match block.holds[warp] {
        Hold::No => u32::MAX,
        Hold::Warp => 0,
        Hold::Lanes => {
            let lanes = block.lanes[warp * 32..][..32].iter();
            lanes.rev().fold(0, |bits, lane| bits << 1 | has_phase(block, lane) as u32)
        }
    }
}

/// Whether the phase that the lane waits for has completed.
fn has_phase(block: &Block, lane: &Lane) -> bool {
    match lane.waiting {
        Waiting::Phase { address, parity, .. } => hopper::has_passed(block, address, parity),
        _ => false,
    }
}
