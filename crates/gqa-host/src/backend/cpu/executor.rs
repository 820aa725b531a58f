//! The threads that compute.

use super::parallel_for::parallel_for;
use std::sync::{Mutex, PoisonError};

/// Threads that compute the parts of a call: rayon's, or those of a program that has its own.
///
/// ```
/// use gqa_host::backend::cpu::Executor;
///
/// /// Computes on the thread that calls.
/// struct Here;
///
/// impl Executor for Here {
///     fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
///         (0..count).for_each(part);
///     }
/// }
/// ```
pub trait Executor: Sync {
    /// Calls `part` once with each number below `count`, in any order and on any threads, and
    /// returns when all of these calls have. What a part that is not called would have written
    /// stays as it was; a part that is called again, or is not there, changes nothing.
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync));
}

/// The thread that calls, and the pool of rayon's from which it does; its global one for calls from
/// other threads. No more threads compute than the pool has.
///
/// A process that was forked after its parent had computed has none of these threads: its calls
/// share a pool of the same size, which the first of them makes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rayon;

impl Executor for Rayon {
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
        parallel_for(count, part);
    }
}

/// The thread that calls.
struct Here;

impl Executor for Here {
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(part);
    }
}

/// Where threads take longer to wake than to compute: so many multiplications, or bytes to copy.
const SMALL: usize = 1 << 17;

/// The threads for a loop of so many multiplications, or bytes to copy.
pub(super) fn threads_for(work: usize, executor: &dyn Executor) -> &dyn Executor {
    if work < SMALL { &Here } else { executor }
}

/// Does `work` on every item.
pub(crate) fn each<I: Send>(
    executor: &dyn Executor,
    items: impl Iterator<Item = I>,
    work: impl Fn(I) + Sync,
) {
    let items: Vec<_> = items.map(|item| Mutex::new(Some(item))).collect();
    executor.for_each(items.len(), &|i| {
        let item = items
            .get(i)
            .and_then(|item| item.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(item) = item {
            work(item);
        }
    });
}
