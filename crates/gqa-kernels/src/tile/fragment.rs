//! Products of tiles by `mma.m16n8k16`, their results spread over the 32 lanes of a warp.
//!
//! A warp owns `M` blocks of 16 rows. Of a 16×8 block of a product, lane `l` holds four values:
//!
//! ```text
//!                columns 2(l%4), 2(l%4)+1
//! row l/4        [0]  [1]
//! row l/4 + 8    [2]  [3]
//! ```
//!
//! Two such blocks of scores side by side, rounded and packed in pairs, are exactly the 16×16 left operand of the next product,
//! so the softmax weights never leave the registers.

use super::copy::{Tile, UNIT};
use crate::num::MmaElement;
use crate::simt::{Shared, lane, ldmatrix_x4, ldmatrix_x4_trans, st_shared};

/// `M` blocks of 16 rows by `C8` blocks of 8 columns.
pub type Fragments<const M: usize, const C8: usize> = [[[f32; 4]; C8]; M];

/// All zero.
#[inline(always)]
pub fn zeros<const M: usize, const C8: usize>() -> Fragments<M, C8> {
    [[[0.0; 4]; C8]; M]
}

/// A lane's row in a 16-row block: `half` 0 for values 0 and 1, 1 for values 2 and 3.
#[inline(always)]
pub fn row_of(half: usize) -> u32 {
    lane() / 4 + 8 * half as u32
}

/// A lane's first column in an 8-column block.
#[inline(always)]
pub fn column_of() -> u32 {
    lane() % 4 * 2
}

/// `scores = queries · keysᵀ` over `N8` blocks of 8 keys. `queries` starts at the warp's first row.
#[inline(always)]
pub fn scores<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    queries: Tile<T, D8>,
    keys: Tile<T, D8>,
) -> Fragments<M, N8> {
    // Lane l gives ldmatrix row l % 8 of 8×8 matrix l / 8. The matrices of a left operand: rows 0..8, rows 8..16, then both again
    // 8 columns on. Those of two right operands: columns 0..8 and 8..16 of keys 0..8, then of keys 8..16.
    let query = queries.place(lane() % 16, lane() / 16 * UNIT);
    let key = keys.place(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * UNIT);
    let mut scores = zeros::<M, N8>();
    for depth in 0..D8 / 2 {
        let a = left::<T, M, D8>(query, depth);
        for pair in 0..N8 / 2 {
            let b = ldmatrix_x4(offset::<T, D8>(key, 16 * pair, 16 * depth));
            for m in 0..M {
                T::mma(&mut scores[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut scores[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
    scores
}

/// `out += weights · values` over `N8` blocks of 8 keys.
#[inline(always)]
pub fn accumulate<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    out: &mut Fragments<M, D8>,
    weights: &Fragments<M, N8>,
    values: Tile<T, D8>,
) {
    // Transposed, the matrices of two right operands: keys 0..8 and 8..16 of columns 0..8, then of columns 8..16.
    let value = values.place(lane() % 16, lane() / 16 * UNIT);
    for depth in 0..N8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| pack::<T, N8>(&weights[m], depth));
        for pair in 0..D8 / 2 {
            let b = ldmatrix_x4_trans(offset::<T, D8>(value, 16 * depth, 16 * pair));
            for m in 0..M {
                T::mma(&mut out[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut out[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
}

/// Writes the fragments, each row times its factor and rounded, to the warp's rows of a tile. Factor 0 gives 0, whatever the row
/// holds.
#[inline(always)]
pub fn store<T: MmaElement, const M: usize, const D8: usize>(
    out: &Fragments<M, D8>,
    factors: [[f32; 2]; M],
    tile: Tile<T, D8>,
) {
    for m in 0..M {
        for half in 0..2 {
            let row = tile.place(16 * m as u32 + row_of(half), column_of());
            let scaled = |x| if factors[m][half] == 0.0 { 0.0 } else { x * factors[m][half] };
            for block in 0..D8 {
                let pair = T::pack(scaled(out[m][block][2 * half]), scaled(out[m][block][2 * half + 1]));
                st_shared(row.offset(8 * block as u32).address(), pair);
            }
        }
    }
}

/// The left operands of step `depth`, 16 columns each.
#[inline(always)]
fn left<T: MmaElement, const M: usize, const D8: usize>(query: Shared<T>, depth: usize) -> [[u32; 4]; M] {
    core::array::from_fn(|m| ldmatrix_x4(offset::<T, D8>(query, 16 * m, 16 * depth)))
}

/// The left operand made of blocks `2 depth` and `2 depth + 1`.
#[inline(always)]
fn pack<T: MmaElement, const N8: usize>(weights: &[[f32; 4]; N8], depth: usize) -> [u32; 4] {
    let [first, second] = [weights[2 * depth], weights[2 * depth + 1]];
    [
        T::pack(first[0], first[1]),
        T::pack(first[2], first[3]),
        T::pack(second[0], second[1]),
        T::pack(second[2], second[3]),
    ]
}

/// Address of the place `rows` and `columns` further on in a tile.
#[inline(always)]
fn offset<T: MmaElement, const D8: usize>(place: Shared<T>, rows: usize, columns: usize) -> u32 {
    place.offset((rows * (D8 + 1) * UNIT as usize + columns) as u32).address()
}
