//! FlashAttention on tensor cores.

use crate::attention::{tiled, tiled_f32, tiled_wide};
use crate::num::{bf16, f16};
use crate::params::{AttentionParams, MaskedParams, PagedTiledParams};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] =
    &[TILED, TILED_MASKED, TILED_PAGED, TILED_TMA, TILED_F32, TILED_WIDE];

kernels_by_head_size!(TILED, Tiled: Attention, "tiled",
    (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32; p: AttentionParams),
    communicates: false, {
    gqa_tiled_f16_d128, gqa_tiled_bf16_d128 => tiled::D128, 2;
    gqa_tiled_f16_d128_k64, gqa_tiled_bf16_d128_k64 => tiled::D128Long, 2;
}, unless quick {
    gqa_tiled_f16_d32, gqa_tiled_bf16_d32 => tiled::D32, 3;
    gqa_tiled_f16_d64, gqa_tiled_bf16_d64 => tiled::D64, 2;
    gqa_tiled_f16_d80, gqa_tiled_bf16_d80 => tiled::D80, 2;
    gqa_tiled_f16_d96, gqa_tiled_bf16_d96 => tiled::D96, 2;
    gqa_tiled_f16_d160, gqa_tiled_bf16_d160 => tiled::D160, 2;
    gqa_tiled_f16_d192, gqa_tiled_bf16_d192 => tiled::D192, 2;
    gqa_tiled_f16_d224, gqa_tiled_bf16_d224 => tiled::D224, 2;
    gqa_tiled_f16_d256, gqa_tiled_bf16_d256 => tiled::D256, 2;
});

kernels_by_head_size!(TILED_MASKED, TiledMasked: Attention, "tiled-masked",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, mask: u8, head_sink: T, out: T, lse: f32;
     p: MaskedParams), communicates: false, {
    gqa_tiled_masked_f16_d128, gqa_tiled_masked_bf16_d128 => tiled::MaskedD128, 2;
}, unless quick {
    gqa_tiled_masked_f16_d64, gqa_tiled_masked_bf16_d64 => tiled::MaskedD64, 2;
    gqa_tiled_masked_f16_d256, gqa_tiled_masked_bf16_d256 => tiled::MaskedD256, 1;
});

/// Table rows of the kernels for paged KV caches, for both 16-bit types: `F16 NAME, BF16 NAME =>
/// SHAPE, CTAs per SM`.
macro_rules! tiled_paged_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)*) => {
        tiled_paged_kernels!(@rows $(
            $f16: f16 => $shape, $min_blocks;
            $bf16: bf16 => $shape, $min_blocks;
        )*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)*) => {
        kernels!(TILED_PAGED, TiledPaged: Attention, "tiled-paged",
            (q: T, k: T, v: T, cos: T, sin: T, starts: i32, past_seqlens: i32, block_table: i32,
             head_sink: T, out: T, lse: f32;
             p: PagedTiledParams), { $(
            $name => <$shape>::run_paged, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: 80 };
        )* });
    };
}

tiled_paged_kernels! {
    gqa_tiled_paged_f16_d64, gqa_tiled_paged_bf16_d64 => tiled::D64, 2;
    gqa_tiled_paged_f16_d128, gqa_tiled_paged_bf16_d128 => tiled::D128, 2;
    gqa_tiled_paged_f16_d256, gqa_tiled_paged_bf16_d256 => tiled::D256, 2;
}

/// Table rows of the kernels with TMA loads of K and V, for both 16-bit types: `F16 NAME, BF16 NAME
/// => SHAPE, CTAs per SM`.
macro_rules! tiled_tma_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)*) => {
        tiled_tma_kernels!(@rows $(
            $f16: f16 => $shape, $min_blocks;
            $bf16: bf16 => $shape, $min_blocks;
        )*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)*) => {
        kernels!(TILED_TMA, TiledTma: Attention, "tiled-tma",
            ([k 0, v 1] q: T, seqlens_k: i32, head_sink: T, out: T, lse: f32; p: AttentionParams),
            { $(
            $name => <$shape>::run_tma, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::TMA_SHARED_BYTES, hot: true,
                min_sm: 90 };
        )* });
    };
}

tiled_tma_kernels! {
    gqa_tiled_tma_f16_d128, gqa_tiled_tma_bf16_d128 => tiled::D128Long, 2;
    gqa_tiled_tma_f16_d192, gqa_tiled_tma_bf16_d192 => tiled::TallD192, 1;
    gqa_tiled_tma_f16_d256, gqa_tiled_tma_bf16_d256 => tiled::TallD256, 1;
}

/// Table rows of the float32 kernels: `NAME => SHAPE, CTAs per SM`. A `quick` device build leaves
/// out the second set.
macro_rules! tiled_f32_kernels {
    ({ $($quick:tt)* }, unless quick { $($full:tt)* }) => {
        tiled_f32_kernels!(@rows
            @(all()) $($quick)*
            @(not(all(target_arch = "nvptx64", feature = "quick"))) $($full)*);
    };
    (@rows $(@($when:meta) $($name:ident => $shape:ty, $min_blocks:literal;)*)*) => {
        kernels!(TILED_F32, TiledF32: Attention, "tiled-f32",
            (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32; p: AttentionParams),
            { $($(
            #[cfg($when)]
            $name => <$shape>::run, T = f32, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM };
        )*)* });
    };
}

tiled_f32_kernels!({
    gqa_tiled_f32_d128 => tiled_f32::D128, 2;
}, unless quick {
    gqa_tiled_f32_d32 => tiled_f32::D32, 3;
    gqa_tiled_f32_d64 => tiled_f32::D64, 3;
    gqa_tiled_f32_d80 => tiled_f32::D80, 2;
    gqa_tiled_f32_d96 => tiled_f32::D96, 2;
    gqa_tiled_f32_d192 => tiled_f32::D192, 2;
});

/// Table rows of the kernels for wide heads, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE,
/// CTAs per SM`.
macro_rules! tiled_wide_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)*) => {
        tiled_wide_kernels!(@rows $(
            $f16: f16 => $shape, $min_blocks;
            $bf16: bf16 => $shape, $min_blocks;
        )*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)*) => {
        kernels!(TILED_WIDE, TiledWide: Attention, "tiled-wide",
            (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32,
             partial_out: [f32; 2], partial_lse: f32; p: AttentionParams), { $(
            $name => <$shape>::run, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM };
        )* });
    };
}

tiled_wide_kernels! {
    gqa_tiled_wide_f16_r16, gqa_tiled_wide_bf16_r16 => tiled_wide::Rows16Keys32, 2;
    gqa_tiled_wide_f16_r16_k64, gqa_tiled_wide_bf16_r16_k64 => tiled_wide::Rows16Keys64, 1;
    gqa_tiled_wide_f16_r32, gqa_tiled_wide_bf16_r32 => tiled_wide::Rows32Keys32, 1;
    gqa_tiled_wide_f16_r32_k64, gqa_tiled_wide_bf16_r32_k64 => tiled_wide::Rows32Keys64, 1;
    gqa_tiled_wide_f16_r64, gqa_tiled_wide_bf16_r64 => tiled_wide::Rows64Keys32, 1;
    gqa_tiled_wide_f16_r64_k64, gqa_tiled_wide_bf16_r64_k64 => tiled_wide::Rows64Keys64, 1;
}
