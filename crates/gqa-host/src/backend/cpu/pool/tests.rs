use super::super::Cpu;
use super::super::parallel_for::parallel_for;
use super::*;
use crate::backend::Backend;
use crate::merge::{State, merge_states};
use crate::op::{GroupQueryAttention, Inputs, KvCache};
use crate::reference::Reference;
use gqa_tensor::{DType, Tensor, TensorView, TensorViewMut};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// The number of threads that compute a loop of slow parts.
fn threads() -> usize {
    let threads = Mutex::new(BTreeSet::new());
    parallel_for(200, &|_| {
        thread::sleep(Duration::from_millis(1));
        threads.lock().unwrap().insert(format!("{:?}", thread::current().id()));
    });
    threads.into_inner().unwrap().len()
}

/// Runs a function in a forked process; whether it returns true in time.
fn in_fork(run: impl Fn() -> bool) -> bool {
    // SAFETY: the child calls only what is allowed in the fork of a multi-threaded process, and
    // ends without running the parent's destructors
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "a process");
    if child == 0 {
        let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&run));
        // SAFETY: it ends the process
        unsafe { libc::_exit(i32::from(!right.unwrap_or(false))) };
    }
    let (begun, mut status) = (Instant::now(), 0);
    loop {
        // SAFETY: a child of this process, and a valid pointer to its status
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
        // From a thread of a pool, and from one outside of any pool.
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

/// A prefill with enough heads and rows for several threads.
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
    let new = Inputs { key: Some(&query), value: Some(&value), ..Inputs::new(&query, last, total) };
    let heads = heads as i64;
    let call = GroupQueryAttention::new(heads, heads).run_in_place(&new, &mut cache, backend);
    call.unwrap().output.to_f64().iter().all(|x| (x - 2.0).abs() < 1e-5)
}
