//! Products of a panel by pairs of bfloat16, as instructions of some processors multiply them: sums
//! are of `f32`.
//!
//! ```text
//!   scores[key] = Σ_j   (K[key][2j], K[key][2j + 1]) · (query[2j], query[2j + 1])
//!   output[h]  += Σ_j   (V[2j][h],   V[2j + 1][h])   · (weights[2j], weights[2j + 1])
//! ```
//!
//! Each lane holds a pair that belongs to one row. Keys are stored as pairs already. Values are
//! repacked into pairs, once for all panels of a task. P is rounded to bfloat16, as the query was
//! before.

use super::lanes::{self, Lanes, MOST};
use super::panel::{KEYS, Products, Rows};
use super::stored::{Stored, StoredRows, StoredTile};
use half::bf16;
use pulp::Simd;
use std::ops::Range;

/// From a value's number to the next, in pairs.
const VALUE_STRIDE: usize = stride(KEYS / 2);

/// Pairs from one row to the next: padded by a line of L1, because a stride of many lines maps rows
/// to few L1 sets.
const fn stride(pairs: usize) -> usize {
    const LINE: usize = 16;
    if pairs == 0 { 0 } else { pairs + LINE }
}

/// Products of bfloat16 pairs with float32 accumulation.
pub(super) trait Pairs<S: Simd, const N: usize>: Copy {
    /// Rounds two vectors to bfloat16, lane by lane; the first goes to the low half.
    fn pair(self, simd: S, first: S::f32s, second: S::f32s) -> S::f32s;

    /// Sets or adds to entry `m` of `to`, by `mode`, Σ_j `factors[m * stride + j]` · `by[j]`. The
    /// number of entries is a multiple of [`TOGETHER`], and the length of `by` one of half that.
    fn multiply(
        self,
        simd: S,
        factors: &[u32],
        stride: usize,
        by: &[Lanes<S, N>],
        mode: Mode,
        to: &mut [Lanes<S, N>],
    );
}

/// What is done with a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Set,
    Add,
}

/// The granularity of pair products, in elements and in keys.
pub(super) const TOGETHER: usize = 32;

/// Products by `pairs`.
#[derive(Clone, Copy)]
pub(super) struct InPairs<P> {
    /// Of scores.
    pub(super) scale: f32,
    pub(super) pairs: P,
}

/// Whether a call has enough rows, of bfloat16, for products of pairs.
pub(super) fn fit(rows: &dyn Rows) -> bool {
    /// Fewer rows take the decode loop.
    const LEAST: usize = 9;
    rows.count() >= LEAST && matches!(rows.stored(&(0..0), MOST), Some(StoredTile::BF16(_)))
}

/// A tile of keys and values.
pub(super) struct PairedTile<'t> {
    /// (keys, the stride of half of the size of a key)
    keys: &'t [u32],
    /// (size of a value, [`VALUE_STRIDE`])
    values: &'t [u32],
    stored: StoredRows<'t, bf16>,
}

impl<S: Simd, const N: usize, P: Pairs<S, N>> Products<S, N> for InPairs<P> {
    // Accumulators are loaded and stored for each tile.
    const TILE: usize = KEYS;

    const TOGETHER: usize = TOGETHER;

    const PADDED_TO: usize = TOGETHER;

    type Tile<'t> = PairedTile<'t>;

    #[inline(always)]
    fn tile<'t>(
        self,
        simd: S,
        rows: &'t dyn Rows,
        keys: &Range<usize>,
        [keys_buffer, values_buffer, _]: [&'t mut [f32]; 3],
    ) -> PairedTile<'t> {
        let Some(StoredTile::BF16([stored_keys, stored])) = rows.stored(keys, S::F32_LANES) else {
            unreachable!("what does not fit is not multiplied in pairs")
        };
        let [key, value] = rows.sizes().map(|size| size.next_multiple_of(TOGETHER));
        let [keys, values] = [keys_buffer, values_buffer].map(bytemuck::cast_slice_mut);
        let stride = stride(key / 2);
        let (keys, values) = (&mut keys[..KEYS * stride], &mut values[..VALUE_STRIDE * value]);
        copy(&stored_keys, keys, stride);
        transpose(simd, &stored, values);
        PairedTile { keys, values, stored }
    }

    fn filled(count: usize) -> usize {
        count.next_multiple_of(TOGETHER)
    }

    #[inline(always)]
    fn prepare(self, simd: S, query: &mut [Lanes<S, N>]) {
        self.pair(simd, query);
    }

    fn scale_left(self) -> Option<f32> {
        Some(self.scale)
    }

    #[inline(always)]
    fn score(
        self,
        simd: S,
        query: &[Lanes<S, N>],
        tile: &PairedTile<'_>,
        keys: Range<usize>,
        scores: &mut [Lanes<S, N>],
    ) {
        let (size, stride) = (query.len() / 2, stride(query.len() / 2));
        let keys = &tile.keys[keys.start * stride..keys.end * stride];
        self.pairs.multiply(simd, keys, stride, &query[..size], Mode::Set, scores);
    }

    #[inline(always)]
    fn accumulate(
        self,
        simd: S,
        tile: &PairedTile<'_>,
        keys: Range<usize>,
        weights: &mut [Lanes<S, N>],
        correction: Lanes<S, N>,
        output: &mut [Lanes<S, N>],
    ) {
        if correction.rows().iter().any(|x| *x != 1.0) {
            output.iter_mut().for_each(|sum| *sum = sum.times(simd, correction));
        }
        let weights = self.pair(simd, weights);
        let values = &tile.values[(keys.start / 2).min(tile.values.len())..];
        self.pairs.multiply(simd, values, VALUE_STRIDE, weights, Mode::Add, output);
    }

    #[inline(always)]
    fn value(tile: &PairedTile<'_>, _: usize, key: usize, h: usize) -> f32 {
        tile.stored.get(key).and_then(|row| row.get(h)).map_or(0.0, |x| x.to_f32())
    }

    #[inline(always)]
    fn is_finite(tile: &PairedTile<'_>, _: usize, key: usize) -> bool {
        /// The exponent bits of bfloat16; infinity and NaN have all of them set.
        const EXPONENT: u16 = 0x7f80;
        let finite = |x: &bf16| x.to_bits() & EXPONENT != EXPONENT;
        tile.stored.get(key).is_none_or(|row| row.iter().fold(true, |all, x| all & finite(x)))
    }
}

impl<P> InPairs<P> {
    /// Entries in pairs, in half of their memory.
    #[inline(always)]
    fn pair<S: Simd, const N: usize>(
        self,
        simd: S,
        entries: &mut [Lanes<S, N>],
    ) -> &mut [Lanes<S, N>]
    where
        P: Pairs<S, N>,
    {
        for j in 0..entries.len() / 2 {
            let (first, second) = (entries[2 * j], entries[2 * j + 1]);
            for n in 0..N {
                entries[j].0[n] = self.pairs.pair(simd, first.0[n], second.0[n]);
            }
        }
        let half = entries.len() / 2;
        &mut entries[..half]
    }
}

/// Keys as stored, each padded with zeros to `stride` pairs, and the tile of these keys.
fn copy(keys: &StoredRows<'_, bf16>, to: &mut [u32], stride: usize) {
    let filled = keys.count().next_multiple_of(TOGETHER);
    for (key, to) in to.chunks_exact_mut(stride.max(1)).take(filled).enumerate() {
        let to: &mut [u16] = bytemuck::cast_slice_mut(to);
        let from: &[u16] = keys.get(key).map_or(&[], bytemuck::cast_slice);
        let (copied, rest) = to.split_at_mut(from.len());
        copied.copy_from_slice(from);
        rest.fill(0);
    }
}

/// Values as pairs from two keys: (size of a value, [`VALUE_STRIDE`]), padded with zeros.
#[inline(always)]
fn transpose<S: Simd>(simd: S, values: &StoredRows<'_, bf16>, to: &mut [u32]) {
    let vectors = values.numbers() / S::F32_LANES;
    let filled = values.count().next_multiple_of(TOGETHER) / 2;
    let zero = simd.splat_f32s(0.0);
    let number = |key: usize, c: usize| match values.get(key) {
        // SAFETY: a value has as many vectors; the caller runs with the vectors of `simd`
        Some(row) => unsafe { bf16::vector(simd, row, c) },
        None => zero,
    };
    let (whole, rest) = to.split_at_mut(values.numbers() * VALUE_STRIDE);
    rest.fill(0);
    for c in 0..vectors {
        for first in (0..filled).step_by(S::F32_LANES) {
            let mut block = [zero; MOST];
            let block = &mut block[..S::F32_LANES];
            for (j, pairs) in block.iter_mut().enumerate() {
                let key = 2 * (first + j);
                let (low, high) = (number(key, c), number(key + 1, c));
                let (low, high) = (simd.transmute_u32s_f32s(low), simd.transmute_u32s_f32s(high));
                let low = simd.wrapping_dyn_shr_u32s(low, simd.splat_u32s(16));
                *pairs = simd.transmute_f32s_u32s(simd.or_u32s(low, high));
            }
            lanes::transpose(simd, block);
            for (i, pairs) in block.iter().enumerate() {
                let start = (c * S::F32_LANES + i) * VALUE_STRIDE + first;
                let pairs = bytemuck::cast_slice(std::slice::from_ref(pairs));
                whole[start..start + S::F32_LANES].copy_from_slice(pairs);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::instructions::Instructions;
    use crate::key_range::Attend;
    use crate::made_up::MadeUp;
    use crate::panels::many;
    use pulp::{Arch, WithSimd};

    /// Products of pairs in float32, for processors without the instruction.
    #[derive(Clone, Copy)]
    pub(crate) struct Plain;

    fn halves(pair: u32) -> [f32; 2] {
        [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
    }

    impl<S: Simd, const N: usize> Pairs<S, N> for Plain {
        fn pair(self, _: S, first: S::f32s, second: S::f32s) -> S::f32s {
            let (mut pairs, second) = ([first], [second]);
            let to: &mut [u32] = bytemuck::cast_slice_mut(&mut pairs);
            let second: &[f32] = bytemuck::cast_slice(&second);
            for (to, second) in to.iter_mut().zip(second) {
                let first = bf16::from_f32(f32::from_bits(*to)).to_bits();
                *to = u32::from(first) | u32::from(bf16::from_f32(*second).to_bits()) << 16;
            }
            pairs[0]
        }

        fn multiply(
            self,
            _: S,
            factors: &[u32],
            stride: usize,
            by: &[Lanes<S, N>],
            mode: Mode,
            to: &mut [Lanes<S, N>],
        ) {
            assert!(to.len() % TOGETHER == 0 && by.len() % (TOGETHER / 2) == 0, "whole tiles");
            for (m, to) in to.iter_mut().enumerate() {
                for (lane, to) in to.rows_mut().iter_mut().enumerate() {
                    let products = by.iter().enumerate().map(|(j, by)| {
                        let [a, b] = halves(factors[m * stride + j]);
                        let [c, d] = halves(by.rows()[lane].to_bits());
                        a * c + b * d
                    });
                    let sum: f32 = products.sum();
                    *to = if mode == Mode::Add { *to + sum } else { sum };
                }
            }
        }
    }

    struct InPlain<'a>(Attend<'a>);

    impl WithSimd for InPlain<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let products = InPairs { scale: self.0.rows.scale(), pairs: Plain };
            many::<S, _, 2>(simd, products, self.0);
        }
    }

    #[test]
    fn pairs_give_what_single_numbers_give() {
        let rows = |count, keys, sizes| MadeUp { stored: true, ..MadeUp::new(count, keys, sizes) };
        for rows in [
            rows(9, 300, [48, 96]),
            rows(40, 97, [128, 64]),
            MadeUp { softcap: 3.0, has_bias: true, ..rows(70, 129, [64, 80]) },
            rows(40, 300, [32, 80]).poisoned(297),
            rows(20, 100, [16, 0]),
        ] {
            for arch in Instructions::all().into_iter().map(|one| one.vectors) {
                if matches!(arch, Arch::Scalar) {
                    continue;
                }
                let mut got = Vec::new();
                let mut write = |_, softmax, output: &[f32]| got.push((softmax, output.to_vec()));
                let keys = 0..rows.keys;
                let attend = Attend { rows: &rows, keys, write: &mut write };
                crate::native::dispatch(arch, InPlain(attend));
                rows.check(&got, 1.0 / 128.0, "pairs");
            }
        }
    }
}
