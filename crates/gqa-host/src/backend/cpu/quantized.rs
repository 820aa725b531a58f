//! Rows of a quantized cache: quantization and dequantization.

use crate::{Error, Problem, QuantFormat, Quantization, Result, Scales, TensorView};
use gqa_cpu::{CacheElement, Starts, StoredRows, StoredTile};
use gqa_kernels::num::{Code, Float8, Int4, Int8};

/// How one of the two caches is quantized.
#[derive(Clone, Copy)]
pub(super) struct Codes<'a> {
    how: Quantization,
    /// One, one for each KV head, or those of each KV head's elements.
    scales: &'a [f32],
}

impl<'a> Codes<'a> {
    /// Where the cache is quantized; `scale` is the input `name`.
    pub(super) fn of(
        p: &Problem,
        name: &'static str,
        scale: Option<TensorView<'a>>,
    ) -> Result<Option<Self>> {
        let Some(how) = p.quantized else { return Ok(None) };
        match scale {
            Some(TensorView::F32(scales)) if scales.len() >= p.scales().unwrap_or(1) => {
                Ok(Some(Self { how, scales }))
            }
            _ => Err(Error::invalid(name, "no scales", "those of the problem")),
        }
    }

    /// Numbers that a byte holds.
    pub(super) fn numbers_per_byte(self) -> usize {
        self.how.codes_per_element()
    }

    /// Bytes of so many numbers.
    pub(super) fn bytes(self, numbers: usize) -> usize {
        numbers / self.how.codes_per_element()
    }

    /// The quantized values of a row of a KV head.
    pub(super) fn encode(self, head: usize, row: &[f32], to: &mut [u8]) {
        let scales = self.scales_of(head, row.len());
        let quotient = |i: usize| row[i] / scales[if scales.len() == 1 { 0 } else { i }];
        match self.how.format {
            QuantFormat::Int8 => {
                let codes = (0..row.len()).map(|i| Int8::encode(quotient(i)) as u8);
                to.iter_mut().zip(codes).for_each(|(to, code)| *to = code);
            }
            QuantFormat::Float8 => {
                let codes = (0..row.len()).map(|i| Float8::encode(quotient(i)) as u8);
                to.iter_mut().zip(codes).for_each(|(to, code)| *to = code);
            }
            QuantFormat::Int4 => {
                let code = |i| Int4::encode(quotient(i)) as u8;
                to.iter_mut()
                    .enumerate()
                    .for_each(|(i, to)| *to = code(2 * i) | code(2 * i + 1) << 4);
            }
        }
    }

    /// The numbers of rows of `size` quantized values of a KV head: of each pair the first's into
    /// the second.
    pub(super) fn decode<'r>(
        self,
        head: usize,
        size: usize,
        rows: impl Iterator<Item = (&'r [u8], &'r mut [f32])>,
    ) {
        let scales = self.scales_of(head, size);
        match self.how.format {
            QuantFormat::Int8 => widen::<gqa_cpu::Int8>(scales, rows),
            QuantFormat::Float8 => widen::<gqa_cpu::Float8>(scales, rows),
            QuantFormat::Int4 => widen::<gqa_cpu::Int4>(scales, rows),
        }
    }

    /// What `bytes` of keys and of values hold: rows of these sizes that start at these elements.
    pub(super) fn stored<'r>(
        self,
        bytes: [&'r [u8]; 2],
        starts: [Starts; 2],
        sizes: [usize; 2],
    ) -> StoredTile<'r> {
        match self.how.format {
            QuantFormat::Int8 => StoredTile::Int8(rows(bytes, starts, sizes)),
            QuantFormat::Float8 => StoredTile::Float8(rows(bytes, starts, sizes)),
            QuantFormat::Int4 => StoredTile::Int4(rows(bytes, starts, sizes)),
        }
    }

    /// The scale of each element of a KV head, or of all.
    pub(super) fn scales_of(self, head: usize, size: usize) -> &'a [f32] {
        match self.how.scales {
            Scales::PerTensor => &self.scales[..1],
            Scales::PerHead => &self.scales[head..][..1],
            Scales::PerChannel => &self.scales[head * size..][..size],
        }
    }
}

/// Rows of keys and of values.
fn rows<'r, E: CacheElement>(
    bytes: [&'r [u8]; 2],
    [keys, values]: [Starts; 2],
    [key_size, value_size]: [usize; 2],
) -> [StoredRows<'r, E>; 2] {
    let [key, value] = bytes.map(bytemuck::cast_slice);
    [StoredRows::new(key, keys, key_size), StoredRows::new(value, values, value_size)]
}

/// The numbers of rows of quantized values, times their scales.
fn widen<'r, E: CacheElement>(
    scales: &[f32],
    rows: impl Iterator<Item = (&'r [u8], &'r mut [f32])>,
) {
    E::widen_scaled(scales, &mut rows.map(|(codes, to)| (bytemuck::cast_slice(codes), to)));
}
