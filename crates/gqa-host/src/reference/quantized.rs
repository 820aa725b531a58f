//! Rows of a quantized cache: quantization and dequantization.

use crate::{QuantFormat, Quantization, Scales};
use float8::F8E4M3;

/// How one of the two caches is quantized.
pub(super) struct Codes {
    /// What its quantized values are.
    pub(super) how: Quantization,
    /// One, one for each KV head, or those of each KV head's elements.
    pub(super) scales: Vec<f64>,
}

impl Codes {
    /// The scale of element `i` of a KV head of `size` elements.
    fn scale(&self, head: usize, size: usize, i: usize) -> f64 {
        match self.how.scales {
            Scales::PerTensor => self.scales[0],
            Scales::PerHead => self.scales[head],
            Scales::PerChannel => self.scales[head * size + i],
        }
    }

    /// Bytes of a row of `size` numbers.
    pub(super) fn bytes(&self, size: usize) -> usize {
        size / self.how.codes_per_element()
    }

    /// A row's quantized values. The quotient of a number and its scale is one of single precision.
    pub(super) fn encode(&self, head: usize, row: &[f64]) -> Vec<u8> {
        let quotient =
            |(i, &x): (usize, &f64)| f64::from(x as f32 / self.scale(head, row.len(), i) as f32);
        let quotients: Vec<f64> = row.iter().enumerate().map(quotient).collect();
        let integer = |x: f64, least, most| x.round_ties_even().clamp(least, most) as i8;
        match self.how.format {
            QuantFormat::Int8 => {
                quotients.iter().map(|&x| integer(x, -128.0, 127.0) as u8).collect()
            }
            QuantFormat::Float8 => quotients
                .iter()
                .map(|&x| F8E4M3::from_f64(x.clamp(-448.0, 448.0)).to_bits())
                .collect(),
            QuantFormat::Int4 => {
                let code = |x| (integer(x, -8.0, 7.0) + 8) as u8;
                quotients.chunks_exact(2).map(|x| code(x[0]) | code(x[1]) << 4).collect()
            }
        }
    }

    /// The dequantized values of a row.
    pub(super) fn decode(&self, head: usize, bytes: &[u8]) -> Vec<f64> {
        let codes: Vec<f64> = match self.how.format {
            QuantFormat::Int8 => bytes.iter().map(|&code| f64::from(code as i8)).collect(),
            QuantFormat::Float8 => {
                bytes.iter().map(|&code| F8E4M3::from_bits(code).to_f64()).collect()
            }
            QuantFormat::Int4 => {
                let number = |code: u8| f64::from(code) - 8.0;
                bytes.iter().flat_map(|&two| [number(two & 15), number(two >> 4)]).collect()
            }
        };
        let number = |(i, code)| code * self.scale(head, codes.len(), i);
        codes.iter().copied().enumerate().map(number).collect()
    }
}
