//! The fallback kernels: every mask and every head size.

use crate::attention::{
    general::{self, general},
    unfused::{self, unfused_scores, unfused_softmax, unfused_values},
};
use crate::num::{bf16, f16};
use crate::params::MaskedParams;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] =
    &[GENERAL, UNFUSED_SCORES, UNFUSED_SOFTMAX, UNFUSED_VALUES];

kernels!(GENERAL, General: Attention, "general",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, mask: u8, head_sink: T, out: T, out_f32: f32,
     lse: f32, output_qk: T; p: MaskedParams),
    each { head_size: general::MAX_HEAD_SIZE, rows: general::ROWS, keys: general::KEYS,
           threads: general::THREADS, min_blocks: 3,
           shared: general::SHARED_BYTES, hot: true, min_sm: 70, outputs: [Element, F32] }, {
    gqa_general_f32 => general::<f32>, T = f32;
    gqa_general_f16 => general::<f16>, T = f16;
    gqa_general_bf16 => general::<bf16>, T = bf16;
});

kernels!(UNFUSED_SCORES, Unfused: Scores, "unfused", (q: T, k: T, scores: f32; p: MaskedParams),
    each { head_size: 0, rows: unfused::TILE, keys: unfused::TILE, threads: unfused::THREADS,
           min_blocks: 4,
           shared: unfused::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_unfused_scores_f32 => unfused_scores::<f32>, T = f32;
    gqa_unfused_scores_f16 => unfused_scores::<f16>, T = f16;
    gqa_unfused_scores_bf16 => unfused_scores::<bf16>, T = bf16;
});

kernels!(UNFUSED_SOFTMAX, Unfused: Softmax, "unfused",
    (seqlens_k: i32, bias: T, mask: u8, head_sink: T, scores: f32, lse: f32, output_qk: T;
     p: MaskedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: unfused::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_unfused_softmax_f32 => unfused_softmax::<f32>, T = f32;
    gqa_unfused_softmax_f16 => unfused_softmax::<f16>, T = f16;
    gqa_unfused_softmax_bf16 => unfused_softmax::<bf16>, T = bf16;
});

kernels!(UNFUSED_VALUES, Unfused: Values, "unfused",
    (v: T, seqlens_k: i32, scores: f32, out: T, out_f32: f32; p: MaskedParams),
    each { head_size: 0, rows: unfused::TILE, keys: unfused::TILE, threads: unfused::THREADS,
           min_blocks: 4,
           shared: unfused::SHARED_BYTES, hot: true, min_sm: 70, outputs: [Element, F32] }, {
    gqa_unfused_values_f32 => unfused_values::<f32>, T = f32;
    gqa_unfused_values_f16 => unfused_values::<f16>, T = f16;
    gqa_unfused_values_bf16 => unfused_values::<bf16>, T = bf16;
});
