//! All rows past a range of keys, tile by tile.

use super::decode::FewRows;
use super::lanes::Lanes;
use super::native;
use super::panel::{KEYS, Panel, Rows, Stage, Tile};
use super::scratch::Scratch;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// A row's largest score and its sum of weights relative to that.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// Largest score; the smallest finite number where there is none.
    pub max: f32,
    /// Sum of `exp(score - max)`.
    pub sum: f32,
}

/// What a range of keys gives the rows.
#[derive(Clone, Debug)]
pub struct Partial {
    /// Of each row.
    pub softmax: Vec<Softmax>,
    /// (rows, size of a value in a tile): sums of weighted values.
    pub output: Vec<f32>,
}

/// Lets all rows see a range of keys, with those instructions.
pub fn attend(arch: Arch, rows: &dyn Rows, keys: Range<usize>) -> Partial {
    native::dispatch(arch, Attend { rows, keys })
}

/// Lets all rows see a range of keys.
struct Attend<'a> {
    rows: &'a dyn Rows,
    keys: Range<usize>,
}

impl WithSimd for Attend<'_> {
    type Output = Partial;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Partial {
        let many_registers = S::REGISTER_COUNT >= 32;
        match self.rows.count() {
            // Up to half of the lanes, sums over lanes cost less than lanes without a row.
            1 if S::F32_LANES >= 2 => native::apart(simd, Few::<1, 4>(self)),
            2..=3 if S::F32_LANES >= 8 => native::apart(simd, Few::<3, 4>(self)),
            4 if S::F32_LANES >= 8 && many_registers => native::apart(simd, Few::<4, 4>(self)),
            4 if S::F32_LANES >= 8 => native::apart(simd, Few::<4, 2>(self)),
            5..=6 if S::F32_LANES >= 8 => native::apart(simd, Few::<6, 2>(self)),
            7..=8 if S::F32_LANES >= 16 => native::apart(simd, Few::<8, 2>(self)),
            7..=8 if S::F32_LANES >= 8 => native::apart(simd, Few::<8, 1>(self)),
            count if count <= S::F32_LANES => native::apart(simd, Many::<1, 8>(self)),
            _ if many_registers => native::apart(simd, Many::<2, 8>(self)),
            _ => native::apart(simd, Many::<2, 4>(self)),
        }
    }
}

/// Up to `R` rows, the elements of a head across the lanes.
struct Few<'a, const R: usize, const BLOCK: usize>(Attend<'a>);

impl<const R: usize, const BLOCK: usize> WithSimd for Few<'_, R, BLOCK> {
    type Output = Partial;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Partial {
        FewRows::<S, R>::new(simd, self.0.rows).run::<BLOCK>(simd, self.0.keys)
    }
}

/// Any number of rows, in panels of `N` vectors of them.
struct Many<'a, const N: usize, const BLOCK: usize>(Attend<'a>);

impl<const N: usize, const BLOCK: usize> WithSimd for Many<'_, N, BLOCK> {
    type Output = Partial;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Partial {
        let Attend { rows, keys } = self.0;
        let ([key, value], count) = (rows.sizes(), lanes::<S, N>(rows.count()));
        let mut scratch = Scratch::new();
        let [queries, outputs, scores, key_buffer, value_buffer] = scratch.slices([
            count * key,
            count * value,
            KEYS * Lanes::<S, N>::COUNT,
            KEYS * key,
            KEYS * value,
        ]);
        let mut panels = panels::<S, N>(simd, rows, [queries, outputs]);
        for keys in tiles(keys) {
            let tile = rows.tile(keys, [&mut *key_buffer, &mut *value_buffer]);
            for panel in &mut panels {
                panel.attend::<BLOCK>(simd, tile, bytemuck::cast_slice_mut(scores));
            }
        }
        partial(&panels, value)
    }
}

/// Which numbers [`scores`] shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// q·k, scaled, of all keys.
    Scaled,
    /// After softcap, of all keys.
    Capped,
    /// After bias too, of the keys that a row sees.
    Biased,
    /// The softmax of these.
    Weights,
}

/// The scores once more, now that the softmax of each row is known. `write` takes a row, a key, and
/// the numbers from there on.
pub fn scores(
    arch: Arch,
    rows: &dyn Rows,
    keys: Range<usize>,
    shown: Shown,
    softmax: &[Softmax],
    write: &mut dyn FnMut(usize, usize, &[f32]),
) {
    arch.dispatch(Scores { rows, keys, shown, softmax, write });
}

struct Scores<'a> {
    rows: &'a dyn Rows,
    keys: Range<usize>,
    shown: Shown,
    softmax: &'a [Softmax],
    write: &'a mut dyn FnMut(usize, usize, &[f32]),
}

impl WithSimd for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let stage = match self.shown {
            Shown::Scaled => Stage::Scaled,
            Shown::Capped => Stage::Capped,
            Shown::Biased | Shown::Weights => Stage::Biased,
        };
        let unmasked = Unmasked(self.rows);
        let rows: &dyn Rows = if stage == Stage::Biased { self.rows } else { &unmasked };
        let ([key, value], count) = (rows.sizes(), lanes::<S, 1>(rows.count()));
        let mut scratch = Scratch::new();
        let [queries, outputs, key_buffer, value_buffer] =
            scratch.slices([count * key, count * value, KEYS * key, KEYS * value]);
        let panels = panels::<S, 1>(simd, rows, [queries, outputs]);
        let mut scores = [Lanes::splat(simd, 0.0); KEYS];
        for keys in tiles(self.keys.clone()) {
            let tile = rows.tile(keys, [&mut *key_buffer, &mut *value_buffer]);
            for panel in &panels {
                let Some(tile) = tile.part(&panel.span, rows.sizes()) else { continue };
                let scores = &mut scores[..tile.keys.len() / rows.sizes()[0]];
                panel.score::<8>(simd, tile, stage, scores);
                for lane in 0..panel.visible.len() {
                    self.write_row(panel, lane, tile.first, scores);
                }
            }
        }
    }
}

impl Scores<'_> {
    /// Writes what a row sees of the keys from `first` on.
    fn write_row<S: Simd>(
        &mut self,
        panel: &Panel<'_, S, 1>,
        lane: usize,
        first: usize,
        scores: &[Lanes<S, 1>],
    ) {
        let (row, seen) = (panel.first + lane, &panel.visible[lane]);
        let keys = seen.start.max(first)..seen.end.min(first + scores.len());
        if keys.is_empty() {
            return;
        }
        let Softmax { max, sum } = self.softmax[row];
        let shown = self.shown;
        let number = |score: f32| match shown {
            Shown::Weights if sum == 0.0 => 0.0,
            Shown::Weights => (score - max).exp() / sum,
            _ => score,
        };
        let mut line = [0.0; KEYS];
        let line = &mut line[..keys.len()];
        let scores = &scores[keys.start - first..keys.end - first];
        line.iter_mut().zip(scores).for_each(|(to, score)| *to = number(score.rows()[lane]));
        (self.write)(row, keys.start, line);
    }
}

/// Rows that see every key there is.
struct Unmasked<'a>(&'a dyn Rows);

impl Rows for Unmasked<'_> {
    fn keys(&self) -> usize {
        self.0.keys()
    }

    fn softcap(&self) -> f32 {
        self.0.softcap()
    }

    fn has_bias(&self) -> bool {
        self.0.has_bias()
    }

    fn count(&self) -> usize {
        self.0.count()
    }

    fn sizes(&self) -> [usize; 2] {
        self.0.sizes()
    }

    fn visible(&self, _: usize) -> Range<usize> {
        0..self.keys()
    }

    fn query(&self, row: usize, to: &mut [f32]) {
        self.0.query(row, to);
    }

    fn tile<'t>(&'t self, keys: Range<usize>, buffers: [&'t mut [f32]; 2]) -> Tile<'t> {
        self.0.tile(keys, buffers)
    }

    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]) {
        self.0.add_bias(row, first, scores);
    }
}

/// Lanes of the panels that so many rows fill.
fn lanes<S: Simd, const N: usize>(rows: usize) -> usize {
    rows.next_multiple_of(Lanes::<S, N>::COUNT)
}

/// The rows, as many side by side as fit, in memory for queries and for outputs.
#[inline(always)]
fn panels<'a, S: Simd, const N: usize>(
    simd: S,
    rows: &'a dyn Rows,
    [queries, outputs]: [&'a mut [f32]; 2],
) -> Vec<Panel<'a, S, N>> {
    let [key, value] = rows.sizes();
    let queries = bytemuck::cast_slice_mut(queries).chunks_exact_mut(key);
    let memory = queries.zip(bytemuck::cast_slice_mut(outputs).chunks_exact_mut(value));
    let first = (0..rows.count()).step_by(Lanes::<S, N>::COUNT);
    let panels = first.zip(memory);
    panels.map(|(first, (query, output))| Panel::new(simd, rows, first, [query, output])).collect()
}

/// `keys`, cut at multiples of [`KEYS`].
pub(super) fn tiles(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let first = keys.start / KEYS * KEYS;
    (first..keys.end)
        .step_by(KEYS)
        .map(move |tile| tile.max(keys.start)..(tile + KEYS).min(keys.end))
}

/// The state of all rows, each row's output together.
fn partial<S: Simd, const N: usize>(panels: &[Panel<'_, S, N>], size: usize) -> Partial {
    let mut partial = Partial { softmax: Vec::new(), output: Vec::new() };
    for panel in panels {
        let count = panel.visible.len();
        let states = panel.max.rows().iter().zip(panel.sum.rows()).take(count);
        partial.softmax.extend(states.map(|(&max, &sum)| Softmax { max, sum }));
        let start = partial.output.len();
        partial.output.resize(start + count * size, 0.0);
        for (h, numbers) in panel.output.iter().enumerate() {
            let to = partial.output[start + h..].iter_mut().step_by(size);
            to.zip(&numbers.rows()[..count]).for_each(|(to, x)| *to = *x);
        }
    }
    partial
}
