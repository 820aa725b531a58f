//! Attention over splits of the keys, and the merge.

use crate::attention::{
    combine::{self, combine},
    split_kv,
};
use crate::num::{bf16, f16};
use crate::params::{AttentionParams, MaskedParams};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[SPLIT_KV, SPLIT_KV_MASKED, COMBINE];

kernels_by_head_size!(SPLIT_KV, SplitKv: Attention, "split-kv",
    (q: T, k: T, v: T, seqlens_k: i32, head_sink: T, out: T, lse: f32, partial_out: f32,
     partial_lse: f32; p: AttentionParams), communicates: false, {
    gqa_split_kv_f16_d128, gqa_split_kv_bf16_d128 => split_kv::D128, 3;
}, unless quick {
    gqa_split_kv_f16_d32, gqa_split_kv_bf16_d32 => split_kv::D32, 4;
    gqa_split_kv_f16_d64, gqa_split_kv_bf16_d64 => split_kv::D64, 4;
    gqa_split_kv_f16_d96, gqa_split_kv_bf16_d96 => split_kv::D96, 3;
    gqa_split_kv_f16_d192, gqa_split_kv_bf16_d192 => split_kv::D192, 3;
    gqa_split_kv_f16_d256, gqa_split_kv_bf16_d256 => split_kv::D256, 2;
});

kernels_by_head_size!(SPLIT_KV_MASKED, SplitKvMasked: Attention, "split-kv-masked",
    (q: T, k: T, v: T, seqlens_k: i32, bias: T, mask: u8, head_sink: T, out: T, lse: f32,
     partial_out: f32, partial_lse: f32; p: MaskedParams), communicates: false, {
    gqa_split_kv_masked_f16_d128, gqa_split_kv_masked_bf16_d128 => split_kv::MaskedD128, 2;
}, unless quick {
    gqa_split_kv_masked_f16_d64, gqa_split_kv_masked_bf16_d64 => split_kv::MaskedD64, 3;
    gqa_split_kv_masked_f16_d256, gqa_split_kv_masked_bf16_d256 => split_kv::MaskedD256, 2;
});

/// Rows of the merge kernels: `NAME => T = TYPE, lowest compute capability, times ten`.
macro_rules! merges {
    ($($name:ident => T = $t:ty, $min_sm:literal;)*) => {
        kernels!(COMBINE, SplitKv: Merge, "split-kv",
            (partial_out: f32, partial_lse: f32, seqlens_k: i32, head_sink: T, out: T,
             out_f32: f32, lse: f32; p: AttentionParams), {
            $($name => combine::<$t>, T = $t, {
                head_size: 0, rows: 0, keys: 0, threads: combine::THREADS, min_blocks: 6,
                shared: combine::SHARED_BYTES, hot: true,
                min_sm: $min_sm, outputs: [Element, F32] };)*
        });
    };
}

merges! {
    gqa_combine_f16 => T = f16, 75;
    gqa_combine_bf16 => T = bf16, 80;
}
