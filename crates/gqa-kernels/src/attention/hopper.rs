//! FlashAttention for prefill and chunked prefill on SM 90a: warp-specialised, TMA loads, wgmma,
//! ping-pong.
//!
//! **One CTA** loops over work tiles: `WARPGROUPS · 64` query rows of one (batch, query head). One
//! producer thread draws work tiles and fills the pipeline stages of K and V through TMA, another
//! thread loads Q. Each consumer warpgroup owns 64 rows: S = Q·Kᵀ from shared memory, online
//! softmax in registers, O += P·V with P from registers. A consumer issues the next tile's S before
//! the current tile's P·V, across work tiles too. Named barriers order the warpgroups on the tensor
//! cores (ping-pong): one exponentiates while the other multiplies (FlashAttention-3, 2024).
//!
//! **Grid** ([`grid`]): persistent, at most one CTA per SM, (WARPGROUPS + 1) · 128 threads, and 128
//! more where a warpgroup converts tiles. The numbering of the work tiles finishes one section of
//! (head, batch) pairs, whose K and V fit the L2 cache together, before the next section, longest
//! tiles first. A CTA draws its next tile from an atomic counter just before it needs it. Where too
//! few work tiles would leave SMs idle, the keys of a work tile are split into `splits` KV ranges,
//! each a work tile, and [`combine`](super::combine) merges their results.
//!
//! **Tensors**: q and out (batch, query head, S, head size), k and v (batch, KV head, capacity,
//! head size), where the head size of v and out may be another; q, k and v each through a tensor
//! map with any strides that are multiples of 8; out through a pointer, with 16-byte stores. lse,
//! which may be null, is (batch, query head, S). Scales are positive.
//!
//! **Shared memory**: Q tiles of 64 rows, then the K and V stages, each as 64-column chunks of
//! 128-byte rows with the 128-byte swizzle, then the barriers, then the work tile descriptions. TMA
//! fills columns past `head_size` and rows past the end of the tensor with zeros. Where V has fewer
//! columns than K, stages alternate between the two sizes (`shape.rs`).
//!
//! **Rotary embedding** with implicit positions is fused into the kernels of two warpgroups: each
//! warpgroup rotates its rows in shared memory, after they arrive and before the first product
//! (`rotate.rs`).
//!
//! **With a mask** or bias, two more warps load its tiles into pipeline stages of their own through
//! the tensor map `tiles` (`mask.rs`), and the consumers apply it to every key tile.
//!
//! **Over a paged KV cache** two warps assemble each K and V tile from boxes, one box per block,
//! and a row tile holds tokens of one sequence; q and out hold the tokens of all sequences packed
//! one after the other (`pages.rs`). There query heads may share row tiles (`packing.rs`), and CTAs
//! may have equal ranges of the work by what lengths the device finds (`schedule.rs`, `parts.rs`).
//!
//! **Over a quantized KV cache** one more warpgroup converts each tile of quantized values to
//! float16 in shared memory (`convert.rs`), and the consumers convert the queries to float16 in
//! their tile (`queries.rs`). The scales multiply the queries or S, and the output (`scales.rs`).
//! Keys of e4m3 can also stay e4m3: then each query element is a sum of two e4m3 values
//! (`operand.rs`).
//!
//! **Operands of e4m3**: over an e4m3 cache Q and P may be rounded to e4m3 too, which doubles the
//! rate of the products (`float8.rs`, `operand.rs`).
//!
//! **Barriers** (mbarriers): one full and one empty for each Q tile and for each K and V stage. A
//! full barrier completes when the bytes of every copying warp have landed; an empty barrier takes
//! one arrival per consumer warp. Tiles pass through the stages in the order K₀ K₁ V₀ K₂ V₁ … Where
//! a warpgroup converts tiles, each stage has one more barrier for the bytes, and its full barrier
//! takes one arrival per converting thread.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type. [`D64`], [`D64Short`] and the e4m3 kernels divide by the sum of
//! the rounded P and derive the log-sum-exp from it; [`D64Exact`] sums P before rounding.

mod consumer;
mod convert;
mod float8;
mod given;
mod mask;
mod operand;
mod output;
mod packing;
mod pages;
mod parts;
mod producer;
mod queries;
mod rotate;
mod row_tiles;
mod scales;
mod schedule;
mod shape;
mod softmax;
mod work;

#[cfg(not(target_arch = "nvptx64"))]
pub use float8::operands_grid;
pub use float8::{float8_operands, transposed_columns, transposed_rows};
pub(in crate::attention) use float8::{power_of_two, row_exponent, row_factor};
pub use given::MOST_CTAS as MOST_GIVEN_CTAS;
#[cfg(not(target_arch = "nvptx64"))]
pub use given::{given_words, words_read};
pub use pages::{LEAST_BOX, box_rows};
pub use parts::{MERGE_THREADS, merge as merge_parts};
pub(in crate::attention) use queries::{exponent, greatest_of_vector, sums_of};
pub use schedule::{MOST_ROW_TILES, MOST_SEQUENCES};
#[cfg(not(target_arch = "nvptx64"))]
pub use schedule::{divided, made, most_row_tiles};
pub use shape::{
    D64, D64Exact, D64Short, D80, D80Short, D96, D96Short, D128, D128Long, D160, D192, D192V128,
    D224, D256, Float8D128, Float8D256, Hopper, MaskedD64, MaskedD128, MaskedD256, QuantizedD64,
    QuantizedD128,
};

use super::out::Quantized;
use crate::concept::scales::ScalesPer;
use crate::num::{Float8, MmaElement, e4m3, f16};
use crate::params::{
    AttentionParams, Float8Params, HopperParams, MaskedParams, PagedHopperParams,
    QuantizedHopperParams, QuantizedPagedHopperParams,
};
use crate::simt::*;
use crate::tile::seqlens::Seqlens;
use consumer::{Consumer, Pointers, Steps};
use float8::Scales as Float8Scales;
use mask::Mask;
use operand::Float8Keys;
use output::Destination;
use packing::Packing;
use pages::Pages;
use parts::Parts;
use rotate::Rotation;
use scales::{CacheScales, Scales};
use shape::{Tile, WARPGROUP, WORK_SLOTS};

/// Query rows of a TMA box.
pub const QUERY_BOX: u32 = shape::WARPGROUP_ROWS;

impl<
    const D: u32,
    const N: u32,
    const G: u32,
    const C: usize,
    const W: usize,
    const O: usize,
    const M: u32,
    const SPLITS: bool,
    const CODES: bool,
> Hopper<D, N, G, C, W, O, M, SPLITS, CODES>
{
    /// Lowest compute capability, times ten.
    pub const MIN_SM: u32 = 90;
    /// Largest head size of keys.
    pub const HEAD_SIZE: u32 = D;
    /// Largest head size of values.
    pub const VALUE_SIZE: u32 = <Self as Tile>::DV;
    /// Query rows of a work tile.
    pub const ROWS: u32 = <Self as Tile>::ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = N;
    /// Threads of a CTA.
    pub const THREADS: u32 = <Self as Tile>::THREADS;
    /// Dynamic shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = <Self as Tile>::BYTES;
    /// Dynamic shared memory of a CTA over a paged KV cache, in bytes.
    pub const PAGED_SHARED_BYTES: u32 = <Self as Tile>::PAGED_BYTES;

    /// The body of all kernels here. `cache` holds the format and the scales of a quantized cache,
    /// or is `()`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<T: MmaElement, P: Steps, K: CacheScales>(
        [q, k, v]: [TensorMap; 3],
        seqlens: Seqlens,
        pointers: Pointers<T>,
        counter: Global<u32>,
        p: &AttentionParams,
        cache: K,
    ) {
        const {
            assert!(
                C == N as usize / 2
                    && (W == N as usize / 4 || W == N as usize / 8)
                    && O.is_multiple_of(4)
                    && <Self as Tile>::DV <= D
                    && (<Self as Tile>::DV == D || !CODES && !<Self as Tile>::IS_TRANSPOSED)
                    && (!<Self as Tile>::SUM_COLUMNS || D <= 64 || <Self as Tile>::IS_TRANSPOSED)
            )
        };
        let base = shared_base();
        let splits = pointers.pages.is_some_and(|pages| pages.parts.is_some());
        if let Some(pages) = pointers.pages.filter(|_| !splits) {
            pages.wait_for_launch_before();
        }
        if thread_idx() == 0 {
            for map in [q, k, v] {
                prefetch_tensor_map(map);
            }
            init_barriers::<T, Self>(base, pointers.mask, pointers.pages);
        }
        fill_ones::<T, Self>(base);
        if let Some(pages) = pointers.pages
            && let Some(parts) = pages.parts
        {
            clear_empty_rows::<Self>(base, pages.packing);
            pages.wait_for_launch_before();
            schedule::divide::<Self>(pages.sequences, pages.packing, parts, p);
        }
        sync_threads();
        if CODES && thread_idx() >= (G + 1) * WARPGROUP {
            registers_lower::<40>();
            cache.convert_tiles::<Self, P>(base);
            return;
        }
        if thread_idx() < WARPGROUP {
            // Warps that load a mask or step through a work range need more registers. Larger heads
            // leave none.
            if M > 0 || splits && D <= 128 && !CODES {
                registers_lower::<56>()
            } else if CODES || G == 2 {
                registers_lower::<40>()
            } else {
                registers_lower::<32>()
            }
            let columns = pointers.mask.map_or(u32::MAX, |mask| mask.columns);
            let pages = pointers.pages;
            if let Some(pages) = pages.filter(|_| warp() == 0) {
                match pages.parts {
                    Some(parts) => pages::load_range::<Self>(base, k, v, pages, parts, p),
                    None => pages::load_keys_and_values::<Self>(base, k, v, pages, counter, p),
                }
            } else if thread_idx() == 0 {
                producer::load_keys_and_values::<Self>(base, k, v, seqlens, counter, columns, p);
            } else if thread_idx() == 32 {
                producer::load_queries::<Self>(base, q, pages);
            } else if warp() >= 2 {
                if let Some(mask) = pointers.mask {
                    mask.load::<Self>(base, p);
                }
                if warp() == 2 {
                    match pages {
                        None => {
                            producer::clear_unseeing::<T, Self>(seqlens, pointers.to, columns, p);
                        }
                        // A token sees at least itself, and packed tokens have no padding: nothing
                        // to clear.
                        Some(pages) => {
                            pages::share_keys_and_values::<Self>(base, k, v, pages, p);
                        }
                    }
                } else if let Some(pages) = pages {
                    let clear = || pages::clear_rows_of_none::<T, Self>(pages, pointers.to, p);
                    pages::look_for_gaps::<Self>(base, pages, p, clear);
                    pages.wait_for_overlapped();
                }
            }
        } else {
            if M > 0 || splits && D <= 128 && !CODES {
                registers_raise::<224>()
            } else if CODES {
                registers_raise::<216>()
            } else if G == 2 {
                registers_raise::<232>()
            } else {
                registers_raise::<160>()
            }
            Consumer::<T, P, Self, K, C, W, O>::new(base, p, pointers, cache).run();
        }
    }
}

impl<const D: u32, const N: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, 2, C, W, O, 0, false, false>
{
    /// Whether output may be e4m3. With larger tiles ptxas spills if there are two output types.
    const MAY_QUANTIZE_OUTPUT: bool = N <= 128;

    /// The kernel of two warpgroups, which have registers left to rotate queries. Where `out_f8` is
    /// not null, output is e4m3: stored output = true output / `out_scale`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        cos: Global<T>,
        sin: Global<T>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        out_f8: Global<e4m3>,
        out_scale: Global<f32>,
        lse: Global<f32>,
        counter: Global<u32>,
        p: HopperParams,
    ) {
        let HopperParams { attention, rotary, v_head_size, .. } = p;
        let rotation = Some(Rotation { cos, sin, params: rotary });
        let quantized = (Self::MAY_QUANTIZE_OUTPUT && !out_f8.is_null())
            .then_some(Quantized { out: out_f8, scale: out_scale });
        let to = Destination { quantized, ..Destination::new(out, lse, v_head_size) };
        let pointers = Pointers { rotation, ..Pointers::new(head_sink, to) };
        Self::attend::<T, T, ()>([q, k, v], seqlens, pointers, counter, &attention, ());
    }

    /// The kernel for a paged KV cache: k and v are (block, row, KV head, head size), and
    /// `block_table`, (batch, blocks of a sequence), lists the blocks of each sequence. q and out
    /// hold the tokens of all sequences; `starts` is cu_seqlens: the tokens of sequence `b` begin
    /// at row `starts[b]`. `past_seqlens[b]` keys precede them in the cache. Values may be narrower
    /// than keys. lse, which may be null, is (query head, tokens).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        cos: Global<T>,
        sin: Global<T>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        counter: Global<u32>,
        p: PagedHopperParams,
    ) {
        let pages = Pages::new(starts, past_seqlens, block_table, &p);
        let to = Destination::new(out, lse, p.hopper.v_head_size);
        Self::attend_paged([q, k, v], [cos, sin], pages, head_sink, to, counter, &p);
    }

    /// `run_paged` for calls with few rows or long sequences among short ones: the query heads of a
    /// KV head share row tiles (`packing.rs`), and all CTAs have equal ranges of the work
    /// (`schedule.rs`), which `schedule` has, if it is not null (`given.rs`). [`merge_parts`] is
    /// behind it. The cache may be contiguous: then q and out are (batch, query head, S, head
    /// size), `past_seqlens` is seqlens_k, `starts` query_seqlens or null, and there is no table.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged_split<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        cos: Global<T>,
        sin: Global<T>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        row_tiles: Global<u32>,
        range_starts: Global<u32>,
        part_columns: Global<f32>,
        part_states: Global<[f32; 2]>,
        schedule: Global<u32>,
        p: PagedHopperParams,
    ) {
        const { assert!(Self::ROWS == schedule::ROWS && Self::VALUE_SIZE == D) }
        let parts = Parts::new([row_tiles, range_starts], part_columns, part_states, &p);
        let parts = parts.by(schedule);
        let pages = Pages::new(starts, past_seqlens, block_table, &p).shared(parts, &p);
        let counter = Global::null();
        let to = Destination::new(out, Global::null(), p.hopper.v_head_size);
        Self::attend_paged([q, k, v], [cos, sin], pages, head_sink, to, counter, &p);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_paged<T: MmaElement>(
        maps: [TensorMap; 3],
        [cos, sin]: [Global<T>; 2],
        pages: Pages,
        head_sink: Global<T>,
        to: Destination<T>,
        counter: Global<u32>,
        p: &PagedHopperParams,
    ) {
        const { assert!(N.is_power_of_two() && N <= 64 * LEAST_BOX) }
        let rotation = Some(Rotation { cos, sin, params: p.hopper.rotary });
        let lengths = Seqlens::of_pages(pages.sequences.past_seqlens);
        let pages = Some(pages);
        let pointers = Pointers { rotation, pages, ..Pointers::new(head_sink, to) };
        Self::attend::<T, T, ()>(maps, lengths, pointers, counter, &p.hopper.attention, ());
    }
}

impl<const D: u32, const N: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, 2, C, W, O, 0, false, false>
{
    /// The kernel for e4m3 operands: q (batch, query head, S, head size) and v (`float8.rs`), both
    /// written by [`float8_operands`], and k, the cache (batch, KV head, capacity, head size). A
    /// column of a tensor map is two quantized values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_float8<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        row_factors: Global<f32>,
        v_scale: Global<f32>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        counter: Global<u32>,
        p: Float8Params,
    ) {
        const { assert!(<Self as Tile>::IS_TRANSPOSED) }
        let per = ScalesPer::new(p.scales);
        let scales = Some(Float8Scales { row_factors, v_scale, per });
        let to = Destination::new(out, Global::null(), p.attention.head_size);
        let pointers = Pointers { scales, ..Pointers::new(head_sink, to) };
        Self::attend::<T, Float8, ()>([q, k, v], seqlens, pointers, counter, &p.attention, ());
    }
}

impl<const D: u32, const N: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, 2, C, W, O, 0, false, true>
{
    /// The kernel for a quantized cache; a column of its tensor maps is 16 bits of quantized
    /// values. The products are float16, or e4m3 for S with `FLOAT8_KEYS`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_quantized<T: MmaElement, const FLOAT8_KEYS: bool>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        cos: Global<T>,
        sin: Global<T>,
        k_scale: Global<f32>,
        v_scale: Global<f32>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        counter: Global<u32>,
        p: QuantizedHopperParams,
    ) {
        let HopperParams { attention, rotary, v_head_size, .. } = p.hopper;
        let rotation = Some(Rotation { cos, sin, params: rotary });
        let to = Destination::new(out, lse, v_head_size);
        let per = ScalesPer::new(p.scales);
        let scales = Scales::new(k_scale, v_scale, per, p.format);
        let pointers = Pointers { rotation, ..Pointers::new(head_sink, to) };
        Self::attend_quantized::<T, FLOAT8_KEYS>(
            [q, k, v],
            (seqlens, counter),
            pointers,
            &attention,
            scales,
        );
    }

    /// `run_quantized` for a paged KV cache, whose parameters are those that
    /// [`run_paged`](D128::run_paged) takes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged_quantized<T: MmaElement, const FLOAT8_KEYS: bool>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        cos: Global<T>,
        sin: Global<T>,
        k_scale: Global<f32>,
        v_scale: Global<f32>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        counter: Global<u32>,
        p: QuantizedPagedHopperParams,
    ) {
        const { assert!(N.is_power_of_two() && N <= 64 * LEAST_BOX) }
        let rotation = Some(Rotation { cos, sin, params: p.paged.hopper.rotary });
        let to = Destination::new(out, Global::null(), p.paged.hopper.v_head_size);
        let pages = Some(Pages::new(starts, past_seqlens, block_table, &p.paged));
        let per = ScalesPer::new(p.scales);
        let scales = Scales::new(k_scale, v_scale, per, p.format);
        let pointers = Pointers { rotation, pages, ..Pointers::new(head_sink, to) };
        Self::attend_quantized::<T, FLOAT8_KEYS>(
            [q, k, v],
            (Seqlens::of_pages(past_seqlens), counter),
            pointers,
            &p.paged.hopper.attention,
            scales,
        );
    }

    /// `run_paged_quantized` with equal ranges of the work, as
    /// [`run_paged_split`](D128::run_paged_split) has them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged_split_quantized<T: MmaElement, const FLOAT8_KEYS: bool>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        cos: Global<T>,
        sin: Global<T>,
        k_scale: Global<f32>,
        v_scale: Global<f32>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        row_tiles: Global<u32>,
        range_starts: Global<u32>,
        part_columns: Global<f32>,
        part_states: Global<[f32; 2]>,
        schedule: Global<u32>,
        p: QuantizedPagedHopperParams,
    ) {
        const { assert!(N.is_power_of_two() && N <= 64 * LEAST_BOX) }
        const { assert!(Self::ROWS == schedule::ROWS && Self::VALUE_SIZE == D) }
        let rotation = Some(Rotation { cos, sin, params: p.paged.hopper.rotary });
        let to = Destination::new(out, Global::null(), p.paged.hopper.v_head_size);
        let parts = Parts::new([row_tiles, range_starts], part_columns, part_states, &p.paged);
        let parts = parts.by(schedule);
        let pages = Pages::new(starts, past_seqlens, block_table, &p.paged);
        let pages = Some(pages.shared(parts, &p.paged));
        let per = ScalesPer::new(p.scales);
        let scales = Scales::new(k_scale, v_scale, per, p.format);
        let pointers = Pointers { mask: None, rotation, pages, scales: None, head_sink, to };
        Self::attend_quantized::<T, FLOAT8_KEYS>(
            [q, k, v],
            (Seqlens::of_pages(past_seqlens), Global::null()),
            pointers,
            &p.paged.hopper.attention,
            scales,
        );
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_quantized<T: MmaElement, const FLOAT8_KEYS: bool>(
        maps: [TensorMap; 3],
        (lengths, counter): (Seqlens, Global<u32>),
        pointers: Pointers<T>,
        p: &AttentionParams,
        scales: Scales,
    ) {
        let p = &scales.join(p);
        if FLOAT8_KEYS {
            Self::attend::<T, Float8Keys, _>(maps, lengths, pointers, counter, p, scales);
        } else {
            Self::attend::<T, f16, _>(maps, lengths, pointers, counter, p, scales);
        }
    }
}

impl<const D: u32, const N: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, 3, C, W, O, 0, false, false>
{
    /// The kernel of three warpgroups.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        counter: Global<u32>,
        p: AttentionParams,
    ) {
        let to = Destination::new(out, lse, p.head_size);
        let pointers = Pointers::new(head_sink, to);
        Self::attend::<T, T, ()>([q, k, v], seqlens, pointers, counter, &p, ());
    }
}

impl<const D: u32, const N: u32, const G: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, G, C, W, O, 0, true, false>
{
    /// The kernel that splits the keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        partial_out: Global<f32>,
        partial_lse: Global<f32>,
        counter: Global<u32>,
        p: AttentionParams,
    ) {
        let to = Destination { partial_out, ..Destination::new(out, partial_lse, p.head_size) };
        let pointers = Pointers::new(head_sink, to);
        Self::attend::<T, T, ()>([q, k, v], seqlens, pointers, counter, &p, ());
    }
}

impl<const D: u32, const N: u32, const G: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, G, C, W, O, 2, false, false>
{
    /// The kernel with a bias or a mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        tiles: TensorMap,
        seqlens: Seqlens,
        bias: Global<T>,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        counter: Global<u32>,
        p: MaskedParams,
    ) {
        let mask = Some(Mask::new(tiles, bias, &p));
        let to = Destination::new(out, lse, p.v_head_size);
        let pointers = Pointers { mask, ..Pointers::new(head_sink, to) };
        Self::attend::<T, T, ()>([q, k, v], seqlens, pointers, counter, &p.attention, ());
    }
}

/// The kernel that divides the work of calls ahead of them (`given.rs`): `starts` and
/// `past_seqlens` are those of the attention. Its CTAs are [`D128`]'s.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn schedule_work(
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    schedule: Global<u32>,
    p: PagedHopperParams,
) {
    given::make::<D128<false>>(starts, past_seqlens, schedule, &p);
}

/// Where the tensor cores sum P, fills the operand of ones; the caller's barrier publishes it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn fill_ones<T: MmaElement, S: Tile>(base: u32) {
    if !S::SUM_COLUMNS {
        return;
    }
    if S::IS_TRANSPOSED {
        const ONES: u32 = 0x3838_3838;
        /// 16-byte vectors of ones in a stage.
        const VECTORS: u32 = 64;
        let (stage, vector) = (thread_idx() / VECTORS, thread_idx() % VECTORS);
        for stage in Rolled(stage..S::STAGES, (S::WARPGROUPS + 1) * WARPGROUP / VECTORS) {
            let ones = base + S::KV + stage * S::STAGE_BYTES + S::TILE_BYTES;
            st_shared_vec(ones + 16 * vector, [ONES; 4]);
        }
    } else if thread_idx() < S::ONES_BYTES / 16 {
        st_shared_vec(base + S::ONES + 16 * thread_idx(), [T::pack(1.0, 1.0); 4]);
    }
    fence_proxy_async();
}

/// Clears the rows of the Q tiles that no copy fills: NaN in them would trigger the slow path for
/// overflowing P.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn clear_empty_rows<S: Tile>(base: u32, packing: Packing) {
    let (filled, vectors) = (packing.rows(), 8 * (shape::WARPGROUP_ROWS - packing.rows()));
    for chunk in Rolled(0..S::Q_TILES * S::CHUNKS, 1) {
        let at = base + (chunk * shape::WARPGROUP_ROWS + filled) * 128;
        for vector in Rolled(thread_idx()..vectors, S::THREADS) {
            st_shared_vec(at + 16 * vector, [0; 4]);
        }
    }
    fence_proxy_async();
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn init_barriers<T: MmaElement, S: Tile>(base: u32, mask: Option<Mask<T>>, pages: Option<Pages>) {
    let warps = S::WARPGROUPS * 4;
    let copying = pages.map_or(1, |_| pages::COPYING_WARPS);
    // Over a paged cache the Q barrier counts two arrivals: the Q tile, and the scan for gaps.
    let described = if pages.is_some() { 2 } else { 1 };
    let (copied, read) = mask.map_or((0, 0), |_| (mask::WARPS, warps));
    let mut stage = 0;
    while stage < S::Q_TILES {
        mbarrier_init(base + S::Q_FULL + 8 * stage, described);
        mbarrier_init(base + S::Q_EMPTY + 8 * stage, WARPGROUP / 32);
        stage += 1;
    }
    stage = 0;
    while stage < S::STAGES {
        mbarrier_init(base + S::ARRIVAL.full + 8 * stage, copying);
        if S::CONVERTS {
            mbarrier_init(base + S::KV_FULL + 8 * stage, WARPGROUP);
        }
        mbarrier_init(base + S::KV_EMPTY + 8 * stage, warps);
        stage += 1;
    }
    stage = 0;
    while stage < S::MASK_STAGES {
        mbarrier_init(base + S::MASK_FULL + 8 * stage, copied);
        mbarrier_init(base + S::MASK_EMPTY + 8 * stage, read);
        stage += 1;
    }
    let mut n = 0;
    while n < WORK_SLOTS {
        mbarrier_init(base + S::WORK_FULL + 8 * n, 1);
        n += 1;
    }
    fence_mbarrier_init();
}

/// Grid of a launch: at most one CTA per SM; each loops over work tiles of `rows` rows.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grid(p: &AttentionParams, rows: u32, multiprocessors: u32) -> [u32; 3] {
    let work = work_tiles(p, rows) * u64::from(p.splits.max(1));
    [u32::try_from(work).unwrap_or(u32::MAX).min(multiprocessors), 1, 1]
}

/// Grid of a launch over a paged KV cache whose CTAs draw whole work tiles.
#[cfg(not(target_arch = "nvptx64"))]
pub fn paged_grid(p: &PagedHopperParams, rows: u32, multiprocessors: u32) -> [u32; 3] {
    let a = &p.hopper.attention;
    let tiles = crate::tile::pages::row_tiles(p.tokens, a.batch, rows);
    [tiles.saturating_mul(a.q_heads).min(multiprocessors), 1, 1]
}

/// Grid of the merge that follows CTAs with equal ranges of the work.
#[cfg(not(target_arch = "nvptx64"))]
pub fn merge_grid(p: &PagedHopperParams) -> [u32; 3] {
    [p.ctas, schedule::ROWS / parts::MERGE_ROWS, 1]
}

/// Words of row_tiles and of range_starts (`schedule.rs`).
#[cfg(not(target_arch = "nvptx64"))]
pub fn schedule_words(p: &PagedHopperParams) -> [usize; 2] {
    // Each CTA that shares a row tile has its own copy of the description.
    let row_tiles = (most_row_tiles(p) + p.ctas) as usize;
    [row_tiles * schedule::TILE_WORDS as usize, ((p.ctas + 1) * schedule::LEFT_WORDS) as usize]
}

/// Elements that the CTAs write for the merge: columns and states.
#[cfg(not(target_arch = "nvptx64"))]
pub fn part_elements(p: &PagedHopperParams) -> [usize; 2] {
    let rows = 2 * p.ctas as usize * schedule::ROWS as usize;
    [rows * p.columns as usize, rows]
}

/// Tokens of a row tile of `rows` rows that `heads` query heads share.
#[cfg(not(target_arch = "nvptx64"))]
pub const fn packed_tokens(heads: u32, rows: u32) -> u32 {
    rows / shape::WARPGROUP_ROWS * (shape::WARPGROUP_ROWS / heads)
}

/// Work tiles of `rows` rows, before the keys are split.
#[cfg(not(target_arch = "nvptx64"))]
fn work_tiles(p: &AttentionParams, rows: u32) -> u64 {
    u64::from(p.q_len.div_ceil(rows)) * u64::from(p.q_heads) * u64::from(p.batch)
}

/// Number of KV splits for tiles of `rows` rows and `keys` keys that minimises the estimated time
/// on `multiprocessors` SMs, if the longest sequence has `max_keys` keys.
///
/// The unit of time is one key tile, 1.3 us of a CTA on an H200. Work tiles run in waves; splits
/// write and read their results in f32.
#[cfg(not(target_arch = "nvptx64"))]
pub fn splits(
    p: &AttentionParams,
    rows: u32,
    keys: u32,
    max_keys: u32,
    multiprocessors: u32,
) -> u32 {
    /// Most splits: the keys of one sequence rarely need more SMs.
    const MOST: u32 = 32;
    /// Cost of starting a work tile, and of starting the merge.
    const START: u64 = 2;
    /// Bytes of split results that are written and read in the time of one key tile.
    const BYTES: u64 = 2 << 20;
    let visible =
        if p.window > 0 { max_keys.min(p.window.saturating_add(p.q_len - 1)) } else { max_keys };
    let tiles = visible.div_ceil(keys).max(1);
    let units = work_tiles(p, rows);
    let results =
        4 * u64::from(p.batch) * u64::from(p.q_heads) * u64::from(p.q_len) * u64::from(p.head_size);
    let time = |splits: u32| {
        let waves = (units * u64::from(splits)).div_ceil(u64::from(multiprocessors.max(1)));
        let merge = if splits == 1 { 0 } else { START + u64::from(splits) * results / BYTES };
        waves * (u64::from(tiles.div_ceil(splits)) + START) + merge
    };
    (1..=tiles.min(MOST)).min_by_key(|&splits| time(splits)).unwrap_or(1)
}

/// (query head, batch) pairs of a section: their K and V fill at most about half the L2 cache.
/// Sections hold whole groups of query heads and are about equally large, or the last one is large
/// enough to keep all `multiprocessors` busy until its longest row tile is done.
#[cfg(not(target_arch = "nvptx64"))]
pub fn l2_section(p: &AttentionParams, l2_bytes: u64, multiprocessors: u32) -> u32 {
    /// Query rows of most tiles.
    const ROWS: u32 = 128;
    let bytes = 4 * u64::from(p.capacity) * u64::from(p.head_size);
    let caches = (l2_bytes / 2 / bytes.max(1)).max(1);
    let group = u64::from(p.q_heads / p.kv_heads);
    let all = u64::from(p.q_heads) * u64::from(p.batch);
    let fewest = all.div_ceil(caches.saturating_mul(group)).max(1);
    let pairs = |sections: u64| all.div_ceil(sections).next_multiple_of(group).min(all);
    // Under a causal mask, `n` row tiles of a pair take as long as `(n + 1) / 2` of the longest.
    let row_tiles = u64::from(p.q_len.div_ceil(ROWS)) + 1;
    let ends_together = |pairs: &u64| {
        let last = all % (*pairs).max(1);
        last == 0 || last * row_tiles >= 2 * u64::from(multiprocessors)
    };
    let mut sizes = (fewest..=all).map(pairs);
    let pairs = sizes.find(ends_together).unwrap_or_else(|| pairs(fewest));
    u32::try_from(pairs).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    fn chosen_params() -> AttentionParams {
        AttentionParams { q_heads: 32, kv_heads: 8, head_size: 128, ..AttentionParams::zeroed() }
    }

    fn chosen(batch: u32, q_len: u32, keys: u32) -> u32 {
        let p = AttentionParams { batch, q_len, ..chosen_params() };
        splits(&p, 128, 128, keys, 132)
    }

    #[test]
    fn parts_fill_a_device_that_would_be_idle() {
        assert_eq!(chosen(1, 64, 8192), 4);
        assert_eq!(chosen(2, 128, 8192), 2);
        assert!(chosen(1, 256, 32768) >= 2);
    }

    /// Pairs of a section of causal prefill with that many heads, keys of 192 and values of 128.
    fn section(batch: u32, tokens: u32, [q_heads, kv_heads]: [u32; 2]) -> u32 {
        let (q_len, capacity, head_size) = (tokens, tokens, 160);
        let sizes = AttentionParams { batch, q_len, capacity, head_size, ..chosen_params() };
        l2_section(&AttentionParams { q_heads, kv_heads, ..sizes }, 60 << 20, 132)
    }

    #[test]
    fn no_section_ends_in_a_long_row_tile() {
        // Sections of three heads would leave one head for the last section, and sections of six
        // would leave two.
        assert_eq!(section(1, 16384, [16, 16]), 2);
        assert_eq!(section(2, 8192, [16, 16]), 4);
        // Here the last section keeps all SMs busy.
        assert_eq!(section(8, 2048, [16, 16]), 22);
        assert_eq!(section(1, 16384, [32, 8]), 12);
        // One section holds all heads.
        assert_eq!(section(1, 1024, [16, 16]), 16);
    }

    #[test]
    fn a_full_device_takes_no_parts() {
        assert_eq!(chosen(1, 512, 8192), 1);
        assert_eq!(chosen(4, 64, 8192), 1);
        assert_eq!(chosen(1, 2048, 2048), 1);
        assert_eq!(chosen(1, 64, 256), 1);
    }
}
