//! Decode steps in one launch, over contiguous and over paged KV caches.

use crate::attention::decode;
use crate::num::{bf16, e4m3, f16};
use crate::params::{DecodeScheduleParams, PagedDecodeParams};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[DECODE, DECODE_WARPGROUP, DECODE_SCHEDULE];

/// Table rows of the decode kernels, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE, CTAs per
/// SM`.
macro_rules! decode_kernels {
    ($table:ident, $module:literal,
        { $($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)* }) => {
        decode_kernels!(@rows $table, $module,
            { $($f16: f16 => $shape, $min_blocks; $bf16: bf16 => $shape, $min_blocks;)* });
    };
    (@rows $table:ident, $module:literal,
        { $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)* }) => {
        kernels!($table, Decode: Attention, $module,
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32,
             starts: i32, block_table: i32, head_sink: T, tree_mask: i64, k: T, v: T,
             out: T, out_f32: f32, out_f8: e4m3, out_scale: f32, lse: f32, partial_out: f32,
             partial_states: [f32; 2], arrivals: u32, schedule: u32; p: PagedDecodeParams), { $(
            $name => <$shape>::run, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, pads: <$shape>::PADS, communicates: true,
                outputs: [Element, F32, E4M3] };
        )* });
    };
}

decode_kernels!(DECODE, "decode", {
    gqa_decode_f16_d64_r8, gqa_decode_bf16_d64_r8 => decode::D64<1>, 1;
    gqa_decode_f16_d64_r8_w4, gqa_decode_bf16_d64_r8_w4 => decode::D64W4<1>, 2;
    gqa_decode_f16_d64_r16, gqa_decode_bf16_d64_r16 => decode::D64<2>, 1;
    gqa_decode_f16_d64_r16_w4, gqa_decode_bf16_d64_r16_w4 => decode::D64W4<2>, 2;
    gqa_decode_f16_d64_r32, gqa_decode_bf16_d64_r32 => decode::D64R32, 1;
    gqa_decode_f16_d64_r32_w4, gqa_decode_bf16_d64_r32_w4 => decode::D64R32W4, 2;
    gqa_decode_f16_d64_r64_mma, gqa_decode_bf16_d64_r64_mma => decode::D64R64Mma, 1;
    gqa_decode_f16_d80_r8, gqa_decode_bf16_d80_r8 => decode::D80<1>, 1;
    gqa_decode_f16_d80_r8_w4, gqa_decode_bf16_d80_r8_w4 => decode::D80W4<1>, 2;
    gqa_decode_f16_d80_r16, gqa_decode_bf16_d80_r16 => decode::D80<2>, 1;
    gqa_decode_f16_d80_r16_w4, gqa_decode_bf16_d80_r16_w4 => decode::D80W4<2>, 2;
    gqa_decode_f16_d80_r32, gqa_decode_bf16_d80_r32 => decode::D80R32, 1;
    gqa_decode_f16_d80_r64_mma, gqa_decode_bf16_d80_r64_mma => decode::D80R64Mma, 1;
    gqa_decode_f16_d96_r8, gqa_decode_bf16_d96_r8 => decode::D96<1>, 1;
    gqa_decode_f16_d96_r8_w4, gqa_decode_bf16_d96_r8_w4 => decode::D96W4<1>, 2;
    gqa_decode_f16_d96_r16, gqa_decode_bf16_d96_r16 => decode::D96<2>, 1;
    gqa_decode_f16_d96_r16_w4, gqa_decode_bf16_d96_r16_w4 => decode::D96W4<2>, 2;
    gqa_decode_f16_d96_r32, gqa_decode_bf16_d96_r32 => decode::D96R32, 1;
    gqa_decode_f16_d96_r64_mma, gqa_decode_bf16_d96_r64_mma => decode::D96R64Mma, 1;
    gqa_decode_f16_d128_r8, gqa_decode_bf16_d128_r8 => decode::D128<1>, 1;
    gqa_decode_f16_d128_r8_w4, gqa_decode_bf16_d128_r8_w4 => decode::D128W4<1>, 2;
    gqa_decode_f16_d128_r16, gqa_decode_bf16_d128_r16 => decode::D128<2>, 1;
    gqa_decode_f16_d128_r32, gqa_decode_bf16_d128_r32 => decode::D128R32, 1;
    gqa_decode_f16_d128_r32_w4, gqa_decode_bf16_d128_r32_w4 => decode::D128R32W4, 2;
    gqa_decode_f16_d128_r64_mma, gqa_decode_bf16_d128_r64_mma => decode::D128R64Mma, 1;
    gqa_decode_f16_d128_r64_mma_w4, gqa_decode_bf16_d128_r64_mma_w4 => decode::D128R64MmaW4, 1;
    gqa_decode_f16_d192_r8, gqa_decode_bf16_d192_r8 => decode::D192<1>, 1;
    gqa_decode_f16_d192_r8_w4, gqa_decode_bf16_d192_r8_w4 => decode::D192W4<1>, 2;
    gqa_decode_f16_d192_r16, gqa_decode_bf16_d192_r16 => decode::D192<2>, 1;
    gqa_decode_f16_d192_r16_w4, gqa_decode_bf16_d192_r16_w4 => decode::D192W4<2>, 2;
    gqa_decode_f16_d256_r8, gqa_decode_bf16_d256_r8 => decode::D256<1>, 1;
    gqa_decode_f16_d256_r16, gqa_decode_bf16_d256_r16 => decode::D256<2>, 1;
    gqa_decode_f16_d256_r16_w4, gqa_decode_bf16_d256_r16_w4 => decode::D256W4<2>, 2;
    gqa_decode_f16_d256_r64_mma, gqa_decode_bf16_d256_r64_mma => decode::D256R64Mma, 1;
    gqa_decode_f16_d256_r64_mma_w4, gqa_decode_bf16_d256_r64_mma_w4 => decode::D256R64MmaW4, 1;
    gqa_decode_f16_d512_r8, gqa_decode_bf16_d512_r8 => decode::D512<1>, 1;
    gqa_decode_padded_f16_d128_r16_w4, gqa_decode_padded_bf16_d128_r16_w4 => decode::UpTo128<2>, 2;
    gqa_decode_padded_f16_d256_r8_w4, gqa_decode_padded_bf16_d256_r8_w4 => decode::UpTo256<1>, 2;
});

// Tiles of 64 rows, multiplied by wgmma.
decode_kernels!(DECODE_WARPGROUP, "decode-warpgroup", {
    gqa_decode_f16_d64_r64, gqa_decode_bf16_d64_r64 => decode::D64R64, 1;
    gqa_decode_f16_d80_r64, gqa_decode_bf16_d80_r64 => decode::D80R64, 1;
    gqa_decode_f16_d96_r64, gqa_decode_bf16_d96_r64 => decode::D96R64, 1;
    gqa_decode_f16_d128_r64, gqa_decode_bf16_d128_r64 => decode::D128R64, 1;
});

kernels!(DECODE_SCHEDULE, Decode: Schedule, "decode",
    (starts: i32, past_seqlens: i32, schedule: u32; p: DecodeScheduleParams),
    each { head_size: 0, rows: 0, keys: 0, threads: decode::SCHEDULE_THREADS, min_blocks: 1,
           shared: decode::SCHEDULE_SHARED_BYTES, hot: true, min_sm: 80 }, {
    gqa_decode_schedule => decode::schedule, T = f32;
});
