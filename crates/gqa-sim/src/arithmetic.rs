//! Arithmetic and conversions as the instructions define them: subnormals flushed where PTX says
//! `.ftz`, NaNs canonical.
//!
//! Approximate instructions are computed exactly; the hardware's last bits differ from chip to
//! chip.

const CANONICAL_NAN: f32 = f32::from_bits(0x7fff_ffff);
const CANONICAL_NAN_16: u16 = 0x7fff;

#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// 2 to the power `x`, within 2 ulp; subnormals are zero.
pub fn exp2(x: f32) -> f32 {
    flush(flush(x).exp2())
}

/// Logarithm to base 2; subnormals are zero.
pub fn log2(x: f32) -> f32 {
    flush(flush(x).log2())
}

/// `1 / x`, within 1 ulp; subnormals are zero.
pub fn rcp(x: f32) -> f32 {
    flush(1.0 / flush(x))
}

/// `1 / √x`, within 2 ulp; subnormals are zero.
pub fn rsqrt(x: f32) -> f32 {
    flush((1.0 / f64::from(flush(x)).sqrt()) as f32)
}

/// `a·b + c`, rounded once; subnormals are zero.
#[inline]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    flush(fused(flush(a), flush(b), flush(c)))
}

/// The product of two `f32` is exact in `f64`. The sum is rounded to odd, so that rounding twice
/// gives the same as rounding once. A call of `fmaf` is many times slower on targets without the
/// instruction.
#[inline]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (product, addend) = (a as f64 * b as f64, c as f64);
    let sum = product + addend;
    if !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum as f32;
    }
    let shared = sum - product;
    let error = (product - (sum - shared)) + (addend - shared);
    if error == 0.0 {
        return sum as f32;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 }) as f32
}

/// The larger value; of a number and a NaN, the number.
#[inline]
pub fn max(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => CANONICAL_NAN,
        (true, false) => b,
        (false, true) => a,
        // Equal values differ at most in the sign of a zero, and +0 is the larger.
        (false, false) if a == b => f32::from_bits(a.to_bits() & b.to_bits()),
        (false, false) => {
            if a > b {
                a
            } else {
                b
            }
        }
    }
}

/// Exact.
///
/// Moves the bits to an `f32`'s place and corrects the exponent's bias. A subnormal becomes the
/// fraction of a normal number, from which that number's leading 1 is subtracted; a multiplication
/// would do, but subnormal operands are very slow.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    const BIAS: u32 = (127 - 15) << 23;
    const LEADING_ONE: u32 = BIAS + (1 << 23);
    let magnitude = (bits as u32 & 0x7fff) << 13;
    let subnormal = f32::from_bits(magnitude + LEADING_ONE) - f32::from_bits(LEADING_ONE);
    let widened = match bits & 0x7c00 {
        0 => subnormal.to_bits(),
        0x7c00 => magnitude | 0x7f80_0000,
        _ => magnitude + BIAS,
    };
    f32::from_bits(widened | (bits as u32 & 0x8000) << 16)
}

/// To nearest, ties to even; overflow is infinite.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    if value.is_nan() { CANONICAL_NAN_16 } else { half::f16::from_f32(value).to_bits() }
}

/// The lower f16 of a pair. Exact.
#[inline(always)]
pub fn f16_low_to_f32(pair: u32) -> f32 {
    f16_to_f32(pair as u16)
}

/// The upper f16 of a pair. Exact.
#[inline(always)]
pub fn f16_high_to_f32(pair: u32) -> f32 {
    f16_to_f32((pair >> 16) as u16)
}

/// Exact.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The lower bf16 of a pair. Exact.
#[inline(always)]
pub fn bf16_low_to_f32(pair: u32) -> f32 {
    bf16_to_f32(pair as u16)
}

/// The upper bf16 of a pair. Exact.
#[inline(always)]
pub fn bf16_high_to_f32(pair: u32) -> f32 {
    bf16_to_f32((pair >> 16) as u16)
}

/// The first constant: kernels for both types have one text on the device.
#[inline(always)]
pub fn constant_of_bf16<const BF16: u32, const F16: u32>() -> u32 {
    BF16
}

/// The second constant.
#[inline(always)]
pub fn constant_of_f16<const BF16: u32, const F16: u32>() -> u32 {
    F16
}

/// To nearest, ties to even.
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    if value.is_nan() { CANONICAL_NAN_16 } else { half::bf16::from_f32(value).to_bits() }
}

fn pack(lo: u16, hi: u16) -> u32 {
    lo as u32 | (hi as u32) << 16
}

/// Rounds two values to f16, the first into the low half. SM 80.
#[inline]
pub fn f32x2_to_f16x2(lo: f32, hi: f32) -> u32 {
    pack(f32_to_f16(lo), f32_to_f16(hi))
}

/// Rounds two values to bf16, the first into the low half. SM 80.
#[inline]
pub fn f32x2_to_bf16x2(lo: f32, hi: f32) -> u32 {
    pack(f32_to_bf16(lo), f32_to_bf16(hi))
}

/// The difference of each half, as f16. SM 80.
pub fn sub_f16x2(a: u32, b: u32) -> u32 {
    halves([a, b], |[a, b]| a - b)
}

/// The product of each half, as f16. SM 80.
pub fn mul_f16x2(a: u32, b: u32) -> u32 {
    halves([a, b], |[a, b]| a * b)
}

/// `a·b + c` of each half, as f16, rounded once. SM 80.
pub fn fma_f16x2(a: u32, b: u32, c: u32) -> u32 {
    halves([a, b, c], |[a, b, c]| a * b + c)
}

/// Applies `function` to the lower and the upper f16, in double precision, in which products of f16
/// are exact, and rounds to f16.
fn halves<const N: usize>(operands: [u32; N], function: impl Fn([f64; N]) -> f64) -> u32 {
    let half = |shift: u32| {
        let result = function(operands.map(|pair| f16_to_f32((pair >> shift) as u16).into()));
        if result.is_nan() { CANONICAL_NAN_16 } else { half::f16::from_f64(result).to_bits() }
    };
    pack(half(0), half(16))
}

/// Picks four of the eight bytes of `a` (the lower ones) and `b` (`prmt`): each of the selector's
/// four lower nibbles picks one; with its top bit set, the sign of that byte, eight times.
pub fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    u32::from_le_bytes(core::array::from_fn(|i| {
        let nibble = selector >> (4 * i) & 0xf;
        let byte = bytes[nibble as usize % 8];
        if nibble < 8 { byte } else { ((byte as i8) >> 7) as u8 }
    }))
}

/// The lower bits of `a·b + c` (`mad.lo`).
#[inline]
pub fn multiply_add(a: u32, b: u32, c: u32) -> u32 {
    a.wrapping_mul(b).wrapping_add(c)
}

/// The bits of `a` where the mask has ones, and those of `b` elsewhere (`lop3`).
#[inline]
pub fn select_bits(mask: u32, a: u32, b: u32) -> u32 {
    a & mask | b & !mask
}

/// Widens two e4m3 values to f16, the first in the low half. Exact. SM 90.
pub fn e4m3x2_to_f16x2(x: u16) -> u32 {
    let [low, high] = x.to_le_bytes();
    pack(e4m3_to_f16(low), e4m3_to_f16(high))
}

/// Rounds two values to e4m3, the first into the low byte; values over 448 become 448. SM 90.
pub fn f32x2_to_e4m3x2(lo: f32, hi: f32) -> u16 {
    u16::from_le_bytes([f32_to_e4m3(lo), f32_to_e4m3(hi)])
}

/// Rounds four values to e4m3, the first into the lowest byte; values over 448 become 448. SM 89.
pub fn f32x4_to_e4m3x4(x: [f32; 4]) -> u32 {
    u32::from_le_bytes(x.map(f32_to_e4m3))
}

fn f32_to_e4m3(value: f32) -> u8 {
    /// Exponent of the least normal number.
    const LEAST: i32 = -6;
    /// Bits of a mantissa.
    const MANTISSA: i32 = 3;
    const MAX: f32 = 448.0;
    if value.is_nan() {
        return 0x7f;
    }
    let (sign, size) = (u8::from(value.is_sign_negative()) << 7, value.abs().min(MAX));
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(LEAST);
    // Rounding up to a mantissa of 2 carries into the exponent.
    let mantissa = (size / ((exponent - MANTISSA) as f32).exp2()).round_ties_even() as u8;
    sign | (mantissa + (((exponent - LEAST) as u8) << MANTISSA))
}

fn e4m3_to_f16(x: u8) -> u16 {
    /// Difference of the exponent biases of f16 and e4m3.
    const BIAS: u16 = (15 - 7) << 10;
    const STEP: f32 = 1.0 / 512.0;
    let (sign, size) = (u16::from(x & 0x80) << 8, x & 0x7f);
    match size {
        0x7f => CANONICAL_NAN_16,
        0..8 => sign | f32_to_f16(f32::from(size) * STEP),
        _ => sign | ((u16::from(size) << 7) + BIAS),
    }
}

/// The maximum of each half, as unsigned integers.
pub fn max_u16x2(a: u32, b: u32) -> u32 {
    (a >> 16).max(b >> 16) << 16 | (a & 0xffff).max(b & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::{
        e4m3x2_to_f16x2, f16_to_f32, f32x2_to_e4m3x2, fma_f16x2, max_u16x2, mul_f16x2, prmt,
        sub_f16x2,
    };

    #[test]
    fn halves_do_not_mix() {
        assert_eq!(max_u16x2(0x0001_ffff, 0x8000_0002), 0x8000_ffff);
    }

    #[test]
    fn halves_are_subtracted_each_for_itself() {
        let pair = |lo, hi| super::f32x2_to_f16x2(lo, hi);
        assert_eq!(sub_f16x2(pair(1024.0, -2.5), pair(1152.0, 65504.0)), pair(-128.0, -65504.0));
        assert_eq!(sub_f16x2(pair(0.0, f32::NAN), pair(1.0, 1.0)), pair(-1.0, f32::NAN));
    }

    #[test]
    fn halves_are_multiplied_and_rounded_once() {
        let pair = |lo, hi| super::f32x2_to_f16x2(lo, hi);
        let (a, b) = (pair(1.0 + 1.0 / 1024.0, 480.0), pair(1.0 + 1.0 / 1024.0, 144.0));
        assert_eq!(mul_f16x2(a, b), pair(1.0 + 2.0 / 1024.0, f32::INFINITY));
        // What rounding the product would lose.
        let c = pair(-1.0 - 2.0 / 1024.0, f32::NAN);
        assert_eq!(fma_f16x2(a, b, c), pair(1.0 / 1_048_576.0, f32::NAN));
    }

    #[test]
    fn bytes_are_chosen_and_signs_spread() {
        let (a, b) = (0x7372_8170, 0x8786_8504);
        assert_eq!(prmt(a, b, 0x7531), 0x8785_7381);
        assert_eq!(prmt(a, b, 0xf420), 0xff04_7270);
        assert_eq!(prmt(a, b, 0xc98b), 0x00ff_0000);
    }

    #[test]
    fn eight_bit_floats_round_to_nearest_and_even() {
        let number = |code: u8| f16_to_f32(e4m3x2_to_f16x2(code.into()) as u16);
        let code = |x: f32| f32x2_to_e4m3x2(x, -x).to_le_bytes();
        for low in 0..0x7e {
            let (a, b) = (number(low), number(low + 1));
            let (middle, even) = ((a + b) / 2.0, low + low % 2);
            let near = [(a, low), (middle.next_down(), low), (middle, even)];
            for (x, want) in near.into_iter().chain([(middle.next_up(), low + 1), (b, low + 1)]) {
                assert_eq!(code(x), [want, want | 0x80], "{x:e}");
            }
        }
        assert_eq!([code(f32::INFINITY), code(449.0)], [[0x7e, 0xfe]; 2]);
        assert_eq!(code(f32::NAN), [0x7f; 2]);
    }

    #[test]
    fn eight_bit_floats_are_those_of_the_format() {
        for code in 0..=u8::MAX {
            let (sign, exponent, mantissa) = (code >> 7, code >> 3 & 15, f32::from(code & 7));
            let size = match (exponent, code & 7) {
                (15, 7) => f32::NAN,
                (0, _) => mantissa / 512.0,
                _ => (1.0 + mantissa / 8.0) * f32::from(exponent).exp2() / 128.0,
            };
            let want = if sign == 0 { size } else { -size };
            let [low, high] = [0, 16].map(|shift| {
                f16_to_f32((e4m3x2_to_f16x2(u16::from_le_bytes([0x38, code])) >> shift) as u16)
            });
            assert_eq!(low, 1.0);
            assert!(
                high.to_bits() == want.to_bits() || high.is_nan() && want.is_nan(),
                "{code:#x}"
            );
        }
    }

    #[test]
    fn widening_agrees_with_half_for_every_value() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{bits:#x}"
            );
        }
    }
}
