//! ONNX Runtime's threads while ours compute.
//!
//! Where they have no work they spin, on the cores that our threads need. So each of them gets a
//! share of the call: the first one is all of its work, and the others wait for its end, asleep.

use crate::api::Failure;
use crate::value::Context;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// A call's work, until somebody takes it, and what came of it.
struct Call<F, R> {
    state: Mutex<State<F, R>>,
    ended: Condvar,
}

type State<F, R> = (Option<F>, Option<thread::Result<R>>);

impl<F: FnOnce() -> R, R> Call<F, R> {
    fn state(&self) -> MutexGuard<'_, State<F, R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the work if nobody has begun it, or waits for its end.
    fn share(&self) {
        let work = self.state().0.take();
        if let Some(work) = work {
            let result = catch_unwind(AssertUnwindSafe(work));
            self.state().1 = Some(result);
            self.ended.notify_all();
        } else {
            drop(self.ended.wait_while(self.state(), |state| state.1.is_none()));
        }
    }
}

/// # Safety
///
/// `call` must be a call of these types, which other threads may share.
unsafe extern "C" fn share<F: FnOnce() -> R, R>(call: *mut c_void, _: usize) {
    // SAFETY: as the caller says
    unsafe { &*call.cast::<Call<F, R>>() }.share();
}

/// What `work` gives, which one of ONNX Runtime's threads does, while the others wait for it.
///
/// # Safety
///
/// What `work` and its result hold may be used by another thread while this one waits.
pub unsafe fn asleep<F: FnOnce() -> R, R>(context: Context, work: F) -> Result<R, Failure> {
    let count = thread::available_parallelism().map_or(1, usize::from);
    let call = Call { state: Mutex::new((Some(work), None)), ended: Condvar::new() };
    // SAFETY: the call lives until all shares have ended, which is when this returns
    unsafe { context.parallel_for(count, share::<F, R>, (&raw const call).cast_mut().cast()) }?;
    // Where nobody took it.
    call.share();
    let result = call.state().1.take();
    match result {
        Some(Ok(result)) => Ok(result),
        Some(Err(panic)) => resume_unwind(panic),
        None => unreachable!("a share ends with a result"),
    }
}
