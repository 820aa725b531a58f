//! Tensor memory and `tcgen05` of one CTA. SM 100a and 103a.
//!
//! Waits, fences and the permit are LLVM intrinsics. The other instructions have addresses of
//! memory that Rust has no pointers to, and are `asm!`: kernels call them in uniform control flow,
//! those of the tensor cores from one thread.

use core::arch::asm;
use core::mem::MaybeUninit;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.tcgen05.relinq.alloc.permit.cg1"]
    fn relinquish();
    #[link_name = "llvm.nvvm.tcgen05.wait.ld"]
    fn wait_ld();
    #[link_name = "llvm.nvvm.tcgen05.wait.st"]
    fn wait_st();
    #[link_name = "llvm.nvvm.tcgen05.fence.before.thread.sync"]
    fn fence_before();
    #[link_name = "llvm.nvvm.tcgen05.fence.after.thread.sync"]
    fn fence_after();
}

/// Allocates `columns` columns of tensor memory, a power of two from 32 to 512, and writes their
/// address to shared memory. One warp executes it, and waits until that many are free.
#[inline(always)]
pub fn tcgen05_alloc(place: u32, columns: u32) {
    // SAFETY: four aligned bytes of the CTA's shared memory; kernels call this in warp-uniform
    // control flow, as the functions below.
    unsafe {
        asm!("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{}], {};",
            in(reg32) place, in(reg32) columns, options(nostack))
    }
}

/// Gives columns back. By one warp, once no other thread accesses them.
#[inline(always)]
pub fn tcgen05_dealloc(address: u32, columns: u32) {
    // SAFETY: what `tcgen05_alloc` gave.
    unsafe {
        asm!("tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, {};",
            in(reg32) address, in(reg32) columns, options(nostack))
    }
}

/// Lets other CTAs of the SM allocate; this one must not any more.
#[inline(always)]
pub fn tcgen05_relinquish() {
    // SAFETY: kernels call this in warp-uniform control flow.
    unsafe { relinquish() }
}

/// Waits for the warp's loads from tensor memory.
#[inline(always)]
pub fn tcgen05_wait_ld() {
    // SAFETY: as above.
    unsafe { wait_ld() }
}

/// Waits for the warp's stores to tensor memory.
#[inline(always)]
pub fn tcgen05_wait_st() {
    // SAFETY: as above.
    unsafe { wait_st() }
}

/// Orders this thread's `tcgen05` accesses that it has waited for before what it does next: a
/// barrier or an arrival follows.
#[inline(always)]
pub fn tcgen05_fence_before() {
    // SAFETY: a fence.
    unsafe { fence_before() }
}

/// Orders this thread's next `tcgen05` accesses after the barrier or wait before it.
#[inline(always)]
pub fn tcgen05_fence_after() {
    // SAFETY: a fence.
    unsafe { fence_after() }
}

/// Arrives at an mbarrier once all products that this thread has issued are complete.
#[inline(always)]
pub fn tcgen05_commit(barrier: u32) {
    // SAFETY: an initialised barrier of this CTA.
    unsafe {
        asm!("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];",
            in(reg32) barrier, options(nostack))
    }
}

macro_rules! mma {
    ($($(#[$doc:meta])* $name:ident($class:ident $ty:ty) = $kind:literal, $a:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(d: u32, a: $ty, b: u64, instruction: u32, keep: bool) {
            // SAFETY: the descriptors describe operands in the CTA's memory; kernels call this from
            // one thread.
            unsafe {
                asm!(concat!("{{ .reg .pred keep; setp.ne.b32 keep, {4}, 0; tcgen05.mma.cta_group::1.kind::", $kind, " [{0}], ", $a, ", {2}, {3}, keep; }}"),
                    in(reg32) d, in($class) a, in(reg64) b, in(reg32) instruction, in(reg32) keep as u32, options(nostack))
            }
        }
    )*};
}
mma! {
    /// `D = keep · D + A · B`, operands of 16 bits in shared memory, given by descriptors; D in
    /// tensor memory, where it may be anything if `keep` is false. By one thread.
    tcgen05_mma_f16(reg64 u64) = "f16", "{1}";
    /// [`tcgen05_mma_f16`] with operands of 8 bits.
    tcgen05_mma_f8f6f4(reg64 u64) = "f8f6f4", "{1}";
    /// [`tcgen05_mma_f16`] with A in tensor memory.
    tcgen05_mma_tensor_f16(reg32 u32) = "f16", "[{1}]";
    /// [`tcgen05_mma_f8f6f4`] with A in tensor memory.
    tcgen05_mma_tensor_f8f6f4(reg32 u32) = "f8f6f4", "[{1}]";
}

/// Registers that a load fills, which its warp must wait for.
#[must_use]
pub struct TensorLoad<const N: usize>([u32; N]);

/// The instruction of each width: registers, its repetitions, the number of the address.
macro_rules! moves {
    ($load:ident, $store:ident, $shape:literal, $($doc:literal)*; $($count:literal $times:literal $address:literal [$($i:literal)*];)*) => {
        $(#[doc = $doc])*
        #[inline(always)]
        pub fn $load<const N: usize>(address: u32) -> TensorLoad<N> {
            let mut out = MaybeUninit::<[u32; N]>::uninit();
            // SAFETY: the arm of this width writes every element; the columns are allocated, the
            // lanes the warp's, and kernels call this in warp-uniform control flow.
            unsafe {
                match N {
                    $($count => {
                        let r = &mut *out.as_mut_ptr().cast::<[u32; $count]>();
                        asm!(concat!("tcgen05.ld.sync.aligned.", $shape, ".x", $times, ".b32 {{{0}", $(", {", $i, "}",)* "}}, [{", $address, "}];"),
                            out(reg32) r[0], $(out(reg32) r[$i],)* in(reg32) address, options(nostack));
                    })*
                    _ => super::trap(),
                }
                TensorLoad(out.assume_init())
            }
        }

        #[doc = concat!("Starts storing what [`", stringify!($load), "`] loads.")]
        #[inline(always)]
        pub fn $store<const N: usize>(address: u32, registers: [u32; N]) {
            // SAFETY: as above.
            unsafe {
                match N {
                    $($count => {
                        let r = &*registers.as_ptr().cast::<[u32; $count]>();
                        asm!(concat!("tcgen05.st.sync.aligned.", $shape, ".x", $times, ".b32 [{", $address, "}], {{{0}", $(", {", $i, "}",)* "}};"),
                            in(reg32) r[0], $(in(reg32) r[$i],)* in(reg32) address, options(nostack));
                    })*
                    _ => super::trap(),
                }
            }
        }
    };
}
moves! { tcgen05_ld_32x32b, tcgen05_st_32x32b, "32x32b",
    "Starts loading `N` columns, from a column on, of the warp's 32 lanes: each thread those of its"
    "lane.";
    4 "4" "4"
        [1 2 3];
    8 "8" "8"
        [1 2 3 4 5 6 7];
    16 "16" "16"
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
    32 "32" "32"
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
    64 "64" "64"
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
        33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
        62 63];
}
moves! { tcgen05_ld_16x256b, tcgen05_st_16x256b, "16x256b",
    "Starts loading `2 N` columns of 16 lanes in the layout of `mma` accumulators: register"
    "`4 i + {0, 1}` is lane `thread / 4`, columns `8 i + 2 (thread % 4) + {0, 1}`, and the next two"
    "are the same eight lanes further down.";
    4 "1" "4"
        [1 2 3];
    8 "2" "8"
        [1 2 3 4 5 6 7];
    16 "4" "16"
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
    32 "8" "32"
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
    64 "16" "64"
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
        33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
        62 63];
}

macro_rules! registers {
    ($($count:literal [$($i:literal)*];)*) => {
        impl<const N: usize> TensorLoad<N> {
            /// What was loaded, behind a [`tcgen05_wait_ld`].
            #[inline(always)]
            pub fn registers(mut self) -> [u32; N] {
                // SAFETY: the arm of this width has the array's length. The statement keeps uses of
                // the registers behind the wait.
                unsafe {
                    match N {
                        $($count => {
                            let r = &mut *self.0.as_mut_ptr().cast::<[u32; $count]>();
                            asm!(concat!("// {0}", $(" {", $i, "}",)*), inout(reg32) r[0], $(inout(reg32) r[$i],)* options(nostack));
                        })*
                        _ => super::trap(),
                    }
                }
                self.0
            }
        }
    };
}
registers! {
    4 [1 2 3];
    8 [1 2 3 4 5 6 7];
    16 [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
    32 [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
    64 [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
        33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61
        62 63];
}
