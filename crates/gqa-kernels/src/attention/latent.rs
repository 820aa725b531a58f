//! Attention to a latent KV cache (multi-head latent attention, DeepSeek-V2, 2024) for decode steps
//! on SM 90a: all query heads share one row per token, whose 576 channels are the key and whose
//! first 512 are the value.
//!
//! **One CTA** attends with 64 query rows of one sequence (tokens times query heads) to one split
//! of its keys. A tile of 32 cache rows is loaded once, by TMA, and read three times from shared
//! memory. Four warpgroups:
//! - The first loads tiles: one warp finds their blocks and copies them (`loads.rs`).
//! - The second computes scores, the online softmax and P (`scores.rs`).
//! - The other two add P times V, each for half of the columns: 64 rows by 512 columns of output
//!   are too many for the registers of one (`values.rs`). They load the queries, too.
//!
//! While these multiply a tile's P, the scores of the next one are computed, which keeps the tensor
//! cores busy. Thread `t` of each multiplying warpgroup holds the same rows of its operands as
//! thread `t` of the other ones, so P passes from thread to thread through shared memory as it lies
//! in registers, over the last 64 channels of its own tile: these belong to the key alone.
//!
//! **Grid**: (row tiles, splits, sequences); CTAs of one sequence's row tiles are neighbours and
//! read the same keys from L2.
//!
//! **Tensors**: q (tokens of all sequences, query head, 576) with any strides that are multiples of
//! 8; k through a tensor map (64 channels, row of a block, chunk of 64 channels, block); starts
//! (batch + 1) and past_seqlens (batch) as in [`Sequences`]; block_table (batch, blocks of a
//! sequence); out (token, query head, 512) with its strides, and lse (query head, token) or null,
//! where keys are not split; else partial_out (split, query head, token, 512) and partial_lse
//! (split, query head, token), which [`merge()`] merges.
//!
//! **Shared memory**: the queries, then the stages, each as chunks of 64 channels with 128-byte
//! rows and the 128-byte swizzle; what warpgroups pass to each other; barriers.
//!
//! **Barriers** (mbarriers, one of each for each stage): `FULL`, the bytes have arrived; `WEIGHED`,
//! P has been written, one arrival of each thread that wrote it; `EMPTY`, one arrival of each warp
//! that multiplies. Named barriers: `QUERIES` are in shared memory; `FACTORS` that normalise the
//! output are.
//!
//! **Gaps**: the block table may hold indices outside of the cache. TMA fills such rows with zeros,
//! and their keys are masked.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type.

mod loads;
mod merge;
mod scores;
mod values;

pub use merge::{MERGE_SHARED_BYTES, MERGE_THREADS, merge};

use super::split_kv::MAX_SPLITS;
use crate::concept::pages::Sequence;
use crate::num::{Element, MmaElement};
use crate::params::{AttentionParams, LatentParams};
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::ring::Ring;
use crate::tile::rows::{Row, Rows, row_tiles};
use core::ops::Range;

/// Channels of a key.
pub const KEY_SIZE: u32 = 576;
/// Channels of a value, the first of the key's.
pub const VALUE_SIZE: u32 = 512;
/// Query rows of a CTA.
pub const ROWS: u32 = 64;
/// Keys of a tile.
pub const KEYS: u32 = 32;
/// Threads of a CTA.
pub const THREADS: u32 = 4 * WARPGROUP;
/// Dynamic shared memory of a CTA, in bytes.
pub const SHARED_BYTES: u32 = BARRIERS + 3 * 8 * STAGES;
/// Fewest rows of a block, and of a TMA box.
pub const LEAST_BOX: u32 = 16;
/// Channels of a TMA box.
pub const CHUNK: u32 = 64;
/// Chunks of a key.
pub const CHUNKS: u32 = KEY_SIZE / CHUNK;

const WARPGROUP: u32 = 128;
/// Threads of the warpgroups that multiply.
const MULTIPLYING: u32 = 3 * WARPGROUP;
const STAGES: u32 = 4;
/// Bytes of a chunk of the queries.
const QUERY_CHUNK: u32 = ROWS * 128;
/// Bytes of a chunk of a stage.
const CHUNK_BYTES: u32 = KEYS * 128;
const STAGE_BYTES: u32 = CHUNKS * CHUNK_BYTES;
/// Chunks of a value.
const VALUE_CHUNKS: u32 = VALUE_SIZE / CHUNK;

/// Offset of the stages, after the queries.
const KV: u32 = CHUNKS * QUERY_CHUNK;
/// Offset of P in a stage.
const WEIGHTS: u32 = VALUE_CHUNKS * CHUNK_BYTES;
/// Offset of what each thread's rows are multiplied by: for each stage, and at last for the output.
const RESCALES: u32 = KV + STAGES * STAGE_BYTES;
const RESCALE_BYTES: u32 = WARPGROUP * 8;
/// Offset of the rows, as [`Row::keep`] stores them.
const ROW_PLACES: u32 = RESCALES + (STAGES + 1) * RESCALE_BYTES;
/// Offset of which halves of each stage's rows are outside of the cache: bits 0 and 1.
const GAPS: u32 = ROW_PLACES + ROWS * 16;
const BARRIERS: u32 = GAPS + 4 * STAGES;
const FULL: u32 = BARRIERS;
const WEIGHED: u32 = FULL + 8 * STAGES;
const EMPTY: u32 = WEIGHED + 8 * STAGES;

/// Named barrier: the queries are in shared memory.
const QUERIES: u32 = 1;
/// Named barrier: the factors of the output are in shared memory.
const FACTORS: u32 = 2;
/// Named barrier of the warpgroup that computes scores: its products with a tile are complete.
const SCORED: u32 = 5;
/// Named barriers of the warpgroups that multiply values, this one and the next: one has cleared
/// rows that no query row sees.
const CLEARED: u32 = 3;

const _: () = assert!(WEIGHTS + ROWS * KEYS * 2 <= STAGE_BYTES);
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
    const TILE: f64 = 1.17;
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
    if warpgroup == 0 {
        registers_lower::<40>();
        if warp() == 0 {
            loads::load(&work, k);
        }
    } else if warpgroup == 1 {
        registers_raise::<136>();
        scores::run(&work);
    } else {
        registers_raise::<168>();
        values::run(&work, warpgroup - 2);
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

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn barrier(&self, kind: u32, at: Ring) -> u32 {
        self.base + kind + at.barrier()
    }

    /// Address of a stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage(&self, at: Ring) -> u32 {
        self.base + KV + at.stage * STAGE_BYTES
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

    /// Releases the stage for this warp, whose lanes have all read it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release(&self, at: Ring) {
        sync_warp();
        if lane() == 0 {
            mbarrier_arrive(self.barrier(EMPTY, at));
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_split(&self) -> bool {
        self.p.attention.splits > 1
    }
}

/// Run by one thread.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn init_barriers(base: u32) {
    let mut stage = 0;
    while stage < STAGES {
        let base = base + 8 * stage;
        mbarrier_init(base + FULL, 1);
        mbarrier_init(base + WEIGHED, WARPGROUP);
        mbarrier_init(base + EMPTY, MULTIPLYING / 32);
        stage += 1;
    }
    fence_mbarrier_init();
}

/// The thread's rows in its warpgroup, `0` and `1` for halves: accumulators of a warpgroup have
/// rows in turns of 16 per warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row_of(half: u32) -> u32 {
    warp() % 4 * 16 + lane() / 4 + 8 * half
}

/// Where a thread of the warpgroup that computes scores leaves the factors of its rows for the same
/// threads of the others.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rescales(stage: u32) -> u32 {
    RESCALES + stage * RESCALE_BYTES + thread_idx() % WARPGROUP * 8
}
