//! Flash attention for prompts on Hopper.

use crate::attention::hopper;
#[cfg(not(target_arch = "nvptx64"))]
use crate::num::Format;
use crate::num::{bf16, e4m3, f16};
use crate::params::{
    AttentionParams, Float8OperandsParams, Float8Params, HopperParams, MaskedParams,
    PagedHopperParams, QuantizedHopperParams, QuantizedPagedHopperParams,
};

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[
    HOPPER,
    HOPPER_LONG,
    HOPPER_TALL,
    HOPPER_SPLIT,
    HOPPER_MASKED,
    HOPPER_PAGED,
    HOPPER_PAGED_SPLIT,
    HOPPER_PAGED_SCHEDULE,
    HOPPER_PAGED_MERGE,
    HOPPER_QUANTIZED,
    HOPPER_PAGED_QUANTIZED,
    HOPPER_PAGED_QUANTIZED_SPLIT,
    FLOAT8_OPERANDS,
    HOPPER_FLOAT8,
];

kernels_by_head_size!(HOPPER, Hopper: Attention, "hopper",
    ([q 0, k 1, v 2] cos: T, sin: T, seqlens_k: i32, head_sink: T, out: T, out_f8: e4m3,
     out_scale: f32, lse: f32, counter: u32; p: HopperParams),
    communicates: true, outputs: [Element, E4M3], {
    gqa_hopper_f16_d128, gqa_hopper_bf16_d128 => hopper::D128<false>, 1;
}, unless quick {
    gqa_hopper_f16_d64_r128, gqa_hopper_bf16_d64_r128 => hopper::D64Short, 1;
    gqa_hopper_f16_d64_lse, gqa_hopper_bf16_d64_lse => hopper::D64Exact<false>, 1, exact_sums: true;
    gqa_hopper_f16_d80_r128, gqa_hopper_bf16_d80_r128 => hopper::D80Short, 1;
    gqa_hopper_f16_d96_r128, gqa_hopper_bf16_d96_r128 => hopper::D96Short, 1;
    gqa_hopper_f16_d160, gqa_hopper_bf16_d160 => hopper::D160, 1;
    gqa_hopper_f16_d192, gqa_hopper_bf16_d192 => hopper::D192<false>, 1;
    gqa_hopper_f16_d192_v128, gqa_hopper_bf16_d192_v128 => hopper::D192V128, 1, value_size: 128;
    gqa_hopper_f16_d224, gqa_hopper_bf16_d224 => hopper::D224, 1;
    gqa_hopper_f16_d256, gqa_hopper_bf16_d256 => hopper::D256<false>, 1;
});

// The same arguments, but no output in e4m3: 176 keys leave no registers for it.
kernels_by_head_size!(HOPPER_LONG, Hopper: Attention, "hopper",
    ([q 0, k 1, v 2] cos: T, sin: T, seqlens_k: i32, head_sink: T, out: T, out_f8: e4m3,
     out_scale: f32, lse: f32, counter: u32; p: HopperParams), communicates: true, {
}, unless quick {
    gqa_hopper_f16_d128_k176, gqa_hopper_bf16_d128_k176 => hopper::D128Long, 1;
});

kernels_by_head_size!(HOPPER_TALL, Hopper: Attention, "hopper",
    ([q 0, k 1, v 2] seqlens_k: i32, head_sink: T, out: T, lse: f32, counter: u32;
     p: AttentionParams), communicates: true, {
}, unless quick {
    gqa_hopper_f16_d64, gqa_hopper_bf16_d64 => hopper::D64, 1;
    gqa_hopper_f16_d80, gqa_hopper_bf16_d80 => hopper::D80, 1;
    gqa_hopper_f16_d96, gqa_hopper_bf16_d96 => hopper::D96, 1;
});

kernels_by_head_size!(HOPPER_SPLIT, Hopper: SplitAttention, "hopper",
    ([q 0, k 1, v 2] seqlens_k: i32, head_sink: T, out: T, partial_out: f32, partial_lse: f32,
     counter: u32; p: AttentionParams), communicates: true, {
    gqa_hopper_split_f16_d128, gqa_hopper_split_bf16_d128 => hopper::D128<true>, 1;
}, unless quick {
    gqa_hopper_split_f16_d64, gqa_hopper_split_bf16_d64 => hopper::D64Exact<true>, 1;
    gqa_hopper_split_f16_d192, gqa_hopper_split_bf16_d192 => hopper::D192<true>, 1;
    gqa_hopper_split_f16_d256, gqa_hopper_split_bf16_d256 => hopper::D256<true>, 1;
});

kernels_by_head_size!(HOPPER_MASKED, HopperMasked: Attention, "hopper-masked",
    ([q 0, k 1, v 2, tiles 3] seqlens_k: i32, bias: T, head_sink: T, out: T, lse: f32,
     counter: u32; p: MaskedParams), communicates: true, {
    gqa_hopper_masked_f16_d128, gqa_hopper_masked_bf16_d128 => hopper::MaskedD128, 1;
}, unless quick {
    gqa_hopper_masked_f16_d64, gqa_hopper_masked_bf16_d64 => hopper::MaskedD64, 1;
    gqa_hopper_masked_f16_d256, gqa_hopper_masked_bf16_d256 => hopper::MaskedD256, 1;
});

/// Rows of the kernels for paged KV caches, for both 16-bit types: `F16 NAME, BF16 NAME => SHAPE`.
macro_rules! hopper_paged_kernels {
    ($table:ident, $role:ident, $run:ident, $args:tt, { $(
        $f16:ident, $bf16:ident => $shape:ty $(, $more:ident: $value:expr)*;
    )* }) => {
        hopper_paged_kernels!(@rows $table, $role, $run, $args, { $(
            $f16: f16 => $shape $(, $more: $value)*; $bf16: bf16 => $shape $(, $more: $value)*;
        )* });
    };
    (@rows $table:ident, $role:ident, $run:ident, $args:tt, { $(
        $name:ident: $t:ident => $shape:ty $(, $more:ident: $value:expr)*;
    )* }) => {
        kernels!($table, HopperPaged: $role, "hopper-paged", $args, { $(
            $name => <$shape>::$run, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS, min_blocks: 1, shared: <$shape>::PAGED_SHARED_BYTES,
                hot: true, min_sm: <$shape>::MIN_SM, communicates: true $(, $more: $value)* };
        )* });
    };
}

hopper_paged_kernels!(HOPPER_PAGED, Attention, run_paged,
    ([q 0, k 1, v 2] cos: T, sin: T, starts: i32, past_seqlens: i32, block_table: i32,
     head_sink: T, out: T, lse: f32, counter: u32; p: PagedHopperParams), {
    gqa_hopper_paged_f16_d64, gqa_hopper_paged_bf16_d64 => hopper::D64Short;
    gqa_hopper_paged_f16_d64_lse, gqa_hopper_paged_bf16_d64_lse
        => hopper::D64Exact<false>, exact_sums: true;
    gqa_hopper_paged_f16_d96, gqa_hopper_paged_bf16_d96 => hopper::D96Short;
    gqa_hopper_paged_f16_d128, gqa_hopper_paged_bf16_d128 => hopper::D128<false>;
    gqa_hopper_paged_f16_d192, gqa_hopper_paged_bf16_d192 => hopper::D192<false>;
    gqa_hopper_paged_f16_d192_v128, gqa_hopper_paged_bf16_d192_v128
        => hopper::D192V128, value_size: 128;
    gqa_hopper_paged_f16_d256, gqa_hopper_paged_bf16_d256 => hopper::D256<false>;
});

// Heads share row tiles, and CTAs have equal ranges of the work.
hopper_paged_kernels!(HOPPER_PAGED_SPLIT, SplitAttention, run_paged_split,
    ([q 0, k 1, v 2] cos: T, sin: T, starts: i32, past_seqlens: i32, block_table: i32,
     head_sink: T, out: T, row_tiles: u32, range_starts: u32, part_columns: f32,
     part_states: [f32; 2], schedule: u32; p: PagedHopperParams), {
    gqa_hopper_paged_split_f16_d64, gqa_hopper_paged_split_bf16_d64 => hopper::D64Short;
    gqa_hopper_paged_split_f16_d96, gqa_hopper_paged_split_bf16_d96 => hopper::D96Short;
    gqa_hopper_paged_split_f16_d128, gqa_hopper_paged_split_bf16_d128 => hopper::D128<false>;
    gqa_hopper_paged_split_f16_d192, gqa_hopper_paged_split_bf16_d192 => hopper::D192<false>;
    gqa_hopper_paged_split_f16_d256, gqa_hopper_paged_split_bf16_d256 => hopper::D256<false>;
});

// Divides the work of these once for many calls.
kernels!(HOPPER_PAGED_SCHEDULE, HopperPaged: Schedule, "hopper-paged",
    (starts: i32, past_seqlens: i32, schedule: u32; p: PagedHopperParams),
    each { head_size: 0, rows: 0, keys: 0, threads: hopper::D128::<false>::THREADS, min_blocks: 1,
           shared: hopper::D128::<false>::PAGED_SHARED_BYTES, hot: true, min_sm: 90 }, {
    gqa_hopper_paged_schedule => hopper::schedule_work, T = f32;
});

kernels!(HOPPER_PAGED_MERGE, HopperPaged: Merge, "hopper-paged",
    (range_starts: u32, part_columns: f32, part_states: [f32; 2], head_sink: T, out: T;
     p: PagedHopperParams),
    each { head_size: 256, rows: 0, keys: 0, threads: hopper::MERGE_THREADS, min_blocks: 2,
           shared: 0, hot: true, min_sm: 90 }, {
    gqa_hopper_paged_merge_f16 => hopper::merge_parts::<f16>, T = f16;
    gqa_hopper_paged_merge_bf16 => hopper::merge_parts::<bf16>, T = bf16;
});

/// Rows of the kernels for quantized KV caches, whatever their format, for both 16-bit types, and
/// of those that multiply keys of float8 as they are: `F16 NAME, BF16 NAME, FLOAT8 NAME => SHAPE`;
/// and of the same for paged ones.
macro_rules! hopper_quantized_kernels {
    ($table:ident, $family:ident: $role:ident, $module:literal, $run:ident, $bytes:ident, $args:tt,
        { $($f16:ident, $bf16:ident, $float8:ident => $shape:ty;)* }) => {
        hopper_quantized_kernels!(@rows $table, $family: $role, $module, $run, $bytes, $args, { $(
            $f16: f16 => $shape, false;
            $bf16: bf16 => $shape, false;
            $float8: bf16 => $shape, true, formats: &[Format::Float8];
        )* });
    };
    (@rows $table:ident, $family:ident: $role:ident, $module:literal, $run:ident, $bytes:ident,
        $args:tt, { $(
            $name:ident: $t:ident => $shape:ty, $float8_keys:literal $(, formats: $formats:expr)?;
        )* }) => {
        kernels!($table, $family: $role, $module, $args, { $(
            $name => <$shape>::$run::<_, $float8_keys>, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: 1, shared: <$shape>::$bytes, hot: true, min_sm: <$shape>::MIN_SM,
                communicates: true $(, formats: $formats)? };
        )* });
    };
}

hopper_quantized_kernels!(HOPPER_QUANTIZED, HopperQuantized: Attention, "hopper-quantized",
    run_quantized, SHARED_BYTES,
    ([q 0, k 1, v 2] cos: T, sin: T, k_scale: f32, v_scale: f32, seqlens_k: i32, head_sink: T,
     out: T, lse: f32, counter: u32; p: QuantizedHopperParams), {
    gqa_hopper_quantized_f16_d64, gqa_hopper_quantized_bf16_d64, gqa_hopper_quantized_f8_bf16_d64
        => hopper::QuantizedD64;
    gqa_hopper_quantized_f16_d128, gqa_hopper_quantized_bf16_d128,
        gqa_hopper_quantized_f8_bf16_d128 => hopper::QuantizedD128;
});

hopper_quantized_kernels!(HOPPER_PAGED_QUANTIZED, HopperPagedQuantized: Attention,
    "hopper-paged-quantized", run_paged_quantized, PAGED_SHARED_BYTES,
    ([q 0, k 1, v 2] cos: T, sin: T, k_scale: f32, v_scale: f32, starts: i32, past_seqlens: i32,
     block_table: i32, head_sink: T, out: T, counter: u32;
     p: QuantizedPagedHopperParams), {
    gqa_hopper_paged_quantized_f16_d64, gqa_hopper_paged_quantized_bf16_d64,
        gqa_hopper_paged_quantized_f8_bf16_d64 => hopper::QuantizedD64;
    gqa_hopper_paged_quantized_f16_d128, gqa_hopper_paged_quantized_bf16_d128,
        gqa_hopper_paged_quantized_f8_bf16_d128 => hopper::QuantizedD128;
});

// Heads share row tiles, and CTAs have equal ranges of the work, which those of HOPPER_PAGED_MERGE
// merge.
hopper_quantized_kernels!(HOPPER_PAGED_QUANTIZED_SPLIT, HopperPagedQuantized: SplitAttention,
    "hopper-paged-quantized", run_paged_split_quantized, PAGED_SHARED_BYTES,
    ([q 0, k 1, v 2] cos: T, sin: T, k_scale: f32, v_scale: f32, starts: i32, past_seqlens: i32,
     block_table: i32, head_sink: T, out: T,
     row_tiles: u32, range_starts: u32, part_columns: f32, part_states: [f32; 2], schedule: u32;
     p: QuantizedPagedHopperParams), {
    gqa_hopper_paged_quantized_split_f16_d64, gqa_hopper_paged_quantized_split_bf16_d64,
        gqa_hopper_paged_quantized_split_f8_bf16_d64 => hopper::QuantizedD64;
    gqa_hopper_paged_quantized_split_f16_d128, gqa_hopper_paged_quantized_split_bf16_d128,
        gqa_hopper_paged_quantized_split_f8_bf16_d128 => hopper::QuantizedD128;
});

kernels!(FLOAT8_OPERANDS, HopperFloat8: Operands, "hopper-float8",
    (q: T, k: T, v: T, cos: T, sin: T, position_ids: i64, k_scale: f32, v_scale: f32,
     seqlens_k: i32, k_cache: u64, v_cache: u32, q_codes: u64, row_factors: f32, v_codes: u32;
     p: Float8OperandsParams),
    each { head_size: 0, rows: 0, keys: 0, threads: 128, min_blocks: 5, shared: 0, hot: true,
           min_sm: 90 }, {
    gqa_float8_operands_f16 => hopper::float8_operands::<f16>, T = f16;
    gqa_float8_operands_bf16 => hopper::float8_operands::<bf16>, T = bf16;
});

/// Rows of the kernels for operands of e4m3, for both 16-bit types of the output: `F16 NAME, BF16
/// NAME => SHAPE`.
macro_rules! hopper_float8_kernels {
    ($($f16:ident, $bf16:ident => $shape:ty;)*) => {
        hopper_float8_kernels!(@rows $($f16: f16 => $shape; $bf16: bf16 => $shape;)*);
    };
    (@rows $($name:ident: $t:ident => $shape:ty;)*) => {
        kernels!(HOPPER_FLOAT8, HopperFloat8: Attention, "hopper-float8",
            ([q 0, k 1, v 2] row_factors: f32, v_scale: f32, seqlens_k: i32, head_sink: T, out: T,
             counter: u32; p: Float8Params), { $(
            $name => <$shape>::run_float8, T = $t, {
                head_size: <$shape>::HEAD_SIZE, rows: <$shape>::ROWS, keys: <$shape>::KEYS,
                threads: <$shape>::THREADS,
                min_blocks: 1, shared: <$shape>::SHARED_BYTES, hot: true, min_sm: <$shape>::MIN_SM,
                communicates: true, formats: &[Format::Float8] };
        )* });
    };
}

hopper_float8_kernels! {
    gqa_hopper_float8_f16_d128, gqa_hopper_float8_bf16_d128 => hopper::Float8D128;
    gqa_hopper_float8_f16_d256, gqa_hopper_float8_bf16_d256 => hopper::Float8D256;
}
