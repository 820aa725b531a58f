//! Attention whose output is too wide for the registers of a warpgroup, on SM 90a, in two shapes
//! (`shape.rs`):
//! - [`latent()`], [`latent_divided()`] and [`latent_float8()`], decode over a latent KV cache
//!   (multi-head latent attention, DeepSeek-V2, 2024): all query heads share one row per token,
//!   whose 576 channels are the key and whose first 512 are the value.
//! - [`wide()`], heads of 512 over contiguous and paged KV caches, for any number of query rows.
//!   Keys and values are apart.
//!
//! **One CTA** attends with 64 packed query rows of one sequence and KV head (tokens times query
//! heads) to one split of its keys, in tiles of 64 cache rows, which TMA loads. Three warpgroups:
//! - Two multiply (`halves.rs`), called half 0 and half 1. 64 rows by 512 columns of output are
//!   too many for the registers of one, so half `h` owns the columns of half `h` of the values. It
//!   computes the scores of every second tile: tile `j` of the split belongs to half `j % 2`.
//! - In the third, one warp finds the tiles' blocks and copies them (`loads.rs`); where values are
//!   apart, another one copies these.
//!
//! **Two buffers**: of a latent cache tile `j` lies in buffer `j % 2`, and is loaded once for both
//! products. Where values are apart, all keys pass through buffer 0 and all values through buffer
//! 1; queries and buffers take 192 KB. Tiles of 32 keys would leave room for two buffers each, but
//! the operands of their scores would take 1.5 times as long to read from shared memory as the
//! products take.
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
//! Where values are apart, keys have no rotated channels, and all scores begin with the first 256
//! channels. Each chunk is free once it is multiplied, about 1500 cycles before the product that
//! reads the next tile's chunk in its place: time enough for a copy.
//!
//! The halves are half a period apart: while one computes its softmax, the other is at the first
//! line of its next tile. Each line needs only results that were finished well before. The left
//! operand of the first scores stays in registers: the queries' rotated channels, or where there
//! are none their first 64, which shared memory then need not deliver.
//!
//! **Row maxima** form one chain: tile `j` takes the maximum that tile `j - 1` left, and raises it
//! only if a score exceeds it by much. P of tile `j` is relative to the maximum after tile `j`.
//! Both halves add all tiles to their output in order, so before a half adds tile `j`, it rescales
//! its output from the maximum after `j - 1` to the one after `j`, which is mostly the same. Each
//! half sums P of its own tiles only; at the end both sums are relative to the last maximum.
//!
//! Thread `t` of one half holds the same rows of its operands as thread `t` of the other one, so P
//! passes from thread to thread through shared memory as it lies in registers. That memory is free
//! again once its owner has taken P of the next tile: the other half passes that P only after it
//! has taken this one.
//!
//! **Grid**: (row tiles of all KV heads, splits, sequences); CTAs of one sequence's row tiles are
//! neighbours and read the same keys from L2.
//!
//! **Keys divided by lengths** ([`latent_divided()`], `division.rs`): as many CTAs as SMs, each
//! with an equal range of the key tiles of all sequences, piece after piece. Tiles are numbered
//! through all pieces, so buffers, owners and phases go on as in one piece, and copies run ahead
//! into the next piece while a half closes the last one. The halves load the queries of the next
//! piece once both have passed `SUMS`: then all scores of the last one are complete.
//! **Grid**: (row tiles, CTAs). A piece that is not a whole sequence goes to partial_out and
//! partial_lse as `merge_parts.rs` describes them, and [`merge_parts()`] merges it.
//!
//! **Clusters**: where a KV head has several row tiles, `wide` runs in clusters of two CTAs, which
//! have neighbouring row tiles and take the key tiles of both. Of each group of two chunks a CTA
//! copies one to both (multicast), so that L2 is read once for 128 rows: 64 rows alone would need
//! 128 KB of it in the 2048 cycles of a tile's products, twice what it delivers to all SMs.
//!
//! **Tensors**: q (entry, query head, row, channel) with any strides that are multiples of 8; over
//! blocks the tokens of all sequences are the rows of one entry. k and v through tensor maps
//! (channels of a head, row of a block, KV head, block), a box of which is 64 channels of a tile's
//! rows, or of a smaller block's. Over blocks, starts (batch + 1) and past_seqlens (batch) as in
//! [`Sequences`], and block_table (batch, blocks of a sequence). Of a contiguous cache a batch
//! entry is a block; starts is null, and past_seqlens and query_seqlens are the lengths of
//! [`Seqlens`]. out (entry, query head, row, 512) with its strides, and lse (entry, query head,
//! row) or null, where keys are not split; else partial_out (split, entry, query head, row, 512)
//! and partial_lse (split, entry, query head, row), which [`merge()`] merges.
//!
//! **Shared memory**: the queries without their rotated channels, then the buffers, each as chunks
//! of 64 channels with 128-byte rows and the 128-byte swizzle; what the halves pass to each other;
//! counts for which `wide` has no registers; barriers.
//!
//! **Barriers** (mbarriers):
//! - `FULL`, one for each chunk of the keys of each half, and of values apart: its bytes have
//!   arrived. Each half has its own set, because a half that skipped phases could not tell from the
//!   parity which phase has completed.
//! - `EMPTY`, one for each group of two chunks of each buffer; one arrival of each warp of the half
//!   that read it last, in each CTA of the cluster.
//! - `PASSED`, one for each half: P and maxima have been written; one arrival of each thread.
//! - `CODES` over float8, one for each group of each buffer: its bytes have arrived. `FULL` then
//!   has one arrival of each warp that converts.
//!
//! Groups are emptied and filled in the order in which they are multiplied. Of a latent cache: the
//! rotated channels after the scores, the owner's columns after its product with the values, the
//! other columns after the other half's product. Named barriers: `QUERIES` are in shared memory;
//! `SUMS` are.
//!
//! **Over float8** ([`latent_float8()`]) three more warps convert each group's float8 values to
//! float16 before they are multiplied (`convert.rs`). Queries become float16, each row divided by a
//! power of two (`queries.rs`). That power and the cache's scale multiply the scores; the scale
//! multiplies the output.
//!
//! **Gaps**: the block table may hold indices outside of the cache. TMA fills such rows with zeros,
//! and their keys are masked.
//!
//! **Numerics**: f32 accumulation; P = `exp2(score · scale · log2 e - m)` with a lagged row maximum
//! m, rounded to the element type.

mod convert;
#[cfg(not(target_arch = "nvptx64"))]
mod cost;
mod division;
mod halves;
mod loads;
mod merge;
mod merge_parts;
mod output;
mod queries;
mod scores;
mod shape;
mod values;

#[cfg(not(target_arch = "nvptx64"))]
pub use cost::{Lengths, Time};
pub use division::{BEGINNING, MOST_SEQUENCES};
pub use merge::{MERGE_SHARED_BYTES, MERGE_THREADS, merge};
pub use merge_parts::{MERGE_PARTS_THREADS, merge_parts, merge_parts_grid};
pub use shape::{Latent, LatentDivided, LatentFloat8, Shape, Wide};

use crate::concept::mask::Visible;
use crate::concept::pages::Sequence;
use crate::concept::seqlen::Seqlen;
use crate::num::{Element, MmaElement};
use crate::params::{AttentionParams, LatentParams};
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::rows::{Row, Rows, row_tiles};
use crate::tile::seqlens::Seqlens;
use core::marker::PhantomData;
use core::ops::Range;
use division::Start;

/// Channels of a value.
pub const VALUE_SIZE: u32 = 512;
/// Query rows of a CTA.
pub const ROWS: u32 = 64;
/// Keys of a tile.
pub const KEYS: u32 = 64;
/// Threads of a CTA.
pub const THREADS: u32 = 3 * WARPGROUP;
/// CTAs of a cluster of `wide` at most: neighbouring row tiles of a KV head, which see about the
/// same keys.
pub const MAX_CLUSTER: u32 = 2;
/// Fewest rows of a block, and of a TMA box.
pub const LEAST_BOX: u32 = 16;
/// Channels of a TMA box.
pub const CHUNK: u32 = 64;
/// [`log_block_size`](LatentParams::log_block_size) of a contiguous cache, whose blocks are batch
/// entries.
pub const CONTIGUOUS: u32 = 31;

const WARPGROUP: u32 = 128;
/// Threads of the warpgroups that multiply.
const MULTIPLYING: u32 = 2 * WARPGROUP;
/// Buffers of tiles.
const BUFFERS: u32 = 2;
/// Bytes of a chunk of the queries.
const QUERY_CHUNK: u32 = ROWS * 128;
/// Bytes of a chunk of a buffer.
const CHUNK_BYTES: u32 = KEYS * 128;
/// Chunks of a value. In a latent cache the next one has the rotated channels, which belong to the
/// key alone.
const VALUE_CHUNKS: u32 = VALUE_SIZE / CHUNK;
/// Columns of a half.
const COLUMNS: u32 = VALUE_SIZE / 2;
/// Its chunks.
const OWN_CHUNKS: u32 = VALUE_CHUNKS / 2;
/// Its groups of chunks.
const OWN_GROUPS: u32 = OWN_CHUNKS / 2;
/// Group of the rotated channels.
const ROTATED: u32 = VALUE_CHUNKS / 2;
/// Steps of 16 keys of a product of P and values.
const DEPTHS: usize = KEYS as usize / 16;
/// Bytes of P of a tile.
const WEIGHT_BYTES: u32 = ROWS * KEYS * 2;

/// Named barrier: the queries are in shared memory.
const QUERIES: u32 = 1;
/// Named barrier: the rows' sums are in shared memory.
const SUMS: u32 = 2;
/// Named barriers of half 0 and half 1: it has cleared rows that no query row sees.
const CLEARED: u32 = 3;
/// The set of the barriers `FULL` of values that are apart.
const VALUES: u32 = 2;

/// Rows of partial_out of a split.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn partial_rows(p: &LatentParams) -> usize {
    p.entries as usize * p.attention.q_heads as usize * p.tokens as usize
}

/// Elements of partial_out and of partial_lse.
pub fn partial_elements(p: &LatentParams) -> (usize, usize) {
    if p.ctas > 0 {
        return merge_parts::elements(p);
    }
    let rows = p.attention.splits as usize * partial_rows(p);
    (rows * VALUE_SIZE as usize, rows)
}

/// Words of range_starts where keys are divided among CTAs.
pub fn start_words(p: &LatentParams) -> usize {
    (p.ctas + 1) as usize * division::START_WORDS as usize
}

/// Grid of the merge.
pub fn merge_grid(p: &LatentParams) -> [u32; 3] {
    [p.entries * p.attention.q_heads * p.tokens, merge::parts(p.attention.splits), 1]
}

/// Grid of a call in clusters of that size.
pub fn grid(p: &LatentParams, cluster: u32) -> [u32; 3] {
    let attention = &p.attention;
    let tiles = row_tiles(attention, ROWS).next_multiple_of(cluster);
    match p.ctas {
        0 => [tiles * attention.kv_heads, attention.splits, attention.batch],
        ctas => [tiles, ctas, 1],
    }
}

/// Whether a call of `wide` has several row tiles for each KV head, so that clusters of
/// [`MAX_CLUSTER`] pay.
pub fn has_neighbours(p: &LatentParams) -> bool {
    row_tiles(&p.attention, ROWS) > 1
}

/// The pointers that the warpgroups share.
#[derive(Clone, Copy)]
struct Pointers<T> {
    q: Global<T>,
    /// The scale of a float8 cache.
    scale: Global<f32>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    /// Where the ranges of CTAs begin, if they divide the keys of all sequences.
    range_starts: Global<u32>,
}

/// The tensors of sequence lengths; `starts` is null with a contiguous cache.
#[derive(Clone, Copy)]
pub(super) struct LengthTensors {
    pub starts: Global<i32>,
    pub past_seqlens: Global<i32>,
    pub query_seqlens: Global<i32>,
}

/// What a CTA computes.
struct Work<'a, S, T> {
    shape: PhantomData<S>,
    base: u32,
    /// CTAs of the cluster, and this one's rank.
    cluster: u32,
    rank: u32,
    p: &'a LatentParams,
    to: Pointers<T>,
    lengths: LengthTensors,
    rows: Rows,
    /// Rows of the sequence in query and output.
    exist: u32,
    /// The split; or where CTAs divide all keys the place of the results in scratch memory
    /// (`merge_parts.rs`), or [`WHOLE`].
    place: u32,
    /// The cluster's key tiles.
    tiles: Range<u32>,
    /// Keys that some row of the cluster sees.
    end: u32,
}

/// Stands for the output itself: a CTA has all keys of the sequence.
const WHOLE: u32 = u32::MAX;

/// The kernel for a latent cache.
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
    let (scale, range_starts) = (Global::null(), Global::null());
    let to = Pointers { q, scale, block_table, out, lse, partial_out, partial_lse, range_starts };
    let lengths = LengthTensors { starts, past_seqlens, query_seqlens: Global::null() };
    run::<Latent, T>([k, k], lengths, to, &p);
}

/// The kernel for a latent cache whose CTAs divide the keys of all sequences.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn latent_divided<T: MmaElement>(
    k: TensorMap,
    q: Global<T>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    range_starts: Global<u32>,
    p: LatentParams,
) {
    let scale = Global::null();
    let to = Pointers { q, scale, block_table, out, lse, partial_out, partial_lse, range_starts };
    let lengths = LengthTensors { starts, past_seqlens, query_seqlens: Global::null() };
    run::<LatentDivided, T>([k, k], lengths, to, &p);
}

/// The kernel for a latent cache of float8e4m3fn with one scale, `k_scale`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn latent_float8<T: MmaElement>(
    k: TensorMap,
    q: Global<T>,
    k_scale: Global<f32>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: LatentParams,
) {
    let range_starts = Global::null();
    let to = Pointers {
        q,
        scale: k_scale,
        block_table,
        out,
        lse,
        partial_out,
        partial_lse,
        range_starts,
    };
    let lengths = LengthTensors { starts, past_seqlens, query_seqlens: Global::null() };
    run::<LatentFloat8, T>([k, k], lengths, to, &p);
}

/// The kernel for heads of 512.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn wide<T: MmaElement>(
    k: TensorMap,
    v: TensorMap,
    q: Global<T>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    query_seqlens: Global<i32>,
    block_table: Global<i32>,
    out: Global<T>,
    lse: Global<f32>,
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
    p: LatentParams,
) {
    let scale = Global::null();
    let range_starts = Global::null();
    let to = Pointers { q, scale, block_table, out, lse, partial_out, partial_lse, range_starts };
    run::<Wide, T>([k, v], LengthTensors { starts, past_seqlens, query_seqlens }, to, &p);
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn run<S: Shape, T: MmaElement>(
    maps: [TensorMap; 2],
    lengths: LengthTensors,
    to: Pointers<T>,
    p: &LatentParams,
) {
    if thread_idx() == 0 {
        prefetch_tensor_map(maps[0]);
        if S::APART {
            prefetch_tensor_map(maps[1]);
        }
        let cluster = if S::APART { cluster_size() } else { 1 };
        init_barriers::<S>(shared_base(), cluster);
    }
    grid_dependency_wait();
    launch_dependents();
    let Some(mut work) = Work::<S, T>::new(p, to, lengths) else { return };
    work.keep_rows();
    if S::APART {
        sync_cluster();
    } else {
        sync_threads();
    }
    // Broadcast, so that the compiler knows that it is warp-uniform.
    let warpgroup = shfl_idx_u32(thread_idx() / WARPGROUP, 0);
    if warpgroup < 2 {
        // Warps that load keys and values apart, or convert, or go on to other sequences, spill
        // with 24.
        if S::APART || S::CONVERTS || S::DIVIDES {
            registers_raise::<232>();
        } else {
            registers_raise::<240>();
        }
        halves::run(&mut work, warpgroup);
    } else {
        if S::APART || S::CONVERTS || S::DIVIDES {
            registers_lower::<40>();
        } else {
            registers_lower::<24>();
        }
        loads::run(&mut work, maps);
    }
    if S::APART {
        // A peer may still copy to this CTA, or arrive at its barriers.
        sync_cluster();
    }
}

impl LengthTensors {
    /// The sequence of a batch entry, and its rows in query and output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sequence(
        self,
        may_be_contiguous: bool,
        batch: u32,
        p: &LatentParams,
    ) -> (Sequence, u32) {
        let Self { starts, past_seqlens, query_seqlens } = self;
        if may_be_contiguous && starts.is_null() {
            let seqlens = Seqlens::new(past_seqlens, query_seqlens);
            let Seqlen { total, past } = seqlens.get(batch, &p.attention);
            let sequence = Sequence { start: 0, new: total.wrapping_sub(past), past };
            return (sequence, p.attention.q_len);
        }
        let counts_new = p.counts_new != 0;
        let sequences =
            Sequences { starts, past_seqlens, tokens: p.tokens, least: 0, counts_new, apart: None };
        let sequence = sequences.get(batch, &p.attention);
        (sequence, sequence.new)
    }
}

impl<'a, S: Shape, T: Element> Work<'a, S, T> {
    /// The CTA's work, or the first piece of its range; `None` if that is empty. All threads take
    /// part; a barrier must follow.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(p: &'a LatentParams, to: Pointers<T>, lengths: LengthTensors) -> Option<Self> {
        if S::DIVIDES {
            return Self::first_of_range(p, to, lengths);
        }
        let (split, batch) = (block_idx_y(), block_idx_z());
        let [cluster, rank] = if S::APART { [cluster_size(), cluster_rank()] } else { [1, 0] };
        let (nth, kv_head) = Self::place(p, cluster);
        let (sequence, exist) = lengths.sequence(S::APART, batch, p);
        let tile = |index, rows| {
            Rows::of(&p.attention, index, kv_head, batch, rows)
                .of_sequence(sequence.start, sequence.seqlen())
        };
        let together = tile(nth, cluster * ROWS);
        let has_tokens = together.query(0).0 < sequence.new;
        let span = together.span_of_tokens().below(if has_tokens { u32::MAX } else { 0 });
        Some(Self {
            shape: PhantomData,
            base: shared_base(),
            cluster,
            rank,
            p,
            to,
            lengths,
            rows: tile(nth * cluster + rank, ROWS),
            exist,
            place: split,
            tiles: span.share(KEYS, split, p.attention.splits),
            end: span.some.end,
        })
    }

    /// The first piece of the range of a CTA where these divide the keys of all sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_of_range(
        p: &'a LatentParams,
        to: Pointers<T>,
        lengths: LengthTensors,
    ) -> Option<Self> {
        let [begin, end] = division::range::<S>(lengths, p);
        if thread_idx() == 0 {
            Self::range_end().store_vec(0, [end.batch, end.tile, 0, 0]);
        }
        let mut work = Self {
            shape: PhantomData,
            base: shared_base(),
            cluster: 1,
            rank: 0,
            p,
            to,
            lengths,
            rows: Rows::of(&p.attention, block_idx_x(), 0, begin.batch, ROWS),
            exist: 0,
            place: WHOLE,
            tiles: 0..0,
            end: 0,
        };
        if begin.batch < p.attention.batch {
            work.turn_to(begin, end);
        }
        if block_idx_x() == 0 && thread_idx() == 0 {
            let (cta, rows) = (block_idx_y(), &work.rows);
            let leave = |cta, words| {
                to.range_starts.store_vec((division::START_WORDS * cta) as usize, words);
            };
            leave(cta, [begin.batch, begin.tile, rows.start, work.exist]);
            if cta + 1 == p.ctas {
                leave(p.ctas, [end.batch, end.tile, 0, 0]);
            }
        }
        begin.is_before(end).then_some(work)
    }

    /// Turns to the piece that begins at `begin`, in a range that ends at `end`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn turn_to(&mut self, begin: Start, end: Start) {
        let Start { batch, tile } = begin;
        // opaque(): otherwise what does not depend on the sequence, comparisons of parameters among
        // it, stays live across all pieces and spills.
        let (counts_new, causal) = (opaque(self.p.counts_new), opaque(self.p.attention.causal));
        let attention = AttentionParams { causal, ..self.p.attention };
        let p = LatentParams { counts_new, attention, ..*self.p };
        let (sequence, exist) = self.lengths.sequence(false, batch, &p);
        let all = division::tiles_of(sequence);
        let to = if batch == end.batch { end.tile.min(all) } else { all };
        self.rows = Rows::of(&p.attention, opaque(block_idx_x()), 0, batch, ROWS)
            .of_sequence(sequence.start, sequence.seqlen());
        self.exist = exist;
        // The last row tiles of a sequence with fewer tokens than others have no rows.
        let has_tokens = self.rows.query(0).0 < sequence.new;
        self.tiles = tile..if has_tokens { to } else { tile };
        self.end = sequence.seqlen().total;
        self.place = match (tile > 0, to < all) {
            (false, false) => WHOLE,
            (begun, _) => merge_parts::place(block_idx_x(), block_idx_y(), begun, self.p),
        };
    }

    /// Turns to the next piece of the CTA's range, if there is one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn turn_to_next(&mut self) -> bool {
        let [batch, tile, ..] = Self::range_end().load_vec(0);
        let (end, next) = (Start { batch, tile }, Start { batch: self.rows.batch + 1, tile: 0 });
        let exists = next.is_before(end);
        if exists {
            self.turn_to(next, end);
        }
        exists
    }

    /// Leaves in shared memory what a half needs of the piece when it closes its rows: there are no
    /// registers for it in between. Behind a barrier after which no warp of the half reads what was
    /// left of an earlier piece.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave_piece(&self, half: u32) {
        if S::DIVIDES && thread_idx() % WARPGROUP == 0 {
            let words = [self.rows.batch, self.rows.start, self.exist, self.place];
            Self::piece(half).store_vec(0, words);
        }
    }

    /// Takes what [`leave_piece`](Self::leave_piece) left, behind another barrier.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take_piece(&mut self, half: u32) {
        if S::DIVIDES {
            let words = Self::piece(half).load_vec(0);
            [self.rows.batch, self.rows.start, self.exist, self.place] = words;
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn piece(half: u32) -> Shared<u32> {
        Shared::at(S::PIECES + 16 * half)
    }

    /// Where the CTA's range ends: sequence and key tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn range_end() -> Shared<u32> {
        Shared::at(S::RANGE_END)
    }

    /// The cluster's number among the row tiles of a KV head, and that head. The last row tiles
    /// come first: under a causal mask they see most keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(p: &LatentParams, cluster: u32) -> (u32, u32) {
        if !S::APART {
            return (block_idx_x(), 0);
        }
        let (x, clusters) = match cluster {
            1 => (block_idx_x(), row_tiles(&p.attention, ROWS)),
            _ => (block_idx_x() / 2, row_tiles(&p.attention, MAX_CLUSTER * ROWS)),
        };
        let clusters = clusters.max(1);
        (clusters - 1 - x % clusters, x / clusters)
    }

    /// Stores what each row is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keep_rows(&self) {
        let r = thread_idx();
        if r < ROWS {
            self.rows.row(r).keep(self.row_place(r));
        }
        if S::APART && r == 0 {
            let counts = Shared::at(S::COUNTS);
            counts.store(0, self.end);
            counts.store(1, self.tiles.end - self.tiles.start);
        }
    }

    /// Keys that some row of the cluster sees, for the warpgroups that multiply.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn end(&self) -> u32 {
        if S::APART { Shared::at(S::COUNTS).load(0) } else { self.end }
    }

    /// Number of tiles, for the same warpgroups.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count(&self) -> u32 {
        if S::APART { Shared::at(S::COUNTS).load(1) } else { self.tiles.end - self.tiles.start }
    }

    /// The tile's row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(&self, r: u32) -> Row {
        Row::kept(self.row_place(r))
    }

    /// The keys that the tile's row `r` sees. What else a row is does not depend on the sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn visible(&self, r: u32) -> Visible {
        let row = self.row(r);
        if S::DIVIDES { self.rows.visible(row.s) } else { row.visible }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_place(&self, r: u32) -> Shared<u32> {
        Shared::at(S::ROW_PLACES).offset(4 * r)
    }

    /// Address of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn buffer(&self, buffer: u32) -> u32 {
        self.base + S::KV + buffer * S::BUFFER_BYTES
    }

    /// Barrier of a chunk: of the keys of half 0 or 1, or of values apart, which are set 2.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn full(&self, set: u32, chunk: u32) -> u32 {
        self.base + S::FULL + 8 * (set * S::CHUNKS + chunk)
    }

    /// Barrier of a group of chunks of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn empty(&self, buffer: u32, group: u32) -> u32 {
        self.base + S::EMPTY + 8 * (buffer * S::GROUPS + group)
    }

    /// Barrier of the float8 values of a group of chunks of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn codes(&self, buffer: u32, group: u32) -> u32 {
        self.base + S::CODES + 8 * (buffer * S::GROUPS + group)
    }

    /// Address of a chunk of a buffer.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn chunk(&self, buffer: u32, chunk: u32) -> u32 {
        self.buffer(buffer) + chunk * CHUNK_BYTES
    }

    /// The `PASSED` barrier of a half.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn passed(&self, half: u32) -> u32 {
        self.base + S::PASSED + 8 * half
    }

    /// Whether a row of the tile is a row of query and output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn exists(&self, row: Row) -> bool {
        row.s < self.exist
    }

    /// Batch entry of query and output, query head and row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn indices(&self, row: Row) -> [u32; 3] {
        [self.rows.batch.min(self.p.entries - 1), row.head, self.rows.start + row.s]
    }

    /// Index of a row in (split, batch entry, query head, row).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn index(&self, row: Row) -> usize {
        let [entry, head, row] = self.indices(row);
        let split = if S::DIVIDES { 0 } else { self.place };
        let heads = (split * self.p.entries + entry) * self.p.attention.q_heads + head;
        heads as usize * self.p.tokens as usize + row as usize
    }

    /// Index of the tile's row `r` in (place, row of the tile), where several CTAs share a
    /// sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of(&self, r: u32) -> u32 {
        self.place * ROWS + r
    }

    /// Whether these are keys of a sequence that several CTAs share as they divide all keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_part(&self) -> bool {
        S::DIVIDES && self.place != WHOLE
    }

    /// Whether results go to scratch memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_split(&self) -> bool {
        if S::DIVIDES { self.is_part() } else { self.p.attention.splits > 1 }
    }
}

/// Run by one thread.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn init_barriers<S: Shape>(base: u32, cluster: u32) {
    let arrivals = if S::CONVERTS { convert::WARPS } else { 1 };
    for i in 0..S::SETS * S::CHUNKS {
        mbarrier_init(base + S::FULL + 8 * i, arrivals);
    }
    if S::CONVERTS {
        for i in 0..BUFFERS * S::GROUPS {
            mbarrier_init(base + S::CODES + 8 * i, 1);
        }
    }
    for i in 0..BUFFERS * S::GROUPS {
        mbarrier_init(base + S::EMPTY + 8 * i, cluster * WARPGROUP / 32);
    }
    for half in 0..BUFFERS {
        mbarrier_init(base + S::PASSED + 8 * half, WARPGROUP);
    }
    fence_mbarrier_init();
}

/// The thread's row among the 64 of its warpgroup; `half` is 0 or 1. Each warp has 16 consecutive
/// rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row_of(half: u32) -> u32 {
    warp() % 4 * 16 + lane() / 4 + 8 * half
}
