//! CTAs that communicate through global memory, and grids that start before the previous grid has
//! ended (programmatic dependent launch).
//!
//! In a launch whose CTAs communicate, every access to writable global memory is checked by the
//! vector clocks that also check shared memory; atomic operations never race with each other, and
//! carry views from CTA to CTA.

use crate::block::{self, Block};
use crate::fault::{FaultKind, Hazard};
use crate::global::Global;
use crate::shared::{Checked, Clocks, Known, Stamp, join_known};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// What an access to global memory does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    AtomicRead,
    /// Also reads, or does not.
    AtomicWrite,
}

impl Access {
    fn is_atomic(self) -> bool {
        matches!(self, Self::AtomicRead | Self::AtomicWrite)
    }

    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::AtomicWrite)
    }
}

/// The checks of a launch that compare accesses to global memory with each other.
#[derive(Default)]
pub(crate) struct Watch {
    /// Where CTAs communicate.
    pub(crate) order: Option<Rc<RefCell<GlobalOrder>>>,
    /// Set where earlier grids may still run.
    pub(crate) dependency: Option<Dependency>,
    fences: HashMap<u32, Fences>,
}

/// A thread's fences around relaxed atomic operations.
#[derive(Clone, Default)]
struct Fences {
    /// Everything that happened before its last fence: its later stores release that.
    released: Option<Rc<Known>>,
    /// Views that came with the values of its loads since: its next fence acquires them.
    pending: Rc<Known>,
}

/// Which threads are ordered after the end of earlier grids.
#[derive(Default)]
pub(crate) struct Dependency {
    /// Where threads have waited.
    waited: Vec<Stamp>,
    /// For each thread, whether it has waited, or has synchronised with a thread that has; missing:
    /// not.
    free: Vec<bool>,
}

impl Dependency {
    fn is_free(&self, thread: u32) -> bool {
        self.free.get(thread as usize).is_some_and(|free| *free)
    }

    fn set_free(&mut self, thread: u32) {
        let thread = thread as usize;
        self.free.resize(self.free.len().max(thread + 1), false);
        self.free[thread] = true;
    }
}

impl Watch {
    /// The checks that the launch needs, if any.
    pub(crate) fn new(order: Option<Rc<RefCell<GlobalOrder>>>, programmatic: bool) -> Option<Self> {
        let dependency = programmatic.then(Dependency::default);
        let any = order.is_some() || programmatic;
        any.then(|| Self { order, dependency, fences: HashMap::new() })
    }
}

/// The order of accesses to all writable memory of a launch.
pub(crate) struct GlobalOrder {
    regions: Vec<Region>,
    /// Writes; the last write of each byte is among them.
    writes: Vec<(Stamp, Access)>,
    /// The view that the value of an atomic at (region, offset) carries.
    released: HashMap<(usize, usize), Rc<Known>>,
}

/// Memory that arguments share.
struct Region {
    /// For each byte, the index of its last write, plus 1.
    writers: Vec<u32>,
    /// By page, reads that no write has followed.
    reads: HashMap<usize, Vec<Reading>>,
}

struct Reading {
    bytes: Range<usize>,
    stamp: Stamp,
    access: Access,
}

/// Two accesses that nothing orders.
struct Conflict {
    at: usize,
    hazard: Hazard,
    first: Stamp,
}

/// Reads are kept by page, so that a write finds the reads of its bytes quickly.
const PAGE: usize = 4096;

impl GlobalOrder {
    /// Regions of these sizes, initialised before the launch.
    pub(crate) fn new(regions: &[usize]) -> Self {
        let region = |bytes: &usize| Region { writers: vec![0; *bytes], reads: HashMap::new() };
        Self {
            regions: regions.iter().map(region).collect(),
            writes: Vec::new(),
            released: HashMap::new(),
        }
    }

    /// An access at `stamp`, by the thread with these clocks.
    fn touch(
        &mut self,
        (region, bytes): (usize, Range<usize>),
        access: Access,
        (clocks, thread): (&Clocks, u32),
        stamp: Stamp,
    ) -> Result<(), Conflict> {
        let Region { writers, reads } = &mut self.regions[region];
        let hazard = if access.writes() { Hazard::WriteAfterWrite } else { Hazard::ReadAfterWrite };
        let mut known = 0;
        for at in bytes.clone() {
            let writer = writers[at];
            if writer == known {
                continue;
            }
            known = writer;
            let Some((first, before)) = writer.checked_sub(1).map(|i| self.writes[i as usize])
            else {
                continue;
            };
            if !(before.is_atomic() && access.is_atomic() || clocks.sees(thread, first)) {
                return Err(Conflict { at, hazard, first });
            }
        }
        if !access.writes() {
            note_reads(reads, bytes, stamp, access);
            return Ok(());
        }
        for page in bytes.start / PAGE..=(bytes.end - 1) / PAGE {
            let Some(readings) = reads.get_mut(&page) else { continue };
            let overlap = |reading: &&Reading| {
                reading.bytes.start < bytes.end && bytes.start < reading.bytes.end
            };
            let races = |reading: &&Reading| {
                !(reading.access.is_atomic() && access.is_atomic()
                    || clocks.sees(thread, reading.stamp))
            };
            if let Some(reading) = readings.iter().filter(overlap).find(races) {
                let at = reading.bytes.start.max(bytes.start);
                return Err(Conflict { at, hazard: Hazard::WriteAfterRead, first: reading.stamp });
            }
            readings.retain(|reading| {
                !(bytes.start <= reading.bytes.start && reading.bytes.end <= bytes.end)
            });
        }
        if self.writes.last() != Some(&(stamp, access)) {
            self.writes.push((stamp, access));
        }
        writers[bytes].fill(self.writes.len() as u32);
        Ok(())
    }
}

fn note_reads(
    reads: &mut HashMap<usize, Vec<Reading>>,
    bytes: Range<usize>,
    stamp: Stamp,
    access: Access,
) {
    for page in bytes.start / PAGE..=(bytes.end - 1) / PAGE {
        let start = bytes.start.max(page * PAGE);
        let end = bytes.end.min((page + 1) * PAGE);
        let readings = reads.entry(page).or_default();
        match readings.last_mut() {
            Some(last)
                if (last.stamp, last.access) == (stamp, access)
                    && last.bytes.start <= start
                    && start <= last.bytes.end =>
            {
                last.bytes.end = last.bytes.end.max(end);
            }
            _ => readings.push(Reading { bytes: start..end, stamp, access }),
        }
    }
}

fn misuse<T>(block: &Block, what: String) -> Checked<T> {
    Err(Box::new(FaultKind::Communication { thread: block.who.thread, what }))
}

/// Checks an access of the running thread that is inside the argument.
pub(crate) fn watch(
    block: &mut Block,
    argument: u32,
    offset: i64,
    bytes: u32,
    access: Access,
) -> Checked {
    check_dependency(block, argument, access)?;
    let Some((order, region, start)) = ordered(block, argument, offset) else { return Ok(()) };
    let thread = block.who.thread;
    let clocks = block.vector_clocks();
    let place = (region, start..start + bytes as usize);
    let touched = order.borrow_mut().touch(place, access, (clocks, thread), clocks.now(thread));
    touched.or_else(|conflict| refuse(clocks, thread, (argument, offset, start), conflict))
}

/// Checks the reads of an asynchronous copy of the running thread: byte ranges (offset, bytes).
/// They may occur at any time until the copy completes.
pub(crate) fn watch_copy(
    block: &mut Block,
    argument: u32,
    ranges: impl IntoIterator<Item = (i64, u32)>,
    copy: Stamp,
) -> Checked {
    if block.watch.is_none() {
        return Ok(());
    }
    check_dependency(block, argument, Access::Read)?;
    for (offset, bytes) in ranges {
        let Some((order, region, start)) = ordered(block, argument, offset) else { return Ok(()) };
        let thread = block.who.thread;
        let clocks = block.vector_clocks();
        let range = start..start + bytes as usize;
        if order.borrow().regions[region].writers[range.clone()].iter().any(|writer| *writer != 0) {
            let what = format!(
                "TMA reads byte {offset} of argument {argument} or later ones, which this launch wrote"
            );
            return misuse(block, what);
        }
        let touched =
            order.borrow_mut().touch((region, range), Access::Read, (clocks, thread), copy);
        touched.or_else(|conflict| refuse(clocks, thread, (argument, offset, start), conflict))?;
    }
    Ok(())
}

/// Where that byte is in ordered memory.
fn ordered(
    block: &Block,
    argument: u32,
    offset: i64,
) -> Option<(Rc<RefCell<GlobalOrder>>, usize, usize)> {
    let order = block.watch.as_ref()?.order.clone()?;
    let (region, start) = block.arguments().memory(argument)?.region?;
    Some((order, region, start + offset as usize))
}

#[cold]
fn refuse(
    clocks: &Clocks,
    second: u32,
    (argument, offset, start): (u32, i64, usize),
    Conflict { at, hazard, first }: Conflict,
) -> Checked {
    let (offset, first) = (offset + (at - start) as i64, clocks.name(first));
    Err(Box::new(FaultKind::GlobalRace { argument, offset, hazard, first, second }))
}

/// Faults if earlier grids may still write the accessed memory.
fn check_dependency(block: &mut Block, argument: u32, access: Access) -> Checked {
    let thread = block.who.thread;
    let Some(known) = dependency(block) else { return Ok(()) };
    if known.is_free(thread) {
        return Ok(());
    }
    let is_early = block.arguments().memory(argument).is_some_and(|memory| memory.early);
    if is_early && access == Access::Read {
        return Ok(());
    }
    let waited = dependency(block).map_or_else(Vec::new, |known| known.waited.clone());
    if !waited.into_iter().any(|stamp| block.sees(stamp)) {
        return misuse(
            block,
            format!("it accesses argument {argument} before grid_dependency_wait"),
        );
    }
    dependency(block).into_iter().for_each(|known| known.set_free(thread));
    Ok(())
}

/// Faults unless the launch's CTAs communicate.
fn expect_communicates(block: &Block) -> Checked {
    if block.watch.as_ref().is_none_or(|watch| watch.order.is_none()) {
        let what = "an atomic operation; the launch does not say that its blocks communicate";
        return misuse(block, what.to_owned());
    }
    Ok(())
}

fn dependency(block: &mut Block) -> Option<&mut Dependency> {
    block.watch.as_mut()?.dependency.as_mut()
}

/// An atomic operation.
#[derive(Clone, Copy)]
struct Atomic {
    acquires: bool,
    releases: bool,
    /// Loads at all.
    reads: bool,
    writes: bool,
}

const ADD: Atomic = Atomic { acquires: false, releases: false, reads: true, writes: true };
const LOAD: Atomic = Atomic { writes: false, ..ADD };
const STORE: Atomic = Atomic { reads: false, ..ADD };

impl Atomic {
    const fn ordered(self) -> Self {
        Self { acquires: self.reads, releases: self.writes, ..self }
    }

    /// Executes it; returns the old value.
    fn execute(self, place: Global<u32>, i: usize, update: impl FnOnce(u32) -> u32) -> u32 {
        let (argument, offset) = place.locate(i);
        block::checked(|block| {
            let (thread, number) = (block.who.thread, block.number);
            expect_communicates(block)?;
            let null = || Box::new(FaultKind::NullPointer { thread, argument });
            let refuse = |refusal: crate::memory::Refusal| {
                Box::new(refusal.fault(thread, argument, offset, 4))
            };
            let buffer = block.arguments().buffer(argument).ok_or_else(null)?;
            let [old] = buffer.load(offset).map_err(refuse)?;
            if self.writes {
                buffer.store(offset, [update(old)], 4, number).map_err(refuse)?;
            }
            let access = if self.writes { Access::AtomicWrite } else { Access::AtomicRead };
            watch(block, argument, offset, 4, access)?;
            self.synchronise(block, argument, offset);
            Ok(old)
        })
    }

    fn synchronise(self, block: &mut Block, argument: u32, offset: i64) {
        let Some((order, region, start)) = ordered(block, argument, offset) else { return };
        let mut order = order.borrow_mut();
        let thread = block.who.thread;
        let carried = order.released.get(&(region, start)).cloned();
        let mut fences = fences(block, thread).clone();
        let clocks = block.vector_clocks();
        if let Some(carried) = carried.as_ref().filter(|_| self.reads) {
            if self.acquires {
                clocks.acquire_known(thread, carried);
            }
            join_known(&mut fences.pending, carried);
        }
        let released = if self.releases {
            Some(Rc::new(clocks.publish(thread)))
        } else {
            fences.released.clone()
        };
        if self.writes {
            // A plain store releases only what the thread itself has done.
            let mut carries = carried.filter(|_| self.reads).unwrap_or_default();
            released.iter().for_each(|released| join_known(&mut carries, released));
            order.released.insert((region, start), carries);
        }
        *self::fences(block, thread) = fences;
    }
}

fn fences(block: &mut Block, thread: u32) -> &mut Fences {
    block.watch.as_mut().expect("atomics are watched").fences.entry(thread).or_default()
}

/// Atomic operations at GPU scope.
impl Global<u32> {
    /// Relaxed atomic add to element `i`; returns the old value.
    pub fn atomic_add(self, i: usize, addend: u32) -> u32 {
        ADD.execute(self, i, |old| old.wrapping_add(addend))
    }

    /// As `atomic_add`, releasing and acquiring.
    pub fn atomic_add_acq_rel(self, i: usize, addend: u32) -> u32 {
        ADD.ordered().execute(self, i, |old| old.wrapping_add(addend))
    }

    /// Relaxed atomic increment of element `i`, which wraps to 0 at `last`; returns the old value.
    pub fn atomic_inc(self, i: usize, last: u32) -> u32 {
        ADD.execute(self, i, |old| if old >= last { 0 } else { old + 1 })
    }

    /// As `atomic_inc`, releasing and acquiring.
    pub fn atomic_inc_acq_rel(self, i: usize, last: u32) -> u32 {
        ADD.ordered().execute(self, i, |old| if old >= last { 0 } else { old + 1 })
    }

    /// Element `i`, and what was released with it.
    pub fn load_acquire(self, i: usize) -> u32 {
        LOAD.ordered().execute(self, i, |old| old)
    }

    /// Element `i`, as it is now; orders nothing.
    pub fn load_relaxed(self, i: usize) -> u32 {
        LOAD.execute(self, i, |old| old)
    }

    /// Release store to element `i`.
    pub fn store_release(self, i: usize, value: u32) {
        STORE.ordered().execute(self, i, |_| value);
    }

    /// Writes element `i`; orders nothing.
    pub fn store_relaxed(self, i: usize, value: u32) {
        STORE.execute(self, i, |_| value);
    }
}

/// Words that GPUs write into each other's memory: atomic operations that order nothing.
impl Global<u64> {
    /// Elements `i`, which is even, and `i + 1`, as all GPUs see them.
    pub fn load_pair_system(self, i: usize) -> [u64; 2] {
        self.pair(i, None)
    }

    /// Writes elements `i`, which is even, and `i + 1`, for all GPUs.
    pub fn store_pair_system(self, i: usize, words: [u64; 2]) {
        self.pair(i, Some(words));
    }

    /// Loads the pair, and then writes what it shall be, if anything.
    fn pair(self, i: usize, words: Option<[u64; 2]>) -> [u64; 2] {
        const BYTES: u32 = 16;
        let (argument, offset) = self.locate(i);
        block::checked(|block| {
            let (thread, number) = (block.who.thread, block.number);
            expect_communicates(block)?;
            let null = || Box::new(FaultKind::NullPointer { thread, argument });
            let refuse = |refusal: crate::memory::Refusal| {
                Box::new(refusal.fault(thread, argument, offset, BYTES))
            };
            let buffer = block.arguments().buffer(argument).ok_or_else(null)?;
            let old = buffer.load(offset).map_err(refuse)?;
            let mut access = Access::AtomicRead;
            if let Some(words) = words {
                buffer.store(offset, words, 8, number).map_err(refuse)?;
                access = Access::AtomicWrite;
            }
            watch(block, argument, offset, BYTES, access)?;
            Ok(old)
        })
    }
}

/// The clock: a microsecond passes with each look of a thread of the CTA.
pub fn nanoseconds() -> u64 {
    block::with(|block| {
        block.nanoseconds += 1000;
        block.nanoseconds
    })
}

/// A fence: orders earlier accesses before later atomic stores, and earlier atomic loads before
/// later accesses.
pub fn fence_gpu() {
    block::with(|block| {
        if block.watch.as_ref().is_none_or(|watch| watch.order.is_none()) {
            return;
        }
        let thread = block.who.thread;
        let pending = std::mem::take(&mut fences(block, thread).pending);
        let clocks = block.vector_clocks();
        clocks.acquire_known(thread, &pending);
        let released = Rc::new(clocks.publish(thread));
        fences(block, thread).released = Some(released);
    });
}

/// Waits until earlier grids have ended and their writes are visible.
pub fn grid_dependency_wait() {
    block::with(|block| {
        let (now, thread) = (block.now(), block.who.thread);
        if let Some(dependency) = dependency(block) {
            dependency.waited.push(now);
            dependency.set_free(thread);
        }
    });
}

/// Lets the next grid start, once all CTAs have called this or exited.
pub fn launch_dependents() {
    block::with(|_| {});
}
