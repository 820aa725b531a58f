//! Tiles of AMX: matrices of 16 rows of 64 bytes in registers, and products of them.
//!
//! rustc's intrinsics for them are not stable, so instructions are written here. `tiles` configures
//! the registers.
//!
//! A product takes 32 entries at a time. Two tile registers hold factors, two hold vectors of rows,
//! and four hold the sums.
//!
//! ```text
//!             by: tmm6, tmm7       16 pairs (of 16 rows each)
//!   factors   tmm4  tmm0, tmm1     16 entries
//!             tmm5  tmm2, tmm3     16 entries
//! ```

use super::key_range::Attend;
use super::lanes::Lanes;
use super::pairs::{InPairs, Mode, TOGETHER};
use super::panels::many;
use super::tiles::{Multiply, Registers, Shapes, Tiles};
use bytemuck::Zeroable;
use pulp::f32x16;
use pulp::x86::V4;
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// This processor has AMX for bfloat16 with AVX-512 and its conversions, and the system lets this
/// process use it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amx {
    pub(super) vectors: V4,
}

impl Amx {
    /// Where that is so.
    pub(super) fn try_new() -> Option<Self> {
        static ALLOWED: OnceLock<bool> = OnceLock::new();
        let vectors = V4::try_new().filter(|_| is_x86_feature_detected!("avx512bf16"))?;
        let allowed = ALLOWED.get_or_init(|| has_tiles() && is_permitted());
        allowed.then_some(Self { vectors })
    }
}

/// Whether the processor has AMX for bfloat16, and the system saves its state.
fn has_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    /// Of tiles' shapes, and of their contents.
    const STATE: u64 = 1 << 17 | 1 << 18;
    /// Whether the system has enabled `xgetbv`.
    const OSXSAVE: u32 = 1 << 27;
    const FEATURES: u32 = 7;
    if __get_cpuid_max(0).0 < FEATURES || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let features = __cpuid_count(FEATURES, 0).edx;
    // SAFETY: the system has switched it on
    let saved = unsafe { _xgetbv(0) };
    features & AMX_BF16 != 0 && features & AMX_TILE != 0 && saved & STATE == STATE
}

/// Asks the system to let this process use AMX tiles; whether it does.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    /// The `arch_prctl` request for a part of the processor's state.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two integers, and refuses an unknown request
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Attention of rows over a range of keys, with products of bfloat16 pairs.
pub(super) fn attend(amx: Amx, attend: Attend<'_>) {
    // SAFETY: an `Amx` exists only where the processor has these features
    unsafe { with_features(amx, attend) }
}

/// The features of `V4`, and conversions to bfloat16.
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
fn with_features(amx: Amx, attend: Attend<'_>) {
    let tiles = Tiles::new(amx);
    let products = InPairs { scale: attend.rows.scale(), pairs: &tiles };
    many::<V4, _, 2>(amx.vectors, products, attend);
}

impl Registers for Amx {
    #[inline(always)]
    fn shapes(self) -> Shapes {
        let mut shapes = Shapes([0; 64]);
        // SAFETY: there is an `Amx`, so the processor has the instruction; it writes 64 bytes
        unsafe {
            asm!("sttilecfg [{}]", in(reg) &raw mut shapes, options(nostack, preserves_flags));
        }
        shapes
    }

    #[inline(always)]
    fn configure(self, shapes: &Shapes) {
        // SAFETY: there is an `Amx`, so the processor has the instruction and the process may use
        // it; it reads 64 bytes
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const *shapes, options(nostack, preserves_flags));
        }
    }

    #[inline(always)]
    fn release(self) {
        // SAFETY: there is an `Amx`
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Rows in two vectors of 16.
type Two = Lanes<V4, 2>;

/// Entries that are multiplied by in a tile.
const PAIRS: usize = TOGETHER / 2;

impl Multiply<V4, 2> for Amx {
    #[inline(always)]
    fn pair(self, _: V4, first: f32x16, second: f32x16) -> f32x16 {
        bytemuck::cast(bf16_pairs(bytemuck::cast(first), bytemuck::cast(second)))
    }

    #[inline(always)]
    unsafe fn multiply(
        self,
        _: V4,
        factors: &[u32],
        stride: usize,
        by: &[Two],
        mode: Mode,
        to: &mut [Two],
    ) {
        let (blocks, rest) = to.as_chunks_mut::<TOGETHER>();
        let (by, left) = by.as_chunks::<PAIRS>();
        assert!(rest.is_empty() && left.is_empty(), "whole tiles");
        if by.is_empty() && mode == Mode::Set {
            blocks.as_flattened_mut().fill(Zeroable::zeroed());
        }
        for (i, to) in blocks.iter_mut().enumerate() {
            let factors = &factors[i * TOGETHER * stride..];
            let read = (TOGETHER - 1) * stride + by.len() * PAIRS;
            assert!(read <= factors.len(), "factors of {TOGETHER} entries");
            // SAFETY: the assertion bounds the factors that are read; tiles have their shapes
            unsafe { multiply(factors.as_ptr(), stride, by, mode, to) };
        }
    }
}

/// Rounds two vectors to bfloat16; the first goes to the low half of each lane.
#[inline(always)]
pub(super) fn bf16_pairs(first: __m512, second: __m512) -> __m512 {
    // SAFETY: only `with_bf16` calls this, where the processor has the instructions
    unsafe {
        let side_by_side: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(second, first));
        let order = _mm512_setr_epi32(
            at(0),
            at(1),
            at(2),
            at(3),
            at(4),
            at(5),
            at(6),
            at(7),
            at(8),
            at(9),
            at(10),
            at(11),
            at(12),
            at(13),
            at(14),
            at(15),
        );
        _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, side_by_side))
    }
}

/// The lane permutation that interleaves two vectors, one stored after the other.
const fn at(lane: i32) -> i32 {
    lane | (lane + 16) << 16
}

/// [`Multiply::multiply`] of 32 entries.
///
/// # Safety
///
/// The thread's registers have [`Shapes::PRODUCT`]. `factors` has 32 rows, `stride` elements apart,
/// each as long as `by`.
#[inline(always)]
unsafe fn multiply(
    factors: *const u32,
    stride: usize,
    by: &[[Two; PAIRS]],
    mode: Mode,
    to: &mut [Two; TOGETHER],
) {
    if by.is_empty() {
        return;
    }
    let to = to.as_mut_ptr();
    // SAFETY: the loop touches 32 entries of two vectors; the caller guarantees the rest
    unsafe {
        asm!(
            "test {add:e}, {add:e}",
            "jz 2f",
            "tileloadd tmm0, [{to} + {row}*1]",
            "tileloadd tmm1, [{to} + {row}*1 + 64]",
            "tileloadd tmm2, [{lower_to} + {row}*1]",
            "tileloadd tmm3, [{lower_to} + {row}*1 + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "tileloadd tmm6, [{by} + {row}*1]",
            "tileloadd tmm4, [{upper} + {stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{by} + {row}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower} + {stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {by}, {tile}",
            "add {upper}, 64",
            "add {lower}, 64",
            "dec {count}",
            "jnz 3b",
            "tilestored [{to} + {row}*1], tmm0",
            "tilestored [{to} + {row}*1 + 64], tmm1",
            "tilestored [{lower_to} + {row}*1], tmm2",
            "tilestored [{lower_to} + {row}*1 + 64], tmm3",
            add = in(reg) u32::from(mode == Mode::Add),
            to = in(reg) to,
            lower_to = in(reg) to.wrapping_add(TOGETHER / 2),
            row = in(reg) size_of::<Two>(),
            by = inout(reg) by.as_ptr() => _,
            tile = const size_of::<[Two; PAIRS]>(),
            upper = inout(reg) factors => _,
            lower = inout(reg) factors.wrapping_add(TOGETHER / 2 * stride) => _,
            stride = in(reg) stride * size_of::<u32>(),
            count = inout(reg) by.len() => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
