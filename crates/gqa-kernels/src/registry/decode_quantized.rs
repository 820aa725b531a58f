//! The same over quantized KV caches.

use crate::attention::decode;
use crate::num::{Bits4, Bits8, Code, bf16, f16};
use crate::params::PagedDecodeParams;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[DECODE_QUANTIZED];

/// Rows of the decode kernels whose cache holds quantized values, for both 16-bit types: `F16 NAME,
/// BF16 NAME => SHAPE, FORMATS, BLOCKS PER SM`.
macro_rules! decode_quantized_kernels {
    ($table:ident, { $(
        $f16:ident, $bf16:ident => $shape:ty, $format:ident, $min_blocks:literal;
    )* }) => {
        decode_quantized_kernels!(@rows $table, { $(
            $f16: f16 => $shape, $format, $min_blocks;
            $bf16: bf16 => $shape, $format, $min_blocks;
        )* });
    };
    (@rows $table:ident, { $(
        $name:ident: $t:ident => $shape:ty, $format:ident, $min_blocks:literal;
    )* }) => {
        kernels!($table, DecodeQuantized: Attention, "decode-quantized",
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32,
             starts: i32, block_table: i32, head_sink: T, k: u8, v: u8, k_scale: f32,
             v_scale: f32, out: T, lse: f32, partial_out: f32, partial_states: [f32; 2],
             arrivals: u32, schedule: u32; p: PagedDecodeParams), { $(
            $name => <$shape>::run_quantized::<$format, _>, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, pads: <$shape>::PADS, communicates: true,
                formats: $format::FORMATS };
        )* });
    };
}

decode_quantized_kernels!(DECODE_QUANTIZED, {
    gqa_decode_q8_f16_d64_r8, gqa_decode_q8_bf16_d64_r8 => decode::D64Quantized8<1>, Bits8, 1;
    gqa_decode_q8_f16_d64_r16, gqa_decode_q8_bf16_d64_r16 => decode::D64Quantized8<2>, Bits8, 1;
    gqa_decode_q8_f16_d64_r16_w4, gqa_decode_q8_bf16_d64_r16_w4
        => decode::D64Quantized8W4<2>, Bits8, 2;
    gqa_decode_q8_f16_d128_r8, gqa_decode_q8_bf16_d128_r8 => decode::D128Quantized8<1>, Bits8, 1;
    gqa_decode_q8_f16_d128_r16, gqa_decode_q8_bf16_d128_r16 => decode::D128Quantized8<2>, Bits8, 1;
    gqa_decode_q8_f16_d128_r16_w4, gqa_decode_q8_bf16_d128_r16_w4
        => decode::D128Quantized8W4<2>, Bits8, 2;
    gqa_decode_q8_f16_d256_r8, gqa_decode_q8_bf16_d256_r8 => decode::D256Quantized8<1>, Bits8, 1;
    gqa_decode_q8_f16_d256_r16, gqa_decode_q8_bf16_d256_r16 => decode::D256Quantized8<2>, Bits8, 1;
    gqa_decode_i4_f16_d64_r8, gqa_decode_i4_bf16_d64_r8 => decode::D64Quantized4<1>, Bits4, 1;
    gqa_decode_i4_f16_d64_r16, gqa_decode_i4_bf16_d64_r16 => decode::D64Quantized4<2>, Bits4, 1;
    gqa_decode_i4_f16_d64_r16_w4, gqa_decode_i4_bf16_d64_r16_w4
        => decode::D64Quantized4W4<2>, Bits4, 2;
    gqa_decode_i4_f16_d128_r8, gqa_decode_i4_bf16_d128_r8 => decode::D128Quantized4<1>, Bits4, 1;
    gqa_decode_i4_f16_d128_r16, gqa_decode_i4_bf16_d128_r16 => decode::D128Quantized4<2>, Bits4, 1;
    gqa_decode_i4_f16_d128_r16_w4, gqa_decode_i4_bf16_d128_r16_w4
        => decode::D128Quantized4W4<2>, Bits4, 2;
    gqa_decode_i4_f16_d256_r8, gqa_decode_i4_bf16_d256_r8 => decode::D256Quantized4<1>, Bits4, 1;
    gqa_decode_i4_f16_d256_r16, gqa_decode_i4_bf16_d256_r16 => decode::D256Quantized4<2>, Bits4, 1;
    gqa_decode_i4_f16_d256_r8_w4, gqa_decode_i4_bf16_d256_r8_w4
        => decode::D256Quantized4W4<1>, Bits4, 2;
    gqa_decode_padded_q8_f16_d128_r16_w4, gqa_decode_padded_q8_bf16_d128_r16_w4
        => decode::UpTo128Quantized8<2>, Bits8, 2;
    gqa_decode_padded_q8_f16_d256_r8_w4, gqa_decode_padded_q8_bf16_d256_r8_w4
        => decode::UpTo256Quantized8<1>, Bits8, 2;
    gqa_decode_padded_i4_f16_d128_r16_w4, gqa_decode_padded_i4_bf16_d128_r16_w4
        => decode::UpTo128Quantized4<2>, Bits4, 2;
    gqa_decode_padded_i4_f16_d256_r8_w4, gqa_decode_padded_i4_bf16_d256_r8_w4
        => decode::UpTo256Quantized4<1>, Bits4, 2;
});
