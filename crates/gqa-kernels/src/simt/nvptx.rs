//! The GPU implementation: LLVM intrinsics for all collective operations, PTX for the rest.
//!
//! LLVM does not treat `asm!` as convergent: it may copy a barrier in `asm!` into both arms of a
//! divergent branch. Barriers, shuffles and votes are therefore intrinsics. The matrix instructions
//! have to be `asm!` and belong in uniform control flow.
//!
//! What depends on the 16-bit type is one statement of `asm!` that names it, the same for both but
//! for that name. Statements that PTX lacks (`cvt.f32.bf16.low`) `gqa_ptx` replaces, which then
//! makes the text for f16 of that for bf16.

use bytemuck::Pod;
use core::arch::{asm, global_asm, nvptx};
use core::mem::{transmute, transmute_copy};

mod cluster;
mod communicate;
mod mbarrier;
mod tensor_memory;
mod tma;
mod warpgroup;
pub use cluster::*;
pub use communicate::*;
pub use mbarrier::*;
pub use tensor_memory::*;
pub use tma::*;
pub use warpgroup::*;

// Aligned for TMA's widest swizzle.
global_asm!(".extern .shared .align 1024 .b8 dyn_smem[];");

const FULL_WARP: u32 = u32::MAX;
/// `c` operand of `shfl.sync`: segments of 32 lanes.
const WHOLE_WARP_SEGMENT: u32 = 31;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn barrier_all(id: u32);
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.shfl.sync.bfly.f32"]
    fn shfl_bfly_f32(mask: u32, value: f32, lane_mask: u32, segment: u32) -> f32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_bfly_u32(mask: u32, value: u32, lane_mask: u32, segment: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.f32"]
    fn shfl_from_f32(mask: u32, value: f32, lane: u32, segment: u32) -> f32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_from_u32(mask: u32, value: u32, lane: u32, segment: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any(mask: u32, vote: bool) -> bool;
}

macro_rules! special_registers {
    ($($(#[$doc:meta])* $name:ident = $register:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: reading a special register has no precondition.
            unsafe { nvptx::$register() }
        }
    )*};
}
special_registers! {
    /// Thread within the CTA.
    thread_idx = _thread_idx_x;
    /// Threads of a CTA.
    block_dim = _block_dim_x;
    /// CTA within the grid, x.
    block_idx_x = _block_idx_x;
    /// CTA within the grid, y.
    block_idx_y = _block_idx_y;
    /// CTA within the grid, z.
    block_idx_z = _block_idx_z;
    /// CTAs of the grid, x.
    grid_dim_x = _grid_dim_x;
    /// CTAs of the grid, y.
    grid_dim_y = _grid_dim_y;
    /// CTAs of the grid, z.
    grid_dim_z = _grid_dim_z;
}

/// Lane: thread within the warp.
#[inline(always)]
pub fn lane() -> u32 {
    thread_idx() % 32
}

/// Warp within the CTA.
#[inline(always)]
pub fn warp() -> u32 {
    thread_idx() / 32
}

/// CTA barrier: waits for all threads of the CTA and orders their memory accesses.
#[inline(always)]
pub fn sync_threads() {
    // SAFETY: barrier 0 with every thread; kernels call this in uniform control flow.
    unsafe { barrier_all(0) }
}

/// Waits for all lanes of the warp and orders their memory accesses.
#[inline(always)]
pub fn sync_warp() {
    // SAFETY: the mask names all lanes; kernels call this in warp-uniform control flow.
    unsafe { warp_sync(FULL_WARP) }
}

/// `v` of lane `lane() ^ mask`.
#[inline(always)]
pub fn shfl_xor_f32(v: f32, mask: u32) -> f32 {
    // SAFETY: the mask names all lanes; kernels call this in warp-uniform control flow.
    unsafe { shfl_bfly_f32(FULL_WARP, v, mask, WHOLE_WARP_SEGMENT) }
}

/// `v` of lane `lane() ^ mask`.
#[inline(always)]
pub fn shfl_xor_u32(v: u32, mask: u32) -> u32 {
    // SAFETY: as above.
    unsafe { shfl_bfly_u32(FULL_WARP, v, mask, WHOLE_WARP_SEGMENT) }
}

/// `v` of lane `lane`.
#[inline(always)]
pub fn shfl_idx_f32(v: f32, lane: u32) -> f32 {
    // SAFETY: as above.
    unsafe { shfl_from_f32(FULL_WARP, v, lane, WHOLE_WARP_SEGMENT) }
}

/// `v` of lane `lane`.
#[inline(always)]
pub fn shfl_idx_u32(v: u32, lane: u32) -> u32 {
    // SAFETY: as above.
    unsafe { shfl_from_u32(FULL_WARP, v, lane, WHOLE_WARP_SEGMENT) }
}

/// Whether any lane of the warp votes true.
#[inline(always)]
pub fn any_sync(vote: bool) -> bool {
    // SAFETY: as above.
    unsafe { vote_any(FULL_WARP, vote) }
}

/// Byte address in the shared window at which the CTA's dynamic shared memory starts.
#[inline(always)]
pub fn shared_base() -> u32 {
    let address: u32;
    // SAFETY: takes an address, touches no memory.
    unsafe { asm!("mov.u32 {}, dyn_smem;", out(reg32) address, options(pure, nomem, nostack)) };
    address
}

/// A kernel's pointer parameter; indices and offsets count elements.
#[repr(transparent)]
pub struct Global<T>(*mut T);

impl<T> Clone for Global<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Global<T> {}

/// Four words that LLVM moves as one vector. With a struct, a load whose value is only stored again
/// would become a memcpy of smaller accesses.
#[derive(Clone, Copy)]
#[repr(simd)]
struct Vec4([u32; 4]);

/// Two words that LLVM moves as one vector.
#[derive(Clone, Copy)]
#[repr(simd)]
struct Vec2([u32; 2]);

// A launch binds every pointer to memory as large as the kernel's indices reach: the planner checks
// that and the simulator enforces it. The accesses below rely on it.
impl<T: Pod> Global<T> {
    /// Null, for a parameter that a kernel does not have.
    #[inline(always)]
    pub const fn null() -> Self {
        Self(core::ptr::null_mut())
    }

    /// Whether the launch bound no memory.
    #[inline(always)]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address `elements` further on.
    #[inline(always)]
    pub fn offset(self, elements: usize) -> Self {
        Self(self.0.wrapping_add(elements))
    }

    /// Element `i`.
    #[inline(always)]
    pub fn load(self, i: usize) -> T {
        // SAFETY: the access stays within the memory that the launch bound.
        unsafe { self.offset(i).0.read() }
    }

    /// Writes element `i`.
    #[inline(always)]
    pub fn store(self, i: usize, value: T) {
        // SAFETY: the access stays within the memory that the launch bound.
        unsafe { self.offset(i).0.write(value) }
    }

    /// The 16 bytes that start at element `i`, which must be aligned to 16 bytes.
    #[inline(always)]
    pub fn load_vec(self, i: usize) -> [u32; 4] {
        // SAFETY: within the memory that the launch bound; the caller guarantees the alignment.
        unsafe { transmute(self.offset(i).0.cast::<Vec4>().read()) }
    }

    /// Writes the 16 bytes that start at element `i`, which must be aligned to 16 bytes.
    #[inline(always)]
    pub fn store_vec(self, i: usize, value: [u32; 4]) {
        // SAFETY: within the memory that the launch bound; the caller guarantees the alignment.
        unsafe { self.offset(i).0.cast::<Vec4>().write(Vec4(value)) }
    }

    /// The 4 bytes that start at element `i`, which must be aligned to 4 bytes.
    #[inline(always)]
    pub fn load_word(self, i: usize) -> u32 {
        // SAFETY: within the memory that the launch bound; the caller guarantees the alignment.
        unsafe { self.offset(i).0.cast::<u32>().read() }
    }

    /// Writes the 4 bytes that start at element `i`, which must be aligned to 4 bytes.
    #[inline(always)]
    pub fn store_word(self, i: usize, value: u32) {
        // SAFETY: within the memory that the launch bound; the caller guarantees the alignment.
        unsafe { self.offset(i).0.cast::<u32>().write(value) }
    }

    /// The 8 bytes that start at element `i`, which must be aligned to 8 bytes.
    #[inline(always)]
    pub fn load_vec8(self, i: usize) -> [u32; 2] {
        // SAFETY: within the memory that the launch bound; the caller guarantees the alignment.
        unsafe { transmute(self.offset(i).0.cast::<Vec2>().read()) }
    }

    /// Writes the 8 bytes that start at element `i`, which must be aligned to 8 bytes.
    #[inline(always)]
    pub fn store_vec8(self, i: usize, value: [u32; 2]) {
        // SAFETY: within the memory that the launch bound; the caller guarantees the alignment.
        unsafe { self.offset(i).0.cast::<Vec2>().write(Vec2(value)) }
    }
}

/// Loads a value of 1, 2, 4 or 8 bytes, aligned to its size.
#[inline(always)]
pub fn ld_shared<T: Pod>(address: u32) -> T {
    const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8)) };
    // SAFETY: the address lies in the CTA's shared memory, where no Rust object lives; each arm
    // reads as many bits as T has, and every bit pattern is a valid T.
    unsafe {
        match size_of::<T>() {
            1 => {
                let v: u16;
                asm!("ld.shared.u8 {}, [{}];", out(reg16) v, in(reg32) address, options(pure, readonly, nostack));
                transmute_copy(&v)
            }
            2 => {
                let v: u16;
                asm!("ld.shared.b16 {}, [{}];", out(reg16) v, in(reg32) address, options(pure, readonly, nostack));
                transmute_copy(&v)
            }
            4 => {
                let v: u32;
                asm!("ld.shared.b32 {}, [{}];", out(reg32) v, in(reg32) address, options(pure, readonly, nostack));
                transmute_copy(&v)
            }
            _ => {
                let v: u64;
                asm!("ld.shared.b64 {}, [{}];", out(reg64) v, in(reg32) address, options(pure, readonly, nostack));
                transmute_copy(&v)
            }
        }
    }
}

/// Stores a value of 1, 2, 4 or 8 bytes, aligned to its size.
#[inline(always)]
pub fn st_shared<T: Pod>(address: u32, value: T) {
    const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8)) };
    // SAFETY: the address lies in the CTA's shared memory, where no Rust object lives; each arm
    // reads as many bits of the value as it has.
    unsafe {
        match size_of::<T>() {
            1 => {
                let v = transmute_copy::<T, u8>(&value) as u16;
                asm!("st.shared.u8 [{}], {};", in(reg32) address, in(reg16) v, options(nostack));
            }
            2 => {
                asm!("st.shared.b16 [{}], {};", in(reg32) address, in(reg16) transmute_copy::<T, u16>(&value), options(nostack))
            }
            4 => {
                asm!("st.shared.b32 [{}], {};", in(reg32) address, in(reg32) transmute_copy::<T, u32>(&value), options(nostack))
            }
            _ => {
                asm!("st.shared.b64 [{}], {};", in(reg32) address, in(reg64) transmute_copy::<T, u64>(&value), options(nostack))
            }
        }
    }
}

/// Loads 16 bytes, aligned to 16 bytes.
#[inline(always)]
pub fn ld_shared_vec(address: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the address lies in the CTA's shared memory.
    unsafe {
        asm!("ld.shared.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address, options(pure, readonly, nostack));
    }
    [a, b, c, d]
}

/// Stores 16 bytes, aligned to 16 bytes.
#[inline(always)]
pub fn st_shared_vec(address: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the address lies in the CTA's shared memory.
    unsafe {
        asm!("st.shared.v4.b32 [{}], {{{}, {}, {}, {}}};",
            in(reg32) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
    }
}

/// Copies the 16 bytes from element `i` of `source` to shared memory; if not `valid`, writes zeros
/// and reads nothing. Before SM 80 there is no cp.async: this copy is synchronous.
#[cfg(not(target_feature = "sm_80"))]
#[inline(always)]
pub fn cp_async_16<T: Pod>(destination: u32, source: Global<T>, i: usize, valid: bool) {
    st_shared_vec(destination, if valid { source.load_vec(i) } else { [0; 4] });
}

/// cp.async: starts copying the 16 bytes from element `i` of `source` to shared memory; if not
/// `valid`, it writes zeros and reads nothing.
#[cfg(target_feature = "sm_80")]
#[inline(always)]
pub fn cp_async_16<T: Pod>(destination: u32, source: Global<T>, i: usize, valid: bool) {
    let bytes = if valid { 16u32 } else { 0 };
    // SAFETY: both addresses belong to the CTA; with 0 source bytes the source is not read.
    unsafe {
        asm!("cp.async.cg.shared.global [{}], [{}], 16, {};",
            in(reg32) destination, in(reg64) source.offset(i).0, in(reg32) bytes, options(nostack));
    }
}

/// Closes this thread's group of copies.
#[inline(always)]
pub fn cp_async_commit() {
    // SAFETY: no precondition.
    #[cfg(target_feature = "sm_80")]
    unsafe {
        asm!("cp.async.commit_group;", options(nostack))
    }
}

/// Waits until at most the `N` newest groups of this thread are unfinished. Other threads also need
/// a barrier to see the copies.
#[inline(always)]
pub fn cp_async_wait<const N: u32>() {
    // SAFETY: no precondition.
    #[cfg(target_feature = "sm_80")]
    unsafe {
        asm!("cp.async.wait_group {};", const N, options(nostack))
    }
}

macro_rules! ldmatrix {
    ($($(#[$doc:meta])* $name:ident = $words:literal $shape:literal [$($out:ident),*] $outs:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(address: u32) -> [u32; $words] {
            $(let $out;)*
            // SAFETY: the rows lie in the CTA's shared memory; all lanes take part.
            unsafe {
                asm!(concat!("ldmatrix.sync.aligned.m8n8.", $shape, ".shared.b16 {{", $outs, "}}, [{}];"),
                    $(out(reg32) $out,)* in(reg32) address, options(readonly, nostack));
            }
            [$($out),*]
        }
    )*};
}
ldmatrix! {
    /// Four 8×8 matrices of 16-bit elements; lane `8m + r` gives the address of row `r` of matrix
    /// `m`. SM 75.
    ldmatrix_x4 = 4 "x4" [a, b, c, d] "{}, {}, {}, {}";
    /// As [`ldmatrix_x4`], each matrix transposed.
    ldmatrix_x4_trans = 4 "x4.trans" [a, b, c, d] "{}, {}, {}, {}";
    /// Two 8×8 matrices of 16-bit elements; lane `8m + r < 16` gives the address of row `r` of
    /// matrix `m`. SM 75.
    ldmatrix_x2 = 2 "x2" [a, b] "{}, {}";
    /// As [`ldmatrix_x2`], each matrix transposed.
    ldmatrix_x2_trans = 2 "x2.trans" [a, b] "{}, {}";
}

/// Transposes an 8×8 matrix of 16-bit elements, of which a lane has two neighbours of row
/// `lane / 4` before and after. SM 75.
#[inline(always)]
pub fn movmatrix_trans(matrix: u32) -> u32 {
    let transposed;
    // SAFETY: registers only; all lanes take part.
    unsafe {
        asm!("movmatrix.sync.aligned.m8n8.trans.b16 {}, {};",
            out(reg32) transposed, in(reg32) matrix, options(nomem, nostack));
    }
    transposed
}

macro_rules! mma {
    ($($(#[$doc:meta])* $name:ident = $shape:literal $ty:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: registers only; all lanes take part.
            unsafe {
                asm!(concat!("mma.sync.aligned.", $shape, ".row.col.f32.", $ty, ".", $ty, ".f32 ",
                        "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};"),
                    inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
                    options(nomem, nostack));
            }
        }
    )*};
}
mma! {
    /// `d += a · b` for a 16×16 and a 16×8 tile of f16, fragments as PTX defines them.
    #[cfg(target_feature = "sm_80")]
    mma_m16n8k16_f16 = "m16n8k16" "f16";
    /// `d += a · b` for a 16×16 and a 16×8 tile of bf16, fragments as PTX defines them. SM 80.
    mma_m16n8k16_bf16 = "m16n8k16" "bf16";
    /// `d += a · b` for a 16×8 and an 8×8 tile of float32, read as TF32: the lower 13 bits of
    /// the significand are ignored; fragments as PTX defines them. SM 80.
    mma_m16n8k8_tf32 = "m16n8k8" "tf32";
}

/// `d += a · b` for a 16×16 and a 16×8 tile of f16, fragments as PTX defines them: two products of
/// half the depth, because SM 75 has no deeper one.
#[cfg(not(target_feature = "sm_80"))]
#[inline(always)]
pub fn mma_m16n8k16_f16(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    for half in 0..2 {
        // SAFETY: registers only; all lanes take part.
        unsafe {
            asm!(concat!("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 ",
                    "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}}}, {{{6}}}, {{{0}, {1}, {2}, {3}}};"),
                inout(reg32) d[0], inout(reg32) d[1], inout(reg32) d[2], inout(reg32) d[3],
                in(reg32) a[2 * half], in(reg32) a[2 * half + 1], in(reg32) b[half], options(nomem, nostack));
        }
    }
}

macro_rules! of_type {
    ($($(#[$doc:meta])* $name:ident = $ty:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<const BF16: u32, const F16: u32>() -> u32 {
            let constant: u32;
            // SAFETY: registers only.
            unsafe {
                asm!(
                    concat!("mov.b32.", $ty, " {}, {}, {};"),
                    out(reg32) constant, const BF16, const F16,
                    options(pure, nomem, nostack),
                )
            };
            constant
        }
    )*};
}
of_type! {
    /// `BF16`, hidden from the optimiser, so that kernels for both types have one text.
    constant_of_bf16 = "bf16";
    /// `F16`, hidden likewise.
    constant_of_f16 = "f16";
}

macro_rules! arithmetic {
    ($($(#[$doc:meta])* $name:ident($($x:ident: $class:ident $ty:ty),*) -> $out_class:ident $out:ty = $template:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name($($x: $ty),*) -> $out {
            let result: $out;
            // SAFETY: registers only.
            unsafe { asm!($template, out($out_class) result, $(in($class) $x,)* options(pure, nomem, nostack)) };
            result
        }
    )*};
}
arithmetic! {
    /// 2 to the power `x`, within 2 ulp; flushes subnormals to zero.
    exp2(x: reg32 f32) -> reg32 f32 = "ex2.approx.ftz.f32 {}, {};";
    /// Logarithm to base 2; flushes subnormals to zero.
    log2(x: reg32 f32) -> reg32 f32 = "lg2.approx.ftz.f32 {}, {};";
    /// `1 / x`, within 1 ulp; flushes subnormals to zero.
    rcp(x: reg32 f32) -> reg32 f32 = "rcp.approx.ftz.f32 {}, {};";
    /// `1 / √x`, within 2 ulp; flushes subnormals to zero.
    rsqrt(x: reg32 f32) -> reg32 f32 = "rsqrt.approx.ftz.f32 {}, {};";
    /// `a·b + c`, rounded once; flushes subnormals to zero.
    fma(a: reg32 f32, b: reg32 f32, c: reg32 f32) -> reg32 f32 = "fma.rn.ftz.f32 {}, {}, {}, {};";
    /// The larger value; of a NaN and a number, the number.
    max(a: reg32 f32, b: reg32 f32) -> reg32 f32 = "max.f32 {}, {}, {};";
    /// Exact conversion.
    f16_to_f32(bits: reg16 u16) -> reg32 f32 = "cvt.f32.f16 {}, {};";
    /// Exact conversion of the lower f16 of a pair.
    f16_low_to_f32(pair: reg32 u32) -> reg32 f32 = "cvt.f32.f16.low {}, {};";
    /// Exact conversion of the upper f16 of a pair.
    f16_high_to_f32(pair: reg32 u32) -> reg32 f32 = "cvt.f32.f16.high {}, {};";
    /// Rounds to nearest, ties to even; overflow becomes infinite.
    f32_to_f16(value: reg32 f32) -> reg16 u16 = "cvt.rn.f16.f32 {}, {};";
    /// Exact conversion.
    bf16_to_f32(bits: reg16 u16) -> reg32 f32 = "cvt.f32.bf16 {}, {};";
    /// Exact conversion of the lower bf16 of a pair.
    bf16_low_to_f32(pair: reg32 u32) -> reg32 f32 = "cvt.f32.bf16.low {}, {};";
    /// Exact conversion of the upper bf16 of a pair.
    bf16_high_to_f32(pair: reg32 u32) -> reg32 f32 = "cvt.f32.bf16.high {}, {};";
    /// Rounds to nearest, ties to even.
    f32_to_bf16(value: reg32 f32) -> reg16 u16 = "cvt.rn.bf16.f32 {}, {};";
    /// Differences of packed f16 pairs. SM 80.
    sub_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "sub.rn.f16x2 {}, {}, {};";
    /// Products of packed f16 pairs. SM 80.
    mul_f16x2(a: reg32 u32, b: reg32 u32) -> reg32 u32 = "mul.rn.f16x2 {}, {}, {};";
    /// `a·b + c` of packed f16 pairs, rounded once. SM 80.
    fma_f16x2(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> reg32 u32 = "fma.rn.f16x2 {}, {}, {}, {};";
    /// Selects four of the eight bytes of `a` (the lower four) and `b`: each of the selector's four
    /// lower nibbles names a byte; a nibble with its upper bit set replicates that byte's sign.
    prmt(a: reg32 u32, b: reg32 u32, selector: reg32 u32) -> reg32 u32 = "prmt.b32 {}, {}, {}, {};";
    /// The lower bits of `a·b + c`, in the pipe of multiplications if `b` is a multiple of
    /// [`hidden_one`].
    multiply_add(a: reg32 u32, b: reg32 u32, c: reg32 u32) -> reg32 u32 = "mad.lo.u32 {}, {}, {}, {};";
    /// The bits of `a` where the mask has ones, and those of `b` elsewhere. LLVM would make other
    /// instructions of it where a mask follows.
    select_bits(mask: reg32 u32, a: reg32 u32, b: reg32 u32) -> reg32 u32 = "lop3.b32 {}, {}, {}, {}, 0xca;";
    /// Converts two e4m3 values to f16, the first in the low half. Exact. SM 89.
    e4m3x2_to_f16x2(x: reg16 u16) -> reg32 u32 = "cvt.rn.f16x2.e4m3x2 {}, {};";
}

/// Rounds two values to f16, the first into the low half.
#[cfg(not(target_feature = "sm_80"))]
#[inline(always)]
pub fn f32x2_to_f16x2(lo: f32, hi: f32) -> u32 {
    u32::from(f32_to_f16(lo)) | u32::from(f32_to_f16(hi)) << 16
}

/// Rounds two values to f16, the first into the low half.
#[cfg(target_feature = "sm_80")]
#[inline(always)]
pub fn f32x2_to_f16x2(lo: f32, hi: f32) -> u32 {
    let packed;
    // SAFETY: registers only.
    unsafe {
        asm!("cvt.rn.f16x2.f32 {}, {}, {};", out(reg32) packed, in(reg32) hi, in(reg32) lo, options(pure, nomem, nostack))
    };
    packed
}

/// Rounds two values to bf16, the first into the low half. SM 80.
#[inline(always)]
pub fn f32x2_to_bf16x2(lo: f32, hi: f32) -> u32 {
    let packed;
    // SAFETY: registers only.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {}, {}, {};", out(reg32) packed, in(reg32) hi, in(reg32) lo, options(pure, nomem, nostack))
    };
    packed
}

/// Rounds two values to e4m3, the first into the low byte; values greater than 448 become 448. SM
/// 89.
#[inline(always)]
pub fn f32x2_to_e4m3x2(lo: f32, hi: f32) -> u16 {
    let packed;
    // SAFETY: registers only.
    unsafe {
        asm!("cvt.rn.satfinite.e4m3x2.f32 {}, {}, {};", out(reg16) packed, in(reg32) hi, in(reg32) lo, options(pure, nomem, nostack))
    };
    packed
}

/// Rounds four values to e4m3, the first into the lowest byte; values greater than 448 become 448.
/// SM 89.
#[inline(always)]
pub fn f32x4_to_e4m3x4(x: [f32; 4]) -> u32 {
    let packed;
    // SAFETY: registers only.
    unsafe {
        asm!("{{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {2}, {1}; cvt.rn.satfinite.e4m3x2.f32 high, {4}, {3}; mov.b32 {0}, {{low, high}}; }}",
            out(reg32) packed, in(reg32) x[0], in(reg32) x[1], in(reg32) x[2], in(reg32) x[3], options(pure, nomem, nostack))
    };
    packed
}

/// Maxima of packed pairs of u16. SM 90.
#[inline(always)]
pub fn max_u16x2(a: u32, b: u32) -> u32 {
    let greater;
    // SAFETY: registers only.
    unsafe {
        asm!("max.u16x2 {}, {}, {};", out(reg32) greater, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    };
    greater
}

/// The same value, hidden from the optimiser: it recomputes values derived from the result instead
/// of keeping them in registers.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same;
    // SAFETY: registers only.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) value, options(nomem, nostack)) };
    same
}

/// 1, which neither the optimiser nor the assembler knows: a product with it stays one.
#[inline(always)]
pub fn hidden_one() -> u32 {
    let mask: u32;
    // SAFETY: registers only.
    unsafe { asm!("mov.u32 {}, %lanemask_eq;", out(reg32) mask, options(pure, nomem, nostack)) };
    mask.count_ones()
}

/// Ends the kernel with an error.
#[inline(always)]
pub fn trap() -> ! {
    // SAFETY: does not return.
    unsafe { asm!("trap;", options(noreturn)) }
}
