//! Converts queries over a quantized cache to float16 in their tile. Each row is divided by a power
//! of two that brings its greatest magnitude to exponent [`TOP`]. float16 has more mantissa bits
//! than bfloat16, so only values 2^28 times smaller than the greatest lose any. Per-head and
//! per-channel scales of the keys multiply the queries first.
//!
//! Where keys stay e4m3, a row is divided by the least power of two that leaves no value above 448,
//! and each value becomes the sum of two e4m3 values. Each has four significant bits, so the sum is
//! exact for a bfloat16 that is at most 2^10 times smaller than the greatest; of a float16, or of a
//! value times a scale, eight bits remain.

use super::float8::{codes_of, power_of_two, row_exponent, row_factor};
use super::operand::Operand;
use super::shape::{Tile, WARPGROUP, WARPGROUP_ROWS, swizzled};
use super::work::Slot;
use crate::concept::scales::ScalesPer;
use crate::num::{MmaElement, f16, unpack};
use crate::params::AttentionParams;
use crate::simt::*;

/// Named barrier 6 + w: the threads of warpgroup w have converted their shares.
const CONVERTED: u32 = 6;
/// Columns of a 16-byte vector.
const VECTOR: u32 = 8;
type Numbers = [f32; VECTOR as usize];
/// Vectors that a thread keeps in flight.
const TOGETHER: usize = 4;
type Vectors = [[u32; 4]; TOGETHER];
/// Exponent that a row's greatest magnitude gets.
const TOP: i32 = 14;

/// Rows of a work tile: those of warpgroup `warpgroup` lie in the Q tile at `tile`; `row` and `row
/// + 8` are the thread's.
pub(super) struct TileRows {
    pub(super) base: u32,
    pub(super) slot: Slot,
    pub(super) tile: u32,
    pub(super) warpgroup: u32,
    pub(super) row: u32,
}

/// Per-channel scales of a KV head.
#[derive(Clone, Copy)]
pub(super) struct HeadScales {
    pub(super) scales: Global<f32>,
    pub(super) per: ScalesPer,
    pub(super) kv_head: u32,
}

impl HeadScales {
    /// Scales of `N` channels from `column` on; arbitrary ones past the last column of the head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load<const N: usize>(self, column: u32, p: &AttentionParams) -> [f32; N] {
        let column = column.min(p.head_size - N as u32);
        let number = |i| self.per.number(self.kv_head, p.head_size, column + i as u32);
        core::array::from_fn(|i| self.scales.load(number(i)))
    }
}

/// Converts the rows of a warpgroup in its Q tile, times the per-channel scales of the keys if
/// `k_scale` is given, and fences them for wgmma. Leaves each row's divisor in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn convert<T: MmaElement, P: Operand, S: Tile>(
    rows: &TileRows,
    k_scale: Option<HeadScales>,
    p: &AttentionParams,
) {
    let share = Share::<S>::new(rows);
    // A loop for each case: a branch inside would cost in every iteration.
    if let Some(k_scale) = k_scale {
        let scales: Numbers = k_scale.load(share.vector * VECTOR, p);
        for first in share.rows() {
            let words = share.load(first);
            let x = words.map(|words| {
                let x = unpack::<T>(words);
                core::array::from_fn(|i| x[i] * scales[i])
            });
            let tops = x.map(|x: Numbers| x.into_iter().fold(0.0, |top, x| max(top, x.abs())));
            let tops = greatest::<S>(tops.map(f32::to_bits), |a, b| {
                max(f32::from_bits(a), f32::from_bits(b)).to_bits()
            });
            share.store::<P>(first, x, tops.map(f32::from_bits), p);
        }
    } else {
        for first in share.rows() {
            let words = share.load(first);
            let tops = greatest::<S>(words.map(greatest_of_vector), max_u16x2);
            let tops = tops.map(|top| {
                let [top, ..] = unpack::<T>([(top >> 16).max(top & 0xffff), 0, 0, 0]);
                top
            });
            share.store::<P>(first, words.map(unpack::<T>), tops, p);
        }
    }
    fence_proxy_async();
    named_barrier_sync(CONVERTED + rows.warpgroup, WARPGROUP);
}

/// The divisors of the rows `row` and `row + 8` of the CTA's tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn factors<S: Tile>(base: u32, row: u32) -> [f32; 2] {
    [0, 8].map(|below| ld_shared(base + S::FACTORS + 4 * (row + below)))
}

/// A thread's share of a warpgroup's tile: one vector of some rows.
struct Share<S> {
    tile: u32,
    /// Address of the factors of the tile's rows.
    factors: u32,
    /// The first row.
    row: u32,
    vector: u32,
    shape: core::marker::PhantomData<S>,
}

impl<S: Tile> Share<S> {
    /// Threads that share a row.
    const LANES: u32 = S::D / VECTOR;
    /// Rows that a warpgroup converts at a time.
    const ROWS: u32 = WARPGROUP / Self::LANES;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(rows: &TileRows) -> Self {
        let factors = rows.base + S::FACTORS + 4 * rows.warpgroup * WARPGROUP_ROWS;
        // opaque(): otherwise derived values are hoisted out of the loop over work tiles and spill.
        let thread = opaque(thread_idx()) % WARPGROUP;
        let (row, vector) = (thread / Self::LANES, thread % Self::LANES);
        Self { tile: rows.tile, factors, row, vector, shape: core::marker::PhantomData }
    }

    /// First rows of the passes; a pass keeps [`TOGETHER`] vectors in flight.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(&self) -> Rolled {
        Rolled(self.row..WARPGROUP_ROWS, Self::ROWS * TOGETHER as u32)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn address(&self, first: u32, n: usize) -> u32 {
        self.tile + swizzled(WARPGROUP_ROWS, first + n as u32 * Self::ROWS, self.vector)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(&self, first: u32) -> Vectors {
        core::array::from_fn(|n| ld_shared_vec(self.address(first, n)))
    }

    /// Writes the vectors divided, with the sign of the scale, and the divisors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store<P: Operand>(
        &self,
        first: u32,
        x: [Numbers; TOGETHER],
        tops: [f32; TOGETHER],
        p: &AttentionParams,
    ) {
        let sign = p.scale.to_bits() & (1 << 31);
        if P::KEEPS_KEYS {
            // A thread overwrites what other threads of its row, in its warp, have read.
            sync_warp();
        }
        let mut n = 0;
        while n < TOGETHER {
            let row = first + n as u32 * Self::ROWS;
            let sums = P::KEEPS_KEYS;
            let exponent = if sums { row_exponent(tops[n]) } else { exponent(tops[n]) };
            let factor = f32::from_bits(power_of_two(-exponent).to_bits() | sign);
            let x = x[n].map(|x| x * factor);
            if sums {
                self.store_sums(row, x);
            } else {
                let pair = |i: usize| f16::pack(x[2 * i], x[2 * i + 1]);
                st_shared_vec(self.address(first, n), [pair(0), pair(1), pair(2), pair(3)]);
            }
            if self.vector == 0 {
                st_shared(self.factors + 4 * row, row_factor(tops[n], exponent));
            }
            n += 1;
        }
    }

    /// Writes a vector as sums of two e4m3 values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_sums(&self, row: u32, x: Numbers) {
        let [high, rest] = sums_of(x);
        let (unit, half) = (self.vector / 2, self.vector % 2 * 8);
        let place = |first: u32| self.tile + swizzled(WARPGROUP_ROWS, row, first + unit) + half;
        st_shared(place(0), high);
        st_shared(place(S::D / 16), rest);
    }
}

/// Numbers of at most 448 as sums of two e4m3 values: the nearest ones, and those nearest to the
/// remainders.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(in crate::attention) fn sums_of(x: Numbers) -> [u64; 2] {
    let high = codes_of(x);
    let halves = |word: u32| [word as u16, (word >> 16) as u16].map(e4m3x2_to_f16x2);
    let [[a, b], [c, d]] = [high as u32, (high >> 32) as u32].map(halves);
    let nearest: Numbers = unpack::<f16>([a, b, c, d]);
    [high, codes_of(core::array::from_fn(|i| x[i] - nearest[i]))]
}

/// Bits of the greatest magnitudes of a vector's even and odd elements. Without the sign, floats
/// are ordered like their bits.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(in crate::attention) fn greatest_of_vector([a, b, c, d]: [u32; 4]) -> u32 {
    const SIZES: u32 = 0x7fff_7fff;
    max_u16x2(max_u16x2(a & SIZES, b & SIZES), max_u16x2(c & SIZES, d & SIZES))
}

/// Row maxima: reduces over the neighbouring threads that share a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn greatest<S: Tile>(mut tops: [u32; TOGETHER], max: impl Fn(u32, u32) -> u32) -> [u32; TOGETHER] {
    let mut distance = S::D / VECTOR / 2;
    while distance > 0 {
        let mut n = 0;
        while n < TOGETHER {
            tops[n] = max(tops[n], shfl_xor_u32(tops[n], distance));
            n += 1;
        }
        distance /= 2;
    }
    tops
}

/// Exponent of the power of two that brings `top` to exponent [`TOP`], clamped so that the inverse
/// is a normal number too.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(in crate::attention) fn exponent(top: f32) -> i32 {
    let exponent = (top.to_bits() >> 23) as i32 - 127 - TOP;
    exponent.clamp(-120, 120)
}
