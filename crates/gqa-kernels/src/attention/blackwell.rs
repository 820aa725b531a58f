//! FlashAttention for prefill and chunked prefill with tensor memory: two tiles of 128 rows in
//! ping-pong. SM 100a and 103a. Simulated and assembled, never run.
//!
//! **One CTA** has 256 query rows of one (sequence, query head), in two tiles of 128. One thread
//! issues all products, one warp loads Q, K and V through TMA. Each tile has a softmax warpgroup,
//! whose threads have one row each, and both have a correction warpgroup, which rescales the output
//! where a row maximum has risen by more than 8 powers of two, and stores it. While one tile's
//! weights are exponentiated, the tensor cores multiply for the other (FlashAttention-4).
//!
//! **Grid** ([`grid`], [`paged_grid`]): a CTA for each work tile, 512 threads. Heads whose K and V
//! share the L2 cache follow each other, the longest tiles first (`work.rs`).
//!
//! **Tensors**: q and out (batch, query head, S, head size), k and v (batch, KV head, capacity,
//! head size); or tokens of all sequences, and a cache of (block, KV head, row) (`cache.rs`). q, k
//! and v each through a tensor map with boxes of up to 128 rows by 64 columns; out through a
//! pointer, with 16-byte stores. lse, which may be null, is (batch, query head, S). Scales are
//! positive.
//!
//! **Shared memory**: two tiles of Q, then the stages of K and V, each in 64-column chunks of
//! 128-byte rows with the 128-byte swizzle; barriers; the address of tensor memory; the work tile;
//! a factor for each row. **Tensor memory**: for each tile 128 columns of scores, whose first 64
//! the weights replace, and up to 128 of the output.
//!
//! **Barriers** (`layout.rs`), one of each kind per tile; key tile `i` uses phase `i`:
//!
//! | barrier | arrivals | waiting warps |
//! |---|---|---|
//! | `SCORED` | the commit of S = Q·Kᵀ | the tile's softmax warpgroup |
//! | `TOLD` | each softmax thread, after it has stored its row's factor in shared memory | correction; once more at the end |
//! | `WEIGHED` | each softmax thread, after it has loaded its scores and stored its P | the issuer |
//! | `CORRECTED` | each correction thread, after it has rescaled its output row; for i = 0, after it has cleared V's rows past the end | the issuer, and softmax before it stores the next factor |
//! | `ADDED` | the commit of O += P·V | the issuer before it overwrites P, and correction |
//!
//! Key tiles go from the last to the first. Tiles pass through the stages in the order K₀ V₀ K₁ V₁
//! and so on.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type; the denominator is the sum of P before rounding.

mod cache;
mod correction;
mod issuer;
mod layout;
mod loads;
mod softmax;
mod work;

use crate::attention::rows_of_none;
use crate::num::MmaElement;
use crate::params::{AttentionParams, PagedPrefillParams, PrefillParams};
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::seqlens::Seqlens;
use cache::{Cache, Contiguous, Pages};
pub use cache::{LEAST_BOX, box_rows};
use layout::{COLUMNS, Tile, WARPGROUP};
use work::Work;

/// Rows of a box of queries.
pub const QUERY_BOX: u32 = layout::TILE;

/// The kernels for queries and keys of up to `HEAD` columns and values of up to `VALUES`, with that
/// many stages of K and V.
pub struct Prefill<const HEAD: u32, const VALUES: u32, const STAGES: u32>(());

/// Heads of up to 64.
pub type D64 = Prefill<64, 64, 4>;
/// Heads of up to 128.
pub type D128 = Prefill<128, 128, 4>;
/// Keys of up to 192 with values of up to 128, as in multi-head latent attention.
pub type D192V128 = Prefill<192, 128, 2>;

impl<const HEAD: u32, const VALUES: u32, const STAGES: u32> Tile for Prefill<HEAD, VALUES, STAGES> {
    const HEAD: u32 = HEAD;
    const VALUES: u32 = VALUES;
    const STAGES: u32 = STAGES;
}

/// What a kernel reads and writes besides its tensor maps.
#[derive(Clone, Copy)]
struct Pointers<T> {
    /// Logits per query head, where the call has them.
    head_sink: Global<T>,
    /// (batch, query head, S, head size of values).
    out: Global<T>,
    /// (batch, query head, S), or null.
    lse: Global<f32>,
    /// Elements of a row of the output.
    columns: u32,
}

/// CTAs of a call.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grid(p: &AttentionParams) -> [u32; 3] {
    [p.q_len.div_ceil(layout::ROWS) * p.q_heads * p.batch, 1, 1]
}

/// CTAs of a call over a paged KV cache.
#[cfg(not(target_arch = "nvptx64"))]
pub fn paged_grid(p: &PagedPrefillParams) -> [u32; 3] {
    let a = &p.prefill.attention;
    [crate::tile::pages::row_tiles(p.tokens, a.batch, layout::ROWS) * a.q_heads, 1, 1]
}

impl<const HEAD: u32, const VALUES: u32, const STAGES: u32> Prefill<HEAD, VALUES, STAGES> {
    /// Largest head size of keys.
    pub const HEAD_SIZE: u32 = HEAD;
    /// Query rows of a CTA.
    pub const ROWS: u32 = layout::ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = layout::KEYS;
    /// Threads of a CTA.
    pub const THREADS: u32 = layout::THREADS;
    /// Dynamic shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = <Self as Tile>::BYTES;
    /// Oldest compute capability, times ten.
    pub const MIN_SM: u32 = 100;

    /// The kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        p: PrefillParams,
    ) {
        let to = Pointers { head_sink, out, lse, columns: p.v_head_size };
        let work = Work::new(block_idx_x(), seqlens, &p.attention);
        Self::attend(work, Contiguous, [q, k, v], to, &p.attention);
    }

    /// The kernel over a paged KV cache, or over packed keys and values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        p: PagedPrefillParams,
    ) {
        let PagedPrefillParams { tokens, least, counts_new, .. } = p;
        let counts_new = counts_new != 0;
        let sequences = Sequences { starts, past_seqlens, tokens, least, counts_new, apart: None };
        let to = Pointers { head_sink, out, lse, columns: p.prefill.v_head_size };
        let pages = Pages::new(block_table, &p);
        if pages.is_consecutive() && warp() == 14 {
            rows_of_none::clear(sequences, to.out, to.columns, to.lse, &p.prefill.attention);
        }
        let work = Work::of_tokens(block_idx_x(), sequences, &p.prefill.attention);
        Self::attend(work, pages, [q, k, v], to, &p.prefill.attention);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<C: Cache, T: MmaElement>(
        work: Work,
        cache: C,
        [q, k, v]: [TensorMap; 3],
        to: Pointers<T>,
        p: &AttentionParams,
    ) {
        if work.keys.is_empty() {
            if work.has_rows() {
                correction::clear(&work, to, p);
            }
            return;
        }
        let base = shared_base();
        if thread_idx() == 0 {
            for map in [q, k, v] {
                prefetch_tensor_map(map);
            }
            Self::init_barriers(base);
            work.store(base + Self::WORK);
        }
        if warp() == 12 {
            tcgen05_alloc(base + Self::SLOT, COLUMNS);
            tcgen05_relinquish();
        }
        tcgen05_fence_before();
        sync_threads();
        tcgen05_fence_after();
        // By each role for itself: what lives across all of them spills.
        let memory = || ld_shared::<u32>(base + Self::SLOT);
        let work = || Work::load(base + Self::WORK);
        match thread_idx() / WARPGROUP {
            tile @ 0..2 => {
                registers_raise::<184>();
                softmax::run::<Self, C, T>(base, memory(), tile, cache, &work(), to, p);
            }
            2 => {
                registers_lower::<80>();
                correction::run::<Self, T>(base, memory(), &work(), to, p);
            }
            _ => {
                registers_lower::<64>();
                if thread_idx() == 12 * 32 {
                    issuer::run::<Self, T>(base, memory(), &work());
                } else if warp() == 13 {
                    loads::run::<Self, C>(base, [q, k, v], cache, &work(), p);
                }
                sync_warp();
            }
        }
        tcgen05_fence_before();
        sync_threads();
        if warp() == 12 {
            tcgen05_dealloc(memory(), COLUMNS);
        }
    }
}
