//! Converts rows of the KV cache to float32, once for many reads, and float32 to 16-bit elements.

use super::native;
use super::stored::{Float4, Float8, Int4, Int8, Stored};
use half::{bf16, f16};
use pulp::{Arch, Scalar256b, Simd, WithSimd};
use std::{array, slice};

/// What a cache may hold.
pub trait CacheElement: Stored {
    /// For each pair of rows, writes the elements of the first, times their scales, to the second.
    /// `scales` has one for each element, one for all, or none.
    ///
    /// # Panics
    ///
    /// Where a source row is shorter than its destination.
    fn widen_scaled<'a>(
        scales: &[f32],
        rows: &mut dyn Iterator<Item = (&'a [Self], &'a mut [f32])>,
    );
}

macro_rules! cache_element {
    ($($element:ty),*) => {$(
        impl CacheElement for $element {
            // Never inlined: compiled once, in this crate.
            #[inline(never)]
            fn widen_scaled<'a>(
                scales: &[f32],
                rows: &mut dyn Iterator<Item = (&'a [Self], &'a mut [f32])>,
            ) {
                widen(scales, rows);
            }
        }
    )*};
}
cache_element!(f32, f16, bf16, Int8, Float8, Int4, Float4);

/// Lanes of the widest vector, for types of one element each.
const WIDEST: usize = 16;

/// [`CacheElement::widen_scaled`](super::stored::CacheElement::widen_scaled).
pub(super) fn widen<'a, E: Stored>(
    scales: &[f32],
    rows: &mut dyn Iterator<Item = (&'a [E], &'a mut [f32])>,
) {
    native::dispatch(Arch::new(), Widen { scales, rows });
}

/// [`widen`], with the widest vectors of this processor.
struct Widen<'s, 'a, E> {
    scales: &'s [f32],
    rows: &'s mut dyn Iterator<Item = (&'a [E], &'a mut [f32])>,
}

impl<E: Stored> WithSimd for Widen<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match S::IS_SCALAR {
            // Some elements are more than one number.
            true => self.run(Scalar256b),
            false => self.run(simd),
        }
    }
}

impl<E: Stored> Widen<'_, '_, E> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.scales {
            [] => self.times(simd, Unscaled),
            [scale] => self.times(simd, OneScale(*scale)),
            scales => self.times(simd, Scales(scales)),
        }
    }

    #[inline(always)]
    fn times<S: Simd>(self, simd: S, factor: impl Factor) {
        for (from, to) in self.rows {
            widen_row(simd, factor, from, to);
        }
    }
}

#[inline(always)]
fn widen_row<S: Simd, E: Stored>(simd: S, factor: impl Factor, from: &[E], to: &mut [f32]) {
    /// Vectors in a turn of the loop.
    const TURN: usize = 4;
    assert!(to.len() <= from.len() * E::NUMBERS, "numbers of a row");
    let (vectors, rest) = S::as_mut_simd_f32s(to);
    let whole = vectors.len();
    let (turns, single) = vectors.as_chunks_mut::<TURN>();
    let turned = turns.len() * TURN;
    for (turn, to) in turns.iter_mut().enumerate() {
        for i in 0..TURN {
            // SAFETY: there are as many numbers as in `to`
            let numbers = unsafe { numbers(simd, from, turn * TURN + i) };
            to[i] = factor.times(simd, turn * TURN + i, numbers);
        }
    }
    for (i, to) in single.iter_mut().enumerate() {
        // SAFETY: there are as many numbers as in `to`
        let numbers = unsafe { numbers(simd, from, turned + i) };
        *to = factor.times(simd, turned + i, numbers);
    }
    if !rest.is_empty() {
        let left = &from[whole * S::F32_LANES / E::NUMBERS..];
        let left: [E; WIDEST] = array::from_fn(|i| *left.get(i).unwrap_or(&E::zeroed()));
        // SAFETY: as many elements as any vector has
        let numbers = unsafe { numbers(simd, &left, 0) };
        let numbers = [factor.times(simd, whole, numbers)];
        rest.copy_from_slice(&bytemuck::cast_slice(&numbers)[..rest.len()]);
    }
}

/// Vector `i` of a row.
///
/// # Safety
///
/// As for [`Stored::vector`].
#[inline(always)]
unsafe fn numbers<S: Simd, E: Stored>(simd: S, row: &[E], i: usize) -> S::f32s {
    // SAFETY: as the caller says
    let numbers = unsafe { E::vector(simd, row, i) };
    if E::UNIT == 1.0 { numbers } else { simd.mul_f32s(numbers, simd.splat_f32s(E::UNIT)) }
}

/// The scale of a row's elements. Not a closure: it would be compiled without the target features.
trait Factor: Copy {
    /// Vector `i` of a row times its scales.
    fn times<S: Simd>(self, simd: S, i: usize, numbers: S::f32s) -> S::f32s;
}

#[derive(Clone, Copy)]
struct Unscaled;

impl Factor for Unscaled {
    #[inline(always)]
    fn times<S: Simd>(self, _: S, _: usize, numbers: S::f32s) -> S::f32s {
        numbers
    }
}

#[derive(Clone, Copy)]
struct OneScale(f32);

impl Factor for OneScale {
    #[inline(always)]
    fn times<S: Simd>(self, simd: S, _: usize, numbers: S::f32s) -> S::f32s {
        simd.mul_f32s(numbers, simd.splat_f32s(self.0))
    }
}

#[derive(Clone, Copy)]
struct Scales<'a>(&'a [f32]);

impl Factor for Scales<'_> {
    #[inline(always)]
    fn times<S: Simd>(self, simd: S, i: usize, numbers: S::f32s) -> S::f32s {
        let (vectors, rest) = S::as_simd_f32s(self.0);
        if let Some(scales) = vectors.get(i) {
            return simd.mul_f32s(numbers, *scales);
        }
        let mut scales = [simd.splat_f32s(0.0)];
        let to: &mut [f32] = bytemuck::cast_slice_mut(&mut scales);
        to[..rest.len()].copy_from_slice(rest);
        simd.mul_f32s(numbers, scales[0])
    }
}

/// Rounds each element to float16.
pub fn narrow_to_f16(from: &[f32], to: &mut [f16]) {
    native::dispatch(Arch::new(), ToF16 { from, to: bytemuck::cast_slice_mut(to) });
}

/// [`narrow_to_f16`], with the widest vectors of this processor.
struct ToF16<'a> {
    from: &'a [f32],
    to: &'a mut [u16],
}

impl WithSimd for ToF16<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (vectors, rest) = S::as_simd_f32s(self.from);
        let (whole, left) = self.to.split_at_mut(self.from.len() - rest.len());
        for (numbers, to) in vectors.iter().zip(whole.chunks_exact_mut(S::F32_LANES)) {
            if !native::narrow_to_f16(simd, *numbers, to) {
                let numbers: &[f32] = bytemuck::cast_slice(slice::from_ref(numbers));
                to.iter_mut().zip(numbers).for_each(|(to, x)| *to = f16::from_f32(*x).to_bits());
            }
        }
        left.iter_mut().zip(rest).for_each(|(to, x)| *to = f16::from_f32(*x).to_bits());
    }
}

/// Of each number the nearest of bfloat16.
pub fn narrow_to_bf16(from: &[f32], to: &mut [bf16]) {
    native::dispatch(Arch::new(), ToBf16 { from, to });
}

/// [`narrow_to_bf16`], with the widest vectors of this processor.
struct ToBf16<'a> {
    from: &'a [f32],
    to: &'a mut [bf16],
}

impl WithSimd for ToBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            *to = bf16::from_bits(nearest(from.to_bits()));
        }
    }
}

/// Rounds to bfloat16 as the library `half` does, by integer operations that vectors have.
#[inline(always)]
fn nearest(bits: u32) -> u16 {
    /// The bits of infinity; a larger magnitude is NaN.
    const INFINITY: u32 = 0x7f80_0000;
    const QUIET: u32 = 0x40;
    let even = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + even) >> 16;
    let is_nan = bits & 0x7fff_ffff > INFINITY;
    (if is_nan { bits >> 16 | QUIET } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::iter;

    #[test]
    fn narrowed_are_the_numbers_of_the_library() {
        let bits = (0..=u16::MAX).flat_map(|high| {
            let low = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
            low.map(|low| u32::from(high) << 16 | low)
        });
        // No multiple of any vector's lanes.
        let numbers: Vec<_> = bits.map(f32::from_bits).chain([0.1, 7e4, -1e-7]).collect();
        let mut got = (vec![bf16::ZERO; numbers.len()], vec![f16::ZERO; numbers.len()]);
        narrow_to_bf16(&numbers, &mut got.0);
        narrow_to_f16(&numbers, &mut got.1);
        for (i, number) in numbers.iter().enumerate() {
            let want = (bf16::from_f32(*number), f16::from_f32(*number));
            assert_eq!(got.0[i].to_bits(), want.0.to_bits(), "{number} is {}", want.0);
            assert_eq!(got.1[i].to_bits(), want.1.to_bits(), "{number} is {}", want.1);
        }
    }

    #[track_caller]
    fn check<E: CacheElement>(bytes: &[u8], numbers: &[f32], scales: &[f32]) {
        let mut got = vec![0.0; numbers.len()];
        E::widen_scaled(scales, &mut iter::once((bytemuck::cast_slice(bytes), &mut got[..])));
        let scale = |i: usize| if scales.is_empty() { 1.0 } else { scales[i % scales.len()] };
        let want: Vec<_> = numbers.iter().enumerate().map(|(i, x)| x * scale(i)).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn rows_of_any_length_have_any_scales() {
        let bytes: Vec<u8> = (0..140).map(|i| (i * 37 % 256) as u8).collect();
        let halves = |byte: &u8| [byte & 15, byte >> 4].map(|half| f32::from(half) - 8.0);
        for length in 1..=bytes.len() {
            let bytes = &bytes[..length];
            let eights: Vec<_> = bytes.iter().map(|byte| f32::from(*byte as i8)).collect();
            let fours: Vec<_> = bytes.iter().flat_map(halves).collect();
            let scales: Vec<_> = (0..2 * length).map(|i| 0.25 + i as f32).collect();
            for each in [0, 1, length] {
                check::<Int8>(bytes, &eights, &scales[..each]);
            }
            for each in [0, 1, 2 * length] {
                check::<Int4>(bytes, &fours, &scales[..each]);
            }
        }
    }
}
