//! THE table of kernels: one row per entry point.
//!
//! On the GPU a row becomes a PTX entry of that literal name; on the host it becomes an [`Entry`] with a function the simulator can
//! call. The PTX builder, the planner, the tests and the support page all read this table; nobody keeps a second list.

#[cfg(not(target_arch = "nvptx64"))]
mod entry;
#[cfg(not(target_arch = "nvptx64"))]
pub use entry::{Entry, Family, entries, find};

#[cfg_attr(
    target_arch = "nvptx64",
    allow(unused_imports, reason = "a device build has one family")
)]
use {
    crate::attention::{
        combine::{self, combine},
        decode,
        general::{self, general},
        hopper, split_kv, tiled, tiled_f32, tiled_wide,
        unfused::{self, unfused_scores, unfused_softmax, unfused_values},
    },
    crate::num::{Code, Float8, Int4, Int8, bf16, f16},
    crate::params::{
        AttentionParams, DecodeParams, HopperParams, MaskedParams, PagedDecodeParams, PagedParams,
        PrologueParams, SlideBiasParams, SlideParams,
    },
    crate::prologue::{
        self,
        append::concat_kv_in_place,
        concat::{concat_new_to_past_kv, concat_rows},
        norm::qk_norm,
        paged::{paged_append, paged_append_codes, paged_gather, paged_scatter},
        positions::seqlens_to_pos_ids,
        quantise::quantise_kv,
        rope::{rotary_embedding, rotary_rows},
        slide::{slide_bias, slide_kv, slide_lengths},
        unpack::{unpack_qkv, unpack_qkv_with_rope_and_append_kv},
    },
    crate::simt::Global,
};

/// Rows of one argument list. `NAME => BODY, T = TYPE, { head_size, rows, keys, threads, min_blocks, shared, hot, min_sm }`;
/// where blocks form clusters or pass data to each other, `cluster` (the most blocks of a cluster) and `communicates` follow, and `codes` where the
/// cache holds such.
/// Tensor maps come first, numbered from 0, `[q 0, k 1]`, then pointer arguments, the by-value parameter struct last. What all rows have in common may come before them:
/// `each { head_size, … }, { NAME => BODY, T = TYPE; }`.
macro_rules! kernels {
    ($table:ident, $family:ident, $feature:literal, $args:tt, each $spec:tt, { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty;)* }) => {
        kernels!($table, $family, $feature, $args, { $($(#[$meta])* $name => $body, $t = $ty, $spec;)* });
    };
    ($table:ident, $family:ident, $feature:literal, $args:tt, { $($(#[$meta:meta])* $name:ident => $body:expr, $t:ident = $ty:ty, $spec:tt;)* }) => {
        $(
            $(#[$meta])*
            #[cfg(all(target_arch = "nvptx64", feature = $feature))]
            const _: () = {
                #[allow(dead_code)]
                type $t = $ty;
                device_entry!($name, $body, $args);
            };
        )*
        #[cfg(not(target_arch = "nvptx64"))]
        pub(crate) static $table: &[Entry] = &[
            $($(#[$meta])* host_entry!($name, $body, $t = $ty, $family, $args, $spec),)*
        ];
    };
}

#[cfg(target_arch = "nvptx64")]
macro_rules! device_entry {
    ($name:ident, $body:expr, ($($arg:ident: $aty:ty),* ; $p:ident: $pty:ty)) => {
        device_entry!($name, $body, ([] $($arg: $aty),* ; $p: $pty));
    };
    ($name:ident, $body:expr, ([$($map:ident $i:literal),*] $($arg:ident: $aty:ty),* ; $p:ident: $pty:ty)) => {
        #[unsafe(no_mangle)]
        unsafe extern "ptx-kernel" fn $name($($map: crate::simt::TensorMapParam,)* $($arg: Global<$aty>,)* $p: $pty) {
            $(
                let _ = $map;
                let $map = crate::simt::tensor_map_param!($name, $i);
            )*
            $body($($map,)* $($arg,)* $p)
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! host_entry {
    ($name:ident, $body:expr, $t:ident = $ty:ty, $family:ident, ($($arg:ident: $aty:ty),* ; $p:ident: $pty:ty), $spec:tt) => {
        host_entry!($name, $body, $t = $ty, $family, ([] $($arg: $aty),* ; $p: $pty), $spec)
    };
    ($name:ident, $body:expr, $t:ident = $ty:ty, $family:ident, ([$($map:ident $i:literal),*] $($arg:ident: $aty:ty),* ; $p:ident: $pty:ty),
     { head_size: $head:expr, rows: $rows:expr, keys: $keys:expr, threads: $threads:expr, min_blocks: $min_blocks:expr, shared: $shared:expr, hot: $hot:expr, min_sm: $sm:expr
       $(, cluster: $cluster:expr)? $(, communicates: $communicates:expr)? $(, codes: $codes:expr)? }) => {
        Entry {
            name: stringify!($name),
            family: Family::$family,
            dtype: <$ty as crate::num::Element>::DTYPE,
            codes: optional!(None $(, Some($codes))?),
            head_size: $head,
            rows: $rows,
            keys: $keys,
            threads: $threads,
            min_blocks: $min_blocks,
            shared_bytes: $shared,
            hot: $hot,
            min_sm: $sm,
            max_cluster: optional!(1 $(, $cluster)?),
            communicates: optional!(false $(, $communicates)?),
            arguments: &[$(stringify!($map),)* $(stringify!($arg)),*],
            tensor_maps: { const MAPS: &[usize] = &[$($i),*]; MAPS.len() },
            params_bytes: size_of::<$pty>(),
            simulate: {
                #[allow(dead_code)]
                type $t = $ty;
                |arguments| {
                    let mut next = 0..;
                    $(let $map = arguments.tensor_map(next.next().unwrap_or_default());)*
                    $(let $arg: Global<$aty> = arguments.global(next.next().unwrap_or_default());)*
                    let $p: $pty = arguments.params(next.next().unwrap_or_default());
                    $body($($map,)* $($arg,)* $p)
                }
            },
        }
    };
}

/// What a row says, or else what most rows mean.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! optional {
    ($default:expr) => {
        $default
    };
    ($default:expr, $given:expr) => {
        $given
    };
}

/// Every table, one per argument list.
#[cfg(not(target_arch = "nvptx64"))]
static TABLES: &[&[Entry]] = &[
    CONCAT_KV_IN_PLACE,
    CONCAT_NEW_TO_PAST_KV,
    CONCAT_ROWS,
    UNPACK_QKV,
    UNPACK_QKV_WITH_ROPE_AND_APPEND_KV,
    QK_NORM,
    QUANTISE_KV,
    ROTARY_EMBEDDING,
    ROTARY_ROWS,
    SEQLENS_TO_POS_IDS,
    PAGED_APPEND,
    PAGED_APPEND_CODES,
    PAGED_GATHER,
    PAGED_SCATTER,
    SLIDE_KV,
    SLIDE_LENGTHS,
    SLIDE_BIAS,
    GENERAL,
    GENERAL_OUT32,
    UNFUSED_SCORES,
    UNFUSED_SOFTMAX,
    UNFUSED_VALUES,
    UNFUSED_VALUES_OUT32,
    TILED,
    TILED_MASKED,
    TILED_F32,
    TILED_WIDE,
    HOPPER,
    HOPPER_TALL,
    HOPPER_SPLIT,
    HOPPER_MASKED,
    SPLIT_KV,
    COMBINE,
    COMBINE_OUT32,
    DECODE,
    DECODE_OUT32,
    DECODE_CODES,
    DECODE_PAGED,
];

kernels!(CONCAT_KV_IN_PLACE, Prologue, "family-prologue",
    (k: T, v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, present_k: T, present_v: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_concat_kv_in_place_f32 => concat_kv_in_place::<f32>, T = f32;
    gqa_concat_kv_in_place_f16 => concat_kv_in_place::<f16>, T = f16;
    gqa_concat_kv_in_place_bf16 => concat_kv_in_place::<bf16>, T = bf16;
});

kernels!(CONCAT_NEW_TO_PAST_KV, Prologue, "family-prologue",
    (past_k: T, past_v: T, k: T, v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, present_k: T, present_v: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_concat_new_to_past_kv_f32 => concat_new_to_past_kv::<f32>, T = f32;
    gqa_concat_new_to_past_kv_f16 => concat_new_to_past_kv::<f16>, T = f16;
    gqa_concat_new_to_past_kv_bf16 => concat_new_to_past_kv::<bf16>, T = bf16;
});

kernels!(CONCAT_ROWS, Prologue, "family-prologue", (past: T, new: T, present: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_concat_rows_f32 => concat_rows::<f32>, T = f32;
    gqa_concat_rows_f16 => concat_rows::<f16>, T = f16;
    gqa_concat_rows_bf16 => concat_rows::<bf16>, T = bf16;
});

kernels!(UNPACK_QKV, Prologue, "family-prologue", (q: T, k: T, v: T, q_out: T, k_out: T, v_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_unpack_qkv_f32 => unpack_qkv::<f32>, T = f32;
    gqa_unpack_qkv_f16 => unpack_qkv::<f16>, T = f16;
    gqa_unpack_qkv_bf16 => unpack_qkv::<bf16>, T = bf16;
});

kernels!(UNPACK_QKV_WITH_ROPE_AND_APPEND_KV, Prologue, "family-prologue",
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, q_out: T, present_k: T, present_v: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_unpack_qkv_with_rope_and_append_kv_f32 => unpack_qkv_with_rope_and_append_kv::<f32>, T = f32;
    gqa_unpack_qkv_with_rope_and_append_kv_f16 => unpack_qkv_with_rope_and_append_kv::<f16>, T = f16;
    gqa_unpack_qkv_with_rope_and_append_kv_bf16 => unpack_qkv_with_rope_and_append_kv::<bf16>, T = bf16;
});

kernels!(QK_NORM, Prologue, "family-prologue",
    (q: T, k: T, q_norm_weight: T, k_norm_weight: T, q_out: T, k_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 8, shared: 0, hot: true, min_sm: 70 }, {
    gqa_qk_norm_f32 => qk_norm::<f32>, T = f32;
    gqa_qk_norm_f16 => qk_norm::<f16>, T = f16;
    gqa_qk_norm_bf16 => qk_norm::<bf16>, T = bf16;
});

kernels!(QUANTISE_KV, Prologue, "family-prologue",
    (past_k: u32, past_v: u32, k_scale: f32, v_scale: f32, seqlens_k: i32, present_k: u32, present_v: u32, k: T, v: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 4, shared: 0, hot: true, min_sm: 70 }, {
    gqa_quantise_kv_i8_f32 => quantise_kv::<f32, Int8>, T = f32;
    gqa_quantise_kv_i8_f16 => quantise_kv::<f16, Int8>, T = f16;
    gqa_quantise_kv_i8_bf16 => quantise_kv::<bf16, Int8>, T = bf16;
    gqa_quantise_kv_i4_f32 => quantise_kv::<f32, Int4>, T = f32;
    gqa_quantise_kv_i4_f16 => quantise_kv::<f16, Int4>, T = f16;
    gqa_quantise_kv_i4_bf16 => quantise_kv::<bf16, Int4>, T = bf16;
    gqa_quantise_kv_f8_f32 => quantise_kv::<f32, Float8>, T = f32;
    gqa_quantise_kv_f8_f16 => quantise_kv::<f16, Float8>, T = f16;
    gqa_quantise_kv_f8_bf16 => quantise_kv::<bf16, Float8>, T = bf16;
});

kernels!(ROTARY_EMBEDDING, Prologue, "family-prologue",
    (q: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, q_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_rotary_embedding_f32 => rotary_embedding::<f32>, T = f32;
    gqa_rotary_embedding_f16 => rotary_embedding::<f16>, T = f16;
    gqa_rotary_embedding_bf16 => rotary_embedding::<bf16>, T = bf16;
});

kernels!(ROTARY_ROWS, Prologue, "family-prologue",
    (q: T, cos: T, sin: T, position_ids: i64, q_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_rotary_rows_f32 => rotary_rows::<f32>, T = f32;
    gqa_rotary_rows_f16 => rotary_rows::<f16>, T = f16;
    gqa_rotary_rows_bf16 => rotary_rows::<bf16>, T = bf16;
});

kernels!(SEQLENS_TO_POS_IDS, Prologue, "family-prologue", (seqlens_k: i32, position_ids: i64; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_seqlens_to_pos_ids => seqlens_to_pos_ids, T = f32;
});

kernels!(PAGED_APPEND, Prologue, "family-prologue",
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, starts: i32, past_seqlens: i32, block_table: i32, slot_mapping: i32, q_out: T, k_cache: T, v_cache: T;
     p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_paged_append_f32 => paged_append::<f32>, T = f32;
    gqa_paged_append_f16 => paged_append::<f16>, T = f16;
    gqa_paged_append_bf16 => paged_append::<bf16>, T = bf16;
});

kernels!(PAGED_APPEND_CODES, Prologue, "family-prologue",
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, k_scale: f32, v_scale: f32, starts: i32, past_seqlens: i32, block_table: i32, slot_mapping: i32,
     q_out: T, k_cache: u16, v_cache: u16; p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 2, shared: 0, hot: true, min_sm: 70 }, {
    gqa_paged_append_codes_i8_f32 => paged_append_codes::<f32, Int8>, T = f32;
    gqa_paged_append_codes_i8_f16 => paged_append_codes::<f16, Int8>, T = f16;
    gqa_paged_append_codes_i8_bf16 => paged_append_codes::<bf16, Int8>, T = bf16;
    gqa_paged_append_codes_i4_f32 => paged_append_codes::<f32, Int4>, T = f32;
    gqa_paged_append_codes_i4_f16 => paged_append_codes::<f16, Int4>, T = f16;
    gqa_paged_append_codes_i4_bf16 => paged_append_codes::<bf16, Int4>, T = bf16;
    gqa_paged_append_codes_f8_f32 => paged_append_codes::<f32, Float8>, T = f32;
    gqa_paged_append_codes_f8_f16 => paged_append_codes::<f16, Float8>, T = f16;
    gqa_paged_append_codes_f8_bf16 => paged_append_codes::<bf16, Float8>, T = bf16;
});

// Rows move as bytes, whatever they hold.
kernels!(PAGED_GATHER, Prologue, "family-prologue",
    (starts: i32, past_seqlens: i32, block_table: i32, slot_mapping: i32, k_cache: u8, v_cache: u8, present_k: u8, present_v: u8, lengths: i32; p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_paged_gather => paged_gather, T = f32;
});

kernels!(PAGED_SCATTER, Prologue, "family-prologue", (rows: u8, starts: i32, past_seqlens: i32, out: u8; p: PagedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_paged_scatter => paged_scatter, T = f32;
});

kernels!(SLIDE_KV, Prologue, "family-prologue",
    (from_k: u8, from_v: u8, to_k: u8, to_v: u8, seqlens_k: i32, lengths: i32, position_ids: i64; p: SlideParams), {
    gqa_slide_kv => slide_kv, T = f32, {
        head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70, communicates: true };
});

kernels!(SLIDE_LENGTHS, Prologue, "family-prologue", (seqlens_k: i32, lengths: i32, position_ids: i64; p: SlideParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_slide_lengths => slide_lengths, T = f32;
});

kernels!(SLIDE_BIAS, Prologue, "family-prologue", (bias: T, seqlens_k: i32, bias_out: T; p: SlideBiasParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_slide_bias_f32 => slide_bias::<f32>, T = f32;
    gqa_slide_bias_f16 => slide_bias::<f16>, T = f16;
    gqa_slide_bias_bf16 => slide_bias::<bf16>, T = bf16;
});

kernels!(GENERAL, General, "family-general",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, mask: u8, head_sink: T, out: T, lse: f32, output_qk: T; p: MaskedParams),
    each { head_size: general::MAX_HEAD_SIZE, rows: general::ROWS, keys: general::KEYS, threads: general::THREADS, min_blocks: 3,
           shared: general::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_general_f32 => general::<f32, f32>, T = f32;
    gqa_general_f16 => general::<f16, f16>, T = f16;
    gqa_general_bf16 => general::<bf16, bf16>, T = bf16;
});

kernels!(GENERAL_OUT32, General, "family-general",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, mask: u8, head_sink: T, out_f32: f32, lse: f32, output_qk: T; p: MaskedParams),
    each { head_size: general::MAX_HEAD_SIZE, rows: general::ROWS, keys: general::KEYS, threads: general::THREADS, min_blocks: 3,
           shared: general::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_general_out32_f16 => general::<f16, f32>, T = f16;
    gqa_general_out32_bf16 => general::<bf16, f32>, T = bf16;
});

kernels!(UNFUSED_SCORES, Unfused, "family-unfused", (q: T, k: T, scores: f32; p: MaskedParams),
    each { head_size: general::MAX_HEAD_SIZE, rows: unfused::TILE, keys: unfused::TILE, threads: unfused::THREADS, min_blocks: 4,
           shared: unfused::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_unfused_scores_f32 => unfused_scores::<f32>, T = f32;
    gqa_unfused_scores_f16 => unfused_scores::<f16>, T = f16;
    gqa_unfused_scores_bf16 => unfused_scores::<bf16>, T = bf16;
});

kernels!(UNFUSED_SOFTMAX, Unfused, "family-unfused",
    (seqlens_k: i32, bias: T, mask: u8, head_sink: T, scores: f32, lse: f32, output_qk: T; p: MaskedParams),
    each { head_size: 0, rows: 0, keys: 0, threads: unfused::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_unfused_softmax_f32 => unfused_softmax::<f32>, T = f32;
    gqa_unfused_softmax_f16 => unfused_softmax::<f16>, T = f16;
    gqa_unfused_softmax_bf16 => unfused_softmax::<bf16>, T = bf16;
});

kernels!(UNFUSED_VALUES, Unfused, "family-unfused", (v: T, seqlens_k: i32, scores: f32, out: T; p: MaskedParams),
    each { head_size: 0, rows: unfused::TILE, keys: unfused::TILE, threads: unfused::THREADS, min_blocks: 4,
           shared: unfused::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_unfused_values_f32 => unfused_values::<f32, f32>, T = f32;
    gqa_unfused_values_f16 => unfused_values::<f16, f16>, T = f16;
    gqa_unfused_values_bf16 => unfused_values::<bf16, bf16>, T = bf16;
});

kernels!(UNFUSED_VALUES_OUT32, Unfused, "family-unfused", (v: T, seqlens_k: i32, scores: f32, out_f32: f32; p: MaskedParams),
    each { head_size: 0, rows: unfused::TILE, keys: unfused::TILE, threads: unfused::THREADS, min_blocks: 4,
           shared: unfused::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_unfused_values_out32_f16 => unfused_values::<f16, f32>, T = f16;
    gqa_unfused_values_out32_bf16 => unfused_values::<bf16, f32>, T = bf16;
});

/// Rows of a kernel with one shape of tiles per head size, for both 16-bit types:
/// `F16 NAME, BF16 NAME => SHAPE, blocks that fit on an SM together`. A `quick` device build leaves out the second set.
macro_rules! kernels_by_head_size {
    ($table:ident, $family:ident, $feature:literal, $args:tt, communicates: $communicates:literal, { $($quick:tt)* }, unless quick { $($full:tt)* }) => {
        kernels_by_head_size!(@rows $table, $family, $feature, $args, $communicates, {
            @(all()) $($quick)*
            @(not(all(target_arch = "nvptx64", feature = "quick"))) $($full)*
        });
    };
    (@rows $table:ident, $family:ident, $feature:literal, $args:tt, $communicates:literal, {
        $(@($when:meta) $($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)*)*
    }) => {
        kernels!($table, $family, $feature, $args, { $($(
            #[cfg($when)]
            $f16 => <$shape>::run, T = f16, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM,
                communicates: $communicates };
            #[cfg($when)]
            $bf16 => <$shape>::run, T = bf16, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM,
                communicates: $communicates };
        )*)* });
    };
}

kernels_by_head_size!(TILED, Tiled, "family-tiled",
    (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32; p: AttentionParams), communicates: false, {
    gqa_tiled_f16_d128, gqa_tiled_bf16_d128 => tiled::D128, 2;
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

kernels_by_head_size!(TILED_MASKED, TiledMasked, "family-tiled-masked",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, mask: u8, head_sink: T, out: T, lse: f32; p: MaskedParams), communicates: false, {
    gqa_tiled_masked_f16_d128, gqa_tiled_masked_bf16_d128 => tiled::MaskedD128, 2;
}, unless quick {
    gqa_tiled_masked_f16_d64, gqa_tiled_masked_bf16_d64 => tiled::MaskedD64, 2;
    gqa_tiled_masked_f16_d256, gqa_tiled_masked_bf16_d256 => tiled::MaskedD256, 1;
});

/// Rows of the float32 kernels: `NAME => SHAPE, blocks that fit on an SM together`. A `quick` device build leaves out the second set.
macro_rules! tiled_f32_kernels {
    ({ $($quick:tt)* }, unless quick { $($full:tt)* }) => {
        tiled_f32_kernels!(@rows @(all()) $($quick)* @(not(all(target_arch = "nvptx64", feature = "quick"))) $($full)*);
    };
    (@rows $(@($when:meta) $($name:ident => $shape:ty, $min_blocks:literal;)*)*) => {
        kernels!(TILED_F32, TiledF32, "family-tiled-f32",
            (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32; p: AttentionParams), { $($(
            #[cfg($when)]
            $name => <$shape>::run, T = f32, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM };
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

/// Rows of the kernels for wide heads, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE, blocks that fit on an SM together`.
macro_rules! tiled_wide_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)*) => {
        tiled_wide_kernels!(@rows $($f16: f16 => $shape, $min_blocks; $bf16: bf16 => $shape, $min_blocks;)*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)*) => {
        kernels!(TILED_WIDE, TiledWide, "family-tiled-wide",
            (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32, partial_out: [f32; 2], partial_lse: f32; p: AttentionParams), { $(
            $name => <$shape>::run, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM };
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

kernels_by_head_size!(HOPPER, Hopper, "family-hopper",
    ([q 0, k 1, v 2] cos: T, sin: T, seqlens_k: i32, head_sink: T, out: T, lse: f32, counter: u32; p: HopperParams), communicates: true, {
    gqa_hopper_f16_d128, gqa_hopper_bf16_d128 => hopper::D128<false>, 1;
}, unless quick {
    gqa_hopper_f16_d128_k176, gqa_hopper_bf16_d128_k176 => hopper::D128Long, 1;
    gqa_hopper_f16_d64_r128, gqa_hopper_bf16_d64_r128 => hopper::D64Short, 1;
    gqa_hopper_f16_d64_lse, gqa_hopper_bf16_d64_lse => hopper::D64Exact<false>, 1;
    gqa_hopper_f16_d80_r128, gqa_hopper_bf16_d80_r128 => hopper::D80Short, 1;
    gqa_hopper_f16_d96_r128, gqa_hopper_bf16_d96_r128 => hopper::D96Short, 1;
    gqa_hopper_f16_d160, gqa_hopper_bf16_d160 => hopper::D160, 1;
    gqa_hopper_f16_d192, gqa_hopper_bf16_d192 => hopper::D192<false>, 1;
    gqa_hopper_f16_d224, gqa_hopper_bf16_d224 => hopper::D224, 1;
    gqa_hopper_f16_d256, gqa_hopper_bf16_d256 => hopper::D256<false>, 1;
});

kernels_by_head_size!(HOPPER_TALL, Hopper, "family-hopper",
    ([q 0, k 1, v 2] seqlens_k: i32, head_sink: T, out: T, lse: f32, counter: u32; p: AttentionParams), communicates: true, {
}, unless quick {
    gqa_hopper_f16_d64, gqa_hopper_bf16_d64 => hopper::D64, 1;
    gqa_hopper_f16_d80, gqa_hopper_bf16_d80 => hopper::D80, 1;
    gqa_hopper_f16_d96, gqa_hopper_bf16_d96 => hopper::D96, 1;
});

kernels_by_head_size!(HOPPER_SPLIT, Hopper, "family-hopper",
    ([q 0, k 1, v 2] seqlens_k: i32, head_sink: T, out: T, partial_out: f32, partial_lse: f32, counter: u32; p: AttentionParams), communicates: true, {
    gqa_hopper_split_f16_d128, gqa_hopper_split_bf16_d128 => hopper::D128<true>, 1;
}, unless quick {
    gqa_hopper_split_f16_d64, gqa_hopper_split_bf16_d64 => hopper::D64Exact<true>, 1;
    gqa_hopper_split_f16_d192, gqa_hopper_split_bf16_d192 => hopper::D192<true>, 1;
    gqa_hopper_split_f16_d256, gqa_hopper_split_bf16_d256 => hopper::D256<true>, 1;
});

kernels_by_head_size!(HOPPER_MASKED, HopperMasked, "family-hopper-masked",
    ([q 0, k 1, v 2, tiles 3] seqlens_k: i32, bias: T, mask: u8, head_sink: T, out: T, lse: f32, counter: u32; p: MaskedParams), communicates: true, {
    gqa_hopper_masked_f16_d128, gqa_hopper_masked_bf16_d128 => hopper::MaskedD128, 1;
}, unless quick {
    gqa_hopper_masked_f16_d64, gqa_hopper_masked_bf16_d64 => hopper::MaskedD64, 1;
    gqa_hopper_masked_f16_d256, gqa_hopper_masked_bf16_d256 => hopper::MaskedD256, 1;
});

kernels_by_head_size!(SPLIT_KV, SplitKv, "family-split-kv",
    (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32, partial_out: f32, partial_lse: f32; p: AttentionParams), communicates: false, {
    gqa_split_kv_f16_d128, gqa_split_kv_bf16_d128 => split_kv::D128, 3;
}, unless quick {
    gqa_split_kv_f16_d32, gqa_split_kv_bf16_d32 => split_kv::D32, 4;
    gqa_split_kv_f16_d64, gqa_split_kv_bf16_d64 => split_kv::D64, 4;
    gqa_split_kv_f16_d80, gqa_split_kv_bf16_d80 => split_kv::D80, 3;
    gqa_split_kv_f16_d96, gqa_split_kv_bf16_d96 => split_kv::D96, 3;
    gqa_split_kv_f16_d160, gqa_split_kv_bf16_d160 => split_kv::D160, 3;
    gqa_split_kv_f16_d192, gqa_split_kv_bf16_d192 => split_kv::D192, 3;
    gqa_split_kv_f16_d224, gqa_split_kv_bf16_d224 => split_kv::D224, 2;
    gqa_split_kv_f16_d256, gqa_split_kv_bf16_d256 => split_kv::D256, 2;
});

kernels!(COMBINE, SplitKv, "family-split-kv",
    (partial_out: f32, partial_lse: f32, seqlens_k: i32, head_sink: T, out: T, lse: f32; p: AttentionParams),
    each { head_size: 0, rows: 0, keys: 0, threads: combine::THREADS, min_blocks: 6, shared: combine::SHARED_BYTES, hot: true, min_sm: 80 }, {
    gqa_combine_f16 => combine::<f16, f16>, T = f16;
    gqa_combine_bf16 => combine::<bf16, bf16>, T = bf16;
});

kernels!(COMBINE_OUT32, SplitKv, "family-split-kv",
    (partial_out: f32, partial_lse: f32, seqlens_k: i32, head_sink: T, out_f32: f32, lse: f32; p: AttentionParams),
    each { head_size: 0, rows: 0, keys: 0, threads: combine::THREADS, min_blocks: 6, shared: combine::SHARED_BYTES, hot: true, min_sm: 80 }, {
    gqa_combine_out32_f16 => combine::<f16, f32>, T = f16;
    gqa_combine_out32_bf16 => combine::<bf16, f32>, T = bf16;
});

/// Rows of the decode kernels, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE, BLOCKS PER SM`.
macro_rules! decode_kernels {
    ($table:ident, $out:ident: $o:ty, { $($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)* }) => {
        decode_kernels!(@rows $table, $out: $o, { $($f16: f16 => $shape, $min_blocks; $bf16: bf16 => $shape, $min_blocks;)* });
    };
    (@rows $table:ident, $out:ident: $o:ty, { $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)* }) => {
        kernels!($table, Decode, "family-decode",
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, head_sink: T, k: T, v: T, $out: $o, lse: f32,
             partial_out: f32, partial_states: [f32; 2], arrivals: u32; p: DecodeParams), { $(
            $name => <$shape>::run, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, communicates: true };
        )* });
    };
}

decode_kernels!(DECODE, out: T, {
    gqa_decode_f16_d64_r8, gqa_decode_bf16_d64_r8 => decode::D64<1>, 1;
    gqa_decode_f16_d64_r8_w4, gqa_decode_bf16_d64_r8_w4 => decode::D64W4<1>, 2;
    gqa_decode_f16_d64_r16, gqa_decode_bf16_d64_r16 => decode::D64<2>, 1;
    gqa_decode_f16_d64_r16_w4, gqa_decode_bf16_d64_r16_w4 => decode::D64W4<2>, 2;
    gqa_decode_f16_d64_r32, gqa_decode_bf16_d64_r32 => decode::D64R32, 1;
    gqa_decode_f16_d64_r64, gqa_decode_bf16_d64_r64 => decode::D64R64, 1;
    gqa_decode_f16_d80_r8, gqa_decode_bf16_d80_r8 => decode::D80<1>, 1;
    gqa_decode_f16_d80_r8_w4, gqa_decode_bf16_d80_r8_w4 => decode::D80W4<1>, 2;
    gqa_decode_f16_d80_r16, gqa_decode_bf16_d80_r16 => decode::D80<2>, 1;
    gqa_decode_f16_d80_r16_w4, gqa_decode_bf16_d80_r16_w4 => decode::D80W4<2>, 2;
    gqa_decode_f16_d80_r32, gqa_decode_bf16_d80_r32 => decode::D80R32, 1;
    gqa_decode_f16_d80_r64, gqa_decode_bf16_d80_r64 => decode::D80R64, 1;
    gqa_decode_f16_d96_r8, gqa_decode_bf16_d96_r8 => decode::D96<1>, 1;
    gqa_decode_f16_d96_r8_w4, gqa_decode_bf16_d96_r8_w4 => decode::D96W4<1>, 2;
    gqa_decode_f16_d96_r16, gqa_decode_bf16_d96_r16 => decode::D96<2>, 1;
    gqa_decode_f16_d96_r16_w4, gqa_decode_bf16_d96_r16_w4 => decode::D96W4<2>, 2;
    gqa_decode_f16_d96_r32, gqa_decode_bf16_d96_r32 => decode::D96R32, 1;
    gqa_decode_f16_d96_r64, gqa_decode_bf16_d96_r64 => decode::D96R64, 1;
    gqa_decode_f16_d128_r8, gqa_decode_bf16_d128_r8 => decode::D128<1>, 1;
    gqa_decode_f16_d128_r8_w4, gqa_decode_bf16_d128_r8_w4 => decode::D128W4<1>, 2;
    gqa_decode_f16_d128_r16, gqa_decode_bf16_d128_r16 => decode::D128<2>, 1;
    gqa_decode_f16_d128_r16_w4, gqa_decode_bf16_d128_r16_w4 => decode::D128W4<2>, 2;
    gqa_decode_f16_d128_r32, gqa_decode_bf16_d128_r32 => decode::D128R32, 1;
    gqa_decode_f16_d128_r64, gqa_decode_bf16_d128_r64 => decode::D128R64, 1;
    gqa_decode_f16_d192_r8, gqa_decode_bf16_d192_r8 => decode::D192<1>, 1;
    gqa_decode_f16_d192_r8_w4, gqa_decode_bf16_d192_r8_w4 => decode::D192W4<1>, 2;
    gqa_decode_f16_d192_r16, gqa_decode_bf16_d192_r16 => decode::D192<2>, 1;
    gqa_decode_f16_d192_r16_w4, gqa_decode_bf16_d192_r16_w4 => decode::D192W4<2>, 2;
    gqa_decode_f16_d256_r8, gqa_decode_bf16_d256_r8 => decode::D256<1>, 1;
    gqa_decode_f16_d256_r8_w4, gqa_decode_bf16_d256_r8_w4 => decode::D256W4<1>, 2;
    gqa_decode_f16_d256_r16, gqa_decode_bf16_d256_r16 => decode::D256<2>, 1;
    gqa_decode_f16_d256_r16_w4, gqa_decode_bf16_d256_r16_w4 => decode::D256W4<2>, 2;
});

// Output in f32: one shape per head size.
decode_kernels!(DECODE_OUT32, out_f32: f32, {
    gqa_decode_out32_f16_d64_r16, gqa_decode_out32_bf16_d64_r16 => decode::D64<2>, 1;
    gqa_decode_out32_f16_d80_r16, gqa_decode_out32_bf16_d80_r16 => decode::D80<2>, 1;
    gqa_decode_out32_f16_d96_r16, gqa_decode_out32_bf16_d96_r16 => decode::D96<2>, 1;
    gqa_decode_out32_f16_d128_r16, gqa_decode_out32_bf16_d128_r16 => decode::D128<2>, 1;
    gqa_decode_out32_f16_d192_r16, gqa_decode_out32_bf16_d192_r16 => decode::D192<2>, 1;
    gqa_decode_out32_f16_d256_r16, gqa_decode_out32_bf16_d256_r16 => decode::D256<2>, 1;
});

/// Rows of the decode kernels whose cache holds codes, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE, FORMAT`.
macro_rules! decode_codes_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty, $format:ident;)*) => {
        decode_codes_kernels!(@rows $($f16: f16 => $shape, $format; $bf16: bf16 => $shape, $format;)*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty, $format:ident;)*) => {
        kernels!(DECODE_CODES, DecodeCodes, "family-decode-codes",
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, head_sink: T, k: u8, v: u8, k_scale: f32, v_scale: f32,
             out: T, lse: f32, partial_out: f32, partial_states: [f32; 2], arrivals: u32; p: DecodeParams), { $(
            $name => <$shape>::run_codes::<$format, _, _>, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: 1, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, communicates: true, codes: $format::FORMAT };
        )* });
    };
}

decode_codes_kernels! {
    gqa_decode_i8_f16_d64_r8, gqa_decode_i8_bf16_d64_r8 => decode::D64Codes8<1>, Int8;
    gqa_decode_i8_f16_d64_r16, gqa_decode_i8_bf16_d64_r16 => decode::D64Codes8<2>, Int8;
    gqa_decode_i8_f16_d128_r8, gqa_decode_i8_bf16_d128_r8 => decode::D128Codes8<1>, Int8;
    gqa_decode_i8_f16_d128_r16, gqa_decode_i8_bf16_d128_r16 => decode::D128Codes8<2>, Int8;
    gqa_decode_i8_f16_d256_r8, gqa_decode_i8_bf16_d256_r8 => decode::D256Codes8<1>, Int8;
    gqa_decode_i8_f16_d256_r16, gqa_decode_i8_bf16_d256_r16 => decode::D256Codes8<2>, Int8;
    gqa_decode_f8_f16_d64_r8, gqa_decode_f8_bf16_d64_r8 => decode::D64Codes8<1>, Float8;
    gqa_decode_f8_f16_d64_r16, gqa_decode_f8_bf16_d64_r16 => decode::D64Codes8<2>, Float8;
    gqa_decode_f8_f16_d128_r8, gqa_decode_f8_bf16_d128_r8 => decode::D128Codes8<1>, Float8;
    gqa_decode_f8_f16_d128_r16, gqa_decode_f8_bf16_d128_r16 => decode::D128Codes8<2>, Float8;
    gqa_decode_f8_f16_d256_r8, gqa_decode_f8_bf16_d256_r8 => decode::D256Codes8<1>, Float8;
    gqa_decode_f8_f16_d256_r16, gqa_decode_f8_bf16_d256_r16 => decode::D256Codes8<2>, Float8;
    gqa_decode_i4_f16_d64_r8, gqa_decode_i4_bf16_d64_r8 => decode::D64Codes4<1>, Int4;
    gqa_decode_i4_f16_d64_r16, gqa_decode_i4_bf16_d64_r16 => decode::D64Codes4<2>, Int4;
    gqa_decode_i4_f16_d128_r8, gqa_decode_i4_bf16_d128_r8 => decode::D128Codes4<1>, Int4;
    gqa_decode_i4_f16_d128_r16, gqa_decode_i4_bf16_d128_r16 => decode::D128Codes4<2>, Int4;
    gqa_decode_i4_f16_d256_r8, gqa_decode_i4_bf16_d256_r8 => decode::D256Codes4<1>, Int4;
    gqa_decode_i4_f16_d256_r16, gqa_decode_i4_bf16_d256_r16 => decode::D256Codes4<2>, Int4;
}

/// Rows of the decode kernels whose cache consists of blocks, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE, BLOCKS PER SM`.
macro_rules! decode_paged_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty, $min_blocks:literal;)*) => {
        decode_paged_kernels!(@rows $($f16: f16 => $shape, $min_blocks; $bf16: bf16 => $shape, $min_blocks;)*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty, $min_blocks:literal;)*) => {
        kernels!(DECODE_PAGED, DecodePaged, "family-decode-paged",
            (q: T, new_k: T, new_v: T, cos: T, sin: T, position_ids: i64, past_seqlens: i32, block_table: i32, head_sink: T, k: T, v: T, out: T, lse: f32,
             partial_out: f32, partial_states: [f32; 2], arrivals: u32; p: PagedDecodeParams), { $(
            $name => <$shape>::run_paged, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS, threads: <$shape>::THREADS,
                min_blocks: $min_blocks, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM,
                cluster: decode::MAX_RANKS, communicates: true };
        )* });
    };
}

decode_paged_kernels! {
    gqa_decode_paged_f16_d64_r8, gqa_decode_paged_bf16_d64_r8 => decode::D64<1>, 1;
    gqa_decode_paged_f16_d64_r8_w4, gqa_decode_paged_bf16_d64_r8_w4 => decode::D64W4<1>, 2;
    gqa_decode_paged_f16_d64_r16, gqa_decode_paged_bf16_d64_r16 => decode::D64<2>, 1;
    gqa_decode_paged_f16_d64_r16_w4, gqa_decode_paged_bf16_d64_r16_w4 => decode::D64W4<2>, 2;
    gqa_decode_paged_f16_d128_r8, gqa_decode_paged_bf16_d128_r8 => decode::D128<1>, 1;
    gqa_decode_paged_f16_d128_r8_w4, gqa_decode_paged_bf16_d128_r8_w4 => decode::D128W4<1>, 2;
    gqa_decode_paged_f16_d128_r16, gqa_decode_paged_bf16_d128_r16 => decode::D128<2>, 1;
    gqa_decode_paged_f16_d128_r16_w4, gqa_decode_paged_bf16_d128_r16_w4 => decode::D128W4<2>, 2;
    gqa_decode_paged_f16_d256_r8, gqa_decode_paged_bf16_d256_r8 => decode::D256<1>, 1;
    gqa_decode_paged_f16_d256_r8_w4, gqa_decode_paged_bf16_d256_r8_w4 => decode::D256W4<1>, 2;
    gqa_decode_paged_f16_d256_r16, gqa_decode_paged_bf16_d256_r16 => decode::D256<2>, 1;
    gqa_decode_paged_f16_d256_r16_w4, gqa_decode_paged_bf16_d256_r16_w4 => decode::D256W4<2>, 2;
}
