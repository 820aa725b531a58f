//! Attention to a latent KV cache (multi-head latent attention, DeepSeek-V2, 2024) for decode steps
//! on SM 90a: all query heads share one row per token, whose 576 channels are the key and whose
//! first 512 are the value.
//!
//! **One CTA** attends with 64 query rows of one sequence (tokens times query heads) to one split
//! of its keys, in tiles of 64 cache rows. Each tile is loaded once, by TMA, into one of two
//! buffers. Three warpgroups:
//! - Two multiply (`halves.rs`), called half 0 and half 1. 64 rows by 512 columns of output are
//!   too many for the registers of one, so half `h` owns the columns of half `h` of the values. It
//!   computes the scores of every second tile: tile `j` of the split belongs to half `j % 2`, and
//!   lies in buffer `j % 2`.
//! - In the third, one warp finds the tiles' blocks and copies them (`loads.rs`).
//!
//! **The seesaw**: the owner of a tile turns its scores into P, multiplies P by its own columns of
//! the tile's values, and passes P to the other half, which multiplies it by the other columns.
//! What a half does for its tile `j`, with the tensor cores' time for it in cycles:
//!
//! ```text
//! 640   scores of j, from the rotated channels and from its own columns
//! 512   its columns += P of j - 1, which the other half has passed, times values of j - 1
//! 512   scores of j, from the other half's columns
//!   -   softmax; pass P of j and the row maxima
//! 512   its columns += P of j times values of j
//! ```
//!
//! The halves are half a turn apart: while one is at its softmax, the other one is at the first
//! line of its next tile, and each line needs only what was finished some time ago. The queries'
//! rotated channels, the left operand of the first scores, stay in registers.
//!
//! **Row maxima** form one chain: tile `j` takes the maximum that tile `j - 1` left, and raises it
//! only if a score exceeds it by much. P of tile `j` is relative to the maximum after tile `j`.
//! Both halves add all tiles to their output in order, so before a half adds tile `j`, it rescales
//! its output from the maximum after `j - 1` to the one after `j`, which is mostly the same. A
//! half's sums are of its own tiles; at the end both are relative to the last maximum.
//!
//! Thread `t` of one half holds the same rows of its operands as thread `t` of the other one, so P
//! passes from thread to thread through shared memory as it lies in registers. Its place is free
//! again when its owner has taken P of the next tile: the other half passes that later than it has
//! taken this one.
//!
//! **Grid**: (row tiles, splits, sequences); CTAs of one sequence's row tiles are neighbours and
//! read the same keys from L2.
//!
//! **Tensors**: q (tokens of all sequences, query head, 576) with any strides that are multiples of
//! 8; k through a tensor map (64 channels, row of a block, chunk of 64 channels, block), a box of
//! which is one chunk of a tile's rows, or of a smaller block's; starts (batch + 1) and
//! past_seqlens (batch) as in [`Sequences`]; block_table (batch, blocks of a sequence); out (token,
//! query head, 512) with its strides, and lse (query head, token) or null, where keys are not
//! split; else partial_out (split, query head, token, 512) and partial_lse (split, query head,
//! token), which [`merge()`] merges.
//!
//! **Shared memory**: the queries without their rotated channels, then the buffers, each as chunks
//! of 64 channels with 128-byte rows and the 128-byte swizzle; what the halves pass to each other;
//! barriers.
//!
//! **Barriers** (mbarriers):
//! - `FULL`, one for each chunk of each buffer: its bytes have arrived.
//! - `EMPTY`, one for each group of two chunks of each buffer; one arrival of each warp of the half
//!   that read it last.
//! - `PASSED`, one for each half: P and maxima have been written; one arrival of each thread.
//!
//! Groups are emptied and filled in the order in which the tile's owner multiplies them: the
//! rotated channels after the scores, the owner's columns after its product with the values, the
//! other columns after the other half's product. Named barriers: `QUERIES` are in shared memory;
//! `SUMS` are.
//!
//! **Gaps**: the block table may hold indices outside of the cache. TMA fills such rows with zeros,
//! and their keys are masked.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type.

mod halves;
mod loads;
mod merge;
mod output;
mod queries;
mod scores;
mod values;

pub use merge::{MERGE_SHARED_BYTES, MERGE_THREADS, merge};

use super::split_kv::MAX_SPLITS;
use crate::concept::pages::Sequence;
use crate::num::{Element, MmaElement};
use crate::params::{AttentionParams, LatentParams};
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::rows::{Row, Rows, row_tiles};
use core::ops::Range;

/// Channels of a key.
pub const KEY_SIZE: u32 = 576;
/// Channels of a value, the first of the key's.
pub const VALUE_SIZE: u32 = 512;
/// Query rows of a CTA.
pub const ROWS: u32 = 64;
/// Keys of a tile.
pub const KEYS: u32 = 64;
/// Threads of a CTA.
pub const THREADS: u32 = 3 * WARPGROUP;
/// Dynamic shared memory of a CTA, in bytes.
pub const SHARED_BYTES: u32 = PASSED + 8 * BUFFERS;
/// Fewest rows of a block, and of a TMA box.
pub const LEAST_BOX: u32 = 16;
/// Channels of a TMA box.
pub const CHUNK: u32 = 64;
/// Chunks of a key.
pub const CHUNKS: u32 = KEY_SIZE / CHUNK;

const WARPGROUP: u32 = 128;
/// Threads of the warpgroups that multiply.
const MULTIPLYING: u32 = 2 * WARPGROUP;
/// Buffers of tiles, one for the tiles of each half.
const BUFFERS: u32 = 2;
/// Bytes of a chunk of the queries.
const QUERY_CHUNK: u32 = ROWS * 128;
/// Bytes of a chunk of a buffer.
const CHUNK_BYTES: u32 = KEYS * 128;
/// Chunks of a value. The next one has the rotated channels, which belong to the key alone.
const VALUE_CHUNKS: u32 = VALUE_SIZE / CHUNK;
/// Columns of a half.
const COLUMNS: u32 = VALUE_SIZE / 2;
/// Its chunks.
const OWN_CHUNKS: u32 = VALUE_CHUNKS / 2;
/// Groups of chunks that are emptied together: pairs, and the rotated channels.
const GROUPS: u32 = VALUE_CHUNKS / 2 + 1;
/// Groups of a half's columns.
const OWN_GROUPS: u32 = OWN_CHUNKS / 2;
/// Group of the rotated channels.
const ROTATED: u32 = GROUPS - 1;
/// Steps of 16 keys of a product of P and values.
const DEPTHS: usize = KEYS as usize / 16;

/// Offset of the buffers, after the queries.
const KV: u32 = VALUE_CHUNKS * QUERY_CHUNK;
const BUFFER_BYTES: u32 = CHUNKS * CHUNK_BYTES;
/// Offset of P of the last tile of each half.
const WEIGHTS: u32 = KV + BUFFERS * BUFFER_BYTES;
const WEIGHT_BYTES: u32 = ROWS * KEYS * 2;
/// Offset of the rows, as [`Row::keep`] stores them.
const ROW_PLACES: u32 = WEIGHTS + BUFFERS * WEIGHT_BYTES;
/// Offset of the row maxima after that tile of each half.
const MAXIMA: u32 = ROW_PLACES + ROWS * 16;
/// Offset of the rows' sums of each half.
const ROW_SUMS: u32 = MAXIMA + BUFFERS * ROWS * 4;
/// Offset of which 16 rows of each buffer are outside of the cache: a bit each.
const GAPS: u32 = ROW_SUMS + BUFFERS * ROWS * 4;
const FULL: u32 = GAPS + 4 * BUFFERS;
const EMPTY: u32 = FULL + 8 * BUFFERS * CHUNKS;
const PASSED: u32 = EMPTY + 8 * BUFFERS * GROUPS;

/// Named barrier: the queries are in shared memory.
const QUERIES: u32 = 1;
/// Named barrier: the rows' sums are in shared memory.
const SUMS: u32 = 2;
/// Named barriers of half 0 and half 1: it has cleared rows that no query row sees.
const CLEARED: u32 = 3;

const _: () = assert!(SHARED_BYTES <= 227 << 10);

/// Elements of partial_out and of partial_lse.
pub fn partial_elements(p: &LatentParams) -> (usize, usize) {
    let AttentionParams { splits, q_heads, .. } = p.attention;
    let rows = splits as usize * q_heads as usize * p.tokens as usize;
    (rows * VALUE_SIZE as usize, rows)
}

/// Number of splits with the least estimated time on `multiprocessors` SMs, if all sequences have
/// `keys` keys.
pub fn splits(p: &LatentParams, keys: u32, multiprocessors: u32) -> u32 {
    /// Microseconds of a tile where all SMs load, of a CTA besides, and to start the merge.
    const TILE: f64 = 2.2;
    const START: f64 = 4.0;
    const MERGE: f64 = 3.0;
    /// Bytes that are written and read back in a microsecond.
    const MERGED_BYTES: f64 = 1.5e6;
    let [row_tiles, _, batch] = grid(p);
    let tiles = keys.div_ceil(KEYS).max(1);
    let time = |splits: u32| {
        let blocks = u64::from(row_tiles) * u64::from(batch) * u64::from(splits);
        let waves = blocks.div_ceil(u64::from(multiprocessors.max(1)));
        let attention = waves as f64 * (START + f64::from(tiles.div_ceil(splits)) * TILE);
        let rows = f64::from(splits) * f64::from(p.attention.q_heads) * f64::from(p.tokens);
        let merge = MERGE + rows * f64::from(VALUE_SIZE) * 4.0 / MERGED_BYTES;
        if splits > 1 { attention + merge } else { attention }
    };
    (1..=tiles.min(MAX_SPLITS)).min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// Grid of the merge.
pub fn merge_grid(p: &LatentParams) -> [u32; 3] {
    [p.attention.q_heads * p.tokens, VALUE_SIZE / merge::COLUMNS, 1]
}

/// Grid of a call.
pub fn grid(p: &LatentParams) -> [u32; 3] {
    let attention = &p.attention;
    [row_tiles(attention, ROWS), attention.splits, attention.batch]
}

/// The pointers that the warpgroups share.
#[derive(Clone, Copy)]
struct Pointers<T> {
    q: Global<T>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
}

/// What a CTA computes.
struct Work<'a, T> {
    base: u32,
    p: &'a LatentParams,
    to: Pointers<T>,
    sequence: Sequence,
    rows: Rows,
    split: u32,
    /// Its key tiles.
    tiles: Range<u32>,
    /// Keys that some row sees.
    end: u32,
}

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn latent<T: MmaElement>(
    k: TensorMap,
    q: Global<T>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: LatentParams,
) {
    if thread_idx() == 0 {
        prefetch_tensor_map(k);
        init_barriers(shared_base());
    }
    grid_dependency_wait();
    launch_dependents();
    let to = Pointers { q, block_table, out, lse, partial_out, partial_lse };
    let work = Work::new(&p, to, starts, past_seqlens);
    work.keep_rows();
    sync_threads();
    // Broadcast, so that the compiler knows that it is warp-uniform.
    let warpgroup = shfl_idx_u32(thread_idx() / WARPGROUP, 0);
    if warpgroup < 2 {
        registers_raise::<240>();
        halves::run(&work, warpgroup);
    } else {
        registers_lower::<24>();
        if warp() == 2 * WARPGROUP / 32 {
            loads::load(&work, k);
        }
    }
}

impl<'a, T: Element> Work<'a, T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(
        p: &'a LatentParams,
        to: Pointers<T>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
    ) -> Self {
        let (row_tile, split, batch) = (block_idx_x(), block_idx_y(), block_idx_z());
        let counts_new = p.counts_new != 0;
        let sequences = Sequences { starts, past_seqlens, tokens: p.tokens, least: 0, counts_new };
        let sequence = sequences.get(batch, &p.attention);
        let rows = Rows::of(&p.attention, row_tile, 0, batch, ROWS)
            .of_sequence(sequence.start, sequence.seqlen());
        let span = rows.span_of_tokens().below(if sequence.new == 0 { 0 } else { u32::MAX });
        let (tiles, end) = (span.share(KEYS, split, p.attention.splits), span.some.end);
        Self { base: shared_base(), p, to, sequence, rows, split, tiles, end }
    }

    /// Stores what each row is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keep_rows(&self) {
        let r = thread_idx();
        if r < ROWS {
            self.rows.row(r).keep(self.row_place(r));
        }
    }

    /// The tile's row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(&self, r: u32) -> Row {
        Row::kept(self.row_place(r))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_place(&self, r: u32) -> Shared<u32> {
        Shared::at(ROW_PLACES).offset(4 * r)
    }

    /// Address of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn buffer(&self, buffer: u32) -> u32 {
        self.base + KV + buffer * BUFFER_BYTES
    }

    /// Barrier of a chunk of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn full(&self, buffer: u32, chunk: u32) -> u32 {
        self.base + FULL + 8 * (buffer * CHUNKS + chunk)
    }

    /// Barrier of a group of chunks of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn empty(&self, buffer: u32, group: u32) -> u32 {
        self.base + EMPTY + 8 * (buffer * GROUPS + group)
    }

    /// Barrier of what a half passes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn passed(&self, half: u32) -> u32 {
        self.base + PASSED + 8 * half
    }

    /// Whether row `r` of the tile is a token of the sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_token(&self, r: u32, row: Row) -> bool {
        r < self.rows.count() && row.s < self.sequence.new
    }

    /// Index of a token's row in (split, query head, token).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn index(&self, row: Row) -> usize {
        let heads = self.split * self.p.attention.q_heads + row.head;
        heads as usize * self.p.tokens as usize + (self.rows.start + row.s) as usize
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_split(&self) -> bool {
        self.p.attention.splits > 1
    }
}

/// Run by one thread.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn init_barriers(base: u32) {
    for i in 0..BUFFERS * CHUNKS {
        mbarrier_init(base + FULL + 8 * i, 1);
    }
    for i in 0..BUFFERS * GROUPS {
        mbarrier_init(base + EMPTY + 8 * i, WARPGROUP / 32);
    }
    for half in 0..BUFFERS {
        mbarrier_init(base + PASSED + 8 * half, WARPGROUP);
    }
    fence_mbarrier_init();
}

/// The thread's rows in its warpgroup, `0` and `1` for halves: accumulators of a warpgroup have
/// rows in turns of 16 per warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row_of(half: u32) -> u32 {
    warp() % 4 * 16 + lane() / 4 + 8 * half
}
