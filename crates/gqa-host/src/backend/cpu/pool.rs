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
mod tests {
    use super::super::Cpu;
    use super::super::parallel_for::parallel_for;
    use super::*;
    use crate::backend::Backend;
    use crate::op::{GroupQueryAttention, Inputs, KvCache};
    use crate::reference::Reference;
    use crate::{DType, State, Tensor, TensorView, TensorViewMut, merge_states};
    use std::collections::BTreeSet;
    use std::sync::Mutex;
    use std::thread;
    use std::time::{Duration, Instant};

    /// How many threads compute a loop of slow parts.
    fn threads() -> usize {
        let threads = Mutex::new(BTreeSet::new());
        parallel_for(200, &|_| {
            thread::sleep(Duration::from_millis(1));
            threads.lock().unwrap().insert(format!("{:?}", thread::current().id()));
        });
        threads.into_inner().unwrap().len()
    }

    /// Runs a function in a fork of this process; whether it returns true in time.
    fn in_fork(run: impl Fn() -> bool) -> bool {
        // SAFETY: the child calls nothing but what a fork of a process with threads may call here,
        // and ends without destructors of the parent's
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "a process");
        if child == 0 {
            let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&run));
            // SAFETY: it ends the process
            unsafe { libc::_exit(i32::from(!right.unwrap_or(false))) };
        }
        let (begun, mut status) = (Instant::now(), 0);
        loop {
            // SAFETY: a child of this process, and a place for its status
            let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
            if ended == child {
                return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
            }
            if begun.elapsed() > Duration::from_secs(60) {
                // SAFETY: likewise
                unsafe { libc::kill(child, libc::SIGKILL) };
                // SAFETY: likewise
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn forked_processes_have_threads_of_their_own() {
        for threads_of_pool in [2, 3] {
            let pool = ThreadPoolBuilder::new().num_threads(threads_of_pool).build().unwrap();
            // From a thread of a pool, and from one that is of none.
            let twice = || {
                assert!(threads() > 1, "this process has them");
                assert!(in_fork(|| threads() > 1), "its child has none");
                let grandchild = || threads() > 1 && in_fork(|| threads() > 1 && threads() > 1);
                assert!(in_fork(grandchild), "its child's child has none");
                assert!(threads() > 1, "this process still has them");
            };
            pool.install(twice);
            if threads() > 1 {
                twice();
            }
        }
    }

    #[test]
    fn calls_of_a_forked_process_end() {
        let merged = || {
            let (output, lse) = (vec![2.0; 64 * 16], vec![0.0; 64]);
            let state = State { output: TensorView::F32(&output), lse: &lse };
            let (mut to, mut to_lse) = (vec![0.0; 64 * 16], vec![0.0; 64]);
            let to_output = TensorViewMut::F32(&mut to);
            merge_states(&[state, state], [1, 8, 8, 16], to_output, &mut to_lse).unwrap();
            to.iter().all(|&x| x == 2.0) && to_lse.iter().all(|&x| x == 2f32.ln())
        };
        assert!(merged() && in_fork(merged), "a merge in a child");
        #[cfg(feature = "sim")]
        let sim = crate::backend::sim::Sim::default();
        for backend in [
            &Cpu::default() as &dyn Backend,
            &Reference,
            #[cfg(feature = "sim")]
            &sim,
        ] {
            assert!(attends(backend), "{}", backend.name());
            assert!(in_fork(|| attends(backend)), "{} in a child", backend.name());
        }
    }

    /// A prompt of as many heads and rows as several threads compute.
    fn attends(backend: &dyn Backend) -> bool {
        let (rows, heads) = (96, 8);
        let zeros = |shape: &[usize]| Tensor::zeros(DType::F32, shape);
        let query = zeros(&[1, rows, heads * 16]);
        let value = vec![2.0; rows * heads * 16];
        let value = Tensor::from_f32(DType::F32, &[1, rows, heads * 16], &value).unwrap();
        let cache = zeros(&[1, heads, rows, 16]);
        let mut cache = KvCache { key: cache.clone(), value: cache, scales: None };
        let numbers = [rows as i32 - 1, rows as i32].map(|n| ndarray::arr1(&[n]).into());
        let [last, total] = &numbers;
        let new =
            Inputs { key: Some(&query), value: Some(&value), ..Inputs::new(&query, last, total) };
        let heads = heads as i64;
        let call = GroupQueryAttention::new(heads, heads).run_in_place(&new, &mut cache, backend);
        call.unwrap().output.to_f64().iter().all(|x| (x - 2.0).abs() < 1e-5)
    }
}
