//! Elements of a KV cache as they are stored, read as vectors of `f32`.
//!
//! A decode step is bound by memory: converting a tile into a buffer first would move three to five
//! times the bytes. So a vector is converted in registers, where it is multiplied. Scales of a
//! quantized KV cache are not applied here.

use super::native::{self, EXPONENT, FLOAT4, FLOAT8_UNIT, LEAST};
use super::prefetch::Later;
use super::row_starts::Starts;
use bytemuck::Pod;
use half::{bf16, f16};
use pulp::Simd;
use std::slice;

/// An element of a KV cache as it is stored, read as vectors.
pub trait Stored: Pod {
    /// Numbers that one of these is.
    const NUMBERS: usize = 1;

    /// The power of two that the converted elements still have to be multiplied by.
    const UNIT: f32 = 1.0;

    /// Vector `i` of a row, in that unit.
    ///
    /// # Safety
    ///
    /// The row has that vector: a bounds check would cost too much in loops this short. The caller
    /// runs inside `native::dispatch`, since vectors of `V3` need F16C.
    unsafe fn vector<S: Simd>(simd: S, row: &[Self], i: usize) -> S::f32s;
}

/// A quantized value of 8 bits.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Int8(u8);

/// A quantized value that is a float8e4m3fn.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Float8(u8);

/// Two 4-bit quantized values, the first in the low half.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Int4(u8);

/// Two 4-bit quantized values that are float4e2m1, the first in the low half.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Float4(u8);

impl Stored for f32 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(_: S, row: &[f32], i: usize) -> S::f32s {
        // SAFETY: the caller's
        S::as_simd_f32s(unsafe { lanes::<S, _>(row, i) }).0[0]
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: &[f16], i: usize) -> S::f32s {
        // SAFETY: the caller's
        let lanes = unsafe { lanes::<S, _>(row, i) };
        native::f16(simd, bytemuck::cast_slice(lanes))
            .unwrap_or_else(|| each(simd, lanes, |x| f32_of_f16(*x)))
    }
}

impl Stored for bf16 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: &[bf16], i: usize) -> S::f32s {
        // SAFETY: the caller's
        let lanes = unsafe { lanes::<S, _>(row, i) };
        native::bf16(simd, bytemuck::cast_slice(lanes))
            .unwrap_or_else(|| each(simd, lanes, |x| f32::from_bits(u32::from(x.to_bits()) << 16)))
    }
}

impl Stored for Int8 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: &[Int8], i: usize) -> S::f32s {
        // SAFETY: the caller's
        let lanes = unsafe { lanes::<S, _>(row, i) };
        native::int8(simd, bytemuck::cast_slice(lanes))
            .unwrap_or_else(|| each(simd, lanes, |x| f32::from(x.0 as i8)))
    }
}

impl Stored for Float8 {
    const UNIT: f32 = FLOAT8_UNIT;

    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: &[Float8], i: usize) -> S::f32s {
        // SAFETY: the caller's
        let lanes = unsafe { lanes::<S, _>(row, i) };
        native::float8(simd, bytemuck::cast_slice(lanes))
            .unwrap_or_else(|| each(simd, lanes, |x| f32_of_float8(x.0)))
    }
}

impl Stored for Int4 {
    const NUMBERS: usize = 2;

    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: &[Int4], i: usize) -> S::f32s {
        // SAFETY: the caller's
        let lanes = unsafe { lanes::<S, _>(row, i) };
        native::int4(simd, bytemuck::cast_slice(lanes)).unwrap_or_else(|| {
            let halves = lanes.iter().flat_map(|two| [two.0 & 15, two.0 >> 4]);
            each(simd, halves, |half| f32::from(half) - 8.0)
        })
    }
}

impl Stored for Float4 {
    const NUMBERS: usize = 2;

    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: &[Float4], i: usize) -> S::f32s {
        // SAFETY: the caller's
        let lanes = unsafe { lanes::<S, _>(row, i) };
        native::float4(simd, bytemuck::cast_slice(lanes)).unwrap_or_else(|| {
            let halves = lanes.iter().flat_map(|two| [two.0 & 15, two.0 >> 4]);
            each(simd, halves, |half| FLOAT4[usize::from(half)])
        })
    }
}

/// Converts float16 by integer operations, which vectors of any width have. The library `half`
/// converts groups of eight.
#[inline(always)]
fn f32_of_f16(x: f16) -> f32 {
    /// Mantissa bits of float32 beyond those of float16.
    const DROPPED: u32 = 13;
    /// Difference of the exponent biases of float32 and float16.
    const BIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(x.to_bits());
    let (sign, size) = ((bits & 0x8000) << 16, bits & 0x7fff);
    let widened = (size << DROPPED) + BIAS;
    // Infinity and NaN get a further exponent bias. Subnormals are normalised by adding and
    // subtracting a power of two.
    let widened = if size >= 0x7c00 { widened + BIAS } else { widened };
    let exponent = BIAS + (1 << 23);
    let small = f32::from_bits(widened + (1 << 23)) - f32::from_bits(exponent);
    let number = if size < 0x400 { small } else { f32::from_bits(widened) };
    f32::from_bits(number.to_bits() | sign)
}

/// Reinterprets e4m3 as scaled float16, in units of [`FLOAT8_UNIT`], subnormals included, then maps
/// NaN.
#[inline(always)]
fn f32_of_float8(bits: u8) -> f32 {
    let number = i16::from(bits as i8) << 7 & !EXPONENT;
    let nan = (number + LEAST) & EXPONENT;
    f32_of_f16(f16::from_bits((number | nan) as u16))
}

/// The elements of a vector.
///
/// # Safety
///
/// The row has them.
#[inline(always)]
unsafe fn lanes<S: Simd, E: Stored>(row: &[E], i: usize) -> &[E] {
    let count = S::F32_LANES / E::NUMBERS;
    debug_assert!((i + 1) * count <= row.len());
    // SAFETY: the caller's
    unsafe { row.get_unchecked(i * count..(i + 1) * count) }
}

/// Fallback without a conversion instruction: lane by lane.
#[inline(always)]
fn each<S: Simd, E>(
    simd: S,
    from: impl IntoIterator<Item = E>,
    number: impl Fn(E) -> f32,
) -> S::f32s {
    let mut vector = simd.splat_f32s(0.0);
    let to: &mut [f32] = bytemuck::cast_slice_mut(slice::from_mut(&mut vector));
    to.iter_mut().zip(from).for_each(|(to, from)| *to = number(from));
    vector
}

/// Rows of a tile, wherever they are.
pub struct StoredRows<'a, E> {
    elements: &'a [E],
    /// In elements; all rows are within them.
    starts: Starts,
    /// Elements of a row.
    size: usize,
}

impl<'a, E: Stored> StoredRows<'a, E> {
    /// Rows of `numbers` elements, with these starts in elements.
    ///
    /// # Panics
    ///
    /// Where a row is not within the elements.
    pub fn new(elements: &'a [E], starts: Starts, numbers: usize) -> Self {
        let (starts, size) = (starts.in_units(E::NUMBERS), numbers / E::NUMBERS);
        let is_there = |last| elements.get(last..).is_some_and(|rest: &[E]| size <= rest.len());
        assert!(starts.last().is_none_or(is_there), "rows of a cache");
        Self { elements, starts, size }
    }

    /// The rows, to be read later.
    pub(super) fn later(&self) -> Later<'_> {
        Later::new(self.elements, &self.starts, self.size)
    }

    /// Numbers of a row.
    pub(super) fn numbers(&self) -> usize {
        self.size * E::NUMBERS
    }

    /// Rows.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(super) fn count(&self) -> usize {
        self.starts.count()
    }

    /// A row, if there is one of that number.
    #[cfg(any(target_arch = "x86_64", test))]
    #[inline(always)]
    pub(super) fn get(&self, row: usize) -> Option<&'a [E]> {
        (row < self.count()).then(|| self.row(row))
    }

    /// A row.
    ///
    /// # Panics
    ///
    /// Where there is none of that number.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> &'a [E] {
        let start = self.starts.get(row).expect("a row of the tile");
        // SAFETY: `new` has looked at the last one
        unsafe { self.elements.get_unchecked(start..start + self.size) }
    }
}

/// Keys and values of a tile.
pub enum StoredTile<'a> {
    /// Of single precision.
    F32([StoredRows<'a, f32>; 2]),
    /// Of half precision.
    F16([StoredRows<'a, f16>; 2]),
    /// Of bfloat16.
    BF16([StoredRows<'a, bf16>; 2]),
    /// Quantized to 8 bits.
    Int8([StoredRows<'a, Int8>; 2]),
    /// Quantized to float8e4m3fn.
    Float8([StoredRows<'a, Float8>; 2]),
    /// Quantized to 4-bit integers.
    Int4([StoredRows<'a, Int4>; 2]),
    /// Quantized to float4e2m1.
    Float4([StoredRows<'a, Float4>; 2]),
}

impl StoredTile<'_> {
    /// The keys, to be read later.
    pub(super) fn later_keys(&self) -> Later<'_> {
        match self {
            StoredTile::F32([keys, _]) => keys.later(),
            StoredTile::F16([keys, _]) => keys.later(),
            StoredTile::BF16([keys, _]) => keys.later(),
            StoredTile::Int8([keys, _]) => keys.later(),
            StoredTile::Float8([keys, _]) => keys.later(),
            StoredTile::Int4([keys, _]) => keys.later(),
            StoredTile::Float4([keys, _]) => keys.later(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::{Arch, Scalar256b, WithSimd};

    /// Converts all values of an 8-bit or 16-bit type, vector by vector.
    struct All<'a, E>(&'a [E]);

    impl<E: Stored> WithSimd for All<'_, E> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let vectors = 0..self.0.len() * E::NUMBERS / S::F32_LANES.max(E::NUMBERS);
            let mut numbers = Vec::new();
            for i in vectors {
                // SAFETY: the slice has that many elements; `native::dispatch` runs this, or
                // vectors are arrays
                let vector = [unsafe { E::vector(simd, self.0, i) }];
                numbers.extend_from_slice(bytemuck::cast_slice(&vector));
            }
            numbers
        }
    }

    #[track_caller]
    fn check<E: Stored>(elements: &[E], want: impl Iterator<Item = f32>) {
        let want: Vec<f32> = want.collect();
        let mut all = vec![("no instruction", All(elements).with_simd(Scalar256b))];
        #[cfg(target_arch = "x86_64")]
        {
            use pulp::x86::{V3, V4};
            let arches = [V3::try_new().map(Arch::V3), V4::try_new().map(Arch::V4)];
            let run = |arch| native::dispatch(arch, All(elements));
            all.extend(
                ["AVX2", "AVX-512"]
                    .into_iter()
                    .zip(arches)
                    .filter_map(|(name, arch)| Some((name, run(arch?)))),
            );
        }
        #[cfg(not(target_arch = "x86_64"))]
        all.push(("this processor", native::dispatch(Arch::new(), All(elements))));
        for (name, got) in all {
            assert_eq!(got.len(), want.len());
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let got = got * E::UNIT;
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{name}, element {i}: {got} for {want}");
            }
        }
    }

    #[test]
    fn vectors_are_the_numbers_of_the_libraries() {
        let halves: Vec<_> = (0..=u16::MAX).map(f16::from_bits).collect();
        check(&halves, halves.iter().map(|x| x.to_f32()));
        let brains: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).collect();
        check(&brains, brains.iter().map(|x| x.to_f32()));
        let bytes = || 0..=u8::MAX;
        check(&bytes().map(Int8).collect::<Vec<_>>(), bytes().map(|x| f32::from(x as i8)));
        let e4m3 = |x| float8::F8E4M3::from_bits(x).to_f32();
        check(&bytes().map(Float8).collect::<Vec<_>>(), bytes().map(e4m3));
        let nibbles = |x: u8| [x & 15, x >> 4].map(|x| f32::from(x) - 8.0);
        check(&bytes().map(Int4).collect::<Vec<_>>(), bytes().flat_map(nibbles));
        let e2m1 = |x: u8| [x & 15, x >> 4].map(|x| FLOAT4[usize::from(x)]);
        check(&bytes().map(Float4).collect::<Vec<_>>(), bytes().flat_map(e2m1));
    }
}
