//! Merges attention over parts of the keys into attention over all keys.

use crate::backend::cpu::{Rayon, each};
use gqa_tensor::{DType, Error, Result, TensorView, TensorViewMut};
use half::{bf16, f16};

/// Attention over some of the keys: `output` of shape (batch, rows, heads, size), of a
/// floating-point type, and the natural logarithms of its softmax denominators, float32 of shape
/// (batch, heads, rows). -inf marks a row without keys in this part; its output is ignored.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// Attention's output.
    pub output: TensorView<'a>,
    /// Log-sum-exps.
    pub lse: &'a [f32],
}

/// Merges attention over parts of the keys into attention over all of them: `output`, of the parts'
/// type or float32, and `lse`. Exact up to rounding for any partition of the keys, with an
/// attention sink in one part at most.
///
/// `shape` is (batch, rows, heads, size).
///
/// ```
/// use gqa_host::{State, TensorView, TensorViewMut, merge_states};
/// let (a, b) = ([1.0f32, 2.0], [3.0f32, 4.0]);
/// let part = |x, lse| State { output: TensorView::F32(x), lse };
/// let (mut output, mut lse) = ([0.0f32; 2], [0.0f32]);
/// merge_states(
///     &[part(&a, &[0.0]), part(&b, &[0.0])],
///     [1, 1, 1, 2],
///     TensorViewMut::F32(&mut output),
///     &mut lse,
/// )?;
/// assert_eq!((output, lse), ([2.0, 3.0], [2.0f32.ln()]));
/// # Ok::<(), gqa_host::Error>(())
/// ```
///
/// # Errors
///
/// Unless tensors have as many elements as `shape` says, and the same floating-point type.
pub fn merge_states(
    states: &[State<'_>],
    shape: [usize; 4],
    output: TensorViewMut<'_>,
    lse: &mut [f32],
) -> Result<()> {
    check(states, shape, output.view(), lse)?;
    let [_, rows, heads, size] = shape;
    let merge = Merge { states, rows, heads, size };
    for (i, lse) in lse.iter_mut().enumerate() {
        *lse = merge.denominator(i) as f32;
    }
    match output {
        TensorViewMut::F32(output) => merge.run(output, |x| x as f32),
        TensorViewMut::F64(output) => merge.run(output, |x| x),
        TensorViewMut::F16(output) => merge.run(output, f16::from_f64),
        TensorViewMut::BF16(output) => merge.run(output, bf16::from_f64),
        other => {
            let allowed = "float32, float16, bfloat16 or float64";
            return Err(Error::invalid("output", other.dtype(), allowed));
        }
    }
    Ok(())
}

/// Checks that everything has as many elements as `shape`, and that outputs have one type.
fn check(
    states: &[State<'_>],
    shape: [usize; 4],
    output: TensorView<'_>,
    lse: &[f32],
) -> Result<()> {
    let [batch, rows, heads, _] = shape;
    let allowed = format!("the elements of {shape:?}");
    let Some(elements) = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n)) else {
        return Err(Error::invalid("shape", allowed, "less"));
    };
    let dtype = states.first().map(|state| state.output.dtype());
    let refuse = |name, got: TensorView<'_>| {
        let got = format!("{} elements of {}", got.len(), got.dtype());
        Err(Error::invalid(name, got, allowed.clone()))
    };
    for State { output, .. } in states {
        let is_like_first = Some(output.dtype()) == dtype && output.dtype().is_float();
        if !is_like_first || output.len() != elements {
            return refuse("states", *output);
        }
    }
    let is_like_states = dtype.is_none_or(|dtype| [dtype, DType::F32].contains(&output.dtype()));
    if !is_like_states || output.len() != elements {
        return refuse("output", output);
    }
    let mut lses = states.iter().map(|state| state.lse).chain([lse]);
    match lses.find(|lse| lse.len() != batch * rows * heads) {
        Some(lse) => {
            let allowed = format!("{}, one for each row", batch * rows * heads);
            Err(Error::invalid("lse", format!("{} numbers", lse.len()), allowed))
        }
        None => Ok(()),
    }
}

struct Merge<'a> {
    states: &'a [State<'a>],
    rows: usize,
    heads: usize,
    size: usize,
}

impl Merge<'_> {
    /// The log-sum-exp over all parts, for element `i` of their log-sum-exps.
    fn denominator(&self, i: usize) -> f64 {
        let all = || self.states.iter().map(|state| f64::from(state.lse[i]));
        let most = all().fold(f64::NEG_INFINITY, f64::max);
        match most.is_finite() {
            true => most + all().map(|lse| (lse - most).exp()).sum::<f64>().ln(),
            // -inf where there is nothing else; NaN stays.
            false => all().sum(),
        }
    }

    fn run<T: Send>(&self, output: &mut [T], round: impl Fn(f64) -> T + Sync) {
        /// Heads that a thread takes at once.
        const HEADS: usize = 64;
        let size = self.size.max(1);
        each(&Rayon, output.chunks_mut(HEADS * size).enumerate(), |(part, to)| {
            let mut sums = vec![0.; self.size];
            for (at, to) in (part * HEADS..).zip(to.chunks_exact_mut(size)) {
                self.head(at, &mut sums);
                to.iter_mut().zip(&sums).for_each(|(to, &sum)| *to = round(sum));
            }
        });
    }

    /// The output of head-row `at`, counted over all.
    fn head(&self, at: usize, sums: &mut [f64]) {
        let (row, head) = (at / self.heads, at % self.heads);
        let (entry, row) = (row / self.rows, row % self.rows);
        let i = (entry * self.heads + head) * self.rows + row;
        let denominator = self.denominator(i);
        sums.fill(0.);
        for state in self.states.iter().filter(|state| state.lse[i] != f32::NEG_INFINITY) {
            let weight = (f64::from(state.lse[i]) - denominator).exp();
            add(sums, weight, state.output, at * self.size);
        }
    }
}

/// Adds `weight` times the elements from `first` on.
fn add(sums: &mut [f64], weight: f64, from: TensorView<'_>, first: usize) {
    fn each<T: Copy>(sums: &mut [f64], weight: f64, from: &[T], exact: impl Fn(T) -> f64) {
        sums.iter_mut().zip(from).for_each(|(sum, &x)| *sum += weight * exact(x));
    }
    match from {
        TensorView::F32(from) => each(sums, weight, &from[first..], f64::from),
        TensorView::F64(from) => each(sums, weight, &from[first..], |x| x),
        TensorView::F16(from) => each(sums, weight, &from[first..], f16::to_f64),
        TensorView::BF16(from) => each(sums, weight, &from[first..], bf16::to_f64),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part<'a>(output: &'a [f32], lse: &'a [f32]) -> State<'a> {
        State { output: TensorView::F32(output), lse }
    }

    fn merged(states: &[State<'_>]) -> ([f32; 2], [f32; 2]) {
        let (mut output, mut lse) = ([5.0; 2], [5.0; 2]);
        merge_states(states, [1, 2, 1, 1], TensorViewMut::F32(&mut output), &mut lse).unwrap();
        (output, lse)
    }

    #[test]
    fn parts_weigh_what_their_denominators_say_and_those_without_keys_nothing() {
        let (none, lse) = ([f32::NAN; 2], [f32::NEG_INFINITY; 2]);
        let ln3 = 3f32.ln();
        let (output, merged_lse) = merged(&[
            part(&[1.0, 8.0], &[0.0, 900.0]),
            part(&none, &lse),
            part(&[5.0, 2.0], &[ln3, -900.0]),
        ]);
        assert_eq!(output, [4.0, 8.0]);
        assert!((merged_lse[0] - 4f32.ln()).abs() < 1e-6 && merged_lse[1] == 900.0);
        assert_eq!(merged(&[part(&none, &lse)]), ([0.0; 2], lse));
    }

    #[test]
    fn a_log_sum_exp_that_is_not_a_number_stays() {
        let (output, lse) =
            merged(&[part(&[1.0; 2], &[f32::NAN, 0.0]), part(&[1.0; 2], &[0.0; 2])]);
        assert!(output[0].is_nan() && lse[0].is_nan() && output[1] == 1.0);
        let (output, lse) = merged(&[part(&[1.0; 2], &[f32::NAN; 2])]);
        assert!(output[0].is_nan() && lse[0].is_nan());
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let (output, lse) = ([0f32; 2], [0f32; 2]);
        for (states, shape, named) in [
            (vec![part(&output, &lse), part(&output[1..], &lse)], [1, 2, 1, 1], "states"),
            (vec![part(&output, &lse[1..])], [1, 2, 1, 1], "lse"),
            (vec![part(&output, &lse)], [1, 1, 1, 2], "lse"),
            (vec![], [1, 3, 1, 1], "output"),
            (vec![], [usize::MAX, 2, 1, 1], "shape"),
        ] {
            let (mut to, mut to_lse) = ([0f32; 2], [0f32; 2]);
            let to = TensorViewMut::F32(&mut to);
            let error = merge_states(&states, shape, to, &mut to_lse).unwrap_err().to_string();
            assert!(error.starts_with(named), "{error}");
        }
    }
}
