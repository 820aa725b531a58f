//! Attention whose output is wider than the registers of a warpgroup: over a latent KV cache, and
//! with heads of 512.

use crate::attention::latent::{self, Latent, LatentDivided, LatentFloat8, Shape, Wide};
use crate::attention::latent_mma::{self, Float8Keys};
#[cfg(not(target_arch = "nvptx64"))]
use crate::num::Format;
use crate::num::{bf16, f16};
use crate::params::LatentParams;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[
    WIDE,
    LATENT,
    LATENT_FLOAT8,
    LATENT_DIVIDED,
    LATENT_MERGE_PARTS,
    LATENT_MMA,
    LATENT_MMA_FLOAT8,
    LATENT_MMA_WARPGROUP,
    LATENT_MERGE,
];

kernels!(WIDE, HopperWide: Attention, "hopper-wide",
    ([k 0, v 1] q: T, starts: i32, past_seqlens: i32, query_seqlens: i32, block_table: i32, out: T,
     lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: Wide::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS,
           threads: latent::THREADS,
           min_blocks: 1, shared: Wide::SHARED_BYTES, hot: true, min_sm: 90,
           cluster: latent::MAX_CLUSTER }, {
    gqa_hopper_wide_f16 => latent::wide::<f16>, T = f16;
    gqa_hopper_wide_bf16 => latent::wide::<bf16>, T = bf16;
});

kernels!(LATENT, Latent: Attention, "latent",
    ([k 0] q: T, starts: i32, past_seqlens: i32, block_table: i32, out: T, lse: f32,
     partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: Latent::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS,
           threads: latent::THREADS,
           min_blocks: 1, shared: Latent::SHARED_BYTES, hot: true, min_sm: 90 }, {
    gqa_latent_f16 => latent::latent::<f16>, T = f16;
    gqa_latent_bf16 => latent::latent::<bf16>, T = bf16;
});

kernels!(LATENT_DIVIDED, Latent: SplitAttention, "latent",
    ([k 0] q: T, starts: i32, past_seqlens: i32, block_table: i32, out: T, lse: f32,
     partial_out: f32, partial_lse: f32, range_starts: u32;
     p: LatentParams),
    each { head_size: Latent::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS,
           threads: latent::THREADS,
           min_blocks: 1, shared: LatentDivided::SHARED_BYTES, hot: true, min_sm: 90 }, {
    gqa_latent_divided_f16 => latent::latent_divided::<f16>, T = f16;
    gqa_latent_divided_bf16 => latent::latent_divided::<bf16>, T = bf16;
});

kernels!(LATENT_FLOAT8, Latent: Attention, "latent",
    ([k 0] q: T, k_scale: f32, starts: i32, past_seqlens: i32, block_table: i32, out: T, lse: f32,
     partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: LatentFloat8::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS,
           threads: latent::THREADS,
           min_blocks: 1, shared: LatentFloat8::SHARED_BYTES, hot: true, min_sm: 90,
           formats: &[Format::Float8] }, {
    gqa_latent_float8_f16 => latent::latent_float8::<f16>, T = f16;
    gqa_latent_float8_bf16 => latent::latent_float8::<bf16>, T = bf16;
});

// For keys that CTAs of the kernels above divide.
kernels!(LATENT_MERGE_PARTS, Latent: Merge, "latent",
    (range_starts: u32, out: T, lse: f32, partial_out: f32, partial_lse: f32; p: LatentParams),
    each { head_size: latent::VALUE_SIZE, rows: 0, keys: 0, threads: latent::MERGE_PARTS_THREADS,
           min_blocks: 2, shared: 0, hot: true, min_sm: 90 }, {
    gqa_latent_merge_parts_f16 => latent::merge_parts::<f16>, T = f16;
    gqa_latent_merge_parts_bf16 => latent::merge_parts::<bf16>, T = bf16;
});

/// Rows of the kernels that multiply by `mma.sync`, for both 16-bit types: `F16 NAME, BF16 NAME =>
/// SHAPE, CTAs per SM`.
macro_rules! latent_mma_kernels {
    ($table:ident, $args:tt, $run:ident, $formats:expr,
        { $($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)* }) => {
        latent_mma_kernels!(@rows $table, $args, $run, $formats,
            { $($f16: f16 => $shape, $min_blocks; $bf16: bf16 => $shape, $min_blocks;)* });
    };
    (@rows $table:ident, $args:tt, $run:ident, $formats:expr,
        { $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)* }) => {
        kernels!($table, LatentMma: Attention, "latent-mma", $args, { $(
            $name => <$shape>::$run, T = $t, {
                head_size: latent_mma::KEY_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM, formats: $formats };
        )* });
    };
}

latent_mma_kernels!(LATENT_MMA,
    (q: T, k: T, starts: i32, past_seqlens: i32, query_seqlens: i32, block_table: i32, out: T,
     lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams), run, &[], {
    gqa_latent_mma_f16_r16, gqa_latent_mma_bf16_r16 => latent_mma::Rows16, 1;
    gqa_latent_mma_f16_r16_w4, gqa_latent_mma_bf16_r16_w4 => latent_mma::Rows16W4, 2;
    gqa_latent_mma_f16_r32, gqa_latent_mma_bf16_r32 => latent_mma::Rows32, 1;
});

latent_mma_kernels!(LATENT_MMA_FLOAT8,
    (q: T, k: u8, k_scale: f32, starts: i32, past_seqlens: i32, query_seqlens: i32,
     block_table: i32, out: T, lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams), run_quantized, &[Format::Float8], {
    gqa_latent_mma_f8_f16_r16, gqa_latent_mma_f8_bf16_r16 => latent_mma::Float8Rows16, 2;
    gqa_latent_mma_f8_f16_r32, gqa_latent_mma_f8_bf16_r32 => latent_mma::Float8Rows32, 1;
});

// Float16 has too many bits for a sum of two e4m3 values.
kernels!(LATENT_MMA_WARPGROUP, LatentMma: Attention, "latent-mma-warpgroup",
    (q: T, k: u8, k_scale: f32, starts: i32, past_seqlens: i32, query_seqlens: i32,
     block_table: i32, out: T, lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: latent_mma::KEY_SIZE, rows: Float8Keys::ROWS, keys: Float8Keys::KEYS,
           threads: Float8Keys::THREADS,
           min_blocks: 2, shared: Float8Keys::SHARED_BYTES, hot: true, min_sm: Float8Keys::MIN_SM,
           formats: &[Format::Float8] }, {
    gqa_latent_mma_f8_bf16_r16_wgmma => Float8Keys::run_quantized::<bf16>, T = bf16;
});

// For splits of the keys by all kernels of this file.
kernels!(LATENT_MERGE, LatentMma: Merge, "latent-mma",
    (out: T, lse: f32, partial_out: f32, partial_lse: f32; p: LatentParams),
    each { head_size: latent::VALUE_SIZE, rows: 0, keys: 0, threads: latent::MERGE_THREADS,
           min_blocks: 8, shared: latent::MERGE_SHARED_BYTES, hot: true, min_sm: 80 }, {
    gqa_latent_merge_f16 => latent::merge::<f16>, T = f16;
    gqa_latent_merge_bf16 => latent::merge::<bf16>, T = bf16;
});
