//! A rolling KV cache ([`concept::sliding`](crate::concept::sliding)). Its row 0 is the oldest row
//! that it still holds, and all other kernels treat it as an ordinary cache: they get lengths,
//! positions and bias columns that count from row 0.
//!
//! | kernel | does |
//! |---|---|
//! | `rolling_kv` | moves the remaining rows to the front, in place or from another cache; in a decode step it also does the work of `rolling_lengths` |
//! | `rolling_lengths` | lengths in the cache, and positions, from the lengths of the sequences |
//! | `rolling_bias` | copies the columns of attention_bias for the rows in the cache |
//!
//! In a decode step the new row always fits: `rolling_kv` evicts first, then attention appends it.
//! Several new rows may not fit, because the first of them sees rows that the last ones evict. Then
//! attention uses a cache in scratch memory with room for all, and `rolling_kv` copies the
//! remaining rows from it.
//!
//! | row `j` of the cache, after the call | row of the cache that `rolling_kv` reads |
//! |---|---|
//! | `0 .. kept` | row `j + evicted` |
//! | `kept .. capacity` | unchanged, or 0 if `clears` |
//!
//! `kept` is the number of rows in the cache after the call, without the new one in a decode step,
//! which is appended later.
//!
//! **Grid** of `rolling_kv`: CTAs stride over (batch, key heads and then value heads, four columns
//! of 16 bytes). A CTA moves 512 rows at a time: in place, it reads all of them before it writes
//! one, and the rows after them are still unwritten. **Tensors**: from_k, from_v (batch, KV head,
//! from_rows, bytes of a row), to_k, to_v likewise with `capacity` rows; seqlens_k and lengths
//! (batch); position_ids (batch, S); bias (batch or 1, query head or 1, S, columns) and bias_out
//! (batch, query head or 1, S, rows).

use super::THREADS;
use super::walk::Walk;
use crate::concept::seqlen::Seqlen;
use crate::concept::sliding::{Slide, Sliding};
use crate::num::Element;
use crate::params::{RollingBiasParams, RollingParams};
use crate::simt::{Global, sync_threads, thread_idx};
use crate::tile::seqlens::Seqlens;

/// Neighbouring 16-byte vectors that a CTA moves: two sectors of memory.
const COLUMNS: u32 = 4;
/// Vectors that a thread keeps in flight.
const UNDER_WAY: usize = 8;
/// Rows that the threads of a CTA access at a time.
const ROWS: u32 = THREADS / COLUMNS;

/// The rows of batch entry `b`, whatever its length on the device: at most as many new rows as the
/// call has.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn slide(p: &RollingParams, seqlens: Seqlens, b: u32) -> Slide {
    let is_prompt = p.first_prompt != 0;
    let most = if is_prompt { p.q_len } else { u32::MAX };
    let Seqlen { total, past } = Seqlen::new(seqlens.load(b, p.q_len), most, is_prompt);
    Sliding { window: p.window, capacity: p.capacity }.slide(past, total)
}

/// Rows in the cache that attention reads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn attended(p: &RollingParams, slide: Slide) -> u32 {
    if p.staged != 0 { slide.joined } else { slide.after }
}

/// Index space of the CTAs of [`rolling_kv`]: (batch, key heads and then value heads, 1, group of
/// columns).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rolling_kv_size(p: &RollingParams) -> [u32; 4] {
    [p.batch, 2 * p.kv_heads, 1, p.row_vectors.div_ceil(COLUMNS)]
}

/// Moves the remaining rows to the front.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rolling_kv(
    from_k: Global<u8>,
    from_v: Global<u8>,
    to_k: Global<u8>,
    to_v: Global<u8>,
    seqlens: Seqlens,
    lengths: Global<i32>,
    position_ids: Global<i64>,
    p: RollingParams,
) {
    for [b, head, _, group] in Walk::of_blocks(rolling_kv_size(&p)) {
        let slide = slide(&p, seqlens, b);
        if p.staged == 0 && head == 0 && group == 0 && thread_idx() == 0 {
            write_lengths(&p, slide, [b, 0], lengths, position_ids);
        }
        let is_key = head < p.kv_heads;
        let (from, to, head) =
            if is_key { (from_k, to_k, head) } else { (from_v, to_v, head - p.kv_heads) };
        let plane = (b * p.kv_heads + head) as usize;
        let column = group * COLUMNS + thread_idx() % COLUMNS;
        let lane = Lane {
            from: from.offset(index(&p, plane * p.from_rows as usize, column)),
            to: to.offset(index(&p, plane * p.capacity as usize, column)),
            is_column: column < p.row_vectors,
        };
        lane.run(&p, slide);
    }
}

/// Byte offset of a vector of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn index(p: &RollingParams, row: usize, column: u32) -> usize {
    (row * p.row_vectors as usize + column as usize) * 16
}

/// A thread's column of one head.
struct Lane {
    from: Global<u8>,
    to: Global<u8>,
    is_column: bool,
}

impl Lane {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn run(&self, p: &RollingParams, slide: Slide) {
        // A decode step appends its new row later.
        let kept = if p.staged != 0 { slide.after } else { slide.kept() };
        let written = if p.clears != 0 { p.capacity } else { kept };
        if p.in_place != 0 && slide.evicted == 0 {
            return;
        }
        let mut first = 0;
        while first < written {
            let row = |i: usize| first + thread_idx() / COLUMNS + i as u32 * ROWS;
            let rows: [[u32; 4]; UNDER_WAY] = core::array::from_fn(|i| {
                if row(i) < kept && self.is_column {
                    self.from.load_vec(index(p, (row(i) + slide.evicted) as usize, 0))
                } else {
                    [0; 4]
                }
            });
            // In place, all reads of these rows must precede the writes.
            sync_threads();
            for i in 0..UNDER_WAY {
                if row(i) < written && self.is_column {
                    self.to.store_vec(index(p, row(i) as usize, 0), rows[i]);
                }
            }
            first += UNDER_WAY as u32 * ROWS;
        }
    }
}

/// Index space of [`rolling_lengths`]: (batch, query row).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rolling_lengths_size(p: &RollingParams) -> [u32; 4] {
    [p.batch, 1, 1, p.q_len]
}

/// Writes how many rows attention finds in the cache, and the positions of the new rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rolling_lengths(
    seqlens: Seqlens,
    lengths: Global<i32>,
    position_ids: Global<i64>,
    p: RollingParams,
) {
    for [b, .., s] in Walk::over(rolling_lengths_size(&p)) {
        write_lengths(&p, slide(&p, seqlens, b), [b, s], lengths, position_ids);
    }
}

/// Writes the position of query row `s` of one sequence; row 0 also writes the length.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn write_lengths(
    p: &RollingParams,
    slide: Slide,
    [b, s]: [u32; 2],
    lengths: Global<i32>,
    position_ids: Global<i64>,
) {
    if s == 0 {
        lengths.store(b as usize, attended(p, slide) as i32 - 1);
    }
    if !position_ids.is_null() {
        position_ids.store((b * p.q_len + s) as usize, (slide.past + s) as i64);
    }
}

/// Index space of [`rolling_bias`]: (batch, query head or 1, query row, row of the cache).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rolling_bias_size(p: &RollingBiasParams) -> [u32; 4] {
    [p.slide.batch, p.heads, p.slide.q_len, p.columns_out]
}

/// Copies the bias of the rows in the cache; rows without a bias get 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rolling_bias<T: Element>(
    bias: Global<T>,
    seqlens: Seqlens,
    bias_out: Global<T>,
    p: RollingBiasParams,
) {
    for [b, head, s, row] in Walk::over(rolling_bias_size(&p)) {
        let slide = slide(&p.slide, seqlens, b);
        let column = slide.total - attended(&p.slide, slide) + row;
        let value = if column < slide.total.min(p.columns) {
            bias.load(p.bias.at(b, head, s) + column as usize)
        } else {
            T::zeroed()
        };
        let at = ((b * p.heads + head) * p.slide.q_len + s) as usize * p.columns_out as usize;
        bias_out.store(at + row as usize, value);
    }
}
