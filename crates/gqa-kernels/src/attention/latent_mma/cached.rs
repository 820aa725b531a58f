//! The cells of a cache row, elements or quantized values, and how they become MMA operands.
//!
//! Both products read 16-byte units by `ldmatrix`, which moves 16 bits at a time: one element, or
//! two quantized values. From a tile of 8 rows by one unit of quantized values a lane gets
//!
//! ```text
//! keys     values 4t .. 4t + 4 of row l/4                          t = l % 4
//! values   values 2(l/4) and 2(l/4) + 1 of rows 2t and 2t + 1
//! ```
//!
//! So the queries must have their columns in the order of the keys, and of two 8-column MMA tiles
//! of the output the first has the even columns of a unit, the second the odd ones.

use crate::attention::hopper::{exponent, power_of_two};
use crate::num::{Float8, MmaCode, MmaElement, f16};
use crate::simt::*;
use crate::tile::fragment::{Fragments, row_of};
use crate::tile::quad::transpose;
use crate::tile::swizzle::{Swizzled, WarpRead, swizzled_bytes};
use bytemuck::Pod;

/// 16-byte units of a row of the queries.
pub(super) const QUERY_UNITS: usize = 72;
/// A operands of 16 query rows, for each 16 channels.
pub type Queries = [[u32; 4]; QUERY_UNITS / 2];

/// The type of cache: elements or quantized values.
pub trait Cached {
    /// Type of a cell.
    type Cell<T: MmaElement>: Pod;
    /// Operand type of the tensor cores if queries are `T`.
    type Operand<T: MmaElement>: MmaElement;
    /// Cells in 16 bytes.
    const PER_UNIT: u32;
    /// Whether cells are converted to operands. Then the scale of the cache and the divisors of the
    /// queries multiply the results.
    const CONVERTS: bool;
    /// B operands that a lane gets from one `ldmatrix` of four matrices.
    const OPERANDS: usize;

    /// A operands of the 16 rows of a tile, and the divisors of the lane's two rows.
    fn queries<T: MmaElement>(tile: Swizzled<T, QUERY_UNITS>) -> (Queries, [f32; 2]);
    /// B operands of four units of 8 keys, in the order of their channels; the first
    /// [`OPERANDS`](Self::OPERANDS) are used.
    fn keys(words: [u32; 4]) -> [[u32; 2]; 4];
    /// B operands of two units of 16 values, in the order of the output's MMA tiles; the first
    /// [`OPERANDS`](Self::OPERANDS) are used.
    fn values(words: [u32; 4]) -> [[u32; 2]; 4];
    /// Writes a lane's columns of a row, times a factor, from element `at` on, which is the first
    /// of the warp's columns. All lanes call it.
    fn store<T: MmaElement, const D8: usize>(
        out: &Fragments<1, D8>,
        half: usize,
        factor: f32,
        to: Global<T>,
        at: Option<usize>,
    );
    /// The same in f32.
    fn store_part<const D8: usize>(
        out: &Fragments<1, D8>,
        half: usize,
        factor: f32,
        to: Global<f32>,
        at: usize,
    );

    /// `scores = queries · keysᵀ` of `N8` 8-key MMA tiles. Each tile accumulates in `sums`
    /// independent sums, a constant up to 4, so that an MMA need not wait for the previous one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores<T: MmaElement, const UNITS: usize, const N8: usize>(
        queries: &Queries,
        keys: Swizzled<Self::Cell<T>, UNITS>,
        sums: usize,
    ) -> Fragments<1, N8> {
        let mut parts = [[[0.0; 4]; 4]; N8];
        let place = keys.place(lane() % 8, lane() / 8).address();
        for i in 0..UNITS / 4 {
            for n in 0..N8 {
                let place = further::<UNITS>(place, 4 * i);
                let words = ldmatrix_x4(place + swizzled_bytes(8 * n as u32, UNITS));
                let operands = Self::keys(words);
                for step in 0..Self::OPERANDS {
                    let depth = Self::OPERANDS * i + step;
                    let part = &mut parts[n][depth % sums];
                    Self::Operand::<T>::mma(part, queries[depth], operands[step]);
                }
            }
        }
        let mut scores = [[0.0; 4]; N8];
        for n in 0..N8 {
            for i in 0..4 {
                let [a, b, c, d] = parts[n];
                scores[n][i] = match sums {
                    1 => a[i],
                    2 => a[i] + b[i],
                    _ => (a[i] + b[i]) + (c[i] + d[i]),
                };
            }
        }
        [scores]
    }

    /// `out += weights · values` over `K8` 8-key MMA tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn accumulate<T: MmaElement, const UNITS: usize, const D8: usize, const K8: usize>(
        out: &mut Fragments<1, D8>,
        weights: Swizzled<Self::Operand<T>, K8>,
        values: Swizzled<Self::Cell<T>, UNITS>,
    ) {
        let place = values.place(lane() % 16, lane() / 16).address();
        let read_weights = WarpRead::<K8>::by_columns(lane());
        for depth in 0..K8 / 2 {
            let a = ldmatrix_x4(read_weights.address(weights, 0, depth));
            for pair in 0..D8 / Self::OPERANDS {
                let place =
                    further::<UNITS>(place, 2 * pair) + swizzled_bytes(16 * depth as u32, UNITS);
                let operands = Self::values(ldmatrix_x4_trans(place));
                for i in 0..Self::OPERANDS {
                    let block = Self::OPERANDS * pair + i;
                    Self::Operand::<T>::mma(&mut out[0][block], a, operands[i]);
                }
            }
        }
    }
}

/// A cache of elements, of the type of the queries.
pub struct Elements;

impl Cached for Elements {
    type Cell<T: MmaElement> = T;
    type Operand<T: MmaElement> = T;
    const PER_UNIT: u32 = 8;
    const CONVERTS: bool = false;
    const OPERANDS: usize = 2;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement>(tile: Swizzled<T, QUERY_UNITS>) -> (Queries, [f32; 2]) {
        let read = WarpRead::by_columns(lane());
        let mut queries = [[0; 4]; QUERY_UNITS / 2];
        for depth in 0..QUERY_UNITS / 2 {
            queries[depth] = ldmatrix_x4(read.address(tile, 0, depth));
        }
        (queries, [1.0; 2])
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keys([a, b, c, d]: [u32; 4]) -> [[u32; 2]; 4] {
        [[a, b], [c, d], [0; 2], [0; 2]]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values(words: [u32; 4]) -> [[u32; 2]; 4] {
        Self::keys(words)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store<T: MmaElement, const D8: usize>(
        out: &Fragments<1, D8>,
        half: usize,
        factor: f32,
        to: Global<T>,
        at: Option<usize>,
    ) {
        for group in 0..D8 / 4 {
            let words = core::array::from_fn(|i| {
                let pair = &out[0][4 * group + i];
                T::pack(times(pair[2 * half], factor), times(pair[2 * half + 1], factor))
            });
            let words = transpose(words, lane());
            if let Some(at) = at {
                to.store_vec(at + group * 32 + (lane() % 4 * 8) as usize, words);
            }
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_part<const D8: usize>(
        out: &Fragments<1, D8>,
        half: usize,
        factor: f32,
        to: Global<f32>,
        at: usize,
    ) {
        for block in 0..D8 {
            let pair = [0, 1].map(|i| times(out[0][block][2 * half + i], factor).to_bits());
            to.store_vec8(at + block * 8 + (lane() % 4 * 2) as usize, pair);
        }
    }
}

/// A cache of float8e4m3fn with one scale.
pub struct Codes;

impl Cached for Codes {
    type Cell<T: MmaElement> = u8;
    type Operand<T: MmaElement> = f16;
    const PER_UNIT: u32 = 16;
    const CONVERTS: bool = true;
    const OPERANDS: usize = 4;

    /// Each row is divided by a power of two so that its elements fit float16.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement>(tile: Swizzled<T, QUERY_UNITS>) -> (Queries, [f32; 2]) {
        let mut tops = [0.0; 2];
        for depth in Rolled(0..QUERY_UNITS as u32 / 2, 1) {
            let words = words(tile, depth);
            for i in 0..4 {
                let [low, high] = T::halves(words[i]);
                tops[i % 2] = max(tops[i % 2], max(low.abs(), high.abs()));
            }
        }
        let exponents = tops.map(|top| {
            let top = max(top, shfl_xor_f32(top, 1));
            exponent(max(top, shfl_xor_f32(top, 2)))
        });
        let factors = exponents.map(|exponent| power_of_two(-exponent));
        let mut queries = [[0; 4]; QUERY_UNITS / 2];
        for depth in 0..QUERY_UNITS / 2 {
            let words = words(tile, depth as u32);
            for i in 0..4 {
                let [low, high] = T::halves(words[i]);
                queries[depth][i] = f16::pack(low * factors[i % 2], high * factors[i % 2]);
            }
        }
        (queries, exponents.map(power_of_two))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keys(words: [u32; 4]) -> [[u32; 2]; 4] {
        words.map(|word| {
            let [low, high, ..] = Float8.in_order(word);
            [low, high]
        })
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values(words: [u32; 4]) -> [[u32; 2]; 4] {
        let [a, b, c, d] = words.map(|word| Float8.halves(word, false));
        [[a[0], b[0]], [a[1], b[1]], [c[0], d[0]], [c[1], d[1]]]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store<T: MmaElement, const D8: usize>(
        out: &Fragments<1, D8>,
        half: usize,
        factor: f32,
        to: Global<T>,
        at: Option<usize>,
    ) {
        let Some(at) = at else { return };
        for unit in 0..D8 / 2 {
            let [a, b, c, d] = columns(out, half, unit).map(|x| times(x, factor));
            let words = [T::pack(a, b), T::pack(c, d)];
            to.store_vec8(at + unit * 16 + (lane() % 4 * 4) as usize, words);
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_part<const D8: usize>(
        out: &Fragments<1, D8>,
        half: usize,
        factor: f32,
        to: Global<f32>,
        at: usize,
    ) {
        for unit in 0..D8 / 2 {
            let columns = columns(out, half, unit).map(|x| times(x, factor).to_bits());
            to.store_vec(at + unit * 16 + (lane() % 4 * 4) as usize, columns);
        }
    }
}

/// Address of the unit `units` units after the one at `place`, which is among the first of its row.
/// The swizzle permutes units within groups of eight or four, so one register suffices for all
/// addresses.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn further<const UNITS: usize>(place: u32, units: usize) -> u32 {
    let group = if UNITS.is_multiple_of(8) { 8 } else { 4 };
    (place ^ (units % group * 16) as u32) + (units / group * group * 16) as u32
}

/// A lane's A operand of 16 channels of the queries, in the column order of quantized keys: two
/// adjacent words from each of its rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn words<T: MmaElement>(tile: Swizzled<T, QUERY_UNITS>, depth: u32) -> [u32; 4] {
    let quarter = lane() % 4;
    let [upper, lower] = [0, 1].map(|half| {
        let place = tile.place(row_of(half), 2 * depth + quarter / 2).offset(quarter % 2 * 4);
        ld_shared::<[u32; 2]>(place.address())
    });
    [upper[0], lower[0], upper[1], lower[1]]
}

/// The four neighbouring columns of a unit that a lane has of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn columns<const D8: usize>(out: &Fragments<1, D8>, half: usize, unit: usize) -> [f32; 4] {
    let [even, odd] = [out[0][2 * unit], out[0][2 * unit + 1]];
    [even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]]
}

/// A product in which 0 gives 0, whatever the other factor: rows that are no tokens may hold NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn times(x: f32, factor: f32) -> f32 {
    if factor == 0.0 { 0.0 } else { x * factor }
}
