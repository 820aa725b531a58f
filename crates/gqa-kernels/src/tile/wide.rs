//! Products of swizzled tiles where several warps share query rows, for heads whose output does not
//! fit one warp's registers. Each warp computes the scores of some keys and stores its P in a tile
//! in shared memory; then each warp accumulates some columns of the output over all of P.
//!
//! Scores and output lie in a warp as in [`fragment`](super::fragment).

use super::fragment::{Fragments, column_of, row_of};
use super::swizzle::{Swizzled, WarpRead};
use crate::num::MmaElement;
use crate::simt::{ldmatrix_x4, ldmatrix_x4_trans, st_shared};

/// Writes P to 8-key MMA tiles `first ..` of the tile's rows.
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

/// `out += weights · values` over all keys of the tiles, for the first `D8` 8-column MMA tiles of
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
        let a: [_; M] =
            core::array::from_fn(|m| ldmatrix_x4(read_weights.address(weights, m, depth)));
        for pair in 0..D8 / 2 {
            let b = ldmatrix_x4_trans(read.address(values, depth, pair));
            for m in 0..M {
                T::mma(&mut out[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut out[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
}
