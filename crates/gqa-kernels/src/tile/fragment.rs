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
//! Two such blocks of scores side by side, rounded and packed in pairs, are exactly the 16×16 left
//! operand of the next product, so the softmax weights never leave the registers.

use super::copy::{Tile, UNIT};
use crate::num::MmaElement;
use crate::simt::{lane, ldmatrix_x4, ldmatrix_x4_trans, st_shared};

/// `M` blocks of 16 rows by `C8` blocks of 8 columns.
pub type Fragments<const M: usize, const C8: usize> = [[[f32; 4]; C8]; M];

/// All zero.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn zeros<const M: usize, const C8: usize>() -> Fragments<M, C8> {
    [[[0.0; 4]; C8]; M]
}

/// A lane's row in a 16-row block: `half` 0 for values 0 and 1, 1 for values 2 and 3.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn row_of(half: usize) -> u32 {
    lane() / 4 + 8 * half as u32
}

/// A lane's first column in an 8-column block.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn column_of() -> u32 {
    lane() % 4 * 2
}

/// `scores = queries · keysᵀ` over `N8` blocks of 8 keys. `queries` starts at the warp's first row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    queries: Tile<T, D8>,
    keys: Tile<T, D8>,
) -> Fragments<M, N8> {
    let (query, key) =
        (lanes_part(queries), keys.from(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * UNIT));
    let mut scores = zeros::<M, N8>();
    for depth in 0..D8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| {
            ldmatrix_x4(query.place(16 * m as u32, 16 * depth as u32).address())
        });
        for pair in 0..N8 / 2 {
            let b = ldmatrix_x4(key.place(16 * pair as u32, 16 * depth as u32).address());
            for m in 0..M {
                T::mma(&mut scores[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut scores[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
    scores
}

/// `out += weights · values` over `N8` blocks of 8 keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    out: &mut Fragments<M, D8>,
    weights: &Fragments<M, N8>,
    values: Tile<T, D8>,
) {
    let value = lanes_part(values);
    for depth in 0..N8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| pack::<T, N8>(&weights[m], depth));
        for pair in 0..D8 / 2 {
            let b = ldmatrix_x4_trans(value.place(16 * depth as u32, 16 * pair as u32).address());
            for m in 0..M {
                T::mma(&mut out[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut out[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
}

/// What a lane tells `ldmatrix` of the first 16×16 elements of a tile, so that it delivers their
/// four 8×8 blocks in the order upper left, lower left, upper right, lower right.
///
/// Those are a left operand as it is. With keys as rows they are the right operands of keys 0..8
/// (first and third block) and 8..16; with values as rows, and transposed, those of columns 0..8
/// (first and second block) and 8..16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lanes_part<T: MmaElement, const D8: usize>(tile: Tile<T, D8>) -> Tile<T, D8> {
    tile.from(lane() % 16, lane() / 16 * UNIT)
}

/// Writes the fragments, each row times its factor and rounded, to the warp's rows of a tile.
/// Factor 0 gives 0, whatever the row holds.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
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
                let pair =
                    T::pack(scaled(out[m][block][2 * half]), scaled(out[m][block][2 * half + 1]));
                st_shared(row.offset(8 * block as u32).address(), pair);
            }
        }
    }
}

/// The left operand made of blocks `2 depth` and `2 depth + 1`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pack<T: MmaElement, const N8: usize>(weights: &[[f32; 4]; N8], depth: usize) -> [u32; 4] {
    let [first, second] = [weights[2 * depth], weights[2 * depth + 1]];
    [
        T::pack(first[0], first[1]),
        T::pack(first[2], first[3]),
        T::pack(second[0], second[1]),
        T::pack(second[2], second[3]),
    ]
}
