//! Attention of a panel of query rows to tiles of keys and values: online softmax, one row per
//! lane.
//!
//! Rows lie across the lanes of a vector, so keys and values are read as single numbers, straight
//! from the cache, and everything per row (maximum, sum, mask) is one vector operation for all
//! rows. Both products are the same loop: a block of numbers times a vector of rows, summed in
//! registers.
//!
//! ```text
//!   scores[key]  = Σ_h   K[key][h] · query[h]         for each key of the tile
//!   weights[key] = exp(scores[key] - maximum)
//!   output[h]    = output[h] · correction + Σ_key V[key][h] · weights[key]
//! ```

use super::lanes::{Lanes, exp, select, tanh};
use super::stored::{StoredRows, StoredTile};
use pulp::Simd;
use std::array;
use std::ops::Range;

/// Keys in a tile. Tiles begin at multiples of it, so that how the work is cut never changes a
/// result.
pub const KEYS: usize = 64;

/// Numbers that a key and a value in a tile have a multiple of: those of the widest vector.
pub const PADDED_TO: usize = 16;

/// Elements of a key per turn of a loop.
const CHUNK: usize = 8;

/// Consecutive rows of one head's cache.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// Index of its first key.
    pub first: usize,
    /// (keys, size of a key)
    pub keys: &'a [f32],
    /// (keys, size of a value)
    pub values: &'a [f32],
}

impl<'a> Tile<'a> {
    /// Its rows, as one by one.
    pub(super) fn rows(self, [key, value]: [usize; 2]) -> [StoredRows<'a, f32>; 2] {
        let count = self.keys.len() / key;
        let starts = |size| (0..count).map(move |row| row * size);
        let rows = |elements, size| StoredRows::new(elements, starts(size), size);
        [rows(self.keys, key), rows(self.values, value)]
    }

    /// The part that is in `span`; `sizes` are those of a key and of a value.
    pub(super) fn part(self, span: &Range<usize>, [key, value]: [usize; 2]) -> Option<Self> {
        let first = span.start.max(self.first);
        let end = span.end.min(self.first + self.keys.len() / key);
        let part = (first < end).then(|| first - self.first..end - self.first)?;
        let keys = &self.keys[part.start * key..part.end * key];
        Some(Self { first, keys, values: &self.values[part.start * value..part.end * value] })
    }
}

/// How far scores are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// q·k, scaled.
    Scaled,
    /// After softcap.
    Capped,
    /// After bias too.
    Biased,
}

/// Query rows of one KV head, whatever their type; they count from 0.
pub trait Rows: Sync {
    /// How many.
    fn count(&self) -> usize;

    /// All keys that there are.
    fn keys(&self) -> usize;

    /// What scores are capped at; 0: nothing.
    fn softcap(&self) -> f32;

    /// Whether [`Rows::add_bias`] changes scores.
    fn has_bias(&self) -> bool;

    /// Numbers that a key and a value have in a tile: their head sizes, filled up with zeros to a
    /// multiple of [`PADDED_TO`].
    fn sizes(&self) -> [usize; 2];

    /// Keys that a row sees.
    fn visible(&self, row: usize) -> Range<usize>;

    /// A row of the query, rotated and scaled; what is behind it in `to` stays.
    fn query(&self, row: usize, to: &mut [f32]);

    /// Keys and values, converted in `buffers`, whatever is there, where they have to be.
    fn tile<'t>(&'t self, keys: Range<usize>, buffers: [&'t mut [f32]; 2]) -> Tile<'t>;

    /// The same as they are stored, where vectors of so many lanes can be read of them.
    fn stored(&self, _keys: &Range<usize>, _lanes: usize) -> Option<StoredTile<'_>> {
        None
    }

    /// What stored keys and values are still to be multiplied by: one number, or one for each
    /// element.
    fn scales(&self, _lanes: usize) -> Option<[&[f32]; 2]> {
        None
    }

    /// Adds the bias of a row's keys from `first` on.
    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]);
}

/// Query rows and the state of their softmax.
pub(super) struct Panel<'a, S: Simd, const N: usize> {
    rows: &'a dyn Rows,
    /// The row in the first lane.
    pub(super) first: usize,
    /// Rotated and scaled: one entry per element of the head.
    query: &'a mut [Lanes<S, N>],
    /// Sum of weighted values, likewise.
    pub(super) output: &'a mut [Lanes<S, N>],
    /// Largest score so far; the smallest finite number at first.
    pub(super) max: Lanes<S, N>,
    /// Sum of weights so far.
    pub(super) sum: Lanes<S, N>,
    /// Keys that each row sees; lanes without a row are not in it.
    pub(super) visible: Vec<Range<usize>>,
    /// The keys from the first to the last that some row sees.
    pub(super) span: Range<usize>,
}

/// From the first key that some row sees to the last.
pub fn span(visible: &[Range<usize>]) -> Range<usize> {
    let seen = || visible.iter().filter(|keys| !keys.is_empty());
    let first = seen().map(|keys| keys.start).min().unwrap_or(0);
    first..seen().map(|keys| keys.end).max().unwrap_or(0)
}

/// The keys that every row sees.
pub(super) fn common(visible: &[Range<usize>]) -> Range<usize> {
    let first = visible.iter().map(|keys| keys.start).max().unwrap_or(0);
    first..visible.iter().map(|keys| keys.end).min().unwrap_or(0).max(first)
}

/// Keys that each row sees, counted from the first of a tile: `start <= key < end`.
struct Mask<S: Simd, const N: usize> {
    start: Lanes<S, N>,
    end: Lanes<S, N>,
}

impl<S: Simd, const N: usize> Mask<S, N> {
    /// Whether key number `key` is seen, by the rows of vector `n`.
    #[inline(always)]
    fn sees(&self, simd: S, key: usize, n: usize) -> S::m32s {
        let key = simd.splat_f32s(key as f32);
        let begun = simd.less_than_or_equal_f32s(self.start.0[n], key);
        simd.and_m32s(begun, simd.less_than_f32s(key, self.end.0[n]))
    }

    /// Scores that a row does not see become -inf.
    #[inline(always)]
    fn hide(&self, simd: S, scores: &mut [Lanes<S, N>]) {
        let hidden = simd.splat_f32s(f32::NEG_INFINITY);
        for (key, score) in scores.iter_mut().enumerate() {
            for n in 0..N {
                score.0[n] = select(simd, self.sees(simd, key, n), score.0[n], hidden);
            }
        }
    }
}

impl<'a, S: Simd, const N: usize> Panel<'a, S, N> {
    /// The rows from `first` on, as many as there are and have room, in memory for a query and an
    /// output.
    pub(super) fn new(
        simd: S,
        rows: &'a dyn Rows,
        first: usize,
        [query, output]: [&'a mut [Lanes<S, N>]; 2],
    ) -> Self {
        let zero = Lanes::splat(simd, 0.0);
        query.fill(zero);
        output.fill(zero);
        let count = Lanes::<S, N>::COUNT.min(rows.count() - first);
        let mut line = vec![0.0; query.len()];
        for lane in 0..count {
            rows.query(first + lane, &mut line);
            query.iter_mut().zip(&line).for_each(|(to, x)| to.rows_mut()[lane] = *x);
        }
        let visible: Vec<_> = (0..count).map(|lane| rows.visible(first + lane)).collect();
        let (span, max) = (span(&visible), Lanes::splat(simd, f32::MIN));
        Self { rows, first, query, output, max, sum: zero, visible, span }
    }

    /// Lets the rows see a tile. `scores` is scratch for [`KEYS`] keys.
    #[inline(always)]
    pub(super) fn attend<const BLOCK: usize>(
        &mut self,
        simd: S,
        tile: Tile<'_>,
        scores: &mut [Lanes<S, N>],
    ) {
        let Some(tile) = tile.part(&self.span, self.rows.sizes()) else { return };
        let scores = &mut scores[..tile.keys.len() / self.query.len()];
        self.score::<BLOCK>(simd, tile, Stage::Biased, scores);
        let mask = self.mask(simd, tile.first, scores.len());
        if let Some(mask) = &mask {
            mask.hide(simd, scores);
        }
        let correction = self.weigh(simd, scores);
        match &mask {
            None => self.accumulate::<BLOCK>(simd, tile.values, scores, correction, None),
            mask => self.accumulate::<BLOCK>(simd, tile.values, scores, correction, mask.as_ref()),
        }
    }

    /// The mask of `count` keys from `first` on; `None` where every row sees all of them.
    fn mask(&self, simd: S, first: usize, count: usize) -> Option<Mask<S, N>> {
        if self.visible.iter().all(|keys| keys.start <= first && first + count <= keys.end) {
            return None;
        }
        let mut mask = Mask { start: Lanes::splat(simd, 0.0), end: Lanes::splat(simd, 0.0) };
        for (row, keys) in self.visible.iter().enumerate() {
            mask.start.rows_mut()[row] = keys.start.saturating_sub(first).min(count) as f32;
            mask.end.rows_mut()[row] = keys.end.saturating_sub(first).min(count) as f32;
        }
        Some(mask)
    }

    /// Scores of all keys of a tile up to a stage, not yet masked.
    #[inline(always)]
    pub(super) fn score<const BLOCK: usize>(
        &self,
        simd: S,
        tile: Tile<'_>,
        stage: Stage,
        scores: &mut [Lanes<S, N>],
    ) {
        let size = self.query.len();
        let (blocks, single) = scores.as_chunks_mut::<BLOCK>();
        let (block_keys, single_keys) = tile.keys.split_at(blocks.len() * BLOCK * size);
        for (scores, keys) in blocks.iter_mut().zip(block_keys.chunks_exact(BLOCK * size)) {
            self.dot(simd, keys, scores);
        }
        for (score, key) in single.iter_mut().zip(single_keys.chunks_exact(size)) {
            self.dot(simd, key, array::from_mut(score));
        }
        let cap = self.rows.softcap();
        if cap > 0.0 && stage >= Stage::Capped {
            let (cap, inverse) = (simd.splat_f32s(cap), simd.splat_f32s(1.0 / cap));
            for score in scores.iter_mut() {
                for n in 0..N {
                    score.0[n] = simd.mul_f32s(cap, tanh(simd, simd.mul_f32s(score.0[n], inverse)));
                }
            }
        }
        if self.rows.has_bias() && stage >= Stage::Biased {
            self.add_bias(tile.first, scores);
        }
    }

    /// Adds each row's bias from key `first` on.
    fn add_bias(&self, first: usize, scores: &mut [Lanes<S, N>]) {
        let mut line = [0.0; KEYS];
        let line = &mut line[..scores.len()];
        for lane in 0..self.visible.len() {
            line.iter_mut().zip(&*scores).for_each(|(x, score)| *x = score.rows()[lane]);
            self.rows.add_bias(self.first + lane, first, line);
            line.iter().zip(&mut *scores).for_each(|(x, score)| score.rows_mut()[lane] = *x);
        }
    }

    /// `BLOCK` keys times all queries.
    #[inline(always)]
    fn dot<const BLOCK: usize>(&self, simd: S, keys: &[f32], scores: &mut [Lanes<S, N>; BLOCK]) {
        let size = self.query.len();
        let keys: [&[[f32; CHUNK]]; BLOCK] =
            array::from_fn(|i| keys[i * size..][..size].as_chunks().0);
        let mut sums = [[simd.splat_f32s(0.0); N]; BLOCK];
        for (c, query) in self.query.as_chunks::<CHUNK>().0.iter().enumerate() {
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

    /// Turns scores into weights relative to the largest score so far. Returns what everything
    /// summed before is multiplied by.
    #[inline(always)]
    fn weigh(&mut self, simd: S, scores: &mut [Lanes<S, N>]) -> Lanes<S, N> {
        let mut correction = self.max;
        for n in 0..N {
            let mut max = self.max.0[n];
            for score in scores.iter() {
                max = simd.max_f32s(max, score.0[n]);
            }
            correction.0[n] = exp(simd, simd.sub_f32s(self.max.0[n], max));
            let mut sum = simd.mul_f32s(self.sum.0[n], correction.0[n]);
            for score in scores.iter_mut() {
                score.0[n] = exp(simd, simd.sub_f32s(score.0[n], max));
                sum = simd.add_f32s(sum, score.0[n]);
            }
            (self.max.0[n], self.sum.0[n]) = (max, sum);
        }
        correction
    }

    /// Adds the values, each times its weights. A row takes nothing from a key that it does not
    /// see: a weight of 0 would not make NaN harmless.
    #[inline(always)]
    fn accumulate<const BLOCK: usize>(
        &mut self,
        simd: S,
        values: &[f32],
        weights: &[Lanes<S, N>],
        correction: Lanes<S, N>,
        mask: Option<&Mask<S, N>>,
    ) {
        let stride = self.output.len() / BLOCK;
        let values = values.as_chunks::<BLOCK>().0;
        for (c, output) in self.output.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let mut sums = corrected(simd, output, correction);
            for (key, weight) in weights.iter().enumerate() {
                let value = &values[key * stride + c];
                for i in 0..BLOCK {
                    let value = simd.splat_f32s(value[i]);
                    for n in 0..N {
                        let more = simd.mul_add_e_f32s(value, weight.0[n], sums[i][n]);
                        sums[i][n] = match mask {
                            None => more,
                            Some(mask) => select(simd, mask.sees(simd, key, n), more, sums[i][n]),
                        };
                    }
                }
            }
            for i in 0..BLOCK {
                output[i].0 = sums[i];
            }
        }
    }
}

/// `output` relative to a new maximum.
#[inline(always)]
fn corrected<S: Simd, const N: usize, const BLOCK: usize>(
    simd: S,
    output: &[Lanes<S, N>; BLOCK],
    correction: Lanes<S, N>,
) -> [[S::f32s; N]; BLOCK] {
    let mut sums = [[simd.splat_f32s(0.0); N]; BLOCK];
    for i in 0..BLOCK {
        for n in 0..N {
            sums[i][n] = simd.mul_f32s(output[i].0[n], correction.0[n]);
        }
    }
    sums
}
