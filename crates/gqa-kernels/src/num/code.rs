//! Formats of a quantized cache: codes of 8 or 4 bits, and scales.
//!
//! | format | code of `x` | dequantized value |
//! |---|---|---|
//! | [`Int8`] | `x / scale` rounded to nearest, ties to even, clamped to -128 … 127 | `code · scale` |
//! | [`Int4`] | the same clamped to -8 … 7, plus 8; the even element of two in a byte's low half | `(code - 8) · scale` |
//! | [`Float8`] | `x / scale` rounded to e4m3 (no infinity), clamped to ±448 | `code · scale` |
//! | [`Float4`] | `x / scale` rounded to e2m1, clamped to ±6; two in a byte as above | `code · scale` |
//!
//! Scales are per tensor, per KV head, per channel (KV head and element) or per token; never NaN,
//! and a scale of 0 gives unspecified values. [`Code::row_scale`] computes a per-token scale.

use crate::simt::f32x2_to_e4m3x2;

/// Names a format at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// [`Int8`]
    Int8,
    /// [`Int4`]
    Int4,
    /// [`Float8`]
    Float8,
    /// [`Float4`]
    Float4,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Int8, Self::Int4, Self::Float8, Self::Float4];

    /// Bits of a quantized value.
    pub const fn bits(self) -> u32 {
        match self {
            Self::Int8 | Self::Float8 => 8,
            Self::Int4 | Self::Float4 => 4,
        }
    }

    /// Whether quantized values of a kernel's parameter have four bits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn has_four_bits(format: u32) -> bool {
        format == Self::Int4 as u32 || format == Self::Float4 as u32
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl core::fmt::Display for Format {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Int8 => "int8",
            Self::Int4 => "4-bit",
            Self::Float8 => "float8e4m3fn",
            Self::Float4 => "float4e2m1",
        })
    }
}

/// The bits of quantized values. A type may stand for several formats of as many bits; a value of
/// the type says which one.
pub trait Code: Copy + 'static {
    /// The formats' run-time names.
    const FORMATS: &'static [Format];
    /// Bits of a quantized value.
    const BITS: u32;
    /// Quantized values of a 32-bit word, the first in its lowest bits.
    const PER_WORD: u32 = 32 / Self::BITS;
    /// The code for `format`, a kernel parameter: a [`Format`] among [`FORMATS`](Self::FORMATS).
    fn of(format: u32) -> Self;
    /// The largest quantized value, as a number.
    fn largest(self) -> f32;
    /// The quantized value of a number divided by its scale.
    fn encode(self, quotient: f32) -> u32;
    /// Encodes two numbers, the first in the lowest bits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode_two(self, [first, second]: [f32; 2]) -> u32 {
        self.encode(first) | self.encode(second) << Self::BITS
    }
    /// The per-token scale of a row whose largest [`magnitude`] has the bits `largest`: it maps the
    /// row's largest number to the largest quantized value. 1 if the scale would not be a normal
    /// number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_scale(self, largest: u32) -> f32 {
        let scale = f32::from_bits(largest) / self.largest();
        // NaN is not contained.
        if (f32::MIN_POSITIVE..=f32::MAX).contains(&scale) { scale } else { 1.0 }
    }
    /// A quantized value as a number, to be multiplied by its scale: exact in `f32` and in half
    /// precision. Bits above the code's do not count.
    fn decode(self, code: u32) -> f32;
}

/// The bits of a float without its sign. They are ordered like absolute values, with NaN largest.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// Signed 8-bit integers.
#[derive(Clone, Copy, Debug)]
pub struct Int8;

/// Signed 4-bit integers, 8 added, two to a byte.
#[derive(Clone, Copy, Debug)]
pub struct Int4;

/// e4m3: a sign, 4 bits of exponent, 3 of mantissa.
#[derive(Clone, Copy, Debug)]
pub struct Float8;

/// e2m1: a sign, 2 bits of exponent, 1 of mantissa, no infinity and no NaN; two to a byte.
#[derive(Clone, Copy, Debug)]
pub struct Float4;

/// [`Int8`] or [`Float8`], chosen by a kernel parameter, which becomes a constant of the PTX when a
/// plan is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Bits8 {
    /// Whether it is [`Float8`].
    pub is_float: bool,
}

/// [`Int4`] or [`Float4`], likewise.
#[derive(Clone, Copy, Debug)]
pub struct Bits4 {
    /// Whether it is [`Float4`].
    pub is_float: bool,
}

impl Code for Int8 {
    const FORMATS: &'static [Format] = &[Format::Int8];
    const BITS: u32 = 8;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(_: u32) -> Self {
        Self
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(self) -> f32 {
        127.0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode(self, quotient: f32) -> u32 {
        (nearest(quotient, -128.0, 127.0) & 0xff) as u32
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(self, code: u32) -> f32 {
        code as u8 as i8 as f32
    }
}

impl Code for Int4 {
    const FORMATS: &'static [Format] = &[Format::Int4];
    const BITS: u32 = 4;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(_: u32) -> Self {
        Self
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(self) -> f32 {
        7.0
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode(self, quotient: f32) -> u32 {
        (nearest(quotient, -8.0, 7.0) + 8) as u32
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(self, code: u32) -> f32 {
        ((code & 0xf) as i32 - 8) as f32
    }
}

/// `x` rounded to the nearest integer, ties to even, and clamped to bounds below 2^22.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn nearest(x: f32, least: f32, most: f32) -> i32 {
    /// Floats near this number are 1 apart, so that adding it rounds.
    const ONE_APART: f32 = 12_582_912.0;
    let rounded = x.max(least).min(most) + ONE_APART;
    rounded.to_bits().wrapping_sub(ONE_APART.to_bits()) as i32
}

/// Whether the target has an instruction that rounds to float8.
const ROUNDS_TO_FLOAT8: bool = cfg!(any(not(target_arch = "nvptx64"), target_feature = "sm_89"));

impl Float8 {
    /// The largest number.
    pub const MAX: f32 = 448.0;
    const NAN: u32 = 0x7f;
    /// Mantissa bits that float32 has and e4m3 lacks.
    const DROPPED: u32 = 20;
    /// Difference of the exponent biases of float32 and e4m3, in place.
    const BIAS: u32 = (127 - 7) << 23;
    /// Smaller numbers are multiples of [`Self::STEP`].
    const LEAST_NORMAL: f32 = 0.015_625;
    const STEP: f32 = 0.001_953_125;
}

impl Code for Float8 {
    const FORMATS: &'static [Format] = &[Format::Float8];
    const BITS: u32 = 8;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(_: u32) -> Self {
        Self
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(self) -> f32 {
        Self::MAX
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode(self, quotient: f32) -> u32 {
        /// Floats near this number are [`Float8::STEP`] apart, so that adding it rounds.
        const STEP_APART: f32 = 16_384.0;
        let sign = quotient.to_bits() >> 24 & 0x80;
        let size = f32::from_bits(quotient.to_bits() & 0x7fff_ffff);
        if size.is_nan() {
            return Self::NAN;
        }
        let size = size.min(Self::MAX);
        let code = if size < Self::LEAST_NORMAL {
            (size + STEP_APART).to_bits() - STEP_APART.to_bits()
        } else {
            let bits = size.to_bits() - Self::BIAS;
            let half = (1 << (Self::DROPPED - 1)) - 1;
            (bits + half + (bits >> Self::DROPPED & 1)) >> Self::DROPPED
        };
        sign | code
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode_two(self, [first, second]: [f32; 2]) -> u32 {
        if !ROUNDS_TO_FLOAT8 {
            return self.encode(first) | self.encode(second) << Self::BITS;
        }
        f32x2_to_e4m3x2(first, second).into()
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(self, code: u32) -> f32 {
        let (sign, size) = ((code & 0x80) << 24, code & 0x7f);
        let number = match size {
            Self::NAN => f32::NAN,
            0..8 => size as f32 * Self::STEP,
            _ => f32::from_bits((size << Self::DROPPED) + Self::BIAS),
        };
        f32::from_bits(number.to_bits() | sign)
    }
}

impl Float4 {
    /// The largest number.
    pub const MAX: f32 = 6.0;
    /// Mantissa bits that float32 has and e2m1 lacks.
    const DROPPED: u32 = 22;
    /// Difference of the exponent biases of float32 and e2m1, in place.
    const BIAS: u32 = (127 - 1) << 23;
    /// Smaller numbers are multiples of [`Self::STEP`].
    const LEAST_NORMAL: f32 = 1.0;
    const STEP: f32 = 0.5;
}

impl Code for Float4 {
    const FORMATS: &'static [Format] = &[Format::Float4];
    const BITS: u32 = 4;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(_: u32) -> Self {
        Self
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(self) -> f32 {
        Self::MAX
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode(self, quotient: f32) -> u32 {
        /// Floats near this number are [`Float4::STEP`] apart, so that adding it rounds.
        const STEP_APART: f32 = 4_194_304.0;
        let sign = quotient.to_bits() >> 28 & 0x8;
        let size = f32::from_bits(quotient.to_bits() & 0x7fff_ffff).min(Self::MAX);
        let code = if size < Self::LEAST_NORMAL {
            (size + STEP_APART).to_bits() - STEP_APART.to_bits()
        } else {
            let bits = size.to_bits() - Self::BIAS;
            let half = (1 << (Self::DROPPED - 1)) - 1;
            (bits + half + (bits >> Self::DROPPED & 1)) >> Self::DROPPED
        };
        sign | code
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(self, code: u32) -> f32 {
        let (sign, size) = ((code & 0x8) << 28, code & 0x7);
        let number = match size {
            0..2 => size as f32 * Self::STEP,
            _ => f32::from_bits((size << Self::DROPPED) + Self::BIAS),
        };
        f32::from_bits(number.to_bits() | sign)
    }
}

impl Code for Bits4 {
    const FORMATS: &'static [Format] = &[Format::Int4, Format::Float4];
    const BITS: u32 = 4;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(format: u32) -> Self {
        Self { is_float: format == Format::Float4 as u32 }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(self) -> f32 {
        if self.is_float { Float4.largest() } else { Int4.largest() }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode(self, quotient: f32) -> u32 {
        if self.is_float { Float4.encode(quotient) } else { Int4.encode(quotient) }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(self, code: u32) -> f32 {
        if self.is_float { Float4.decode(code) } else { Int4.decode(code) }
    }
}

impl Code for Bits8 {
    const FORMATS: &'static [Format] = &[Format::Int8, Format::Float8];
    const BITS: u32 = 8;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(format: u32) -> Self {
        Self { is_float: format == Format::Float8 as u32 }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(self) -> f32 {
        if self.is_float { Float8.largest() } else { Int8.largest() }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode(self, quotient: f32) -> u32 {
        if self.is_float { Float8.encode(quotient) } else { Int8.encode(quotient) }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode_two(self, quotients: [f32; 2]) -> u32 {
        if self.is_float { Float8.encode_two(quotients) } else { Int8.encode_two(quotients) }
    }
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(self, code: u32) -> f32 {
        if self.is_float { Float8.decode(code) } else { Int8.decode(code) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use float8::F8E4M3;

    /// Numbers of all magnitudes, and multiples of `step / 2` with their neighbours: ties of
    /// rounding to `step`.
    fn numbers(step: f32) -> impl Iterator<Item = f32> {
        let ties = (-600..600).flat_map(move |i| {
            let tie = i as f32 * step / 2.0;
            [tie, tie.next_up(), tie.next_down()]
        });
        let all_bits = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000));
        ties.chain(all_bits).filter(|x| !x.is_nan())
    }

    #[test]
    fn integers_round_to_even_and_clamp() {
        for x in numbers(1.0) {
            let want = x.round_ties_even().clamp(-128.0, 127.0);
            assert_eq!(Int8.decode(Int8.encode(x)), want, "{x}");
            let want = x.round_ties_even().clamp(-8.0, 7.0);
            assert_eq!(Int4.decode(Int4.encode(x)), want, "{x}");
        }
        assert_eq!([Int8.encode(-1.0), Int8.encode(-128.0), Int4.encode(-8.0)], [0xff, 0x80, 0]);
    }

    /// The scale of a row with such numbers.
    fn row_scale<C: Code>(code: C, row: &[f32]) -> f32 {
        code.row_scale(row.iter().map(|&x| magnitude(x)).max().unwrap_or(0))
    }

    #[test]
    fn a_rows_scale_gives_its_largest_number_the_largest_quantized_value() {
        fn check<C: Code>(code: C) {
            for x in numbers(1.0).filter(|x| x.is_finite()) {
                let scale = row_scale(code, &[0.0, x, x / 2.0]);
                let tiny = x.abs() / code.largest() < f32::MIN_POSITIVE;
                assert_eq!(scale, if tiny { 1.0 } else { x.abs() / code.largest() }, "{x:e}");
                let want = if tiny { 0.0 } else { code.largest().copysign(x) };
                let got = code.decode(code.encode(x / scale));
                assert_eq!(got, want, "{x:e} by {scale:e}");
            }
            for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(row_scale(code, &[1.0, x, 3.0]), 1.0, "{x}");
            }
        }
        check(Int8);
        check(Int4);
        check(Float8);
        check(Float4);
        Bits8::FORMATS.iter().for_each(|&format| check(Bits8::of(format as u32)));
        Bits4::FORMATS.iter().for_each(|&format| check(Bits4::of(format as u32)));
    }

    /// The numbers of ONNX's float4e2m1, by their codes without sign.
    const FLOAT4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn four_bit_floats_are_those_of_the_table() {
        for (code, size) in (0..).zip(FLOAT4) {
            for (code, number) in [(code, size), (code | 8, -size)] {
                assert_eq!(Float4.decode(code).to_bits(), number.to_bits(), "{code}");
                assert_eq!(Float4.decode(code | 0xf0).to_bits(), number.to_bits(), "{code}");
                assert_eq!(Float4.encode(number), code, "{number}");
            }
        }
    }

    #[test]
    fn four_bit_floats_round_to_the_nearest_and_of_two_to_an_even_code() {
        // Of two neighbours, one code is even.
        for (code, pair) in (0..).zip(FLOAT4.windows(2)) {
            let middle = (pair[0] + pair[1]) / 2.0;
            for (x, want) in [
                (middle.next_down(), code),
                (middle, code + code % 2),
                (middle.next_up(), code + 1),
            ] {
                assert_eq!(Float4.encode(x), want, "{x}");
                assert_eq!(Float4.encode(-x), want | 8, "{x}");
            }
        }
        for x in [6.0_f32.next_up(), 7.0, f32::MAX, f32::INFINITY] {
            assert_eq!([Float4.encode(x), Float4.encode(-x)], [7, 15], "{x}");
        }
        for x in numbers(0.5) {
            let number = Float4.decode(Float4.encode(x));
            let nearest = FLOAT4.map(|size| (size - x.abs().min(6.0)).abs());
            let nearest = nearest.into_iter().fold(f32::INFINITY, f32::min);
            assert_eq!((number.abs() - x.abs().min(6.0)).abs(), nearest, "{x}");
            assert_eq!(number.is_sign_negative(), x.is_sign_negative(), "{x}");
        }
    }

    #[test]
    fn eight_bit_floats_are_those_of_the_library() {
        for code in 0..=u8::MAX {
            let (got, want) = (Float8.decode(code.into()), F8E4M3::from_bits(code).to_f32());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{code:#x}");
        }
        for x in [0.002, 0.125, 4.0, 64.0].into_iter().flat_map(numbers) {
            let want = F8E4M3::from_f32(x.clamp(-448.0, 448.0)).to_bits();
            assert_eq!(Float8.encode(x), want.into(), "{x:e}");
        }
        assert!(Float8.decode(Float8.encode(f32::NAN)).is_nan());
    }
}
