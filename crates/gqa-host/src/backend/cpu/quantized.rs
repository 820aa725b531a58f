//! Quantization and dequantization of cache rows.

use gqa_cpu::{CacheElement, Starts, StoredRows, StoredTile};
use gqa_kernels::num::{Code, Float4, Float8, Int4, Int8, magnitude};
use gqa_plan::plan::{TensorId, Tensors};
use gqa_plan::{Problem, QuantFormat, Quantization, Scales};
use gqa_tensor::{CacheView, Error, Result, TensorView};
use std::iter;

/// The quantization of keys or of values.
#[derive(Clone, Copy)]
pub(super) struct Codes<'a> {
    how: Quantization,
    /// The scales: one, one per KV head, one per channel, or one per cache row.
    scales: &'a [f32],
}

/// k_scale and v_scale, from the inputs or from the cache.
pub(super) fn given_scales<'a>(
    inputs: &Tensors<TensorView<'a>>,
    row_scales: &'a Option<[CacheView<'a>; 2]>,
) -> [Option<TensorView<'a>>; 2] {
    match row_scales {
        Some(scales) => scales.each_ref().map(|scales| Some(scales.view())),
        None => [TensorId::KScale, TensorId::VScale].map(|id| inputs.input(id)),
    }
}

impl<'a> Codes<'a> {
    /// The quantization of keys and values, if the cache is quantized, with its `scales`. Values of
    /// a latent call are parts of keys, and have their scales.
    pub(super) fn of(
        p: &Problem,
        scales: [Option<TensorView<'a>>; 2],
    ) -> Result<[Option<Self>; 2]> {
        let Some(how) = p.quantized else { return Ok([None; 2]) };
        let ids = match how.scales {
            Scales::PerToken => [TensorId::KRowScale, TensorId::VRowScale],
            _ => [TensorId::KScale, TensorId::VScale],
        };
        let codes = |i: usize| {
            let count = ids[i].spec(p).map_or(0, |spec| spec.len());
            match scales[i] {
                Some(TensorView::F32(scales)) if scales.len() >= count => {
                    Ok(Some(Self { how, scales }))
                }
                _ => Err(Error::invalid(ids[i].name(), "no scales", "those of the problem")),
            }
        };
        let keys = codes(0)?;
        Ok([keys, if p.latent { keys } else { codes(1)? }])
    }

    /// Quantized values per byte.
    pub(super) fn values_per_byte(self) -> usize {
        self.how.codes_per_element()
    }

    /// Bytes of `values` quantized values.
    pub(super) fn bytes(self, values: usize) -> usize {
        values / self.how.codes_per_element()
    }

    /// The quantized values of a row of a KV head.
    pub(super) fn encode(self, head: usize, row: &[f32], to: &mut [u8]) {
        match self.scales_of(head, row.len()) {
            Some([scale]) => encode(self.how.format, row, |_| *scale, to),
            Some(scales) => encode(self.how.format, row, |i| scales[i], to),
            None => unreachable!("per-token scales are computed with the quantized values"),
        }
    }

    /// Dequantizes rows of `size` values of a KV head: for each (row of the cache, source,
    /// destination).
    pub(super) fn decode<'r>(
        self,
        head: usize,
        size: usize,
        rows: impl Iterator<Item = (usize, &'r [u8], &'r mut [f32])>,
    ) {
        let Some(scales) = self.scales_of(head, size) else {
            for (number, codes, to) in rows {
                self.widen(&self.scales[number..][..1], iter::once((codes, to)));
            }
            return;
        };
        self.widen(scales, rows.map(|(_, codes, to)| (codes, to)));
    }

    /// Dequantizes rows with these scales.
    fn widen<'r>(self, scales: &[f32], rows: impl Iterator<Item = (&'r [u8], &'r mut [f32])>) {
        match self.how.format {
            QuantFormat::Int8 => widen::<gqa_cpu::Int8>(scales, rows),
            QuantFormat::Float8 => widen::<gqa_cpu::Float8>(scales, rows),
            QuantFormat::Int4 => widen::<gqa_cpu::Int4>(scales, rows),
            QuantFormat::Float4 => widen::<gqa_cpu::Float4>(scales, rows),
        }
    }

    /// The quantized rows of keys and of values in `bytes`: their sizes, and the offsets of their
    /// first elements.
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
            QuantFormat::Float4 => StoredTile::Float4(rows(bytes, starts, sizes)),
        }
    }

    /// The scale of each element of a KV head, or of all; `None` for per-token scales.
    pub(super) fn scales_of(self, head: usize, size: usize) -> Option<&'a [f32]> {
        match self.how.scales {
            Scales::PerTensor => Some(&self.scales[..1]),
            Scales::PerHead => Some(&self.scales[head..][..1]),
            Scales::PerChannel => Some(&self.scales[head * size..][..size]),
            Scales::PerToken => None,
        }
    }

    /// The scales of these cache rows. Returns whether the cache has per-token scales.
    pub(super) fn scales_of_rows(
        self,
        numbers: impl Iterator<Item = usize>,
        to: &mut [f32],
    ) -> bool {
        let has_own = self.how.scales == Scales::PerToken;
        if has_own {
            to.iter_mut().zip(numbers).for_each(|(to, number)| *to = self.scales[number]);
        }
        has_own
    }
}

/// Quantizes a row with a per-token scale, which it returns.
pub(super) fn encode_by_itself(format: QuantFormat, row: &[f32], to: &mut [u8]) -> f32 {
    let largest = row.iter().map(|&x| magnitude(x)).max().unwrap_or(0);
    let scale = match format {
        QuantFormat::Int8 => Int8.row_scale(largest),
        QuantFormat::Int4 => Int4.row_scale(largest),
        QuantFormat::Float8 => Float8.row_scale(largest),
        QuantFormat::Float4 => Float4.row_scale(largest),
    };
    encode(format, row, |_| scale, to);
    scale
}

/// The quantized values of a row.
fn encode(format: QuantFormat, row: &[f32], scale: impl Fn(usize) -> f32, to: &mut [u8]) {
    let quotient = |i: usize| row[i] / scale(i);
    match format {
        QuantFormat::Int8 => bytes(Int8, quotient, to),
        QuantFormat::Float8 => bytes(Float8, quotient, to),
        QuantFormat::Int4 => bytes(Int4, quotient, to),
        QuantFormat::Float4 => bytes(Float4, quotient, to),
    }
}

/// The quantized values of quotients, one or two to a byte.
fn bytes<C: Code>(code: C, quotient: impl Fn(usize) -> f32, to: &mut [u8]) {
    for (i, to) in to.iter_mut().enumerate() {
        *to = match C::BITS {
            4 => code.encode_two([quotient(2 * i), quotient(2 * i + 1)]) as u8,
            _ => code.encode(quotient(i)) as u8,
        };
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

/// Dequantizes rows with their scales.
fn widen<'r, E: CacheElement>(
    scales: &[f32],
    rows: impl Iterator<Item = (&'r [u8], &'r mut [f32])>,
) {
    E::widen_scaled(scales, &mut rows.map(|(codes, to)| (bytemuck::cast_slice(codes), to)));
}
