//! A whole decode step in one launch: a cluster of blocks per KV head rotates and appends the new
//! rows, attends over old and new ones, and merges through distributed shared memory.
//!
//! **One cluster** computes up to `ROWS` packed query rows (the query heads of one KV head, row by
//! row of the query) against one split of the keys that they see; its blocks, the *ranks*, and
//! their warps share the keys evenly. Every warp streams its own tiles of `KEYS` keys through its
//! own ring of copies (`stream.rs`), so nothing in the loop waits for another warp. With more rows
//! than a warp has registers for, four warps share tiles and rings (`team.rs`); whoever shares them
//! is a *team*.
//!
//! **New rows** (`new_tokens.rs`): queries come into shared memory and are rotated there. The last
//! rank of the last split also takes the new keys, rotated, and values: into a tile of their own,
//! which it attends to after its share of the old ones, and from there into the cache, where only
//! rows behind the old ones are written. So no block reads a cache row that another one writes.
//! Where the cache holds all rows already there is no such tile.
//!
//! **Before SM 90** every block is a cluster, and splits of the keys meet in global memory: the
//! same source, compiled for a target without clusters.
//!
//! **Merge** (`exchange.rs`): a rank owns an equal share of the output's columns, of all rows
//! together. It sends every other rank that one's columns of its own result, and the maxima and
//! sums of the rows, into mailboxes whose barrier counts the bytes, waits for its own mailbox, and
//! adds up; a block that is its cluster has nothing to send. With more than one split the same
//! owners of all splits meet in global memory, where the last one to arrive adds up.
//!
//! **Grid**: `ranks × splits` blocks in x, in clusters of `ranks`; KV heads in y; `batch × row
//! tiles` in z, and one more of a launch that overlaps the one before it, whose end it waits for.
//! Where lengths divide the keys: KV heads in x, parts in y, row tiles in z.
//! **Block**: `32 WARPS` threads.
//!
//! **Tensors**: q (batch, query head, S, head size) and new_k, new_v (batch, KV head, S, head size)
//! with their strides, unrotated; k, v (batch, KV head, capacity, head size), the cache that is
//! read and appended to, or (batch, KV head, capacity, bytes of a row) where it is quantized; then
//! k_scale and v_scale, f32, 1, (KV head), (KV head, head size), or (batch, KV head, capacity),
//! which are appended to like the cache; out, which may be f32, and lse as in
//! [`tiled`](super::tiled), of a paged KV cache (query head, token). With splits: partial_out
//! (split, batch, query head, S, head size), f32; partial_states (split, cluster, rank, row),
//! maxima and sums; arrivals (cluster, rank), counters that are zero before and after. Clusters are
//! counted without their splits. Where lengths divide the keys (`parts.rs`) a part stands in place
//! of split and cluster, and schedule, if given, has the parts of all CTAs (`schedule.rs`).
//!
//! **Shared memory**: `mailbox | queries [ROWS] | new keys [KEYS], values [KEYS] | per team:
//! STAGES × (keys [KEYS], values [KEYS])
//! | per team: ROWS × (maximum, sum)`; where the cache holds quantized values, new rows as they are
//! given, scales and a word per warp come before the rings. After the loop a team's ring holds its
//! accumulators as f32, and where teams multiply by `mma` the mailbox, but for its barrier, takes
//! the place of queries and new rows: nothing is sent before all ranks have come so far.
//!
//! **Dependent launch**: blocks may start before the launch ahead of this one has ended, and wait
//! for that before they read anything; where the caller says that lengths and cache are older than
//! that launch, before they read anything but those, so that keys are on their way while it ends.
//! Blocks without others let the next launch take their places one by one, but only after this
//! wait, so that whoever comes next finds the launch before this one ended. Clusters do not,
//! because those of the next launch would crowd in the splits of the device that end first, and
//! share what such a split can read (`docs/perf-log.md`). Over a paged KV cache a launch may also
//! run beside the one ahead, which attends to other sequences; a block more than there is work for
//! waits for its end.
//!
//! **Before the length is known** teams of most shapes ask for their first keys: those that turn
//! out not to exist are masked like all that no query sees. A row that the call appends may be
//! among them; then it is appended when all ranks have read.
//!
//! Rows of the cache lie side by side: a head's keys are one piece of memory, and so are its
//! values.
//!
//! **Blocks**: of a paged KV cache a table is asked where the rows of each tile are (`layout.rs`).
//! New rows are tokens there, those of all sequences one behind the other; a block whose row tile
//! has none, because its sequence has fewer tokens, or more than this launch takes, ends at once.
//! Where the table leads outside of the cache nothing is read or written, and keys are masked, new
//! ones too.
//!
//! **Smaller heads** (`layout.rs`): kernels that pad read and write the columns that heads have.
//! The others of queries, keys and values are zero in shared memory, and products and merges go
//! over them too, so that but for the copies and the output all is as with heads that fill tiles.
//!
//! **Codes**: a quantized KV cache is streamed as it is, and codes become halves in registers
//! (`quantized.rs`).
//!
//! **Tree mask** (`tree.rs`): in kernels that have one, not the order of the new tokens but a word
//! for each says which of them it sees. They are told that the call is not causal.
//!
//! **Numerics**: rotated rows are rounded to the element type, as the cache holds them. Then as in
//! [`tiled`](super::tiled); results of warps, ranks and splits are merged in f32.

mod cached;
mod entries;
mod exchange;
mod layout;
mod new_tokens;
mod parts;
mod products;
mod quantized;
mod row_scales;
mod schedule;
mod stream;
mod team;
mod tree;

pub use cached::Cached;
pub use layout::{Blocks, Heads, Layout, Padded, Whole};
pub use parts::{MOST_DIVIDED, Part, divides, shortest_part};
pub use products::{Mma, Products, Wgmma};
pub use quantized::{Codes, Coding};
pub use schedule::{
    MOST_SLOTS, SCHEDULE_SHARED_BYTES, SCHEDULE_THREADS, SHAPE_WORDS, schedule, schedule_words,
};
#[cfg(not(target_arch = "nvptx64"))]
pub use schedule::{scheduled, scheduled_parts, scheduled_tiles, scheduled_words};

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
use cached::{Block, ScaleStaging};
use core::marker::PhantomData;
use exchange::{Mailbox, Output, Splits};
use new_tokens::{NewTokens, Rotations, Tiles, new_rows};
use row_scales::RowScales;
use schedule::Schedule;
use stream::{Cache, Share};
use tree::Tree;

/// Most ranks of a cluster.
pub const MAX_RANKS: u32 = 16;

/// A kernel for head size `8 D8`, rows of the cache of `UNITS` times 16 bytes, and `16 (M - 1) + 8
/// HALVES` packed query rows, whose teams among `WARPS` warps have `STAGES` tiles of `8 N8` keys
/// each under way. `H` is [`Whole`], or [`Padded`] where heads may be smaller; `P` is how teams
/// multiply.
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

/// A kernel whose cache holds elements of 16 bits.
pub type OfElements<
    const D8: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
> = Decode<D8, D8, M, HALVES, N8, WARPS, STAGES>;

/// The same for 64 query rows, which teams multiply as `P` says.
pub type OfTeams<const D8: usize, const N8: usize, const WARPS: u32, const STAGES: u32, P = Mma> =
    Decode<D8, D8, 4, 2, N8, WARPS, STAGES, Whole, P>;

// One shape per head size, for 8 or 16 query rows (`HALVES` of 16), and `R32` and `R64` for as many
// where registers hold their output, with as many bytes under way as an SM's share of the memory's
// bandwidth needs. `W4`, of four warps, are half of those for 8, 16 and 32, of which an SM holds
// two: one block streams while the other begins or ends, for where blocks come in waves.

/// Head size 64.
pub type D64<const HALVES: usize> = OfElements<8, 1, HALVES, 4, 8, 2>;
/// Head size 80.
pub type D80<const HALVES: usize> = OfElements<10, 1, HALVES, 4, 8, 2>;
/// Head size 96.
pub type D96<const HALVES: usize> = OfElements<12, 1, HALVES, 4, 8, 1>;
/// Head size 128.
pub type D128<const HALVES: usize> = OfElements<16, 1, HALVES, 2, 8, 2>;
/// Head size 192.
pub type D192<const HALVES: usize> = OfElements<24, 1, HALVES, 2, 8, 1>;
/// Head size 256.
pub type D256<const HALVES: usize> = OfElements<32, 1, HALVES, 2, 8, 1>;
/// Head size 64, half an SM.
pub type D64W4<const HALVES: usize> = OfElements<8, 1, HALVES, 4, 4, 2>;
/// Head size 80, half an SM.
pub type D80W4<const HALVES: usize> = OfElements<10, 1, HALVES, 4, 4, 2>;
/// Head size 96, half an SM.
pub type D96W4<const HALVES: usize> = OfElements<12, 1, HALVES, 4, 4, 1>;
/// Head size 128, half an SM.
pub type D128W4<const HALVES: usize> = OfElements<16, 1, HALVES, 4, 4, 1>;
/// Head size 192, half an SM.
pub type D192W4<const HALVES: usize> = OfElements<24, 1, HALVES, 2, 4, 1>;
/// Head size 256, half an SM.
pub type D256W4<const HALVES: usize> = OfElements<32, 1, HALVES, 2, 4, 1>;
/// Head size 64, 32 rows.
pub type D64R32 = OfElements<8, 2, 2, 4, 8, 2>;
/// Head size 80, 32 rows.
pub type D80R32 = OfElements<10, 2, 2, 4, 8, 2>;
/// Head size 96, 32 rows.
pub type D96R32 = OfElements<12, 2, 2, 4, 8, 1>;
/// Head size 128, 32 rows.
pub type D128R32 = OfElements<16, 2, 2, 4, 8, 1>;
/// Head size 64, 32 rows, half an SM.
pub type D64R32W4 = OfElements<8, 2, 2, 4, 4, 2>;
/// Head size 128, 32 rows, half an SM.
pub type D128R32W4 = OfElements<16, 2, 2, 4, 4, 1>;
/// Head size 64, 64 rows.
pub type D64R64 = OfTeams<8, 8, 8, 4, Wgmma>;
/// Head size 80, 64 rows.
pub type D80R64 = OfTeams<10, 8, 8, 2, Wgmma>;
/// Head size 96, 64 rows.
pub type D96R64 = OfTeams<12, 8, 8, 2, Wgmma>;
/// Head size 128, 64 rows.
pub type D128R64 = OfTeams<16, 8, 8, 2, Wgmma>;

// 64 rows where there are no warpgroup instructions. Up to head size 96 two teams have room in 99
// KB of shared memory, at 128 one.

/// Head size 64, 64 rows, without `wgmma`.
pub type D64R64Mma = OfTeams<8, 8, 8, 2>;
/// Head size 80, 64 rows, without `wgmma`.
pub type D80R64Mma = OfTeams<10, 8, 8, 1>;
/// Head size 96, 64 rows, without `wgmma`.
pub type D96R64Mma = OfTeams<12, 4, 8, 2>;
/// Head size 128, 64 rows, without `wgmma`.
pub type D128R64Mma = OfTeams<16, 4, 8, 3>;
/// Head size 256, 64 rows, without `wgmma`.
pub type D256R64Mma = OfTeams<32, 4, 8, 2>;
/// Head size 128, 64 rows, without `wgmma`, less shared memory.
pub type D128R64MmaW4 = OfTeams<16, 4, 4, 3>;
/// Head size 256, 64 rows, without `wgmma`, less shared memory.
pub type D256R64MmaW4 = OfTeams<32, 4, 4, 2>;

// Caches of quantized values: for 8 or 16 query rows, with as many bytes under way. Four bits at
// head size 128 have half of that, in smaller tiles, which is faster (`docs/perf-log.md`).

/// Head size 64, 8-bit values.
pub type D64Quantized8<const HALVES: usize> = Decode<8, 4, 1, HALVES, 4, 8, 4>;
/// Head size 128, 8-bit values.
pub type D128Quantized8<const HALVES: usize> = Decode<16, 8, 1, HALVES, 4, 8, 2>;
/// Head size 256, 8-bit values.
pub type D256Quantized8<const HALVES: usize> = Decode<32, 16, 1, HALVES, 2, 8, 2>;
/// Head size 64, 4-bit values.
pub type D64Quantized4<const HALVES: usize> = Decode<8, 2, 1, HALVES, 8, 8, 4>;
/// Head size 128, 4-bit values.
pub type D128Quantized4<const HALVES: usize> = Decode<16, 4, 1, HALVES, 4, 8, 2>;
/// Head size 256, 4-bit values.
pub type D256Quantized4<const HALVES: usize> = Decode<32, 8, 1, HALVES, 4, 8, 2>;

// The same with four warps and fewer stages, for GPUs with 99 KB of shared memory a block.

/// Head size 64, 8-bit values, less shared memory.
pub type D64Quantized8W4<const HALVES: usize> = Decode<8, 4, 1, HALVES, 4, 4, 4>;
/// Head size 128, 8-bit values, less shared memory.
pub type D128Quantized8W4<const HALVES: usize> = Decode<16, 8, 1, HALVES, 4, 4, 1>;
/// Head size 256, 8-bit values, less shared memory.
pub type D256Quantized8W4<const HALVES: usize> = Decode<32, 16, 1, HALVES, 2, 4, 1>;
/// Head size 64, 4-bit values, less shared memory.
pub type D64Quantized4W4<const HALVES: usize> = Decode<8, 2, 1, HALVES, 8, 4, 2>;
/// Head size 128, 4-bit values, less shared memory.
pub type D128Quantized4W4<const HALVES: usize> = Decode<16, 4, 1, HALVES, 8, 4, 1>;
/// Head size 256, 4-bit values, less shared memory.
pub type D256Quantized4W4<const HALVES: usize> = Decode<32, 8, 1, HALVES, 2, 4, 2>;

// Heads of sizes that have no shape of their own, in blocks that any GPU has shared memory for.

/// Head sizes up to 128.
pub type UpTo128<const HALVES: usize> = Decode<16, 16, 1, HALVES, 4, 4, 1, Padded>;
/// Head sizes up to 256.
pub type UpTo256<const HALVES: usize> = Decode<32, 32, 1, HALVES, 2, 4, 1, Padded>;
/// Head sizes up to 128, 8-bit values.
pub type UpTo128Quantized8<const HALVES: usize> = Decode<16, 8, 1, HALVES, 4, 4, 1, Padded>;
/// Head sizes up to 256, 8-bit values.
pub type UpTo256Quantized8<const HALVES: usize> = Decode<32, 16, 1, HALVES, 2, 4, 1, Padded>;
/// Head sizes up to 128, 4-bit values.
pub type UpTo128Quantized4<const HALVES: usize> = Decode<16, 4, 1, HALVES, 8, 4, 1, Padded>;
/// Head sizes up to 256, 4-bit values.
pub type UpTo256Quantized4<const HALVES: usize> = Decode<32, 8, 1, HALVES, 2, 4, 2, Padded>;

/// Clusters of one split of a call whose row tiles have `rows` rows.
pub fn clusters(p: &AttentionParams, rows: u32) -> u32 {
    row_tiles(p, rows) * p.kv_heads * p.batch
}

/// Blocks of a call whose clusters have `ranks` blocks. Those of one more row tile wait for a
/// launch that this one overlaps.
pub fn grid(p: &DecodeParams, ranks: u32) -> [u32; 3] {
    let a = &p.attention;
    if p.parts > 0 {
        return [a.kv_heads, parts::most(p), row_tiles(a, p.rows)];
    }
    let waiting = u32::from(p.overlap == overlap::ALL);
    [ranks * p.splits, a.kv_heads, row_tiles(a, p.rows) * a.batch + waiting]
}

/// Elements of (partial_out, partial_states) of a call with splits.
pub fn partial_elements(p: &DecodeParams, ranks: u32) -> (usize, usize) {
    let rows = partials(p) * p.rows as usize;
    (rows * p.attention.head_size as usize, rows * ranks as usize)
}

/// Clusters that leave partial results.
fn partials(p: &DecodeParams) -> usize {
    match p.parts {
        0 => p.splits as usize * p.clusters as usize,
        _ => parts::most_partials(p),
    }
}

/// Counters of a call with splits.
pub fn arrivals(p: &DecodeParams, ranks: u32) -> usize {
    match p.parts {
        0 => p.clusters as usize * ranks as usize,
        _ => parts::most_partials(p),
    }
}

/// Which cluster this is.
#[derive(Clone, Copy)]
struct Place {
    kv_head: u32,
    /// Batch entry.
    batch: u32,
    row_tile: u32,
    /// All three as one number.
    index: u32,
    /// Which split of the keys, of how many.
    split: u32,
    splits: u32,
    /// From the number of a split's partial results to that of the next one's.
    stride: u32,
    /// Which block of the cluster, of how many.
    rank: u32,
    ranks: u32,
}

impl Place {
    /// From the grid's coordinates, so that nothing is divided before the length is asked for
    /// unless it must be.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(p: &DecodeParams) -> Self {
        Self::at(p, [block_idx_x(), block_idx_y(), block_idx_z()])
    }

    /// The place of a block.
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

    /// Whether the new rows are this rank's: the last one of the last split takes them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_new_tokens(&self, p: &DecodeParams) -> bool {
        let (ranks, index) = self.among();
        p.new_len > 0 && index + 1 == ranks
    }

    /// Whether it also appends them: once for all row tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn appends(&self, p: &DecodeParams) -> bool {
        self.has_new_tokens(p) && self.row_tile == 0
    }

    /// Ranks of all clusters that share the row tile's keys, and which of them this is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn among(&self) -> (u32, u32) {
        ((self.ranks * self.splits).max(1), self.split * self.ranks + self.rank)
    }

    /// Number of the partial results that a split of the same keys leaves.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn number(&self, split: u32) -> u32 {
        split * self.stride + self.index
    }
}

/// What a block needs to ask for queries, new rows and cache.
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
    /// Whether warps share tiles of keys: more rows than a warp's registers hold.
    const IN_TEAMS: bool = M > 2;
    /// The head size, or the largest.
    pub const HEAD_SIZE: u32 = D8 as u32 * 8;
    /// Whether heads may be smaller.
    pub const PADS: bool = H::PAD;
    /// Packed query rows of a cluster.
    pub const ROWS: u32 = (16 * (M - 1) + 8 * HALVES) as u32;
    /// Keys of a tile.
    pub const KEYS: u32 = N8 as u32 * 8;
    /// Threads of a block.
    pub const THREADS: u32 = WARPS * 32;
    /// Shared memory of a block.
    pub const SHARED_BYTES: u32 = {
        assert!(4 * Self::ROWS * Self::ACC_PITCH <= Self::RING_BYTES, "accumulators need a ring");
        Self::STATES + Self::TEAMS * Self::ROWS * size_of::<[f32; 2]>() as u32
    };

    /// Whether an SM has two such blocks.
    const IS_HALF: bool = WARPS < 8 && !Self::IN_TEAMS;
    /// Whether teams may ask for their first keys before they know how many there are: slower with
    /// more rows than 16, and with one stage in a block that is alone (`docs/perf-log.md`).
    const ASKS_AHEAD: bool = M == 1 && (STAGES > 1 || Self::IS_HALF);
    /// Whether the loop leaves no registers to remember in where the block is.
    const FORGETS: bool = Self::IS_TIGHT || D8 >= 32;
    /// Whether the mailbox, but for its barrier, takes the place of queries and new rows when all
    /// have read them: tiles of 64 rows and the mailbox for them leave little of 99 KB of shared
    /// memory.
    const SHARES_MAILBOX: bool = Self::IN_TEAMS && !P::IN_CHUNKS;
    const QUERIES: u32 = if Self::SHARES_MAILBOX { 128 } else { Self::MAILBOX_BYTES };
    const NEW_TILES: u32 = Self::QUERIES + Self::tile_bytes(Self::ROWS, D8);
    const STAGE_BYTES: u32 = 2 * Self::tile_bytes(Self::KEYS, UNITS);
    /// Columns in 16 bytes of a row of the cache.
    const PER_UNIT: u32 = Self::HEAD_SIZE / UNITS as u32;
    /// Whether the cache holds less than elements: quantized values of them.
    const IS_QUANTIZED: bool = UNITS < D8;
    /// New rows as they are given.
    const GIVEN: u32 =
        if Self::IS_QUANTIZED { Self::NEW_TILES + Self::STAGE_BYTES } else { Self::NEW_TILES };
    const GIVEN_BYTES: u32 = 2 * Self::tile_bytes(Self::KEYS, D8);
    const SCALES: u32 = Self::GIVEN + Self::GIVEN_BYTES;
    const RINGS: u32 = if Self::IS_QUANTIZED {
        Self::SCALES + ScaleStaging::bytes(Self::HEAD_SIZE, Self::KEYS)
    } else if Self::SHARES_MAILBOX && Self::MAILBOX_BYTES > Self::SCALES {
        Self::MAILBOX_BYTES
    } else {
        Self::SCALES
    };
    const RING_BYTES: u32 = STAGES * Self::STAGE_BYTES;
    const STATES: u32 = Self::RINGS + Self::TEAMS * Self::RING_BYTES;

    /// What preparing needs to know of a block.
    const BLOCK: Block = Block { rows: Self::ROWS, keys: Self::KEYS, threads: Self::THREADS };

    /// Bytes of a tile.
    const fn tile_bytes(rows: u32, units: usize) -> u32 {
        if P::IN_CHUNKS { chunked_bytes(rows, units) } else { swizzled_bytes(rows, units) }
    }

    /// The kernel, whatever the cache holds, and wherever its rows are.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step<C: Cached, L: Layout>(
        new_tokens: NewTokens<C>,
        seqlens: Seqlens,
        layout: L,
        output: Output<C::Element>,
        splits: Splits,
        schedule: Schedule,
        tree: Tree,
        p: DecodeParams,
    ) {
        let place = Place::new(&p);
        let layout = H::over(layout, &p.attention, Self::PER_UNIT);
        let prefetches = Self::ASKS_AHEAD && p.overlap == overlap::CACHE;
        if Self::overlaps::<L>(&p) {
            if Self::waits_for_overlapped(&p) {
                return;
            }
        } else if !prefetches {
            Self::wait_for_launch_before(place);
        }
        let place = if Self::divides::<L>(&p) {
            let Some(part) = Self::part_of(&p, layout, seqlens, schedule) else { return };
            part
        } else {
            place
        };
        // A part is kept already.
        if Self::keeps_place::<L>() && !Self::divides::<L>(&p) {
            Self::keep(place);
        }
        let asked = Self::ask_length(seqlens, place, p.attention.q_len);
        let a = &p.attention;
        let mut rows = Self::rows(a, place, layout);
        if L::MAY_BE_EMPTY && rows.count() == 0 {
            return;
        }
        let (channels, other) = if H::PAD { (a.head_size, 1.0) } else { (Self::HEAD_SIZE, 0.0) };
        // Few bytes, but whoever asks for them behind the cache's waits long.
        let ask = |rows: &Rows| {
            let scale =
                C::ask(new_tokens.coding, &p, place.kv_head, channels, other, Self::THREADS);
            (scale, Self::ask_word(a, rows, layout, tree))
        };
        let early = (!prefetches).then(|| ask(&rows));
        let mut cache = Cache::of(a, &rows, new_tokens.present_k, new_tokens.present_v, layout);
        if Self::ASKS_AHEAD {
            cache.lanes = Self::lanes::<C>();
        }
        let layout = cache.layout;
        let tiles = Tiles {
            queries: Self::queries(),
            operands: Self::queries(),
            keys: Self::tile(Self::GIVEN, Self::KEYS),
            values: Self::tile(Self::GIVEN + Self::GIVEN_BYTES / 2, Self::KEYS),
            cached_keys: Self::fresh_keys(),
            cached_values: Self::fresh_values(),
        };
        let staging = ScaleStaging::at(Self::SCALES, Self::HEAD_SIZE);
        let opening = Opening { p: &p, place, new_tokens: &new_tokens, tiles: &tiles, prefetches };
        let cache_first = Self::takes_cache_first::<L>(&p, place);
        let ahead = Self::ASKS_AHEAD && p.ahead != 0 && !cache_first;
        if ahead {
            Self::start_ahead(&p, place, &cache);
        }
        if !cache_first {
            Self::ask_queries::<_, H::Over<L>>(&opening, &rows);
        }
        rows.seqlen = layout.seqlen(a, &rows, Self::length(seqlens, asked, a.q_len));
        let share = Share::new::<H::Over<L>>(&p, &rows, place, Self::KEYS, tree);
        let (rotations, lacks_rows) = if cache_first {
            Self::ask_cache_first(&opening, &rows, &share, &cache)
        } else {
            Self::ask_new_rows_first(&opening, &rows, &share, &mut cache, ahead)
        };
        if place.ranks > 1 {
            Mailbox::<D8>::new(&rows, place).open();
        }
        let (scale, word) = early.unwrap_or_else(|| ask(&rows));
        wait_for_all_but(2 * STAGES);
        C::keep(scale, staging, Self::THREADS);
        Self::keep_word(tree, word);
        Self::sync_block();
        if p.rotary.dim > 0 || p.new_len > 0 {
            new_tokens.rotate(&rows, &tiles, rotations, Self::THREADS);
            Self::sync_block();
            if share.has_new_tokens {
                C::encode(new_tokens.coding, &tiles, staging, new_rows(&p, &rows), Self::BLOCK);
            }
            // Written out: through `append_early` the compiler orders what comes before it
            // otherwise, which costs a step over a paged KV cache 0.2 us.
            if !Self::IS_QUANTIZED && place.appends(&p) && !Self::appends_late(&p, &rows, place) {
                new_tokens.append(&p, &rows, &tiles, layout, staging, Self::BLOCK);
            }
        }
        if Self::IN_TEAMS {
            let (states, acc) = Self::attend_together(&p, &rows, &share, cache, tree, lacks_rows);
            Self::publish_together(states, &acc);
        } else {
            let unit = C::prepare(new_tokens.coding, &tiles, staging, Self::BLOCK);
            if Self::IS_QUANTIZED {
                Self::append_early(&p, &rows, place, &new_tokens, &tiles, layout, staging);
            }
            let of_rows = RowScales { coding: new_tokens.coding, staging };
            let (states, mut acc, value_unit) =
                Self::attend(&p, &rows, &share, cache, of_rows, unit, tree, lacks_rows);
            C::scale(new_tokens.coding, &mut acc, staging, value_unit);
            Self::publish::<C>(states, &acc);
        }
        sync_threads();

        let (place, rows) = Self::recompute(&p, place, rows, layout);
        let mailbox = Mailbox::<D8>::new(&rows, place);
        if place.ranks == 1 {
            Self::finish_alone::<H::Over<L>, _>(&p, &rows, place, output, splits);
        } else {
            Self::send(&rows, mailbox);
            if Self::appends_late(&p, &rows, place) {
                cluster_arrive();
                cluster_wait();
                if place.appends(&p) {
                    new_tokens.append(&p, &rows, &tiles, layout, staging, Self::BLOCK);
                }
            }
        }
        // Where there are threads enough each has one column, which is over sooner; more of them
        // have eight, of whose row they find the weights once.
        if mailbox.has_few_units(Self::THREADS) {
            Self::finish::<H::Over<L>, C::Element, 1>(&p, &rows, mailbox, output, splits);
        } else {
            Self::finish::<H::Over<L>, C::Element, 8>(&p, &rows, mailbox, output, splits);
        }
    }

    /// Asks for the queries, when the launch before this one has written them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ask_queries<C: Cached, L: Layout>(opening: &Opening<C, D8, UNITS>, rows: &Rows) {
        if opening.prefetches {
            Self::wait_for_launch_before(opening.place);
        }
        let (p, tiles) = (opening.p, opening.tiles);
        opening.new_tokens.copy_queries::<L, _, _>(p, rows, tiles, Self::ROWS, Self::THREADS);
    }

    /// Asks for the new keys and values, if they are this rank's, as a group of copies of its own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ask_new_rows<C: Cached, L: Layout>(
        opening: &Opening<C, D8, UNITS>,
        rows: &Rows,
        share: &Share,
    ) {
        if share.has_new_tokens {
            let (p, tiles) = (opening.p, opening.tiles);
            opening.new_tokens.copy_new::<L, _, _>(p, rows, tiles, Self::KEYS, Self::THREADS);
        }
        cp_async_commit();
    }

    /// The first tiles of the cache, then queries and new rows. Says besides whether a lane has
    /// found a row of theirs that is nowhere.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ask_cache_first<C: Cached, L: Layout>(
        opening: &Opening<C, D8, UNITS>,
        rows: &Rows,
        share: &Share,
        cache: &Cache<C, L, UNITS>,
    ) -> (Rotations<C::Element>, bool) {
        let lacks_rows = Self::start(share, cache, false)
            | Self::new_row_is_nowhere(opening.p, rows, share, cache.layout);
        let rotations =
            opening.new_tokens.rotations(opening.p, rows, opening.tiles, share.has_new_tokens);
        Self::ask_queries::<_, L>(opening, rows);
        Self::ask_new_rows::<_, L>(opening, rows, share);
        // Who counts copies under way expects those of the first tiles behind the new rows.
        (0..2 * STAGES).for_each(|_| cp_async_commit());
        (rotations, lacks_rows)
    }

    /// New rows, behind the queries, then the first tiles of the cache, but for keys that were
    /// asked for ahead. Says besides whether a lane has found a row of theirs that is nowhere.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ask_new_rows_first<C: Cached, L: Layout>(
        opening: &Opening<C, D8, UNITS>,
        rows: &Rows,
        share: &Share,
        cache: &mut Cache<C, L, UNITS>,
        ahead: bool,
    ) -> (Rotations<C::Element>, bool) {
        Self::ask_new_rows::<_, L>(opening, rows, share);
        let rotations =
            opening.new_tokens.rotations(opening.p, rows, opening.tiles, share.has_new_tokens);
        if !Self::ASKS_AHEAD {
            cache.lanes = Self::lanes::<C>();
        }
        let lacks_rows = Self::start(share, cache, ahead)
            | Self::new_row_is_nowhere(opening.p, rows, share, cache.layout);
        (rotations, lacks_rows)
    }

    /// Whether the block asks for its first tiles of the cache before the new rows: where its SM
    /// has another one, which reads while this one prepares the new rows. A block that is alone
    /// there is done sooner the other way round.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn takes_cache_first<L: Layout>(p: &DecodeParams, place: Place) -> bool {
        let is_later = if Self::divides::<L>(p) {
            parts::block(p) >= p.at_a_time
        } else {
            place.index * p.splits + place.split >= p.at_a_time
        };
        Self::IS_HALF && place.ranks == 1 && (p.overlap == overlap::CACHE || is_later)
    }

    /// Whether new rows are appended when all ranks have read: they may be among the keys that
    /// others have asked for ahead of their time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn appends_late(p: &DecodeParams, rows: &Rows, place: Place) -> bool {
        Self::ASKS_AHEAD
            && place.ranks > 1
            && p.new_len > 0
            && rows.seqlen.past < Self::keys_ahead(p, place)
    }

    /// Appends the new rows, if they are this block's, and none of their places in the cache is
    /// among the keys that others have asked for ahead of their time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_early<C: Cached, L: Layout>(
        p: &DecodeParams,
        rows: &Rows,
        place: Place,
        new_tokens: &NewTokens<C>,
        tiles: &Tiles<C, D8, UNITS>,
        layout: L,
        staging: ScaleStaging,
    ) {
        if place.appends(p) && !Self::appends_late(p, rows, place) {
            new_tokens.append(p, rows, tiles, layout, staging, Self::BLOCK);
        }
    }

    /// Asks for the index of the sequence's last token; one lane for all where first keys are sent
    /// for before it is there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ask_length(seqlens: Seqlens, place: Place, q_len: u32) -> Lengths {
        let asks = !Self::ASKS_AHEAD || lane() == 0;
        if asks { seqlens.load(place.batch, q_len) } else { Lengths::default() }
    }

    /// What was asked for. The lane that has it tells the others here and not before: what they
    /// compute of a load of their own the assembler moves up, and they would wait for it ahead of
    /// the keys that need no length.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn length(seqlens: Seqlens, asked: Lengths, q_len: u32) -> Lengths {
        if Self::ASKS_AHEAD { seqlens.of_lane_0(asked, q_len) } else { asked }
    }

    /// Waits for the launch before this one, and lets the next one take the places of blocks that
    /// end, one by one; not those of clusters.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait_for_launch_before(place: Place) {
        grid_dependency_wait();
        if place.ranks == 1 {
            launch_dependents();
        }
    }

    /// Whether the launch before this one and this one have nothing to do with each other.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn overlaps<L: Layout>(p: &DecodeParams) -> bool {
        L::MAY_OVERLAP && p.overlap == overlap::ALL
    }

    /// Of a launch that overlaps the one before it: lets the next one begin, and says whether the
    /// block is behind all that have work. The first of those waits, so that whoever comes next
    /// finds both launches ended; those with work would need registers for a wait in their end.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn waits_for_overlapped(p: &DecodeParams) -> bool {
        launch_dependents();
        // Opaque, or the product would take a register for all that follows.
        let is_behind = opaque(block_idx_z()) * p.attention.kv_heads >= p.clusters;
        if is_behind && block_idx_x() + block_idx_y() == 0 {
            grid_dependency_wait();
        }
        is_behind
    }

    /// The same, found out anew where the loop has made threads forget it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn recompute<L: Layout>(
        p: &DecodeParams,
        place: Place,
        rows: Rows,
        layout: L,
    ) -> (Place, Rows) {
        if !Self::FORGETS {
            return (place, rows);
        }
        let place = match Self::keeps_place::<L>() {
            true => Self::kept(),
            false => Place::at(p, [block_idx_x(), block_idx_y(), block_idx_z()].map(opaque)),
        };
        let mut anew = Self::rows(&p.attention, place, layout);
        anew.seqlen = rows.seqlen;
        (place, anew)
    }

    /// The rows of a block, whose sequence has no length yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows<L: Layout>(a: &AttentionParams, place: Place, layout: L) -> Rows {
        let all = Rows::of(a, place.row_tile, place.kv_head, place.batch, Self::ROWS);
        layout.rows(a, all)
    }

    /// The tile of queries.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement>() -> Swizzled<T, D8> {
        Self::tile(Self::QUERIES, Self::ROWS)
    }
}
