//! Blocks that pass data to each other through global memory, and grids that start before the one
//! before them has ended.

use super::Global;
use core::arch::asm;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    fn dependency_wait();
    #[link_name = "llvm.nvvm.griddepcontrol.launch.dependents"]
    fn dependents();
}

macro_rules! atomics {
    ($($(#[$doc:meta])* $name:ident($operand:ident) = $instruction:literal;)*) => {
        /// Atomic operations among all threads of the GPU.
        impl Global<u32> {
            $($(#[$doc])*
            #[inline(always)]
            pub fn $name(self, i: usize, $operand: u32) -> u32 {
                let old;
                // SAFETY: inside what the launch bound.
                unsafe {
                    asm!(concat!($instruction, " {}, [{}], {};"), out(reg32) old, in(reg64) self.offset(i).0, in(reg32) $operand,
                        options(nostack))
                };
                old
            })*

            /// Element `i`, and what was released with it.
            #[inline(always)]
            pub fn load_acquire(self, i: usize) -> u32 {
                let value;
                // SAFETY: inside what the launch bound.
                unsafe {
                    asm!("ld.acquire.gpu.global.u32 {}, [{}];", out(reg32) value, in(reg64) self.offset(i).0, options(nostack))
                };
                value
            }

            /// Element `i`, as it is now; orders nothing.
            #[inline(always)]
            pub fn load_relaxed(self, i: usize) -> u32 {
                let value;
                // SAFETY: inside what the launch bound.
                unsafe {
                    asm!("ld.relaxed.gpu.global.u32 {}, [{}];", out(reg32) value, in(reg64) self.offset(i).0, options(nostack))
                };
                value
            }

            /// Writes element `i` and releases with it all that this thread has done and seen.
            #[inline(always)]
            pub fn store_release(self, i: usize, value: u32) {
                // SAFETY: inside what the launch bound.
                unsafe {
                    asm!("st.release.gpu.global.u32 [{}], {};", in(reg64) self.offset(i).0, in(reg32) value, options(nostack))
                };
            }

            /// Writes element `i`; orders nothing.
            #[inline(always)]
            pub fn store_relaxed(self, i: usize, value: u32) {
                // SAFETY: inside what the launch bound.
                unsafe {
                    asm!("st.relaxed.gpu.global.u32 [{}], {};", in(reg64) self.offset(i).0, in(reg32) value, options(nostack))
                };
            }
        }
    };
}
atomics! {
    /// Adds to element `i`; returns what it was. Orders nothing.
    atomic_add(addend) = "atom.relaxed.gpu.global.add.u32";
    /// As `atomic_add`, releasing and acquiring.
    atomic_add_acq_rel(addend) = "atom.acq_rel.gpu.global.add.u32";
    /// Adds one to element `i`, which becomes 0 where it was `last` or more; returns what it was.
    /// Orders nothing.
    atomic_inc(last) = "atom.relaxed.gpu.global.inc.u32";
    /// As `atomic_inc`, releasing and acquiring.
    atomic_inc_acq_rel(last) = "atom.acq_rel.gpu.global.inc.u32";
}

/// Orders what this thread has done and seen before its later atomic stores, and its earlier atomic
/// loads before what it does later.
#[inline(always)]
pub fn fence_gpu() {
    // SAFETY: a fence.
    unsafe { asm!("fence.acq_rel.gpu;", options(nostack)) }
}

/// Whether a grid can start before the one ahead of it has ended.
const HAS_DEPENDENT_LAUNCH: bool = cfg!(target_feature = "sm_90");

/// Waits until the grids before this one have ended and their memory can be seen; code for GPUs
/// before SM 90 starts no earlier.
#[inline(always)]
pub fn grid_dependency_wait() {
    if HAS_DEPENDENT_LAUNCH {
        // SAFETY: no precondition.
        unsafe { dependency_wait() }
    }
}

/// Lets the grid after this one start, once all blocks have said so or exited; it starts behind
/// this one in code for GPUs before SM 90.
#[inline(always)]
pub fn launch_dependents() {
    if HAS_DEPENDENT_LAUNCH {
        // SAFETY: no precondition.
        unsafe { dependents() }
    }
}
