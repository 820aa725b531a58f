//! Query rows side by side: lane `i` of every vector belongs to row `i` of a panel.

use super::native;
use bytemuck::{Pod, Zeroable};
use pulp::Simd;

/// One number for each of the `N · S::F32_LANES` rows of a panel.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Lanes<S: Simd, const N: usize>(pub(super) [S::f32s; N]);

// SAFETY: an array of vectors, which are numbers themselves; all zeros are numbers
unsafe impl<S: Simd, const N: usize> Zeroable for Lanes<S, N> {}
// SAFETY: the same, of which any bits are numbers, without padding
unsafe impl<S: Simd, const N: usize> Pod for Lanes<S, N> {}

impl<S: Simd, const N: usize> Lanes<S, N> {
    /// Rows of a panel.
    pub(super) const COUNT: usize = N * S::F32_LANES;

    /// The same number for all rows.
    #[inline(always)]
    pub(super) fn splat(simd: S, x: f32) -> Self {
        Self([simd.splat_f32s(x); N])
    }

    /// The rows' numbers.
    #[inline(always)]
    pub(super) fn rows(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }

    /// The rows' numbers, to be written.
    #[inline(always)]
    pub(super) fn rows_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// The sum of each vector's lanes.
#[inline(always)]
pub(super) fn sums<S: Simd, const M: usize>(simd: S, vectors: &[S::f32s; M]) -> [f32; M] {
    let mut sums = [0.0; M];
    let (to_fours, to_rest) = sums.as_chunks_mut();
    let (fours, rest) = vectors.as_chunks();
    for (to, four) in to_fours.iter_mut().zip(fours) {
        *to = native::sums(simd, *four)
            .unwrap_or_else(|| four.map(|vector| simd.reduce_sum_f32s(vector)));
    }
    for (to, vector) in to_rest.iter_mut().zip(rest) {
        *to = simd.reduce_sum_f32s(*vector);
    }
    sums
}

/// Of each lane the first number where the mask is set, else the second. Calls of
/// [`Simd::select_f32s`] are not always inlined, and are slow then.
#[inline(always)]
pub(super) fn select<S: Simd>(simd: S, mask: S::m32s, yes: S::f32s, no: S::f32s) -> S::f32s {
    let (yes, no) = (simd.transmute_u32s_f32s(yes), simd.transmute_u32s_f32s(no));
    simd.transmute_f32s_u32s(simd.select_u32s(mask, yes, no))
}

/// Coefficients, highest power first, of a polynomial whose last ones are written out where it is
/// used.
type Coefficients = [f32; 5];

/// (e^r - 1 - r) / r² for |r| <= ln 2 / 2.
const EXP: Coefficients =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1];

/// (tanh(x) - x) / x³ in x² for |x| < 0.625.
const TANH: Coefficients =
    [-5.704_989e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

#[inline(always)]
fn polynomial<S: Simd>(simd: S, coefficients: Coefficients, x: S::f32s) -> S::f32s {
    let mut y = simd.splat_f32s(coefficients[0]);
    for i in 1..coefficients.len() {
        y = simd.mul_add_e_f32s(y, x, simd.splat_f32s(coefficients[i]));
    }
    y
}

/// e^x for x <= 0, relative error below 2⁻²²; 0 below the smallest normal number, NaN for NaN.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding this rounds to an integer and leaves it in the low bits.
    let magic = simd.splat_f32s(1.5 * 8_388_608.0);
    let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(std::f32::consts::LOG2_E), magic);
    let n = simd.sub_f32s(shifted, magic);
    // ln 2 in two parts; n times the first is exact.
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-0.693_359_4), x);
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(2.121_944_4e-4), r);
    let p = simd.mul_add_e_f32s(polynomial(simd, EXP, r), r, simd.splat_f32s(0.5));
    let one_and_r = simd.add_f32s(r, simd.splat_f32s(1.0));
    let p = simd.mul_add_e_f32s(simd.mul_f32s(p, r), r, one_and_r);
    let exponent =
        simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let power = simd.add_u32s(exponent, simd.splat_u32s(127 << 23));
    let y = simd.mul_f32s(p, simd.transmute_f32s_u32s(power));
    select(simd, simd.less_than_f32s(x, simd.splat_f32s(-87.0)), simd.splat_f32s(0.0), y)
}

/// tanh(x), absolute error below 2⁻²³.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let square = simd.mul_f32s(x, x);
    let cubic = simd.mul_f32s(polynomial(simd, TANH, square), square);
    let near_zero = simd.mul_add_e_f32s(cubic, x, x);
    let size = simd.and_u32s(simd.transmute_u32s_f32s(x), simd.splat_u32s(0x7fff_ffff));
    let (size, one) = (simd.transmute_f32s_u32s(size), simd.splat_f32s(1.0));
    let t = exp(simd, simd.mul_f32s(size, simd.splat_f32s(-2.0)));
    let y = simd.div_f32s(simd.sub_f32s(one, t), simd.add_f32s(one, t));
    let negative = simd.less_than_f32s(x, simd.splat_f32s(0.0));
    let signed = select(simd, negative, simd.sub_f32s(simd.splat_f32s(0.0), y), y);
    select(simd, simd.less_than_f32s(size, simd.splat_f32s(0.625)), near_zero, signed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::{Arch, WithSimd};

    /// This module's functions of one number.
    struct Of(f32);

    impl WithSimd for Of {
        type Output = [f64; 2];

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> [f64; 2] {
            let x = simd.splat_f32s(self.0);
            [exp(simd, x), tanh(simd, x)].map(|y| f64::from(Lanes::<S, 1>([y]).rows()[0]))
        }
    }

    #[test]
    fn functions_are_as_exact_as_they_say() {
        for i in 0..=200_000 {
            let x = -87.0 + 0.000_435 * i as f32;
            let [exp, _] = Arch::new().dispatch(Of(x));
            let want = f64::from(x).exp();
            assert!((exp / want - 1.0).abs() < f64::powi(2.0, -22), "exp({x}): {exp}, want {want}");
        }
        for i in -100_000..=100_000 {
            let x = 0.000_1 * i as f32;
            let [_, tanh] = Arch::new().dispatch(Of(x));
            let want = f64::from(x).tanh();
            assert!((tanh - want).abs() < f64::powi(2.0, -23), "tanh({x}): {tanh}, want {want}");
        }
    }

    #[test]
    fn extremes() {
        let of = |x| Arch::new().dispatch(Of(x));
        assert_eq!(of(0.0), [1.0, 0.0]);
        assert_eq!(of(f32::NEG_INFINITY), [0.0, -1.0]);
        assert_eq!(of(f32::MIN), [0.0, -1.0]);
        assert_eq!(of(f32::INFINITY)[1], 1.0);
        assert!(of(f32::NAN).iter().all(|y| y.is_nan()));
    }
}
