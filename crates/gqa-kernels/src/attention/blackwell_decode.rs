//! Decode steps with tensor memory, for low latency: a cluster of CTAs per KV head, whose ranks
//! share the keys. SM 100a and 103a. Simulated and assembled, never run.
//!
//! **One cluster** has up to 128 packed query rows of a KV head (the query heads, token by token).
//! Tensor cores of these GPUs multiply 128 rows at a time, which few query rows would hardly fill.
//! So both products are transposed: keys are the left operand, and query rows the columns.
//!
//! ```text
//! Sᵀ = K · Qᵀ         a lane of tensor memory, and a softmax thread, for each of 128 keys
//! Oᵀ += Vᵀ · P        a lane for each column of the head; P through shared memory
//! ```
//!
//! A product of so few columns takes no longer than its operands need to arrive from memory.
//!
//! **One CTA** has neighbouring tiles of 128 keys: all ranks have equally many, the first ones one
//! more where there is a rest. One warp loads them through TMA, one thread issues all products, and
//! four warps have the softmax (`softmax.rs`). It takes the maximum of a row over the threads, and
//! subtracts a *reference* from scores, which rises only where a weight would exceed 2⁸. Then the
//! softmax warps rescale the output in tensor memory. Sums of P are in tensor memory too, lane by
//! lane, so that nothing in registers depends on the number of rows: a kernel has any number of
//! them, in parts of 16.
//!
//! **Merge** (`merge.rs`): each rank merges an equal share of the rows. The others send it their
//! output, references and sums through distributed shared memory (DSMEM); a barrier counts the
//! bytes. Ranks without keys merge too.
//!
//! **Grid** ([`grid`]): ranks in x, a cluster; KV heads in y; batch entries by row tiles in z.
//! **CTA**: [`THREADS`] threads.
//!
//! **Tensors**: q and out (batch, query head, S, head size), lse (batch, query head, S) or null,
//! out in the element type, float32 or e4m3. The cache has all keys of the call, and queries are
//! rotated: k and v (batch, KV head, capacity, head size) through tensor maps with boxes of 128
//! rows by 128 bytes. Over a paged KV cache k and v are (block, KV head, row, head size), boxes
//! have the rows of a block, up to 128, and tokens of all sequences are packed: q and out (query
//! head, token, head size), lse (query head, token). Of a cache of float8 k_scale and v_scale are
//! one, (KV head) or (KV head, head size). Heads may be smaller than the kernel's: TMA fills tiles
//! with zeros.
//!
//! **Shared memory** (`layout.rs`): `queries, weights, what ranks send, stages of (keys, values),
//! barriers, what softmax threads tell each other`. As many stages as fit beside the rows.
//! **Tensor memory**: two buffers of scores, the sums, and the output.
//!
//! **Barriers**: of tile i
//!
//! | barrier | arrivals | waiting warps |
//! |---|---|---|
//! | `keys_full`, `values_full` of a stage | the warp of TMA, and bytes | the issuer; softmax before it clears values |
//! | `scored`, of two buffers in turn | the commit of Sᵀ | softmax |
//! | `weighed` | each softmax thread: scores are loaded, P is stored, the output rescaled | the issuer, before it adds, and before the scores of tile i + 2 |
//! | `added` | the commit of Oᵀ | softmax of tile i + 1, before it stores P or rescales |
//! | `keys_empty`, `values_empty` of a stage | the commits of its products | the warp of TMA |
//! | `arrived` | one, and the bytes that all ranks send | the ranks that merge |
//!
//! **Masks**: rows see one range of keys each. Tiles that not all rows see wholly, or with keys
//! without a block, are masked score by score; values that no row sees are cleared in shared
//! memory.
//!
//! **Float8 caches** (`cache.rs`): products of kind f8f6f4 read keys and values as they are.
//! Queries and weights are sums of three e4m3 terms.
//!
//! **Numerics**: f32 accumulation; P rounded to the element type, for float8 to 12 bits; sums are
//! of P before rounding; ranks are merged in f32.

mod cache;
mod issuer;
mod layout;
mod loads;
mod merge;
mod softmax;
mod work;

use crate::attention::decode::Layout as Sequences;
use crate::attention::out::Results;
use crate::num::{MmaElement, e4m3};
use crate::params::{DecodeParams, PagedDecodeParams};
use crate::simt::*;
use crate::tile::seqlens::Seqlens;
pub use cache::{Cache, Elements, Float8};
use cache::{Operands, Queries};
use core::marker::PhantomData;
pub use layout::{KEYS, LEAST_BOX, MOST_ROWS, PART, SHARED_BYTES, THREADS};
use layout::{Layout, Memory, WARPS};
use loads::{Loader, Pages};
use merge::Output;
use work::Work;

/// Largest cluster, in CTAs.
pub const MOST_RANKS: u32 = 16;
/// The warp that loads keys and values, and that of the issuer, behind the softmax.
const LOADER: u32 = WARPS;
const ISSUER: u32 = LOADER + 1;

/// CTAs of a call with clusters of `ranks` CTAs.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grid(p: &DecodeParams, ranks: u32) -> [u32; 3] {
    let a = &p.attention;
    [ranks, a.kv_heads, crate::tile::rows::row_tiles(a, p.rows) * a.batch]
}

/// The kernels for heads of up to `HEAD`, and a cache of `C`.
pub struct BlackwellDecode<const HEAD: u32, C>(PhantomData<C>);

/// Heads of 64, cache in the element type.
pub type D64 = BlackwellDecode<64, Elements>;
/// Heads of 128.
pub type D128 = BlackwellDecode<128, Elements>;
/// Heads of up to 128, cache of float8.
pub type D128Float8 = BlackwellDecode<128, Float8>;

/// A call, as all of its kernels have it.
struct Call<'a, T> {
    maps: [TensorMap; 2],
    seqlens: Seqlens,
    queries: Queries<T>,
    to: Output<T>,
    p: &'a DecodeParams,
}

#[expect(private_bounds)]
impl<const HEAD: u32, C: Operands> BlackwellDecode<HEAD, C> {
    /// Largest head size.
    pub const HEAD_SIZE: u32 = HEAD;
    /// Most query rows of a CTA: more do not fit into tensor memory.
    pub const ROWS: u32 = {
        let most = 512 / (3 + C::TERMS) / PART * PART;
        if most < MOST_ROWS { most } else { MOST_ROWS }
    };

    /// The kernel for a contiguous KV cache in the element type.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        k: TensorMap,
        v: TensorMap,
        q: Global<T>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        out_f32: Global<f32>,
        out_f8: Global<e4m3>,
        out_scale: Global<f32>,
        lse: Global<f32>,
        p: DecodeParams,
    ) {
        let none = Global::null();
        let results = Results { out, out_f32, out_f8, scale: out_scale };
        let to = Output { head_sink, v_scale: none, results, lse, tokens: 0 };
        let queries = Queries { q, k_scale: none };
        Self::contiguous(Call { maps: [k, v], seqlens, queries, to, p: &p });
    }

    /// The kernel for a paged KV cache in the element type. `block_table`, (batch, blocks of a
    /// sequence), lists the blocks of each sequence. `starts` is cu_seqlens, (batch + 1), or null
    /// if each sequence has one token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged<T: MmaElement>(
        k: TensorMap,
        v: TensorMap,
        q: Global<T>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        out_f32: Global<f32>,
        out_f8: Global<e4m3>,
        out_scale: Global<f32>,
        lse: Global<f32>,
        p: PagedDecodeParams,
    ) {
        let none = Global::null();
        let results = Results { out, out_f32, out_f8, scale: out_scale };
        let to = Output { head_sink, v_scale: none, results, lse, tokens: p.tokens };
        let (queries, seqlens) = (Queries { q, k_scale: none }, Seqlens::of_pages(past_seqlens));
        let call = Call { maps: [k, v], seqlens, queries, to, p: &p.decode };
        Self::paged(call, starts, block_table, &p);
    }

    /// The kernel for a contiguous KV cache of float8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_quantized<T: MmaElement>(
        k: TensorMap,
        v: TensorMap,
        q: Global<T>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        k_scale: Global<f32>,
        v_scale: Global<f32>,
        out: Global<T>,
        out_f32: Global<f32>,
        out_f8: Global<e4m3>,
        out_scale: Global<f32>,
        lse: Global<f32>,
        p: DecodeParams,
    ) {
        let results = Results { out, out_f32, out_f8, scale: out_scale };
        let to = Output { head_sink, v_scale, results, lse, tokens: 0 };
        let queries = Queries { q, k_scale };
        Self::contiguous(Call { maps: [k, v], seqlens, queries, to, p: &p });
    }

    /// The kernel for a paged KV cache of float8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged_quantized<T: MmaElement>(
        k: TensorMap,
        v: TensorMap,
        q: Global<T>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        k_scale: Global<f32>,
        v_scale: Global<f32>,
        out: Global<T>,
        out_f32: Global<f32>,
        out_f8: Global<e4m3>,
        out_scale: Global<f32>,
        lse: Global<f32>,
        p: PagedDecodeParams,
    ) {
        let results = Results { out, out_f32, out_f8, scale: out_scale };
        let to = Output { head_sink, v_scale, results, lse, tokens: p.tokens };
        let (queries, seqlens) = (Queries { q, k_scale }, Seqlens::of_pages(past_seqlens));
        let call = Call { maps: [k, v], seqlens, queries, to, p: &p.decode };
        Self::paged(call, starts, block_table, &p);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn contiguous<T: MmaElement>(call: Call<T>) {
        Self::step::<T, false>(call, Sequences::contiguous(), |_| Pages::none());
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn paged<T: MmaElement>(
        call: Call<T>,
        starts: Global<i32>,
        block_table: Global<i32>,
        p: &PagedDecodeParams,
    ) {
        Self::step::<T, true>(call, Sequences::new(starts, block_table, p), |batch| {
            let entries = block_table.offset((batch * p.per_sequence) as usize);
            Pages::new(entries, p.log_block_size, p.blocks)
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step<T: MmaElement, const PAGED: bool>(
        call: Call<T>,
        sequences: Sequences,
        pages: impl Fn(u32) -> Pages,
    ) {
        let Call { maps, seqlens, queries, to, p } = call;
        grid_dependency_wait();
        let work = Work::new(sequences, seqlens, p);
        if work.rows.count() == 0 {
            return;
        }
        let layout = Layout::new::<C, HEAD>(shared_base(), &work);
        let pages = pages(work.rows.batch);
        let mut loader = Loader::new(layout, maps, pages);
        match warp() {
            LOADER => {
                if lane() == 0 {
                    prefetch_tensor_map(maps[0]);
                    prefetch_tensor_map(maps[1]);
                    layout.init_barriers();
                    merge::expect::<HEAD>(layout, &work);
                }
                sync_warp();
                // The first keys travel while queries are loaded.
                loader.run::<C, HEAD, PAGED>(work.tiles.min(layout.stages), &work);
            }
            ISSUER => {
                tcgen05_alloc(layout.slot(), layout.columns::<C>());
                tcgen05_relinquish();
            }
            _ => {
                C::queries::<T, HEAD>(queries, softmax::scale(&p.attention), layout, &work, p);
                softmax::leave_bounds(layout, &work);
                fence_proxy_async();
            }
        }
        tcgen05_fence_before();
        sync_threads();
        tcgen05_fence_after();
        // Peers may send once this CTA has started and its barrier is initialised.
        cluster_arrive_relaxed();
        let start = ld_shared(layout.slot());
        let memory = Memory::new(start, layout);
        let mut reference = f32::NEG_INFINITY;
        match warp() {
            LOADER => loader.run::<C, HEAD, PAGED>(work.tiles, &work),
            ISSUER => {
                if lane() == 0 {
                    issuer::run::<C, T, HEAD>(layout, memory, &work);
                }
                sync_warp();
            }
            _ => {
                let (memory, a) = (memory.of_warp(warp()), &p.attention);
                reference = softmax::run::<C, T, HEAD, PAGED>(layout, memory, pages, &work, a);
            }
        }
        cluster_wait();
        if warp() < WARPS {
            if work.tiles > 0 {
                merge::send::<C, HEAD>(layout, memory.of_warp(warp()), reference, &work);
            }
            merge::run::<T, HEAD>(layout, to, &work, p);
        }
        tcgen05_fence_before();
        sync_threads();
        if warp() == ISSUER {
            tcgen05_dealloc(start, layout.columns::<C>());
        }
    }
}
