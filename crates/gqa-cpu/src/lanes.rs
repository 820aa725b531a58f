//! Query rows side by side: lane `i` of every vector belongs to row `i` of a panel.

use super::native;
use bytemuck::{Pod, Zeroable};
use pulp::Simd;

/// One number for each of the `N · S::F32_LANES` rows of a panel.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Lanes<S: Simd, const N: usize>(pub(super) [S::f32s; N]);

// SAFETY: an array of float vectors; zero bits are valid
unsafe impl<S: Simd, const N: usize> Zeroable for Lanes<S, N> {}
// SAFETY: an array of float vectors without padding; any bits are valid
unsafe impl<S: Simd, const N: usize> Pod for Lanes<S, N> {}

impl<S: Simd, const N: usize> Lanes<S, N> {
    /// Rows of a panel.
    pub(super) const COUNT: usize = N * S::F32_LANES;

    /// The same number for all rows.
    #[inline(always)]
    pub(super) fn splat(simd: S, x: f32) -> Self {
        Self([simd.splat_f32s(x); N])
    }

    /// Each row's number times its factor.
    #[inline(always)]
    pub(super) fn times(mut self, simd: S, factors: Self) -> Self {
        for n in 0..N {
            self.0[n] = simd.mul_f32s(self.0[n], factors.0[n]);
        }
        self
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

/// Lanes of the widest vector.
pub(super) const MOST: usize = 16;

/// Transposes as many vectors as each has lanes: lane `i` of vector `j` becomes lane `j` of vector
/// `i`.
#[inline(always)]
pub(super) fn transpose<S: Simd>(simd: S, block: &mut [S::f32s]) {
    assert_eq!(block.len(), S::F32_LANES, "vectors of a square");
    if native::transpose(simd, block) {
        return;
    }
    let numbers: &mut [f32] = bytemuck::cast_slice_mut(block);
    for i in 0..S::F32_LANES {
        for j in 0..i {
            numbers.swap(i * S::F32_LANES + j, j * S::F32_LANES + i);
        }
    }
}

/// Transposes rows into vector `n` of the entries: one row for each lane, with one element for each
/// entry.
#[inline(always)]
pub(super) fn rows_to_lanes<S: Simd, const N: usize>(
    simd: S,
    rows: &[f32],
    n: usize,
    entries: &mut [Lanes<S, N>],
) {
    let stride = entries.len() / S::F32_LANES;
    let rows = S::as_simd_f32s(rows).0;
    let mut block = [simd.splat_f32s(0.0); MOST];
    let block = &mut block[..S::F32_LANES];
    for (c, entries) in entries.chunks_exact_mut(S::F32_LANES).enumerate() {
        for (lane, row) in block.iter_mut().enumerate() {
            *row = rows[lane * stride + c];
        }
        transpose(simd, block);
        entries.iter_mut().zip(&*block).for_each(|(entry, numbers)| entry.0[n] = *numbers);
    }
}

/// The reverse of [`rows_to_lanes`].
#[inline(always)]
pub(super) fn lanes_to_rows<S: Simd, const N: usize>(
    simd: S,
    entries: &[Lanes<S, N>],
    n: usize,
    rows: &mut [f32],
) {
    let stride = entries.len() / S::F32_LANES;
    let rows = S::as_mut_simd_f32s(rows).0;
    let mut block = [simd.splat_f32s(0.0); MOST];
    let block = &mut block[..S::F32_LANES];
    for (c, entries) in entries.chunks_exact(S::F32_LANES).enumerate() {
        block.iter_mut().zip(entries).for_each(|(numbers, entry)| *numbers = entry.0[n]);
        transpose(simd, block);
        for (lane, row) in block.iter().enumerate() {
            rows[lane * stride + c] = *row;
        }
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

/// Selects per lane: the first operand where the mask is set, else the second. Calls of
/// [`Simd::select_f32s`] are not always inlined, and are slow then.
#[inline(always)]
pub(super) fn select<S: Simd>(simd: S, mask: S::m32s, yes: S::f32s, no: S::f32s) -> S::f32s {
    let (yes, no) = (simd.transmute_u32s_f32s(yes), simd.transmute_u32s_f32s(no));
    simd.transmute_f32s_u32s(simd.select_u32s(mask, yes, no))
}

/// 1 over each number.
#[inline(always)]
pub(super) fn inverse<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    simd.div_f32s(simd.splat_f32s(1.0), x)
}

/// Coefficients, highest power first, of a polynomial; the last terms are in the code that uses it.
type Coefficients = [f32; 5];

/// (2^r - 1) / r for |r| <= 1/2; with 1 + r times that, the relative error is below 2⁻²³.
const EXP2: Coefficients =
    [1.330_06e-3, 9.669_692e-3, 5.550_558_5e-2, 0.240_222_83, std::f32::consts::LN_2];

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

/// e^x for x < 80, relative error below 2⁻²² + 2⁻²⁵·|x|; 0 below the smallest normal number, and
/// NaN for NaN.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding this rounds to an integer and leaves it in the low bits.
    let magic = simd.splat_f32s(1.5 * 8_388_608.0);
    let log2_e = simd.splat_f32s(std::f32::consts::LOG2_E);
    let shifted = simd.mul_add_e_f32s(x, log2_e, magic);
    let r = simd.mul_add_e_f32s(x, log2_e, simd.sub_f32s(magic, shifted));
    let p = simd.mul_add_e_f32s(polynomial(simd, EXP2, r), r, simd.splat_f32s(1.0));
    let least = simd.splat_f32s(-87.0);
    if let Some(y) = native::times_power(simd, p, simd.sub_f32s(shifted, magic), x, least) {
        return y;
    }
    let exponent =
        simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let power = simd.add_u32s(exponent, simd.splat_u32s(127 << 23));
    let y = simd.mul_f32s(p, simd.transmute_f32s_u32s(power));
    select(simd, simd.less_than_f32s(x, least), simd.splat_f32s(0.0), y)
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
            let allowed = f64::powi(2.0, -22) - f64::powi(2.0, -25) * f64::from(x);
            assert!((exp / want - 1.0).abs() < allowed, "exp({x}): {exp}, want {want}");
        }
        for i in -100_000..=100_000 {
            let x = 0.000_1 * i as f32;
            let [_, tanh] = Arch::new().dispatch(Of(x));
            let want = f64::from(x).tanh();
            assert!((tanh - want).abs() < f64::powi(2.0, -23), "tanh({x}): {tanh}, want {want}");
        }
    }

    /// Rows of numbers to lanes and back.
    struct Turned;

    impl WithSimd for Turned {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let (lanes, size) = (S::F32_LANES, 3 * S::F32_LANES);
            let rows: Vec<_> = (0..lanes * size).map(|i| i as f32).collect();
            let mut entries = vec![Lanes::<S, 2>::splat(simd, -1.0); size];
            rows_to_lanes(simd, &rows, 1, &mut entries);
            for (h, entry) in entries.iter().enumerate() {
                let (untouched, turned) = entry.rows().split_at(lanes);
                assert!(untouched.iter().all(|x| *x == -1.0), "{untouched:?}");
                let want: Vec<_> = (0..lanes).map(|lane| rows[lane * size + h]).collect();
                assert_eq!(turned, want);
            }
            let mut back = vec![0.0; rows.len()];
            lanes_to_rows(simd, &entries, 1, &mut back);
            assert_eq!(back, rows);
        }
    }

    #[test]
    fn rows_become_lanes_and_rows_again() {
        Turned.with_simd(pulp::Scalar256b);
        for instructions in crate::instructions::Instructions::all() {
            native::dispatch(instructions.vectors, Turned);
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
