//! Rows of a quantised cache: numbers to codes, and codes to numbers.

use crate::{CodeFormat, Error, Problem, Quantisation, Result, Tensor};
use gqa_kernels::num::{Code, Float8, Int4, Int8};

/// How one of the two caches is quantised.
#[derive(Clone, Copy)]
pub(super) struct Codes<'a> {
    how: Quantisation,
    /// One, or those of each KV head's elements.
    scales: &'a [f32],
}

impl<'a> Codes<'a> {
    /// Where the cache is quantised; `scale` is the input `name`.
    pub(super) fn of(
        p: &Problem,
        name: &'static str,
        scale: Option<&'a Tensor>,
    ) -> Result<Option<Self>> {
        let Some(how) = p.quantised else { return Ok(None) };
        match scale {
            Some(Tensor::F32(scales)) if scales.len() >= p.scales().unwrap_or(1) => {
                Ok(Some(Self { how, scales: scales.as_slice().unwrap_or_default() }))
            }
            _ => Err(Error::invalid(name, "no scales", "those of the problem")),
        }
    }

    /// Bytes of so many numbers.
    pub(super) fn bytes(self, numbers: usize) -> usize {
        numbers / self.how.codes_per_element()
    }

    /// The codes of a row of a KV head.
    pub(super) fn encode(self, head: usize, row: &[f32], to: &mut [u8]) {
        let scale = self.scales_of(head, row.len());
        let quotient = |i: usize| row[i] / scale(i);
        match self.how.format {
            CodeFormat::Int8 => {
                let codes = (0..row.len()).map(|i| Int8::encode(quotient(i)) as u8);
                to.iter_mut().zip(codes).for_each(|(to, code)| *to = code);
            }
            CodeFormat::Float8 => {
                let codes = (0..row.len()).map(|i| Float8::encode(quotient(i)) as u8);
                to.iter_mut().zip(codes).for_each(|(to, code)| *to = code);
            }
            CodeFormat::Int4 => {
                let code = |i| Int4::encode(quotient(i)) as u8;
                to.iter_mut()
                    .enumerate()
                    .for_each(|(i, to)| *to = code(2 * i) | code(2 * i + 1) << 4);
            }
        }
    }

    /// The numbers of whole rows of `size` codes of a KV head.
    pub(super) fn decode(self, head: usize, codes: &[u8], size: usize, to: &mut [f32]) {
        let scale = self.scales_of(head, size);
        let rows = codes.chunks_exact(self.bytes(size)).zip(to.chunks_exact_mut(size));
        for (codes, row) in rows {
            match self.how.format {
                CodeFormat::Int8 => widen(codes, row, |code| Int8::decode(code.into())),
                CodeFormat::Float8 => widen(codes, row, |code| Float8::decode(code.into())),
                CodeFormat::Int4 => {
                    for (two, to) in codes.iter().zip(row.chunks_exact_mut(2)) {
                        let two = u32::from(*two);
                        to.copy_from_slice(&[Int4::decode(two), Int4::decode(two >> 4)]);
                    }
                }
            }
            row.iter_mut().enumerate().for_each(|(i, x)| *x *= scale(i));
        }
    }

    /// The scale of each element of a KV head.
    fn scales_of(self, head: usize, size: usize) -> impl Fn(usize) -> f32 {
        let (first, step) = if self.how.per_channel { (head * size, 1) } else { (0, 0) };
        move |i| self.scales[first + i * step]
    }
}

fn widen(codes: &[u8], row: &mut [f32], number: impl Fn(u8) -> f32) {
    row.iter_mut().zip(codes).for_each(|(to, &code)| *to = number(code));
}
