//! All rows past a range of keys, tile by tile.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::decode::FewRows;
use super::instructions::Instructions;
use super::key_range::{Attend, Softmax, Write, tiles};
use super::lanes::Lanes;
use super::native;
#[cfg(target_arch = "x86_64")]
use super::pairs;
use super::panel::{Panel, Products, Rows, Stage, TILE, Tile};
use super::panels::{lanes_of, many, panels};
use super::scratch::Scratch;
use super::singles::Singles;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Attention of all rows over a range of keys, with these instructions. `write` receives each row's
/// result.
pub fn attend(
    instructions: Instructions,
    rows: &dyn Rows,
    keys: Range<usize>,
    write: &mut Write<'_>,
) {
    let attend = Attend { rows, keys, write };
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = instructions.tiles.filter(|_| pairs::fit(rows)) {
        return amx::attend(amx, attend);
    }
    native::dispatch(instructions.vectors, attend);
}

impl WithSimd for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Constants, so that what other vectors need is not compiled for these.
        match self.rows.count() {
            // If rows fill at most half of the lanes, reductions over lanes cost less than idle
            // lanes.
            1 if const { S::F32_LANES >= 2 } => native::apart(simd, Few::<1, 4>(self)),
            2..=3 if const { S::F32_LANES >= 8 } => native::apart(simd, Few::<3, 4>(self)),
            4 if const { S::F32_LANES >= 8 && many_registers::<S>() } => {
                native::apart(simd, Few::<4, 4>(self))
            }
            4 if const { S::F32_LANES >= 8 } => native::apart(simd, Few::<4, 2>(self)),
            5..=6 if const { S::F32_LANES >= 8 } => native::apart(simd, Few::<6, 2>(self)),
            7..=8 if const { S::F32_LANES >= 16 } => native::apart(simd, Few::<8, 2>(self)),
            7..=8 if const { S::F32_LANES >= 8 } => native::apart(simd, Few::<8, 1>(self)),
            count if count <= S::F32_LANES => native::apart(simd, Many::<1, 8>(self)),
            _ if const { many_registers::<S>() } => native::apart(simd, Many::<2, 8>(self)),
            _ => native::apart(simd, Many::<2, 4>(self)),
        }
    }
}

const fn many_registers<S: Simd>() -> bool {
    S::REGISTER_COUNT >= 32
}

/// Up to `R` rows, the elements of a head across the lanes.
struct Few<'a, const R: usize, const BLOCK: usize>(Attend<'a>);

impl<const R: usize, const BLOCK: usize> WithSimd for Few<'_, R, BLOCK> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Attend { rows, keys, write } = self.0;
        FewRows::<S, R>::new(simd, rows).run::<BLOCK>(simd, keys, write);
    }
}

/// Any number of rows, in panels of `N` vectors of them.
struct Many<'a, const N: usize, const BLOCK: usize>(Attend<'a>);

impl<const N: usize, const BLOCK: usize> WithSimd for Many<'_, N, BLOCK> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let scale = self.0.rows.scale();
        many::<S, _, N>(simd, Singles::<BLOCK> { scale }, self.0);
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

/// Recomputes the scores once the softmax of each row is known. `write` takes a row, a key, and the
/// scores from that key on.
pub fn scores(
    instructions: Instructions,
    rows: &dyn Rows,
    keys: Range<usize>,
    shown: Shown,
    softmax: &[Softmax],
    write: &mut dyn FnMut(usize, usize, &[f32]),
) {
    instructions.vectors.dispatch(Scores { rows, keys, shown, softmax, write });
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
        let ([key, value], count) = (rows.sizes(), lanes_of::<S, 1>(rows.count()));
        let mut scratch = Scratch::new();
        let [queries, outputs, lines, key_buffer, value_buffer, packed] = scratch.slices([
            count * key,
            count * value,
            S::F32_LANES * key,
            TILE * key,
            TILE * value,
            TILE * value,
        ]);
        let products = Singles::<8> { scale: rows.scale() };
        let panels = panels::<S, _, 1>(simd, products, rows, [queries, outputs], lines);
        let mut scores = [Lanes::splat(simd, 0.0); TILE];
        for keys in tiles(self.keys.clone(), TILE) {
            let buffers = [&mut *key_buffer, &mut *value_buffer, &mut *packed];
            let tile = Products::<S, 1>::tile(products, simd, rows, &keys, buffers);
            for panel in &panels {
                let Some(part) = panel.part::<Singles<8>>(&keys) else { continue };
                let (first, scores) = (keys.start + part.start, &mut scores[..part.len()]);
                panel.score(simd, products, (&keys, &tile), part, stage, scores);
                for lane in 0..panel.visible.len() {
                    self.write_row(panel, lane, first, scores);
                }
            }
        }
    }
}

impl Scores<'_> {
    /// Writes the scores of the keys that a row attends to, from `first` on.
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
        let mut line = [0.0; TILE];
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

    fn scale(&self) -> f32 {
        self.0.scale()
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
