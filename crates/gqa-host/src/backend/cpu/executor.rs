//! The threads of the CPU back end.

use super::parallel_for::parallel_for;
use std::sync::{Mutex, PoisonError};

/// A parallel loop over the parts of a call, on rayon's threads or a program's own.
///
/// ```
/// use gqa_host::backend::cpu::Executor;
///
/// /// Computes on the calling thread.
/// struct Here;
///
/// impl Executor for Here {
///     fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
///         (0..count).for_each(part);
///     }
/// }
/// ```
pub trait Executor: Sync {
    /// Calls `part` once with each index below `count`, in any order and on any threads, and
    /// returns when all calls have returned. Output of a part that is not called stays unwritten;
    /// calling a part again, or with an index out of range, has no effect.
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync));
}

/// The calling thread and its rayon pool, by default the global one; at most as many threads as the
/// pool has.
///
/// A forked process has no pool threads, so its first call makes a new pool of the same size.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rayon;

impl Executor for Rayon {
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
        parallel_for(count, part);
    }
}

/// The calling thread.
struct Here;

impl Executor for Here {
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(part);
    }
}

/// Below this many multiplications, or bytes to copy, threads take longer to wake than to compute.
const SMALL: usize = 1 << 17;

/// The executor for a loop with this many multiplications, or bytes to copy.
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
