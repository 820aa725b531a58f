//! A whole decode step in one launch: a cluster of CTAs per KV head rotates and appends the new
//! tokens, attends over cached and new keys, and merges through distributed shared memory (DSMEM).
//!
//! **One cluster** computes up to `ROWS` packed query rows (the query heads of one KV head, token
//! by token) over one split of the keys that they see. Its CTAs, the *ranks*, and their warps share
//! the keys evenly. Every warp streams its own tiles of `KEYS` keys through its own pipeline stages
//! (`stream.rs`), so nothing in the mainloop waits for another warp. Where a tile has more rows
//! than the registers of a warp hold, four warps share tiles and stages (`team.rs`). Warps that
//! share them are a *team*; elsewhere each warp is one.
//!
//! **New tokens** (`new_tokens.rs`): queries are copied to shared memory and rotated there. The
//! last rank of the last split does the same with the new keys and values. It attends to that tile
//! after its cached ones, and appends it to the cache. Only rows past the cached ones are written,
//! so no CTA reads a row that another one writes. Where the cache already holds all tokens, there
//! is no such tile.
//!
//! **Before SM 90** there are no clusters: the same source is compiled for clusters of one CTA, and
//! only splits share keys.
//!
//! **Merge** (`exchange.rs`): each rank merges an equal share of the output's columns. It sends the
//! other columns of its own result, with the maxima and sums of the rows, to the DSMEM reduction
//! buffers of the ranks that merge them. A barrier in each buffer counts the bytes. With more than
//! one split, the last rank to finish a share of columns merges it through global memory.
//!
//! **Grid**: `ranks × splits` CTAs in x, in clusters of `ranks`; KV heads in y; `batch × row tiles`
//! in z, and one more where the launch overlaps the one before it: a CTA of that last layer waits
//! for the end of the launch before. Where lengths divide the keys: KV heads in x, parts in y, row
//! tiles in z. **CTA**: `32 WARPS` threads.
//!
//! **Tensors**: q (batch, query head, S, head size) and new_k, new_v (batch, KV head, S, head size)
//! with their strides, unrotated; k, v (batch, KV head, capacity, head size), the cache that is
//! read and appended to, or (batch, KV head, capacity, bytes of a row) if it is quantized; then
//! k_scale and v_scale, f32: one, (KV head), (KV head, head size), or per token (batch, KV head,
//! capacity), which are appended to like the cache; out, which may be f32 or e4m3, and lse as in
//! [`tiled`](super::tiled); over a paged KV cache lse is (query head, token). With splits:
//! partial_out (split, batch, query head, S, head size), f32; partial_states (split, cluster, rank,
//! row), maxima and sums; arrivals (cluster, rank), counters that are zero before and after. Here
//! the clusters of all splits have the same number. Where lengths divide the keys (`division.rs`),
//! the number of a part replaces split and cluster, and schedule, if given, holds the parts of all
//! CTAs (`schedule.rs`).
//!
//! **Shared memory**: `reduction buffer | queries [ROWS] | new keys [KEYS], values [KEYS] | per
//! team: STAGES × (keys [KEYS], values [KEYS]) | per team: ROWS × (maximum, sum)`. For a quantized
//! cache the new tokens as given, the scales, and a word per warp precede the stages. After the
//! mainloop the stages of a team hold its accumulators as f32. Where teams multiply by `mma`, the
//! reduction buffer then overwrites the queries and new tokens, except for its barrier: nothing is
//! sent before all ranks have finished the mainloop.
//!
//! **Dependent launch**: CTAs may start before the launch before this one has ended. They wait for
//! its end before they read anything; where the caller says that lengths and cache are older than
//! that launch, they first load lengths and keys. CTAs without a cluster then let the next launch
//! start, so that its CTAs replace them one by one; they do so after their own wait, so that the
//! launch after the next one never overlaps this one. Clusters do not: the next launch would fill
//! the GPCs that finish first, and share the bandwidth of these (`docs/perf-log.md`). Over a paged
//! KV cache a launch may also run beside the launch before it, if that attends to other sequences;
//! one CTA without work waits for its end.
//!
//! **Before the length is known** teams of most shapes load their first keys. Keys past the end are
//! masked, like all keys that no query sees. If a row that the call appends may be among them, it
//! is appended after all ranks have read.
//!
//! **One text for two caches** (`layout.rs`): a parameter says whether the cache is contiguous or
//! consists of blocks. It becomes a constant when a plan is loaded, and the assembler drops the
//! code for the other cache. In a contiguous cache the keys of a head lie side by side, and so do
//! its values.
//!
//! **Over a paged KV cache** the block table says where the rows of each tile are. The tokens of
//! all sequences are packed one after the other. A CTA whose row tile has no tokens ends at once:
//! its sequence has fewer, or another launch attends to it. Where the table points outside of the
//! cache, nothing is read or written, and the keys are masked, new ones too.
//!
//! **Smaller heads** (`layout.rs`): padded kernels read and write only the columns that heads have.
//! The remaining columns of queries, keys and values are zero in shared memory; only the copies and
//! the output differ from kernels whose tiles fit the heads.
//!
//! **Quantized KV cache** (`quantized.rs`): quantized values are streamed as they are and converted
//! to float16 in registers.
//!
//! **Tree mask** (`tree.rs`): if given, a word for each new token says which new tokens it sees, in
//! place of their order. Such calls are not causal.
//!
//! **Numerics**: rotated rows are rounded to the element type, as the cache stores them. The rest
//! is as in [`tiled`](super::tiled); results of warps, ranks and splits are merged in f32.

mod cached;
mod division;
mod entries;
mod exchange;
mod layout;
mod new_tokens;
mod parts;
mod products;
mod quantized;
mod range;
mod row_scales;
mod schedule;
mod shape;
mod stream;
mod team;
mod tree;

pub use cached::Cached;
pub use division::{MOST_DIVIDED, Part, divides, shortest_part};
pub use layout::{Heads, Layout, Padded, Whole};
pub use products::{Mma, Products, Wgmma};
pub use quantized::{Codes, Coding};
pub use schedule::{
    MOST_SLOTS, SCHEDULE_SHARED_BYTES, SCHEDULE_THREADS, SHAPE_WORDS, schedule, schedule_words,
};
#[cfg(not(target_arch = "nvptx64"))]
pub use schedule::{scheduled, scheduled_parts, scheduled_tiles, scheduled_words};
pub use shape::*;

use crate::concept::seqlen::Lengths;
use crate::num::MmaElement;
use crate::params::{AttentionParams, DecodeParams, overlap};
use crate::simt::{
    block_idx_x, block_idx_y, block_idx_z, cluster_arrive, cluster_rank, cluster_size,
    cluster_wait, cp_async_commit, grid_dependency_wait, lane, launch_dependents, opaque,
    sync_threads,
};
use crate::tile::copy::wait_for_all_but;
use crate::tile::rows::{Rows, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::swizzle::{Swizzled, chunked_bytes, swizzled_bytes};
use cached::{Block, ScaleStaging, Tiles};
use core::marker::PhantomData;
use exchange::{Output, ReductionBuffer, Splits};
use new_tokens::{NewTokens, Rotations, new_rows};
use range::{Cache, KvRange};
use row_scales::RowScales;
use schedule::Schedule;
use tree::Tree;

/// Largest cluster, in CTAs.
pub const MAX_RANKS: u32 = 16;

/// A kernel for head size `8 D8`, cache rows of `UNITS` 16-byte units, and `16 (M - 1) + 8 HALVES`
/// packed query rows. Each team of the `WARPS` warps has `STAGES` tiles of `8 N8` keys in flight.
/// `H` is [`Whole`], or [`Padded`] where heads may be smaller; `P` is how teams multiply.
/// `shape.rs` names the shapes.
pub struct Decode<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H = Whole,
    P = Mma,
>(PhantomData<(H, P)>);

/// Whether kernels read caches that consist of blocks, with rows of `units` 16-byte units: where a
/// lane copies the same unit of each of its rows.
pub const fn takes_blocks(units: u32) -> bool {
    units.is_power_of_two()
}

/// Clusters per split of a call with row tiles of `rows` rows.
pub fn clusters(p: &AttentionParams, rows: u32) -> u32 {
    row_tiles(p, rows) * p.kv_heads * p.batch
}

/// Grid of a call with clusters of `ranks` CTAs. A launch that overlaps the one before it has one
/// more layer in z, which waits for that launch.
pub fn grid(p: &DecodeParams, ranks: u32) -> [u32; 3] {
    let a = &p.attention;
    if p.parts > 0 {
        return [a.kv_heads, division::most(p), row_tiles(a, p.rows)];
    }
    let waiting = u32::from(p.overlap == overlap::ALL);
    [ranks * p.splits, a.kv_heads, row_tiles(a, p.rows) * a.batch + waiting]
}

/// Elements of (partial_out, partial_states) of a call with splits.
pub fn partial_elements(p: &DecodeParams, ranks: u32) -> (usize, usize) {
    let rows = partials(p) * p.rows as usize;
    (rows * p.attention.head_size as usize, rows * ranks as usize)
}

/// Number of clusters, of all splits, that write partial results.
fn partials(p: &DecodeParams) -> usize {
    match p.parts {
        0 => p.splits as usize * p.clusters as usize,
        _ => division::most_partials(p),
    }
}

/// Number of arrival counters of a call with splits.
pub fn arrivals(p: &DecodeParams, ranks: u32) -> usize {
    match p.parts {
        0 => p.clusters as usize * ranks as usize,
        _ => division::most_partials(p),
    }
}

/// What a CTA works on.
#[derive(Clone, Copy)]
struct Place {
    kv_head: u32,
    /// Batch entry.
    batch: u32,
    row_tile: u32,
    /// Number of (batch, KV head, row tile) in the grid.
    index: u32,
    /// The split of the keys, and the number of splits.
    split: u32,
    splits: u32,
    /// Distance between the partial results of two consecutive splits.
    stride: u32,
    /// The CTA's rank in the cluster, and the number of ranks.
    rank: u32,
    ranks: u32,
}

impl Place {
    /// The place of this CTA. With one row tile no division delays the load of the length.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(p: &DecodeParams) -> Self {
        Self::at(p, [block_idx_x(), block_idx_y(), block_idx_z()])
    }

    /// The place of the CTA with these grid coordinates.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn at(p: &DecodeParams, [x, y, z]: [u32; 3]) -> Self {
        let a = &p.attention;
        let (ranks, batch) = (cluster_size(), a.batch.max(1));
        Self {
            kv_head: y,
            batch: if z < batch { z } else { z % batch },
            row_tile: if z < batch { 0 } else { z / batch },
            index: z * a.kv_heads + y,
            split: if p.splits > 1 { x / ranks } else { 0 },
            splits: p.splits,
            stride: p.clusters,
            rank: cluster_rank(),
            ranks,
        }
    }

    /// Whether this rank attends to the new tokens: the last rank of the last split does.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_new_tokens(&self, p: &DecodeParams) -> bool {
        let (ranks, index) = self.among();
        p.new_len > 0 && index + 1 == ranks
    }

    /// Whether this rank also appends the new tokens: one row tile does.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn appends(&self, p: &DecodeParams) -> bool {
        self.has_new_tokens(p) && self.row_tile == 0
    }

    /// Number of ranks of all splits, and the number of this one among them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn among(&self) -> (u32, u32) {
        ((self.ranks * self.splits).max(1), self.split * self.ranks + self.rank)
    }

    /// Number of the partial results of a split of the same row tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn number(&self, split: u32) -> u32 {
        split * self.stride + self.index
    }
}

/// What a CTA needs for its first loads: of queries, new tokens and cache.
struct Opening<'a, C: Cached, const D8: usize, const UNITS: usize> {
    p: &'a DecodeParams,
    place: Place,
    new_tokens: &'a NewTokens<C>,
    tiles: &'a Tiles<C, D8, UNITS>,
    /// Whether lengths and cache are older than the launch before this one.
    prefetches: bool,
}

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    /// Oldest compute capability, times ten.
    pub const MIN_SM: u32 = 80;
    /// Whether four warps share tiles of keys, because a warp's registers hold fewer rows.
    const IN_TEAMS: bool = M > 2;
    /// Head size; with [`Self::PADS`] the largest.
    pub const HEAD_SIZE: u32 = D8 as u32 * 8;
    /// Whether heads may be smaller.
    pub const PADS: bool = H::PAD;
    /// Packed query rows of a cluster.
    pub const ROWS: u32 = (16 * (M - 1) + 8 * HALVES) as u32;
    /// Keys of a tile.
    pub const KEYS: u32 = N8 as u32 * 8;
    /// Threads of a CTA.
    pub const THREADS: u32 = WARPS * 32;
    /// Shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = {
        assert!(4 * Self::ROWS * Self::ACC_PITCH <= Self::RING_BYTES, "accumulators need a ring");
        Self::STATES + Self::TEAMS * Self::ROWS * size_of::<[f32; 2]>() as u32
    };

    /// Whether two CTAs fit on an SM.
    const IS_HALF: bool = WARPS < 8 && !Self::IN_TEAMS;
    /// Whether teams load their first keys before they know the length. That is slower with more
    /// than 16 rows, and with one stage in a CTA that is alone on its SM (`docs/perf-log.md`).
    const LOADS_KEYS_EARLY: bool = M == 1 && (STAGES > 1 || Self::IS_HALF);
    /// Whether the place is recomputed after the mainloop, which leaves no registers for it.
    const FORGETS: bool = Self::IS_TIGHT || D8 >= 32;
    /// Whether the reduction buffer, except for its barrier, overwrites the queries and new tokens
    /// after all ranks have read them: with 64 rows both would hardly fit 99 KB of shared memory.
    const REDUCES_OVER_QUERIES: bool = Self::IN_TEAMS && !P::IN_CHUNKS;
    const QUERIES: u32 = if Self::REDUCES_OVER_QUERIES { 128 } else { Self::REDUCTION_BYTES };
    const NEW_TILES: u32 = Self::QUERIES + Self::tile_bytes(Self::ROWS, D8);
    const STAGE_BYTES: u32 = 2 * Self::tile_bytes(Self::KEYS, UNITS);
    /// Columns in 16 bytes of a row of the cache.
    const PER_UNIT: u32 = Self::HEAD_SIZE / UNITS as u32;
    /// Whether the cache may consist of blocks.
    const TAKES_BLOCKS: bool = takes_blocks(UNITS as u32);
    /// Whether the cache holds quantized values.
    const IS_QUANTIZED: bool = UNITS < D8;
    /// New keys and values before they are encoded.
    const GIVEN: u32 =
        if Self::IS_QUANTIZED { Self::NEW_TILES + Self::STAGE_BYTES } else { Self::NEW_TILES };
    const GIVEN_BYTES: u32 = 2 * Self::tile_bytes(Self::KEYS, D8);
    const SCALES: u32 = Self::GIVEN + Self::GIVEN_BYTES;
    const RINGS: u32 = if Self::IS_QUANTIZED {
        Self::SCALES + ScaleStaging::bytes(Self::HEAD_SIZE, Self::KEYS)
    } else if Self::REDUCES_OVER_QUERIES && Self::REDUCTION_BYTES > Self::SCALES {
        Self::REDUCTION_BYTES
    } else {
        Self::SCALES
    };
    const RING_BYTES: u32 = STAGES * Self::STAGE_BYTES;
    const STATES: u32 = Self::RINGS + Self::TEAMS * Self::RING_BYTES;

    /// Sizes that `Cached::prepare` and `Cached::encode` need.
    const BLOCK: Block = Block { rows: Self::ROWS, keys: Self::KEYS, threads: Self::THREADS };

    /// Bytes of a tile.
    const fn tile_bytes(rows: u32, units: usize) -> u32 {
        if P::IN_CHUNKS { chunked_bytes(rows, units) } else { swizzled_bytes(rows, units) }
    }

    /// The body of all entries. `C` is the type of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step<C: Cached>(
        new_tokens: NewTokens<C>,
        seqlens: Seqlens,
        layout: Layout,
        output: Output<C::Element>,
        splits: Splits,
        schedule: Schedule,
        tree: Tree,
        p: DecodeParams,
    ) {
        let place = Place::new(&p);
        let prefetches = Self::LOADS_KEYS_EARLY && p.overlap == overlap::CACHE;
        if p.overlap == overlap::ALL {
            if Self::waits_for_overlapped(&p) {
                return;
            }
        } else if !prefetches {
            Self::wait_for_launch_before(place);
        }
        let place = if Self::divides(&p) {
            let Some(part) = Self::part_of(&p, layout, seqlens, schedule) else { return };
            part
        } else {
            place
        };
        // `part_of` has saved the place of a part.
        if Self::keeps_place() && !Self::divides(&p) {
            Self::save_place(place);
        }
        let loaded = Self::load_length(seqlens, place, p.attention.q_len);
        let a = &p.attention;
        let mut rows = Self::rows(a, place, layout);
        if layout.is_paged() && rows.count() == 0 {
            return;
        }
        let (channels, other) = if H::PAD { (a.head_size, 1.0) } else { (Self::HEAD_SIZE, 0.0) };
        // Few bytes, but loads queue behind those of the cache.
        let load = |rows: &Rows| {
            let scale = C::load_scales(
                new_tokens.coding,
                &p,
                place.kv_head,
                channels,
                other,
                Self::THREADS,
            );
            (scale, Self::load_word(a, rows, layout, tree))
        };
        let early = (!prefetches).then(|| load(&rows));
        let mut cache = Cache::of(a, &rows, new_tokens.present_k, new_tokens.present_v, layout);
        if Self::LOADS_KEYS_EARLY {
            cache.lanes = Self::lanes::<C>();
        }
        let layout = cache.layout;
        let tiles = Tiles {
            queries: Self::queries(),
            operands: Self::queries(),
            keys: Self::tile(Self::GIVEN, Self::KEYS),
            values: Self::tile(Self::GIVEN + Self::GIVEN_BYTES / 2, Self::KEYS),
            cached_keys: Self::new_keys(),
            cached_values: Self::new_values(),
        };
        let staging = ScaleStaging::at(Self::SCALES, Self::HEAD_SIZE);
        let opening = Opening { p: &p, place, new_tokens: &new_tokens, tiles: &tiles, prefetches };
        let cache_first = Self::takes_cache_first(&p, place);
        let ahead = Self::LOADS_KEYS_EARLY && p.ahead != 0 && !cache_first;
        if ahead {
            Self::start_ahead(&p, place, &cache);
        }
        if !cache_first {
            Self::start_queries(&opening, &rows);
        }
        rows.seqlen = layout.seqlen(a, &rows, Self::length(seqlens, loaded, a.q_len));
        let range = KvRange::new(&p, &rows, place, Self::KEYS, layout, tree);
        let (rotations, lacks_rows) = if cache_first {
            Self::start_cache_first(&opening, &rows, &range, &cache)
        } else {
            Self::start_new_tokens_first(&opening, &rows, &range, &mut cache, ahead)
        };
        if place.ranks > 1 {
            ReductionBuffer::<D8>::new(&rows, place).open();
        }
        let (scale, word) = early.unwrap_or_else(|| load(&rows));
        wait_for_all_but(2 * STAGES);
        C::stage_scales(scale, staging, Self::THREADS);
        Self::keep_word(tree, word);
        Self::sync_block();
        if p.rotary.dim > 0 || p.new_len > 0 {
            new_tokens.rotate(&rows, &tiles, rotations, Self::THREADS);
            Self::sync_block();
            if range.has_new_tokens {
                C::encode(new_tokens.coding, &tiles, staging, new_rows(&p, &rows), Self::BLOCK);
            }
            // Not through `append_early`: the compiler would order the code before it differently,
            // which costs a step over a paged KV cache 0.2 us.
            if !Self::IS_QUANTIZED && place.appends(&p) && !Self::appends_late(&p, &rows, place) {
                new_tokens.append::<H, _, _>(&p, &rows, &tiles, layout, staging, Self::BLOCK);
            }
        }
        if Self::IN_TEAMS {
            let (states, acc) = Self::attend_together(&p, &rows, &range, cache, tree, lacks_rows);
            Self::publish_together(states, &acc);
        } else {
            let unit = C::prepare(new_tokens.coding, &tiles, staging, Self::BLOCK);
            if Self::IS_QUANTIZED {
                Self::append_early(&p, &rows, place, &new_tokens, &tiles, layout, staging);
            }
            let of_rows = RowScales { coding: new_tokens.coding, staging };
            let (states, mut acc, value_unit) =
                Self::attend(&p, &rows, &range, cache, of_rows, unit, tree, lacks_rows);
            C::scale(new_tokens.coding, &mut acc, staging, value_unit);
            Self::publish::<C>(states, &acc);
        }
        sync_threads();

        let (place, rows) = Self::recompute(&p, place, rows, layout);
        let buffer = ReductionBuffer::<D8>::new(&rows, place);
        if place.ranks == 1 {
            Self::finish_alone(&p, &rows, place, output, splits);
        } else {
            Self::send(&rows, buffer);
            if Self::appends_late(&p, &rows, place) {
                cluster_arrive();
                cluster_wait();
                if place.appends(&p) {
                    new_tokens.append::<H, _, _>(&p, &rows, &tiles, layout, staging, Self::BLOCK);
                }
            }
        }
        // With enough threads each takes one column, which has the lower latency. Otherwise each
        // takes eight columns of a row, and computes the row's merge factors once.
        if buffer.has_few_units(Self::THREADS) {
            Self::finish::<C::Element, 1>(&p, &rows, buffer, output, splits);
        } else {
            Self::finish::<C::Element, 8>(&p, &rows, buffer, output, splits);
        }
    }

    /// Starts copying the queries, after the launch before this one has written them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start_queries<C: Cached>(opening: &Opening<C, D8, UNITS>, rows: &Rows) {
        if opening.prefetches {
            Self::wait_for_launch_before(opening.place);
        }
        let (p, tiles) = (opening.p, opening.tiles);
        opening.new_tokens.copy_queries::<H, _, _>(p, rows, tiles, Self::ROWS, Self::THREADS);
    }

    /// Starts copying the new keys and values if this rank attends to them, as one copy group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start_new_tokens<C: Cached>(opening: &Opening<C, D8, UNITS>, rows: &Rows, range: &KvRange) {
        if range.has_new_tokens {
            let (p, tiles) = (opening.p, opening.tiles);
            opening.new_tokens.copy_new::<H, _, _>(p, rows, tiles, Self::KEYS, Self::THREADS);
        }
        cp_async_commit();
    }

    /// Starts the copies of the first cache tiles, then of queries and new tokens. Also returns
    /// whether this lane has found a row without a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start_cache_first<C: Cached>(
        opening: &Opening<C, D8, UNITS>,
        rows: &Rows,
        range: &KvRange,
        cache: &Cache<C, UNITS>,
    ) -> (Rotations<C::Element>, bool) {
        let lacks_rows = Self::start(range, cache, false)
            | Self::new_row_is_nowhere(opening.p, rows, range, cache.layout);
        let rotations =
            opening.new_tokens.rotations(opening.p, rows, opening.tiles, range.has_new_tokens);
        Self::start_queries(opening, rows);
        Self::start_new_tokens(opening, rows, range);
        // Keeps the cp.async group numbering: as if the first tiles followed the new tokens.
        (0..2 * STAGES).for_each(|_| cp_async_commit());
        (rotations, lacks_rows)
    }

    /// Starts the copies of the new tokens, then of the first cache tiles, except for keys that
    /// `start_ahead` has started. Also returns whether this lane has found a row without a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start_new_tokens_first<C: Cached>(
        opening: &Opening<C, D8, UNITS>,
        rows: &Rows,
        range: &KvRange,
        cache: &mut Cache<C, UNITS>,
        ahead: bool,
    ) -> (Rotations<C::Element>, bool) {
        Self::start_new_tokens(opening, rows, range);
        let rotations =
            opening.new_tokens.rotations(opening.p, rows, opening.tiles, range.has_new_tokens);
        if !Self::LOADS_KEYS_EARLY {
            cache.lanes = Self::lanes::<C>();
        }
        let lacks_rows = Self::start(range, cache, ahead)
            | Self::new_row_is_nowhere(opening.p, rows, range, cache.layout);
        (rotations, lacks_rows)
    }

    /// Whether the CTA loads its first cache tiles before the new tokens. That is faster where two
    /// CTAs share an SM, because the other one reads while this one prepares the new tokens, and
    /// slower where a CTA is alone.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn takes_cache_first(p: &DecodeParams, place: Place) -> bool {
        let is_later = if Self::divides(p) {
            parts::block(p) >= p.at_a_time
        } else {
            place.index * p.splits + place.split >= p.at_a_time
        };
        Self::IS_HALF && place.ranks == 1 && (p.overlap == overlap::CACHE || is_later)
    }

    /// Whether new tokens are appended after all ranks have read: their rows may be among the keys
    /// that other ranks load before they know the length.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn appends_late(p: &DecodeParams, rows: &Rows, place: Place) -> bool {
        Self::LOADS_KEYS_EARLY
            && place.ranks > 1
            && p.new_len > 0
            && rows.seqlen.past < Self::keys_ahead(p, place)
    }

    /// Appends the new tokens if this CTA has them, unless [`appends_late`](Self::appends_late).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_early<C: Cached>(
        p: &DecodeParams,
        rows: &Rows,
        place: Place,
        new_tokens: &NewTokens<C>,
        tiles: &Tiles<C, D8, UNITS>,
        layout: Layout,
        staging: ScaleStaging,
    ) {
        if place.appends(p) && !Self::appends_late(p, rows, place) {
            new_tokens.append::<H, _, _>(p, rows, tiles, layout, staging, Self::BLOCK);
        }
    }

    /// Loads the length of the sequence; in one lane where the first keys are loaded before it
    /// arrives.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_length(seqlens: Seqlens, place: Place, q_len: u32) -> Lengths {
        let loads = !Self::LOADS_KEYS_EARLY || lane() == 0;
        if loads { seqlens.load(place.batch, q_len) } else { Lengths::default() }
    }

    /// Broadcasts the loaded length to the warp. If every lane loaded it, ptxas would hoist what
    /// depends on it above the copies that need no length, and lanes would wait there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn length(seqlens: Seqlens, loaded: Lengths, q_len: u32) -> Lengths {
        if Self::LOADS_KEYS_EARLY { seqlens.of_lane_0(loaded, q_len) } else { loaded }
    }

    /// Waits for the launch before this one. CTAs without a cluster then let the next launch start.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait_for_launch_before(place: Place) {
        grid_dependency_wait();
        if place.ranks == 1 {
            launch_dependents();
        }
    }

    /// In a launch that overlaps the one before it: lets the next launch start, and returns whether
    /// this CTA has no work. One CTA without work waits for the launch before, so that the next
    /// launch finds both ended: waiting at the end of a CTA with work would take registers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn waits_for_overlapped(p: &DecodeParams) -> bool {
        launch_dependents();
        // opaque(): otherwise the product stays in a register through the mainloop.
        let is_behind = opaque(block_idx_z()) * p.attention.kv_heads >= p.clusters;
        if is_behind && block_idx_x() + block_idx_y() == 0 {
            grid_dependency_wait();
        }
        is_behind
    }

    /// Place and rows, recomputed to avoid spills across the mainloop where it
    /// [leaves no registers](Self::FORGETS).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn recompute(p: &DecodeParams, place: Place, rows: Rows, layout: Layout) -> (Place, Rows) {
        if !Self::FORGETS {
            return (place, rows);
        }
        let place = match Self::keeps_place() {
            true => Self::saved_place(),
            false => Place::at(p, [block_idx_x(), block_idx_y(), block_idx_z()].map(opaque)),
        };
        let mut anew = Self::rows(&p.attention, place, layout);
        anew.seqlen = rows.seqlen;
        (place, anew)
    }

    /// The query rows of a CTA, before the length of the sequence is known.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(a: &AttentionParams, place: Place, layout: Layout) -> Rows {
        let all = Rows::of(a, place.row_tile, place.kv_head, place.batch, Self::ROWS);
        layout.rows(a, all)
    }

    /// The tile of queries.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement>() -> Swizzled<T, D8> {
        Self::tile(Self::QUERIES, Self::ROWS)
    }
}
