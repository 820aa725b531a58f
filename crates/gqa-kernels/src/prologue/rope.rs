//! Rotary position embedding. `Rope` rotates one 16-byte vector, or two that rotate together, for
//! all kernels here; `rotary_embedding` and `rotary_rows` rotate queries, the latter element by
//! element.

use super::seqlen;
use super::walk::Walk;
use crate::num::{Element, pack, pack_pairs, unpack};
use crate::params::{PrologueParams, RotaryParams};
use crate::simt::{Global, fma};
use crate::tile::seqlens::Seqlens;

/// The rotary embedding of one call. Pair `i` of a head is rotated by the angle whose cosine and
/// sine are at column `i` of the tables, in the row of the token's position:
///
/// | | pair | becomes |
/// |---|---|---|
/// | half-split | `(x[i], x[i + dim/2])` | `(x0·cos - x1·sin, x1·cos + x0·sin)` |
/// | interleaved | `(x[2i], x[2i + 1])` | the same |
///
/// Elements are counted from `offset` on; those before it, and from `dim` on, pass through.
/// Arithmetic in f32, one rounding to `T`.
#[derive(Clone, Copy)]
pub struct Rope<T> {
    /// (max_positions, dim / 2)
    pub cos: Global<T>,
    /// (max_positions, dim / 2)
    pub sin: Global<T>,
    /// (batch, position_stride), or null: then a row's position is its index in the sequence.
    pub position_ids: Global<i64>,
    /// Number and pairing of the rotated elements.
    pub params: RotaryParams,
    /// The first of them in a head, a multiple of 8.
    pub offset: u32,
}

impl<T: Element> Rope<T> {
    /// Position of new row `s` of batch entry `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn position(&self, b: u32, s: u32, past: u32) -> i64 {
        if self.position_ids.is_null() {
            past.wrapping_add(s) as i64
        } else {
            self.position_ids.load(b as usize * self.params.position_stride as usize + s as usize)
        }
    }

    /// Elements `e ..` of the head that starts at `x[head]`, rotated. `dim/2` and, for 16-bit
    /// types, `e` are multiples of 8, so that a vector lies in one half of `dim`, or wholly outside
    /// of `dim`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn vector(&self, x: Global<T>, head: usize, e: u32, position: i64) -> [u32; 4] {
        let p = self.params;
        // Elements before `offset` wrap around.
        let turned = e.wrapping_sub(self.offset);
        if turned >= p.dim {
            return x.load_vec(head + e as usize);
        }
        let (head, e) = (head + self.offset as usize, turned);
        if position < 0 || position >= p.max_positions as i64 {
            return pack::<T>([f32::NAN; 8]);
        }
        let angles = position as usize * (p.dim / 2) as usize;
        pack::<T>(match p.interleaved {
            0 => self.half_split(x, head, e, angles),
            _ => self.interleaved(x, head, e, angles),
        })
    }

    /// Cosines and sines for [`rotate`](Self::rotate): for elements `e ..` of the first half of
    /// `dim` and the same elements of the second half; NaN at positions outside the tables.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn angles(&self, e: u32, position: i64) -> [[u32; 4]; 2] {
        let p = self.params;
        if position < 0 || position >= p.max_positions as i64 {
            return [pack::<T>([f32::NAN; 8]); 2];
        }
        let half = p.dim / 2;
        let row = position as usize * half as usize;
        let (low, high) = (row + (e / 2) as usize, row + ((e + half) / 2) as usize);
        [self.cos, self.sin].map(|table| {
            if p.interleaved == 0 {
                return table.load_vec(row + e as usize);
            }
            let ([a, b], [c, d]) = (table.load_vec8(low), table.load_vec8(high));
            [a, b, c, d]
        })
    }

    /// Rotates two vectors of a head that are half of `dim` apart, also for interleaved pairs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rotate(&self, vectors: [[u32; 4]; 2], angles: [[u32; 4]; 2]) -> [[u32; 4]; 2] {
        if self.params.interleaved == 0 {
            return turn_halves::<T>(vectors, angles);
        }
        turn_pairs::<T>(vectors, angles)
    }

    /// Moves pair number `pair` of the vectors of a head from `x[from]` to `out[to]`. The first
    /// pairs are rotated; their vectors are half of `dim` apart. The others pass through; their
    /// vectors are half of the remaining vectors apart.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn move_pair(
        &self,
        from: (Global<T>, usize),
        (out, to): (Global<T>, usize),
        at: (u32, u32),
        position: i64,
    ) {
        self.rotate_pair(from, at, position, |e, vector| out.store_vec(to + e, vector));
    }

    /// [`move_pair`](Self::move_pair) that calls `store` instead of storing: once per vector, with
    /// the index of the vector's first element in the head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rotate_pair(
        &self,
        (x, from): (Global<T>, usize),
        (pair, head_size): (u32, u32),
        position: i64,
        to: impl StoreVector,
    ) {
        let half = self.params.dim / (2 * T::PER_VEC);
        if pair >= half {
            let before = self.offset / T::PER_VEC;
            let around = Around { before, turned: 2 * half };
            return Unturned::load((x, from), around, pair - half, head_size).each(to);
        }
        let places = [pair, pair + half].map(|n| (self.offset + n * T::PER_VEC) as usize);
        let vectors = places.map(|place| x.load_vec(from + place));
        let angles = self.angles(pair * T::PER_VEC, position);
        let rotated = self.rotate(vectors, angles);
        to.store(places[0], rotated[0]);
        to.store(places[1], rotated[1]);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn half_split(&self, x: Global<T>, head: usize, e: u32, angles: usize) -> [f32; 8] {
        let half = self.params.dim / 2;
        let first = e < half;
        let (angle, partner) = if first { (e, e + half) } else { (e - half, e - half) };
        let sign = if first { -1.0 } else { 1.0 };
        let own = unpack::<T>(x.load_vec(head + e as usize));
        let other = unpack::<T>(x.load_vec(head + partner as usize));
        let cos = unpack::<T>(self.cos.load_vec(angles + angle as usize));
        let sin = unpack::<T>(self.sin.load_vec(angles + angle as usize));
        core::array::from_fn(|i| fma(own[i], cos[i], sign * other[i] * sin[i]))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn interleaved(&self, x: Global<T>, head: usize, e: u32, angles: usize) -> [f32; 8] {
        let pairs = |[a, b]: [u32; 2]| unpack::<T>([a, b, 0, 0]);
        let own = unpack::<T>(x.load_vec(head + e as usize));
        let cos = pairs(self.cos.load_vec8(angles + (e / 2) as usize));
        let sin = pairs(self.sin.load_vec8(angles + (e / 2) as usize));
        core::array::from_fn(|i| {
            let sign = if i % 2 == 0 { -1.0 } else { 1.0 };
            fma(own[i], cos[i / 2], sign * own[i ^ 1] * sin[i / 2])
        })
    }
}

/// Rotates two vectors with half-split pairs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn turn_halves<T: Element>(vectors: [[u32; 4]; 2], angles: [[u32; 4]; 2]) -> [[u32; 4]; 2] {
    let ([low, high], [cos, sin]) = (vectors.map(unpack::<T>), angles.map(unpack::<T>));
    let rotated: [[f32; 8]; 2] = [
        core::array::from_fn(|i| fma(low[i], cos[i], -(high[i] * sin[i]))),
        core::array::from_fn(|i| fma(high[i], cos[i], low[i] * sin[i])),
    ];
    rotated.map(pack_pairs::<T>)
}

/// Rotates two vectors with interleaved pairs: the first by the first half of the angles, the
/// second by the other half.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn turn_pairs<T: Element>(vectors: [[u32; 4]; 2], angles: [[u32; 4]; 2]) -> [[u32; 4]; 2] {
    let ([low, high], [cos, sin]) = (vectors.map(unpack::<T>), angles.map(unpack::<T>));
    let rotated = |x: [f32; 8], first: usize| {
        core::array::from_fn(|i| {
            let (sign, angle) = (if i % 2 == 0 { -1.0 } else { 1.0 }, first + i / 2);
            fma(x[i], cos[angle], sign * x[i ^ 1] * sin[angle])
        })
    };
    [rotated(low, 0), rotated(high, T::PER_VEC as usize / 2)].map(pack_pairs::<T>)
}

/// Number of pairs of vectors of a head; if the number of vectors is odd, one pair has one vector.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pairs(head_size: u32, per_vec: u32) -> u32 {
    (head_size / per_vec).div_ceil(2)
}

/// Takes a row's vectors. Closures do; a store of many instructions has a type of its own, as the
/// compiler calls a long closure that has several call sites.
pub trait StoreVector {
    /// Stores the vector of elements from `e` on.
    fn store(&self, e: usize, vector: [u32; 4]);
}

impl<F: Fn(usize, [u32; 4])> StoreVector for F {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store(&self, e: usize, vector: [u32; 4]) {
        self(e, vector);
    }
}

/// The vectors of a head that rotate, around which the others pass through.
#[derive(Clone, Copy)]
pub(super) struct Around {
    /// Vectors before them.
    pub before: u32,
    /// Their number.
    pub turned: u32,
}

impl Around {
    /// All vectors pass through.
    pub const NOTHING: Self = Self { before: 0, turned: 0 };

    /// Vector number `nth` of those that pass through.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vector(self, nth: u32) -> u32 {
        if nth < self.before { nth } else { self.turned + nth }
    }
}

/// Two vectors of a head that pass through unrotated, each with its first element's index in the
/// head. The second may be missing.
pub(super) struct Unturned {
    low: (usize, [u32; 4]),
    high: Option<(usize, [u32; 4])>,
}

impl Unturned {
    /// Loads pair number `pair` of the vectors that pass through, of the head that starts at
    /// `x[from]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load<T: Element>(
        (x, from): (Global<T>, usize),
        around: Around,
        pair: u32,
        head_size: u32,
    ) -> Self {
        let vectors = head_size / T::PER_VEC - around.turned;
        let high = pair + vectors.div_ceil(2);
        let vector = |nth: u32| {
            let element = (around.vector(nth) * T::PER_VEC) as usize;
            (element, x.load_vec(from + element))
        };
        Self { low: vector(pair), high: (high < vectors).then(|| vector(high)) }
    }

    /// The same pair, filled with zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn zero<T: Element>(pair: u32, head_size: u32) -> Self {
        let vectors = head_size / T::PER_VEC;
        let vector = |number: u32| ((number * T::PER_VEC) as usize, [0; 4]);
        let high = pair + vectors.div_ceil(2);
        Self { low: vector(pair), high: (high < vectors).then(|| vector(high)) }
    }

    /// Stores the vectors to the head that starts at `out[to]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store<T: Element>(self, (out, to): (Global<T>, usize)) {
        self.each(|e, vector| out.store_vec(to + e, vector));
    }

    /// Passes the vectors to `to`, each with its element index.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn each(self, to: impl StoreVector) {
        to.store(self.low.0, self.low.1);
        if let Some((element, vector)) = self.high {
            to.store(element, vector);
        }
    }
}

/// Index space of [`rotary_embedding`]: (batch, row, query head, pair of vectors).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rotary_embedding_size(p: &PrologueParams, per_vec: u32) -> [u32; 4] {
    [p.batch, p.q_len, p.q_heads, pairs(p.head_size, per_vec)]
}

/// Rotates every query head from `q` into `q_out`, padding rows included.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rotary_embedding<T: Element>(
    q: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    seqlens: Seqlens,
    q_out: Global<T>,
    p: PrologueParams,
) {
    let rope = Rope { cos, sin, position_ids, params: p.rotary, offset: p.rope_offset };
    for [b, s, head, pair] in Walk::over(rotary_embedding_size(&p, T::PER_VEC)) {
        let position = rope.position(b, s, seqlen(&p, seqlens, b).past);
        let (from, to) = ((q, p.q.at(b, head, s)), (q_out, p.q_out.at(b, head, s)));
        rope.move_pair(from, to, (pair, p.head_size), position);
    }
}

/// Index space of [`rotary_rows`]: (batch, row, query head, element).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rotary_rows_size(p: &PrologueParams) -> [u32; 4] {
    [p.batch, p.q_len, p.q_heads, p.head_size]
}

/// Rotates every query head from `q` into `q_out`. Heads may have any size, and any even number of
/// their elements rotates; position_ids must be given.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn rotary_rows<T: Element>(
    q: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    position_ids: Global<i64>,
    q_out: Global<T>,
    p: PrologueParams,
) {
    for [b, s, head, e] in Walk::over(rotary_rows_size(&p)) {
        let from = p.q.at(b, head, s);
        let own = q.load(from + e as usize).to_f32();
        let mut value = own;
        if e < p.rotary.dim {
            let position =
                position_ids.load(b as usize * p.rotary.position_stride as usize + s as usize);
            let half = p.rotary.dim / 2;
            let (pair, first) =
                if p.rotary.interleaved != 0 { (e / 2, e % 2 == 0) } else { (e % half, e < half) };
            let distance = if p.rotary.interleaved != 0 { 1 } else { half };
            let partner = if first { e + distance } else { e - distance };
            let other = q.load(from + partner as usize).to_f32();
            let sign = if first { -1.0 } else { 1.0 };
            value = if position < 0 || position >= p.rotary.max_positions as i64 {
                f32::NAN
            } else {
                let angle = position as usize * half as usize + pair as usize;
                fma(own, cos.load(angle).to_f32(), sign * other * sin.load(angle).to_f32())
            };
        }
        q_out.store(p.q_out.at(b, head, s) + e as usize, T::from_f32(value));
    }
}
