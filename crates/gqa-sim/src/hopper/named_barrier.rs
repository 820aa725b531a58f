//! Barriers 0 to 15 among any number of warps.

use crate::block::{Block, Hold};
use crate::collective::meet;
use crate::fault::FaultKind;
use crate::instruction::Collective;
use crate::shared::{Checked, Clocks, View};

#[derive(Default)]
pub(super) struct NamedBarrier {
    /// Threads of the current phase; 0 before its first arrival.
    threads: u32,
    arrived: u32,
    /// Warps that wait.
    waiting: Vec<usize>,
    /// The joined views of the threads that have arrived.
    view: View,
}

/// The warp whose first thread is `first` arrives, with or without waiting.
pub(crate) fn arrive(
    block: &mut Block,
    first: usize,
    id: u32,
    threads: u32,
    waits: bool,
) -> Checked {
    let warp = first / 32;
    block.vector_clocks();
    let misuse = |what| Err(Box::new(FaultKind::NamedBarrier { warp: warp as u32, id, what }));
    if threads == 0 || threads as usize > block.lanes.len() || !threads.is_multiple_of(32) {
        return misuse(format!("{threads} threads"));
    }
    let Some(barrier) = block.hopper.named_barriers.get_mut(id as usize) else {
        return misuse("there are 16".to_owned());
    };
    if barrier.threads != 0 && barrier.threads != threads {
        return misuse(format!("{threads} threads, but earlier arrivals gave {}", barrier.threads));
    }
    let clocks = block.shared.clocks().expect("in use");
    clocks.release_all(lanes(warp), &mut barrier.view);
    barrier.threads = threads;
    barrier.arrived += 32;
    if waits {
        barrier.waiting.push(warp);
        block.holds[warp] = Hold::Warp;
    }
    if barrier.arrived == threads {
        let NamedBarrier { waiting, view, .. } = std::mem::take(barrier);
        for warp in waiting {
            block.holds[warp] = Hold::No;
            acquire(clocks, warp, &view);
        }
        block.woken = true;
    }
    Ok(())
}

fn lanes(warp: usize) -> std::ops::Range<u32> {
    warp as u32 * 32..warp as u32 * 32 + 32
}

fn acquire(clocks: &mut Clocks, warp: usize, view: &View) {
    for thread in lanes(warp) {
        clocks.acquire(thread, view);
    }
}

/// Waits at named barrier `id` until `threads` threads have arrived there, these included.
#[track_caller]
#[inline]
pub fn named_barrier_sync(id: u32, threads: u32) {
    let [] = meet(Collective::NamedBarrier { id, threads, waits: true }, []);
}

/// Arrives at named barrier `id` without waiting.
#[track_caller]
#[inline]
pub fn named_barrier_arrive(id: u32, threads: u32) {
    let [] = meet(Collective::NamedBarrier { id, threads, waits: false }, []);
}
