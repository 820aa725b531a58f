//! Warpgroup matrix instructions: 64 rows by N columns, four warps at a time. SM 90a.
//!
//! Accumulators are `[f32; N / 2]` per thread: element `4j + {0, 1}` is row `lane / 4` of the
//! warp's 16, columns `8j + 2 (lane % 4) + {0, 1}`; `4j + {2, 3}` are the same columns eight rows
//! below.

use core::arch::asm;
use core::mem::MaybeUninit;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn commit();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn wait(groups: u64);
    #[link_name = "llvm.nvvm.setmaxnreg.inc.sync.aligned.u32"]
    fn registers_inc(count: u32);
    #[link_name = "llvm.nvvm.setmaxnreg.dec.sync.aligned.u32"]
    fn registers_dec(count: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_sync(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn barrier_arrive(id: u32, threads: u32);
}

/// Orders register writes before the wgmmas that follow.
#[inline(always)]
pub fn wgmma_fence() {
    // SAFETY: kernels call this in warpgroup-uniform control flow.
    unsafe { fence() }
}

/// Closes the group of wgmmas.
#[inline(always)]
pub fn wgmma_commit() {
    // SAFETY: as above.
    unsafe { commit() }
}

/// Waits until at most the `N` newest groups are unfinished.
#[inline(always)]
pub fn wgmma_wait<const N: u64>() {
    // SAFETY: as above.
    unsafe { wait(N) }
}

/// Raises this warpgroup's registers per thread (setmaxnreg); waits until the CTA has them free.
#[inline(always)]
pub fn registers_raise<const COUNT: u32>() {
    // SAFETY: as above.
    unsafe { registers_inc(COUNT) }
}

/// Lowers this warpgroup's registers per thread (setmaxnreg).
#[inline(always)]
pub fn registers_lower<const COUNT: u32>() {
    // SAFETY: as above.
    unsafe { registers_dec(COUNT) }
}

/// Arrives at named barrier `id` and waits until `threads` threads have arrived, the callers
/// included.
#[inline(always)]
pub fn named_barrier_sync(id: u32, threads: u32) {
    // SAFETY: as above.
    unsafe { barrier_sync(id, threads) }
}

/// Arrives at named barrier `id` without waiting.
#[inline(always)]
pub fn named_barrier_arrive(id: u32, threads: u32) {
    // SAFETY: as above.
    unsafe { barrier_arrive(id, threads) }
}

/// One instruction form for every width: accumulator operands have the first numbers, the other
/// operands follow. A product reads 32 bytes of each operand's rows.
macro_rules! wgmma {
    ($ty:literal $depth:literal, $k_major:literal, $mn_major:literal, $order:literal, $fresh:ident, $add:ident, $registers:ident; $($count:literal $n:literal ($a:literal $b:literal $a1:literal $a2:literal $a3:literal $keep:literal) [$($i:literal)*];)*) => {
        /// `a · b`, both K-major in shared memory, given by descriptors.
        #[inline(always)]
        pub fn $fresh<const C: usize>(a: u64, b: u64) -> [f32; C] {
            let mut out = MaybeUninit::<[f32; C]>::uninit();
            // SAFETY: the arm of this width writes every element; kernels call this in
            // warpgroup-uniform control flow.
            unsafe {
                match C {
                    $($count => {
                        let d = &mut *out.as_mut_ptr().cast::<[f32; $count]>();
                        asm!(concat!("wgmma.mma_async.sync.aligned.m64n", $n, $depth, ".f32.", $ty, ".", $ty, " {{{0}", $(", {", $i, "}",)* "}}, {", $a, "}, {", $b, "}, 0, 1, 1", $k_major, ";"),
                            out(reg32) d[0], $(out(reg32) d[$i],)* in(reg64) a, in(reg64) b, options(nostack));
                    })*
                    _ => super::trap(),
                }
                out.assume_init()
            }
        }

        /// `d += a · b`, both K-major in shared memory, given by descriptors.
        #[inline(always)]
        pub fn $add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
            // SAFETY: the arm of this width has the array's length; kernels call this in
            // warpgroup-uniform control flow.
            unsafe {
                match C {
                    $($count => {
                        let d = &mut *d.as_mut_ptr().cast::<[f32; $count]>();
                        asm!(concat!("wgmma.mma_async.sync.aligned.m64n", $n, $depth, ".f32.", $ty, ".", $ty, " {{{0}", $(", {", $i, "}",)* "}}, {", $a, "}, {", $b, "}, 1, 1, 1", $k_major, ";"),
                            inout(reg32) d[0], $(inout(reg32) d[$i],)* in(reg64) a, in(reg64) b, options(nostack));
                    })*
                    _ => super::trap(),
                }
            }
        }

        #[doc = concat!("`d = keep · d + a · b`, `a` in registers, `b` ", $order, " in shared memory; where `keep` is 0, whatever `d` is.")]
        #[inline(always)]
        pub fn $registers<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
            let keep = keep as u32;
            // SAFETY: as above.
            unsafe {
                match C {
                    $($count => {
                        let d = &mut *d.as_mut_ptr().cast::<[f32; $count]>();
                        asm!(concat!("{{ .reg .pred keep; setp.ne.b32 keep, {", $keep, "}, 0; wgmma.mma_async.sync.aligned.m64n", $n, $depth, ".f32.", $ty, ".", $ty, " {{{0}", $(", {", $i, "}",)* "}}, {{{", $a, "}, {", $a1, "}, {", $a2, "}, {", $a3, "}}}, {", $b, "}, keep, 1, 1", $mn_major, "; }}"),
                            inout(reg32) d[0], $(inout(reg32) d[$i],)* in(reg32) a[0], in(reg64) b, in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) keep, options(nostack));
                    })*
                    _ => super::trap(),
                }
            }
        }
    };
}

/// The widths in use: accumulators per thread, N, the numbers of the operands that follow.
macro_rules! widths {
    ($($call:tt)*) => { wgmma! { $($call)*
    16 "32" (16 17 18 19 20 21)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
    32 "64" (32 33 34 35 36 37)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
    36 "72" (36 37 38 39 40 41)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35];
    40 "80" (40 41 42 43 44 45)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39];
    48 "96" (48 49 50 51 52 53)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47];
    64 "128" (64 65 66 67 68 69)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63];
    68 "136" (68 69 70 71 72 73)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67];
    80 "160" (80 81 82 83 84 85)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79];
    88 "176" (88 89 90 91 92 93)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87];
    96 "192" (96 97 98 99 100 101)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95];
    112 "224" (112 113 114 115 116 117)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101
        102 103 104 105 106 107 108 109 110 111];
    128 "256" (128 129 130 131 132 133)
        [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101
        102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126
        127];
    } };
}
// 8-bit operands have to be K-major.
widths!("bf16" "k16", ", 0, 0", ", 1", "MN-major", wgmma_bf16, wgmma_add_bf16, wgmma_registers_bf16;);
widths!("f16" "k16", ", 0, 0", ", 1", "MN-major", wgmma_f16, wgmma_add_f16, wgmma_registers_f16;);
widths!("e4m3" "k32", "", "", "K-major", wgmma_e4m3, wgmma_add_e4m3, wgmma_registers_e4m3;);

macro_rules! wgmma_k_major {
    ($name:ident $ty:literal; [$($i:literal)*]) => {
        /// `d = keep · d + a · b` over 64 columns, `a` in registers, `b` K-major in shared memory;
        /// where `keep` is 0, whatever `d` is.
        #[inline(always)]
        pub fn $name(d: &mut [f32; 32], keep: bool, a: [u32; 4], b: u64) {
            let keep = keep as u32;
            // SAFETY: kernels call this in warpgroup-uniform control flow.
            unsafe {
                asm!(concat!("{{ .reg .pred keep; setp.ne.b32 keep, {37}, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.", $ty, ".", $ty, " {{{0}", $(", {", $i, "}",)* "}}, {{{33}, {34}, {35}, {36}}}, {32}, keep, 1, 1, 0; }}"),
                    inout(reg32) d[0], $(inout(reg32) d[$i],)* in(reg64) b, in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) keep, options(nostack));
            }
        }
    };
}
wgmma_k_major!(wgmma_k_major_bf16 "bf16"; [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]);
wgmma_k_major!(wgmma_k_major_f16 "f16"; [1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]);
