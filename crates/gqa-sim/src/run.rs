//! Runs launches.

use crate::arguments::{self, Arg, Arguments};
use crate::block::index;
use crate::cluster::MAX_CLUSTER;
use crate::communicate::GlobalOrder;
use crate::fault::{Fault, FaultKind};
use crate::launch::{Launch, MAX_SHARED_BYTES, Report};
use crate::panics;
use crate::schedule::{self, Kernel, Machine, Random};
use rayon::prelude::*;
use std::mem;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// A loop: calls its second argument once with each number below the first, on any threads, and
/// returns when all of these calls have.
pub type Loop<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Sync));

/// Runs `kernel` once for every thread of the grid. Clusters run in parallel, on rayon's threads.
///
/// # Errors
/// The fault of the lowest CTA that has one.
pub fn launch(
    launch: &Launch<'_>,
    kernel: Kernel<'_>,
    arguments: &[Arg<'_>],
) -> Result<Report, Fault> {
    launch_by(&|count, part| (0..count).into_par_iter().for_each(part), launch, kernel, arguments)
}

/// [`launch`] with clusters in a loop of the caller's: a process that was forked has none of
/// rayon's threads.
///
/// # Errors
/// As [`launch`].
pub fn launch_by(
    each: Loop<'_>,
    launch: &Launch<'_>,
    kernel: Kernel<'_>,
    arguments: &[Arg<'_>],
) -> Result<Report, Fault> {
    let fault = |block, kind| Fault { kernel: launch.name.to_owned(), block, kind };
    let blocks = blocks(launch)
        .and_then(|blocks| arguments::refusal(arguments).map_or(Ok(blocks), Err))
        .map_err(|why| fault(None, FaultKind::Launch(why)))?;
    panics::install_hook();
    // SAFETY: dropped before this function returns; meanwhile `arguments` holds the borrows of the
    // memory.
    let mut arguments = unsafe { Arguments::bind(arguments, written_by(launch, blocks)) };
    let order = launch.communicates.then(|| GlobalOrder::new(&arguments.join_regions()));
    let machine = Machine { launch, kernel, arguments: &arguments };
    let clusters = blocks / launch.cluster;
    let report = match order {
        Some(order) => run_in_turns(machine, clusters, order),
        None => run_apart(machine, clusters, each),
    };
    let report = report.map_err(|(number, kind)| fault(Some(index(number, launch.grid)), kind))?;
    match arguments.write_conflict() {
        Some(kind) => Err(fault(None, kind)),
        None => Ok(report),
    }
}

/// The number of CTAs, or why the launch is refused.
fn blocks(launch: &Launch<'_>) -> Result<u32, String> {
    let [x, y, z] = launch.grid;
    if launch.threads == 0 || launch.threads > 1024 || !launch.threads.is_multiple_of(32) {
        return Err(format!(
            "{} threads; a block has whole warps of 32, up to 1024 threads",
            launch.threads
        ));
    }
    if launch.shared_bytes > MAX_SHARED_BYTES {
        return Err(format!(
            "{} bytes of shared memory; a block has up to {MAX_SHARED_BYTES}",
            launch.shared_bytes
        ));
    }
    if x == 0 || y == 0 || z == 0 || y > 65535 || z > 65535 {
        return Err(format!(
            "grid {x} x {y} x {z}; each is at least 1, the last two at most 65535"
        ));
    }
    if !(1..=MAX_CLUSTER).contains(&launch.cluster) || !x.is_multiple_of(launch.cluster) {
        return Err(format!(
            "clusters of {} blocks in a grid of {x} in x; 1 to {MAX_CLUSTER}, and the grid has whole ones",
            launch.cluster
        ));
    }
    let blocks = x as u64 * y as u64 * z as u64;
    u32::try_from(blocks)
        .ok()
        .filter(|blocks| *blocks < u32::MAX)
        .ok_or_else(|| format!("{blocks} blocks do not fit 32 bits"))
}

/// The number of writers to compare; CTAs that communicate are checked by vector clocks.
fn written_by(launch: &Launch<'_>, blocks: u32) -> u32 {
    if launch.communicates { 1 } else { blocks }
}

type Outcome = Result<Report, (u32, FaultKind)>;

/// Clusters run in parallel. After a fault only lower ones still start, so that the lowest fault is
/// always the one found.
fn run_apart(machine: Machine<'_>, clusters: u32, each: Loop<'_>) -> Outcome {
    let lowest_fault = AtomicU32::new(u32::MAX);
    let run = |number| {
        if number > lowest_fault.load(Relaxed) {
            return Ok(Report::default());
        }
        schedule::run(machine, [number], 1, None)
            .inspect_err(|_| _ = lowest_fault.fetch_min(number, Relaxed))
    };
    let join = |a: Outcome, b: Outcome| match (a, b) {
        (Ok(a), Ok(b)) => Ok(a.plus(b)),
        (Err(a), Err(b)) => Err(if a.0 < b.0 { a } else { b }),
        (Err(fault), _) | (_, Err(fault)) => Err(fault),
    };
    if clusters == 1 {
        return run(0);
    }
    // Counted here: whatever the loop does, no cluster runs twice.
    let (next, outcome) = (AtomicU32::new(0), Mutex::new(Ok(Report::default())));
    each(clusters as usize, &|_| {
        let number = next.fetch_add(1, Relaxed);
        if number >= clusters {
            return;
        }
        let of_cluster = run(number);
        let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let others = mem::replace(&mut *outcome, Ok(Report::default()));
        *outcome = join(others, of_cluster);
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The number of clusters that take turns in a launch whose CTAs communicate: a few, with a
/// bounded number of CTAs.
fn resident(cluster: u32) -> usize {
    const BLOCKS: u32 = 16;
    (BLOCKS / cluster).clamp(2, 4) as usize
}

/// Clusters start in an order that the seed determines, and a few of them take turns.
fn run_in_turns(machine: Machine<'_>, clusters: u32, order: GlobalOrder) -> Outcome {
    let mut random = Random::new(machine.launch.seed, u32::MAX - 1);
    let mut numbers: Vec<u32> = (0..clusters).collect();
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, random.below(last + 1));
    }
    schedule::run(machine, numbers, resident(machine.launch.cluster), Some(order))
}
