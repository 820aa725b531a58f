//! Elements of a KV cache as they are stored, read as vectors of `f32`.
//!
//! A decode step waits for memory: converting a tile into a buffer first would move three to five
//! times the bytes. Here a vector is converted in registers, where it is multiplied. Scales of a
//! quantized KV cache are not applied here.

use super::panel::KEYS;
use super::prefetch::Later;
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};
use std::slice;

/// What a cache may hold.
pub trait CacheElement: Copy {
    /// Numbers that one of these is.
    const NUMBERS: usize;
}

/// The same as vectors. Those of `V3` need F16C: only what [`dispatch`] runs may ask for them.
pub(super) trait Stored: CacheElement {
    /// Vector number `i` of a row.
    fn vector<S: Simd>(simd: S, row: &[Self], i: usize) -> S::f32s;
}

/// A quantized value of 8 bits.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Int8(u8);

/// A quantized value that is a float8e4m3fn.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Float8(u8);

/// Two quantized values of 4 bits, the first in the low half.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Int4(u8);

macro_rules! numbers {
    ($($element:ty: $numbers:literal),*) => {
        $(impl CacheElement for $element {
            const NUMBERS: usize = $numbers;
        })*
    };
}
numbers!(f32: 1, f16: 1, bf16: 1, Int8: 1, Float8: 1, Int4: 2);

impl Stored for f32 {
    #[inline(always)]
    fn vector<S: Simd>(_: S, row: &[f32], i: usize) -> S::f32s {
        S::as_simd_f32s(row).0[i]
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn vector<S: Simd>(simd: S, row: &[f16], i: usize) -> S::f32s {
        let lanes = lanes::<S, _>(row, i);
        native::f16(simd, lanes).unwrap_or_else(|| {
            let mut vector = simd.splat_f32s(0.0);
            let to: &mut [f32] = bytemuck::cast_slice_mut(slice::from_mut(&mut vector));
            to.iter_mut().zip(lanes).for_each(|(to, &x)| *to = f32_of_f16(x));
            vector
        })
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn vector<S: Simd>(simd: S, row: &[bf16], i: usize) -> S::f32s {
        let bits = native::halves(simd, bytemuck::cast_slice(lanes::<S, _>(row, i)));
        simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(bits, simd.splat_u32s(16)))
    }
}

impl Stored for Int8 {
    #[inline(always)]
    fn vector<S: Simd>(simd: S, row: &[Int8], i: usize) -> S::f32s {
        let bits = native::bytes(simd, bytemuck::cast_slice(lanes::<S, _>(row, i)));
        // Without its sign bit turned it would count from -128 on.
        integers(simd, simd.xor_u32s(bits, simd.splat_u32s(0x80)), 128)
    }
}

impl Stored for Float8 {
    #[inline(always)]
    fn vector<S: Simd>(simd: S, row: &[Float8], i: usize) -> S::f32s {
        /// Bits of a mantissa of single precision that the type has not.
        const DROPPED: u32 = 20;
        /// What exponents of single precision count beyond those of the type.
        const BIAS: u32 = (127 - 7) << 23;
        let bits = native::bytes(simd, bytemuck::cast_slice(lanes::<S, _>(row, i)));
        let size = simd.and_u32s(bits, simd.splat_u32s(0x7f));
        let normal = simd.add_u32s(
            simd.wrapping_dyn_shl_u32s(size, simd.splat_u32s(DROPPED)),
            simd.splat_u32s(BIAS),
        );
        let least = simd.splat_f32s(f32::from_bits((127 - 9) << 23));
        let subnormal = simd.mul_f32s(integers(simd, size, 0), least);
        let subnormal = simd.transmute_u32s_f32s(subnormal);
        let number =
            simd.select_u32s(simd.less_than_u32s(size, simd.splat_u32s(8)), subnormal, normal);
        let is_nan = simd.equal_u32s(size, simd.splat_u32s(0x7f));
        let number = simd.select_u32s(is_nan, simd.splat_u32s(f32::NAN.to_bits()), number);
        let sign = simd
            .wrapping_dyn_shl_u32s(simd.and_u32s(bits, simd.splat_u32s(0x80)), simd.splat_u32s(24));
        simd.transmute_f32s_u32s(simd.or_u32s(number, sign))
    }
}

impl Stored for Int4 {
    #[inline(always)]
    fn vector<S: Simd>(simd: S, row: &[Int4], i: usize) -> S::f32s {
        let bytes = &row[i * S::F32_LANES / 2..][..S::F32_LANES / 2];
        let nibbles = native::nibbles(simd, bytemuck::cast_slice(bytes));
        integers(simd, simd.and_u32s(nibbles, simd.splat_u32s(15)), 8)
    }
}

/// The number as the library `half` has it, which converts in groups of eight, by integers that
/// vectors of any width have.
#[inline(always)]
pub fn f32_of_f16(x: f16) -> f32 {
    /// Bits of a mantissa of single precision that half precision has not.
    const DROPPED: u32 = 13;
    /// What exponents of single precision count beyond those of half precision.
    const BIAS: u32 = (127 - 15) << 23;
    let bits = u32::from(x.to_bits());
    let (sign, size) = ((bits & 0x8000) << 16, bits & 0x7fff);
    let widened = (size << DROPPED) + BIAS;
    // Above these is infinity or none; below those are multiples of the smallest number, to which
    // the exponent is added and taken away.
    let widened = if size >= 0x7c00 { widened + BIAS } else { widened };
    let exponent = BIAS + (1 << 23);
    let small = f32::from_bits(widened + (1 << 23)) - f32::from_bits(exponent);
    let number = if size < 0x400 { small } else { f32::from_bits(widened) };
    f32::from_bits(number.to_bits() | sign)
}

/// The elements of a vector.
#[inline(always)]
fn lanes<S: Simd, E>(row: &[E], i: usize) -> &[E] {
    &row[i * S::F32_LANES..][..S::F32_LANES]
}

/// Numbers below 2²³, less `zero`.
#[inline(always)]
fn integers<S: Simd>(simd: S, bits: S::u32s, zero: u32) -> S::f32s {
    // Next to this number floats are 1 apart.
    let unit = 8_388_608.0f32;
    let shifted = simd.transmute_f32s_u32s(simd.or_u32s(bits, simd.splat_u32s(unit.to_bits())));
    simd.sub_f32s(shifted, simd.splat_f32s(unit + zero as f32))
}

/// Runs `op` with the widest vectors there are, and such conversions as go with them.
pub(super) fn dispatch<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
    native::dispatch(arch, op)
}

/// Runs `op` with the same vectors as its caller, and in a function of its own: many in one take
/// the compiler longer, and one processor.
#[inline(always)]
pub(super) fn apart<S: Simd, Op: WithSimd>(simd: S, op: Op) -> Op::Output {
    native::apart(simd, op)
}

/// What has instructions of its own.
#[cfg(target_arch = "x86_64")]
mod native {
    use super::{f16, plain};
    use pulp::x86::{V3, V4};
    use pulp::{Arch, Scalar, Simd, WithSimd};
    use std::any::Any;
    use std::arch::x86_64::*;

    /// What [`with_f16c`] runs with.
    #[inline(always)]
    fn v3<S: Simd>(simd: &S) -> Option<&V3> {
        <dyn Any>::downcast_ref(simd)
    }

    #[inline(always)]
    fn v4<S: Simd>(simd: &S) -> Option<&V4> {
        <dyn Any>::downcast_ref(simd)
    }

    /// As many half-precision numbers as a vector has lanes, where an instruction converts them.
    #[inline(always)]
    pub(super) fn f16<S: Simd>(simd: S, from: &[f16]) -> Option<S::f32s> {
        if let (true, Some(from)) = (v3(&simd).is_some(), from.first_chunk::<8>()) {
            // SAFETY: 16 bytes are read; V3 runs inside `with_f16c` only, where there is F16C
            let vector = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) };
            return Some(bytemuck::cast(vector));
        }
        let (v4, from) = (v4(&simd)?, from.first_chunk::<16>()?);
        // SAFETY: 32 bytes are read; V4 has AVX
        let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        Some(bytemuck::cast(v4.avx512f._mm512_cvtph_ps(bits)))
    }

    /// Bytes, one to a lane.
    #[inline(always)]
    pub(super) fn bytes<S: Simd>(simd: S, from: &[u8]) -> S::u32s {
        if let (true, Some(from)) = (v3(&simd).is_some(), from.first_chunk::<8>()) {
            // SAFETY: 8 bytes are read; V3 has AVX2
            return bytemuck::cast(unsafe {
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.as_ptr().cast()))
            });
        }
        if let (Some(v4), Some(from)) = (v4(&simd), from.first_chunk::<16>()) {
            // SAFETY: 16 bytes are read; SSE2 is everywhere
            let bits = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
            return bytemuck::cast(v4.avx512f._mm512_cvtepu8_epi32(bits));
        }
        plain::bytes(simd, from)
    }

    /// Numbers of 16 bits, one to a lane.
    #[inline(always)]
    pub(super) fn halves<S: Simd>(simd: S, from: &[u16]) -> S::u32s {
        if let (true, Some(from)) = (v3(&simd).is_some(), from.first_chunk::<8>()) {
            // SAFETY: 16 bytes are read; V3 has AVX2
            return bytemuck::cast(unsafe {
                _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()))
            });
        }
        if let (Some(v4), Some(from)) = (v4(&simd), from.first_chunk::<16>()) {
            // SAFETY: 32 bytes are read; V4 has AVX
            let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
            return bytemuck::cast(v4.avx512f._mm512_cvtepu16_epi32(bits));
        }
        plain::halves(simd, from)
    }

    /// Half bytes in the low bits of a lane each, the low half of a byte first.
    #[inline(always)]
    pub(super) fn nibbles<S: Simd>(simd: S, from: &[u8]) -> S::u32s {
        let word = |i: usize| from[4 * i..].first_chunk().map(|bytes| i32::from_le_bytes(*bytes));
        if let (true, Some(word)) = (v3(&simd).is_some(), word(0)) {
            // SAFETY: V3 has AVX2
            return bytemuck::cast(unsafe {
                let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts)
            });
        }
        if let (Some(v4), Some(low), Some(high)) = (v4(&simd), word(0), word(1)) {
            let (v4, set) = (v4.avx512f, v4.avx._mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let words = v4._mm512_inserti64x4::<1>(v4._mm512_set1_epi32(low), {
                // SAFETY: V4 has AVX
                unsafe { _mm256_set1_epi32(high) }
            });
            let shifts = v4._mm512_broadcast_i64x4(set);
            return bytemuck::cast(v4._mm512_srlv_epi32(words, shifts));
        }
        plain::nibbles(simd, from)
    }

    pub(super) fn dispatch<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
        match arch {
            // SAFETY: the features were found
            Arch::V3(simd) if is_x86_feature_detected!("f16c") => unsafe { with_f16c(simd, op) },
            Arch::V3(_) => op.with_simd(Scalar),
            arch => arch.dispatch(op),
        }
    }

    #[inline(always)]
    pub(super) fn apart<S: Simd, Op: WithSimd>(simd: S, op: Op) -> Op::Output {
        match (v3(&simd), v4(&simd)) {
            // SAFETY: V3 runs inside `with_f16c` only, so the features were found
            (Some(simd), _) => unsafe { with_f16c(*simd, op) },
            // SAFETY: there is a V4 where its features were found only
            (_, Some(simd)) => unsafe { with_avx512(*simd, op) },
            _ => simd.vectorize(op),
        }
    }

    /// What `V3` stands for, and F16C, which processors with AVX2 have.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt,f16c")]
    fn with_f16c<Op: WithSimd>(simd: V3, op: Op) -> Op::Output {
        op.with_simd(simd)
    }

    /// What `V4` stands for.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
    #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
    fn with_avx512<Op: WithSimd>(simd: V4, op: Op) -> Op::Output {
        op.with_simd(simd)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod native {
    use super::f16;
    pub(super) use super::plain::{bytes, halves, nibbles};
    use pulp::{Arch, Simd, WithSimd};

    pub(super) fn f16<S: Simd>(_: S, _: &[f16]) -> Option<S::f32s> {
        None
    }

    pub(super) fn dispatch<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
        arch.dispatch(op)
    }

    #[inline(always)]
    pub(super) fn apart<S: Simd, Op: WithSimd>(simd: S, op: Op) -> Op::Output {
        simd.vectorize(op)
    }
}

/// The same on every processor.
mod plain {
    use pulp::Simd;
    use std::slice;

    #[inline(always)]
    pub(super) fn bytes<S: Simd>(simd: S, from: &[u8]) -> S::u32s {
        each(simd, from.iter().map(|byte| u32::from(*byte)))
    }

    #[inline(always)]
    pub(super) fn halves<S: Simd>(simd: S, from: &[u16]) -> S::u32s {
        each(simd, from.iter().map(|half| u32::from(*half)))
    }

    #[inline(always)]
    pub(super) fn nibbles<S: Simd>(simd: S, from: &[u8]) -> S::u32s {
        each(simd, from.iter().flat_map(|byte| [*byte, byte >> 4].map(u32::from)))
    }

    #[inline(always)]
    fn each<S: Simd>(simd: S, lanes: impl Iterator<Item = u32>) -> S::u32s {
        let mut vector = simd.splat_u32s(0);
        let to: &mut [u32] = bytemuck::cast_slice_mut(slice::from_mut(&mut vector));
        to.iter_mut().zip(lanes).for_each(|(to, lane)| *to = lane);
        vector
    }
}

/// Rows of a tile, wherever they are.
pub struct StoredRows<'a, E> {
    elements: &'a [E],
    /// Of each row.
    starts: [usize; KEYS],
}

impl<'a, E: CacheElement> StoredRows<'a, E> {
    /// Rows that start at these elements.
    pub fn new(elements: &'a [E], starts: impl Iterator<Item = usize>) -> Self {
        let mut all = [0; KEYS];
        all.iter_mut().zip(starts).for_each(|(to, start)| *to = start / E::NUMBERS);
        Self { elements, starts: all }
    }

    /// The first rows, of so many numbers each, to be read later.
    pub(super) fn later(&self, count: usize, numbers: usize) -> Later<'_> {
        Later::new(self.elements, &self.starts[..count], numbers / E::NUMBERS)
    }

    /// A row of so many numbers.
    #[inline(always)]
    pub(super) fn row(&self, row: usize, numbers: usize) -> &'a [E] {
        &self.elements[self.starts[row]..][..numbers / E::NUMBERS]
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
    /// Quantized to 4 bits.
    Int4([StoredRows<'a, Int4>; 2]),
}

impl StoredTile<'_> {
    /// The first keys, of so many numbers each, to be read later.
    pub(super) fn later_keys(&self, count: usize, numbers: usize) -> Later<'_> {
        match self {
            StoredTile::F32([keys, _]) => keys.later(count, numbers),
            StoredTile::F16([keys, _]) => keys.later(count, numbers),
            StoredTile::BF16([keys, _]) => keys.later(count, numbers),
            StoredTile::Int8([keys, _]) => keys.later(count, numbers),
            StoredTile::Float8([keys, _]) => keys.later(count, numbers),
            StoredTile::Int4([keys, _]) => keys.later(count, numbers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of all elements that there are of a type, vector by vector.
    struct All<'a, E>(&'a [E]);

    impl<E: Stored> WithSimd for All<'_, E> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let vectors = 0..self.0.len() * E::NUMBERS / S::F32_LANES.max(E::NUMBERS);
            let mut numbers = Vec::new();
            for i in vectors {
                let vector = [E::vector(simd, self.0, i)];
                numbers.extend_from_slice(bytemuck::cast_slice(&vector));
            }
            numbers
        }
    }

    #[track_caller]
    fn check<E: Stored>(elements: &[E], want: impl Iterator<Item = f32>) {
        let got = dispatch(Arch::new(), All(elements));
        let want: Vec<f32> = want.collect();
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "element {i}: {got} for {want}");
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
    }
}
