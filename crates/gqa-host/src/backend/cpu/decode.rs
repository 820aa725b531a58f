//! Attention of a few query rows, as a token has, to tiles of keys and values: online softmax,
//! elements of a head across the lanes.
//!
//! A [`Panel`](super::panel::Panel) with few rows leaves most lanes without one. Here a vector has
//! consecutive elements of a key or a value, which are read once for all rows:
//!
//! ```text
//!   scores[row][key] = Σ_lanes Σ_c  query[row][c] · K[key][c]
//!   output[row][c]   = output[row][c] · correction[row] + Σ_key weights[row][key] · V[key][c]
//! ```

use super::attend::{Partial, Softmax, buffers, tiles};
use super::lanes::{exp, tanh};
use super::panel::{KEYS, Rows, Tile, span};
use pulp::Simd;
use std::array;
use std::ops::Range;

/// Rows of up to `R`, and the state of their softmax. What the rows beyond those that there are
/// compute is dropped.
pub(super) struct FewRows<'a, S: Simd, const R: usize> {
    rows: &'a dyn Rows,
    /// Rotated and scaled: the vectors of a head, each of all rows.
    query: Vec<[S::f32s; R]>,
    /// Sum of weighted values, likewise.
    output: Vec<[S::f32s; R]>,
    /// Largest score so far; the smallest finite number at first.
    max: [f32; R],
    /// Sum of weights so far.
    sum: [f32; R],
    /// Keys that each row sees.
    visible: Vec<Range<usize>>,
    /// The keys from the first to the last that some row sees.
    span: Range<usize>,
}

/// A number for each key of a tile.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; KEYS]);

impl<'a, S: Simd, const R: usize> FewRows<'a, S, R> {
    /// All rows, of which there are at most `R`.
    #[inline(always)]
    pub(super) fn new(simd: S, rows: &'a dyn Rows) -> Self {
        let zero = [simd.splat_f32s(0.0); R];
        let [mut query, output] = rows.sizes().map(|size| vec![zero; size / S::F32_LANES]);
        let mut line = vec![0.0; rows.sizes()[0]];
        for row in 0..rows.count() {
            rows.query(row, &mut line);
            let vectors = S::as_simd_f32s(&line).0;
            query.iter_mut().zip(vectors).for_each(|(to, x)| to[row] = *x);
        }
        let visible: Vec<_> = (0..rows.count()).map(|row| rows.visible(row)).collect();
        let span = span(&visible);
        Self { rows, query, output, max: [f32::MIN; R], sum: [0.0; R], visible, span }
    }

    /// What a range of keys gives the rows; `BLOCK` keys, and as many vectors of values, are in
    /// registers at a time.
    #[inline(always)]
    pub(super) fn run<const BLOCK: usize>(mut self, simd: S, keys: Range<usize>) -> Partial {
        let mut buffers = buffers(self.rows);
        let mut scores = [Line([0.0; KEYS]); R];
        for keys in tiles(keys) {
            let tile = self.rows.tile(keys, &mut buffers);
            if let Some(tile) = tile.part(&self.span, self.rows.sizes()) {
                self.attend::<BLOCK>(simd, tile, &mut scores);
            }
        }
        self.partial()
    }

    #[inline(always)]
    fn attend<const BLOCK: usize>(&mut self, simd: S, tile: Tile<'_>, scores: &mut [Line; R]) {
        let count = tile.keys.len() / self.rows.sizes()[0];
        let seen: [_; R] = array::from_fn(|row| self.seen(row, tile.first, count));
        self.score::<BLOCK>(simd, tile.keys, scores);
        self.cap(simd, scores);
        for (row, line) in scores.iter_mut().enumerate() {
            if self.rows.problem().bias.is_some() && row < self.visible.len() {
                self.rows.add_bias(row, tile.first, &mut line.0[..count]);
            }
            line.0[..seen[row].start].fill(f32::NEG_INFINITY);
            line.0[seen[row].end..].fill(f32::NEG_INFINITY);
        }
        let correction = self.weigh(simd, scores);
        if seen.iter().all(|keys| *keys == (0..count)) {
            self.accumulate::<BLOCK>(simd, tile.values, scores, correction, |_, _| true);
        } else {
            let sees = |row: usize, key: usize| seen[row].contains(&key);
            self.accumulate::<BLOCK>(simd, tile.values, scores, correction, sees);
        }
    }

    /// Which of `count` keys from `first` on a row sees, counted from the first. A row that is
    /// missing sees all.
    fn seen(&self, row: usize, first: usize, count: usize) -> Range<usize> {
        let Some(keys) = self.visible.get(row) else { return 0..count };
        let start = keys.start.saturating_sub(first).min(count);
        start..keys.end.saturating_sub(first).clamp(start, count)
    }

    /// Every row times every key.
    #[inline(always)]
    fn score<const BLOCK: usize>(&self, simd: S, keys: &[f32], scores: &mut [Line; R]) {
        let size = self.query.len() * S::F32_LANES;
        let blocks = keys.chunks_exact(BLOCK * size);
        let single = blocks.remainder();
        let blocked = blocks.len() * BLOCK;
        for (i, keys) in blocks.enumerate() {
            self.dot::<BLOCK>(simd, keys, i * BLOCK, scores);
        }
        for (i, key) in single.chunks_exact(size).enumerate() {
            self.dot::<1>(simd, key, blocked + i, scores);
        }
    }

    /// Every row times the keys from number `first` on.
    #[inline(always)]
    fn dot<const BLOCK: usize>(&self, simd: S, keys: &[f32], first: usize, scores: &mut [Line; R]) {
        let (vectors, count) = (S::as_simd_f32s(keys).0, self.query.len());
        let keys: [&[S::f32s]; BLOCK] = array::from_fn(|i| &vectors[i * count..][..count]);
        let mut sums = [[simd.splat_f32s(0.0); R]; BLOCK];
        for (c, query) in self.query.iter().enumerate() {
            for i in 0..BLOCK {
                prefetch_behind(&keys[i][c]);
                for row in 0..R {
                    sums[i][row] = simd.mul_add_e_f32s(keys[i][c], query[row], sums[i][row]);
                }
            }
        }
        for i in 0..BLOCK {
            for row in 0..R {
                scores[row].0[first + i] = simd.reduce_sum_f32s(sums[i][row]);
            }
        }
    }

    #[inline(always)]
    fn cap(&self, simd: S, scores: &mut [Line; R]) {
        let cap = self.rows.problem().softcap_in_f32();
        if cap > 0.0 {
            let (cap, inverse) = (simd.splat_f32s(cap), simd.splat_f32s(1.0 / cap));
            for line in scores {
                for score in S::as_mut_simd_f32s(&mut line.0).0 {
                    *score = simd.mul_f32s(cap, tanh(simd, simd.mul_f32s(*score, inverse)));
                }
            }
        }
    }

    /// Turns scores into weights relative to the largest score so far. Returns what everything
    /// summed before is multiplied by.
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

    /// Adds the values, each times its weights, that a row `sees`: a weight of 0 would not make NaN
    /// harmless.
    #[inline(always)]
    fn accumulate<const BLOCK: usize>(
        &mut self,
        simd: S,
        values: &[f32],
        weights: &[Line; R],
        correction: [S::f32s; R],
        sees: impl Fn(usize, usize) -> bool,
    ) {
        let (values, stride) = (S::as_simd_f32s(values).0, self.output.len());
        let mut first = 0;
        let (blocks, single) = self.output.as_chunks_mut::<BLOCK>();
        for output in blocks {
            add_values(simd, output, &values[first..], stride, weights, correction, &sees);
            first += BLOCK;
        }
        for output in single {
            let output = array::from_mut(output);
            add_values(simd, output, &values[first..], stride, weights, correction, &sees);
            first += 1;
        }
    }

    /// The state of the rows that there are.
    fn partial(&self) -> Partial {
        let count = self.visible.len();
        let softmax = |row: usize| Softmax { max: self.max[row], sum: self.sum[row] };
        let output = (0..count).flat_map(|row| self.output.iter().map(move |x| &x[row]));
        Partial {
            softmax: (0..count).map(softmax).collect(),
            output: output
                .flat_map(|x| bytemuck::cast_slice(std::slice::from_ref(x)))
                .copied()
                .collect(),
        }
    }
}

/// Adds a block of vectors of every value, `stride` vectors apart, to the output.
#[inline(always)]
fn add_values<S: Simd, const R: usize, const BLOCK: usize>(
    simd: S,
    output: &mut [[S::f32s; R]; BLOCK],
    values: &[S::f32s],
    stride: usize,
    weights: &[Line; R],
    correction: [S::f32s; R],
    sees: &impl Fn(usize, usize) -> bool,
) {
    let mut sums = *output;
    for i in 0..BLOCK {
        for row in 0..R {
            sums[i][row] = simd.mul_f32s(sums[i][row], correction[row]);
        }
    }
    for (key, value) in values.chunks(stride).enumerate() {
        let value = &value[..BLOCK];
        value.iter().for_each(prefetch_behind);
        for row in 0..R {
            if sees(row, key) {
                let weight = simd.splat_f32s(weights[row].0[key]);
                for i in 0..BLOCK {
                    sums[i][row] = simd.mul_add_e_f32s(value[i], weight, sums[i][row]);
                }
            }
        }
    }
    *output = sums;
}

/// Asks for what lies some keys behind `vector`: a token waits for memory, not for arithmetic, and
/// processors see the strides of blocks late.
#[inline(always)]
fn prefetch_behind<V>(vector: &V) {
    prefetch(vector, 4096);
}

/// Asks for the memory so many bytes behind an address, whatever is there.
#[inline(always)]
pub(super) fn prefetch<V>(address: *const V, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, of which any address is fine; nothing is read
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast::<i8>().wrapping_add(bytes)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, bytes);
}
