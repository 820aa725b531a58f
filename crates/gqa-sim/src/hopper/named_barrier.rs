//! Barriers 0 to 15 among any number of warps.

use crate::block::{Block, Hold};
use crate::collective::{Collective, meet};
use crate::fault::FaultKind;
use crate::shared::Checked;

#[derive(Default)]
pub(super) struct NamedBarrier {
    /// Threads of the running phase; 0 before its first arrival.
    threads: u32,
    arrived: u32,
    /// Warps that wait.
    waiting: Vec<usize>,
}

/// The warp whose first thread is `first` arrives, to wait or to go on.
pub(crate) fn arrive(
    block: &mut Block,
    first: usize,
    id: u32,
    threads: u32,
    waits: bool,
) -> Checked {
    let warp = first / 32;
    let misuse = |what| Err(Box::new(FaultKind::NamedBarrier { warp: warp as u32, id, what }));
    if threads == 0 || threads as usize > block.lanes.len() || !threads.is_multiple_of(32) {
        return misuse(format!("{threads} threads"));
    }
    let Some(barrier) = block.hopper.named_barriers.get_mut(id as usize) else {
        return misuse("there are 16".to_owned());
    };
    if barrier.threads != 0 && barrier.threads != threads {
        return misuse(format!("{threads} threads, though others said {}", barrier.threads));
    }
    barrier.threads = threads;
    barrier.arrived += 32;
    if waits {
        barrier.waiting.push(warp);
        block.holds[warp] = Hold::Warp;
    }
    if barrier.arrived == threads {
        for warp in std::mem::take(barrier).waiting {
            block.holds[warp] = Hold::No;
        }
        block.woken = true;
    }
    Ok(())
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
