//! Comparison with the oracle: non-finite positions first, then the worst element.

use crate::Case;
use gqa_host::op::Outputs;
use gqa_host::{DType, Tensor};

/// `|got - want| <= absolute + relative · |want|`.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// In the output's unit.
    pub absolute: f64,
    /// Fraction of the expected value.
    pub relative: f64,
}

impl Tolerance {
    /// What rounding of the operands allows. P is rounded to the element type before the product
    /// with V (tensor cores) and the output is rounded once more. A score `x` computed in float32
    /// is off by about `ε·|x|`, and its weight by that fraction, so the float32 bound grows with
    /// the scores. So does the bound of a rotated or normalised 16-bit call: near a tie, float32
    /// and double precision round an element of such a query or key to different neighbours. And
    /// that of one with a quantized cache, whose numbers most kernels round to the element type.
    /// Errors of P matter more if the values are further apart.
    pub fn of(case: &Case) -> Self {
        let scores = f64::from(case.score_deviation()).max(1.0);
        let rounded = case.rotary.is_some() || case.qk_norm || case.quantized.is_some();
        let ties = if rounded { scores * spread_of_values(case) } else { 1.0 };
        match case.dtype {
            DType::F16 => Self { absolute: 4e-3 * ties, relative: 4e-3 },
            DType::BF16 => Self { absolute: 2e-2 * ties, relative: 2e-2 },
            _ => Self { absolute: 2e-5 * scores, relative: 1e-4 },
        }
    }

    /// The bound where P is rounded to four significant bits: by up to 1/16 each, so that the
    /// output may be off by 1/16 of the values' deviation from their mean. The oracle rounds
    /// queries itself.
    pub(crate) fn of_float8(case: &Case) -> Self {
        Self { absolute: 3.0 / 16.0 * spread_of_values(case), relative: 2e-2 }
    }
}

/// Standard deviation of values, at least one: in a packed query they have that of queries.
fn spread_of_values(case: &Case) -> f64 {
    if case.packed { f64::from(case.spread).max(1.0) } else { 1.0 }
}

impl Tolerance {
    /// The bound for values that both sides divide by `scale` and round to float8e4m3fn: up to 1/16
    /// each, and half a step for small values.
    pub(crate) fn quantized(self, scale: f32) -> Self {
        let absolute = self.absolute / f64::from(scale) + 1.0 / 512.0;
        Self { absolute, relative: self.relative + 0.14 }
    }
}

/// Size of the differences met so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors {
    /// Largest absolute difference.
    pub max: f64,
    /// Sum of squared differences.
    pub squares: f64,
    /// Elements compared.
    pub count: usize,
}

impl Errors {
    /// Root of the mean squared difference.
    pub fn rms(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }

    /// Joins two counts.
    pub fn merge(&mut self, other: &Self) {
        self.max = self.max.max(other.max);
        self.squares += other.squares;
        self.count += other.count;
    }
}

/// Compares every output; returns the error of `output`. `Err` describes the worst element out of
/// tolerance.
pub fn compare(got: &Outputs, want: &Outputs, tolerance: Tolerance) -> Result<Errors, String> {
    let errors = tensors("output", &got.output, &want.output, tolerance)?;
    let exact = Tolerance { absolute: 0.0, relative: 0.0 };
    let keys = if want.present_key.dtype().is_float() { tolerance } else { exact };
    tensors("present_key", &got.present_key, &want.present_key, keys)?;
    tensors("present_value", &got.present_value, &want.present_value, exact)?;
    optional("output_qk", &got.output_qk, &want.output_qk, tolerance)?;
    optional("lse", &got.lse, &want.lse, tolerance)?;
    Ok(errors)
}

/// Errs where `got` was rounded to `dtype` on the way: all of its values are representable in
/// `dtype`, and many of `want` are not.
pub(crate) fn unrounded(got: &Tensor, want: &Tensor, dtype: DType) -> Result<(), String> {
    const MANY: usize = 16;
    let finer = |tensor: &Tensor| {
        let numbers: Vec<_> = tensor.to_f64().into_iter().map(|x| x as f32).collect();
        let rounded = Tensor::from_f32(dtype, &[numbers.len()], &numbers);
        let rounded = rounded.expect("a floating-point type").to_f64();
        let pairs = numbers.iter().map(|&x| f64::from(x)).zip(rounded);
        pairs.filter(|(x, rounded)| x.is_finite() && x != rounded).count()
    };
    match (finer(got), finer(want)) {
        (0, MANY..) => Err(format!("output: all of it is rounded to {dtype}")),
        _ => Ok(()),
    }
}

/// Errs unless every byte is `want`'s.
pub(crate) fn equal_codes(name: &str, got: &Tensor, want: &Tensor) -> Result<(), String> {
    let differs = || got.bytes().iter().zip(want.bytes()).position(|(got, want)| got != want);
    match differs() {
        None if got.shape() == want.shape() => Ok(()),
        at => Err(format!("{name}: byte {at:?} differs")),
    }
}

/// The largest error from rounding several terms or factors to `dtype`.
fn rounding(dtype: DType) -> f64 {
    // Four: two elements, a scale for each channel, and large elements that the quantized values
    // clamp.
    match dtype {
        DType::BF16 => 4.0 / 128.0,
        DType::F16 => 4.0 / 1024.0,
        _ => 4.0 * f64::from(f32::EPSILON),
    }
}

/// k_scale of one side and of the other one.
pub(crate) type KeyScales<'a> = [&'a Tensor; 2];

/// Checks per-token scales against `want`: those of values bit for bit; those of keys nearly, where
/// keys are rounded to `dtype` first. Returns the scales of keys in the latter case.
pub(crate) fn row_scales<'a>(
    got: &'a Option<[Tensor; 2]>,
    want: &'a Option<[Tensor; 2]>,
    dtype: DType,
    rounds: bool,
) -> Result<Option<KeyScales<'a>>, String> {
    let (Some(got), Some(want)) = (got, want) else {
        return match (got, want) {
            (None, None) => Ok(None),
            _ => Err("k_scale: present on one side only".to_owned()),
        };
    };
    equal_codes("v_scale", &got[1], &want[1])?;
    match rounds {
        true => {
            let tolerance = Tolerance { absolute: 0.0, relative: rounding(dtype) };
            tensors("k_scale", &got[0], &want[0], tolerance)?;
        }
        false => equal_codes("k_scale", &got[0], &want[0])?,
    }
    Ok(Some([&got[0], &want[0]]))
}

/// Checks that every quantized value equals `want`'s, or differs by rounding to `dtype` before
/// (including the rounding of its per-token scale).
pub(crate) fn codes_rounded_before(
    name: &str,
    got: &Tensor,
    want: &Tensor,
    scales: Option<KeyScales<'_>>,
    dtype: DType,
) -> Result<(), String> {
    if let Some(scales) = scales {
        return rows_rounded_before(name, [got, want], scales, dtype);
    }
    match want.dtype() {
        DType::F8E4M3 => float8_rounded_before(name, got, want, dtype),
        _ => neighbouring_codes(name, got, want),
    }
}

/// Checks that every dequantized value with a per-token scale equals `want`'s, or differs by
/// rounding to `dtype` before.
fn rows_rounded_before(
    name: &str,
    codes: [&Tensor; 2],
    scales: KeyScales<'_>,
    dtype: DType,
) -> Result<(), String> {
    let ([got, want], [got_scales, want_scales]) = (codes.map(numbers), scales.map(Tensor::to_f64));
    let size = (want.len() / want_scales.len().max(1)).max(1);
    for (number, (got, want)) in got.chunks(size).zip(want.chunks(size)).enumerate() {
        let [got_scale, want_scale] = [got_scales[number], want_scales[number]];
        // Rows that the cache does not hold.
        if got_scale.is_nan() && want_scale.is_nan() {
            continue;
        }
        let top = want.iter().fold(0.0, |top: f64, x| top.max(x.abs())) * want_scale.abs();
        // The step to the next quantized value: 1 for integers, an eighth for float8e4m3fn, and
        // less for its subnormals.
        let absolute = 1.01 * want_scale.abs() + rounding(dtype) * top;
        let tolerance = Tolerance { absolute, relative: 1.0 / 8.0 };
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            let [got, want] = [got * got_scale, want * want_scale];
            if excess(got, want, tolerance).0 > 0.0 {
                return Err(format!(
                    "{name}: row {number}, element {i}: got {got:e}, want {want:e}, largest {top:e}"
                ));
            }
        }
    }
    Ok(())
}

/// The dequantized values before multiplication by their scales.
fn numbers(codes: &Tensor) -> Vec<f64> {
    let number = |half: u8| f64::from(half) - 8.0;
    match codes {
        Tensor::U8(bytes) => {
            bytes.iter().flat_map(|&two| [number(two & 15), number(two >> 4)]).collect()
        }
        codes => codes.to_f64(),
    }
}

/// Checks that every quantized value equals `want`'s or is next to it.
fn neighbouring_codes(name: &str, got: &Tensor, want: &Tensor) -> Result<(), String> {
    let tolerance = gqa_onnx::Tolerance::of(want.dtype());
    let found = gqa_onnx::compare(got, want, &[], tolerance).map_err(|e| format!("{name}: {e}"))?;
    match found.worst {
        None => Ok(()),
        Some(worst) => Err(format!("{name}: {worst:?}")),
    }
}

/// As above for float8e4m3fn, whose values are dense near zero: a small element of a rotated row
/// may be the difference of two large ones, each rounded to `dtype`.
fn float8_rounded_before(
    name: &str,
    got: &Tensor,
    want: &Tensor,
    dtype: DType,
) -> Result<(), String> {
    let rounding = rounding(dtype);
    let row = want.shape().last().map_or(1, |&size| size.max(1));
    let (got, want) = (got.to_f64(), want.to_f64());
    for (number, (got, want)) in got.chunks(row).zip(want.chunks(row)).enumerate() {
        let top = want.iter().fold(0.0, |top: f64, x| top.max(x.abs()));
        // The next value is up to an eighth away; next to a subnormal, 2⁻⁹.
        let tolerance = Tolerance { absolute: rounding * top + 1.0 / 512.0, relative: 1.0 / 8.0 };
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            if excess(got, want, tolerance).0 > 0.0 {
                return Err(format!(
                    "{name}: row {number}, element {i}: got {got:e}, want {want:e}, largest {top:e}"
                ));
            }
        }
    }
    Ok(())
}

pub(crate) fn optional(
    name: &str,
    got: &Option<Tensor>,
    want: &Option<Tensor>,
    tolerance: Tolerance,
) -> Result<(), String> {
    match (got, want) {
        (Some(got), Some(want)) => tensors(name, got, want, tolerance).map(|_| ()),
        (None, None) => Ok(()),
        _ => Err(format!("{name}: present on one side only")),
    }
}

pub(crate) fn tensors(
    name: &str,
    got: &Tensor,
    want: &Tensor,
    tolerance: Tolerance,
) -> Result<Errors, String> {
    if got.shape() != want.shape() {
        return Err(format!("{name}: shape {:?}, want {:?}", got.shape(), want.shape()));
    }
    let shape = want.shape().to_vec();
    let mut errors = Errors::default();
    let mut worst: Option<(f64, usize, f64, f64)> = None;
    for (i, (got, want)) in got.to_f64().into_iter().zip(want.to_f64()).enumerate() {
        let (excess, difference) = excess(got, want, tolerance);
        errors.merge(&Errors { max: difference, squares: difference * difference, count: 1 });
        if excess > worst.map_or(0.0, |w| w.0) {
            worst = Some((excess, i, got, want));
        }
    }
    match worst {
        None => Ok(errors),
        Some((_, i, got, want)) => Err(format!(
            "{name}{:?}: got {got:e}, want {want:e} within {:e} + {:e}·|want|",
            index(i, &shape),
            tolerance.absolute,
            tolerance.relative
        )),
    }
}

/// Coordinates of element number `flat`.
fn index(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&size| {
            let coordinate = flat % size;
            flat /= size;
            coordinate
        })
        .collect();
    index.reverse();
    index
}

/// The distance beyond the tolerance (0: within), and the finite difference.
fn excess(got: f64, want: f64, tolerance: Tolerance) -> (f64, f64) {
    if !got.is_finite() || !want.is_finite() {
        let same = got == want || (got.is_nan() && want.is_nan());
        return (if same { 0.0 } else { f64::INFINITY }, 0.0);
    }
    let difference = (got - want).abs();
    let allowed = tolerance.absolute + tolerance.relative * want.abs();
    ((difference - allowed).max(0.0), difference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_were_rounded_first_are_found_out() {
        let thirds: Vec<f32> = (1..40).map(|i| i as f32 / 3.0).collect();
        let tensor =
            |dtype, values: &[f32]| Tensor::from_f32(dtype, &[values.len()], values).unwrap();
        let want = tensor(DType::F32, &thirds);
        for dtype in [DType::F16, DType::BF16] {
            let rounded = tensor(dtype, &thirds).to_f64();
            let rounded: Vec<_> = rounded.into_iter().map(|x| x as f32).collect();
            assert!(unrounded(&tensor(DType::F32, &rounded), &want, dtype).is_err());
            assert!(unrounded(&want, &want, dtype).is_ok());
        }
    }
}
