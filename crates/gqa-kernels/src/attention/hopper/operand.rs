//! What the tensor cores multiply: elements, halves where quantized values become such, e4m3 where
//! both caches hold it, or keys of e4m3 and values that became halves.
//!
//! A thread's scores of a row are two neighbours in eight, its weights of e4m3 as an operand four
//! neighbours in sixteen. Instead of exchanging them between threads, keys change places:
//! [`key_of_column`] says which one of 32 stands in a column of V, transposed.

use crate::num::{Float8, MmaElement, f16};
use crate::simt::{
    e4m3x2_to_f16x2, f32x4_to_e4m3x4, wgmma_add_e4m3, wgmma_e4m3, wgmma_registers_e4m3,
};

/// A type of operands. V is as the cache has it where they have two bytes; where they have one it
/// is transposed, a row for each column of the head, because the tensor cores turn nothing round
/// then.
pub(super) trait Operand {
    /// What `lower` and `weigh_again` read packed weights as; not used where these are of e4m3.
    type Element: MmaElement;
    /// Exponents of the weights that a row's greatest scores get when its reference is set,
    /// downwards from 1.
    const HEADROOM: f32;
    /// The greatest exponent that does not raise the reference.
    const LIMIT: f32;
    /// Summands of a query's number: in a row of a Q tile are the first ones of all columns, then
    /// the second ones (`queries.rs`).
    const QUERY_PARTS: u32 = 1;
    /// Keys are of e4m3 and multiplied as they arrive, by such summands.
    const KEEPS_KEYS: bool = Self::QUERY_PARTS > 1;
    /// `a · b` over 32 bytes of rows, both from shared memory.
    fn multiply<const C: usize>(a: u64, b: u64) -> [f32; C];
    /// The same, added to `d`.
    fn multiply_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64);
    /// `d += a · b` over 32 bytes of 16 and of 8 rows, for a warp of its own, from registers.
    fn multiply_rows(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);
    /// `d = keep · d + a · b`, `a` from registers; where `keep` is false, whatever `d` is.
    fn multiply_weights<const C: usize>(d: &mut [f32; C], keep: bool, a: [u32; 4], b: u64);
    /// Weights as the A operand of the next multiplication.
    fn pack_weights<const C: usize, const W: usize>(s: &[f32; C]) -> [u32; W];
}

/// Accumulator and operand layouts agree.
impl<T: MmaElement> Operand for T {
    type Element = T;
    const HEADROOM: f32 = T::HEADROOM as f32;
    /// From 2 on weights have the highest bit of their exponents set, in both types.
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
    /// So many powers of two above 1, because below 1/64 numbers are coarse.
    const HEADROOM: f32 = -6.0;
    /// 256 of at most 448.
    const LIMIT: f32 = 8.0;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply<const C: usize>(a: u64, b: u64) -> [f32; C] {
        wgmma_e4m3(a, b)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply_add<const C: usize>(d: &mut [f32; C], a: u64, b: u64) {
        wgmma_add_e4m3(d, a, b);
    }
    /// As halves: the lower two of each four numbers, then the upper ones.
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
            // A register has a row's weights of two times eight keys; the next one those of the row
            // eight further down.
            let at = i / 2 * 8 + i % 2 * 2;
            weights[i] = f32x4_to_e4m3x4([s[at], s[at + 1], s[at + 4], s[at + 5]]);
            i += 1;
        }
        weights
    }
}

/// Keys as a cache of e4m3 has them; weights and values are halves. A query's number is the sum of
/// two of e4m3, which keep as many bits as bfloat16 has.
pub(super) struct Float8Keys;

impl Operand for Float8Keys {
    type Element = f16;
    const HEADROOM: f32 = <f16 as Operand>::HEADROOM;
    const LIMIT: f32 = <f16 as Operand>::LIMIT;
    const QUERY_PARTS: u32 = 2;
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

/// Which of 32 keys stands in a column of V, transposed, of e4m3.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) const fn key_of_column(column: u32) -> u32 {
    let (half, four, pair, one) = (column / 16, column / 4 % 4, column / 2 % 2, column % 2);
    16 * half + 8 * pair + 2 * four + one
}
