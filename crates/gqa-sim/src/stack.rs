//! Stacks for threads, kept for reuse.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::cell::{Cell, RefCell};
use std::sync::{Condvar, Mutex, PoisonError};

/// Enough for a kernel compiled without optimisation; untouched pages cost nothing.
const BYTES: usize = 256 * 1024;
const CACHE_LINE: usize = 64;
/// Cache lines from one stack's start to the next one's, within a page. Odd, so that all sets of
/// the cache are used.
const STEP: usize = 17;
const COLOURS: usize = 64;

/// A stack that starts at its own offset within a page. If all stacks started at the end of a page,
/// the frames of all threads would share a few sets of the L1 cache, and nearly every switch of
/// threads would miss.
pub(crate) struct ThreadStack {
    memory: DefaultStack,
    skipped: usize,
    /// The maximum number of stacks of the process.
    shared: bool,
}

thread_local! {
    static IDLE: RefCell<Vec<ThreadStack>> = const { RefCell::new(Vec::new()) };
    static MADE: Cell<usize> = const { Cell::new(0) };
}

/// Stacks of CTAs that take turns. Without a limit, clusters of thousands of threads on each of
/// many cores would exhaust the memory mappings.
struct Stock {
    idle: Vec<ThreadStack>,
    /// Stacks that are reserved.
    reserved: usize,
}

static STOCK: Mutex<Stock> = Mutex::new(Stock { idle: Vec::new(), reserved: 0 });
static RETURNED: Condvar = Condvar::new();
/// The stacks that one reservation may take at once, unless a launch needs more.
const STOCKED: usize = 8192;

/// A reservation of stacks.
pub(crate) struct Reserved(usize);

impl Reserved {
    /// Waits until enough stacks are free. A holder of stacks must not reserve more, which could
    /// deadlock.
    pub(crate) fn new(count: usize) -> Self {
        let stock = STOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let is_short = |stock: &mut Stock| stock.reserved > 0 && stock.reserved + count > STOCKED;
        let mut stock =
            RETURNED.wait_while(stock, is_short).unwrap_or_else(PoisonError::into_inner);
        stock.reserved += count;
        Self(count)
    }

    /// One that is not in use, or a new one.
    pub(crate) fn take(&self) -> ThreadStack {
        let idle = STOCK.lock().unwrap_or_else(PoisonError::into_inner).idle.pop();
        idle.unwrap_or_else(|| ThreadStack::new(true))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        STOCK.lock().unwrap_or_else(PoisonError::into_inner).reserved -= self.0;
        RETURNED.notify_all();
    }
}

impl ThreadStack {
    /// A free stack of this host thread, or a new one.
    pub(crate) fn take() -> Self {
        IDLE.with_borrow_mut(Vec::pop).unwrap_or_else(|| Self::new(false))
    }

    /// Keeps it for later, where it was taken.
    pub(crate) fn give_back(self) {
        if self.shared {
            STOCK.lock().unwrap_or_else(PoisonError::into_inner).idle.push(self);
        } else {
            IDLE.with_borrow_mut(|idle| idle.push(self));
        }
    }

    fn new(shared: bool) -> Self {
        let number = MADE.replace(MADE.get() + 1);
        let memory = DefaultStack::new(BYTES).expect("memory for a thread's stack");
        Self { memory, skipped: number % COLOURS * STEP * CACHE_LINE, shared }
    }
}

// SAFETY: the memory is the default stack's, guard page included; a quarter of it at most is
// skipped, in multiples of the alignment.
unsafe impl Stack for ThreadStack {
    fn base(&self) -> StackPointer {
        StackPointer::new(self.memory.base().get() - self.skipped).expect("inside the stack")
    }

    fn limit(&self) -> StackPointer {
        self.memory.limit()
    }

    #[cfg(windows)]
    fn teb_fields(&self) -> corosensei::stack::StackTebFields {
        self.memory.teb_fields()
    }

    #[cfg(windows)]
    fn update_teb_fields(&mut self, stack_limit: usize, guaranteed_stack_bytes: usize) {
        self.memory.update_teb_fields(stack_limit, guaranteed_stack_bytes);
    }
}
