//! Stacks for threads, kept for reuse.

use corosensei::stack::{DefaultStack, Stack, StackPointer};
use std::cell::{Cell, RefCell};

/// Room for a kernel compiled without optimisation; the system provides only what is touched.
const BYTES: usize = 256 * 1024;
const CACHE_LINE: usize = 64;
/// Lines from one stack's start to the next one's, within their pages. Odd, so that all sets of a cache are used.
const STEP: usize = 17;
const COLOURS: usize = 64;

/// A stack that starts at its own distance from the page's end. Stacks that all started at a page's end would put the frames of all
/// threads into the same few sets of the first-level cache, which nearly every switch of threads would then miss.
pub(crate) struct ThreadStack {
    memory: DefaultStack,
    skipped: usize,
}

thread_local! {
    static IDLE: RefCell<Vec<ThreadStack>> = const { RefCell::new(Vec::new()) };
    static MADE: Cell<usize> = const { Cell::new(0) };
}

impl ThreadStack {
    /// One that is not in use, or a new one.
    pub(crate) fn take() -> Self {
        IDLE.with_borrow_mut(Vec::pop).unwrap_or_else(Self::new)
    }

    /// Keeps it for the next [`Self::take`] on this thread of the host.
    pub(crate) fn give_back(self) {
        IDLE.with_borrow_mut(|idle| idle.push(self));
    }

    fn new() -> Self {
        let number = MADE.replace(MADE.get() + 1);
        let memory = DefaultStack::new(BYTES).expect("memory for a thread's stack");
        Self { memory, skipped: number % COLOURS * STEP * CACHE_LINE }
    }
}

// SAFETY: the memory is the default stack's, guard page included; a quarter of it at most is skipped, in multiples of the alignment.
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
