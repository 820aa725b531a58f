//! Operand types of the tensor cores: elements; float16, to which quantized values are converted;
//! e4m3 where both caches hold it; or e4m3 keys with values converted to float16.
//!
//! In an e4m3 accumulator a thread holds two neighbouring scores of every eight keys; as an A
//! operand it must hold four neighbouring P of every sixteen. Instead of a shuffle between threads,
//! the keys of Vᵀ are permuted: [`key_of_column`] gives the key, of 32, in each column of Vᵀ.

use crate::num::{Float8, MmaElement, f16};
use crate::simt::{
    e4m3x2_to_f16x2, f32x4_to_e4m3x4, wgmma_add_e4m3, wgmma_e4m3, wgmma_registers_e4m3,
};

/// A type of operands. V has the layout of the cache for two-byte operands. For one-byte operands
/// it is transposed, one row per column of the head, because wgmma takes no transposed 8-bit
/// operand.
pub(super) trait Operand {
    /// Type of the packed P that `lower` and `weigh_again` unpack; unused for e4m3.
    type Element: MmaElement;
    /// How many powers of two a row maximum lies above the row's greatest score when it is set:
    /// that score's P is 2^-`headroom`.
    fn headroom() -> f32;
    /// The lazy-rescale threshold: greatest exponent of P that causes no rescale.
    const LIMIT: f32;
    /// Number of values that a query element is a sum of. A row of a Q tile holds the first
    /// summands of all columns, then the second ones (`queries.rs`).
    const QUERY_PARTS: u32 = 1;
    /// Whether keys are e4m3 and multiplied as they arrive; query elements are sums then.
    const KEEPS_KEYS: bool = Self::QUERY_PARTS > 1;
    /// `a · b` over 32 bytes of rows, both from shared memory.
    fn multiply<const C: usize>(a: u64, b: u64) -> [f32; C];
    /// `d += a · b`, both from shared memory.
    fn multiply_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64);
    /// `d += a · b` over 32 bytes of 16 and of 8 rows, from registers, by one warp alone.
    fn multiply_rows(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
    /// `d = keep · d + a · b`, `a` from registers; without `keep`, `d` may hold anything.
    fn multiply_weights<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64);
    /// Packs P as the A operand of the next product.
    fn pack_weights<const C: usize, const W: usize>(s: &[f32; C]) -> [u32; W];
}

/// 16-bit operands: the accumulator and A operand layouts agree.
impl<T: MmaElement> Operand for T {
    type Element = T;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn headroom() -> f32 {
        <T as MmaElement>::headroom()
    }
    /// P of 2 and more has the top exponent bit set in both types.
    const LIMIT: f32 = 1.0;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply<const C: usize>(a: u64, b: u64) -> [f32; C] {
        T::wgmma(a, b)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
        T::wgmma_add(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_rows(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        T::mma(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_weights<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
        T::wgmma_registers(d, keep, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pack_weights<const C: usize, const W: usize>(s: &[f32; C]) -> [u32; W] {
        let mut weights = [0; W];
        let mut i = 0;
        while i < W {
            weights[i] = T::pack(s[2 * i], s[2 * i + 1]);
            i += 1;
        }
        weights
    }
}

impl Operand for Float8 {
    type Element = f16;
    /// P up to 256; the greatest e4m3 is 448.
    const LIMIT: f32 = 8.0;
    /// The greatest P is 2^6: e4m3 becomes subnormal, and so coarse, below 1/64.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn headroom() -> f32 {
        -6.0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply<const C: usize>(a: u64, b: u64) -> [f32; C] {
        wgmma_e4m3(a, b)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
        wgmma_add_e4m3(d, a, b);
    }
    /// Multiplies as float16: the lower two of each four values, then the upper two.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_rows(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        let lower = |four: u32| e4m3x2_to_f16x2(four as u16);
        f16::mma(d, a.map(lower), b.map(lower));
        let upper = |four: u32| e4m3x2_to_f16x2((four >> 16) as u16);
        f16::mma(d, a.map(upper), b.map(upper));
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_weights<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
        wgmma_registers_e4m3(d, keep, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pack_weights<const C: usize, const W: usize>(s: &[f32; C]) -> [u32; W] {
        let mut weights = [0; W];
        let mut i = 0;
        while i < W {
            // A register holds P of four keys of one row, from two groups of eight; the next
            // register holds those of the row eight below.
            let at = i / 2 * 8 + i % 2 * 2;
            weights[i] = f32x4_to_e4m3x4([s[at], s[at + 1], s[at + 4], s[at + 5]]);
            i += 1;
        }
        weights
    }
}

/// e4m3 keys as the cache holds them; P and values are float16. A query element is the sum of two
/// e4m3 values, which together keep as many bits as bfloat16.
pub(super) struct Float8Keys;

impl Operand for Float8Keys {
    type Element = f16;
    const LIMIT: f32 = <f16 as Operand>::LIMIT;
    const QUERY_PARTS: u32 = 2;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn headroom() -> f32 {
        <f16 as Operand>::headroom()
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply<const C: usize>(a: u64, b: u64) -> [f32; C] {
        Float8::multiply(a, b)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
        Float8::multiply_add(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_rows(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        Float8::multiply_rows(d, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_weights<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64) {
        f16::multiply_weights(d, keep, a, b);
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pack_weights<const C: usize, const W: usize>(s: &[f32; C]) -> [u32; W] {
        f16::pack_weights(s)
    }
}

/// The key, of 32, in a column of e4m3 Vᵀ.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) const fn key_of_column(column: u32) -> u32 {
    let (half, four, pair, one) = (column / 16, column / 4 % 4, column / 2 % 2, column % 2);
    16 * half + 8 * pair + 2 * four + one
}
