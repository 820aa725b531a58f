//! Attention whose output is wider than the registers of a warpgroup: over a latent KV cache, and
//! with heads of 512.

use crate::attention::latent::{self, Latent, LatentFloat8, Shape, Wide};
#[cfg(not(target_arch = "nvptx64"))]
use crate::num::Format;
use crate::num::{bf16, f16};
use crate::params::LatentParams;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[WIDE, LATENT, LATENT_FLOAT8, LATENT_MERGE];

kernels!(WIDE, HopperWide: Attention, "family-hopper-wide",
    ([k 0, v 1] q: T, starts: i32, past_seqlens: i32, query_seqlens: i32, block_table: i32, out: T, lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: Wide::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS, threads: latent::THREADS,
           min_blocks: 1, shared: Wide::SHARED_BYTES, hot: true, min_sm: 90, cluster: latent::MAX_CLUSTER }, {
    gqa_hopper_wide_f16 => latent::wide::<f16>, T = f16;
    gqa_hopper_wide_bf16 => latent::wide::<bf16>, T = bf16;
});

kernels!(LATENT, Latent: Attention, "family-latent",
    ([k 0] q: T, starts: i32, past_seqlens: i32, block_table: i32, out: T, lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: Latent::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS, threads: latent::THREADS,
           min_blocks: 1, shared: Latent::SHARED_BYTES, hot: true, min_sm: 90 }, {
    gqa_latent_f16 => latent::latent::<f16>, T = f16;
    gqa_latent_bf16 => latent::latent::<bf16>, T = bf16;
});

kernels!(LATENT_FLOAT8, Latent: Attention, "family-latent",
    ([k 0] q: T, k_scale: f32, starts: i32, past_seqlens: i32, block_table: i32, out: T, lse: f32, partial_out: f32, partial_lse: f32;
     p: LatentParams),
    each { head_size: LatentFloat8::KEY_SIZE, rows: latent::ROWS, keys: latent::KEYS, threads: latent::THREADS,
           min_blocks: 1, shared: LatentFloat8::SHARED_BYTES, hot: true, min_sm: 90, formats: &[Format::Float8] }, {
    gqa_latent_float8_f16 => latent::latent_float8::<f16>, T = f16;
    gqa_latent_float8_bf16 => latent::latent_float8::<bf16>, T = bf16;
});

kernels!(LATENT_MERGE, Latent: Merge, "family-latent",
    (out: T, lse: f32, partial_out: f32, partial_lse: f32; p: LatentParams),
    each { head_size: latent::VALUE_SIZE, rows: 0, keys: 0, threads: latent::MERGE_THREADS,
           min_blocks: 8, shared: latent::MERGE_SHARED_BYTES, hot: true, min_sm: 90 }, {
    gqa_latent_merge_f16 => latent::merge::<f16>, T = f16;
    gqa_latent_merge_bf16 => latent::merge::<bf16>, T = bf16;
});
