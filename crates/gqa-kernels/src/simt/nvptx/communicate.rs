//! Communication between CTAs through global memory, and programmatic dependent launch: grids that
//! start before the previous one has ended.

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
                // SAFETY: the access stays within the memory that the launch bound.
                unsafe {
                    asm!(concat!($instruction, " {}, [{}], {};"), out(reg32) old, in(reg64) self.offset(i).0, in(reg32) $operand,
                        options(nostack))
                };
                old
            })*

            /// Acquire load of element `i`.
            #[inline(always)]
            pub fn load_acquire(self, i: usize) -> u32 {
                let value;
                // SAFETY: the access stays within the memory that the launch bound.
                unsafe {
                    asm!("ld.acquire.gpu.global.u32 {}, [{}];", out(reg32) value, in(reg64) self.offset(i).0, options(nostack))
                };
                value
            }

            /// Relaxed load of element `i`.
            #[inline(always)]
            pub fn load_relaxed(self, i: usize) -> u32 {
                let value;
                // SAFETY: the access stays within the memory that the launch bound.
                unsafe {
                    asm!("ld.relaxed.gpu.global.u32 {}, [{}];", out(reg32) value, in(reg64) self.offset(i).0, options(nostack))
                };
                value
            }

            /// Release store of element `i`: releases all earlier accesses that this thread has
            /// made or observed.
            #[inline(always)]
            pub fn store_release(self, i: usize, value: u32) {
                // SAFETY: the access stays within the memory that the launch bound.
                unsafe {
                    asm!("st.release.gpu.global.u32 [{}], {};", in(reg64) self.offset(i).0, in(reg32) value, options(nostack))
                };
            }

            /// Relaxed store of element `i`.
            #[inline(always)]
            pub fn store_relaxed(self, i: usize, value: u32) {
                // SAFETY: the access stays within the memory that the launch bound.
                unsafe {
                    asm!("st.relaxed.gpu.global.u32 [{}], {};", in(reg64) self.offset(i).0, in(reg32) value, options(nostack))
                };
            }
        }
    };
}
atomics! {
    /// Adds to element `i` and returns its old value. Relaxed.
    atomic_add(addend) = "atom.relaxed.gpu.global.add.u32";
    /// `atomic_add` with acquire and release.
    atomic_add_acq_rel(addend) = "atom.acq_rel.gpu.global.add.u32";
    /// Adds one to element `i`, or resets it to 0 if it is `last` or more; returns its old value.
    /// Relaxed.
    atomic_inc(last) = "atom.relaxed.gpu.global.inc.u32";
    /// `atomic_inc` with acquire and release.
    atomic_inc_acq_rel(last) = "atom.acq_rel.gpu.global.inc.u32";
}

/// Words that GPUs write into each other's memory.
impl Global<u64> {
    /// Elements `i`, which is even, and `i + 1`, each in one piece, as all GPUs see them. Relaxed.
    #[inline(always)]
    pub fn load_pair_system(self, i: usize) -> [u64; 2] {
        let (first, second);
        // SAFETY: the access stays within the memory that the launch bound.
        unsafe {
            asm!("ld.relaxed.sys.global.v2.b64 {{{}, {}}}, [{}];", out(reg64) first, out(reg64) second,
                in(reg64) self.offset(i).0, options(nostack))
        };
        [first, second]
    }

    /// Writes elements `i`, which is even, and `i + 1`, each in one piece, for all GPUs. Relaxed.
    #[inline(always)]
    pub fn store_pair_system(self, i: usize, [first, second]: [u64; 2]) {
        // SAFETY: the access stays within the memory that the launch bound.
        unsafe {
            asm!("st.relaxed.sys.global.v2.b64 [{}], {{{}, {}}};", in(reg64) self.offset(i).0,
                in(reg64) first, in(reg64) second, options(nostack))
        };
    }
}

/// The GPU's clock, in nanoseconds; its steps are a microsecond or more.
#[inline(always)]
pub fn nanoseconds() -> u64 {
    let now;
    // SAFETY: reading a special register has no precondition.
    unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) now, options(nostack)) };
    now
}

/// Fence: orders this thread's earlier accesses before its later atomic stores, and its earlier
/// atomic loads before its later accesses.
#[inline(always)]
pub fn fence_gpu() {
    // SAFETY: a fence.
    unsafe { asm!("fence.acq_rel.gpu;", options(nostack)) }
}

/// Whether a grid can start before the previous one has ended.
const HAS_DEPENDENT_LAUNCH: bool = cfg!(target_feature = "sm_90");

/// Waits until the previous grids have ended and their writes are visible. No effect before SM 90,
/// where a grid never starts early.
#[inline(always)]
pub fn grid_dependency_wait() {
    if HAS_DEPENDENT_LAUNCH {
        // SAFETY: no precondition.
        unsafe { dependency_wait() }
    }
}

/// Lets the next grid start once all CTAs have called this or exited. No effect before SM 90, where
/// the next grid starts after this one.
#[inline(always)]
pub fn launch_dependents() {
    if HAS_DEPENDENT_LAUNCH {
        // SAFETY: no precondition.
        unsafe { dependents() }
    }
}
