//! Grids of the kernels around attention.

use super::{Entry, Role};
use crate::num::DType;
use crate::params::{
    PagedGapsParams, PagedParams, PrologueParams, QuantizeOutputParams, RollingBiasParams,
    RollingParams, ScatterParams, TreeMaskParams,
};
use crate::prologue::{
    THREADS, append, append_dequantized, concat, dequantize, gaps, norm, paged, positions,
    quantize, quantize_output, rolling, rope, scatter, tree, unpack,
};

/// Most CTAs per SM: twice as many as are resident, since more would only wait.
const WAVES: u32 = 16;

/// Grid of a prologue kernel: a thread for each vector or pair of vectors, up to `WAVES`. Any grid
/// is correct.
pub fn grid(entry: &Entry, p: &PrologueParams, multiprocessors: u32) -> [u32; 3] {
    of_threads(size(entry, p), multiprocessors)
}

/// Grid of `rolling_kv`: a CTA for each index, up to the same.
pub fn rolling_kv_grid(p: &RollingParams, multiprocessors: u32) -> [u32; 3] {
    capped(count(rolling::rolling_kv_size(p)), multiprocessors)
}

/// Grid of `rolling_lengths`.
pub fn rolling_lengths_grid(p: &RollingParams, multiprocessors: u32) -> [u32; 3] {
    of_threads(rolling::rolling_lengths_size(p), multiprocessors)
}

/// Grid of `rolling_bias`.
pub fn rolling_bias_grid(p: &RollingBiasParams, multiprocessors: u32) -> [u32; 3] {
    of_threads(rolling::rolling_bias_size(p), multiprocessors)
}

/// Grid of `scatter_rows` for `tensors` tensors.
pub fn scatter_rows_grid(p: &ScatterParams, tensors: u32, multiprocessors: u32) -> [u32; 3] {
    of_threads(scatter::scatter_rows_size(p, tensors), multiprocessors)
}

/// Grid of `tree_mask_rows`.
pub fn tree_mask_rows_grid(p: &TreeMaskParams, multiprocessors: u32) -> [u32; 3] {
    of_threads(tree::tree_mask_rows_size(p), multiprocessors)
}

/// Grid of `quantize_output`.
pub fn quantize_output_grid(p: &QuantizeOutputParams, multiprocessors: u32) -> [u32; 3] {
    of_threads(quantize_output::quantize_output_size(p), multiprocessors)
}

/// Grid of the kernels of a paged KV cache.
pub fn paged_grid(entry: &Entry, p: &PagedParams, multiprocessors: u32) -> [u32; 3] {
    let size = match entry.role {
        Role::PagedGather => paged::paged_gather_size(p),
        Role::PagedScatter => paged::paged_scatter_size(p),
        Role::PagedDequantize => dequantize::paged_dequantize_size(p, per_vec(entry)),
        _ => paged::paged_append_size(p, per_vec(entry)),
    };
    of_threads(size, multiprocessors)
}

/// Grid of `paged_gaps`, and its parameter `parts`.
pub fn paged_gaps_grid(p: &PagedGapsParams, multiprocessors: u32) -> ([u32; 3], u32) {
    let size = gaps::paged_gaps_size(p, multiprocessors);
    (capped(count(size), multiprocessors), size[1])
}

/// A thread for each index.
fn of_threads(size: [u32; 4], multiprocessors: u32) -> [u32; 3] {
    capped(count(size).div_ceil(u64::from(THREADS)), multiprocessors)
}

fn count(size: [u32; 4]) -> u64 {
    size.into_iter().map(u64::from).fold(1, u64::saturating_mul)
}

fn capped(blocks: u64, multiprocessors: u32) -> [u32; 3] {
    let cap = u64::from(multiprocessors.clamp(1, 1024) * WAVES);
    [blocks.clamp(1, cap) as u32, 1, 1]
}

/// Elements of 16 bytes.
fn per_vec(entry: &Entry) -> u32 {
    match entry.dtype {
        DType::F32 => 4,
        DType::F16 | DType::BF16 => 8,
    }
}

/// Index space of a kernel.
fn size(entry: &Entry, p: &PrologueParams) -> [u32; 4] {
    let per_vec = per_vec(entry);
    match entry.role {
        Role::AppendDequantized => append_dequantized::append_dequantized_size(p, per_vec),
        Role::AppendInPlace => append::concat_kv_in_place_size(p, per_vec),
        Role::AppendQuantized => append::append_quantized_size(p, per_vec),
        Role::ConcatNewToPast => concat::concat_new_to_past_kv_size(p, per_vec),
        Role::ConcatRows => concat::concat_rows_size(p),
        Role::QuantizeKv => quantize::quantize_kv_size(p, per_vec),
        Role::QkNorm => norm::qk_norm_size(p, per_vec),
        Role::RotaryEmbedding => rope::rotary_embedding_size(p, per_vec),
        Role::RotaryRows => rope::rotary_rows_size(p),
        Role::UnpackRotateAppend => unpack::unpack_qkv_with_rope_and_append_kv_size(p, per_vec),
        Role::GeneratePositions => positions::seqlens_to_pos_ids_size(p),
        _ => unpack::unpack_qkv_size(p, per_vec),
    }
}
