//! A parallel loop in which the calling thread takes part.
//!
//! A rayon loop runs on pool threads only. A caller outside of the pool sleeps until the loop is
//! done, after one pool thread has woken another: that can take longer than a decode step. Here the
//! caller starts at once, pool threads join as soon as they are awake, and the caller waits only
//! for parts that another thread has started.

use super::pool::Pool;
use std::any::Any;
use std::hint::spin_loop;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};

/// Computes a part.
type Part<'a> = dyn Fn(usize) + Sync + 'a;

/// Calls `part` once with each index below `count`, on the calling thread and threads of its pool,
/// at most as many as the pool has.
pub(super) fn parallel_for(count: usize, part: &Part<'_>) {
    let pool = Pool::of_caller();
    let helpers = pool.threads().min(count).saturating_sub(1);
    if helpers == 0 {
        return (0..count).for_each(part);
    }
    let shared = Arc::new(Shared {
        // SAFETY: the same pointer with another lifetime; `Shared` says how long it is valid
        part: unsafe { mem::transmute::<*const Part<'_>, *const Part<'static>>(part) },
        count,
        next: AtomicUsize::new(0),
        unfinished: AtomicUsize::new(count),
        panic: Mutex::new(None),
        caller: thread::current(),
    });
    shared.call(pool, helpers);
    shared.run();
    shared.wait();
    if let Some(panic) = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
        resume_unwind(panic);
    }
}

/// The state of a loop. A thread that arrives after the caller has returned finds no part left.
struct Shared {
    /// Valid as long as a part is unfinished.
    part: *const Part<'static>,
    count: usize,
    /// The first part that has not begun.
    next: AtomicUsize,
    /// Number of parts that have not ended.
    unfinished: AtomicUsize,
    /// The panic of a part.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

// SAFETY: any thread may call the function; all other fields are `Sync`
unsafe impl Send for Shared {}
// SAFETY: the same
unsafe impl Sync for Shared {}

impl Shared {
    /// Wakes helper threads, unless all parts have started. Waking takes a while, so that the first
    /// helper wakes half of the others.
    fn call(self: &Arc<Self>, pool: Pool, helpers: usize) {
        if helpers == 0 || self.next.load(Ordering::Relaxed) >= self.count {
            return;
        }
        let shared = Arc::clone(self);
        pool.spawn(move || {
            let others = helpers - 1;
            shared.call(pool, others / 2);
            shared.call(pool, others - others / 2);
            shared.run();
        });
    }

    /// Computes parts until all have begun.
    fn run(&self) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= self.count {
                return;
            }
            // SAFETY: part `i` is unfinished
            let part = unsafe { &*self.part };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| part(i))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            // Release: a thread that sees the part ended sees its writes.
            if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.caller.unpark();
            }
        }
    }

    /// Returns when all parts have ended.
    fn wait(&self) {
        /// Spins for about as long as a thread takes to wake.
        const SPINS: usize = 1 << 10;
        let mut turns = 0;
        while self.unfinished.load(Ordering::Acquire) > 0 {
            if turns < SPINS {
                turns += 1;
                spin_loop();
            } else {
                thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;
    use std::time::Duration;

    /// How often each part of a loop is called.
    fn calls(count: usize, slow: bool) -> Vec<u8> {
        let calls: Vec<_> = (0..count).map(|_| AtomicU8::new(0)).collect();
        parallel_for(count, &|i| {
            if slow {
                thread::sleep(Duration::from_micros(100));
            }
            calls[i].fetch_add(1, Ordering::Relaxed);
        });
        calls.into_iter().map(AtomicU8::into_inner).collect()
    }

    /// On rayon's threads, and on a thread outside of the pool.
    fn everywhere(run: impl Fn() + Sync) {
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.expect("a pool").install(&run);
        }
        run();
    }

    #[test]
    fn every_part_is_called_once() {
        everywhere(|| {
            for count in 0..60 {
                assert_eq!(calls(count, false), vec![1; count]);
                assert_eq!(calls(count, true), vec![1; count]);
            }
        });
    }

    #[test]
    fn calls_within_calls_end() {
        everywhere(|| {
            parallel_for(9, &|_| assert_eq!(calls(5, true), [1; 5]));
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_when_all_parts_have_ended() {
        everywhere(|| {
            let called = AtomicUsize::new(0);
            let run = AssertUnwindSafe(|| {
                parallel_for(20, &|i| {
                    called.fetch_add(1, Ordering::Relaxed);
                    assert!(i != 11, "part {i}");
                });
            });
            let panic = catch_unwind(run).expect_err("a part panics");
            assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("part 11"));
            let threads = rayon::current_num_threads();
            assert!(threads == 1 || called.into_inner() == 20, "a part was left out");
        });
    }
}
