//! Tensors as rows in double precision, and rounding back.

use float8::F8E4M3;
use gqa_plan::{Layout, Problem};
use gqa_tensor::Tensor;
use half::{bf16, f16};

/// The heads of a query-like tensor.
pub(super) struct Heads {
    values: Vec<f64>,
    layout: Layout,
    /// The number of heads of the whole tensor, of which these are a part.
    heads: usize,
    /// The first of these.
    first: usize,
    rows: usize,
    size: usize,
}

impl Heads {
    /// Heads `first..` of a tensor with `heads` heads of `size` elements and `rows` rows.
    pub(super) fn new(
        p: &Problem,
        tensor: &Tensor,
        heads: usize,
        first: usize,
        rows: usize,
        size: usize,
    ) -> Self {
        Self { values: tensor.to_f64(), layout: p.layout, heads, first, rows, size }
    }

    /// One row of one head.
    pub(super) fn row(&self, b: usize, head: usize, s: usize) -> &[f64] {
        let start =
            place(self.layout, self.heads, self.rows, [b, self.first + head, s]) * self.size;
        &self.values[start..start + self.size]
    }
}

/// The heads of a cache.
pub(super) fn bnsh(values: Vec<f64>, heads: usize, rows: usize, size: usize) -> Heads {
    Heads { values, layout: Layout::Bnsh, heads, first: 0, rows, size }
}

/// Number of the row `s` of a head in memory.
pub(super) fn place(layout: Layout, heads: usize, rows: usize, [b, head, s]: [usize; 3]) -> usize {
    match layout {
        Layout::Bsnh => (b * rows + s) * heads + head,
        Layout::Bnsh => (b * heads + head) * rows + s,
    }
}

/// Rounds `values` into the elements of `tensor` from `start` on.
pub(super) fn store(tensor: &mut Tensor, start: usize, values: &[f64]) {
    fn put<T: Copy>(to: &mut [T], start: usize, values: &[f64], round: impl Fn(f64) -> T) {
        let to = to[start..start + values.len()].iter_mut();
        to.zip(values).for_each(|(to, &x)| *to = round(x));
    }
    match tensor {
        Tensor::F32(a) => put(a.as_slice_mut(), start, values, |x| x as f32),
        Tensor::F16(a) => put(a.as_slice_mut(), start, values, |x| f16::from_f32(to_odd(x))),
        Tensor::BF16(a) => put(a.as_slice_mut(), start, values, |x| bf16::from_f32(to_odd(x))),
        Tensor::I32(a) => put(a.as_slice_mut(), start, values, |x| x as i32),
        Tensor::I64(a) => put(a.as_slice_mut(), start, values, |x| x as i64),
        Tensor::F64(a) => put(a.as_slice_mut(), start, values, |x| x),
        Tensor::Bool(a) => put(a.as_slice_mut(), start, values, |x| x != 0.0),
        Tensor::I8(a) => put(a.as_slice_mut(), start, values, |x| x as i8),
        Tensor::U8(a) => put(a.as_slice_mut(), start, values, |x| x as u8),
        Tensor::F8E4M3(a) => {
            put(a.as_slice_mut(), start, values, |x| F8E4M3::from_f64(x.clamp(-448.0, 448.0)))
        }
    }
}

/// The nearest value of the tensor's type.
pub(super) fn rounded(p: &Problem, mut values: Vec<f64>) -> Vec<f64> {
    let mut row = Tensor::zeros(p.dtype, &[values.len()]);
    store(&mut row, 0, &values);
    values.clone_from(&row.to_f64());
    values
}

/// Rounds `x` to float32 such that rounding further gives the same as rounding `x` directly (round
/// to odd): of the two neighbours of an inexact value, the one with an odd last bit.
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let bits = nearest.to_bits();
    if nearest.is_nan() || f64::from(nearest) == x || bits % 2 == 1 {
        nearest
    } else if f64::from(nearest).abs() > x.abs() {
        f32::from_bits(bits - 1)
    } else {
        f32::from_bits(bits + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_happens_once() {
        let tie = 1.0 + f64::powi(2.0, -11);
        assert_eq!(f16::from_f32(to_odd(tie)), f16::ONE);
        assert_eq!(
            f16::from_f32(to_odd(tie + f64::powi(2.0, -40))).to_bits(),
            f16::ONE.to_bits() + 1
        );
        assert_eq!(
            f16::from_f32(to_odd(-tie - f64::powi(2.0, -40))).to_bits(),
            (-f16::ONE).to_bits() + 1
        );
        let tie = 1.0 + f64::powi(2.0, -8);
        assert_eq!(bf16::from_f32(to_odd(tie - f64::powi(2.0, -50))), bf16::ONE);
        assert_eq!(
            bf16::from_f32(to_odd(tie + f64::powi(2.0, -50))).to_bits(),
            bf16::ONE.to_bits() + 1
        );
    }

    #[test]
    fn extremes_round_as_they_should() {
        assert_eq!(f16::from_f32(to_odd(65519.99)), f16::MAX);
        assert_eq!(f16::from_f32(to_odd(65520.0)), f16::INFINITY);
        assert_eq!(f16::from_f32(to_odd(1e300)), f16::INFINITY);
        assert_eq!(f16::from_f32(to_odd(1e-300)), f16::ZERO);
        assert_eq!(to_odd(f64::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(to_odd(f64::NAN).is_nan());
    }
}
