//! Kernels around attention over a paged KV cache: a block table lists the blocks of each sequence,
//! and the tokens of all sequences are packed.
//!
//! | kernel | does |
//! |---|---|
//! | `paged_append` | appends new K, rotated, and V to their blocks, except for sequences with fewer than `least` tokens; writes Q, rotated, as (batch, row) |
//! | `paged_append_quantized` | the same for a quantized cache |
//! | `paged_dequantize` ([`dequantize`](super::dequantize)) | dequantizes each sequence into its own blocks |
//! | `paged_gather` | copies the rows of every sequence into a contiguous cache, and writes the lengths |
//! | `paged_scatter` | copies output rows of (batch, row) to their tokens |
//! | `paged_gaps` ([`gaps`](super::gaps)) | recomputes sequences whose tables point outside of the cache |
//!
//! Sequence `b` has `new` tokens, from `starts[b]` on, after `past` cached rows. Attention takes S
//! rows per sequence, whose last row is the sequence's last token: token `i` is row `past + i -
//! max(past + new - S, 0)`; other rows are zero. For tokens without a row `paged_scatter` writes
//! zeros and a log-sum-exp of -inf.
//!
//! Where a sequence's rows are consecutive ([`CONSECUTIVE`]), block_table has the first row of each
//! sequence, and a block of the cache is one row.
//!
//! Tensors: q, k, v of tokens with their strides; starts (batch + 1); past_seqlens (batch);
//! block_table (batch, per_sequence); slot_mapping (tokens) or null; k_cache, v_cache (block, row,
//! KV head, head size) with strides, of quantized values in half words; k_scale, v_scale of one
//! element, (KV head), (KV head, head size) or (block, row, KV head); q_out, rows, (batch, S, query
//! head, head size); present_k, present_v (batch, KV head, capacity, head size) and scales of their
//! rows, or null; lengths (batch); out (tokens, query head, head size); row_lse (batch, query head,
//! S) and lse (query head, tokens) or null. Whatever the integers are, nothing outside of these is
//! touched.

use super::quantize::{Divisors, store_quotients, store_vector};
use super::rope::{Around, Rope, Unturned, pairs};
use super::row_scales::{NewRow, each_row, lanes};
use super::walk::Walk;
use crate::concept::pages::{CONSECUTIVE, Length, Sequence};
use crate::concept::scales::{ScalesPer, are_of_rows};
use crate::num::{Code, Divisor, Element, quotient};
use crate::params::PagedParams;
use crate::simt::Global;

/// Where the rows of batch entry `b` are.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn sequence_of(
    p: &PagedParams,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    b: u32,
) -> Sequence {
    let bounds = [b, b + 1].map(|i| starts.load(i as usize));
    let length = Length { rows: past_seqlens.load(b as usize), counts_new: p.counts_new != 0 };
    Sequence::new(bounds, length, p.tokens, p.q_len, p.capacity)
}

/// The batch entry of token `token`, and the token's number in it. Each step of the search keeps
/// several loads in flight, because it is bound by latency.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn owner_of(p: &PagedParams, starts: Global<i32>, token: u32) -> (u32, u32) {
    /// Boundaries of a step.
    const TOGETHER: usize = 8;
    let start = |b: u32| starts.load(b as usize) as u32;
    let (mut low, mut count) = (0, p.batch);
    while count > 1 {
        let part = count.div_ceil(TOGETHER as u32 + 1);
        let last = low + count - 1;
        let bounds: [u32; TOGETHER] =
            core::array::from_fn(|n| start((low + (n as u32 + 1) * part).min(last)));
        let parts: u32 = bounds.iter().map(|&bound| u32::from(bound <= token)).sum();
        let first = low + parts * part;
        (low, count) = (first.min(last), part.min((last + 1).saturating_sub(first)));
    }
    (low, token.saturating_sub(start(low)))
}

/// A row of the cache, counted in the units of its [`PageSteps`]: of a contiguous cache, where rows
/// may have scales, its number.
///
/// [`PageSteps`]: crate::params::PageSteps
#[derive(Clone, Copy)]
pub(super) struct Place(pub u32);

impl Place {
    /// Row `row` of a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(p: &PagedParams, block: u32, row: u32) -> Self {
        Self(block * p.steps.block + row * p.steps.row)
    }

    /// The row of that number, counted through all blocks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(p: &PagedParams, number: u32) -> Self {
        if p.steps.block == p.block_size && p.steps.row == 1 {
            return Self(number);
        }
        let block = quotient(number, p.block_size);
        Self::new(p, block, number - block * p.block_size)
    }

    /// The byte of k_cache and v_cache where a KV head's row begins.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn byte(self, p: &PagedParams, head: u32) -> usize {
        let of_head = u64::from(head) * u64::from(p.head_bytes);
        (u64::from(self.0) * u64::from(p.steps.unit) + of_head) as usize
    }

    /// Index of the scale of a KV head's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn scale(self, p: &PagedParams, head: u32) -> usize {
        self.0 as usize * p.kv_heads as usize + head as usize
    }
}

/// Rows of the cache.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub table: Global<i32>,
    /// Null, too, where rows are only read.
    pub slot_mapping: Global<i32>,
}

impl Blocks {
    /// The row of the cache that has row `row` of batch entry `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn row(self, p: &PagedParams, b: u32, row: u32) -> Option<Place> {
        let block = self.entry(p, b, row / p.block_size);
        let behind = if p.block_size == CONSECUTIVE { row } else { 0 };
        let exists = block.saturating_add(behind) < p.blocks;
        exists.then(|| Place::new(p, block, row % p.block_size))
    }

    /// Entry `nth` of a sequence's block table; `p.blocks` or more if it is outside of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn entry(self, p: &PagedParams, b: u32, nth: u32) -> u32 {
        self.table.load(b as usize * p.per_sequence as usize + nth as usize) as u32
    }

    /// The cache row for new token `i` of a sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slot(self, p: &PagedParams, b: u32, sequence: Sequence, i: u32) -> Option<Place> {
        if self.slot_mapping.is_null() {
            return self.row(p, b, sequence.position(i)?);
        }
        let slot = self.slot_mapping.load((sequence.start + i) as usize);
        let exists = slot >= 0 && (slot as u32) < p.blocks * p.block_size;
        exists.then(|| Place::of(p, slot as u32))
    }
}

/// Index space of [`paged_append`]: (batch, row of the sequence, heads, pair of vectors), or (1,
/// token of all sequences, heads, pair of vectors). Heads are Q heads, if queries are copied, then
/// K heads, then V heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_append_size(p: &PagedParams, per_vec: u32) -> [u32; 4] {
    let [batch, rows] = if p.by_token != 0 { [1, p.tokens] } else { [p.batch, p.q_len] };
    [batch, rows, moved(p) + p.kv_heads + p.value_heads, pairs(p.head_size, per_vec)]
}

/// The same with per-token scales: the last index is one of the lanes that share a row of K or V.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn shared_rows_size(p: &PagedParams, per_vec: u32) -> [u32; 4] {
    let [batch, rows, ..] = paged_append_size(p, per_vec);
    [batch, rows, p.kv_heads + p.value_heads, lanes(p.head_size / per_vec)]
}

/// Query heads that are copied.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn moved(p: &PagedParams) -> u32 {
    if p.moves_queries != 0 { p.q_heads } else { 0 }
}

/// Appends new rows to the cache, and copies queries for attention.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_append<T: Element>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    slot_mapping: Global<i32>,
    q_out: Global<T>,
    k_cache: Global<T>,
    v_cache: Global<T>,
    p: PagedParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    let call = New { q, k, v, rope, starts, past_seqlens, q_out };
    call.append(&p, Blocks { table: block_table, slot_mapping }, |row, is_key, e, vector| {
        let cache = if is_key { k_cache } else { v_cache };
        cache.store_vec(row.byte(&p) / size_of::<T>() + e, vector);
    });
}

/// As [`paged_append`], to quantized values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_append_quantized<T: Element>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    slot_mapping: Global<i32>,
    q_out: Global<T>,
    k_cache: Global<u16>,
    v_cache: Global<u16>,
    p: PagedParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    let call = New { q, k, v, rope, starts, past_seqlens, q_out };
    let blocks = Blocks { table: block_table, slot_mapping };
    let cache = Quantized { k_scale, v_scale, k_cache, v_cache };
    with_code!(p.format, |code| call.append_quantized(code, &p, blocks, cache));
}

/// A KV head's row of the cache.
#[derive(Clone, Copy)]
struct Row {
    place: Place,
    head: u32,
}

impl Row {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn byte(self, p: &PagedParams) -> usize {
        self.place.byte(p, self.head)
    }
}

/// New rows.
struct New<T> {
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    rope: Rope<T>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    q_out: Global<T>,
}

impl<T: Element> New<T> {
    /// Copies queries for attention, and calls `store` for each vector of a new row: row, whether
    /// it is a key, first element, vector.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append(&self, p: &PagedParams, blocks: Blocks, store: impl Fn(Row, bool, usize, [u32; 4])) {
        for [b, s, head, pair] in Walk::over(paged_append_size(p, T::PER_VEC)) {
            let (b, s) = if p.by_token != 0 { owner_of(p, self.starts, s) } else { (b, s) };
            let sequence = sequence_of(p, self.starts, self.past_seqlens, b);
            let at = (pair, p.head_size);
            if head < moved(p) {
                let row = (b * p.q_len + s) as usize * p.q_heads as usize + head as usize;
                let to = (self.q_out, row * p.head_size as usize);
                match sequence.token(s, p.q_len) {
                    Some(i) => {
                        let from = (self.q, p.q.at(0, head, sequence.start + i));
                        self.rope.move_pair(from, to, at, sequence.past.wrapping_add(i) as i64);
                    }
                    None => Unturned::zero::<T>(pair, p.head_size).store(to),
                }
                continue;
            }
            if s >= sequence.of_at_least(p.least).new {
                continue;
            }
            let Some(place) = blocks.slot(p, b, sequence, s) else { continue };
            let (head, token) = (head - moved(p), sequence.start + s);
            if head < p.kv_heads {
                let position = sequence.past.wrapping_add(s) as i64;
                let from = (self.k, p.k.at(0, head, token));
                let row = Row { place, head };
                self.rope.rotate_pair(from, at, position, |e, vector| store(row, true, e, vector));
            } else {
                let row = Row { place, head: head - p.kv_heads };
                let from = (self.v, p.v.at(0, row.head, token));
                let values = Unturned::load(from, Around::NOTHING, pair, p.head_size);
                values.each(|e, vector| store(row, false, e, vector));
            }
        }
    }

    /// [`append`](Self::append) to quantized values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_quantized<C: Code>(
        &self,
        code: C,
        p: &PagedParams,
        blocks: Blocks,
        cache: Quantized,
    ) {
        if are_of_rows(p.scales) {
            return self.append_with_scales(code, p, blocks, cache);
        }
        let [k_scale, v_scale] = [cache.k_scale, cache.v_scale]
            .map(|scale| Divisors::new(scale, ScalesPer::new(p.scales)));
        self.append(p, blocks, |row, is_key, e, vector| {
            let scales = if is_key { k_scale } else { v_scale };
            let scales = scales.of_head(row.head, p.head_size);
            let to = cache.of(is_key).1.offset(row.byte(p) / 2);
            store_vector::<T, C>(code, e, vector, &scales, to);
        });
    }

    /// [`append`](Self::append) with per-token scales: the lanes that share a row reduce its
    /// greatest magnitude.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_with_scales<C: Code>(
        &self,
        code: C,
        p: &PagedParams,
        blocks: Blocks,
        cache: Quantized,
    ) {
        if p.moves_queries != 0 {
            let alone = PagedParams { kv_heads: 0, value_heads: 0, ..*p };
            self.append(&alone, blocks, |_, _, _, _| {});
        }
        let row = |index| self.new_row(p, blocks, index);
        let size = shared_rows_size(p, T::PER_VEC);
        each_row(size, &self.rope, row, |new, (to, is_key), largest| {
            let (scales, codes) = cache.of(is_key);
            let scale = code.row_scale(largest);
            if new.lane == 0 {
                scales.store(to.place.scale(p, to.head), scale);
            }
            let codes = codes.offset(to.byte(p) / 2);
            let scale = Divisor::new(scale);
            for e in new.elements() {
                let vector = new.vector(&self.rope, e);
                let quotient = |_, x| scale.divide(x);
                store_quotients::<T, C>(code, e as usize, vector, quotient, codes);
            }
        });
    }

    /// The new row of a KV head that the lane takes part in, its place in the cache, and whether it
    /// is a key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new_row(
        &self,
        p: &PagedParams,
        blocks: Blocks,
        [b, s, head, lane]: [u32; 4],
    ) -> Option<(NewRow<T>, (Row, bool))> {
        let (b, s) = if p.by_token != 0 { owner_of(p, self.starts, s) } else { (b, s) };
        let sequence = sequence_of(p, self.starts, self.past_seqlens, b);
        if s >= sequence.of_at_least(p.least).new {
            return None;
        }
        let place = blocks.slot(p, b, sequence, s)?;
        let (is_key, token) = (head < p.kv_heads, sequence.start + s);
        let head = if is_key { head } else { head - p.kv_heads };
        let from = match is_key {
            true => (self.k, p.k.at(0, head, token)),
            false => (self.v, p.v.at(0, head, token)),
        };
        let position = is_key.then(|| sequence.past.wrapping_add(s) as i64);
        let new = NewRow { from, position, head_size: p.head_size, lane };
        Some((new, (Row { place, head }, is_key)))
    }
}

/// A cache of quantized values.
#[derive(Clone, Copy)]
struct Quantized {
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    k_cache: Global<u16>,
    v_cache: Global<u16>,
}

impl Quantized {
    /// Scales and quantized values, of keys or of values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(&self, is_key: bool) -> (Global<f32>, Global<u16>) {
        if is_key { (self.k_scale, self.k_cache) } else { (self.v_scale, self.v_cache) }
    }
}

/// Index space of [`paged_gather`]: (batch, key heads and then value heads, row of the sequence,
/// 16-byte vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_gather_size(p: &PagedParams) -> [u32; 4] {
    [p.batch, p.kv_heads + p.value_heads, p.capacity, p.row_vectors]
}

/// Copies the rows of each sequence to contiguous memory, with their per-token scales if there are
/// any. Rows that no token sees become zeros. Rows past the end of the sequence are not written.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_gather(
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    slot_mapping: Global<i32>,
    k_cache: Global<u8>,
    v_cache: Global<u8>,
    present_k: Global<u8>,
    present_v: Global<u8>,
    lengths: Global<i32>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    present_k_scale: Global<f32>,
    present_v_scale: Global<f32>,
    p: PagedParams,
) {
    let blocks = Blocks { table: block_table, slot_mapping };
    for [b, head, row, vector] in Walk::over(paged_gather_size(&p)) {
        let sequence = sequence_of(&p, starts, past_seqlens, b);
        let total = sequence.seqlen().total;
        if head + row + vector == 0 {
            lengths.store(b as usize, total as i32 - 1);
        }
        if row >= total {
            continue;
        }
        let is_key = head < p.kv_heads;
        let (from, to, head) = if is_key {
            (k_cache, present_k, head)
        } else {
            (v_cache, present_v, head - p.kv_heads)
        };
        let hidden = sequence.is_hidden(row, p.window);
        let place = if hidden { None } else { blocks.row(&p, b, row) };
        let words = match place {
            Some(place) => from.load_vec(place.byte(&p, head) + 16 * vector as usize),
            None => [0; 4],
        };
        to.store_vec(byte(&p, [b * p.kv_heads + head, p.capacity, row], vector), words);
        if vector == 0 && !k_scale.is_null() {
            let (from, to) =
                if is_key { (k_scale, present_k_scale) } else { (v_scale, present_v_scale) };
            let scale = place.map_or(0.0, |place| from.load(place.scale(&p, head)));
            to.store(((b * p.kv_heads + head) * p.capacity + row) as usize, scale);
        }
    }
}

/// Index space of [`paged_scatter`]: (batch, row, query head, 16-byte vector).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_scatter_size(p: &PagedParams) -> [u32; 4] {
    [p.batch, p.q_len, p.q_heads, p.row_vectors]
}

/// Copies output rows, and log-sum-exps if given, to their tokens.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_scatter(
    rows: Global<u8>,
    row_lse: Global<f32>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    out: Global<u8>,
    lse: Global<f32>,
    p: PagedParams,
) {
    for [b, row, head, vector] in Walk::over(paged_scatter_size(&p)) {
        let sequence = sequence_of(&p, starts, past_seqlens, b);
        let token = |i: u32| sequence.start + i;
        let vector_at = |i| byte(&p, [token(i), p.q_heads, head], vector);
        let lse_at = |i| head as usize * p.tokens as usize + token(i) as usize;
        let stores_lse = vector == 0 && !lse.is_null();
        if row < sequence.without_row() {
            out.store_vec(vector_at(row), [0; 4]);
            if stores_lse {
                lse.store(lse_at(row), f32::NEG_INFINITY);
            }
        }
        if let Some(i) = sequence.token(row, p.q_len) {
            let words = rows.load_vec(byte(&p, [b * p.q_len + row, p.q_heads, head], vector));
            out.store_vec(vector_at(i), words);
            if stores_lse {
                let of_rows = (b * p.q_heads + head) as usize * p.q_len as usize + row as usize;
                lse.store(lse_at(i), row_lse.load(of_rows));
            }
        }
    }
}

/// Where vector `vector` of row `outer * count + inner` is.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn byte(p: &PagedParams, [outer, count, inner]: [u32; 3], vector: u32) -> usize {
    let row = outer as usize * count as usize + inner as usize;
    (row * p.row_vectors as usize + vector as usize) * 16
}
