//! The same over paged KV caches.

use crate::attention::decode;
use crate::num::{Bits4, Bits8, Code, bf16, f16};
use crate::params::{DecodeScheduleParams, PagedDecodeParams};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] =
    &[DECODE_PAGED, DECODE_SCHEDULE, DECODE_PAGED_WARPGROUP, DECODE_PAGED_QUANTIZED];

/// Rows of the decode kernels whose cache consists of blocks, for both 16-bit types: `F16 NAME,
/// BF16 NAME => SHAPE, BLOCKS PER SM`.
macro_rules! decode_paged_kernels {
    ($table:ident, $module:literal,
        { $($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)* }) => {
        decode_paged_kernels!(@rows $table, $module,
            { $($f16: f16 => $shape, $min_blocks; $bf16: bf16 => $shape, $min_blocks;)* });
    };
    (@rows $table:ident, $module:literal,
        { $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)* }) => {
        kernels!($table, DecodePaged: Attention, $module,
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, starts: i32,
             past_seqlens: i32, block_table: i32, head_sink: T, tree_mask: i64, k: T, v: T, out: T,
             lse: f32,
             partial_out: f32, partial_states: [f32; 2], arrivals: u32, schedule: u32;
             p: PagedDecodeParams), { $(
            $name => <$shape>::run_paged, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, pads: <$shape>::PADS, communicates: true };
        )* });
    };
}

decode_paged_kernels!(DECODE_PAGED, "decode-paged", {
    gqa_decode_paged_f16_d64_r8, gqa_decode_paged_bf16_d64_r8 => decode::D64<1>, 1;
    gqa_decode_paged_f16_d64_r8_w4, gqa_decode_paged_bf16_d64_r8_w4 => decode::D64W4<1>, 2;
    gqa_decode_paged_f16_d64_r16, gqa_decode_paged_bf16_d64_r16 => decode::D64<2>, 1;
    gqa_decode_paged_f16_d64_r16_w4, gqa_decode_paged_bf16_d64_r16_w4 => decode::D64W4<2>, 2;
    gqa_decode_paged_f16_d64_r32, gqa_decode_paged_bf16_d64_r32 => decode::D64R32, 1;
    gqa_decode_paged_f16_d64_r32_w4, gqa_decode_paged_bf16_d64_r32_w4 => decode::D64R32W4, 2;
    gqa_decode_paged_f16_d64_r64_mma, gqa_decode_paged_bf16_d64_r64_mma => decode::D64R64Mma, 1;
    gqa_decode_paged_f16_d128_r8, gqa_decode_paged_bf16_d128_r8 => decode::D128<1>, 1;
    gqa_decode_paged_f16_d128_r8_w4, gqa_decode_paged_bf16_d128_r8_w4 => decode::D128W4<1>, 2;
    gqa_decode_paged_f16_d128_r16, gqa_decode_paged_bf16_d128_r16 => decode::D128<2>, 1;
    gqa_decode_paged_f16_d128_r32, gqa_decode_paged_bf16_d128_r32 => decode::D128R32, 1;
    gqa_decode_paged_f16_d128_r32_w4, gqa_decode_paged_bf16_d128_r32_w4 => decode::D128R32W4, 2;
    gqa_decode_paged_f16_d128_r64_mma, gqa_decode_paged_bf16_d128_r64_mma => decode::D128R64Mma, 1;
    gqa_decode_paged_f16_d128_r64_mma_w4, gqa_decode_paged_bf16_d128_r64_mma_w4
        => decode::D128R64MmaW4, 1;
    gqa_decode_paged_f16_d256_r8, gqa_decode_paged_bf16_d256_r8 => decode::D256<1>, 1;
    gqa_decode_paged_f16_d256_r16, gqa_decode_paged_bf16_d256_r16 => decode::D256<2>, 1;
    gqa_decode_paged_f16_d256_r16_w4, gqa_decode_paged_bf16_d256_r16_w4 => decode::D256W4<2>, 2;
    gqa_decode_paged_f16_d256_r64_mma, gqa_decode_paged_bf16_d256_r64_mma => decode::D256R64Mma, 1;
    gqa_decode_paged_f16_d256_r64_mma_w4, gqa_decode_paged_bf16_d256_r64_mma_w4
        => decode::D256R64MmaW4, 1;
    gqa_decode_paged_padded_f16_d128_r16_w4, gqa_decode_paged_padded_bf16_d128_r16_w4
        => decode::UpTo128<2>, 2;
    gqa_decode_paged_padded_f16_d256_r8_w4, gqa_decode_paged_padded_bf16_d256_r8_w4
        => decode::UpTo256<1>, 2;
});

kernels!(DECODE_SCHEDULE, DecodePaged: Schedule, "decode-paged",
    (starts: i32, past_seqlens: i32, schedule: u32; p: DecodeScheduleParams),
    each { head_size: 0, rows: 0, keys: 0, threads: decode::SCHEDULE_THREADS, min_blocks: 1,
           shared: decode::SCHEDULE_SHARED_BYTES, hot: true, min_sm: 80 }, {
    gqa_decode_schedule => decode::schedule, T = f32;
});

// Tiles of 64 rows, which warpgroups multiply.
decode_paged_kernels!(DECODE_PAGED_WARPGROUP, "decode-paged-warpgroup", {
    gqa_decode_paged_f16_d64_r64, gqa_decode_paged_bf16_d64_r64 => decode::D64R64, 1;
    gqa_decode_paged_f16_d128_r64, gqa_decode_paged_bf16_d128_r64 => decode::D128R64, 1;
});

/// Rows of the decode kernels whose cache consists of blocks of quantized values, for both 16-bit
/// types: `F16 NAME, BF16 NAME => SHAPE, FORMATS, BLOCKS PER SM`.
macro_rules! decode_paged_quantized_kernels {
    ($table:ident, { $(
        $f16:ident, $bf16:ident => $shape:ty, $format:ident, $min_blocks:literal;
    )* }) => {
        decode_paged_quantized_kernels!(@rows $table, { $(
            $f16: f16 => $shape, $format, $min_blocks;
            $bf16: bf16 => $shape, $format, $min_blocks;
        )* });
    };
    (@rows $table:ident, { $(
        $name:ident: $t:ident => $shape:ty, $format:ident, $min_blocks:literal;
    )* }) => {
        kernels!($table, DecodePagedQuantized: Attention, "decode-paged-quantized",
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, starts: i32,
             past_seqlens: i32, block_table: i32, head_sink: T, k: u8, v: u8,
             k_scale: f32, v_scale: f32, out: T, lse: f32, partial_out: f32,
             partial_states: [f32; 2], arrivals: u32, schedule: u32; p: PagedDecodeParams), { $(
            $name => <$shape>::run_paged_quantized::<$format, _>, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, pads: <$shape>::PADS, communicates: true,
                formats: $format::FORMATS };
        )* });
    };
}

decode_paged_quantized_kernels!(DECODE_PAGED_QUANTIZED, {
    gqa_decode_paged_q8_f16_d64_r8, gqa_decode_paged_q8_bf16_d64_r8
        => decode::D64Quantized8<1>, Bits8, 1;
    gqa_decode_paged_q8_f16_d64_r16, gqa_decode_paged_q8_bf16_d64_r16
        => decode::D64Quantized8<2>, Bits8, 1;
    gqa_decode_paged_q8_f16_d64_r16_w4, gqa_decode_paged_q8_bf16_d64_r16_w4
        => decode::D64Quantized8W4<2>, Bits8, 2;
    gqa_decode_paged_q8_f16_d128_r8, gqa_decode_paged_q8_bf16_d128_r8
        => decode::D128Quantized8<1>, Bits8, 1;
    gqa_decode_paged_q8_f16_d128_r16, gqa_decode_paged_q8_bf16_d128_r16
        => decode::D128Quantized8<2>, Bits8, 1;
    gqa_decode_paged_q8_f16_d128_r16_w4, gqa_decode_paged_q8_bf16_d128_r16_w4
        => decode::D128Quantized8W4<2>, Bits8, 2;
    gqa_decode_paged_q8_f16_d256_r8, gqa_decode_paged_q8_bf16_d256_r8
        => decode::D256Quantized8<1>, Bits8, 1;
    gqa_decode_paged_q8_f16_d256_r16, gqa_decode_paged_q8_bf16_d256_r16
        => decode::D256Quantized8<2>, Bits8, 1;
    gqa_decode_paged_i4_f16_d64_r8, gqa_decode_paged_i4_bf16_d64_r8
        => decode::D64Quantized4<1>, Bits4, 1;
    gqa_decode_paged_i4_f16_d64_r16, gqa_decode_paged_i4_bf16_d64_r16
        => decode::D64Quantized4<2>, Bits4, 1;
    gqa_decode_paged_i4_f16_d64_r16_w4, gqa_decode_paged_i4_bf16_d64_r16_w4
        => decode::D64Quantized4W4<2>, Bits4, 2;
    gqa_decode_paged_i4_f16_d128_r8, gqa_decode_paged_i4_bf16_d128_r8
        => decode::D128Quantized4<1>, Bits4, 1;
    gqa_decode_paged_i4_f16_d128_r16, gqa_decode_paged_i4_bf16_d128_r16
        => decode::D128Quantized4<2>, Bits4, 1;
    gqa_decode_paged_i4_f16_d128_r16_w4, gqa_decode_paged_i4_bf16_d128_r16_w4
        => decode::D128Quantized4W4<2>, Bits4, 2;
    gqa_decode_paged_i4_f16_d256_r8, gqa_decode_paged_i4_bf16_d256_r8
        => decode::D256Quantized4<1>, Bits4, 1;
    gqa_decode_paged_i4_f16_d256_r16, gqa_decode_paged_i4_bf16_d256_r16
        => decode::D256Quantized4<2>, Bits4, 1;
    gqa_decode_paged_i4_f16_d256_r8_w4, gqa_decode_paged_i4_bf16_d256_r8_w4
        => decode::D256Quantized4W4<1>, Bits4, 2;
    gqa_decode_paged_padded_q8_f16_d128_r16_w4, gqa_decode_paged_padded_q8_bf16_d128_r16_w4
        => decode::UpTo128Quantized8<2>, Bits8, 2;
    gqa_decode_paged_padded_q8_f16_d256_r8_w4, gqa_decode_paged_padded_q8_bf16_d256_r8_w4
        => decode::UpTo256Quantized8<1>, Bits8, 2;
    gqa_decode_paged_padded_i4_f16_d128_r16_w4, gqa_decode_paged_padded_i4_bf16_d128_r16_w4
        => decode::UpTo128Quantized4<2>, Bits4, 2;
    gqa_decode_paged_padded_i4_f16_d256_r8_w4, gqa_decode_paged_padded_i4_bf16_d256_r8_w4
        => decode::UpTo256Quantized4<1>, Bits4, 2;
});
