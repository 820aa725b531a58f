//! THE table of kernels: one row per entry point.
//!
//! On the GPU a row becomes a PTX entry of that literal name; on the host it becomes an [`Entry`] with a function the simulator can
//! call. The PTX builder, the planner, the tests and the support page all read this table; nobody keeps a second list.

#[cfg(not(target_arch = "nvptx64"))]
mod entry;
#[cfg(not(target_arch = "nvptx64"))]
pub use entry::{Entry, Family, entries, find};

#[cfg_attr(target_arch = "nvptx64", allow(unused_imports, reason = "a device build has one family"))]
use {
    crate::attention::general::{self, general},
    crate::num::{bf16, f16},
    crate::params::{AttentionParams, PrologueParams},
    crate::prologue::{
        self,
        append::concat_kv_in_place,
        concat::concat_new_to_past_kv,
        lengths::{seqlens_to_pos_ids, sequence_lengths},
        rope::rotary_embedding,
        unpack::{unpack_qkv, unpack_qkv_with_rope_and_append_kv},
    },
    crate::simt::Global,
};

/// Rows of one argument list. `NAME => BODY, T = TYPE, { head_size, rows, keys, threads, min_blocks, shared, hot, min_sm }`.
/// Pointer arguments come first, the by-value parameter struct last. What all rows have in common may come before them:
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
        #[unsafe(no_mangle)]
        unsafe extern "ptx-kernel" fn $name($($arg: Global<$aty>,)* $p: $pty) {
            $body($($arg,)* $p)
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! host_entry {
    ($name:ident, $body:expr, $t:ident = $ty:ty, $family:ident, ($($arg:ident: $aty:ty),* ; $p:ident: $pty:ty),
     { head_size: $head:expr, rows: $rows:expr, keys: $keys:expr, threads: $threads:expr, min_blocks: $min_blocks:expr, shared: $shared:expr, hot: $hot:expr, min_sm: $sm:expr }) => {
        Entry {
            name: stringify!($name),
            family: Family::$family,
            dtype: <$ty as crate::num::Element>::DTYPE,
            head_size: $head,
            rows: $rows,
            keys: $keys,
            threads: $threads,
            min_blocks: $min_blocks,
            shared_bytes: $shared,
            hot: $hot,
            min_sm: $sm,
            arguments: &[$(stringify!($arg)),*],
            params_bytes: size_of::<$pty>(),
            simulate: {
                #[allow(dead_code)]
                type $t = $ty;
                |arguments| {
                    let mut next = 0..;
                    $(let $arg: Global<$aty> = arguments.global(next.next().unwrap_or_default());)*
                    let $p: $pty = arguments.params(next.next().unwrap_or_default());
                    $body($($arg,)* $p)
                }
            },
        }
    };
}

/// Every table, one per argument list.
#[cfg(not(target_arch = "nvptx64"))]
static TABLES: &[&[Entry]] = &[
    CONCAT_KV_IN_PLACE,
    CONCAT_NEW_TO_PAST_KV,
    UNPACK_QKV,
    UNPACK_QKV_WITH_ROPE_AND_APPEND_KV,
    ROTARY_EMBEDDING,
    SEQUENCE_LENGTHS,
    SEQLENS_TO_POS_IDS,
    GENERAL,
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

kernels!(ROTARY_EMBEDDING, Prologue, "family-prologue",
    (q: T, cos: T, sin: T, position_ids: i64, seqlens_k: i32, q_out: T; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_rotary_embedding_f32 => rotary_embedding::<f32>, T = f32;
    gqa_rotary_embedding_f16 => rotary_embedding::<f16>, T = f16;
    gqa_rotary_embedding_bf16 => rotary_embedding::<bf16>, T = bf16;
});

kernels!(SEQUENCE_LENGTHS, Prologue, "family-prologue", (seqlens_k: i32, past: i32, total: i32; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_sequence_lengths => sequence_lengths, T = f32;
});

kernels!(SEQLENS_TO_POS_IDS, Prologue, "family-prologue", (seqlens_k: i32, position_ids: i64; p: PrologueParams),
    each { head_size: 0, rows: 0, keys: 0, threads: prologue::THREADS, min_blocks: 0, shared: 0, hot: true, min_sm: 70 }, {
    gqa_seqlens_to_pos_ids => seqlens_to_pos_ids, T = f32;
});

kernels!(GENERAL, General, "family-general",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, head_sink: T, out: T, lse: f32, output_qk: T; p: AttentionParams),
    each { head_size: general::MAX_HEAD_SIZE, rows: general::ROWS, keys: general::KEYS, threads: general::THREADS, min_blocks: 0,
           shared: general::SHARED_BYTES, hot: true, min_sm: 70 }, {
    gqa_general_f32 => general::<f32>, T = f32;
    gqa_general_f16 => general::<f16>, T = f16;
    gqa_general_bf16 => general::<bf16>, T = bf16;
});
