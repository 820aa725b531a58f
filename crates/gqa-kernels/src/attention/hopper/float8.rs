//! Operands of e4m3: what attention over a cache of such quantized values multiplies instead of
//! elements, by products of twice the rate.
//!
//! | operand | what it is |
//! |---|---|
//! | float8 queries (batch, query head, S, head size) | rotated queries times `k_scale`, divided by a power of two for each row and rounded |
//! | row factors (batch, query head, S), f32 | that power of two, times `scale · log2 e` |
//! | keys | the cache, (batch, KV head, capacity, head size) |
//! | float8 values (batch, KV head, head size, keys) | the cache's, transposed, keys in the order of [`key_of_column`], 0 behind the sequence up to the end of its last tile |
//!
//! [`float8_operands`] writes all of them in one pass over queries, new rows and the values of the
//! cache; where new rows are in the cache already, and queries are rotated, it does the rest.
//!
//! The power of two is the least with which no query exceeds 448, so that rounding is all that is
//! lost. Weights are rounded to e4m3 too, where they count from a reference that gives the greatest
//! ones 64 to 256; `v_scale` joins at the end. Sums are of rounded weights.

use super::operand::key_of_column;
use super::shape::TRANSPOSED_KEYS;
use super::work::Place;
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::LOG2_E;
use crate::num::{Element, quotient, unpack};
use crate::params::{AttentionParams, Float8OperandsParams, Strides};
use crate::prologue::rope::Rope;
use crate::simt::*;

/// What turns products of e4m3 into scores and outputs.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    /// (batch, query head, S)
    pub(super) row_factors: Global<f32>,
    /// One, or (KV head, head size).
    pub(super) v_scale: Global<f32>,
    pub(super) per_channel: bool,
}

impl Scales {
    /// Factors of the rows `row` and `row + 8` of a work tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn factors(&self, place: Place, row: u32, p: &AttentionParams) -> [f32; 2] {
        let rows = (place.batch * p.q_heads + place.head) as usize * p.q_len as usize;
        // Rows behind the last one count as that one.
        let row = |half: u32| (place.row + row + 8 * half).min(p.q_len - 1) as usize;
        [0, 1].map(|half| self.row_factors.load(rows + row(half)))
    }

    /// Multiplies a thread's output by the scale of the values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn widen<const O: usize>(&self, o: &mut [f32; O], head: u32, p: &AttentionParams) {
        if !self.per_channel {
            let scale = self.v_scale.load(0);
            let mut i = 0;
            while i < O {
                o[i] *= scale;
                i += 1;
            }
            return;
        }
        let kv_head = quotient(head, quotient(p.q_heads, p.kv_heads));
        // Opaque, or addresses would be hoisted out of the loop over work and spilled.
        let column = opaque(lane()) % 4 * 2;
        let mut i = 0;
        while i < O {
            let column = (column + i as u32 * 2).min(p.head_size - 2);
            let scales = self.v_scale.offset((kv_head * p.head_size + column) as usize);
            let pair = [scales.load(0), scales.load(1)];
            let mut j = 0;
            while j < 4 {
                o[i + j] *= pair[j % 2];
                j += 1;
            }
            i += 4;
        }
    }
}

/// Keys of a warp's part of the values.
const KEYS: u32 = 32;
/// Columns of a thread's part, and of all threads of a warp.
const COLUMNS: u32 = 4;
const WARP_COLUMNS: u32 = 32 * COLUMNS;
/// Numbers of a vector of 16 bytes: what a thread has of a row of queries or keys.
const VECTOR: u32 = 8;
type Numbers = [f32; VECTOR as usize];
/// Rows of which a thread has vectors under way together.
const TOGETHER: u32 = 4;

/// Lanes that share a row of queries or keys: a power of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lanes(p: &AttentionParams) -> u32 {
    (p.head_size / VECTOR).next_power_of_two().min(32)
}

/// Rows of a warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rows(p: &AttentionParams) -> u32 {
    32 / lanes(p) * TOGETHER
}

/// Columns of the transposed values: whole tiles.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn transposed_keys(capacity: u32) -> u32 {
    capacity.next_multiple_of(TRANSPOSED_KEYS)
}

/// What there is to do, in warps: rows of queries, then rows of new keys, then parts of the values.
#[derive(Clone, Copy)]
struct Shares {
    queries: u32,
    keys: u32,
    values: u32,
}

impl Shares {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(p: &Float8OperandsParams) -> Self {
        let a = &p.attention;
        let parts = transposed_keys(a.capacity) / KEYS * a.head_size.div_ceil(WARP_COLUMNS);
        Self {
            queries: a.batch * a.q_heads * a.q_len.div_ceil(rows(a)),
            keys: a.batch * a.kv_heads * p.new_len.div_ceil(rows(a)),
            values: a.batch * a.kv_heads * parts,
        }
    }
}

/// Blocks of a launch of `threads` threads.
#[cfg(not(target_arch = "nvptx64"))]
pub fn operands_grid(p: &Float8OperandsParams, threads: u32, multiprocessors: u32) -> [u32; 3] {
    /// Blocks on an SM at a time, and times that these are started.
    const WAVES: u32 = 32;
    let Shares { queries, keys, values } = Shares::new(p);
    [(queries + keys + values).div_ceil(threads / 32).min(multiprocessors * WAVES), 1, 1]
}

/// What the operands come from, and where they go.
pub struct Operands<T> {
    /// Queries as given, (batch, query head, S).
    pub q: Global<T>,
    /// New keys as given, (batch, KV head, S).
    pub k: Global<T>,
    /// New values as given, likewise.
    pub v: Global<T>,
    /// Of queries and new keys.
    pub rope: Rope<T>,
    /// One, or (KV head, head size).
    pub k_scale: Global<f32>,
    /// Likewise.
    pub v_scale: Global<f32>,
    /// Lengths.
    pub seqlens_k: Global<i32>,
    /// The key cache.
    pub k_cache: Global<u64>,
    /// The value cache.
    pub v_cache: Global<u32>,
    /// Float8 queries.
    pub q_codes: Global<u64>,
    /// Row factors.
    pub row_factors: Global<f32>,
    /// Float8 values.
    pub v_codes: Global<u32>,
}

/// Writes the operands, and new rows into the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn float8_operands<T: Element>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    seqlens_k: Global<i32>,
    k_cache: Global<u64>,
    v_cache: Global<u32>,
    q_codes: Global<u64>,
    row_factors: Global<f32>,
    v_codes: Global<u32>,
    p: Float8OperandsParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary };
    let call = Operands {
        q,
        k,
        v,
        rope,
        k_scale,
        v_scale,
        seqlens_k,
        k_cache,
        v_cache,
        q_codes,
        row_factors,
        v_codes,
    };
    let Shares { queries, keys, values } = Shares::new(&p);
    let warps = block_dim() / 32;
    let first = block_idx_x() * warps + warp();
    for share in Rolled(first..queries + keys + values, grid_dim_x() * warps) {
        if share < queries {
            call.round_queries(share, &p);
        } else if share < queries + keys {
            call.append_keys(share - queries, &p);
        } else {
            call.transpose_values(share - queries - keys, &p);
        }
    }
}

/// A vector of a row of queries, keys or values.
#[derive(Clone, Copy)]
struct Vector {
    batch: u32,
    head: u32,
    row: u32,
    column: u32,
}

impl Vector {
    /// The same of a later row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn down(self, rows: u32) -> Self {
        Self { row: self.row + rows, ..self }
    }
}

impl<T: Element> Operands<T> {
    /// A warp: rows of a query head. All lanes take part in the search for each row's greatest
    /// number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn round_queries(&self, share: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let at = first_vector(share, a.q_heads, a.q_len, a);
        let kv_head = quotient(at.head, quotient(a.q_heads, a.kv_heads));
        let scales: Numbers = channel_scales(self.k_scale, kv_head, at.column, p);
        let [w, x, y, z] = self.rotated((self.q, a.q), at, a.q_len, p);
        let step = 32 / lanes(a);
        self.round_query(at, w, &scales, a);
        self.round_query(at.down(step), x, &scales, a);
        self.round_query(at.down(2 * step), y, &scales, a);
        self.round_query(at.down(3 * step), z, &scales, a);
    }

    /// A vector of a query row, and with its first one the row's factor.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn round_query(&self, at: Vector, x: Numbers, scales: &Numbers, p: &AttentionParams) {
        let x: Numbers = core::array::from_fn(|i| x[i] * scales[i]);
        let top = x.into_iter().fold(0.0, |top, x| max(top, x.abs()));
        let exponent = row_exponent(greatest(top, lanes(p)));
        if at.row >= p.q_len || at.column >= p.head_size {
            return;
        }
        let index = (at.batch * p.q_heads + at.head) as usize * p.q_len as usize + at.row as usize;
        let to = index * p.head_size as usize + at.column as usize;
        let codes = codes_of(x.map(|x| x * power_of_two(-exponent)));
        self.q_codes.store(to / size_of::<u64>(), codes);
        if at.column == 0 {
            self.row_factors.store(index, power_of_two(exponent) * (p.scale * LOG2_E));
        }
    }

    /// A warp: new rows of a key head into the cache, but for padding.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_keys(&self, share: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let at = first_vector(share, a.kv_heads, p.new_len, a);
        let scales: Numbers = channel_scales(self.k_scale, at.head, at.column, p);
        let [w, x, y, z] = self.rotated((self.k, p.new_k), at, p.new_len, p);
        let step = 32 / lanes(a);
        self.append_key(at, w, &scales, p);
        self.append_key(at.down(step), x, &scales, p);
        self.append_key(at.down(2 * step), y, &scales, p);
        self.append_key(at.down(3 * step), z, &scales, p);
    }

    /// A vector of a new key into the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_key(&self, at: Vector, x: Numbers, scales: &Numbers, p: &Float8OperandsParams) {
        let a = &p.attention;
        let seqlen = self.seqlen(at.batch, a);
        if at.row < p.new_len && at.column < a.head_size && seqlen.is_token(at.row) {
            let codes = codes_of(core::array::from_fn(|i| x[i] / scales[i]));
            let to = a.k.at(at.batch, at.head, seqlen.past + at.row) + at.column as usize;
            self.k_cache.store(to / size_of::<u64>(), codes);
        }
    }

    /// A lane's vectors of its warp's rows, of `count` that there are, rotated.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotated(
        &self,
        rows: (Global<T>, Strides),
        at: Vector,
        count: u32,
        p: &Float8OperandsParams,
    ) -> [Numbers; TOGETHER as usize] {
        let past = self.seqlen(at.batch, &p.attention).past;
        let step = 32 / lanes(&p.attention);
        [
            self.rotated_row(rows, at, count, past, p),
            self.rotated_row(rows, at.down(step), count, past, p),
            self.rotated_row(rows, at.down(2 * step), count, past, p),
            self.rotated_row(rows, at.down(3 * step), count, past, p),
        ]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotated_row(
        &self,
        (rows, strides): (Global<T>, Strides),
        at: Vector,
        count: u32,
        past: u32,
        p: &Float8OperandsParams,
    ) -> Numbers {
        if at.row >= count || at.column >= p.attention.head_size {
            return [0.0; 8];
        }
        let position = self.rope.position(at.batch, at.row, past);
        let head = strides.at(at.batch, at.head, at.row);
        unpack::<T>(self.rope.vector(rows, head, at.column, position))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn seqlen(&self, batch: u32, p: &AttentionParams) -> Seqlen {
        Seqlen::new(self.seqlens_k.load(batch as usize), p.q_len, p.capacity, p.first_prompt != 0)
    }

    /// A warp: 32 keys of up to 128 columns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn transpose_values(&self, share: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let keys = transposed_keys(a.capacity);
        let (parts, chunks) = (keys / KEYS, a.head_size.div_ceil(WARP_COLUMNS));
        let head = quotient(share, parts * chunks);
        let part = share - head * parts * chunks;
        let (chunk, batch) = (quotient(part, parts), quotient(head, a.kv_heads));
        let first = (part - chunk * parts) * KEYS;
        let column = chunk * WARP_COLUMNS + lane() * COLUMNS;
        let seqlen = self.seqlen(batch, a);
        if first >= seqlen.total.next_multiple_of(TRANSPOSED_KEYS) || column >= a.head_size {
            return;
        }
        let at = Vector { batch, head: head - batch * a.kv_heads, row: first, column };
        let to = (head * a.head_size + column) as usize * keys as usize + first as usize;
        for half in Rolled(0..KEYS / 16, 1) {
            let four = |i: u32| self.four_values(at, 16 * half + 4 * i, seqlen, p);
            let words = [four(0), four(1), four(2), four(3)];
            let to = to / 4 + (4 * half) as usize;
            let mut i = 0;
            while i < COLUMNS as usize {
                let of_column = [words[0][i], words[1][i], words[2][i], words[3][i]];
                self.v_codes.store_vec(to + i * keys as usize / 4, of_column);
                i += 1;
            }
        }
    }

    /// A word for each column: the quantized values of the keys that stand in four columns of the
    /// transposed values, from `first` on. Those of new keys go into the cache, too.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn four_values(
        &self,
        at: Vector,
        first: u32,
        seqlen: Seqlen,
        p: &Float8OperandsParams,
    ) -> [u32; 4] {
        let cached = if p.new_len > 0 { seqlen.past } else { seqlen.total };
        let keys = [0, 1, 2, 3].map(|i| at.row + key_of_column(first + i));
        let place = |key| (p.attention.v.at(at.batch, at.head, key) + at.column as usize) / 4;
        let is_new = |key| key >= cached && key < seqlen.total;
        let found = keys.map(|key| if key < cached { self.v_cache.load(place(key)) } else { 0 });
        let given = keys.map(|key| {
            let row = if is_new(key) { key - cached } else { return [0; 2] };
            self.v.load_vec8(p.new_v.at(at.batch, at.head, row) + at.column as usize)
        });
        let scales: [f32; 4] = channel_scales(self.v_scale, at.head, at.column, p);
        let code = |i: usize| {
            if !is_new(keys[i]) {
                return found[i];
            }
            let [low, high] = given[i];
            let x = unpack::<T>([low, high, 0, 0]);
            let word = word_of([0, 1, 2, 3].map(|i| x[i] / scales[i]));
            self.v_cache.store(place(keys[i]), word);
            word
        };
        transpose([code(0), code(1), code(2), code(3)])
    }
}

/// The first of a lane's vectors in a warp's part, number `share`, of (batch, head, row).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn first_vector(share: u32, heads: u32, count: u32, p: &AttentionParams) -> Vector {
    let parts = count.div_ceil(rows(p));
    let head = quotient(share, parts);
    let batch = quotient(head, heads);
    let row = (share - head * parts) * rows(p) + lane() / lanes(p);
    Vector { batch, head: head - batch * heads, row, column: lane() % lanes(p) * VECTOR }
}

/// Scales of the channels from `column` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn channel_scales<const N: usize>(
    scales: Global<f32>,
    kv_head: u32,
    column: u32,
    p: &Float8OperandsParams,
) -> [f32; N] {
    if p.per_channel == 0 {
        return [scales.load(0); N];
    }
    // Lanes behind the head's last column have none.
    let column = column.min(p.attention.head_size - N as u32);
    let first = (kv_head * p.attention.head_size + column) as usize;
    core::array::from_fn(|i| scales.load(first + i))
}

/// The greatest value of so many neighbouring lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn greatest(value: f32, lanes: u32) -> f32 {
    let (mut top, mut distance) = (value, lanes / 2);
    while distance > 0 {
        top = max(top, shfl_xor_f32(top, distance));
        distance /= 2;
    }
    top
}

/// Exponent of the least power of two that is not less than `top / 448`, among those that have an
/// inverse.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row_exponent(top: f32) -> i32 {
    /// What the mantissa of 448 lacks of all ones.
    const REST: u32 = 0x001f_ffff;
    let exponent = (((top.to_bits() + REST) >> 23) as i32) - 127 - 8;
    exponent.clamp(-120, 120)
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Four numbers as quantized values, the first in the lowest byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn word_of(x: [f32; 4]) -> u32 {
    f32x2_to_e4m3x2(x[0], x[1]) as u32 | (f32x2_to_e4m3x2(x[2], x[3]) as u32) << 16
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn codes_of(x: [f32; 8]) -> u64 {
    let [low, high] = [word_of([x[0], x[1], x[2], x[3]]), word_of([x[4], x[5], x[6], x[7]])];
    low as u64 | (high as u64) << 32
}

/// Byte `i` of word `j` becomes byte `j` of word `i`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn transpose([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let [ab, cd] = [[a, b], [c, d]].map(|[x, y]| [prmt(x, y, 0x5140), prmt(x, y, 0x7362)]);
    let turned = |i: usize, selector| prmt(ab[i], cd[i], selector);
    [turned(0, 0x5410), turned(0, 0x7632), turned(1, 0x5410), turned(1, 0x7632)]
}
