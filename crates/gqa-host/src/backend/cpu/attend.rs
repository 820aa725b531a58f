//! All of a task's rows past a range of keys, tile by tile.

use super::decode::FewRows;
use super::lanes::Lanes;
use super::panel::{KEYS, Panel, Rows, Stage, Tile};
use crate::{Problem, QkOutput};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// A row's largest score and its sum of weights relative to that.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub(super) max: f32,
    pub(super) sum: f32,
}

/// What a range of keys gives a task's rows.
pub(super) struct Partial {
    pub(super) softmax: Vec<Softmax>,
    /// (rows, size of a value in a tile): sums of weighted values.
    pub(super) output: Vec<f32>,
}

/// Lets all rows see a range of keys.
pub(super) struct Attend<'a> {
    pub(super) rows: &'a dyn Rows,
    pub(super) keys: Range<usize>,
}

impl WithSimd for Attend<'_> {
    type Output = Partial;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Partial {
        let many_registers = S::REGISTER_COUNT >= 32;
        match self.rows.count() {
            // Up to half of the lanes, sums over lanes cost less than lanes without a row.
            1 if S::F32_LANES >= 2 => self.few::<S, 1, 4>(simd),
            2..=3 if S::F32_LANES >= 8 => self.few::<S, 3, 4>(simd),
            4 if S::F32_LANES >= 8 && many_registers => self.few::<S, 4, 4>(simd),
            4 if S::F32_LANES >= 8 => self.few::<S, 4, 2>(simd),
            5..=8 if S::F32_LANES >= 16 => self.few::<S, 8, 2>(simd),
            count if count <= S::F32_LANES => self.run::<S, 1, 8>(simd),
            _ if many_registers => self.run::<S, 2, 8>(simd),
            _ => self.run::<S, 2, 4>(simd),
        }
    }
}

impl Attend<'_> {
    #[inline(always)]
    fn few<S: Simd, const R: usize, const BLOCK: usize>(self, simd: S) -> Partial {
        FewRows::<S, R>::new(simd, self.rows).run::<BLOCK>(simd, self.keys)
    }

    #[inline(always)]
    fn run<S: Simd, const N: usize, const BLOCK: usize>(self, simd: S) -> Partial {
        let mut panels = panels::<S, N>(simd, self.rows);
        let mut scores = vec![Lanes::splat(simd, 0.0); KEYS];
        let mut buffers = buffers(self.rows);
        for keys in tiles(self.keys) {
            let tile = self.rows.tile(keys, &mut buffers);
            for panel in &mut panels {
                panel.attend::<BLOCK>(simd, tile, &mut scores);
            }
        }
        partial(&panels, self.rows.sizes()[1])
    }
}

/// Computes output_qk: the scores once more, and now the softmax is known.
pub(super) struct Scores<'a> {
    pub(super) rows: &'a dyn Rows,
    pub(super) keys: Range<usize>,
    /// Of each row.
    pub(super) softmax: &'a [Softmax],
    /// Takes a row, a key, and the numbers from there on.
    pub(super) write: &'a mut dyn FnMut(usize, usize, &[f32]),
}

impl WithSimd for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let stage = match self.rows.problem().output_qk {
            QkOutput::Scaled => Stage::Scaled,
            QkOutput::Capped => Stage::Capped,
            _ => Stage::Biased,
        };
        let unmasked = Unmasked(self.rows);
        let rows: &dyn Rows = if stage == Stage::Biased { self.rows } else { &unmasked };
        let panels = panels::<S, 1>(simd, rows);
        let mut scores = [Lanes::splat(simd, 0.0); KEYS];
        let mut buffers = buffers(rows);
        for keys in tiles(self.keys.clone()) {
            let tile = rows.tile(keys, &mut buffers);
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
        let mode = self.rows.problem().output_qk;
        let number = |score: f32| match mode {
            QkOutput::AfterSoftmax if sum == 0.0 => 0.0,
            QkOutput::AfterSoftmax => (score - max).exp() / sum,
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
    fn problem(&self) -> &Problem {
        self.0.problem()
    }

    fn count(&self) -> usize {
        self.0.count()
    }

    fn sizes(&self) -> [usize; 2] {
        self.0.sizes()
    }

    fn visible(&self, _: usize) -> Range<usize> {
        0..self.problem().total_len
    }

    fn query(&self, row: usize, to: &mut [f32]) {
        self.0.query(row, to);
    }

    fn tile<'t>(&'t self, keys: Range<usize>, buffers: &'t mut [Vec<f32>; 2]) -> Tile<'t> {
        self.0.tile(keys, buffers)
    }

    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]) {
        self.0.add_bias(row, first, scores);
    }
}

/// The rows, as many side by side as fit.
#[inline(always)]
fn panels<S: Simd, const N: usize>(simd: S, rows: &dyn Rows) -> Vec<Panel<'_, S, N>> {
    let first = (0..rows.count()).step_by(Lanes::<S, N>::COUNT);
    first.map(|first| Panel::new(simd, rows, first)).collect()
}

/// Room for a tile of keys and one of values.
pub(super) fn buffers(rows: &dyn Rows) -> [Vec<f32>; 2] {
    rows.sizes().map(|size| vec![0.0; KEYS * size])
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::ProblemFields;
    use pulp::{Arch, Scalar};

    const SIZE: usize = 48;

    /// Queries, keys and values of made-up numbers; each row sees one key less at the end and one
    /// more at the front than the one before.
    struct MadeUp {
        problem: Problem,
        count: usize,
        keys: usize,
    }

    impl MadeUp {
        fn number(i: usize, seed: usize) -> f32 {
            ((i * 7919 + seed) * 104_729 % 10_007) as f32 / 5003.5 - 1.0
        }
    }

    impl Rows for MadeUp {
        fn problem(&self) -> &Problem {
            &self.problem
        }

        fn count(&self) -> usize {
            self.count
        }

        fn sizes(&self) -> [usize; 2] {
            [SIZE, 2 * SIZE]
        }

        fn visible(&self, row: usize) -> Range<usize> {
            20 - row..self.keys - row
        }

        fn query(&self, row: usize, to: &mut [f32]) {
            to[..SIZE].iter_mut().enumerate().for_each(|(i, x)| {
                *x = Self::number(i + row * SIZE, 1);
            });
        }

        fn tile<'t>(&'t self, keys: Range<usize>, buffers: &'t mut [Vec<f32>; 2]) -> Tile<'t> {
            for (buffer, size) in buffers.iter_mut().zip(self.sizes()) {
                let numbers = keys.start * size..keys.end * size;
                buffer.iter_mut().zip(numbers).for_each(|(to, i)| *to = Self::number(i, size));
            }
            let [key, value] = self.sizes().map(|size| keys.len() * size);
            Tile { first: keys.start, keys: &buffers[0][..key], values: &buffers[1][..value] }
        }

        fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]) {
            let numbers = (first..).map(|key| Self::number(key, row));
            scores.iter_mut().zip(numbers).for_each(|(score, bias)| *score += bias);
        }
    }

    /// What makes vectors as wide as processors have them.
    fn processors() -> Vec<Arch> {
        #[cfg(target_arch = "x86_64")]
        {
            use pulp::x86::{V3, V4};
            let wide = [V4::try_new().map(Arch::V4), V3::try_new().map(Arch::V3)];
            wide.into_iter().flatten().collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![Arch::new()]
    }

    #[test]
    fn lanes_of_rows_and_lanes_of_elements_agree_on_every_processor() {
        let bias = crate::Bias { batch: true, head: true, row: true, columns: 300, boolean: false };
        for (count, bias) in (1..=9).flat_map(|count| [(count, None), (count, Some(bias))]) {
            let softcap = (count % 2 == 0).then_some(3.0);
            let plain = ProblemFields {
                q_heads: 1,
                kv_heads: 1,
                bias,
                softcap,
                ..ProblemFields::plain("GroupQueryAttention", DType::F32)
            };
            let plain = Problem::new(plain).unwrap();
            let rows = MadeUp { problem: plain, count, keys: 300 };
            let attend = || Attend { rows: &rows, keys: 0..300 };
            let want = attend().run::<Scalar, 1, 8>(Scalar);
            for arch in processors() {
                let got = arch.dispatch(attend());
                for (got, want) in got.softmax.iter().zip(&want.softmax) {
                    assert!((got.max - want.max).abs() < 1e-5, "{arch:?}, {count} rows");
                    assert!((got.sum / want.sum - 1.0).abs() < 1e-5, "{arch:?}, {count} rows");
                }
                assert_eq!(got.output.len(), want.output.len());
                for (got, want) in got.output.iter().zip(&want.output) {
                    assert!((got - want).abs() < 1e-4, "{got} for {want}, {arch:?}, {count} rows");
                }
            }
        }
    }
}
