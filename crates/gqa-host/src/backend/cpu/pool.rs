//! The helper threads of loops, which also work in a forked process.
//!
//! A forked process has only the thread that called `fork`. Its copy of a pool has no threads: work
//! in it never starts, and a lock that a pool thread held stays locked. So a forked process ignores
//! inherited pools and makes its own.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Whether this process may have inherited pools. Otherwise rayon's pools are used as the program
/// has configured them.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The pool of a forked process; null before the first use.
static OWN: AtomicPtr<ThreadPool> = AtomicPtr::new(ptr::null_mut());

/// Its number of threads: that of the largest pool used before the fork.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread is older than its process, and so belongs to no working pool.
    static SURVIVED: Cell<bool> = const { Cell::new(false) };
}

/// Threads that may help.
#[derive(Clone, Copy)]
pub(super) enum Pool {
    /// Those of the calling thread's rayon pool.
    Current,
    /// Those of a forked process's own pool.
    Own(&'static ThreadPool),
    /// No thread could be started.
    Empty,
}

impl Pool {
    /// The pool of the calling thread.
    pub(super) fn of_caller() -> Self {
        watch_forks();
        let is_newer = || rayon::current_thread_index().is_some() && !SURVIVED.get();
        match !FORKED.load(Ordering::Acquire) || is_newer() {
            true => Self::Current,
            false => own().map_or(Self::Empty, Self::Own),
        }
    }

    /// The number of threads, including the caller if it belongs to the pool.
    pub(super) fn threads(self) -> usize {
        match self {
            Self::Current => {
                let threads = rayon::current_num_threads();
                if THREADS.load(Ordering::Relaxed) < threads {
                    THREADS.fetch_max(threads, Ordering::Relaxed);
                }
                threads
            }
            Self::Own(pool) => pool.current_num_threads(),
            Self::Empty => 1,
        }
    }

    /// Runs work on one of the threads.
    pub(super) fn spawn(self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Current => rayon::spawn(work),
            Self::Own(pool) => pool.spawn(work),
            Self::Empty => work(),
        }
    }
}

/// The process's own pool, made at the first use; `None` if no thread can be started.
fn own() -> Option<&'static ThreadPool> {
    let mut pool = OWN.load(Ordering::Acquire);
    if pool.is_null() {
        // Lock-free: another thread might hold a lock at the moment of a fork.
        let made = ThreadPoolBuilder::new().num_threads(THREADS.load(Ordering::Relaxed)).build();
        let made = Box::into_raw(Box::new(made.ok()?));
        let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
        pool = match OWN.compare_exchange(ptr::null_mut(), made, order, failed) {
            Ok(_) => made,
            Err(other) => {
                // SAFETY: the pointer comes from the box, and no other thread has seen it
                drop(unsafe { Box::from_raw(made) });
                other
            }
        };
    }
    // SAFETY: what is there once is never freed
    Some(unsafe { &*pool })
}

/// Registers the fork handler. Calling this again has no effect.
fn watch_forks() {
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    {
        extern "C" fn forked() {
            FORKED.store(true, Ordering::Release);
            OWN.store(ptr::null_mut(), Ordering::Release);
            SURVIVED.set(true);
        }
        static WATCHED: AtomicBool = AtomicBool::new(false);
        if !WATCHED.load(Ordering::Acquire) {
            // SAFETY: the handler takes no lock and allocates no memory
            let failed = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
            WATCHED.store(failed == 0, Ordering::Release);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
