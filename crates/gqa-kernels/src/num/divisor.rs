//! Repeated division by the same number.

use crate::simt::fma;

/// A normal number, and its inverse.
#[derive(Clone, Copy)]
pub struct Divisor {
    value: f32,
    inverse: f32,
}

impl Divisor {
    /// For division by `value`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(value: f32) -> Self {
        Self { value, inverse: 1.0 / value }
    }

    /// The divisor.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn value(self) -> f32 {
        self.value
    }

    /// `x` divided by the divisor, rounded to nearest if the divisor's magnitude is between 2^-60
    /// and 2^100 and the quotient's between 2^-20 and 2^20; smaller and larger quotients stay
    /// smaller and larger.
    ///
    /// The product with the inverse is close; a fused multiply-add gives its error exactly, which
    /// corrects it (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    /// processor", 1990).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn divide(self, x: f32) -> f32 {
        const LARGE: f32 = 1_048_576.0;
        let near = x * self.inverse;
        let rest = fma(-near, self.value, x);
        // An infinite product has no remainder. copysign: a sum of zeros would be positive.
        if near.abs() < LARGE { fma(rest, self.inverse, near).copysign(near) } else { near }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Arbitrary numbers, and numbers whose quotients are halves or near them.
        #[test]
        fn quotients_are_those_of_a_division(
            exponent in 67..=226u32, mantissa in 0..1u32 << 23, x in any::<f32>(), halves in -2000..2000i32,
        ) {
            let value = f32::from_bits(exponent << 23 | mantissa);
            let multiples = [0.5, 1.0 / 16.0].map(|part| (value * part * halves as f32, value));
            for (x, value) in [(x, value), multiples[0], multiples[1], (0.0, -value), (-0.0, value)] {
                let (got, want) = (Divisor::new(value).divide(x), x / value);
                match want.abs() {
                    0.0..1e-6 => prop_assert!(got.abs() < 2e-6, "{x:e} / {value:e}: {got:e}"),
                    1e6.. => prop_assert!(got.abs() > 9e5 && got * want > 0.0, "{x:e} / {value:e}: {got:e}"),
                    _ => prop_assert!(got == want || got.is_nan() && x.is_nan(), "{x:e} / {value:e}: {got:e}"),
                }
                let signs = [got, want].map(f32::is_sign_negative);
                prop_assert!(got.is_nan() || signs[0] == signs[1], "{x:e} / {value:e}: {got:e}");
            }
        }
    }
}
