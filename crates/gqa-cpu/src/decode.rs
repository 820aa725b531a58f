//! Attention of a few query rows (a decode step) to tiles of keys and values: online softmax,
//! elements of a head across the lanes.
//!
//! A [`Panel`](super::panel::Panel) with few rows leaves most lanes idle. Here a vector has
//! consecutive elements of a key or a value, which are read once for all rows:
//!
//! ```text
//!   scores[row][key] = Σ_lanes Σ_c  query[row][c] · K[key][c]
//!   output[row][c]   = output[row][c] · correction[row] + Σ_key weights[row][key] · V[key][c]
//! ```

use super::key_range::{Softmax, Write, tiles};
use super::lanes::{self, exp, tanh};
use super::panel::{Rows, TILE, common, span};
use super::prefetch::{Later, Spread};
use super::scratch::Scratch;
use super::stored::{Stored, StoredRows, StoredTile};
use pulp::Simd;
use std::array;
use std::ops::Range;

/// Up to `R` rows and the state of their softmax. Results of padding rows are dropped.
pub(super) struct FewRows<'a, S: Simd, const R: usize> {
    rows: &'a dyn Rows,
    /// Queries, rotated and scaled: the vectors of a head, each for all rows.
    query: Vec<[S::f32s; R]>,
    /// Sum of weighted values, likewise.
    output: Vec<[S::f32s; R]>,
    /// Largest score so far; the smallest finite number at first.
    max: [f32; R],
    /// Sum of weights so far.
    sum: [f32; R],
    /// Keys that each row sees.
    visible: Vec<Range<usize>>,
    /// The range from the first to the last key that any row attends to.
    span: Range<usize>,
}

/// Calls a function that is generic over the element type of a tile.
macro_rules! for_stored {
    ($simd:ty, $tile:expr, |$rows:pat_param| $call:expr) => {
        match $tile {
            StoredTile::F32($rows) => $call,
            // Without vectors, tiles are converted to float32 first.
            _ if <$simd>::IS_SCALAR => unreachable!("stored rows are read as vectors"),
            StoredTile::F16($rows) => $call,
            StoredTile::BF16($rows) => $call,
            StoredTile::Int8($rows) => $call,
            StoredTile::Float8($rows) => $call,
            StoredTile::Int4($rows) => $call,
            StoredTile::Float4($rows) => $call,
        }
    };
}

/// A number for each key of a tile.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; TILE]);

impl<'a, S: Simd, const R: usize> FewRows<'a, S, R> {
    /// All rows, of which there are at most `R`.
    #[inline(always)]
    pub(super) fn new(simd: S, rows: &'a dyn Rows) -> Self {
        let zero = [simd.splat_f32s(0.0); R];
        let [mut query, output] = rows.sizes().map(|size| vec![zero; size / S::F32_LANES]);
        let mut line = vec![0.0; rows.sizes()[0]];
        for row in 0..rows.count() {
            rows.query(row, &mut line);
            line.iter_mut().for_each(|x| *x *= rows.scale());
            let vectors = S::as_simd_f32s(&line).0;
            query.iter_mut().zip(vectors).for_each(|(to, x)| to[row] = *x);
        }
        if let Some([scales, _]) = rows.scales(S::F32_LANES) {
            for (c, query) in query.iter_mut().enumerate() {
                scale(simd, query, scales, c);
            }
        }
        let visible: Vec<_> = (0..rows.count()).map(|row| rows.visible(row)).collect();
        let span = span(&visible);
        Self { rows, query, output, max: [f32::MIN; R], sum: [0.0; R], visible, span }
    }

    /// Attention over a range of keys. `BLOCK` keys, and as many vectors of values, are in
    /// registers at a time.
    #[inline(always)]
    pub(super) fn run<const BLOCK: usize>(
        mut self,
        simd: S,
        keys: Range<usize>,
        write: &mut Write<'_>,
    ) {
        let rows = self.rows;
        let stored = |keys: &Range<usize>| match S::IS_SCALAR {
            true => None,
            false => rows.stored(keys, S::F32_LANES),
        };
        let (span, mut scratch) = (self.span.clone(), Scratch::new());
        // Whether rows need conversion into a buffer.
        let room = if stored(&(0..0)).is_some() { 0 } else { TILE };
        let mut buffers = scratch.slices(rows.sizes().map(|size| room * size));
        let scores = &mut [Line([0.0; TILE]); R];
        let mut tiles = tiles(keys, TILE)
            .map(|keys| keys.start.max(span.start)..keys.end.min(span.end))
            .filter(|keys| !keys.is_empty())
            .map(|keys| (stored(&keys), keys))
            .peekable();
        while let Some((tile, keys)) = tiles.next() {
            let tile = tile.unwrap_or_else(|| {
                let buffers = buffers.each_mut().map(|buffer| &mut **buffer);
                StoredTile::F32(rows.tile(keys.clone(), buffers).rows(keys.len(), rows.sizes()))
            });
            let next = tiles.peek().and_then(|(next, _)| Some(next.as_ref()?.later_keys()));
            self.attend::<BLOCK>(simd, keys, &tile, next.unwrap_or_default(), scores);
        }
        self.finish(simd, write);
    }

    #[inline(always)]
    fn attend<const BLOCK: usize>(
        &mut self,
        simd: S,
        keys: Range<usize>,
        tile: &StoredTile<'_>,
        next: Later<'_>,
        scores: &mut [Line; R],
    ) {
        let (first, count) = (keys.start, keys.len());
        let seen: [_; R] = array::from_fn(|row| self.seen(row, first, count));
        for_stored!(S, tile, |[keys, values]| {
            self.score::<BLOCK, _>(simd, keys, values.later(), count, scores);
            in_unit(simd, keys, scores);
        });
        let mut of_rows = [Line([1.0; TILE]); 2];
        let [of_keys, of_values] = of_rows.each_mut().map(|line| &mut line.0[..count]);
        let by_row = self.rows.row_scales(&keys, S::F32_LANES, [of_keys, of_values]);
        if by_row {
            times(simd, &of_rows[0], scores);
        }
        self.cap(simd, scores);
        for (row, line) in scores.iter_mut().enumerate() {
            if self.rows.has_bias() && row < self.visible.len() {
                self.rows.add_bias(row, first, &mut line.0[..count]);
            }
            line.0[..seen[row].start].fill(f32::NEG_INFINITY);
            line.0[seen[row].end..].fill(f32::NEG_INFINITY);
        }
        let correction = self.weigh(simd, scores);
        if by_row {
            times(simd, &of_rows[1], scores);
        }
        for_stored!(S, tile, |[_, values]| {
            in_unit(simd, values, scores);
            let common = common(&seen);
            let weighted =
                Weighted { values, count, weights: scores, seen: &seen, common, correction };
            self.accumulate::<BLOCK, _>(simd, &weighted, next)
        });
    }

    /// The keys that a row attends to, relative to `first`, among `count` keys. A padding row
    /// attends to all.
    fn seen(&self, row: usize, first: usize, count: usize) -> Range<usize> {
        let Some(keys) = self.visible.get(row) else { return 0..count };
        let start = keys.start.saturating_sub(first).min(count);
        start..keys.end.saturating_sub(first).clamp(start, count)
    }

    /// Every row times every key.
    #[inline(always)]
    fn score<const BLOCK: usize, E: Stored>(
        &self,
        simd: S,
        keys: &StoredRows<'_, E>,
        values: Later<'_>,
        count: usize,
        scores: &mut [Line; R],
    ) {
        let blocked = count / BLOCK * BLOCK;
        for first in (0..blocked).step_by(BLOCK) {
            for row in first..first + BLOCK {
                values.prefetch(row);
            }
            self.dot::<BLOCK, E>(simd, keys, first, scores);
        }
        for first in blocked..count {
            self.dot::<1, E>(simd, keys, first, scores);
        }
    }

    /// Products of every query row with `BLOCK` keys from index `first` on.
    #[inline(always)]
    fn dot<const BLOCK: usize, E: Stored>(
        &self,
        simd: S,
        keys: &StoredRows<'_, E>,
        first: usize,
        scores: &mut [Line; R],
    ) {
        assert_eq!(keys.numbers(), self.query.len() * S::F32_LANES, "numbers of a key");
        let keys: [&[E]; BLOCK] = array::from_fn(|i| keys.row(first + i));
        let mut sums = [[simd.splat_f32s(0.0); R]; BLOCK];
        for (c, query) in self.query.iter().enumerate() {
            for i in 0..BLOCK {
                // SAFETY: a key has as many vectors as the query; `attend` runs inside `dispatch`
                let key = unsafe { E::vector(simd, keys[i], c) };
                for row in 0..R {
                    sums[i][row] = simd.mul_add_e_f32s(key, query[row], sums[i][row]);
                }
            }
        }
        // Four or more at a time, if there are.
        if R > BLOCK {
            for i in 0..BLOCK {
                let of_rows = lanes::sums(simd, &sums[i]);
                for row in 0..R {
                    scores[row].0[first + i] = of_rows[row];
                }
            }
            return;
        }
        for row in 0..R {
            let mut of_keys = [simd.splat_f32s(0.0); BLOCK];
            for i in 0..BLOCK {
                of_keys[i] = sums[i][row];
            }
            scores[row].0[first..first + BLOCK].copy_from_slice(&lanes::sums(simd, &of_keys));
        }
    }

    #[inline(always)]
    fn cap(&self, simd: S, scores: &mut [Line; R]) {
        let cap = self.rows.softcap();
        if cap > 0.0 {
            let (cap, inverse) = (simd.splat_f32s(cap), simd.splat_f32s(1.0 / cap));
            for line in scores {
                for score in S::as_mut_simd_f32s(&mut line.0).0 {
                    *score = simd.mul_f32s(cap, tanh(simd, simd.mul_f32s(*score, inverse)));
                }
            }
        }
    }

    /// Exponentiates scores minus the running row maximum. Returns the factor that rescales earlier
    /// sums.
    #[inline(always)]
    fn weigh(&mut self, simd: S, scores: &mut [Line; R]) -> [S::f32s; R] {
        let mut corrections = [simd.splat_f32s(1.0); R];
        for row in 0..R {
            let line = S::as_mut_simd_f32s(&mut scores[row].0).0;
            let old = simd.splat_f32s(self.max[row]);
            let mut max = old;
            for score in line.iter() {
                max = simd.max_f32s(max, *score);
            }
            self.max[row] = simd.reduce_max_f32s(max);
            let max = simd.splat_f32s(self.max[row]);
            let mut sum = simd.splat_f32s(0.0);
            for score in line {
                *score = exp(simd, simd.sub_f32s(*score, max));
                sum = simd.add_f32s(sum, *score);
            }
            corrections[row] = exp(simd, simd.sub_f32s(old, max));
            let correction = simd.reduce_max_f32s(corrections[row]);
            self.sum[row] = self.sum[row] * correction + simd.reduce_sum_f32s(sum);
        }
        corrections
    }

    /// Adds the values, each times its weights.
    #[inline(always)]
    fn accumulate<const BLOCK: usize, E: Stored>(
        &mut self,
        simd: S,
        weighted: &Weighted<'_, S, E, R>,
        next: Later<'_>,
    ) {
        let mut next = Spread::new(next, self.output.len().div_ceil(BLOCK));
        let mut first = 0;
        let (blocks, single) = self.output.as_chunks_mut::<BLOCK>();
        for output in blocks {
            weighted.add(simd, output, first, &mut next);
            first += BLOCK;
        }
        for output in single {
            weighted.add(simd, array::from_mut(output), first, &mut next);
            first += 1;
        }
    }

    /// Writes the rows that there are.
    #[inline(always)]
    fn finish(mut self, simd: S, write: &mut Write<'_>) {
        if let Some([_, scales]) = self.rows.scales(S::F32_LANES) {
            for (c, output) in self.output.iter_mut().enumerate() {
                scale(simd, output, scales, c);
            }
        }
        let mut line = vec![0.0; self.rows.sizes()[1]];
        for row in 0..self.visible.len() {
            let vectors = S::as_mut_simd_f32s(&mut line).0;
            let (sum, zero) = (simd.splat_f32s(self.sum[row]), simd.splat_f32s(0.0));
            let (factor, is_none) = (lanes::inverse(simd, sum), simd.equal_f32s(sum, zero));
            for (to, rows) in vectors.iter_mut().zip(&self.output) {
                // A product with 0 would be NaN where a value that the row does not see is.
                *to = lanes::select(simd, is_none, zero, simd.mul_f32s(rows[row], factor));
            }
            write(row, Softmax { max: self.max[row], sum: self.sum[row] }, &line);
        }
    }
}

/// Multiplies the score of each key, in all rows, by that key's factor.
#[inline(always)]
fn times<S: Simd, const R: usize>(simd: S, factors: &Line, lines: &mut [Line; R]) {
    let factors = S::as_simd_f32s(&factors.0).0;
    for line in lines {
        for (number, factor) in S::as_mut_simd_f32s(&mut line.0).0.iter_mut().zip(factors) {
            *number = simd.mul_f32s(*number, *factor);
        }
    }
}

/// Multiplies by the power of two that the stored elements are scaled by, or divides by it.
#[inline(always)]
fn in_unit<S: Simd, E: Stored, const R: usize>(
    simd: S,
    _: &StoredRows<'_, E>,
    lines: &mut [Line; R],
) {
    if E::UNIT != 1.0 {
        for line in lines {
            for numbers in S::as_mut_simd_f32s(&mut line.0).0 {
                *numbers = simd.mul_f32s(*numbers, simd.splat_f32s(E::UNIT));
            }
        }
    }
}

/// Multiplies vector `c` of all rows by its scales: one for all elements, or one for each.
#[inline(always)]
fn scale<S: Simd, const R: usize>(simd: S, rows: &mut [S::f32s; R], scales: &[f32], c: usize) {
    let scales = match scales {
        [scale] => simd.splat_f32s(*scale),
        scales => S::as_simd_f32s(scales).0[c],
    };
    for row in rows {
        *row = simd.mul_f32s(*row, scales);
    }
}

/// The values of a tile, and the softmax numerators that they are multiplied by.
struct Weighted<'a, S: Simd, E, const R: usize> {
    values: &'a StoredRows<'a, E>,
    count: usize,
    weights: &'a [Line; R],
    /// Keys that each row sees.
    seen: &'a [Range<usize>; R],
    /// Those that all rows see.
    common: Range<usize>,
    /// Of what was summed before.
    correction: [S::f32s; R],
}

impl<S: Simd, E: Stored, const R: usize> Weighted<'_, S, E, R> {
    /// Adds the vectors from index `first` on of every value to the output of the rows that attend
    /// to it. Masked rows are skipped: a factor of 0 would turn NaN into NaN.
    #[inline(always)]
    fn add<const BLOCK: usize>(
        &self,
        simd: S,
        output: &mut [[S::f32s; R]; BLOCK],
        first: usize,
        next: &mut Spread<'_>,
    ) {
        let mut sums = *output;
        for i in 0..BLOCK {
            for row in 0..R {
                sums[i][row] = simd.mul_f32s(sums[i][row], self.correction[row]);
            }
        }
        assert!((first + BLOCK) * S::F32_LANES <= self.values.numbers(), "numbers of a value");
        assert!(self.count <= TILE, "keys of a tile");
        let mut first_key = 0;
        while first_key < self.count {
            let keys = first_key..first_key + next.ask(self.count - first_key);
            first_key = keys.end;
            for key in keys {
                let value = self.values.row(key);
                // Not a closure: it would be compiled without the target features.
                let mut vectors = [simd.splat_f32s(0.0); BLOCK];
                for i in 0..BLOCK {
                    // SAFETY: the assertion gives every value these vectors; `attend` runs inside
                    // `dispatch`
                    vectors[i] = unsafe { E::vector(simd, value, first + i) };
                }
                if self.common.contains(&key) {
                    for row in 0..R {
                        self.add_row(simd, row, key, &vectors, &mut sums);
                    }
                    continue;
                }
                for row in 0..R {
                    if self.seen[row].contains(&key) {
                        self.add_row(simd, row, key, &vectors, &mut sums);
                    }
                }
            }
        }
        *output = sums;
    }

    /// Adds vectors of a key to those of a row.
    #[inline(always)]
    fn add_row<const BLOCK: usize>(
        &self,
        simd: S,
        row: usize,
        key: usize,
        vectors: &[S::f32s; BLOCK],
        sums: &mut [[S::f32s; R]; BLOCK],
    ) {
        let weight = simd.splat_f32s(self.weights[row].0[key]);
        for i in 0..BLOCK {
            sums[i][row] = simd.mul_add_e_f32s(vectors[i], weight, sums[i][row]);
        }
    }
}
