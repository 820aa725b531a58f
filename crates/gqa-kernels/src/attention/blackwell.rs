//! FlashAttention for prefill and chunked prefill with tensor memory: two tiles of 128 rows in
//! ping-pong. SM 100a and 103a. Simulated and assembled, never run.
//!
//! **One CTA** has [`ROWS`] query rows of one (batch, query head), in two tiles of 128. One thread
//! issues all products, one loads Q, K and V through TMA. Each tile has a softmax warpgroup, whose
//! threads have one row each, and both have a correction warpgroup, which rescales the output where
//! a row maximum has risen by more than 8 powers of two, and stores it. While one tile's weights
//! are exponentiated, the tensor cores multiply for the other (FlashAttention-4).
//!
//! **Grid** ([`grid`]): a CTA for each work tile, 512 threads. The longest tiles come first.
//!
//! **Tensors**: q and out (batch, query head, S, head size), k and v (batch, KV head, capacity,
//! head size), with heads of up to 128; q, k and v each through a tensor map with boxes of 128 rows
//! by 64 columns; out through a pointer, with 16-byte stores. lse, which may be null, is (batch,
//! query head, S). Scales are positive.
//!
//! **Shared memory**: two tiles of Q, then the stages of K and V, each as two 64-column chunks of
//! 128-byte rows with the 128-byte swizzle; barriers; the address of tensor memory; a factor for
//! each row. **Tensor memory**: for each tile 128 columns of scores, whose first 64 the weights
//! replace, and 128 of the output: all there is.
//!
//! **Barriers** (`layout.rs`): of tile t and key tile i, phase i of
//!
//! | barrier | arrivals | who waits |
//! |---|---|---|
//! | `SCORED` | the commit of S = Q·Kᵀ | softmax of the tile |
//! | `TOLD` | each softmax thread, whose factor is in shared memory | correction; once more at the end |
//! | `WEIGHED` | each softmax thread, whose scores are loaded and weights stored | the issuer |
//! | `CORRECTED` | each correction thread: the output is rescaled; for i = 0: V's last rows are cleared | the issuer, and softmax before its next factor |
//! | `ADDED` | the commit of O += P·V | the issuer before it overwrites P, and correction |
//!
//! Key tiles go from the last to the first. Tiles pass through the stages in the order K₀ V₀ K₁ V₁
//! and so on.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type; the denominator is the sum of P before rounding.

mod correction;
mod issuer;
mod layout;
mod loads;
mod softmax;
mod work;

use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::seqlens::Seqlens;
use layout::{COLUMNS, SLOT, WARPGROUP, init_barriers};
pub use layout::{KEYS, ROWS, SHARED_BYTES, THREADS};
use work::Work;

/// What a kernel reads and writes besides its tensor maps.
#[derive(Clone, Copy)]
pub struct Pointers<T> {
    /// Logits per query head, where the call has them.
    pub head_sink: Global<T>,
    /// (batch, query head, S, head size).
    pub out: Global<T>,
    /// (batch, query head, S), or null.
    pub lse: Global<f32>,
}

/// CTAs of a call.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grid(p: &AttentionParams) -> [u32; 3] {
    [p.q_len.div_ceil(ROWS) * p.q_heads * p.batch, 1, 1]
}

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn prefill<T: MmaElement>(
    [q, k, v]: [TensorMap; 3],
    seqlens: Seqlens,
    to: Pointers<T>,
    p: AttentionParams,
) {
    let work = Work::new(block_idx_x(), seqlens, &p);
    if work.keys.is_empty() {
        correction::clear(&work, to, &p);
        return;
    }
    let base = shared_base();
    if thread_idx() == 0 {
        for map in [q, k, v] {
            prefetch_tensor_map(map);
        }
        init_barriers(base);
    }
    if warp() == 12 {
        tcgen05_alloc(base + SLOT, COLUMNS);
        tcgen05_relinquish();
    }
    tcgen05_fence_before();
    sync_threads();
    tcgen05_fence_after();
    let memory = ld_shared::<u32>(base + SLOT);
    match thread_idx() / WARPGROUP {
        tile @ 0..2 => {
            registers_raise::<192>();
            softmax::run(base, memory, tile, &work, to, &p);
        }
        2 => {
            registers_lower::<80>();
            correction::run(base, memory, &work, to, &p);
        }
        _ => {
            registers_lower::<48>();
            if thread_idx() == 12 * 32 {
                issuer::run::<T>(base, memory, &work);
            } else if thread_idx() == 13 * 32 {
                loads::run(base, [q, k, v], &work, &p);
            }
            sync_warp();
        }
    }
    tcgen05_fence_before();
    sync_threads();
    if warp() == 12 {
        tcgen05_dealloc(memory, COLUMNS);
    }
}
