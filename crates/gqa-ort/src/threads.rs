//! Calls are computed by the threads of the ONNX Runtime session.

use crate::value::Context;
use gqa_host::backend::cpu::Executor;
use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

/// The threads of the session that makes a call.
pub struct Threads(Context);

// SAFETY: ONNX Runtime lets any thread use its pool
unsafe impl Sync for Threads {}

impl Threads {
    /// Those of a call's session, while the call runs.
    pub fn of(context: Context) -> Self {
        Self(context)
    }
}

impl Executor for Threads {
    fn for_each(&self, count: usize, part: &(dyn Fn(usize) + Sync)) {
        if count <= 1 {
            return (0..count).for_each(part);
        }
        let parts = Parts { part, panic: Mutex::new(None) };
        // SAFETY: the parts live until all calls have ended, which is when this returns
        let run =
            unsafe { self.0.parallel_for(count, run_part, (&raw const parts).cast_mut().cast()) };
        if run.is_err() {
            // It has no threads for us.
            (0..count).for_each(part);
        }
        if let Some(panic) = parts.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

/// What threads do, and the panic of one of them, which may not leave it by itself.
struct Parts<'a> {
    part: &'a (dyn Fn(usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// # Safety
///
/// `parts` must be [`Parts`].
unsafe extern "C" fn run_part(parts: *mut c_void, i: usize) {
    // SAFETY: as the caller says
    let parts = unsafe { &*parts.cast::<Parts<'_>>() };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (parts.part)(i))) {
        *parts.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
    }
}
