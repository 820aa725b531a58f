//! Queries over a quantized cache become halves in their tile, as the cache's values do, whatever
//! their type: each row is divided by a power of two that leaves its greatest number the highest
//! exponents of a half but one. Halves keep more bits than bfloat16, so that only numbers 2^28
//! times smaller than that one lose any. Where the keys have scales for each KV head or channel,
//! they join before.
//!
//! Where keys stay e4m3, a row is divided by the least power of two that leaves no number above
//! 448, and each number becomes the sum of two of e4m3. These have four bits each, so the sum is a
//! bfloat16 exactly, unless it is 2^10 times smaller than the greatest one; of a half, or of what
//! scales joined, eight bits are left.

use super::float8::{codes_of, power_of_two, row_exponent, row_factor};
use super::operand::Operand;
use super::scales::{HeadScales, TileRows};
use super::shape::{Tile, WARPGROUP, WARPGROUP_ROWS, swizzled};
use crate::num::{MmaElement, f16, unpack};
use crate::params::AttentionParams;
use crate::simt::*;

/// Named barriers: the threads of warpgroup w have converted their shares, 6 + w.
const CONVERTED: u32 = 6;
/// Columns of a vector.
const VECTOR: u32 = 8;
type Numbers = [f32; VECTOR as usize];
/// Vectors that a thread has under way together.
const TOGETHER: usize = 4;
type Vectors = [[u32; 4]; TOGETHER];
/// Exponent of a row's greatest number.
const TOP: i32 = 14;

/// Converts the rows of a warpgroup in its tile, times the scales of its KV head's keys where they
/// are given, and shows them to the tensor cores. What each row was divided by is in shared memory
/// then.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn convert<T: MmaElement, P: Operand, S: Tile>(
    rows: &TileRows,
    k_scale: Option<HeadScales>,
    p: &AttentionParams,
) {
    let share = Share::<S>::new(rows);
    // A loop for each, because neither should ask in every step.
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

/// What the rows `row` and `row + 8` of the block's tile were divided by.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn factors<S: Tile>(base: u32, row: u32) -> [f32; 2] {
    [0, 8].map(|below| ld_shared(base + S::FACTORS + 4 * (row + below)))
}

/// A thread's share of a warpgroup's tile: a vector of some rows.
struct Share<S> {
    tile: u32,
    /// Of the tile's rows.
    factors: u32,
    /// The first.
    row: u32,
    vector: u32,
    shape: core::marker::PhantomData<S>,
}

impl<S: Tile> Share<S> {
    /// Threads of a row.
    const LANES: u32 = S::D / VECTOR;
    /// Rows that a warpgroup converts at a time.
    const ROWS: u32 = WARPGROUP / Self::LANES;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(rows: &TileRows) -> Self {
        let factors = rows.base + S::FACTORS + 4 * rows.warpgroup * WARPGROUP_ROWS;
        // Opaque, or what follows from it would be hoisted out of the loop over work and spilled.
        let thread = opaque(thread_idx()) % WARPGROUP;
        let (row, vector) = (thread / Self::LANES, thread % Self::LANES);
        Self { tile: rows.tile, factors, row, vector, shape: core::marker::PhantomData }
    }

    /// The first rows of vectors that are under way together.
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

    /// Writes the vectors divided, with the sign of the scale, and what by.
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
            // A thread writes where others of its row, which are of its warp, have read.
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

    /// Writes a vector as sums of two numbers of e4m3: the nearest one, and the one nearest to the
    /// rest.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_sums(&self, row: u32, x: Numbers) {
        let high = codes_of(x);
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(e4m3x2_to_f16x2);
        let [[a, b], [c, d]] = [high as u32, (high >> 32) as u32].map(halves);
        let nearest: Numbers = unpack::<f16>([a, b, c, d]);
        let rest = core::array::from_fn(|i| x[i] - nearest[i]);
        let (unit, half) = (self.vector / 2, self.vector % 2 * 8);
        let place = |first: u32| self.tile + swizzled(WARPGROUP_ROWS, row, first + unit) + half;
        st_shared(place(0), high);
        st_shared(place(S::D / 16), codes_of(rest));
    }
}

/// The greatest bits, without signs, of a vector's even and odd numbers, which are ordered like
/// these.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn greatest_of_vector([a, b, c, d]: [u32; 4]) -> u32 {
    const SIZES: u32 = 0x7fff_7fff;
    max_u16x2(max_u16x2(a & SIZES, b & SIZES), max_u16x2(c & SIZES, d & SIZES))
}

/// The greatest values of the rows, of which each of the neighbouring threads has one.
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

/// Exponent of the power of two that leaves `top` the exponent [`TOP`], among those that have an
/// inverse.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn exponent(top: f32) -> i32 {
    let exponent = (top.to_bits() >> 23) as i32 - 127 - TOP;
    exponent.clamp(-120, 120)
}
