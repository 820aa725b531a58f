//! Products of tiles by `mma.m16n8k16`, their results spread over the 32 lanes of a warp.
//!
//! A warp owns `M` 16-row MMA tiles. Of a 16×8 tile of a product (m16n8), lane `l` holds four
//! values:
//!
//! ```text
//!                columns 2(l%4), 2(l%4)+1
//! row l/4        [0]  [1]
//! row l/4 + 8    [2]  [3]
//! ```
//!
//! Two neighbouring MMA tiles of scores, rounded and packed in pairs, are exactly the 16×16 A
//! operand of the next product, so P stays in registers.

use super::swizzle::{Swizzled, WarpRead};
use crate::num::MmaElement;
use crate::simt::{lane, ldmatrix_x2, ldmatrix_x4, ldmatrix_x4_trans, st_shared};

/// `M` 16-row by `C8` 8-column MMA tiles.
pub type Fragments<const M: usize, const C8: usize> = [[[f32; 4]; C8]; M];

/// All zero.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn zeros<const M: usize, const C8: usize>() -> Fragments<M, C8> {
    [[[0.0; 4]; C8]; M]
}

/// A lane's row in a 16-row MMA tile: `half` 0 for values 0 and 1, 1 for values 2 and 3.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn row_of(half: usize) -> u32 {
    lane() / 4 + 8 * half as u32
}

/// A lane's first column in an 8-column MMA tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn column_of() -> u32 {
    lane() % 4 * 2
}

/// A operands of `M` 16-row MMA tiles, for each pair of 16-byte units.
pub type LeftOperands<const M: usize, const UNITS: usize> = [[[u32; 4]; M]; UNITS];

/// Loads the A operands of the first `pairs` pairs of units, a constant, to be held in registers;
/// `left(m, pair)` is the lane's `ldmatrix` address.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn left_operands<const M: usize, const UNITS: usize>(
    pairs: usize,
    left: impl Fn(usize, usize) -> u32,
) -> LeftOperands<M, UNITS> {
    let mut operands = [[[0; 4]; M]; UNITS];
    for pair in 0..pairs {
        operands[pair] = core::array::from_fn(|m| ldmatrix_x4(left(m, pair)));
    }
    operands
}

/// `scores = queries · keysᵀ` over the warp's `M` 16-row MMA tiles and `N8` 8-key MMA tiles; `N8`
/// is 1 or even. `left` and `right` read A and B operands.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<T: MmaElement, const M: usize, const UNITS: usize, const N8: usize>(
    queries: Swizzled<T, UNITS>,
    keys: Swizzled<T, UNITS>,
    [left, right]: &[WarpRead<UNITS>; 2],
) -> Fragments<M, N8> {
    scores_at::<T, M, UNITS, N8>(
        (&[[[0; 4]; M]; UNITS], 0),
        |m, pair| left.address(queries, m, pair),
        |block, pair| right.address(keys, block, pair),
    )
}

/// [`scores`] with the A operands of the first pairs of units, a constant number, in registers. For
/// the other operands, `left(m, pair)` and `right(block of 16 keys, pair)` are the lane's
/// `ldmatrix` addresses.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores_at<T: MmaElement, const M: usize, const UNITS: usize, const N8: usize>(
    (kept, pairs): (&LeftOperands<M, UNITS>, usize),
    left: impl Fn(usize, usize) -> u32,
    right: impl Fn(usize, usize) -> u32,
) -> Fragments<M, N8> {
    let mut scores = zeros::<M, N8>();
    for depth in 0..UNITS / 2 {
        let a: [_; M] = if depth < pairs {
            kept[depth]
        } else {
            core::array::from_fn(|m| ldmatrix_x4(left(m, depth)))
        };
        if N8 == 1 {
            let b = ldmatrix_x2(right(0, depth));
            for m in 0..M {
                T::mma(&mut scores[m][0], a[m], b);
            }
        }
        for pair in 0..N8 / 2 {
            let b = ldmatrix_x4(right(pair, depth));
            for m in 0..M {
                T::mma(&mut scores[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut scores[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
    scores
}

/// `out += weights · values` over `N8` 8-key MMA tiles. Rows of `values` have `U` units and the
/// first `D8` are used. `left` must be [`WarpRead::by_columns`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<
    T: MmaElement,
    const M: usize,
    const D8: usize,
    const U: usize,
    const N8: usize,
>(
    out: &mut Fragments<M, D8>,
    weights: &Fragments<M, N8>,
    values: Swizzled<T, U>,
    left: &WarpRead<U>,
) {
    accumulate_at::<T, M, D8, N8>(out, weights, |depth, pair| left.address(values, depth, pair));
}

/// [`accumulate`] where `values(block of 16 keys, pair of units)` is the lane's `ldmatrix` address.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate_at<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    out: &mut Fragments<M, D8>,
    weights: &Fragments<M, N8>,
    values: impl Fn(usize, usize) -> u32,
) {
    for depth in 0..N8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| pack::<T, N8>(&weights[m], depth));
        for pair in 0..D8 / 2 {
            let b = ldmatrix_x4_trans(values(depth, pair));
            for m in 0..M {
                T::mma(&mut out[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut out[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
}

/// Writes the fragments, each row times its factor and rounded, to the first `D8` units of the
/// tile's rows. Factor 0 gives 0, whatever the row holds.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn store<T: MmaElement, const M: usize, const D8: usize, const UNITS: usize>(
    out: &Fragments<M, D8>,
    factors: [[f32; 2]; M],
    tile: Swizzled<T, UNITS>,
) {
    for m in 0..M {
        for half in 0..2 {
            let factor = factors[m][half];
            let scaled = |x| if factor == 0.0 { 0.0 } else { x * factor };
            for block in 0..D8 {
                let place = tile.place(16 * m as u32 + row_of(half), block as u32);
                let [low, high] = [out[m][block][2 * half], out[m][block][2 * half + 1]];
                st_shared(place.offset(column_of()).address(), T::pack(scaled(low), scaled(high)));
            }
        }
    }
}

/// The A operand made of MMA tiles `2 depth` and `2 depth + 1`.
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
