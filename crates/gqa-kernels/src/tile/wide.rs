//! Products of swizzled tiles where several warps share query rows: each scores some of the keys,
//! all weights meet in a tile in shared memory, and each warp accumulates some of the columns. So
//! heads whose output does not fit one warp's registers do fit.
//!
//! Scores and output lie in a warp as in [`fragment`](super::fragment).

use super::fragment::{Fragments, column_of, row_of, zeros};
use super::swizzle::{Swizzled, WarpRead};
use crate::num::MmaElement;
use crate::simt::{ldmatrix_x2, ldmatrix_x4, ldmatrix_x4_trans, st_shared};

/// `scores = queries · keysᵀ` over `M` blocks of 16 rows and `N8` blocks of 8 keys; `N8` is 1 or
/// even.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<T: MmaElement, const M: usize, const UNITS: usize, const N8: usize>(
    queries: Swizzled<T, UNITS>,
    keys: Swizzled<T, UNITS>,
    read: &WarpRead<UNITS>,
) -> Fragments<M, N8> {
    let mut scores = zeros::<M, N8>();
    for depth in 0..UNITS / 2 {
        let a: [_; M] = core::array::from_fn(|m| left(read.address(queries, m, depth)));
        if N8 == 1 {
            let b = ldmatrix_x2(read.address(keys, 0, depth));
            for m in 0..M {
                T::mma(&mut scores[m][0], a[m], b);
            }
        }
        for pair in 0..N8 / 2 {
            let b = ldmatrix_x4(read.address(keys, pair, depth));
            for m in 0..M {
                T::mma(&mut scores[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut scores[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
    scores
}

/// Writes weights to blocks `first ..` of 8 keys of as many rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn store_weights<T: MmaElement, const M: usize, const K8: usize, const N8: usize>(
    weights: &Fragments<M, N8>,
    tile: Swizzled<T, K8>,
    first: u32,
) {
    for m in 0..M {
        for half in 0..2 {
            for block in 0..N8 {
                let place = tile.place(16 * m as u32 + row_of(half), first + block as u32);
                let [low, high] = [weights[m][block][2 * half], weights[m][block][2 * half + 1]];
                st_shared(place.offset(column_of()).address(), T::pack(low, high));
            }
        }
    }
}

/// `out += weights · values` over all keys of the tiles, and the first `D8` blocks of 8 columns of
/// `values`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<
    T: MmaElement,
    const M: usize,
    const D8: usize,
    const UNITS: usize,
    const K8: usize,
>(
    out: &mut Fragments<M, D8>,
    weights: Swizzled<T, K8>,
    values: Swizzled<T, UNITS>,
    read_weights: &WarpRead<K8>,
    read: &WarpRead<UNITS>,
) {
    for depth in 0..K8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| left(read_weights.address(weights, m, depth)));
        for pair in 0..D8 / 2 {
            let b = ldmatrix_x4_trans(read.address(values, depth, pair));
            for m in 0..M {
                T::mma(&mut out[m][2 * pair], a[m], [b[0], b[2]]);
                T::mma(&mut out[m][2 * pair + 1], a[m], [b[1], b[3]]);
            }
        }
    }
}

/// The left operand of 16 rows and columns: `ldmatrix` brings its blocks in the order of
/// [`WarpRead`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn left(address: u32) -> [u32; 4] {
    let [upper, upper_right, lower, lower_right] = ldmatrix_x4(address);
    [upper, lower, upper_right, lower_right]
}

/// Writes the fragments, each row times its factor and rounded, to the first `D8` units of as many
/// rows. Factor 0 gives 0, whatever the row holds.
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
