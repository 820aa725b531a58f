//! Kernels that are specialized in the background once they are launched often.

use super::kernel::Kernel;
use gqa_kernels::registry::Entry;
use gqa_ptx::Constants;
use gqa_tensor::Result;
use std::mem;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

/// The launch count from which a program is expected to call again with the same constants.
const LAUNCHES: u32 = 16;

/// Compiles kernels on a device, from any thread.
pub(super) trait Compile: Clone + Send + 'static {
    /// The kernel, and whether its text has the constants.
    fn compile(
        &self,
        entry: &'static Entry,
        sm: u32,
        constants: &Constants,
    ) -> Result<(Kernel, bool)>;
}

/// A specialized kernel that takes over once it is compiled.
pub(super) struct Deferred {
    entry: &'static Entry,
    sm: u32,
    constants: Constants,
    launches: AtomicU32,
    kernel: OnceLock<Kernel>,
}

impl Deferred {
    pub(super) fn new(entry: &'static Entry, sm: u32, constants: Constants) -> Self {
        Self { entry, sm, constants, launches: AtomicU32::new(0), kernel: OnceLock::new() }
    }

    /// The kernel, if it is compiled.
    pub(super) fn kernel(&self) -> Option<Kernel> {
        self.kernel.get().copied()
    }

    /// Counts a launch, and returns the specialized kernel once it is compiled. Launch number
    /// [`LAUNCHES`] starts the thread that compiles it.
    pub(super) fn launched(self: &Arc<Self>, device: &impl Compile) -> Option<Kernel> {
        if let Some(kernel) = self.kernel() {
            return Some(kernel);
        }
        if self.launches.load(Ordering::Relaxed) < LAUNCHES
            && self.launches.fetch_add(1, Ordering::Relaxed) + 1 == LAUNCHES
        {
            let (deferred, device) = (Arc::clone(self), device.clone());
            Work::start(move || deferred.compile(&device));
        }
        None
    }

    fn compile(&self, device: &impl Compile) {
        match device.compile(self.entry, self.sm, &self.constants) {
            Ok((kernel, true)) => _ = self.kernel.set(kernel),
            // The general kernel stays in use; the log has the reason.
            Ok((_, false)) => {}
            Err(error) => tracing::warn!(entry = self.entry.name, %error, "not folded"),
        }
    }
}

/// Background compiler threads. The process joins them at exit, because exit unloads the driver. By
/// then the driver must neither compile nor free the state of an ending thread.
struct Work {
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The process that the threads belong to: a forked child inherits this memory, but no threads.
    process: AtomicU32,
}

static WORK: Work = Work { threads: Mutex::new(Vec::new()), process: AtomicU32::new(0) };

impl Work {
    /// Runs `work` in a new thread; drops it if no thread can be started.
    fn start(work: impl FnOnce() + Send + 'static) {
        // Registered for each thread, because exit handlers run in reverse order: this one must run
        // before the handlers that were registered earlier. SAFETY: the function takes nothing,
        // unwinds never, and lives as long as the process.
        _ = unsafe { libc::atexit(join_at_exit) };
        let mut threads = WORK.threads();
        if WORK.process.swap(std::process::id(), Ordering::AcqRel) != std::process::id() {
            // Threads of the parent process, from before a fork: this process cannot join them.
            mem::take(&mut *threads).into_iter().for_each(mem::forget);
        }
        // Joining is quick: the threads are few and have finished their work.
        threads.extract_if(.., |thread| thread.is_finished()).for_each(|thread| _ = thread.join());
        match thread::Builder::new().name("gqa-fold".to_owned()).spawn(work) {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::warn!(%error, "no thread to fold constants"),
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Joins the threads of this process. A forked child must not: it has none of the threads, and a
/// lock that a thread held at the fork stays locked.
extern "C" fn join_at_exit() {
    if WORK.process.load(Ordering::Acquire) != std::process::id() {
        return;
    }
    let threads = mem::take(&mut *WORK.threads());
    threads.into_iter().for_each(|thread| _ = thread.join());
}
