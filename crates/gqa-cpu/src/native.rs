//! x86-64 instructions that pulp lacks: AVX2 with F16C, which processors have together, and
//! AVX-512. With other vectors these functions return `None`.

pub(super) use of_this_processor::*;

/// The highest exponent bit of float16.
pub(super) const EXPONENT: i16 = 0x4000;

/// The lowest mantissa bit of e4m3, in float16.
pub(super) const LEAST: i16 = 0x80;

/// Numbers of float4e2m1, by their codes.
pub(super) const FLOAT4: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Difference of the exponent biases of float16 and e4m3.
pub(super) const FLOAT8_UNIT: f32 = 256.0;

#[cfg(target_arch = "x86_64")]
mod of_this_processor {
    use super::{EXPONENT, FLOAT4, LEAST};
    use bytemuck::{Pod, Zeroable};
    use pulp::x86::{V3, V4};
    use pulp::{Arch, Scalar, Simd, WithSimd};
    use std::any::{Any, TypeId};
    use std::arch::x86_64::*;

    /// Runs `op` with the vectors of `arch` and its conversion instructions.
    pub(in super::super) fn dispatch<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
        match arch {
            // SAFETY: the features were found
            Arch::V3(simd) if is_x86_feature_detected!("f16c") => unsafe { avx2::run(simd, op) },
            // SAFETY: a V4 exists only where the processor has the features
            Arch::V4(simd) => unsafe { avx512::run(simd, op) },
            _ => scalar::run(op),
        }
    }

    /// Runs `op` with the caller's vectors, as a function of its own: one large function takes the
    /// compiler longer. `S` decides in a `const` block, so that `op` is compiled for it alone.
    #[inline(always)]
    pub(in super::super) fn apart<S: Simd, Op: WithSimd>(simd: S, op: Op) -> Op::Output {
        if const { S::F32_LANES == 8 }
            && let Some(simd) = v3(&simd)
        {
            // SAFETY: V3 runs inside `avx2::run` only, so the processor has the features
            return unsafe { avx2::run(*simd, op) };
        }
        if const { S::F32_LANES == 16 }
            && let Some(simd) = v4(&simd)
        {
            // SAFETY: a V4 exists only where the processor has the features
            return unsafe { avx512::run(*simd, op) };
        }
        if const { S::IS_SCALAR } { scalar::run(op) } else { unreachable!("vectors of `dispatch`") }
    }

    // A module for each width: modules are compiled side by side, functions of one are not.

    mod avx2 {
        use super::{V3, WithSimd};

        /// What `V3` stands for, and F16C.
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt,f16c")]
        pub(super) fn run<Op: WithSimd>(simd: V3, op: Op) -> Op::Output {
            op.with_simd(simd)
        }
    }

    mod avx512 {
        use super::{V4, WithSimd};

        /// What `V4` stands for.
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
        pub(super) fn run<Op: WithSimd>(simd: V4, op: Op) -> Op::Output {
            op.with_simd(simd)
        }
    }

    mod scalar {
        use super::{Scalar, WithSimd};

        #[inline(never)]
        pub(super) fn run<Op: WithSimd>(op: Op) -> Op::Output {
            op.with_simd(Scalar)
        }
    }

    #[inline(always)]
    fn v3<S: Simd>(simd: &S) -> Option<&V3> {
        <dyn Any>::downcast_ref(simd)
    }

    #[inline(always)]
    fn v4<S: Simd>(simd: &S) -> Option<&V4> {
        <dyn Any>::downcast_ref(simd)
    }

    /// Whether it is what [`avx2::run`] runs with.
    #[inline(always)]
    fn is_v3<S: Simd>() -> bool {
        TypeId::of::<S>() == TypeId::of::<V3>()
    }

    /// The sum of each vector's lanes, with fewer shuffles than vector by vector.
    #[inline(always)]
    pub(in super::super) fn sums<S: Simd>(simd: S, of: [S::f32s; 4]) -> Option<[f32; 4]> {
        if is_v3::<S>() {
            let of: [__m256; 4] = of.map(bytemuck::cast);
            // SAFETY: V3 has AVX2
            return Some(bytemuck::cast(unsafe {
                let [a, b, c, d] = of;
                let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let (low, high) =
                    (_mm256_shuffle_ps::<FIRST>(ab, cd), _mm256_shuffle_ps::<LAST>(ab, cd));
                let quarters = _mm256_add_ps(low, high);
                _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps::<1>(quarters))
            }));
        }
        v4(&simd)?;
        let of: [__m512; 4] = of.map(bytemuck::cast);
        // SAFETY: there is a V4, whose AVX-512 this is
        Some(bytemuck::cast(unsafe {
            let [a, b, c, d] = of;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (low, high) =
                (_mm512_shuffle_ps::<FIRST>(ab, cd), _mm512_shuffle_ps::<LAST>(ab, cd));
            let quarters = _mm512_add_ps(low, high);
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(quarters)));
            let halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), high);
            _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves))
        }))
    }

    /// Multiplies each lane by 2 to an integer power; 0 where `x` is less than `least`.
    #[inline(always)]
    pub(in super::super) fn times_power<S: Simd>(
        simd: S,
        number: S::f32s,
        power: S::f32s,
        x: S::f32s,
        least: S::f32s,
    ) -> Option<S::f32s> {
        v4(&simd)?;
        let [number, power, x, least]: [__m512; 4] = [number, power, x, least].map(bytemuck::cast);
        // SAFETY: there is a V4, whose AVX-512 this is
        Some(bytemuck::cast(unsafe {
            let shown = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, least);
            _mm512_maskz_scalef_ps(shown, number, power)
        }))
    }

    /// Transposes a square of vectors.
    #[inline(always)]
    pub(in super::super) fn transpose<S: Simd>(simd: S, block: &mut [S::f32s]) -> bool {
        if let (true, Some(block)) = (is_v3::<S>(), block.first_chunk_mut::<8>()) {
            // SAFETY: V3 has AVX2
            unsafe { transpose_8(block) };
            return true;
        }
        if let (Some(_), Some(block)) = (v4(&simd), block.first_chunk_mut::<16>()) {
            // SAFETY: there is a V4, whose AVX-512 this is
            unsafe { transpose_16(block) };
            return true;
        }
        false
    }

    #[inline(always)]
    unsafe fn transpose_8<V: Pod>(block: &mut [V; 8]) {
        // No `map`: it would be called.
        let mut rows = [__m256::zeroed(); 8];
        for i in 0..8 {
            rows[i] = bytemuck::cast(block[i]);
        }
        let mut twos = rows;
        let mut fours = rows;
        // SAFETY: the caller has AVX2
        unsafe {
            for i in 0..4 {
                let (a, b) = (rows[2 * i], rows[2 * i + 1]);
                (twos[2 * i], twos[2 * i + 1]) =
                    (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            }
            // Quarter `q` of vector `4 * i + k`: column `4 * q + k` of the rows from `4 * i` on.
            for (i, k) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let (a, b) = (twos[4 * i + k], twos[4 * i + 2 + k]);
                fours[4 * i + 2 * k] = _mm256_shuffle_ps::<FIRST>(a, b);
                fours[4 * i + 2 * k + 1] = _mm256_shuffle_ps::<LAST>(a, b);
            }
            for k in 0..4 {
                let (a, b) = (fours[k], fours[4 + k]);
                twos[k] = _mm256_permute2f128_ps::<0x20>(a, b);
                twos[4 + k] = _mm256_permute2f128_ps::<0x31>(a, b);
            }
        }
        for i in 0..8 {
            block[i] = bytemuck::cast(twos[i]);
        }
    }

    #[inline(always)]
    unsafe fn transpose_16<V: Pod>(block: &mut [V; 16]) {
        /// The even quarters of both vectors, and the odd quarters of both.
        const EVEN: i32 = 0x88;
        const ODD: i32 = 0xdd;
        let mut rows = [__m512::zeroed(); 16];
        for i in 0..16 {
            rows[i] = bytemuck::cast(block[i]);
        }
        let mut twos = rows;
        let mut fours = rows;
        // SAFETY: the caller has AVX-512
        unsafe {
            for i in 0..8 {
                let (a, b) = (rows[2 * i], rows[2 * i + 1]);
                (twos[2 * i], twos[2 * i + 1]) =
                    (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            // Quarter `q` of vector `4 * i + k`: column `4 * q + k` of the rows from `4 * i` on.
            for i in 0..4 {
                for k in 0..2 {
                    let (a, b) = (twos[4 * i + k], twos[4 * i + 2 + k]);
                    fours[4 * i + 2 * k] = _mm512_shuffle_ps::<FIRST>(a, b);
                    fours[4 * i + 2 * k + 1] = _mm512_shuffle_ps::<LAST>(a, b);
                }
            }
            for k in 0..4 {
                let [a, b, c, d] = [fours[k], fours[4 + k], fours[8 + k], fours[12 + k]];
                let (ab, cd) =
                    (_mm512_shuffle_f32x4::<EVEN>(a, b), _mm512_shuffle_f32x4::<EVEN>(c, d));
                twos[k] = _mm512_shuffle_f32x4::<EVEN>(ab, cd);
                twos[8 + k] = _mm512_shuffle_f32x4::<ODD>(ab, cd);
                let (ab, cd) =
                    (_mm512_shuffle_f32x4::<ODD>(a, b), _mm512_shuffle_f32x4::<ODD>(c, d));
                twos[4 + k] = _mm512_shuffle_f32x4::<EVEN>(ab, cd);
                twos[12 + k] = _mm512_shuffle_f32x4::<ODD>(ab, cd);
            }
        }
        for i in 0..16 {
            block[i] = bytemuck::cast(twos[i]);
        }
    }

    /// The first two elements of both vectors, and the last two of both, for a shuffle.
    const FIRST: i32 = 0x44;
    const LAST: i32 = 0xee;

    /// Loads and widens one vector of float16.
    #[inline(always)]
    pub(in super::super) fn f16<S: Simd>(simd: S, from: &[u16]) -> Option<S::f32s> {
        if let (true, Some(from)) = (is_v3::<S>(), from.first_chunk::<8>()) {
            // SAFETY: 16 bytes are read; V3 runs inside `avx2::run` only, where there is F16C
            let vector = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) };
            return Some(bytemuck::cast(vector));
        }
        let (v4, from) = (v4(&simd)?, from.first_chunk::<16>()?);
        // SAFETY: 32 bytes are read; V4 has AVX
        let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        Some(bytemuck::cast(v4.avx512f._mm512_cvtph_ps(bits)))
    }

    /// Rounds each lane to float16 and stores it. Returns whether the processor has the
    /// instruction.
    #[inline(always)]
    pub(in super::super) fn narrow_to_f16<S: Simd>(
        simd: S,
        numbers: S::f32s,
        to: &mut [u16],
    ) -> bool {
        if let (true, Some(to)) = (is_v3::<S>(), to.first_chunk_mut::<8>()) {
            // SAFETY: V3 runs inside `avx2::run` only, where there is F16C
            let halves =
                unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(bytemuck::cast(numbers)) };
            *to = bytemuck::cast(halves);
            return true;
        }
        if let (Some(_), Some(to)) = (v4(&simd), to.first_chunk_mut::<16>()) {
            // SAFETY: there is a V4, whose AVX-512 this is
            let halves =
                unsafe { _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(bytemuck::cast(numbers)) };
            *to = bytemuck::cast(halves);
            return true;
        }
        false
    }

    /// As many numbers of type bfloat16.
    #[inline(always)]
    pub(in super::super) fn bf16<S: Simd>(simd: S, from: &[u16]) -> Option<S::f32s> {
        if let (true, Some(from)) = (is_v3::<S>(), from.first_chunk::<8>()) {
            // SAFETY: 16 bytes are read; V3 has AVX2
            return Some(bytemuck::cast(unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_slli_epi32::<16>(bits)
            }));
        }
        let (v4, from) = (v4(&simd)?, from.first_chunk::<16>()?);
        // SAFETY: 32 bytes are read; V4 has AVX
        let bits = unsafe { _mm256_loadu_si256(from.as_ptr().cast()) };
        let bits = v4.avx512f._mm512_cvtepu16_epi32(bits);
        Some(bytemuck::cast(v4.avx512f._mm512_slli_epi32::<16>(bits)))
    }

    /// As many integers of 8 bits.
    #[inline(always)]
    pub(in super::super) fn int8<S: Simd>(simd: S, from: &[u8]) -> Option<S::f32s> {
        if let (true, Some(from)) = (is_v3::<S>(), from.first_chunk::<8>()) {
            // SAFETY: 8 bytes are read; V3 has AVX2
            return Some(bytemuck::cast(unsafe {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().cast())))
            }));
        }
        let (v4, from) = (v4(&simd)?, from.first_chunk::<16>()?);
        // SAFETY: 16 bytes are read; SSE2 is everywhere
        let bytes = unsafe { _mm_loadu_si128(from.as_ptr().cast()) };
        let integers = v4.avx512f._mm512_cvtepi8_epi32(bytes);
        Some(bytemuck::cast(v4.avx512f._mm512_cvtepi32_ps(integers)))
    }

    /// Loads and widens one vector of e4m3, in units of [`FLOAT8_UNIT`](super::FLOAT8_UNIT).
    ///
    /// Reinterprets e4m3 as scaled float16, subnormals included, then maps NaN.
    #[inline(always)]
    pub(in super::super) fn float8<S: Simd>(simd: S, from: &[u8]) -> Option<S::f32s> {
        if let (true, Some(from)) = (is_v3::<S>(), from.first_chunk::<8>()) {
            // SAFETY: 8 bytes are read; V3 runs inside `avx2::run` only
            return Some(bytemuck::cast(unsafe {
                let bits = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.as_ptr().cast()));
                let size_and_sign = _mm_set1_epi16(!EXPONENT);
                let number = _mm_and_si128(_mm_slli_epi16::<7>(bits), size_and_sign);
                let above = _mm_add_epi16(number, _mm_set1_epi16(LEAST));
                let nan = _mm_and_si128(above, _mm_set1_epi16(EXPONENT));
                _mm256_cvtph_ps(_mm_or_si128(number, nan))
            }));
        }
        let (v4, from) = (v4(&simd)?, from.first_chunk::<16>()?);
        // SAFETY: 16 bytes are read; V4 has AVX2
        let halves = unsafe {
            let bits = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            let size_and_sign = _mm256_set1_epi16(!EXPONENT);
            let number = _mm256_and_si256(_mm256_slli_epi16::<7>(bits), size_and_sign);
            let above = _mm256_add_epi16(number, _mm256_set1_epi16(LEAST));
            let nan = _mm256_and_si256(above, _mm256_set1_epi16(EXPONENT));
            _mm256_or_si256(number, nan)
        };
        Some(bytemuck::cast(v4.avx512f._mm512_cvtph_ps(halves)))
    }

    /// One vector of 4-bit integers, stored with offset 8, the low half of a byte first.
    #[inline(always)]
    pub(in super::super) fn int4<S: Simd>(simd: S, from: &[u8]) -> Option<S::f32s> {
        if let (true, Some(word)) = (is_v3::<S>(), word(from, 0)) {
            // SAFETY: V3 has AVX2
            return Some(bytemuck::cast(unsafe {
                let integers = _mm256_and_si256(halves_of(word), _mm256_set1_epi32(15));
                _mm256_cvtepi32_ps(_mm256_sub_epi32(integers, _mm256_set1_epi32(8)))
            }));
        }
        of_table(simd, from, &INTEGERS)
    }

    /// One vector of float4e2m1, the low half of a byte first.
    #[inline(always)]
    pub(in super::super) fn float4<S: Simd>(simd: S, from: &[u8]) -> Option<S::f32s> {
        if let (true, Some(word)) = (is_v3::<S>(), word(from, 0)) {
            // SAFETY: V3 has AVX2, and the table has eight numbers more
            return Some(bytemuck::cast(unsafe {
                let halves = halves_of(word);
                // Indices of a table are the lowest three bits; the fourth one is the sign.
                let sizes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(FLOAT4.as_ptr()), halves);
                let signs = _mm256_and_si256(halves, _mm256_set1_epi32(8));
                _mm256_or_ps(sizes, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(signs)))
            }));
        }
        of_table(simd, from, &FLOAT4)
    }

    /// 4-bit integers by their codes.
    const INTEGERS: [f32; 16] =
        [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

    /// Word `i`.
    #[inline(always)]
    fn word(from: &[u8], i: usize) -> Option<i32> {
        from[4 * i..].first_chunk().map(|bytes| i32::from_le_bytes(*bytes))
    }

    /// A lane for each code of a word, in its lowest four bits.
    ///
    /// # Safety
    ///
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn halves_of(word: i32) -> __m256i {
        // SAFETY: the caller's
        unsafe {
            let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts)
        }
    }

    /// One vector of AVX-512: of each code its number in the table.
    #[inline(always)]
    fn of_table<S: Simd>(simd: S, from: &[u8], table: &[f32; 16]) -> Option<S::f32s> {
        let (v4, low, high) = (v4(&simd)?, word(from, 0)?, word(from, 1)?);
        let (v4, set) = (v4.avx512f, v4.avx._mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        let words = v4._mm512_inserti64x4::<1>(v4._mm512_set1_epi32(low), {
            // SAFETY: V4 has AVX
            unsafe { _mm256_set1_epi32(high) }
        });
        let halves = v4._mm512_srlv_epi32(words, v4._mm512_broadcast_i64x4(set));
        // Indices of a table are the lowest four bits.
        Some(bytemuck::cast(v4._mm512_permutexvar_ps(halves, bytemuck::cast(*table))))
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod of_this_processor {
    use pulp::{Arch, Simd, WithSimd};

    pub(in super::super) fn dispatch<Op: WithSimd>(arch: Arch, op: Op) -> Op::Output {
        arch.dispatch(op)
    }

    #[inline(always)]
    pub(in super::super) fn apart<S: Simd, Op: WithSimd>(simd: S, op: Op) -> Op::Output {
        simd.vectorize(op)
    }

    pub(in super::super) fn sums<S: Simd>(_: S, _: [S::f32s; 4]) -> Option<[f32; 4]> {
        None
    }

    pub(in super::super) fn times_power<S: Simd>(
        _: S,
        _: S::f32s,
        _: S::f32s,
        _: S::f32s,
        _: S::f32s,
    ) -> Option<S::f32s> {
        None
    }

    pub(in super::super) fn transpose<S: Simd>(_: S, _: &mut [S::f32s]) -> bool {
        false
    }

    pub(in super::super) fn narrow_to_f16<S: Simd>(_: S, _: S::f32s, _: &mut [u16]) -> bool {
        false
    }

    macro_rules! none {
        ($($name:ident($element:ty)),*) => {$(
            pub(in super::super) fn $name<S: Simd>(_: S, _: &[$element]) -> Option<S::f32s> {
                None
            }
        )*};
    }
    none!(f16(u16), bf16(u16), int8(u8), float8(u8), int4(u8), float4(u8));
}
