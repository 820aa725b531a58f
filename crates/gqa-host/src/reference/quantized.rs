//! Quantization and dequantization of cache rows.

use float8::F8E4M3;
use gqa_plan::{QuantFormat, Quantization, Scales};

/// The quantization of keys or of values.
pub(super) struct Codes {
    /// Format and granularity.
    pub(super) how: Quantization,
    /// The scales: one, one per KV head, one per channel, or one per cache row.
    pub(super) scales: Vec<f64>,
}

/// The non-negative values of float4e2m1, by their codes. Negative values have codes larger by 8.
const FLOAT4: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The code of the nearest value; ties to the even code.
fn float4(x: f64) -> u8 {
    let distance = |code: &u8| (FLOAT4[usize::from(*code)] - x.abs().min(6.0)).abs();
    let nearer = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    let code = (0..8).min_by(nearer).unwrap_or(0);
    if x.is_sign_negative() { code + 8 } else { code }
}

/// A row of the cache.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Its number in the cache's tensor.
    pub(super) number: usize,
    /// Its KV head.
    pub(super) head: usize,
}

impl Codes {
    /// The scale of element `i` of a row of `size` elements.
    fn scale(&self, row: Row, size: usize, i: usize) -> f64 {
        match self.how.scales {
            Scales::PerTensor => self.scales[0],
            Scales::PerHead => self.scales[row.head],
            Scales::PerChannel => self.scales[row.head * size + i],
            Scales::PerToken => self.scales[row.number],
        }
    }

    /// The per-token scale, which maps the row's largest absolute value to the largest quantized
    /// value: a float32 quotient, or 1 where that is not a normal number.
    fn scale_of(&self, row: &[f64]) -> f64 {
        let most = match self.how.format {
            QuantFormat::Int8 => 127.0,
            QuantFormat::Int4 => 7.0,
            QuantFormat::Float8 => 448.0,
            QuantFormat::Float4 => 6.0,
        };
        let top = row.iter().fold(0.0, |top: f64, x| top.max(x.abs())) as f32;
        let scale = top / most;
        let is_finite = row.iter().all(|x| x.is_finite());
        if is_finite && scale.is_normal() { f64::from(scale) } else { 1.0 }
    }

    /// Bytes of a row of `size` values.
    pub(super) fn bytes(&self, size: usize) -> usize {
        size / self.how.codes_per_element()
    }

    /// Quantizes a new row. Values are divided by the scale in float32.
    pub(super) fn encode(&mut self, row: Row, values: &[f64]) -> Vec<u8> {
        if self.how.scales == Scales::PerToken {
            self.scales[row.number] = self.scale_of(values);
        }
        let quotient =
            |(i, &x): (usize, &f64)| f64::from(x as f32 / self.scale(row, values.len(), i) as f32);
        let quotients: Vec<f64> = values.iter().enumerate().map(quotient).collect();
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
            QuantFormat::Float4 => {
                quotients.chunks_exact(2).map(|x| float4(x[0]) | float4(x[1]) << 4).collect()
            }
        }
    }

    /// The dequantized values of a row.
    pub(super) fn decode(&self, row: Row, bytes: &[u8]) -> Vec<f64> {
        let codes: Vec<f64> = match self.how.format {
            QuantFormat::Int8 => bytes.iter().map(|&code| f64::from(code as i8)).collect(),
            QuantFormat::Float8 => {
                bytes.iter().map(|&code| F8E4M3::from_bits(code).to_f64()).collect()
            }
            QuantFormat::Int4 => {
                let number = |code: u8| f64::from(code) - 8.0;
                bytes.iter().flat_map(|&two| [number(two & 15), number(two >> 4)]).collect()
            }
            QuantFormat::Float4 => {
                let size = |code: u8| FLOAT4[usize::from(code % 8)];
                let number = |code: u8| if code < 8 { size(code) } else { -size(code) };
                bytes.iter().flat_map(|&two| [number(two & 15), number(two >> 4)]).collect()
            }
        };
        let number = |(i, code)| code * self.scale(row, codes.len(), i);
        codes.iter().copied().enumerate().map(number).collect()
    }
}
