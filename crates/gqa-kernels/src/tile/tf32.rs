//! Products of float32 tiles by `mma.m16n8k8`, which multiplies TF32: float32 with 10 bits of
//! significand instead of 23.
//!
//! An element is split into the nearest TF32 and the exact remainder, `x = big + small`, and each
//! product becomes three ("3xTF32"), smallest first:
//!
//! ```text
//! a · b  =  a_small · b_big + a_big · b_small + a_big · b_big
//!        (a_small · b_small, at most 2^-22 |a · b|, is left out)
//! ```
//!
//! The remainder has 12 bits and a sign; the tensor cores drop its last bit. Tiles stay float32:
//! elements are split when they are read. Tensor cores also round sums towards zero, so they
//! accumulate only short sums: scores over 64 columns, P · V over one tile of keys. f32 additions
//! accumulate these.
//!
//! Scores lie in a warp as in [`fragment`](super::fragment). The inner dimension of a product may
//! be taken in any order. So a lane's two scores of a row serve as columns `l%4` and `l%4 + 4` of
//! an A operand whose columns are keys 0, 2, 4, 6, 1, 3, 5, 7, without a shuffle. The columns of
//! the output may be permuted as well: a lane reads `B` neighbouring values of a key at once, four
//! where the row length is a multiple of 32 and else two, and uses each as a column of another
//! 8-column MMA tile. Of the output's `8 B` columns it holds
//!
//! ```text
//!                          row l/4         row l/4 + 8
//! column 2B(l%4) + j       [block j][0]    [block j][2]      j < B
//! column 2B(l%4) + B + j   [block j][1]    [block j][3]
//! ```

use super::fragment::{Fragments, zeros};
use super::swizzle::{Swizzled, WarpRead};
use crate::num::{Element, f16};
use crate::simt::{lane, ld_shared, ldmatrix_x4, mma_m16n8k8_tf32};

/// Half a unit in the last place of TF32.
const HALF_UNIT: u32 = 1 << 12;

/// Elements, each as the nearest TF32 and the remainder.
#[derive(Clone, Copy)]
struct Split<const N: usize> {
    big: [u32; N],
    small: [u32; N],
}

impl<const N: usize> Split<N> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of(x: [u32; N]) -> Self {
        let big = x.map(|x| x.wrapping_add(HALF_UNIT) & !(2 * HALF_UNIT - 1));
        let small = |i| (f32::from_bits(x[i]) - f32::from_bits(big[i])).to_bits();
        Self { big, small: core::array::from_fn(small) }
    }
}

/// `d[m][first + j] += a[m] · b[j]`, in an order in which no product waits for the one before.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply<const M: usize, const C: usize>(
    d: &mut Fragments<M, C>,
    first: usize,
    a: &[Split<4>; M],
    b: &[Split<2>],
) {
    for term in 0..3 {
        for m in 0..M {
            for j in 0..b.len() {
                let (a, b) = match term {
                    0 => (a[m].small, b[j].big),
                    1 => (a[m].big, b[j].small),
                    _ => (a[m].big, b[j].big),
                };
                mma_m16n8k8_tf32(&mut d[m][first + j], a, b);
            }
        }
    }
}

/// 8-column MMA tiles over which the tensor cores accumulate a score.
const APART: usize = 8;

/// `scores = queries · keysᵀ` over `N8` 8-key MMA tiles. `queries` starts at the warp's first row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<const M: usize, const UNITS: usize, const N8: usize>(
    queries: Swizzled<f32, UNITS>,
    keys: Swizzled<f32, UNITS>,
    read: &WarpRead<UNITS>,
) -> Fragments<M, N8> {
    let mut scores = zeros::<M, N8>();
    for first in (0..UNITS / 2).step_by(APART) {
        let mut part = zeros::<M, N8>();
        for depth in first..(first + APART).min(UNITS / 2) {
            let a: [_; M] = core::array::from_fn(|m| {
                let [upper, upper_right, lower, lower_right] =
                    ldmatrix_x4(read.address(queries, m, depth));
                Split::of([upper, lower, upper_right, lower_right])
            });
            for pair in 0..N8 / 2 {
                let [b0, b1, b2, b3] = ldmatrix_x4(read.address(keys, pair, depth));
                let b = [Split::of([b0, b1]), Split::of([b2, b3])];
                multiply(&mut part, 2 * pair, &a, &b);
            }
        }
        if first == 0 {
            scores = part;
        } else {
            add(&mut scores, &part);
        }
    }
    scores
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add<const M: usize, const C: usize>(sum: &mut Fragments<M, C>, part: &Fragments<M, C>) {
    for m in 0..M {
        for j in 0..C {
            for i in 0..4 {
                sum[m][j][i] += part[m][j][i];
            }
        }
    }
}

/// A lane's share in reading values: element offsets, from the start of eight keys' rows, of the
/// lane's even and odd key.
#[derive(Clone, Copy)]
pub struct ValueRead<const UNITS: usize> {
    places: [u32; 2],
}

impl<const UNITS: usize> ValueRead<UNITS> {
    /// 8-column MMA tiles that a lane reads at once: one per neighbouring value of a key.
    const BLOCKS: usize = if UNITS % 8 == 0 { 4 } else { 2 };

    /// The calling lane's share.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_this_lane() -> Self {
        let (key, column) = (lane() % 4 * 2, lane() / 4 * Self::BLOCKS as u32);
        let place = |key| {
            let unit = Swizzled::<f16, UNITS>::index(key, column / f32::PER_VEC);
            unit * f32::PER_VEC + column % f32::PER_VEC
        };
        Self { places: [place(key), place(key + 1)] }
    }

    /// B operands of keys `8 block ..` and of the `part`-th group of `BLOCKS` 8-column MMA tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(&self, values: Swizzled<f32, UNITS>, block: usize, part: usize) -> [Split<2>; 4] {
        let columns = (8 * Self::BLOCKS * part) as u32;
        let keys = values.from(8 * block as u32).place(0, 0).offset(columns);
        let [even, odd] = self.places.map(|place| {
            if Self::BLOCKS == 4 {
                keys.load_vec(place)
            } else {
                let [a, b] = ld_shared(keys.offset(place).address());
                [a, b, 0, 0]
            }
        });
        core::array::from_fn(|j| Split::of([even[j], odd[j]]))
    }
}

/// `out = out · rescale + weights · values` over `N8` 8-key MMA tiles, with one factor per row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<const M: usize, const D8: usize, const UNITS: usize, const N8: usize>(
    out: &mut Fragments<M, D8>,
    rescale: &[[f32; 2]; M],
    weights: &Fragments<M, N8>,
    values: Swizzled<f32, UNITS>,
    read: &ValueRead<UNITS>,
) {
    const { assert!(UNITS == 2 * D8) };
    let blocks = ValueRead::<UNITS>::BLOCKS;
    let mut tile = zeros::<M, D8>();
    for part in 0..D8 / blocks {
        for block in 0..N8 {
            let a = weights.each_ref().map(|row| {
                let [upper, upper_odd, lower, lower_odd] = row[block].map(f32::to_bits);
                Split::of([upper, lower, upper_odd, lower_odd])
            });
            let b = read.load(values, block, part);
            multiply(&mut tile, blocks * part, &a, &b[..blocks]);
        }
        for m in 0..M {
            for j in blocks * part..blocks * (part + 1) {
                for i in 0..4 {
                    out[m][j][i] = out[m][j][i] * rescale[m][i / 2] + tile[m][j][i];
                }
            }
        }
    }
}

/// Part `vector` of a lane's part of a row of the output, the upper (`half` 0) or lower of a 16-row
/// MMA tile: the first column, and four neighbouring values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn output<const D8: usize, const UNITS: usize>(
    row: &[[f32; 4]; D8],
    half: usize,
    vector: usize,
) -> (u32, [f32; 4]) {
    let blocks = ValueRead::<UNITS>::BLOCKS;
    if blocks == 4 {
        let (first, odd) = (vector / 2 * 4, vector % 2);
        let column = 8 * (first as u32 + lane() % 4) + 4 * odd as u32;
        (column, core::array::from_fn(|j| row[first + j][2 * half + odd]))
    } else {
        let [a, b] = [row[2 * vector], row[2 * vector + 1]];
        let column = 16 * vector as u32 + 4 * (lane() % 4);
        (column, [a[2 * half], b[2 * half], a[2 * half + 1], b[2 * half + 1]])
    }
}
