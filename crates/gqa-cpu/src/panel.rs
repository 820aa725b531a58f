//! Attention of a panel of query rows to tiles of keys and values: online softmax, one row per
//! lane.
//!
//! Rows lie across the lanes of a vector, so everything per row (maximum, sum, mask) is one vector
//! operation for all rows. Both products multiply a cache element by a vector of rows, and add up:
//!
//! ```text
//!   scores[key]  = Σ_h   K[key][h] · query[h]         for each key of the tile
//!   weights[key] = exp(scores[key] - maximum)
//!   output[h]    = output[h] · correction + Σ_key V[key][h] · weights[key]
//! ```
//!
//! [`Products`] chooses the instructions and the layout of the operands.

use super::lanes::{self, Lanes, exp, select, tanh};
use super::row_starts::Starts;
use super::stored::{StoredRows, StoredTile};
use pulp::Simd;
use std::ops::Range;

/// Keys in a tile, at most.
pub const KEYS: usize = 256;

/// Keys in a tile, unless products take pairs. Tiles begin at multiples of their length, so that
/// the split of a call among threads never changes a result.
pub(super) const TILE: usize = KEYS / 4;

/// The elements of a key or a value in a tile are padded to a multiple of this: the widest vector.
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
    /// Splits the range into its rows.
    pub(super) fn rows(self, count: usize, [key, value]: [usize; 2]) -> [StoredRows<'a, f32>; 2] {
        let starts = |stride| Starts::Strided { first: 0, stride, count };
        let rows = |elements, size| StoredRows::new(elements, starts(size), size);
        [rows(self.keys, key), rows(self.values, value)]
    }
}

/// How far a score may exceed the lagged row maximum before the sums are rescaled.
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

/// Query rows of one KV head, of any element type, indexed from 0.
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

    /// Elements of a key and of a value in a tile: their head sizes, padded to a multiple of
    /// [`PADDED_TO`].
    fn sizes(&self) -> [usize; 2];

    /// Keys that a row sees.
    fn visible(&self, row: usize) -> Range<usize>;

    /// Writes a query row, rotated and not scaled, to the start of `to`. It is rounded to bfloat16
    /// where the cache is bfloat16.
    fn query(&self, row: usize, to: &mut [f32]);

    /// Keys and values as float32, converted into `buffers` where the cache has another type.
    fn tile<'t>(&'t self, keys: Range<usize>, buffers: [&'t mut [f32]; 2]) -> Tile<'t>;

    /// Keys and values as stored, if vectors of this many lanes can read them.
    fn stored(&self, _keys: &Range<usize>, _lanes: usize) -> Option<StoredTile<'_>> {
        None
    }

    /// The dequantization scales of keys and values: one for all, or one for each element.
    fn scales(&self, _lanes: usize) -> Option<[&[f32]; 2]> {
        None
    }

    /// Writes the per-token scales of keys and values in this range. Returns whether the cache has
    /// such scales.
    fn row_scales(&self, _keys: &Range<usize>, _lanes: usize, _to: [&mut [f32]; 2]) -> bool {
        false
    }

    /// Adds the attention bias of a row, for the keys from `first` on.
    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]);
}

/// How the products of a panel are computed, and the layout of their operands.
pub(super) trait Products<S: Simd, const N: usize>: Copy {
    /// Keys in a tile.
    const TILE: usize = TILE;

    /// Granularity of products in keys: scores of fewer keys take as long.
    const TOGETHER: usize;

    /// Row elements in a tile are padded to a multiple of this, itself a multiple of [`PADDED_TO`].
    const PADDED_TO: usize = PADDED_TO;

    /// The operands of a tile: rows of keys and values.
    type Tile<'t>;

    /// Prepares keys and values of a tile, in `buffers` for keys, values, and repacked values,
    /// where the layout differs from the cache.
    fn tile<'t>(
        self,
        simd: S,
        rows: &'t dyn Rows,
        keys: &Range<usize>,
        buffers: [&'t mut [f32]; 3],
    ) -> Self::Tile<'t>;

    /// The number of keys of a tile, with padding.
    fn filled(count: usize) -> usize;

    /// Converts query elements to the operands of [`Products::score`].
    fn prepare(self, simd: S, query: &mut [Lanes<S, N>]);

    /// The factor that [`Products::score`] leaves out of the scores; 1 if it applies all.
    fn scale_left(self) -> Option<f32> {
        None
    }

    /// Scores of the keys of a tile; a query has `size` elements.
    fn score(
        self,
        simd: S,
        query: &[Lanes<S, N>],
        tile: &Self::Tile<'_>,
        keys: Range<usize>,
        scores: &mut [Lanes<S, N>],
    );

    /// `output` times `correction`, plus P times the values of a tile.
    fn accumulate(
        self,
        simd: S,
        tile: &Self::Tile<'_>,
        keys: Range<usize>,
        weights: &mut [Lanes<S, N>],
        correction: Lanes<S, N>,
        output: &mut [Lanes<S, N>],
    );

    /// Element `h` of each value of a tile; a value has `size` elements.
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
    /// Output accumulator: one entry per element of the head.
    pub(super) output: &'a mut [Lanes<S, N>],
    /// The lagged row maximum: about the largest score so far, and `f32::MIN` at first.
    pub(super) max: Lanes<S, N>,
    /// Sum of weights so far.
    pub(super) sum: Lanes<S, N>,
    /// The keys that each row attends to; padding lanes are not in it.
    pub(super) visible: Vec<Range<usize>>,
    /// The range from the first to the last key that any row attends to.
    pub(super) span: Range<usize>,
    /// The keys that every row sees.
    common: Range<usize>,
}

/// The smallest range that contains the keys of all rows.
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

/// Keys that each row attends to, relative to the first key of the panel: `start <= key < end`.
struct Mask<S: Simd, const N: usize> {
    start: Lanes<S, N>,
    end: Lanes<S, N>,
}

impl<S: Simd, const N: usize> Mask<S, N> {
    /// A mask of the rows of vector `n` that attend to key `key`.
    #[inline(always)]
    fn sees(&self, simd: S, key: usize, n: usize) -> S::m32s {
        let key = simd.splat_f32s(key as f32);
        let begun = simd.less_than_or_equal_f32s(self.start.0[n], key);
        simd.and_m32s(begun, simd.less_than_f32s(key, self.end.0[n]))
    }

    /// Selects per row: the first operand where the row attends to key `key`, else the second.
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
    /// A panel of the rows from `first` on, as many as fit, with memory for queries and outputs.
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

    /// The keys of a tile that any row attends to, relative to its first key, rounded out to the
    /// granularity of products.
    pub(super) fn part<P: Products<S, N>>(&self, tile: &Range<usize>) -> Option<Range<usize>> {
        let (start, end) = (self.span.start.max(tile.start), self.span.end.min(tile.end));
        (start < end).then(|| {
            let start = (start - tile.start) / P::TOGETHER * P::TOGETHER;
            let end = (end - tile.start).next_multiple_of(P::TOGETHER);
            start..end.min(P::filled(tile.len()))
        })
    }

    /// Attention of the panel to a tile. `scores` is scratch for a tile.
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

    /// The mask of a tile's keys, with padding keys hidden; `None` where every row attends to all
    /// keys.
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

    /// Whether masked values can be multiplied by 0: all are finite.
    fn harmless<P: Products<S, N>>(
        &self,
        keys: &Range<usize>,
        tile: &P::Tile<'_>,
        part: &Range<usize>,
    ) -> bool {
        let mut not_common = part.clone().filter(|key| !self.common.contains(&(keys.start + key)));
        not_common.all(|key| P::is_finite(tile, self.output.len(), key))
    }

    /// Scores of a tile up to a stage, not yet masked.
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

    /// Whether scores are products times a positive scale, so that the maximum can be taken before
    /// scaling.
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

    /// Exponentiates scores, which still have to be multiplied by `scale`, minus the lagged row
    /// maximum, which is at most [`ROOM`] below the largest score so far. Returns the factor that
    /// rescales earlier sums: mostly 1.
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

    /// Divides the outputs by the sums of exponentials; zeros for a row that attends to no key.
    #[inline(always)]
    pub(super) fn divide(&mut self, simd: S) {
        let zero = simd.splat_f32s(0.0);
        for n in 0..N {
            let sum = self.sum.0[n];
            let (factor, is_none) = (lanes::inverse(simd, sum), simd.equal_f32s(sum, zero));
            for sums in self.output.iter_mut() {
                // A product with 0 would be NaN where a value that the row does not see is.
                let divided = simd.mul_f32s(sums.0[n], factor);
                sums.0[n] = lanes::select(simd, is_none, zero, divided);
            }
        }
    }

    /// Whether exponentials of scores up to `max` stay finite against the current reference.
    #[inline(always)]
    fn leaves_room(&self, simd: S, max: Lanes<S, N>) -> bool {
        let mut above = simd.splat_f32s(0.0);
        for n in 0..N {
            above = simd.max_f32s(simd.sub_f32s(max.0[n], self.max.0[n]), above);
        }
        simd.reduce_max_f32s(above) <= ROOM
    }

    /// Adds P times V to the rows that attend to each key. Masked rows are skipped: a factor of 0
    /// would turn NaN into NaN.
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
