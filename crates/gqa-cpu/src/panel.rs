//! Attention of a panel of query rows to tiles of keys and values: online softmax, one row per
//! lane.
//!
//! Rows lie across the lanes of a vector, so everything per row (maximum, sum, mask) is one vector
//! operation for all rows. Both products are sums of a number of the cache times a vector of rows:
//!
//! ```text
//!   scores[key]  = Σ_h   K[key][h] · query[h]         for each key of the tile
//!   weights[key] = exp(scores[key] - maximum)
//!   output[h]    = output[h] · correction + Σ_key V[key][h] · weights[key]
//! ```
//!
//! By which instructions these are computed, and from what, is the affair of [`Products`].

use super::lanes::{self, Lanes, exp, select, tanh};
use super::row_starts::Starts;
use super::stored::{StoredRows, StoredTile};
use pulp::Simd;
use std::ops::Range;

/// Keys in a tile, at most.
pub const KEYS: usize = 256;

/// Keys in a tile of what is not multiplied in pairs. Tiles begin at multiples of their length, so
/// that how the work is cut never changes a result.
pub(super) const TILE: usize = KEYS / 4;

/// Numbers that a key and a value in a tile have a multiple of: those of the widest vector.
pub const PADDED_TO: usize = 16;

/// Consecutive rows of one head's cache.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// (keys, size of a key)
    pub keys: &'a [f32],
    /// (keys, size of a value)
    pub values: &'a [f32],
}

impl<'a> Tile<'a> {
    /// Its rows, of which there are so many, as one by one.
    pub(super) fn rows(self, count: usize, [key, value]: [usize; 2]) -> [StoredRows<'a, f32>; 2] {
        let starts = |stride| Starts::Strided { first: 0, stride, count };
        let rows = |elements, size| StoredRows::new(elements, starts(size), size);
        [rows(self.keys, key), rows(self.values, value)]
    }
}

/// How much larger a score may be than the number that a weight is relative to: what was summed
/// before does not have to be multiplied whenever a score is a little larger.
const ROOM: f32 = 4.0;

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

    /// What q·k is multiplied by.
    fn scale(&self) -> f32;

    /// What scores are capped at; 0: nothing.
    fn softcap(&self) -> f32;

    /// Whether [`Rows::add_bias`] changes scores.
    fn has_bias(&self) -> bool;

    /// Numbers that a key and a value have in a tile: their head sizes, filled up with zeros to a
    /// multiple of [`PADDED_TO`].
    fn sizes(&self) -> [usize; 2];

    /// Keys that a row sees.
    fn visible(&self, row: usize) -> Range<usize>;

    /// A row of the query, rotated and not scaled; what is behind it in `to` stays. Where the cache
    /// is of bfloat16, so are its numbers.
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

    /// What stored keys, and values, of this range are to be multiplied by besides, where each has
    /// a number of its own, which is written for each; whether that is so.
    fn row_scales(&self, _keys: &Range<usize>, _lanes: usize, _to: [&mut [f32]; 2]) -> bool {
        false
    }

    /// Adds the bias of a row's keys from `first` on.
    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]);
}

/// How a panel's products are computed, and from what.
pub(super) trait Products<S: Simd, const N: usize>: Copy {
    /// Keys in a tile.
    const TILE: usize = TILE;

    /// Keys that are multiplied together: scores of a few of them take as long as of all.
    const TOGETHER: usize;

    /// Numbers that a row in a tile has a multiple of; itself a multiple of [`PADDED_TO`].
    const PADDED_TO: usize = PADDED_TO;

    /// What is read of a tile: rows of keys and values.
    type Tile<'t>;

    /// Keys and values, in `buffers` for a tile's keys, for its values and once more for those,
    /// where they have to be in another form.
    fn tile<'t>(
        self,
        simd: S,
        rows: &'t dyn Rows,
        keys: &Range<usize>,
        buffers: [&'t mut [f32]; 3],
    ) -> Self::Tile<'t>;

    /// How many keys a tile of so many has, with such as fill it up.
    fn filled(count: usize) -> usize;

    /// Makes of a query's numbers what [`Products::score`] takes.
    fn prepare(self, simd: S, query: &mut [Lanes<S, N>]);

    /// What [`Products::score`] leaves scores to be multiplied by, where that is not 1.
    fn scale_left(self) -> Option<f32> {
        None
    }

    /// Scores of such keys of a tile, whose query has `size` numbers.
    fn score(
        self,
        simd: S,
        query: &[Lanes<S, N>],
        tile: &Self::Tile<'_>,
        keys: Range<usize>,
        scores: &mut [Lanes<S, N>],
    );

    /// `output` times `correction`, and such values of a tile times their weights.
    fn accumulate(
        self,
        simd: S,
        tile: &Self::Tile<'_>,
        keys: Range<usize>,
        weights: &mut [Lanes<S, N>],
        correction: Lanes<S, N>,
        output: &mut [Lanes<S, N>],
    );

    /// Number `h` of a value in a tile, of which each has `size`.
    fn value(tile: &Self::Tile<'_>, size: usize, key: usize, h: usize) -> f32;

    /// Whether all of them are finite.
    fn is_finite(tile: &Self::Tile<'_>, size: usize, key: usize) -> bool;
}

/// Query rows and the state of their softmax.
pub(super) struct Panel<'a, S: Simd, const N: usize> {
    rows: &'a dyn Rows,
    /// The row in the first lane.
    pub(super) first: usize,
    /// Rotated and prepared.
    query: &'a mut [Lanes<S, N>],
    /// Sum of weighted values: one entry per element of the head.
    pub(super) output: &'a mut [Lanes<S, N>],
    /// What weights are relative to: about the largest score so far, and the smallest finite
    /// number at first.
    pub(super) max: Lanes<S, N>,
    /// Sum of weights so far.
    pub(super) sum: Lanes<S, N>,
    /// Keys that each row sees; lanes without a row are not in it.
    pub(super) visible: Vec<Range<usize>>,
    /// The keys from the first to the last that some row sees.
    pub(super) span: Range<usize>,
    /// The keys that every row sees.
    common: Range<usize>,
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

/// Keys that each row sees, counted from the first of some: `start <= key < end`.
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

    /// Of each row that sees key number `key` the first number, of the others the second.
    #[inline(always)]
    fn of(&self, simd: S, key: usize, yes: Lanes<S, N>, no: Lanes<S, N>) -> Lanes<S, N> {
        let mut lanes = no;
        for n in 0..N {
            lanes.0[n] = select(simd, self.sees(simd, key, n), yes.0[n], no.0[n]);
        }
        lanes
    }
}

impl<'a, S: Simd, const N: usize> Panel<'a, S, N> {
    /// The rows from `first` on, as many as there are and have room, in memory for a query and an
    /// output.
    #[inline(always)]
    pub(super) fn new<P: Products<S, N>>(
        simd: S,
        products: P,
        rows: &'a dyn Rows,
        first: usize,
        [query, output]: [&'a mut [Lanes<S, N>]; 2],
        lines: &mut [f32],
    ) -> Self {
        let zero = Lanes::splat(simd, 0.0);
        output.fill(zero);
        let count = Lanes::<S, N>::COUNT.min(rows.count() - first);
        for n in 0..N {
            lines.fill(0.0);
            let lanes = n * S::F32_LANES..count.min((n + 1) * S::F32_LANES);
            for (lane, line) in lanes.zip(lines.chunks_exact_mut(query.len().max(1))) {
                rows.query(first + lane, line);
            }
            lanes::rows_to_lanes(simd, lines, n, query);
        }
        products.prepare(simd, query);
        let visible: Vec<_> = (0..count).map(|lane| rows.visible(first + lane)).collect();
        let (span, common, max) = (span(&visible), common(&visible), Lanes::splat(simd, f32::MIN));
        Self { rows, first, query, output, max, sum: zero, visible, span, common }
    }

    /// The keys of a tile, counted from its first, that some row sees, with those that are
    /// multiplied together with them.
    pub(super) fn part<P: Products<S, N>>(&self, tile: &Range<usize>) -> Option<Range<usize>> {
        let (start, end) = (self.span.start.max(tile.start), self.span.end.min(tile.end));
        (start < end).then(|| {
            let start = (start - tile.start) / P::TOGETHER * P::TOGETHER;
            let end = (end - tile.start).next_multiple_of(P::TOGETHER);
            start..end.min(P::filled(tile.len()))
        })
    }

    /// Lets the rows see the tile of such keys. `scores` is scratch for a tile.
    #[inline(always)]
    pub(super) fn attend<P: Products<S, N>>(
        &mut self,
        simd: S,
        products: P,
        keys: &Range<usize>,
        tile: &P::Tile<'_>,
        scores: &mut [Lanes<S, N>],
    ) {
        let Some(part) = self.part::<P>(keys) else { return };
        let scores = &mut scores[..part.len()];
        self.score(simd, products, (keys, tile), part.clone(), Stage::Biased, scores);
        let mask = self.mask(simd, keys, &part);
        if let Some(mask) = &mask {
            let hidden = Lanes::splat(simd, f32::NEG_INFINITY);
            for (key, score) in scores.iter_mut().enumerate() {
                *score = mask.of(simd, key, *score, hidden);
            }
        }
        let scale = products.scale_left().filter(|_| self.scores_are_products());
        let correction = self.weigh(simd, scale, scores);
        match &mask {
            Some(mask) if !self.harmless::<P>(keys, tile, &part) => {
                self.accumulate_seen::<P>(simd, tile, part, scores, correction, mask);
            }
            _ => products.accumulate(simd, tile, part, scores, correction, self.output),
        }
    }

    /// The mask of such keys of a tile, in which those that fill it up are hidden; `None` where
    /// every row sees all of them.
    fn mask(&self, simd: S, keys: &Range<usize>, part: &Range<usize>) -> Option<Mask<S, N>> {
        let (first, last) = (keys.start + part.start, keys.start + part.end);
        if self.common.start <= first && last <= self.common.end && last <= keys.end {
            return None;
        }
        let mut mask = Mask { start: Lanes::splat(simd, 0.0), end: Lanes::splat(simd, 0.0) };
        for (row, seen) in self.visible.iter().enumerate() {
            let end = seen.end.min(keys.end);
            mask.start.rows_mut()[row] = seen.start.saturating_sub(first).min(part.len()) as f32;
            mask.end.rows_mut()[row] = end.saturating_sub(first).min(part.len()) as f32;
        }
        Some(mask)
    }

    /// Whether values that not every row sees, times a weight of 0, are 0: all are finite.
    fn harmless<P: Products<S, N>>(
        &self,
        keys: &Range<usize>,
        tile: &P::Tile<'_>,
        part: &Range<usize>,
    ) -> bool {
        let mut not_common = part.clone().filter(|key| !self.common.contains(&(keys.start + key)));
        not_common.all(|key| P::is_finite(tile, self.output.len(), key))
    }

    /// Scores of such keys of a tile up to a stage, not yet masked.
    #[inline(always)]
    pub(super) fn score<P: Products<S, N>>(
        &self,
        simd: S,
        products: P,
        (keys, tile): (&Range<usize>, &P::Tile<'_>),
        part: Range<usize>,
        stage: Stage,
        scores: &mut [Lanes<S, N>],
    ) {
        let there = part.start..part.end.min(keys.len());
        let first = keys.start + part.start;
        products.score(simd, self.query, tile, part, scores);
        if let (Some(scale), false) = (products.scale_left(), self.scores_are_products()) {
            let scale = Lanes::splat(simd, scale);
            scores.iter_mut().for_each(|score| *score = score.times(simd, scale));
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
            self.add_bias(first, &mut scores[..there.len()]);
        }
    }

    /// Whether scores are products times a scale, of which larger ones are larger scores.
    fn scores_are_products(&self) -> bool {
        self.rows.softcap() == 0.0 && !self.rows.has_bias() && self.rows.scale() > 0.0
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

    /// Turns scores, which are still to be multiplied by `scale`, into weights relative to a number
    /// that is no more than [`ROOM`] below the largest score so far. Returns what everything summed
    /// before is multiplied by: mostly 1.
    #[inline(always)]
    fn weigh(&mut self, simd: S, scale: Option<f32>, scores: &mut [Lanes<S, N>]) -> Lanes<S, N> {
        let factor = scale.map(|scale| simd.splat_f32s(scale));
        let mut max = self.max;
        for score in scores.iter() {
            for n in 0..N {
                let score = factor.map_or(score.0[n], |factor| simd.mul_f32s(score.0[n], factor));
                max.0[n] = simd.max_f32s(max.0[n], score);
            }
        }
        let mut correction = Lanes::splat(simd, 1.0);
        if self.leaves_room(simd, max) {
            max = self.max;
        } else {
            for n in 0..N {
                correction.0[n] = exp(simd, simd.sub_f32s(self.max.0[n], max.0[n]));
                self.sum.0[n] = simd.mul_f32s(self.sum.0[n], correction.0[n]);
            }
            self.max = max;
        }
        let (mut sum, mut below) = (self.sum, max);
        for n in 0..N {
            below.0[n] = simd.neg_f32s(max.0[n]);
        }
        for score in scores.iter_mut() {
            for n in 0..N {
                let exponent = match factor {
                    Some(factor) => simd.mul_add_e_f32s(score.0[n], factor, below.0[n]),
                    None => simd.add_f32s(score.0[n], below.0[n]),
                };
                score.0[n] = exp(simd, exponent);
                sum.0[n] = simd.add_f32s(sum.0[n], score.0[n]);
            }
        }
        self.sum = sum;
        correction
    }

    /// Makes means of the sums of weighted values; zeros where all weights are 0.
    #[inline(always)]
    pub(super) fn divide(&mut self, simd: S) {
        let mut factors = self.sum;
        for n in 0..N {
            factors.0[n] = lanes::inverse_or_zero(simd, self.sum.0[n]);
        }
        self.output.iter_mut().for_each(|sums| *sums = sums.times(simd, factors));
    }

    /// Whether weights of scores up to `max` are numbers that can be summed with those before.
    #[inline(always)]
    fn leaves_room(&self, simd: S, max: Lanes<S, N>) -> bool {
        let mut above = simd.splat_f32s(0.0);
        for n in 0..N {
            above = simd.max_f32s(simd.sub_f32s(max.0[n], self.max.0[n]), above);
        }
        simd.reduce_max_f32s(above) <= ROOM
    }

    /// Adds the values, each times its weights, to the rows that see it: a weight of 0 would not
    /// make NaN harmless.
    #[inline(always)]
    fn accumulate_seen<P: Products<S, N>>(
        &mut self,
        simd: S,
        tile: &P::Tile<'_>,
        part: Range<usize>,
        weights: &[Lanes<S, N>],
        correction: Lanes<S, N>,
        mask: &Mask<S, N>,
    ) {
        let size = self.output.len();
        for (h, output) in self.output.iter_mut().enumerate() {
            let mut sums = output.times(simd, correction);
            for (key, weight) in weights.iter().enumerate() {
                let value = simd.splat_f32s(P::value(tile, size, part.start + key, h));
                let mut more = sums;
                for n in 0..N {
                    more.0[n] = simd.mul_add_e_f32s(value, weight.0[n], sums.0[n]);
                }
                sums = mask.of(simd, key, more, sums);
            }
            *output = sums;
        }
    }
}
