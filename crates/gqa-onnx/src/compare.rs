//! Comparison of computed with expected outputs: positions of NaN and infinity first, then every
//! value.

use gqa_host::{DType, Tensor};

use crate::error::{Error, Result};

/// `|got - want| <= absolute + relative · |want|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// In the output's unit.
    pub absolute: f64,
    /// Fraction of the expected value.
    pub relative: f64,
}

impl Tolerance {
    /// The default for an output's element type.
    ///
    /// The tolerances for float16 and bfloat16 are those of ONNX Runtime's GroupQueryAttention
    /// tests (test_gqa.py). For float32 its CPU tests use 1e-5, absolute and relative. Another
    /// summation order loses more than that on large values, hence a relative 1e-4.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self { absolute: 1e-5, relative: 1e-4 },
            DType::F16 => Self { absolute: 5e-3, relative: 5e-3 },
            DType::BF16 => Self { absolute: 1e-2, relative: 5e-2 },
            DType::F64 => Self { absolute: 1e-12, relative: 1e-10 },
            // Near a tie, the expected quantized value or a neighbour of it is correct.
            DType::I8 | DType::U8 | DType::F8E4M3 => Self { absolute: 1.0, relative: 0.0 },
            _ => Self { absolute: 0.0, relative: 0.0 },
        }
    }

    fn allows(self, got: f64, want: f64) -> bool {
        if got.is_finite() && want.is_finite() {
            (got - want).abs() <= self.absolute + self.relative * want.abs()
        } else {
            got == want || (got.is_nan() && want.is_nan())
        }
    }

    /// Difference as a multiple of what is allowed.
    fn excess(self, got: f64, want: f64) -> f64 {
        if got.is_finite() && want.is_finite() {
            (got - want).abs() / (self.absolute + self.relative * want.abs()).max(f64::MIN_POSITIVE)
        } else {
            f64::INFINITY
        }
    }
}

/// Replacements for parts of a [`Tolerance`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// For [`Tolerance::absolute`].
    pub absolute: Option<f64>,
    /// For [`Tolerance::relative`].
    pub relative: Option<f64>,
}

impl Limits {
    /// What is set here, else what `other` has.
    pub fn or(self, other: Self) -> Self {
        Self {
            absolute: self.absolute.or(other.absolute),
            relative: self.relative.or(other.relative),
        }
    }

    /// The tolerance for an element type.
    pub fn tolerance(self, dtype: DType) -> Tolerance {
        let default = Tolerance::of(dtype);
        Tolerance {
            absolute: self.absolute.unwrap_or(default.absolute),
            relative: self.relative.unwrap_or(default.relative),
        }
    }
}

/// A half-open box of elements, in a tensor's coordinates.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Region {
    /// First coordinates inside.
    pub start: Vec<usize>,
    /// First coordinates behind.
    pub stop: Vec<usize>,
}

impl Region {
    /// The box must lie inside `shape`.
    fn check(&self, shape: &[usize]) -> Result<()> {
        let inside = self.start.len() == shape.len()
            && self.stop.len() == shape.len()
            && (0..shape.len()).all(|d| self.start[d] <= self.stop[d] && self.stop[d] <= shape[d]);
        if inside {
            return Ok(());
        }
        let got = format!("box {:?} to {:?}", self.start, self.stop);
        Err(Error::invalid("ignore.json", got, format_args!("boxes inside {shape:?}")))
    }

    fn contains(&self, index: &[usize]) -> bool {
        index.iter().enumerate().all(|(d, &i)| self.start[d] <= i && i < self.stop[d])
    }
}

/// The result of comparing two tensors of one shape and type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Numbers compared.
    pub compared: usize,
    /// Numbers in ignored boxes.
    pub ignored: usize,
    /// Elements out of tolerance.
    pub failed: usize,
    /// Largest difference; infinite where one value is out of tolerance and not finite.
    pub max_abs: f64,
    /// Largest relative difference between finite values, where the expected one is not 0.
    pub max_rel: f64,
    /// The element farthest out of tolerance.
    pub worst: Option<Worst>,
}

/// An element out of tolerance.
#[derive(Clone, Debug, PartialEq)]
pub struct Worst {
    /// Coordinates.
    pub index: Vec<usize>,
    /// Computed.
    pub got: f64,
    /// Expected.
    pub want: f64,
    /// Difference as a multiple of what is allowed.
    excess: f64,
}

impl Comparison {
    fn add(&mut self, index: &[usize], got: f64, want: f64, tolerance: Tolerance) {
        self.compared += 1;
        if got.is_finite() && want.is_finite() {
            let difference = (got - want).abs();
            self.max_abs = self.max_abs.max(difference);
            if want != 0.0 {
                self.max_rel = self.max_rel.max(difference / want.abs());
            }
        }
        if tolerance.allows(got, want) {
            return;
        }
        self.failed += 1;
        if !(got.is_finite() && want.is_finite()) {
            self.max_abs = f64::INFINITY;
        }
        let excess = tolerance.excess(got, want);
        if self.worst.as_ref().is_none_or(|worst| excess > worst.excess) {
            self.worst = Some(Worst { index: index.to_vec(), got, want, excess });
        }
    }
}

/// Compares every element outside the ignored boxes. Shape and element type must be equal.
///
/// # Errors
///
/// Where a box exceeds the tensor.
pub fn compare(
    got: &Tensor,
    want: &Tensor,
    ignored: &[Region],
    tolerance: Tolerance,
) -> Result<Comparison> {
    for region in ignored {
        region.check(want.shape())?;
    }
    let mut comparison = Comparison::default();
    let mut index = vec![0; want.shape().len()];
    let (got, each) = comparable(got);
    let (want_values, _) = comparable(want);
    for (got, want_values) in got.chunks_exact(each).zip(want_values.chunks_exact(each)) {
        if ignored.iter().any(|region| region.contains(&index)) {
            comparison.ignored += each;
        } else {
            for (got, want) in got.iter().zip(want_values) {
                comparison.add(&index, *got, *want, tolerance);
            }
        }
        advance(&mut index, want.shape());
    }
    Ok(comparison)
}

/// The compared values, and the number of values per element: elements, or the dequantized values
/// of a quantized cache in the order of the unquantized one.
fn comparable(tensor: &Tensor) -> (Vec<f64>, usize) {
    match tensor {
        Tensor::U8(bytes) => {
            (bytes.iter().flat_map(|&two| [two & 15, two >> 4]).map(f64::from).collect(), 2)
        }
        Tensor::F8E4M3(codes) => {
            let number = |code: u8| {
                let size = f64::from(code & 0x7f);
                if code & 0x80 == 0 { size } else { -size }
            };
            (codes.iter().map(|code| number(code.to_bits())).collect(), 1)
        }
        _ => (tensor.to_f64(), 1),
    }
}

/// The next coordinates in row-major order.
fn advance(index: &mut [usize], shape: &[usize]) {
    for (i, &size) in index.iter_mut().zip(shape).rev() {
        *i += 1;
        if *i < size {
            return;
        }
        *i = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use float8::F8E4M3;

    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;

    fn row(values: &[f32]) -> Tensor {
        Tensor::from(ndarray::Array1::from(values.to_vec()))
    }

    fn failures(got: &[f32], want: &[f32], tolerance: Tolerance) -> usize {
        compare(&row(got), &row(want), &[], tolerance).map_or(usize::MAX, |c| c.failed)
    }

    #[test]
    fn tolerance_is_absolute_plus_relative() {
        let tolerance = Tolerance { absolute: 0.5, relative: 0.25 };
        assert_eq!(failures(&[5.5, 2.5], &[4.0, 4.0], tolerance), 0);
        assert_eq!(failures(&[5.53, 2.47], &[4.0, 4.0], tolerance), 2);
        assert_eq!(failures(&[0.5, 0.51], &[0.0, 0.0], tolerance), 1);
    }

    #[test]
    fn non_finite_values_match_by_position_and_kind() {
        let wide = Tolerance { absolute: INF.into(), relative: 1.0 };
        assert_eq!(failures(&[NAN, INF, -INF], &[NAN, INF, -INF], wide), 0);
        assert_eq!(failures(&[NAN, INF, -INF, 1.0], &[INF, -INF, NAN, NAN], wide), 4);
        assert_eq!(failures(&[NAN, INF], &[0.0, 0.0], wide), 2);
    }

    #[test]
    fn the_worst_element_is_reported() -> Result<()> {
        let got = Tensor::from(ndarray::arr2(&[[1.0f32, 2.0], [3.5, 4.1]]));
        let want = Tensor::from(ndarray::arr2(&[[1.0f32, 2.0], [3.0, 4.0]]));
        let found = compare(&got, &want, &[], Tolerance::of(DType::F32))?;
        assert_eq!((found.compared, found.failed, found.max_abs), (4, 2, 0.5));
        let worst = found.worst.unwrap_or_else(|| unreachable!("two elements differ"));
        assert_eq!((worst.index, worst.got, worst.want), (vec![1, 0], 3.5, 3.0));
        Ok(())
    }

    #[test]
    fn codes_may_be_their_neighbours() -> Result<()> {
        let failures = |got: Tensor, want: Tensor| -> Result<usize> {
            Ok(compare(&got, &want, &[], Tolerance::of(want.dtype()))?.failed)
        };
        let bytes = |bytes: [u8; 4]| Tensor::from(ndarray::arr1(&bytes));
        assert_eq!(failures(bytes([0x10, 0x01, 0xf0, 0x20]), bytes([0, 0, 0xe1, 0]))?, 1);
        let codes = |codes: [u8; 4]| Tensor::from(ndarray::arr1(&codes.map(F8E4M3::from_bits)));
        assert_eq!(failures(codes([0x80, 0x81, 8, 0x42]), codes([1, 0, 7, 0x40]))?, 1);
        let integers = |codes: [i8; 3]| Tensor::from(ndarray::arr1(&codes));
        assert_eq!(failures(integers([-128, 0, 5]), integers([-127, -1, 7]))?, 1);
        Ok(())
    }

    #[test]
    fn ignored_boxes_are_half_open() -> Result<()> {
        let got = Tensor::from(ndarray::arr2(&[[9.0f32, 9.0, 0.0], [9.0, 9.0, 0.0]]));
        let want = Tensor::from(ndarray::arr2(&[[0.0f32; 3]; 2]));
        let region =
            |start: [usize; 2], stop: [usize; 2]| Region { start: start.into(), stop: stop.into() };
        let tolerance = Tolerance::of(DType::F32);
        assert_eq!(compare(&got, &want, &[region([0, 0], [2, 2])], tolerance)?.failed, 0);
        assert_eq!(compare(&got, &want, &[region([0, 0], [1, 2])], tolerance)?.failed, 2);
        assert_eq!(compare(&got, &want, &[region([0, 0], [2, 1])], tolerance)?.compared, 4);
        let outside = [region([0, 0], [3, 1]), region([1, 0], [0, 1])];
        for region in outside {
            assert!(compare(&got, &want, &[region], tolerance).is_err());
        }
        Ok(())
    }
}
