//! The two products of attention for few query rows, which are columns of the second product.
//!
//! `S = Q Kᵀ` has the query rows as rows, and a lane holds the scores of row `l/4` (and `l/4 + 8`)
//! as in [`fragment`](super::fragment). Two such 16×8 MMA tiles of P, packed in pairs, are the B
//! operand of `Oᵀ = Vᵀ Pᵀ`, eight query rows wide. So eight rows, for example the heads of a group,
//! cost half of what sixteen do, and P stays in registers. Of 8 columns of the output a lane holds
//!
//! ```text
//! column l/4 of rows 2(l%4), 2(l%4)+1
//! ```
//!
//! Row maxima lag by up to [`SLACK`](super::softmax::SLACK).

use super::fragment::Fragments;
use super::softmax::{ScoreScale, States, weigh_and_rescale};
use super::swizzle::{Swizzled, WarpRead};
use crate::num::MmaElement;
use crate::simt::{lane, ldmatrix_x4, ldmatrix_x4_trans, shfl_idx_f32};

/// Query rows as A operands: for every 8 columns, `M` MMA tiles of two 8-row halves.
pub type Queries<const M: usize, const D8: usize> = [[[u32; 2]; M]; D8];

/// Transposed output: for every 8 columns, `M` MMA tiles of two 8-row halves; a lane holds two
/// values of each.
pub type Columns<const M: usize, const D8: usize> = [[[[f32; 2]; 2]; M]; D8];

/// Loads `HALVES` 8-row halves of each 16 query rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn load_queries<T: MmaElement, const M: usize, const HALVES: usize, const D8: usize>(
    tile: Swizzled<T, D8>,
) -> Queries<M, D8> {
    let mut queries = [[[0; 2]; M]; D8];
    for depth in 0..D8 / 2 {
        [queries[2 * depth], queries[2 * depth + 1]] = load_depth::<T, M, HALVES, D8>(tile, depth);
    }
    queries
}

/// Loads 16 columns of the queries.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn load_depth<T: MmaElement, const M: usize, const HALVES: usize, const D8: usize>(
    tile: Swizzled<T, D8>,
    depth: usize,
) -> [[[u32; 2]; M]; 2] {
    let mut columns = [[[0; 2]; M]; 2];
    for m in 0..M {
        let (row, unit) = (lane() % (8 * HALVES as u32), 2 * depth as u32 + lane() / 16);
        let [a, b, c, d] = ldmatrix_x4(tile.place(16 * m as u32 + row, unit).address());
        columns[0][m] = [a, if HALVES > 1 { b } else { 0 }];
        columns[1][m] = [c, if HALVES > 1 { d } else { 0 }];
    }
    columns
}

/// `scores = queries · keysᵀ` over `N8` 8-key MMA tiles; `queries(depth)` is what [`load_depth`]
/// returns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    keys: Swizzled<T, D8>,
    read: &WarpRead<D8>,
) -> Fragments<M, N8> {
    let mut scores = [[[0.0; 4]; N8]; M];
    for depth in 0..D8 / 2 {
        let [low, high] = queries(depth);
        for pair in 0..N8 / 2 {
            let b = ldmatrix_x4(read.address(keys, pair, depth));
            for m in 0..M {
                let a = [low[m][0], low[m][1], high[m][0], high[m][1]];
                T::mma(&mut scores[m][2 * pair], a, [b[0], b[1]]);
                T::mma(&mut scores[m][2 * pair + 1], a, [b[2], b[3]]);
            }
        }
    }
    scores
}

/// Turns scores into P; rescales the accumulators of rows whose maximum rises.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn weigh<const M: usize, const HALVES: usize, const N8: usize, const D8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    out: &mut Columns<M, D8>,
    scale: ScoreScale,
) {
    weigh_and_rescale::<M, HALVES, N8>(states, scores, scale, |m, half, rescale| {
        // Lane 4r has the factor of row r; the output's rows are 2(l%4) and the next.
        let first = 8 * (lane() % 4);
        let rescale = [shfl_idx_f32(rescale, first), shfl_idx_f32(rescale, first + 4)];
        for block in 0..D8 {
            for i in 0..2 {
                out[block][m][half][i] *= rescale[i];
            }
        }
    });
}

/// `out += (weights · values)ᵀ` over `N8` 8-key MMA tiles. Rows of `values` have `U` units and the
/// first `D8` are used.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<
    T: MmaElement,
    const M: usize,
    const HALVES: usize,
    const D8: usize,
    const U: usize,
    const N8: usize,
>(
    out: &mut Columns<M, D8>,
    weights: &Fragments<M, N8>,
    values: Swizzled<T, U>,
    read: &WarpRead<U>,
) {
    for depth in 0..N8 / 2 {
        for pair in 0..U / 2 {
            let a = ldmatrix_x4_trans(read.address(values, depth, pair));
            for m in 0..M {
                for half in 0..HALVES {
                    let [low, high] = [weights[m][2 * depth], weights[m][2 * depth + 1]];
                    let b = [
                        T::pack(low[2 * half], low[2 * half + 1]),
                        T::pack(high[2 * half], high[2 * half + 1]),
                    ];
                    let [[d0, d1], [d2, d3]] = [out[2 * pair][m][half], out[2 * pair + 1][m][half]];
                    let mut d = [d0, d1, d2, d3];
                    T::mma(&mut d, a, b);
                    out[2 * pair][m][half] = [d[0], d[1]];
                    out[2 * pair + 1][m][half] = [d[2], d[3]];
                }
            }
        }
    }
}
