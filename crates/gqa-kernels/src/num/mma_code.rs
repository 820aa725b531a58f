//! Converts quantized values to operands of the tensor cores: float16, two to a word.
//!
//! An 8-bit integer becomes float16 without a conversion instruction: its bits, with the sign bit
//! flipped, become the lowest mantissa bits of 1024, and 1024 + 128 is then subtracted. A 4-bit
//! integer needs no subtraction where the products may have an offset and a unit: its bits alone
//! are a subnormal float16, a multiple of the smallest one. A 4-bit float becomes a float16 whose
//! exponent is 14 too small, after its sign bit is moved. GPUs from SM 89 on have an instruction
//! for float8; code for older ones multiplies.

use super::code::{Bits4, Bits8, Code, Float4, Float8, Int4, Int8};
use crate::simt::{
    e4m3x2_to_f16x2, fma_f16x2, hidden_one, mul_f16x2, multiply_add, prmt, select_bits, sub_f16x2,
};

/// A format whose quantized values are converted to float16.
pub trait MmaCode: Code {
    /// Quantized values of 16 bits.
    const PER_HALF_WORD: usize = 16 / Self::BITS as usize;
    /// Whether [`halves`](Self::halves) may convert a code of 0 to a number other than 0, the
    /// offset.
    const HAS_OFFSET: bool;
    /// The common unit of products, a power of two. The other operand of word `i` is multiplied by
    /// `PRODUCT / units()[i]` first, which keeps it in the range of float16.
    const PRODUCT: f32;
    /// The units of the words of [`halves`](Self::halves), powers of two.
    fn units(self) -> [f32; 4];
    /// [`HAS_OFFSET`](Self::HAS_OFFSET) of this format; a constant if the format is constant.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_offset(self) -> bool {
        Self::HAS_OFFSET
    }
    /// A word of quantized values that are all 0.
    fn zeros(self) -> u32;
    /// Word `i < PER_HALF_WORD` holds code `i` of the lower half of `codes` and code `i` of its
    /// upper half as f16, exactly: the code in units of `units()[i]`, plus the offset. The
    /// remaining words are 0. With `multiplies`, bits may be moved by multiplications instead of
    /// shifts: that relieves the pipe for shifts and logic, but takes registers for the factors.
    fn halves(self, codes: u32, multiplies: bool) -> [u32; 4];
    /// Word `i < PER_WORD / 2` holds the codes `2 i` and `2 i + 1` of `codes`, exactly, as f16; the
    /// remaining words are 0.
    fn in_order(self, codes: u32) -> [u32; 4];
}

impl Int8 {
    /// Converts the two codes that [`prmt`] selects.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn selected(codes: u32, selectors: [u32; 2]) -> [u32; 4] {
        const SIGNS: u32 = 0x8080_8080;
        /// The upper byte of 1024.
        const LEADING_ONE: u32 = 0x6464_6464;
        /// 1024, and 128 for the sign.
        const ZERO: u32 = 0x6480_6480;
        let codes = codes ^ SIGNS;
        let half = |selector| sub_f16x2(prmt(codes, LEADING_ONE, selector), ZERO);
        [half(selectors[0]), half(selectors[1]), 0, 0]
    }
}

impl MmaCode for Int8 {
    const HAS_OFFSET: bool = false;
    const PRODUCT: f32 = 1.0;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn units(self) -> [f32; 4] {
        [1.0; 4]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zeros(self) -> u32 {
        0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(self, codes: u32, _: bool) -> [u32; 4] {
        /// Bytes 0 and 2, and bytes 1 and 3, each below one of the second operand.
        const EVEN_AND_ODD: [u32; 2] = [0x4240, 0x4341];
        Self::selected(codes, EVEN_AND_ODD)
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn in_order(self, codes: u32) -> [u32; 4] {
        /// Bytes 0 and 1, and bytes 2 and 3.
        const LOW_AND_HIGH: [u32; 2] = [0x4140, 0x4342];
        Self::selected(codes, LOW_AND_HIGH)
    }
}

impl MmaCode for Int4 {
    const HAS_OFFSET: bool = true;
    const PRODUCT: f32 = 1.0 / (1 << 10) as f32;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn units(self) -> [f32; 4] {
        /// In a subnormal float16 the lowest bit counts 2^-24, and the fifth bit 2^-20.
        const UNITS: [f32; 2] = [1.0 / (1 << 24) as f32, 1.0 / (1 << 20) as f32];
        [UNITS[0], UNITS[1], UNITS[0], UNITS[1]]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zeros(self) -> u32 {
        0x8888_8888
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(self, codes: u32, _: bool) -> [u32; 4] {
        const LOWER: u32 = 0x000f_000f;
        const UPPER: u32 = 0x00f0_00f0;
        [codes & LOWER, codes & UPPER, codes >> 8 & LOWER, codes >> 8 & UPPER]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn in_order(self, codes: u32) -> [u32; 4] {
        /// Leading ones for the two codes of a byte: 1024 for the lower four bits, 64 for the upper
        /// four. The second word, which is subtracted, also removes the offset of 8.
        const LEADING_ONES: [u32; 2] = [0x5400_6400, 0x5480_6408];
        let of_byte = |i: u32| {
            let twice = prmt(codes, 0, 0x1111 * i);
            sub_f16x2(twice & 0x00f0_000f | LEADING_ONES[0], LEADING_ONES[1])
        };
        [of_byte(0), of_byte(1), of_byte(2), of_byte(3)]
    }
}

/// Whether the target has an instruction that makes halves of float8.
const CONVERTS_FLOAT8: bool = cfg!(any(not(target_arch = "nvptx64"), target_feature = "sm_89"));

impl MmaCode for Float8 {
    const HAS_OFFSET: bool = false;
    const PRODUCT: f32 = 1.0;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn units(self) -> [f32; 4] {
        [1.0; 4]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zeros(self) -> u32 {
        0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(self, codes: u32, _: bool) -> [u32; 4] {
        /// Bytes 0 and 2, then 1 and 3.
        const SORTED: u32 = 0x3120;
        if !CONVERTS_FLOAT8 {
            return [multiplied(codes << 8), multiplied(codes), 0, 0];
        }
        let codes = prmt(codes, 0, SORTED);
        [e4m3x2_to_f16x2(codes as u16), e4m3x2_to_f16x2((codes >> 16) as u16), 0, 0]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn in_order(self, codes: u32) -> [u32; 4] {
        /// For [`multiplied`]: bytes 0 and 1, and bytes 2 and 3, in upper halves.
        const LOW_AND_HIGH: [u32; 2] = [0x1404, 0x3424];
        if !CONVERTS_FLOAT8 {
            let [low, high] = LOW_AND_HIGH.map(|selector| multiplied(prmt(codes, 0, selector)));
            return [low, high, 0, 0];
        }
        [e4m3x2_to_f16x2(codes as u16), e4m3x2_to_f16x2((codes >> 16) as u16), 0, 0]
    }
}

impl Float4 {
    /// Selects bytes 0 and 2 of a word as upper bytes, above bytes of zeros.
    const EVEN_BYTES: u32 = 0x2404;
    /// Bytes 1 and 3 stay in place.
    const ODD_BYTES: u32 = 0xff00_ff00;

    /// Turns the code in the upper four bits of each byte into the upper byte of a float16: the
    /// sign, then exponent and mantissa across the end of the float16's exponent. That float16 is
    /// the code's number times 2^-14, also for subnormals.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn upper_bytes(codes: u32) -> u32 {
        const SIGNS: u32 = 0x8080_8080;
        const SIZES: u32 = 0x0e0e_0e0e;
        codes & SIGNS | codes >> 3 & SIZES
    }

    /// [`halves`](MmaCode::halves) by multiplications: moves sign and magnitude bits of four codes
    /// per word to their places in float16; the bits between are masked afterwards.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiplied(codes: u32) -> [u32; 4] {
        const SIGNS: u32 = 0x8080_8080;
        /// Signs and sizes in the upper and in the lower bytes of two halves.
        const UPPER: u32 = 0x8e00_8e00;
        const LOWER: u32 = 0x008e_008e;
        let moved = |word: u32, bits: u32| multiply_add(word, hidden_one() << bits, 0);
        let even = select_bits(SIGNS, moved(codes, 4), moved(codes, 1));
        let odd = select_bits(SIGNS, codes, codes >> 3);
        let lower = |bytes: u32| moved(bytes & LOWER, 8);
        [lower(even), lower(odd), even & UPPER, odd & UPPER]
    }
}

impl MmaCode for Float4 {
    const HAS_OFFSET: bool = false;
    const PRODUCT: f32 = Int4::PRODUCT;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn units(self) -> [f32; 4] {
        [1.0 / (1 << 14) as f32; 4]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zeros(self) -> u32 {
        0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(self, codes: u32, multiplies: bool) -> [u32; 4] {
        if multiplies {
            return Self::multiplied(codes);
        }
        let (even, odd) = (Self::upper_bytes(codes << 4), Self::upper_bytes(codes));
        [
            prmt(even, 0, Self::EVEN_BYTES),
            prmt(odd, 0, Self::EVEN_BYTES),
            even & Self::ODD_BYTES,
            odd & Self::ODD_BYTES,
        ]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn in_order(self, codes: u32) -> [u32; 4] {
        /// Selects byte 0 of both operands as upper bytes.
        const BOTH: u32 = 0x4400;
        /// 2^14, twice.
        const UNIT: u32 = 0x7400_7400;
        let (even, odd) = (Self::upper_bytes(codes << 4), Self::upper_bytes(codes));
        let of_byte =
            |i: u32| mul_f16x2(prmt(even, odd, BOTH + 0x1111 * i) & Self::ODD_BYTES, UNIT);
        [of_byte(0), of_byte(1), of_byte(2), of_byte(3)]
    }
}

/// Converts by both formats and selects one result, so that no branch lies between products. If the
/// format is constant, ptxas removes the other conversion.
impl MmaCode for Bits4 {
    const HAS_OFFSET: bool = true;
    const PRODUCT: f32 = Int4::PRODUCT;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_offset(self) -> bool {
        !self.is_float
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn units(self) -> [f32; 4] {
        let (of_int4, of_float4) = (Int4.units(), Float4.units());
        core::array::from_fn(|i| if self.is_float { of_float4[i] } else { of_int4[i] })
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zeros(self) -> u32 {
        if self.is_float { Float4.zeros() } else { Int4.zeros() }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(self, codes: u32, multiplies: bool) -> [u32; 4] {
        one_of(self.is_float, Int4.halves(codes, multiplies), Float4.halves(codes, multiplies))
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn in_order(self, codes: u32) -> [u32; 4] {
        one_of(self.is_float, Int4.in_order(codes), Float4.in_order(codes))
    }
}

/// The same of 8 bits.
impl MmaCode for Bits8 {
    const HAS_OFFSET: bool = false;
    const PRODUCT: f32 = 1.0;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn units(self) -> [f32; 4] {
        [1.0; 4]
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zeros(self) -> u32 {
        0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn halves(self, codes: u32, multiplies: bool) -> [u32; 4] {
        one_of(self.is_float, Int8.halves(codes, multiplies), Float8.halves(codes, multiplies))
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn in_order(self, codes: u32) -> [u32; 4] {
        one_of(self.is_float, Int8.in_order(codes), Float8.in_order(codes))
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn one_of(is_float: bool, of_integers: [u32; 4], of_floats: [u32; 4]) -> [u32; 4] {
    core::array::from_fn(|i| if is_float { of_floats[i] } else { of_integers[i] })
}

/// Converts two e4m3 numbers, in bytes 1 and 3, to float16. Shifted right by one bit, exponent and
/// mantissa are those of a float16 that is 2^8 times too small. A multiplication by 2^8 · 144 keeps
/// the greatest number finite and makes the code of NaN, one step above it, infinite. Adding a
/// product with 0 turns the infinity into NaN, and a multiplication by 1/144 restores every other
/// number exactly.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiplied(codes: u32) -> u32 {
    const SIGNS: u32 = 0x8000_8000;
    const SIZES: u32 = 0x7f00_7f00;
    /// 2^8 · 144 and 1/144, twice.
    const RAISE: u32 = 0x7880_7880;
    const LOWER: u32 = 0x1f1c_1f1c;
    let raised = mul_f16x2(codes & SIGNS | (codes & SIZES) >> 1, RAISE);
    fma_f16x2(raised, LOWER, mul_f16x2(raised, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simt::f16_to_f32;

    fn check<C: MmaCode>(code: C) {
        let zeros = code.halves(code.zeros(), false);
        assert!(C::HAS_OFFSET || zeros == [0; 4]);
        for codes in (0..1 << 16).map(|i: u32| i | i.wrapping_mul(0x9e37) << 16) {
            let words = code.halves(codes, false);
            assert_eq!(words, code.halves(codes, true));
            for (i, word) in (0..).zip(words).take(C::PER_HALF_WORD) {
                for half in 0..2 {
                    let unit = code.units()[i as usize];
                    let number = |word: u32| f16_to_f32((word >> (16 * half)) as u16) / unit;
                    let (got, zero) = (number(word), number(zeros[i as usize]));
                    let want = zero + code.decode(codes >> (16 * half + i * C::BITS));
                    assert!(
                        got == want || got.is_nan() && want.is_nan(),
                        "{codes:#x}: {i}, {half}"
                    );
                }
            }
            assert!(words[C::PER_HALF_WORD..].iter().all(|&word| word == 0));
            for i in 0..C::PER_WORD {
                let half = code.in_order(codes)[i as usize / 2] >> (16 * (i % 2));
                let (got, want) = (f16_to_f32(half as u16), code.decode(codes >> (i * C::BITS)));
                assert!(got == want || got.is_nan() && want.is_nan(), "{codes:#x}: {i} in order");
            }
        }
    }

    /// The conversion on GPUs before SM 89.
    #[test]
    fn float8_becomes_halves_by_multiplication() {
        for codes in 0..=u16::MAX {
            let spread = prmt(codes.into(), 0, 0x1404);
            for (i, half) in [multiplied(spread) as u16, (multiplied(spread) >> 16) as u16]
                .into_iter()
                .enumerate()
            {
                let want = Float8.decode(u32::from(codes) >> (8 * i));
                let got = f16_to_f32(half);
                let same = got.to_bits() == want.to_bits();
                assert!(same || got.is_nan() && want.is_nan(), "{codes:#x}: {i}: {got} for {want}");
            }
        }
    }

    #[test]
    fn halves_are_what_codes_mean() {
        check(Int8);
        check(Int4);
        check(Float8);
        check(Float4);
        Bits4::FORMATS.iter().for_each(|&format| check(Bits4::of(format as u32)));
        Bits8::FORMATS.iter().for_each(|&format| check(Bits8::of(format as u32)));
    }
}
