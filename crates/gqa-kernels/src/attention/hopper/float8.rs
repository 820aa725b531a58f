//! e4m3 operands: attention over an e4m3 cache multiplies them, at twice the rate, instead of
//! elements.
//!
//! - float8 queries (batch, query head, S, head size): rotated queries times `k_scale`, each row
//!   divided by a power of two, rounded
//! - row factors (batch, query head, S), f32: that power of two, times `scale · log2 e`
//! - keys: the cache, (batch, KV head, capacity, head size)
//! - float8 values (batch, KV head, head size, keys): Vᵀ in key tiles of 128 columns in the order
//!   of [`key_of_column`], 0 from the end of the sequence to the end of its last tile. For head
//!   sizes over 128 there are 128 rows, and in each tile the remaining rows lie beside the first
//!   128.
//!
//! [`float8_operands`] writes all of them in one pass over queries, new tokens and the value cache.
//! If the new tokens are in the cache already and the queries are rotated, it does the rest.
//!
//! The power of two is the least one for which no query exceeds 448, so that only rounding loses
//! precision. P is rounded to e4m3 too, relative to a row maximum that gives the greatest P 64 to
//! 256; `v_scale` multiplies the output. The row sums are sums of rounded P.

use super::operand::key_of_column;
use super::shape::{TRANSPOSED_COLUMNS, TRANSPOSED_ROWS};
use super::work::Place;
use crate::concept::scales::ScalesPer;
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::LOG2_E;
use crate::num::{Element, quotient, unpack};
use crate::params::{AttentionParams, Float8OperandsParams, Strides};
use crate::prologue::quantize::Divisors;
use crate::prologue::rope::Rope;
use crate::simt::*;
use crate::tile::seqlens::Seqlens;

/// Factors that turn e4m3 products into scores and outputs.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    /// (batch, query head, S)
    pub(super) row_factors: Global<f32>,
    /// One scale, (KV head) or (KV head, head size).
    pub(super) v_scale: Global<f32>,
    /// Which of these shapes `v_scale` has.
    pub(super) per: ScalesPer,
}

impl Scales {
    /// Factors of the rows `row` and `row + 8` of a work tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn factors(&self, place: Place, row: u32, p: &AttentionParams) -> [f32; 2] {
        let rows = (place.batch * p.q_heads + place.head) as usize * p.q_len as usize;
        // Padding rows read the last row's factor.
        let row = |half: u32| (place.row + row + 8 * half).min(p.q_len - 1) as usize;
        [0, 1].map(|half| self.row_factors.load(rows + row(half)))
    }

    /// Multiplies a thread's output by the scale of the values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn widen<const O: usize>(&self, o: &mut [f32; O], head: u32, p: &AttentionParams) {
        let kv_head = kv_head(head, p);
        if !self.per.channel {
            let scale = self.v_scale.load(self.per.number(kv_head, p.head_size, 0));
            let mut i = 0;
            while i < O {
                o[i] *= scale;
                i += 1;
            }
            return;
        }
        // opaque(): otherwise addresses are hoisted out of the loop over work tiles and spill.
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

/// Keys that a warp transposes at a time.
const KEYS: u32 = 32;
/// Columns that a thread transposes, and columns of its warp.
const COLUMNS: u32 = 4;
const WARP_COLUMNS: u32 = 32 * COLUMNS;
const _: () = assert!(WARP_COLUMNS == TRANSPOSED_ROWS);
/// Elements of a 16-byte vector.
const VECTOR: u32 = 8;
type Numbers = [f32; VECTOR as usize];
/// Elements of a row of queries or keys that a thread holds: two vectors, which rotate together.
const PAIR: u32 = 2 * VECTOR;
/// Heads whose vectors a thread keeps in flight. All heads rotate by the same angles.
const TOGETHER: u32 = 4;

/// Lanes that share a row of queries or keys: a power of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lanes(p: &AttentionParams) -> u32 {
    (p.head_size / PAIR).next_power_of_two().min(32)
}

/// Rows that a warp processes at a time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rows(p: &AttentionParams) -> u32 {
    32 / lanes(p)
}

/// Warps needed for `count` rows of `heads` heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn row_shares(heads: u32, count: u32, p: &AttentionParams) -> u32 {
    p.batch * heads.div_ceil(TOGETHER) * count.div_ceil(rows(p))
}

/// Rows of a head of Vᵀ.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn transposed_rows(head_size: u32) -> u32 {
    head_size.min(TRANSPOSED_ROWS)
}

/// Columns of Vᵀ: whole tiles, each of `keys` keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn transposed_columns(capacity: u32, keys: u32) -> u32 {
    quotient(capacity + keys - 1, keys) * TRANSPOSED_COLUMNS
}

/// Parts, of [`KEYS`] keys, of a head of Vᵀ, for its first columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn value_parts(p: &Float8OperandsParams) -> u32 {
    quotient(p.attention.capacity + p.tile_keys - 1, p.tile_keys) * (p.tile_keys / KEYS)
}

/// Warp counts of the three kinds of work, in this order: query rows, new key rows, parts of V.
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
        let parts = value_parts(p) * a.head_size.div_ceil(WARP_COLUMNS);
        Self {
            queries: row_shares(a.q_heads, a.q_len, a),
            keys: row_shares(a.kv_heads, p.new_len, a),
            values: a.batch * a.kv_heads * parts,
        }
    }
}

/// Grid of a launch with `threads` threads per CTA.
#[cfg(not(target_arch = "nvptx64"))]
pub fn operands_grid(p: &Float8OperandsParams, threads: u32, multiprocessors: u32) -> [u32; 3] {
    /// Resident CTAs per SM times waves.
    const WAVES: u32 = 32;
    let Shares { queries, keys, values } = Shares::new(p);
    [(queries + keys + values).div_ceil(threads / 32).min(multiprocessors * WAVES), 1, 1]
}

/// Inputs and outputs of the pass that writes the operands.
pub struct Operands<T> {
    /// Given queries, (batch, query head, S).
    pub q: Global<T>,
    /// Given new keys, (batch, KV head, S).
    pub k: Global<T>,
    /// Given new values, (batch, KV head, S).
    pub v: Global<T>,
    /// Rotary embedding of queries and new keys.
    pub rope: Rope<T>,
    /// One scale, or (KV head, head size).
    pub k_scale: Global<f32>,
    /// One scale, (KV head) or (KV head, head size).
    pub v_scale: Global<f32>,
    /// Sequence lengths.
    pub seqlens: Seqlens,
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

/// Writes the operands, and appends new tokens to the cache.
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
    seqlens: Seqlens,
    k_cache: Global<u64>,
    v_cache: Global<u32>,
    q_codes: Global<u64>,
    row_factors: Global<f32>,
    v_codes: Global<u32>,
    p: Float8OperandsParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: 0 };
    let call = Operands {
        q,
        k,
        v,
        rope,
        k_scale,
        v_scale,
        seqlens,
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

/// Four columns, from `column` on, of a warp's 32 keys from `first` on.
#[derive(Clone, Copy)]
struct Keys {
    batch: u32,
    head: u32,
    first: u32,
    column: u32,
}

/// A lane's part of a row of some heads: two vectors per head.
#[derive(Clone, Copy)]
struct Part {
    batch: u32,
    /// The first of [`TOGETHER`] heads.
    head: u32,
    row: u32,
    /// First elements of the two vectors.
    columns: [u32; 2],
    /// Whether rotary embedding covers them.
    turns: bool,
    /// Whether the row exists and is that long.
    exists: bool,
}

impl<T: Element> Operands<T> {
    /// Run by a warp: quantizes some rows of some query heads. All lanes take part in each row's
    /// maximum reduction.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn round_queries(&self, share: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let part = self.part(share, a.q_heads, a.q_len, p);
        let vectors = self.load(part, (self.q, a.q), a.q_heads);
        let angles = self.angles(part, a);
        let group = quotient(a.q_heads, a.kv_heads);
        let mut i = 0;
        while i < TOGETHER {
            let head = part.head + i;
            let x = self.turned(part, vectors[i as usize], angles);
            let kv_head = quotient(head.min(a.q_heads - 1), group);
            self.round_query(Part { head, ..part }, x, kv_head, p);
            i += 1;
        }
    }

    /// Writes a lane's part of a query row; the row's first lane writes the row factor too.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn round_query(&self, at: Part, x: [Numbers; 2], kv_head: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let scales = at.columns.map(|column| channel_scales(self.k_scale, kv_head, column, p));
        let x = [0, 1].map(|n: usize| times(x[n], scales[n]));
        let top = x.as_flattened().iter().fold(0.0, |top, x: &f32| max(top, x.abs()));
        let top = greatest(top, lanes(a));
        let exponent = row_exponent(top);
        if !at.exists || at.head >= a.q_heads {
            return;
        }
        let index = (at.batch * a.q_heads + at.head) as usize * a.q_len as usize + at.row as usize;
        let factor = power_of_two(-exponent);
        let mut n = 0;
        while n < 2 {
            let to = index * a.head_size as usize + at.columns[n] as usize;
            self.q_codes.store(to / size_of::<u64>(), codes_of(x[n].map(|x| x * factor)));
            n += 1;
        }
        if at.columns[0] == 0 {
            self.row_factors.store(index, row_factor(top, exponent) * (a.scale * LOG2_E));
        }
    }

    /// Run by a warp: appends new rows of some KV heads to the key cache, except padding.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn append_keys(&self, share: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let part = self.part(share, a.kv_heads, p.new_len, p);
        let vectors = self.load(part, (self.k, p.new_k), a.kv_heads);
        let angles = self.angles(part, a);
        let seqlen = self.seqlen(part.batch, a);
        if !part.exists || !seqlen.is_token(part.row) {
            return;
        }
        let scales = Divisors::new(self.k_scale, ScalesPer::new(p.scales));
        let mut i = 0;
        while i < TOGETHER && part.head + i < a.kv_heads {
            let head = part.head + i;
            let x = self.turned(part, vectors[i as usize], angles);
            let row = a.k.at(part.batch, head, seqlen.past + part.row);
            let scales = scales.of_head(head, a.head_size);
            let mut n = 0;
            while n < 2 {
                let channel = |i| part.columns[n] + i as u32;
                let divided = core::array::from_fn(|i| scales.of(channel(i)).divide(x[n][i]));
                let codes = codes_of(divided);
                let to = row + part.columns[n] as usize;
                self.k_cache.store(to / size_of::<u64>(), codes);
                n += 1;
            }
            i += 1;
        }
    }

    /// This lane's part in warp share `share` of `count` rows of `heads` heads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn part(&self, share: u32, heads: u32, count: u32, p: &Float8OperandsParams) -> Part {
        let a = &p.attention;
        let (row_parts, head_parts) = (count.div_ceil(rows(a)), heads.div_ceil(TOGETHER));
        let above = quotient(share, row_parts);
        let batch = quotient(above, head_parts);
        let row = (share - above * row_parts) * rows(a) + lane() / lanes(a);
        let pair = lane() % lanes(a);
        let exists = row < count && pair * PAIR < a.head_size;
        // Nonexistent parts read the last one and write nothing.
        let pair = pair.min(a.head_size / PAIR - 1);
        let (half, turning) = (self.rope.params.dim / PAIR, self.rope.params.dim / VECTOR);
        let turns = pair < half;
        let columns = if turns {
            [pair, pair + half]
        } else {
            let low = turning + pair - half;
            [low, low + a.head_size / PAIR - half]
        };
        Part {
            batch,
            head: (above - batch * head_parts) * TOGETHER,
            row: row.min(count - 1),
            columns: columns.map(|vector| vector * VECTOR),
            turns,
            exists,
        }
    }

    /// Loads a lane's vectors of some heads, all in flight together.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(
        &self,
        at: Part,
        (rows, strides): (Global<T>, Strides),
        heads: u32,
    ) -> [[[u32; 4]; 2]; TOGETHER as usize] {
        core::array::from_fn(|i| {
            let head = (at.head + i as u32).min(heads - 1);
            let row = strides.at(at.batch, head, at.row);
            at.columns.map(|column| rows.load_vec(row + column as usize))
        })
    }

    /// Rotary angles of the part.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn angles(&self, at: Part, p: &AttentionParams) -> [[u32; 4]; 2] {
        if !at.turns {
            return [[0; 4]; 2];
        }
        let past = self.seqlen(at.batch, p).past;
        self.rope.angles(at.columns[0], self.rope.position(at.batch, at.row, past))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn turned(&self, at: Part, vectors: [[u32; 4]; 2], angles: [[u32; 4]; 2]) -> [Numbers; 2] {
        let turned = if at.turns { self.rope.rotate(vectors, angles) } else { vectors };
        turned.map(unpack::<T>)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn seqlen(&self, batch: u32, p: &AttentionParams) -> Seqlen {
        self.seqlens.get(batch, p)
    }

    /// Run by a warp: transposes 32 keys of up to 128 columns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn transpose_values(&self, share: u32, p: &Float8OperandsParams) {
        let a = &p.attention;
        let (parts, chunks) = (value_parts(p), a.head_size.div_ceil(WARP_COLUMNS));
        let head = quotient(share, parts * chunks);
        let part = share - head * parts * chunks;
        let (chunk, batch) = (quotient(part, parts), quotient(head, a.kv_heads));
        let first = (part - chunk * parts) * KEYS;
        let column = chunk * WARP_COLUMNS + lane() * COLUMNS;
        let seqlen = self.seqlen(batch, a);
        let tile = quotient(first, p.tile_keys);
        if tile * p.tile_keys >= seqlen.total || column >= a.head_size {
            return;
        }
        let at = Keys { batch, head: head - batch * a.kv_heads, first, column };
        let columns = transposed_columns(a.capacity, p.tile_keys) as usize;
        let within = chunk * p.tile_keys + first - tile * p.tile_keys;
        let row = head * transposed_rows(a.head_size) + lane() * COLUMNS;
        let to = row as usize * columns + (tile * TRANSPOSED_COLUMNS + within) as usize;
        for half in Rolled(0..KEYS / 16, 1) {
            let four = |i: u32| self.four_values(at, 16 * half + 4 * i, seqlen, p);
            let words = [four(0), four(1), four(2), four(3)];
            let to = to / 4 + (4 * half) as usize;
            let mut i = 0;
            while i < COLUMNS as usize {
                let of_column = [words[0][i], words[1][i], words[2][i], words[3][i]];
                self.v_codes.store_vec(to + i * columns / 4, of_column);
                i += 1;
            }
        }
    }

    /// A word for each column: the quantized values of the keys in four columns of Vᵀ, from `first`
    /// on. Also appends new keys' values to the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn four_values(
        &self,
        at: Keys,
        first: u32,
        seqlen: Seqlen,
        p: &Float8OperandsParams,
    ) -> [u32; 4] {
        let cached = if p.new_len > 0 { seqlen.past } else { seqlen.total };
        let keys = [0, 1, 2, 3].map(|i| at.first + key_of_column(first + i));
        let place = |key| (p.attention.v.at(at.batch, at.head, key) + at.column as usize) / 4;
        let is_new = |key| key >= cached && key < seqlen.total;
        let found = keys.map(|key| if key < cached { self.v_cache.load(place(key)) } else { 0 });
        let given = keys.map(|key| {
            let row = if is_new(key) { key - cached } else { return [0; 2] };
            self.v.load_vec8(p.new_v.at(at.batch, at.head, row) + at.column as usize)
        });
        let scales = Divisors::new(self.v_scale, ScalesPer::new(p.scales));
        let scales = scales.of_head(at.head, p.attention.head_size);
        let code = |i: usize| {
            if !is_new(keys[i]) {
                return found[i];
            }
            let [low, high] = given[i];
            let x = unpack::<T>([low, high, 0, 0]);
            let word =
                word_of([0, 1, 2, 3].map(|i| scales.of(at.column + i).divide(x[i as usize])));
            self.v_cache.store(place(keys[i]), word);
            word
        };
        transpose([code(0), code(1), code(2), code(3)])
    }
}

/// Scales of the channels from `column` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn channel_scales<const N: usize>(
    scales: Global<f32>,
    kv_head: u32,
    column: u32,
    p: &Float8OperandsParams,
) -> [f32; N] {
    let (per, head_size) = (ScalesPer::new(p.scales), p.attention.head_size);
    // Clamped for lanes past the last column of the head.
    let column = column.min(head_size - N as u32);
    core::array::from_fn(|i| scales.load(per.number(kv_head, head_size, column + i as u32)))
}

/// The KV head of a query head.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn kv_head(head: u32, p: &AttentionParams) -> u32 {
    quotient(head, quotient(p.q_heads, p.kv_heads))
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn times(x: Numbers, factors: Numbers) -> Numbers {
    core::array::from_fn(|i| x[i] * factors[i])
}

/// Maximum over each group of `lanes` neighbouring lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn greatest(value: f32, lanes: u32) -> f32 {
    let (mut top, mut distance) = (value, lanes / 2);
    while distance > 0 {
        top = max(top, shfl_xor_f32(top, distance));
        distance /= 2;
    }
    top
}

/// Exponent of the least power of two that is not less than `top / 448`, clamped so that the
/// inverse is a normal number too.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(in crate::attention) fn row_exponent(top: f32) -> i32 {
    /// Mantissa of all ones minus the mantissa of 448.
    const REST: u32 = 0x001f_ffff;
    let exponent = (((top.to_bits() + REST) >> 23) as i32) - 127 - 8;
    exponent.clamp(-120, 120)
}

/// The power of two that a row was divided by; NaN where `top` is infinite, which e4m3 cannot hold.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(in crate::attention) fn row_factor(top: f32, exponent: i32) -> f32 {
    power_of_two(exponent) + 0.0 * top
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(in crate::attention) fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Quantizes four values to e4m3, the first in the lowest byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn word_of(x: [f32; 4]) -> u32 {
    f32x4_to_e4m3x4(x)
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn codes_of(x: [f32; 8]) -> u64 {
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
