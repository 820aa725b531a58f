//! Flash attention for prompts and chunks on SM 90a: warp-specialised, TMA in, wgmma, ping-pong.
//!
//! **One block** walks over work tiles: `WARPGROUPS · 64` query rows of one (batch, query head). One producer thread keeps a
//! ring of K and V tiles full through the copy engine, another loads Q and describes the work; each consumer warpgroup owns 64 rows:
//! S = Q·Kᵀ from shared memory, online softmax in registers, O += P·V with P from registers. The next tile's S is issued
//! before the P·V of the current one, over the borders of work tiles too, and two named barriers hand the tensor cores from one
//! warpgroup to the other, so that one exponentiates while the other multiplies (FlashAttention-3, 2024).
//!
//! **Grid** ([`grid`]): as many blocks as SMs, (WARPGROUPS + 1) · 128 threads. Tiles are numbered so that the (head, batch) pairs of a section,
//! whose K and V fit the L2 cache together, are finished before the next section, longest tiles first. Each block draws its next tile from
//! a counter when it is about to need it.
//!
//! **Tensors**: q and out (batch, query head, S, head size), k and v (batch, KV head, capacity, head size), q, k and v each through a
//! tensor map with any strides that are multiples of 8; out through a pointer, with 16-byte stores. lse, which may be null, is
//! (batch, query head, S). Scales are positive.
//!
//! **Shared memory**: Q tiles, then one ring of K and V tiles, each as 64-column chunks of 128-byte rows with the 128-byte swizzle,
//! then the barriers, then descriptions of work tiles. Columns behind `head_size` and rows behind the tensor arrive as zeros.
//!
//! **Barriers** (mbarriers; full: the producer's bytes have landed; empty: one arrival per consumer warp): each Q stage, each stage of
//! the ring, through which tiles go in the order K₀ K₁ V₀ K₂ V₁ …
//!
//! **Numerics**: f32 accumulation, `exp2` of scores times `scale · log2 e`, weights rounded to the element type.

mod consumer;
mod output;
mod producer;
mod ring;
mod shape;
mod softmax;
mod work;

pub use shape::{D64, D64Short, D80, D96, D128, D160, D192, D224, D256, Hopper};

use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;
use consumer::{Consumer, Pointers};
use shape::{DRAWN, Tile, WARPGROUP};

impl<const D: u32, const N: u32, const G: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, G, C, W, O>
{
    /// Oldest compute capability, times ten.
    pub const MIN_SM: u32 = 90;
    /// Largest head size.
    pub const HEAD_SIZE: u32 = D;
    /// Query rows of a work tile.
    pub const ROWS: u32 = <Self as Tile>::ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = N;
    /// Threads of a block.
    pub const THREADS: u32 = (G + 1) * WARPGROUP;
    /// Dynamic shared memory of a block.
    pub const SHARED_BYTES: u32 = <Self as Tile>::BYTES;

    /// The kernel.
    #[inline(always)]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        seqlens_k: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        counter: Global<u32>,
        p: AttentionParams,
    ) {
        const { assert!(C == N as usize / 2 && W == N as usize / 4 && O == D as usize / 2) };
        let base = shared_base();
        if thread_idx() == 0 {
            for map in [q, k, v] {
                prefetch_tensor_map(map);
            }
            init_barriers::<Self>(base);
        }
        sync_threads();
        if thread_idx() < WARPGROUP {
            if G == 2 {
                registers_lower::<40>()
            } else {
                registers_lower::<32>()
            }
            if thread_idx() == 0 {
                producer::load_keys_and_values::<Self>(base, k, v, seqlens_k, counter, &p);
            } else if thread_idx() == 32 {
                producer::load_queries::<Self>(base, q, seqlens_k, counter, &p);
            } else if warp() == 2 {
                producer::clear_padding::<T, Self>(seqlens_k, out, lse, &p);
            }
        } else {
            if G == 2 {
                registers_raise::<232>()
            } else {
                registers_raise::<160>()
            }
            let pointers = Pointers { head_sink, out, lse };
            Consumer::<T, Self, C, W, O>::new(base, &p, pointers).run();
        }
    }
}

#[inline(always)]
fn init_barriers<S: Tile>(base: u32) {
    let warps = S::WARPGROUPS * 4;
    let mut stage = 0;
    while stage < S::Q_STAGES {
        mbarrier_init(base + S::Q_FULL + 8 * stage, 1);
        mbarrier_init(base + S::Q_EMPTY + 8 * stage, warps);
        stage += 1;
    }
    stage = 0;
    while stage < S::STAGES {
        mbarrier_init(base + S::KV_FULL + 8 * stage, 1);
        mbarrier_init(base + S::KV_EMPTY + 8 * stage, warps);
        stage += 1;
    }
    let mut n = 0;
    while n < DRAWN {
        mbarrier_init(base + S::DRAWN_FULL + 8 * n, 1);
        n += 1;
    }
    fence_mbarrier_init();
}

/// Blocks of a launch: one per multiprocessor at most; each walks over work tiles of `rows` rows.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grid(p: &AttentionParams, rows: u32, multiprocessors: u32) -> [u32; 3] {
    let work = u64::from(p.q_len.div_ceil(rows)) * u64::from(p.q_heads) * u64::from(p.batch);
    [u32::try_from(work).unwrap_or(u32::MAX).min(multiprocessors), 1, 1]
}

/// (query head, batch) pairs whose K and V fill at most about half the L2 cache together: whole groups of them, and about as many in
/// every section.
#[cfg(not(target_arch = "nvptx64"))]
pub fn section(p: &AttentionParams, l2_bytes: u64) -> u32 {
    let bytes = 4 * u64::from(p.capacity) * u64::from(p.head_size);
    let caches = (l2_bytes / 2 / bytes.max(1)).max(1);
    let group = u64::from(p.q_heads / p.kv_heads);
    let all = u64::from(p.q_heads) * u64::from(p.batch);
    let sections = all.div_ceil(caches.saturating_mul(group)).max(1);
    let pairs = all.div_ceil(sections).next_multiple_of(group).min(all);
    u32::try_from(pairs).unwrap_or(u32::MAX)
}
