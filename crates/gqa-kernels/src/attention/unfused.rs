//! Attention in three launches with all scores in global memory. Slow and memory-hungry, but the
//! only implementation that can return scores from before the mask, and the fallback for all other
//! calls.
//!
//! ```text
//! q          (batch, query head, row, head_size)
//! k          (batch, KV head, key, head_size)
//! v          (batch, KV head, key, v_head_size)
//! scores     (batch, query head, row, qk_columns)  f32, contiguous: q·k, then P
//! bias, mask (batch, query head, row, key)         as in [`general`](super::general)
//! head_sink  (query head)                          null unless sink::PER_HEAD
//! out        (batch, query head, row, v_head_size) of the element type or f32
//! lse        (batch, query head, row)              f32, contiguous, or null
//! output_qk  (batch, query head, row, qk_columns)  contiguous, or null
//! ```
//!
//! 1. [`unfused_scores`]: q·k of all rows and keys.
//! 2. [`unfused_softmax`]: a warp turns a row of scores into P in place: scale, softcap, bias,
//!    mask, softmax; it writes output_qk on the way.
//! 3. [`unfused_values`]: P times V.
//!
//! **Products.** The query heads of a group are packed as rows ([`Group`]), so K and V are read
//! through strides and never repeated. A CTA computes [`TILE`] by [`TILE`] elements, 4 by 4 per
//! thread. Both operands pass through shared memory, `DEPTH` at a time and transposed, so that a
//! thread's four rows and four columns are one vector each. CTA barriers precede and follow the
//! reads of each staged pair. No alignment is required. All grids are one-dimensional; CTAs stride
//! over the work.
//!
//! **Numerics.** f32 throughout, one rounding at the end. V past the end of a sequence is not read.

use super::general::{add_bias, warp_max, warp_sum};
use crate::concept::band::Band;
use crate::concept::heads::Group;
use crate::concept::softmax::PlainState;
use crate::num::{Element, tanh};
use crate::params::{AttentionParams, MaskedParams, qk_output, sink};
use crate::simt::{
    Global, Shared, block_idx_x, fma, grid_dim_x, lane, max, sync_threads, thread_idx, warp,
};
use crate::tile::seqlens::Seqlens;

/// Threads of a CTA.
pub const THREADS: u32 = 256;
/// Rows and columns of a CTA's product.
pub const TILE: u32 = 64;
/// Shared memory of a CTA, in bytes: two operands, (DEPTH, PITCH) f32 each.
pub const SHARED_BYTES: u32 = 2 * OPERAND_BYTES;

const WARPS: u32 = THREADS / 32;
/// Depth of the product between two barriers.
const DEPTH: u32 = 16;
/// Elements from one staged line to the next.
const PITCH: u32 = TILE + 4;
const OPERAND_BYTES: u32 = DEPTH * PITCH * 4;

/// Rows of scores: batch × query heads × query rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rows(p: &AttentionParams) -> u64 {
    p.batch as u64 * p.q_heads as u64 * p.q_len as u64
}

/// Tiles of packed rows times tiles of `columns`, over all batch entries and KV heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tiles(p: &AttentionParams, columns: u32) -> u64 {
    p.batch as u64 * p.kv_heads as u64 * row_tiles(p) as u64 * columns.div_ceil(TILE) as u64
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row_tiles(p: &AttentionParams) -> u32 {
    Group::new(p.q_heads, p.kv_heads).rows(p.q_len).div_ceil(TILE).max(1)
}

/// Grid of [`unfused_scores`].
pub fn scores_grid(p: &MaskedParams) -> [u32; 3] {
    blocks(tiles(&p.attention, p.attention.qk_columns))
}

/// Grid of [`unfused_softmax`].
pub fn softmax_grid(p: &MaskedParams) -> [u32; 3] {
    blocks(rows(&p.attention).div_ceil(WARPS as u64))
}

/// Grid of [`unfused_values`].
pub fn values_grid(p: &MaskedParams) -> [u32; 3] {
    blocks(tiles(&p.attention, p.v_head_size))
}

fn blocks(wanted: u64) -> [u32; 3] {
    [wanted.clamp(1, i32::MAX as u64) as u32, 1, 1]
}

/// A CTA's tile of a product.
struct Tile {
    batch: u32,
    kv_head: u32,
    /// First packed row.
    row: u32,
    /// First column.
    column: u32,
    group: Group,
}

impl Tile {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(tile: u64, columns: u32, p: &AttentionParams) -> Self {
        let (across, down) = (columns.div_ceil(TILE).max(1) as u64, row_tiles(p) as u64);
        let head = tile / across / down;
        let kv_heads = p.kv_heads.max(1) as u64;
        Self {
            batch: (head / kv_heads) as u32,
            kv_head: (head % kv_heads) as u32,
            row: (tile / across % down) as u32 * TILE,
            column: (tile % across) as u32 * TILE,
            group: Group::new(p.q_heads, p.kv_heads),
        }
    }

    /// (query row, query head) of row `r` of the tile; `None` past the last.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(&self, r: u32, p: &AttentionParams) -> Option<(u32, u32)> {
        let (s, head) = self.group.unpack(self.kv_head, self.row + r);
        if s < p.q_len { Some((s, head)) } else { None }
    }
}

/// Index of a row's first score.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn line(p: &AttentionParams, batch: u32, head: u32, s: u32) -> usize {
    let head = batch as usize * p.q_heads as usize + head as usize;
    (head * p.q_len as usize + s as usize) * p.qk_columns as usize
}

type Product = [[f32; 4]; 4];

/// First row and first column of a thread's part of the tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn corner() -> (u32, u32) {
    (thread_idx() / 16 * 4, thread_idx() % 16 * 4)
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rows_at() -> Shared<f32> {
    Shared::at(0)
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn columns_at() -> Shared<f32> {
    Shared::at(OPERAND_BYTES)
}

/// Accumulates the staged operands into a thread's part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply(product: &mut Product) {
    let (row, column) = corner();
    for depth in 0..DEPTH {
        let a = rows_at().load_vec(depth * PITCH + row).map(f32::from_bits);
        let b = columns_at().load_vec(depth * PITCH + column).map(f32::from_bits);
        for r in 0..4 {
            for c in 0..4 {
                product[r][c] = fma(a[r], b[c], product[r][c]);
            }
        }
    }
}

/// The row or column of the tile that a thread stages.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn duty() -> u32 {
    thread_idx() / 4
}

/// Stages four of the elements `depth ..` of a row of `size`; 0 past its end or if there is no row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn stage_row<T: Element>(
    to: Shared<f32>,
    from: Global<T>,
    row: Option<usize>,
    depth: u32,
    size: u32,
) {
    let first = thread_idx() % 4 * 4;
    for along in first..first + 4 {
        let e = depth + along;
        let value = match row {
            Some(row) if e < size => from.load(row + e as usize).to_f32(),
            _ => 0.0,
        };
        to.store(along * PITCH + duty(), value);
    }
}

/// q·k of every row and key.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unfused_scores<T: Element>(
    q: Global<T>,
    k: Global<T>,
    scores: Global<f32>,
    masked: MaskedParams,
) {
    let p = &masked.attention;
    let tiles = tiles(p, p.qk_columns);
    let mut number = block_idx_x() as u64;
    while number < tiles {
        let tile = Tile::new(number, p.qk_columns, p);
        let product = scores_tile(&tile, q, k, p);
        store_scores(&tile, &product, scores, p);
        number += grid_dim_x() as u64;
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn scores_tile<T: Element>(
    tile: &Tile,
    q: Global<T>,
    k: Global<T>,
    p: &AttentionParams,
) -> Product {
    let query = tile.place(duty(), p).map(|(s, head)| p.q.at(tile.batch, head, s));
    let key = tile.column + duty();
    let key = if key < p.qk_columns { Some(p.k.at(tile.batch, tile.kv_head, key)) } else { None };
    let mut product = [[0.0; 4]; 4];
    let mut depth = 0;
    while depth < p.head_size {
        stage_row(rows_at(), q, query, depth, p.head_size);
        stage_row(columns_at(), k, key, depth, p.head_size);
        sync_threads();
        multiply(&mut product);
        sync_threads();
        depth += DEPTH;
    }
    product
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store_scores(tile: &Tile, product: &Product, scores: Global<f32>, p: &AttentionParams) {
    let (row, column) = corner();
    for r in 0..4 {
        if let Some((s, head)) = tile.place(row + r, p) {
            let line = line(p, tile.batch, head, s);
            for c in 0..4 {
                let key = tile.column + column + c;
                if key < p.qk_columns {
                    scores.store(line + key as usize, product[r as usize][c as usize]);
                }
            }
        }
    }
}

/// Turns scores into P, a warp per row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unfused_softmax<T: Element>(
    seqlens: Seqlens,
    bias: Global<T>,
    mask: Global<u8>,
    head_sink: Global<T>,
    scores: Global<f32>,
    lse: Global<f32>,
    output_qk: Global<T>,
    masked: MaskedParams,
) {
    let p = &masked.attention;
    let (rows, q_len, q_heads) = (rows(p), p.q_len.max(1) as u64, p.q_heads.max(1) as u64);
    let mut row = block_idx_x() as u64 * WARPS as u64 + warp() as u64;
    while row < rows {
        let (head, s) = (row / q_len, (row % q_len) as u32);
        let (batch, head) = ((head / q_heads) as u32, (head % q_heads) as u32);
        let at = row as usize * p.qk_columns as usize;
        let bias_at = p.bias.at(batch, head, s);
        let (scores, output_qk) = (scores.offset(at), output_qk.offset(at));
        let line = Line { scores, bias, mask, bias_at, output_qk, p };
        let visible = Band::new(seqlens.load(batch, p.q_len), &masked).visible(s);
        let mut state = PlainState::EMPTY;
        state.raise(line.scores(visible.first, visible.end));
        state.sum = warp_sum(line.weigh(&state));
        let mut factor = 1.0;
        if p.sink != sink::NONE && visible.first < visible.end {
            let per_head = p.sink == sink::PER_HEAD;
            let logit = if per_head { head_sink.load(head as usize).to_f32() } else { 0.0 };
            factor = state.join_sink(logit);
        }
        line.normalise(factor * state.normaliser());
        if !lse.is_null() && lane() == 0 {
            lse.store(row as usize, state.log_sum_exp());
        }
        row += grid_dim_x() as u64 * WARPS as u64;
    }
}

/// One row of scores. A lane only ever accesses its own elements, every 32nd of them, so the passes
/// need no barrier between them.
struct Line<'a, T> {
    scores: Global<f32>,
    bias: Global<T>,
    mask: Global<u8>,
    /// Index of the row's first bias or mask element.
    bias_at: usize,
    output_qk: Global<T>,
    p: &'a AttentionParams,
}

impl<T: Element> Line<'_, T> {
    /// Calls `f` with this lane's keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn each(&self, mut f: impl FnMut(u32)) {
        let mut key = lane();
        while key < self.p.qk_columns {
            f(key);
            key += 32;
        }
    }

    /// Writes an element of output_qk if the call wants the values of this `mode`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hand_out(&self, mode: u32, key: u32, value: f32) {
        if self.p.qk_output == mode {
            self.output_qk.store(key as usize, T::from_f32(value));
        }
    }

    /// Turns q·k into scores, -inf outside of keys `first .. end`. Returns the row's maximum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores(&self, first: u32, end: u32) -> f32 {
        let mut largest = f32::NEG_INFINITY;
        self.each(|key| {
            let mut score = self.scores.load(key as usize) * self.p.scale;
            self.hand_out(qk_output::SCALED, key, score);
            if self.p.softcap > 0.0 {
                score = self.p.softcap * tanh(score / self.p.softcap);
            }
            self.hand_out(qk_output::CAPPED, key, score);
            let seen = first <= key && key < end;
            score = if seen { self.masked(key, score) } else { f32::NEG_INFINITY };
            self.hand_out(qk_output::BIASED, key, score);
            self.hand_out(qk_output::BEFORE_SOFTMAX, key, if seen { score } else { 0.0 });
            self.scores.store(key as usize, score);
            largest = max(largest, score);
        });
        warp_max(largest)
    }

    /// A visible key's score with bias and mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn masked(&self, key: u32, score: f32) -> f32 {
        let at = self.bias_at + key as usize;
        let mut score = score;
        if !self.bias.is_null() {
            score = add_bias(score, self.bias.load(at).to_f32());
        }
        if !self.mask.is_null() && self.mask.load(at) == 0 {
            score = f32::NEG_INFINITY;
        }
        score
    }

    /// Turns scores into P with the row's maximum. Returns this lane's share of the row sum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh(&self, state: &PlainState) -> f32 {
        let mut sum = 0.0;
        self.each(|key| {
            let weight = state.weight(self.scores.load(key as usize));
            self.scores.store(key as usize, weight);
            sum += weight;
        });
        sum
    }

    /// Normalises P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn normalise(&self, factor: f32) {
        self.each(|key| {
            let weight = self.scores.load(key as usize) * factor;
            self.scores.store(key as usize, weight);
            self.hand_out(qk_output::AFTER_SOFTMAX, key, weight);
        });
    }
}

/// P times V, in the element type, or in f32 where `out_f32` is not null.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unfused_values<T: Element>(
    v: Global<T>,
    seqlens: Seqlens,
    scores: Global<f32>,
    out: Global<T>,
    out_f32: Global<f32>,
    masked: MaskedParams,
) {
    let p = &masked.attention;
    let tiles = tiles(p, masked.v_head_size);
    let mut number = block_idx_x() as u64;
    while number < tiles {
        let tile = Tile::new(number, masked.v_head_size, p);
        let band = Band::new(seqlens.load(tile.batch, p.q_len), &masked);
        let product = values_tile(&tile, band.total.min(p.qk_columns), v, scores, &masked);
        if out_f32.is_null() {
            store_output(&tile, &product, out, &masked);
        } else {
            store_output(&tile, &product, out_f32, &masked);
        }
        number += grid_dim_x() as u64;
    }
}

/// The product of a tile over the sequence's valid `keys`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn values_tile<T: Element>(
    tile: &Tile,
    keys: u32,
    v: Global<T>,
    scores: Global<f32>,
    masked: &MaskedParams,
) -> Product {
    let p = &masked.attention;
    let weights = tile.place(duty(), p).map(|(s, head)| line(p, tile.batch, head, s));
    let mut product = [[0.0; 4]; 4];
    let mut key = 0;
    while key < keys {
        stage_row(rows_at(), scores, weights, key, keys);
        stage_values(tile, key, keys, v, masked);
        sync_threads();
        multiply(&mut product);
        sync_threads();
        key += DEPTH;
    }
    product
}

/// Stages keys `key ..` of the tile's columns of V: a thread takes four columns of a key.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn stage_values<T: Element>(tile: &Tile, key: u32, keys: u32, v: Global<T>, masked: &MaskedParams) {
    let (depth, column) = (thread_idx() / 16, thread_idx() % 16 * 4);
    let row = masked.attention.v.at(tile.batch, tile.kv_head, key + depth);
    for column in column..column + 4 {
        let e = tile.column + column;
        let valid = key + depth < keys && e < masked.v_head_size;
        let value = if valid { v.load(row + e as usize).to_f32() } else { 0.0 };
        columns_at().store(depth * PITCH + column, value);
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store_output<O: Element>(tile: &Tile, product: &Product, out: Global<O>, masked: &MaskedParams) {
    let (p, (row, column)) = (&masked.attention, corner());
    for r in 0..4 {
        if let Some((s, head)) = tile.place(row + r, p) {
            let at = p.out.at(tile.batch, head, s);
            for c in 0..4 {
                let e = tile.column + column + c;
                if e < masked.v_head_size {
                    out.store(at + e as usize, O::from_f32(product[r as usize][c as usize]));
                }
            }
        }
    }
}
