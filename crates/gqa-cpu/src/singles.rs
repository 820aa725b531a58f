//! Products of a panel in float32: keys and values are read element by element, straight from the
//! cache where it is float32, and multiplied by vectors of rows.
//!
//! Both products are the same loop: `BLOCK` elements times a vector of rows, accumulated in
//! registers. Values are repacked into that order, once for all panels of a task.

use super::lanes::Lanes;
use super::panel::{Products, Rows, Tile};
use pulp::Simd;
use std::array;
use std::ops::Range;

/// Elements of a key per turn of a loop.
const CHUNK: usize = 8;

/// Products of `BLOCK` elements at a time with vectors of rows.
#[derive(Clone, Copy)]
pub(super) struct Singles<const BLOCK: usize> {
    /// Of scores.
    pub(super) scale: f32,
}

impl<S: Simd, const N: usize, const BLOCK: usize> Products<S, N> for Singles<BLOCK> {
    const TOGETHER: usize = BLOCK;

    type Tile<'t> = PackedTile<'t>;

    #[inline(always)]
    fn tile<'t>(
        self,
        _: S,
        rows: &'t dyn Rows,
        keys: &Range<usize>,
        [key_buffer, value_buffer, packed]: [&'t mut [f32]; 3],
    ) -> PackedTile<'t> {
        let (tile, count) = (rows.tile(keys.clone(), [key_buffer, value_buffer]), keys.len());
        let packed = &mut packed[..tile.values.len()];
        pack::<BLOCK>(tile.values, count, packed);
        PackedTile { tile, packed, count }
    }

    fn filled(count: usize) -> usize {
        count
    }

    #[inline(always)]
    fn prepare(self, simd: S, query: &mut [Lanes<S, N>]) {
        let scale = Lanes::splat(simd, self.scale);
        query.iter_mut().for_each(|numbers| *numbers = numbers.times(simd, scale));
    }

    #[inline(always)]
    fn score(
        self,
        simd: S,
        query: &[Lanes<S, N>],
        tile: &PackedTile<'_>,
        keys: Range<usize>,
        scores: &mut [Lanes<S, N>],
    ) {
        let mut keys = &tile.tile.keys[keys.start * query.len()..keys.end * query.len()];
        let (blocks, single) = scores.as_chunks_mut::<BLOCK>();
        for scores in blocks {
            let (block, others) = keys.split_at(BLOCK * query.len());
            dot(simd, query, block, scores);
            keys = others;
        }
        for score in single {
            let (key, others) = keys.split_at(query.len());
            dot(simd, query, key, array::from_mut(score));
            keys = others;
        }
    }

    #[inline(always)]
    fn accumulate(
        self,
        simd: S,
        tile: &PackedTile<'_>,
        keys: Range<usize>,
        weights: &mut [Lanes<S, N>],
        correction: Lanes<S, N>,
        output: &mut [Lanes<S, N>],
    ) {
        let values = tile.packed.as_chunks::<BLOCK>().0;
        for (c, output) in output.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let values = &values[c * tile.count..][keys.clone()];
            let mut sums = [[simd.splat_f32s(0.0); N]; BLOCK];
            for i in 0..BLOCK {
                sums[i] = output[i].times(simd, correction).0;
            }
            for (value, weight) in values.iter().zip(&*weights) {
                for i in 0..BLOCK {
                    let value = simd.splat_f32s(value[i]);
                    for n in 0..N {
                        sums[i][n] = simd.mul_add_e_f32s(value, weight.0[n], sums[i][n]);
                    }
                }
            }
            for i in 0..BLOCK {
                output[i].0 = sums[i];
            }
        }
    }

    #[inline(always)]
    fn value(tile: &PackedTile<'_>, size: usize, key: usize, h: usize) -> f32 {
        tile.tile.values[key * size + h]
    }

    #[inline(always)]
    fn is_finite(tile: &PackedTile<'_>, size: usize, key: usize) -> bool {
        // All of them, by vectors.
        tile.tile.values[key * size..][..size].iter().fold(true, |all, x| all & x.is_finite())
    }
}

/// Keys and values.
pub(super) struct PackedTile<'t> {
    tile: Tile<'t>,
    /// (size of a value over `BLOCK`, keys, `BLOCK`)
    packed: &'t [f32],
    /// Keys.
    count: usize,
}

/// Repacks the values of `count` keys into the order of the products: strided reads would thrash
/// L1.
#[inline(always)]
fn pack<const BLOCK: usize>(values: &[f32], count: usize, packed: &mut [f32]) {
    /// Keys whose blocks fill lines of a cache.
    const LINE: usize = 4;
    let (values, packed) = (values.as_chunks::<BLOCK>().0, packed.as_chunks_mut::<BLOCK>().0);
    let blocks = values.len() / count;
    for first in (0..count).step_by(LINE) {
        for c in 0..blocks {
            for key in first..count.min(first + LINE) {
                packed[c * count + key] = values[key * blocks + c];
            }
        }
    }
}

/// `BLOCK` keys times all queries.
#[inline(always)]
fn dot<S: Simd, const N: usize, const BLOCK: usize>(
    simd: S,
    query: &[Lanes<S, N>],
    keys: &[f32],
    scores: &mut [Lanes<S, N>; BLOCK],
) {
    let size = query.len();
    let keys: [&[[f32; CHUNK]]; BLOCK] = array::from_fn(|i| keys[i * size..][..size].as_chunks().0);
    let mut sums = [[simd.splat_f32s(0.0); N]; BLOCK];
    for (c, query) in query.as_chunks::<CHUNK>().0.iter().enumerate() {
        let keys: [&[f32; CHUNK]; BLOCK] = array::from_fn(|i| &keys[i][c]);
        for h in 0..CHUNK {
            for i in 0..BLOCK {
                let key = simd.splat_f32s(keys[i][h]);
                for n in 0..N {
                    sums[i][n] = simd.mul_add_e_f32s(key, query[h].0[n], sums[i][n]);
                }
            }
        }
    }
    for i in 0..BLOCK {
        scores[i].0 = sums[i];
    }
}
