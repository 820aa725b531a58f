//! The threads that help a loop, in a process that was forked, too.
//!
//! A fork has the thread that asked for it and no other. Its copy of a pool has no threads: work
//! that it is given does not begin, and a lock that one of them held stays locked. So a forked
//! process leaves pools from before alone, and makes one of its own.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Whether pools from before a fork may be around. Until then the pools of rayon's are used that a
/// program has set up.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The pool of a process that was forked; null until there is one.
static OWN: AtomicPtr<ThreadPool> = AtomicPtr::new(ptr::null_mut());

/// As many threads as that has: those of the largest pool that was asked before the fork.
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether the thread is older than its process, so that it is of no pool that has threads.
    static SURVIVED: Cell<bool> = const { Cell::new(false) };
}

/// Threads that may help.
#[derive(Clone, Copy)]
pub(super) enum Pool {
    /// Rayon's, of the thread that calls.
    Current,
    /// That of a process that was forked.
    Own(&'static ThreadPool),
    /// No thread could be started.
    Empty,
}

impl Pool {
    /// That of the thread that calls.
    pub(super) fn of_caller() -> Self {
        watch_forks();
        let is_newer = || rayon::current_thread_index().is_some() && !SURVIVED.get();
        match !FORKED.load(Ordering::Acquire) || is_newer() {
            true => Self::Current,
            false => own().map_or(Self::Empty, Self::Own),
        }
    }

    /// How many threads it has, the caller among them where it is of the pool.
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

    /// Gives work to one of them.
    pub(super) fn spawn(self, work: impl FnOnce() + Send + 'static) {
        match self {
            Self::Current => rayon::spawn(work),
            Self::Own(pool) => pool.spawn(work),
            Self::Empty => work(),
        }
    }
}

/// The process's own pool, made where there is none, unless no thread can be started.
fn own() -> Option<&'static ThreadPool> {
    let mut pool = OWN.load(Ordering::Acquire);
    if pool.is_null() {
        // Without a lock, which another thread might hold in the moment of a fork.
        let made = ThreadPoolBuilder::new().num_threads(THREADS.load(Ordering::Relaxed)).build();
        let made = Box::into_raw(Box::new(made.ok()?));
        let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
        pool = match OWN.compare_exchange(ptr::null_mut(), made, order, failed) {
            Ok(_) => made,
            Err(other) => {
                // SAFETY: it comes from the box, and nobody has seen it
                drop(unsafe { Box::from_raw(made) });
                other
            }
        };
    }
    // SAFETY: what is there once is never freed
    Some(unsafe { &*pool })
}

/// Lets forks from now on be known. Once is enough; more often changes nothing.
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
            // SAFETY: a function for the child, which takes no lock and allocates nothing
            let failed = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
            WATCHED.store(failed == 0, Ordering::Release);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
