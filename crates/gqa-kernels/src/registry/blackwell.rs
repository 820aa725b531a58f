//! Flash attention for prompts with tensor memory.

use crate::attention::blackwell;
use crate::num::{bf16, f16};
use crate::params::{PagedPrefillParams, PrefillParams};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[BLACKWELL, BLACKWELL_PAGED];

kernels_by_head_size!(BLACKWELL, Blackwell: Attention, "blackwell",
    ([q 0, k 1, v 2] seqlens_k: i32, head_sink: T, out: T, lse: f32; p: PrefillParams),
    communicates: false, {
    gqa_blackwell_f16_d128, gqa_blackwell_bf16_d128 => blackwell::D128, 1;
}, unless quick {
    gqa_blackwell_f16_d64, gqa_blackwell_bf16_d64 => blackwell::D64, 1;
    gqa_blackwell_f16_d192_v128, gqa_blackwell_bf16_d192_v128
        => blackwell::D192V128, 1, value_size: 128;
});

/// Rows of the kernels for paged KV caches, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE`.
macro_rules! paged_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty $(, value_size: $values:literal)?;)*) => {
        paged_kernels!(@rows $(
            $f16: f16 => $shape $(, value_size: $values)?;
            $bf16: bf16 => $shape $(, value_size: $values)?;
        )*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty $(, value_size: $values:literal)?;)*) => {
        kernels!(BLACKWELL_PAGED, BlackwellPaged: Attention, "blackwell-paged",
            ([q 0, k 1, v 2] starts: i32, past_seqlens: i32, block_table: i32, head_sink: T,
             out: T, lse: f32;
             p: PagedPrefillParams), { $(
            $name => <$shape>::run_paged, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: 1, shared: <$shape>::SHARED_BYTES, hot: true,
                min_sm: <$shape>::MIN_SM $(, value_size: $values)? };
        )* });
    };
}

paged_kernels! {
    gqa_blackwell_paged_f16_d64, gqa_blackwell_paged_bf16_d64 => blackwell::D64;
    gqa_blackwell_paged_f16_d128, gqa_blackwell_paged_bf16_d128 => blackwell::D128;
    gqa_blackwell_paged_f16_d192_v128, gqa_blackwell_paged_bf16_d192_v128
        => blackwell::D192V128, value_size: 128;
}
