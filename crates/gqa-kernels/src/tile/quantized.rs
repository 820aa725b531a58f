//! The two products of [`columns`](super::columns) with quantized keys and values.
//!
//! `ldmatrix` moves 16 bits at a time: `P` = 2 or 4 quantized values. Where it would load a tile of
//! 16-bit elements, a lane gets
//!
//! ```text
//! keys     quantized values 2P(l%4) .. 2P(l%4) + 2P of a unit of row l/4
//! values   quantized values P(l/4) .. P(l/4) + P of a unit, of rows 2(l%4) and 2(l%4)+1
//! ```
//!
//! and [`MmaCode::halves`] converts them to pairs of float16, which are operands. So an MMA over 16
//! columns multiplies the columns that the lanes hold, not 16 adjacent ones; queries are loaded in
//! the same order. And the 8 columns of an output tile are every `P`-th column of a unit.

use super::columns::Columns;
use super::flipped;
use super::fragment::Fragments;
use super::swizzle::{Swizzled, WarpRead};
use crate::num::{MmaCode, MmaElement, f16};
use crate::simt::{ldmatrix_x4, ldmatrix_x4_trans};

/// S of a lane's rows with keys whose encoded values are all 0: the bias that [`scores`] subtracts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn zero_scores<C: MmaCode, const M: usize, const HALVES: usize, const D8: usize>(
    code: C,
    queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
) -> [[f32; 2]; M] {
    let mut scores = [[0.0; 4]; M];
    if C::HAS_OFFSET {
        let zeros = code.halves(code.zeros(), flipped::fits(M, HALVES));
        for depth in 0..D8 / 2 {
            let [low, high] = queries(depth);
            let step = 2 * depth % C::PER_HALF_WORD;
            if flipped::fits(M, HALVES) {
                let [first, second] = [zeros[step], zeros[step + 1]];
                f16::mma(&mut scores[0], [first, first, second, second], [low[0][0], high[0][0]]);
                continue;
            }
            for m in 0..M {
                let a = [low[m][0], low[m][1], high[m][0], high[m][1]];
                f16::mma(&mut scores[m], a, [zeros[step], zeros[step + 1]]);
            }
        }
    }
    let second = if flipped::fits(M, HALVES) { 1 } else { 2 };
    scores.map(|of_tile| [of_tile[0], of_tile[second]])
}

/// `scores = queries · keysᵀ` over `N8` blocks of 8 keys in rows of `U` units; `queries(depth)` is
/// what [`load_depth`](super::columns::load_depth) returns of queries in [`Order`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<C: MmaCode, const M: usize, const U: usize, const N8: usize>(
    code: C,
    queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    zero_scores: &[[f32; 2]; M],
    keys: Swizzled<u8, U>,
    read: &WarpRead<U>,
) -> Fragments<M, N8> {
    let mut scores = zero_scores.map(|zero| {
        let [low, high] = zero.map(|score| 0.0 - score);
        [[low, low, high, high]; N8]
    });
    for pair in 0..U / 2 {
        let of_pair: [_; 4] = core::array::from_fn(|depth| {
            let depth = if depth < C::PER_HALF_WORD { depth } else { 0 };
            queries(pair * C::PER_HALF_WORD + depth)
        });
        for block in 0..N8 / 2 {
            let words = ldmatrix_x4(read.address(keys, block, pair));
            for i in 0..4 {
                let b = code.halves(words[i], false);
                for step in 0..C::PER_HALF_WORD / 2 {
                    let [low, high] = of_pair[i % 2 * (C::PER_HALF_WORD / 2) + step];
                    for m in 0..M {
                        let a = [low[m][0], low[m][1], high[m][0], high[m][1]];
                        let b = [b[2 * step], b[2 * step + 1]];
                        f16::mma(&mut scores[m][2 * block + i / 2], a, b);
                    }
                }
            }
        }
    }
    scores
}

/// The same for eight query rows, [`flipped`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn flipped_scores<C: MmaCode, const M: usize, const U: usize, const N8: usize>(
    code: C,
    queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    zero_scores: &[[f32; 2]; M],
    keys: Swizzled<u8, U>,
    read: &WarpRead<U>,
) -> Fragments<M, N8> {
    let [first, second] = zero_scores[0].map(|score| 0.0 - score);
    let mut sums = [[first, second, first, second]; N8];
    for pair in 0..U / 2 {
        for tile in 0..N8 / 2 {
            let words = ldmatrix_x4(read.address(keys, tile, pair));
            for unit in 0..2 {
                let [upper, lower] =
                    [words[unit], words[unit + 2]].map(|word| code.halves(word, true));
                for step in 0..C::PER_HALF_WORD / 2 {
                    let depth = (2 * pair + unit) * (C::PER_HALF_WORD / 2) + step;
                    let [low, high] = queries(depth);
                    let (i, j) = (2 * step, 2 * step + 1);
                    let a = [upper[i], lower[i], upper[j], lower[j]];
                    f16::mma(&mut sums[tile], a, [low[0][0], high[0][0]]);
                }
            }
        }
    }
    let mut scores = [[[0.0; 4]; N8]; M];
    for tile in 0..N8 / 2 {
        let [first, second, further_first, further_second] = sums[tile];
        scores[0][2 * tile] = [first, second, 0.0, 0.0];
        scores[0][2 * tile + 1] = [further_first, further_second, 0.0, 0.0];
    }
    scores
}

/// `out += (P · V)ᵀ` over `N8` 8-key MMA tiles. Rows of V have `U` units; the 8 columns of an
/// output tile are every `P`-th channel of a unit, where a word has `P` values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<
    C: MmaCode,
    const M: usize,
    const HALVES: usize,
    const D8: usize,
    const U: usize,
    const N8: usize,
>(
    code: C,
    out: &mut Columns<M, D8>,
    weights: &Fragments<M, N8>,
    values: Swizzled<u8, U>,
    read: &WarpRead<U>,
) {
    let multiplies = flipped::fits(M, HALVES);
    let mut zeros = [[[0.0; 4]; HALVES]; M];
    for depth in 0..N8 / 2 {
        let b: [[[u32; 2]; HALVES]; M] = core::array::from_fn(|m| {
            let [low, high] = [weights[m][2 * depth], weights[m][2 * depth + 1]];
            if flipped::fits(M, HALVES) {
                return [[low, high].map(flipped::operand::<f16>); HALVES];
            }
            core::array::from_fn(|half| {
                [low, high].map(|block| f16::pack(block[2 * half], block[2 * half + 1]))
            })
        });
        if C::HAS_OFFSET {
            let [low, high, ..] = code.halves(code.zeros(), multiplies);
            for m in 0..M {
                for half in 0..HALVES {
                    f16::mma(&mut zeros[m][half], [low, high, low, high], b[m][half]);
                }
            }
        }
        for pair in 0..U / 2 {
            let words = ldmatrix_x4_trans(read.address(values, depth, pair));
            for unit in 0..2 {
                let [low, high] =
                    [words[unit], words[unit + 2]].map(|word| code.halves(word, multiplies));
                for step in 0..C::PER_HALF_WORD / 2 {
                    let a = [low[2 * step], low[2 * step + 1], high[2 * step], high[2 * step + 1]];
                    let block = (2 * pair + unit) * C::PER_HALF_WORD + 2 * step;
                    for m in 0..M {
                        for half in 0..HALVES {
                            let [[d0, d1], [d2, d3]] =
                                [out[block][m][half], out[block + 1][m][half]];
                            let mut d = [d0, d1, d2, d3];
                            f16::mma(&mut d, a, b[m][half]);
                            out[block][m][half] = [d[0], d[1]];
                            out[block + 1][m][half] = [d[2], d[3]];
                        }
                    }
                }
            }
        }
    }
    // With more rows there are not enough registers for a branch, so the offset is always
    // subtracted.
    if C::HAS_OFFSET && (!flipped::fits(M, HALVES) || code.has_offset()) {
        subtract::<M, HALVES, D8>(out, &zeros);
    }
}

/// Subtracts from the output the contribution of the offset, for both units of the format.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn subtract<const M: usize, const HALVES: usize, const D8: usize>(
    out: &mut Columns<M, D8>,
    zeros: &[[[f32; 4]; HALVES]; M],
) {
    for block in 0..D8 {
        for m in 0..M {
            for half in 0..HALVES {
                for i in 0..2 {
                    out[block][m][half][i] -= zeros[m][half][block % 2 * 2 + i];
                }
            }
        }
    }
}

/// The order of query columns that matches the column order of converted quantized values.
pub struct Order {
    /// For each of four words, its two columns among the eight.
    pub columns: [[usize; 2]; 4],
    /// For each word, the column at which it is stored.
    pub places: [u32; 4],
}

impl Order {
    /// The order of the eight columns from `first` on, a multiple of 8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of<C: MmaCode>(first: u32) -> Self {
        let per_half = C::PER_HALF_WORD as u32;
        let place = |word: u32| {
            let (code, i) = (first + 2 * per_half * (word / per_half), word % per_half);
            let (unit, lane) = (code / (8 * per_half), code / (2 * per_half) % 4);
            8 * (unit * per_half + i) + 2 * lane
        };
        let column = |word: usize| {
            2 * C::PER_HALF_WORD * (word / C::PER_HALF_WORD) + word % C::PER_HALF_WORD
        };
        Self {
            columns: core::array::from_fn(|word| [column(word), column(word) + C::PER_HALF_WORD]),
            places: core::array::from_fn(|word| place(word as u32)),
        }
    }
}
