//! The element types a tensor may have, and their way to and from `f32`.

use super::code::{Code, Float8};
use crate::simt;
use bytemuck::{Pod, cast};

#[cfg(not(target_arch = "nvptx64"))]
pub use half::{bf16, f16};

/// IEEE half precision, as bits: the device build needs no arithmetic on it.
#[cfg(target_arch = "nvptx64")]
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct f16(u16);

/// bfloat16, as bits.
#[cfg(target_arch = "nvptx64")]
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct bf16(u16);

#[cfg(target_arch = "nvptx64")]
macro_rules! bits {
    ($t:ident) => {
        impl $t {
            /// From the 16 stored bits.
            pub const fn from_bits(bits: u16) -> Self {
                Self(bits)
            }
            /// The 16 stored bits.
            pub const fn to_bits(self) -> u16 {
                self.0
            }
        }
    };
}
#[cfg(target_arch = "nvptx64")]
bits!(f16);
#[cfg(target_arch = "nvptx64")]
bits!(bf16);

/// float8e4m3fn, as bits: a sign, 4 bits of exponent, 3 of mantissa, no infinity. Of results only.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct e4m3(u8);

/// Names an element type at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
}

/// A type that query, key, value and output may have; kernels compute in `f32`.
pub trait Element: Pod {
    /// The type's run-time name.
    const DTYPE: DType;
    /// Elements in a 16-byte vector.
    const PER_VEC: u32 = 16 / size_of::<Self>() as u32;
    /// Exact.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
    /// Two values of a 16-bit type, rounded, the first in the low half. By the instruction for it
    /// where the target has one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pair(lo: f32, hi: f32) -> u32 {
        let bits = |value| cast::<Self, u16>(Self::from_f32(value)) as u32;
        bits(lo) | bits(hi) << 16
    }
    /// The two values of a word of a 16-bit type, the first in the low half.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(word: u32) -> [f32; 2] {
        [word, word >> 16].map(|word| cast::<u16, Self>(word as u16).to_f32())
    }
}

/// [`MmaElement::headroom`] of bfloat16 and of float16.
const HEADROOM: [u32; 2] = [7, 5];

/// A type the tensor cores multiply, two elements to a 32-bit word, the first in the low half.
pub trait MmaElement: Element {
    /// Lazy-rescale threshold of the online softmax, in powers of two: how far P may exceed 1
    /// before the row maximum is raised, without a loss of precision.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn headroom() -> f32 {
        const BITS: [u32; 2] = [(HEADROOM[0] as f32).to_bits(), (HEADROOM[1] as f32).to_bits()];
        f32::from_bits(Self::constant::<{ BITS[0] }, { BITS[1] }>())
    }
    /// The biased exponent of [`headroom`](Self::headroom) powers of two below 1.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn headroom_exponent() -> u32 {
        Self::constant::<{ 127 - HEADROOM[0] }, { 127 - HEADROOM[1] }>()
    }
    /// A constant of the type: the first for bfloat16, the second for float16. A constant of the
    /// trait would give each type a PTX text of its own.
    fn constant<const BF16: u32, const F16: u32>() -> u32;
    /// Oldest compute capability, times ten, whose tensor cores multiply it.
    const MIN_SM: u32;
    /// Rounds and packs two values.
    fn pack(lo: f32, hi: f32) -> u32;
    /// `d += a · b` for a 16×16 by 16×8 tile, fragments as PTX defines them for `mma.m16n8k16`.
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
    /// `a · b` over 16 columns for a warpgroup, both from shared memory. SM 90a, like the following
    /// functions.
    fn wgmma<const C: usize>(a: u64, b: u64) -> [f32; C];
    /// `d += a · b` over 16 columns for a warpgroup, both from shared memory.
    fn wgmma_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64);
    /// `d = keep · d + a · b` over 16 rows of `b` for a warpgroup, `a` from registers; where `keep`
    /// is false, whatever `d` is.
    fn wgmma_registers<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64);
    /// `d = keep · d + a · b` over 16 columns of 64 rows of `b` for a warpgroup, `a` from
    /// registers; where `keep` is false, whatever `d` is.
    fn wgmma_k_major(d: &mut [f32; 32], keep: bool, a: [u32; 4], b: u64);
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn to_f32(self) -> f32 {
        self
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn to_f32(self) -> f32 {
        simt::f16_to_f32(self.to_bits())
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn from_f32(value: f32) -> Self {
        Self::from_bits(simt::f32_to_f16(value))
    }
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_80"))]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pair(lo: f32, hi: f32) -> u32 {
        simt::f32x2_to_f16x2(lo, hi)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(word: u32) -> [f32; 2] {
        [simt::f16_low_to_f32(word), simt::f16_high_to_f32(word)]
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn to_f32(self) -> f32 {
        simt::bf16_to_f32(self.to_bits())
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn from_f32(value: f32) -> Self {
        Self::from_bits(simt::f32_to_bf16(value))
    }
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_80"))]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pair(lo: f32, hi: f32) -> u32 {
        simt::f32x2_to_bf16x2(lo, hi)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(word: u32) -> [f32; 2] {
        [simt::bf16_low_to_f32(word), simt::bf16_high_to_f32(word)]
    }
}

impl e4m3 {
    /// Rounds to nearest, ties to even; what is greater than 448 becomes 448.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn from_f32(value: f32) -> Self {
        Self(Float8.encode(value) as u8)
    }
}

impl MmaElement for f16 {
    const MIN_SM: u32 = 75;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn constant<const BF16: u32, const F16: u32>() -> u32 {
        simt::constant_of_f16::<BF16, F16>()
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pack(lo: f32, hi: f32) -> u32 {
        simt::f32x2_to_f16x2(lo, hi)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        simt::mma_m16n8k16_f16(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma<const C: usize>(a: u64, b: u64) -> [f32; C] {
        simt::wgmma_f16(a, b)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
        simt::wgmma_add_f16(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma_registers<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
        simt::wgmma_registers_f16(d, keep, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma_k_major(d: &mut [f32; 32], keep: bool, a: [u32; 4], b: u64) {
        simt::wgmma_k_major_f16(d, keep, a, b);
    }
}

impl MmaElement for bf16 {
    const MIN_SM: u32 = 80;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn constant<const BF16: u32, const F16: u32>() -> u32 {
        simt::constant_of_bf16::<BF16, F16>()
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pack(lo: f32, hi: f32) -> u32 {
        simt::f32x2_to_bf16x2(lo, hi)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        simt::mma_m16n8k16_bf16(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma<const C: usize>(a: u64, b: u64) -> [f32; C] {
        simt::wgmma_bf16(a, b)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
        simt::wgmma_add_bf16(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma_registers<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
        simt::wgmma_registers_bf16(d, keep, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wgmma_k_major(d: &mut [f32; 32], keep: bool, a: [u32; 4], b: u64) {
        simt::wgmma_k_major_bf16(d, keep, a, b);
    }
}
