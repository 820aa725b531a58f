//! The public API as careless and hostile callers use it: see `gqa_tests::hostile`. A million
//! calls: `PARITY_CASES=1000000 cargo test -p gqa-tests --test hostile`.

use gqa_tests::hostile;
use std::alloc::{GlobalAlloc, Layout, System};

/// An allocator that models a small machine: large requests fail, which aborts a process that is
/// not prepared for it.
struct Small;

/// The largest tensor of any call.
const LARGEST: usize = 64 << 20;

// SAFETY: the system's allocator, or null.
unsafe impl GlobalAlloc for Small {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match layout.size() {
            // SAFETY: the caller's.
            0..=LARGEST => unsafe { System.alloc(layout) },
            _ => std::ptr::null_mut(),
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match layout.size() {
            // SAFETY: the caller's.
            0..=LARGEST => unsafe { System.alloc_zeroed(layout) },
            _ => std::ptr::null_mut(),
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match size {
            // SAFETY: the caller's.
            0..=LARGEST => unsafe { System.realloc(pointer, layout, size) },
            _ => std::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static MEMORY: Small = Small;

#[test]
fn whatever_is_given_the_answer_is_a_result_or_an_error() {
    hostile("hostile callers", 16_000);
}
