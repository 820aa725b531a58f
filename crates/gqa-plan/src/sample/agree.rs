//! Compares the outputs of two kernels.

use crate::problem::{Problem, QuantFormat};
use crate::tensors::TensorId;
use gqa_tensor::{DType, Tensor};

/// Compares a tensor as two kernels have written it.
///
/// # Errors
/// Where they differ by more than rounding; the message names the element.
pub fn agree(p: &Problem, id: TensorId, got: &Tensor, want: &Tensor) -> Result<(), String> {
    let is_cache = matches!(id, TensorId::PresentKey | TensorId::PresentValue);
    let format = p.quantized.filter(|_| is_cache).map(|how| how.format);
    let (got, want, tolerance) = match format {
        Some(format) => (ranks(got, format), ranks(want, format), Tolerance::of_codes()),
        None => (got.to_f64(), want.to_f64(), Tolerance::of(p, want.dtype())),
    };
    let columns = match (id, format) {
        (TensorId::Output, _) => p.v_head_size,
        _ => want_columns(p, id),
    };
    let rows = got.chunks(columns.max(1)).zip(want.chunks(columns.max(1)));
    for (row, (got, want)) in rows.enumerate() {
        let most = want.iter().filter(|x| x.is_finite()).fold(0f64, |most, x| most.max(x.abs()));
        let bound = tolerance.absolute.max(tolerance.relative * most);
        let differs = |(got, want): (&f64, &f64)| {
            let same = got == want || got.is_nan() && want.is_nan();
            let close = (got - want).abs() <= bound;
            !(same || close)
        };
        if let Some(column) = got.iter().zip(want).position(differs) {
            return Err(format!(
                "{}, row {row}, column {column}: {} for {}",
                id.name(),
                got[column],
                want[column]
            ));
        }
    }
    Ok(())
}

/// Elements per row of a cache, 1 for other tensors: the tolerance is relative to the row's largest
/// number.
fn want_columns(p: &Problem, id: TensorId) -> usize {
    match id {
        TensorId::PresentKey => p.head_size,
        TensorId::PresentValue => p.v_head_size,
        _ => 1,
    }
}

/// Accepted difference.
struct Tolerance {
    absolute: f64,
    /// Relative to the row's largest value.
    relative: f64,
}

impl Tolerance {
    fn of_codes() -> Self {
        Self { absolute: 2.0, relative: 0.0 }
    }

    fn of(p: &Problem, dtype: DType) -> Self {
        let relative = match (dtype, p.dtype) {
            _ if p.float8_products => 0.25,
            (DType::F8E4M3, _) => 0.15,
            (_, DType::BF16) => 0.04,
            _ => 0.02,
        };
        Self { absolute: relative / 4.0, relative }
    }
}

/// Quantized values as ordered numbers: adjacent values differ by 1.
fn ranks(tensor: &Tensor, format: QuantFormat) -> Vec<f64> {
    let signed = |code: u8, sign: u8| {
        let size = f64::from(code & (sign - 1));
        if code & sign == 0 { size } else { -size }
    };
    let bytes = tensor.bytes().iter().copied();
    match format {
        QuantFormat::Int8 => bytes.map(|byte| f64::from(byte as i8)).collect(),
        QuantFormat::Float8 => bytes.map(|byte| signed(byte, 0x80)).collect(),
        QuantFormat::Int4 => bytes.flat_map(|byte| [byte & 15, byte >> 4]).map(f64::from).collect(),
        QuantFormat::Float4 => {
            bytes.flat_map(|byte| [byte & 15, byte >> 4]).map(|code| signed(code, 8)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Dense, Heads, Layer};
    use crate::problem::{Quantization, Scales};

    fn step(quantized: Option<QuantFormat>) -> Problem {
        let layer = Layer::new(DType::F16, Heads { query: 4, kv: 2, size: 16 });
        let layer = match quantized {
            None => layer,
            Some(format) => layer.quantized(Quantization { format, scales: Scales::PerTensor }),
        };
        layer.dense(Dense::decode(1, 32)).unwrap()
    }

    #[test]
    fn rounding_is_no_difference_and_a_wrong_number_is() {
        let numbers: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
        let tensor = |numbers: &[f32]| Tensor::from_f32(DType::F16, &[1, 1, 64], numbers).unwrap();
        let check = |numbers: &[f32], want: &[f32]| {
            agree(&step(None), TensorId::Output, &tensor(numbers), &tensor(want))
        };
        let rounded: Vec<f32> = numbers.iter().map(|x| x * 1.003).collect();
        check(&rounded, &numbers).unwrap();
        for wrong in [0.0, 1.5, f32::NAN, f32::INFINITY] {
            let mut other = numbers.clone();
            other[37] = wrong;
            let error = check(&other, &numbers).unwrap_err();
            assert!(error.starts_with("output, row 2, column 5: "), "{error}");
            check(&numbers, &other).unwrap_err();
            check(&other, &other).unwrap();
        }
    }

    #[test]
    fn quantized_values_may_be_two_steps_apart() {
        let tensor = |bytes: [u8; 2]| {
            let mut tensor = Tensor::zeros(DType::U8, &[2]);
            tensor.with_bytes_mut(|to| to.copy_from_slice(&bytes));
            tensor
        };
        let check = |format, got, want| {
            agree(&step(Some(format)), TensorId::PresentKey, &tensor(got), &tensor(want))
        };
        check(QuantFormat::Int4, [0x21, 0], [0x12, 2]).unwrap();
        check(QuantFormat::Int4, [0x21, 0], [0x12, 3]).unwrap_err();
        check(QuantFormat::Float4, [0x19, 0], [0x11, 0]).unwrap();
        check(QuantFormat::Float4, [0x1a, 0], [0x11, 0]).unwrap_err();
    }
}
