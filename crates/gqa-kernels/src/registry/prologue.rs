//! What comes before attention, and what comes after it.

use crate::num::{Format, bf16, e4m3, f16};
use crate::params::{
    PagedGapsParams, PagedParams, PrologueParams, QuantizeOutputParams, RollingBiasParams,
    RollingParams, ScatterParams, TreeMaskParams,
};
use crate::prologue::{
    self,
    append::{append_quantized, concat_kv_in_place},
    append_dequantized::append_dequantized,
    concat::{concat_new_to_past_kv, concat_rows},
    dequantize::paged_dequantize,
    gaps::{self, paged_gaps},
    norm::qk_norm,
    paged::{paged_append, paged_append_quantized, paged_gather, paged_scatter},
    positions::seqlens_to_pos_ids,
    quantize::quantize_kv,
    quantize_output::quantize_output,
    rolling::{rolling_bias, rolling_kv, rolling_lengths},
    rope::{rotary_embedding, rotary_rows},
    scatter::scatter_rows,
    tree::tree_mask_rows,
    unpack::{unpack_qkv, unpack_qkv_with_rope_and_append_kv},
};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[
    CONCAT_KV_IN_PLACE,
    APPEND_DEQUANTIZED,
    APPEND_DEQUANTIZED_ROWS,
    APPEND_QUANTIZED,
    CONCAT_NEW_TO_PAST_KV,
    CONCAT_ROWS,
    UNPACK_QKV,
    UNPACK_QKV_WITH_ROPE_AND_APPEND_KV,
    QK_NORM,
    QUANTISE_KV,
    QUANTIZE_OUTPUT,
    ROTARY_EMBEDDING,
    ROTARY_ROWS,
    SEQLENS_TO_POS_IDS,
    PAGED_APPEND,
    PAGED_APPEND_CODES,
    PAGED_DEQUANTISE,
    PAGED_GATHER,
    PAGED_SCATTER,
    PAGED_GAPS,
    SCATTER_ROWS,
    TREE_MASK_ROWS,
    SLIDE_KV,
    SLIDE_LENGTHS,
    SLIDE_BIAS,
];

/// Rows of a kernel over a quantized KV cache of any format: `NAME => TYPE`. Behind the kernel's
/// name may be more that it is generic over.
macro_rules! quantized_kernels {
    ($table:ident, $role:ident, $body:ident, min_blocks: $min_blocks:literal, $args:tt,
        $rows:tt) => {
        quantized_kernels!($table, $role, $body [], min_blocks: $min_blocks, $args, $rows);
    };
    ($table:ident, $role:ident, $body:ident $more:tt, min_blocks: $min_blocks:literal, $args:tt,
        { $($name:ident => $t:ident;)* }) => {
        kernels!($table, Prologue: $role, "prologue", $args, { $(
            $name => quantized_kernels!(@body $body, $t, $more), T = $t, {
                head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS,
                min_blocks: $min_blocks, shared: 0, hot: true, min_sm: 70,
                formats: &Format::ALL };
        )* });
    };
    (@body $body:ident, $t:ident, [$($more:tt)*]) => { $body::<$t, $($more)*> };
}

kernels!(CONCAT_KV_IN_PLACE, Prologue: AppendInPlace, "prologue",
    (k: T, v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, present_k: T, present_v: T;
     p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_concat_kv_in_place_f32 => concat_kv_in_place::<f32>, T = f32;
    gqa_concat_kv_in_place_f16 => concat_kv_in_place::<f16>, T = f16;
    gqa_concat_kv_in_place_bf16 => concat_kv_in_place::<bf16>, T = bf16;
});

quantized_kernels!(APPEND_DEQUANTIZED, AppendDequantized, append_dequantized [false], min_blocks: 4,
    (k: T, v: T, cos: T, sin: T, position_ids: i64, k_scale: f32, v_scale: f32, seqlens_k: i32,
     present_k: u16, present_v: u16, k_numbers: T, v_numbers: T;
     p: PrologueParams), {
    gqa_append_dequantized_f32 => f32;
    gqa_append_dequantized_f16 => f16;
    gqa_append_dequantized_bf16 => bf16;
});

// Of rows that have scales of their own, which leave registers for three blocks.
quantized_kernels!(APPEND_DEQUANTIZED_ROWS, AppendDequantizedRows, append_dequantized [true],
    min_blocks: 3,
    (k: T, v: T, cos: T, sin: T, position_ids: i64, k_scale: f32, v_scale: f32, seqlens_k: i32,
     present_k: u16, present_v: u16, k_numbers: T, v_numbers: T;
     p: PrologueParams), {
    gqa_append_dequantized_rows_f32 => f32;
    gqa_append_dequantized_rows_f16 => f16;
    gqa_append_dequantized_rows_bf16 => bf16;
});

// For attention on tensor cores of Hopper, which takes types of 16 bits.
quantized_kernels!(APPEND_QUANTIZED, AppendQuantized, append_quantized, min_blocks: 4,
    (k: T, v: T, cos: T, sin: T, position_ids: i64, k_scale: f32, v_scale: f32, seqlens_k: i32,
     present_k: u16, present_v: u16; p: PrologueParams), {
    gqa_append_quantized_f16 => f16;
    gqa_append_quantized_bf16 => bf16;
});

kernels!(CONCAT_NEW_TO_PAST_KV, Prologue: ConcatNewToPast, "prologue",
    (past_k: T, past_v: T, k: T, v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32,
     present_k: T, present_v: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_concat_new_to_past_kv_f32 => concat_new_to_past_kv::<f32>, T = f32;
    gqa_concat_new_to_past_kv_f16 => concat_new_to_past_kv::<f16>, T = f16;
    gqa_concat_new_to_past_kv_bf16 => concat_new_to_past_kv::<bf16>, T = bf16;
});

kernels!(CONCAT_ROWS, Prologue: ConcatRows, "prologue",
    (past: T, new: T, present: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_concat_rows_f32 => concat_rows::<f32>, T = f32;
    gqa_concat_rows_f16 => concat_rows::<f16>, T = f16;
    gqa_concat_rows_bf16 => concat_rows::<bf16>, T = bf16;
});

kernels!(UNPACK_QKV, Prologue: Unpack, "prologue",
    (q: T, k: T, v: T, q_out: T, k_out: T, v_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_unpack_qkv_f32 => unpack_qkv::<f32>, T = f32;
    gqa_unpack_qkv_f16 => unpack_qkv::<f16>, T = f16;
    gqa_unpack_qkv_bf16 => unpack_qkv::<bf16>, T = bf16;
});

kernels!(UNPACK_QKV_WITH_ROPE_AND_APPEND_KV, Prologue: UnpackRotateAppend, "prologue",
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, q_out: T, present_k: T,
     present_v: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_unpack_qkv_with_rope_and_append_kv_f32
        => unpack_qkv_with_rope_and_append_kv::<f32>, T = f32;
    gqa_unpack_qkv_with_rope_and_append_kv_f16
        => unpack_qkv_with_rope_and_append_kv::<f16>, T = f16;
    gqa_unpack_qkv_with_rope_and_append_kv_bf16
        => unpack_qkv_with_rope_and_append_kv::<bf16>, T = bf16;
});

kernels!(QK_NORM, Prologue: QkNorm, "prologue",
    (q: T, k: T, q_norm_weight: T, k_norm_weight: T, q_out: T, k_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 8, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_qk_norm_f32 => qk_norm::<f32>, T = f32;
    gqa_qk_norm_f16 => qk_norm::<f16>, T = f16;
    gqa_qk_norm_bf16 => qk_norm::<bf16>, T = bf16;
});

quantized_kernels!(QUANTISE_KV, QuantizeKv, quantize_kv, min_blocks: 4,
    (past_k: u16, past_v: u16, k_scale: f32, v_scale: f32, seqlens_k: i32, present_k: u16,
     present_v: u16, k: T, v: T; p: PrologueParams), {
    gqa_quantize_kv_f32 => f32;
    gqa_quantize_kv_f16 => f16;
    gqa_quantize_kv_bf16 => bf16;
});

kernels!(QUANTIZE_OUTPUT, Prologue: QuantizeOutput, "prologue",
    (rows: T, out_scale: f32, out_f8: e4m3; p: QuantizeOutputParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70, outputs: [E4M3] }, {
    gqa_quantize_output_f32 => quantize_output::<f32>, T = f32;
    gqa_quantize_output_f16 => quantize_output::<f16>, T = f16;
    gqa_quantize_output_bf16 => quantize_output::<bf16>, T = bf16;
});

kernels!(ROTARY_EMBEDDING, Prologue: RotaryEmbedding, "prologue",
    (q: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, q_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_rotary_embedding_f32 => rotary_embedding::<f32>, T = f32;
    gqa_rotary_embedding_f16 => rotary_embedding::<f16>, T = f16;
    gqa_rotary_embedding_bf16 => rotary_embedding::<bf16>, T = bf16;
});

kernels!(ROTARY_ROWS, Prologue: RotaryRows, "prologue",
    (q: T, cos: T, sin: T, position_ids: i64, q_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_rotary_rows_f32 => rotary_rows::<f32>, T = f32;
    gqa_rotary_rows_f16 => rotary_rows::<f16>, T = f16;
    gqa_rotary_rows_bf16 => rotary_rows::<bf16>, T = bf16;
});

kernels!(SEQLENS_TO_POS_IDS, Prologue: GeneratePositions, "prologue",
    (seqlens_k: i32, position_ids: i64; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_seqlens_to_pos_ids => seqlens_to_pos_ids, T = f32;
});

kernels!(PAGED_APPEND, Prologue: PagedAppend, "prologue",
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, starts: i32, past_seqlens: i32,
     block_table: i32, slot_mapping: i32, q_out: T, k_cache: T, v_cache: T;
     p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 4, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_paged_append_f32 => paged_append::<f32>, T = f32;
    gqa_paged_append_f16 => paged_append::<f16>, T = f16;
    gqa_paged_append_bf16 => paged_append::<bf16>, T = bf16;
});

quantized_kernels!(PAGED_APPEND_CODES, PagedAppendQuantized, paged_append_quantized, min_blocks: 3,
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, k_scale: f32, v_scale: f32, starts: i32,
     past_seqlens: i32, block_table: i32, slot_mapping: i32,
     q_out: T, k_cache: u16, v_cache: u16; p: PagedParams), {
    gqa_paged_append_quantized_f32 => f32;
    gqa_paged_append_quantized_f16 => f16;
    gqa_paged_append_quantized_bf16 => bf16;
});

// For attention on tensor cores of Hopper, which takes types of 16 bits.
quantized_kernels!(PAGED_DEQUANTISE, PagedDequantize, paged_dequantize, min_blocks: 4,
    (k_scale: f32, v_scale: f32, starts: i32, past_seqlens: i32, block_table: i32, k_cache: u16,
     v_cache: u16, k: T, v: T, table: i32; p: PagedParams), {
    gqa_paged_dequantize_f16 => f16;
    gqa_paged_dequantize_bf16 => bf16;
});

// Rows move as bytes, whatever they hold.
kernels!(PAGED_GATHER, Prologue: PagedGather, "prologue",
    (starts: i32, past_seqlens: i32, block_table: i32, slot_mapping: i32, k_cache: u8, v_cache: u8,
     present_k: u8, present_v: u8, lengths: i32,
     k_scale: f32, v_scale: f32, present_k_scale: f32, present_v_scale: f32; p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_paged_gather => paged_gather, T = f32;
});

kernels!(PAGED_SCATTER, Prologue: PagedScatter, "prologue",
    (rows: u8, row_lse: f32, starts: i32, past_seqlens: i32, out: u8, lse: f32; p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_paged_scatter => paged_scatter, T = f32;
});

kernels!(PAGED_GAPS, Prologue: PagedGaps, "prologue",
    (q: T, cos: T, sin: T, starts: i32, past_seqlens: i32, block_table: i32, k_cache: T,
     v_cache: T, k_codes: u8, v_codes: u8, k_scale: f32, v_scale: f32,
     tree_mask: i64, head_sink: T, out: T, lse: f32; p: PagedGapsParams),
    each { head_size: 0, rows: 0, keys: 0, threads: gaps::THREADS, min_blocks: 0,
           shared: gaps::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_paged_gaps_f32 => paged_gaps::<f32>, T = f32;
    gqa_paged_gaps_f16 => paged_gaps::<f16>, T = f16;
    gqa_paged_gaps_bf16 => paged_gaps::<bf16>, T = bf16;
});

kernels!(SCATTER_ROWS, Prologue: ScatterRows, "prologue",
    (k: u8, v: u8, first: i32, present_k: u8, present_v: u8; p: ScatterParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_scatter_rows => scatter_rows, T = f32;
});

kernels!(TREE_MASK_ROWS, Prologue: TreeMaskRows, "prologue",
    (tree_mask: i64, seqlens_k: i32, starts: i32, past_seqlens: i32, mask: u8; p: TreeMaskParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_tree_mask_rows => tree_mask_rows, T = f32;
});

kernels!(SLIDE_KV, Prologue: RollingKv, "prologue",
    (from_k: u8, from_v: u8, to_k: u8, to_v: u8, seqlens_k: i32, lengths: i32, position_ids: i64;
     p: RollingParams), {
    gqa_rolling_kv => rolling_kv, T = f32, {
        head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
        hot: true, min_sm: 70, communicates: true };
});

kernels!(SLIDE_LENGTHS, Prologue: RollingLengths, "prologue",
    (seqlens_k: i32, lengths: i32, position_ids: i64; p: RollingParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_rolling_lengths => rolling_lengths, T = f32;
});

kernels!(SLIDE_BIAS, Prologue: RollingBias, "prologue",
    (bias: T, seqlens_k: i32, bias_out: T; p: RollingBiasParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0,
           hot: true, min_sm: 70 }, {
    gqa_rolling_bias_f32 => rolling_bias::<f32>, T = f32;
    gqa_rolling_bias_f16 => rolling_bias::<f16>, T = f16;
    gqa_rolling_bias_bf16 => rolling_bias::<bf16>, T = bf16;
});
