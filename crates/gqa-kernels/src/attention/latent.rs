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
//! read the same keys from L2. [`combine`](super::combine) merges splits.
//!
//! **Tensors**: q (tokens of all sequences, query head, 576) with any strides that are multiples of
//! 8; k through a tensor map (64 channels, row of a block, chunk of 64 channels, block); starts
//! (batch + 1) and past_seqlens (batch) as in [`Sequences`]; block_table (batch, blocks of a
//! sequence); out (token, query head, 512) and lse (batch, query head, S) where keys are not split,
//! else partial_out (split, batch, query head, S, 512) and partial_lse (split, batch, query head,
//! S).
//!
//! **Shared memory**: the queries, then the stages, each as chunks of 64 channels with 128-byte
//! rows and the 128-byte swizzle; what warpgroups pass to each other; barriers.
//!
//! **Barriers** (mbarriers, one of each for each stage): `FULL`, the bytes have arrived; `WEIGHED`,
//! P has been written, one arrival of each thread that wrote it; `EMPTY`, one arrival of each warp
//! that multiplies values. Named barriers: [`QUERIES`] are in shared memory; [`FACTORS`] that
//! normalise the output are.
//!
//! **Gaps**: the block table may hold indices outside of the cache. TMA fills such rows with zeros,
//! and their keys are masked.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type.

mod loads;
mod scores;
mod values;

use crate::concept::pages::Sequence;
use crate::num::{Element, MmaElement};
use crate::params::LatentParams;
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
/// Named barriers of each warpgroup that multiplies values: it has cleared rows without a token.
const CLEARED: [u32; 2] = [3, 4];

const _: () = assert!(WEIGHTS + ROWS * KEYS * 2 <= STAGE_BYTES);
const _: () = assert!(SHARED_BYTES <= 227 << 10);

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
    let to = Pointers { q, block_table, out, lse, partial_out, partial_lse };
    let work = Work::new(&p, to, starts, past_seqlens);
    if thread_idx() == 0 {
        prefetch_tensor_map(k);
        work.init_barriers();
    }
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
        let rows = Rows::of(&p.attention, row_tile, 0, batch, ROWS);
        let rows = Rows { start: sequence.start, seqlen: sequence.seqlen(), ..rows };
        let span = rows.span_of_tokens();
        let end = if sequence.new == 0 { 0 } else { span.some.end };
        let keys = crate::tile::rows::Span { some: crate::concept::mask::Visible { first: 0, end }, ..span };
        let tiles = keys.share(KEYS, split, p.attention.splits);
        Self { base: shared_base(), p, to, sequence, rows, split, tiles, end }
    }

    /// Run by one thread.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn init_barriers(&self) {
        let mut ring = Ring::START;
        while ring.parity == 0 {
            mbarrier_init(self.barrier(FULL, ring), 1);
            mbarrier_init(self.barrier(WEIGHED, ring), WARPGROUP);
            mbarrier_init(self.barrier(EMPTY, ring), 2 * WARPGROUP / 32);
            ring = ring.next(STAGES);
        }
        fence_mbarrier_init();
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

    /// Whether row `r` of the tile is one of the call's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn exists(&self, r: u32) -> bool {
        r < self.rows.count()
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

    /// Index of a row in (split, batch, query head, S), or of a call without splits in (batch,
    /// query head, S).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn index(&self, row: Row) -> usize {
        let p = &self.p.attention;
        let of_split = (self.split * p.batch * p.q_heads * p.q_len) as usize;
        of_split + self.rows.index(p, row)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_split(&self) -> bool {
        self.p.attention.splits > 1
    }
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

/// wgmma descriptor of an operand with the 128-byte swizzle: 8-row groups 1024 bytes apart, chunks
/// of 64 columns `chunk_bytes` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn descriptor(address: u32, chunk_bytes: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    const GROUP: u64 = (1024 >> 4) << 32;
    SWIZZLE_128 | GROUP | u64::from(chunk_bytes >> 4) << 16 | u64::from(address >> 4 & 0x3fff)
}
