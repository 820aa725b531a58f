//! Decode steps with tensor memory.

use crate::attention::blackwell_decode::{self as decode, D64, D128, D128Float8};
#[cfg(not(target_arch = "nvptx64"))]
use crate::num::Format;
use crate::num::{bf16, e4m3, f16};
use crate::params::{DecodeParams, PagedDecodeParams};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[CONTIGUOUS, FLOAT8, PAGED, PAGED_FLOAT8];

/// Table rows of the kernels, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE, what its cache
/// holds`.
macro_rules! blackwell_decode_kernels {
    ($table:ident, $family:ident, $module:literal, $run:ident, $args:tt, { $($f16:ident, $bf16:ident => $shape:ty, $formats:expr;)* }) => {
        blackwell_decode_kernels!(@rows $table, $family, $module, $run, $args, { $($f16: f16 => $shape, $formats; $bf16: bf16 => $shape, $formats;)* });
    };
    (@rows $table:ident, $family:ident, $module:literal, $run:ident, $args:tt, { $($name:ident: $t:ident => $shape:ty, $formats:expr;)* }) => {
        kernels!($table, $family: Attention, $module, $args, { $(
            $name => <$shape>::$run, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: decode::KEYS, threads: decode::THREADS,
                min_blocks: 1, shared: decode::SHARED_BYTES, hot: true, min_sm: 100,
                cluster: decode::MOST_RANKS, pads: true, formats: $formats, outputs: [Element, F32, E4M3] };
        )* });
    };
}

blackwell_decode_kernels!(CONTIGUOUS, BlackwellDecode, "blackwell-decode", run,
    ([k 0, v 1] q: T, seqlens_k: i32, head_sink: T, out: T, out_f32: f32, out_f8: e4m3, out_scale: f32, lse: f32; p: DecodeParams), {
    gqa_blackwell_decode_f16_d64, gqa_blackwell_decode_bf16_d64 => D64, &[];
    gqa_blackwell_decode_f16_d128, gqa_blackwell_decode_bf16_d128 => D128, &[];
});

blackwell_decode_kernels!(FLOAT8, BlackwellDecode, "blackwell-decode", run_quantized,
    ([k 0, v 1] q: T, seqlens_k: i32, head_sink: T, k_scale: f32, v_scale: f32, out: T, out_f32: f32, out_f8: e4m3, out_scale: f32, lse: f32;
     p: DecodeParams), {
    gqa_blackwell_decode_f8_f16_d128, gqa_blackwell_decode_f8_bf16_d128 => D128Float8, &[Format::Float8];
});

blackwell_decode_kernels!(PAGED, BlackwellDecodePaged, "blackwell-decode-paged", run_paged,
    ([k 0, v 1] q: T, starts: i32, past_seqlens: i32, block_table: i32, head_sink: T, out: T, out_f32: f32, out_f8: e4m3, out_scale: f32, lse: f32;
     p: PagedDecodeParams), {
    gqa_blackwell_decode_paged_f16_d64, gqa_blackwell_decode_paged_bf16_d64 => D64, &[];
    gqa_blackwell_decode_paged_f16_d128, gqa_blackwell_decode_paged_bf16_d128 => D128, &[];
});

blackwell_decode_kernels!(PAGED_FLOAT8, BlackwellDecodePaged, "blackwell-decode-paged", run_paged_quantized,
    ([k 0, v 1] q: T, starts: i32, past_seqlens: i32, block_table: i32, head_sink: T, k_scale: f32, v_scale: f32,
     out: T, out_f32: f32, out_f8: e4m3, out_scale: f32, lse: f32; p: PagedDecodeParams), {
    gqa_blackwell_decode_paged_f8_f16_d128, gqa_blackwell_decode_paged_f8_bf16_d128 => D128Float8, &[Format::Float8];
});
