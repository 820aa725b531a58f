//! Every way to put rows or elements into lanes gives what one number at a time gives. A test of
//! its own: unit tests would compile all of them once more.

use gqa_cpu::{Rows, Tile, attend};
use pulp::Arch;
use std::ops::Range;

const SIZE: usize = 48;

/// Queries, keys and values of made-up numbers; each row sees one key less at the end and one
/// more at the front than the one before.
struct MadeUp {
    softcap: f32,
    has_bias: bool,
    count: usize,
    keys: usize,
}

impl MadeUp {
    fn number(i: usize, seed: usize) -> f32 {
        ((i * 7919 + seed) * 104_729 % 10_007) as f32 / 5003.5 - 1.0
    }
}

impl Rows for MadeUp {
    fn keys(&self) -> usize {
        self.keys
    }

    fn softcap(&self) -> f32 {
        self.softcap
    }

    fn has_bias(&self) -> bool {
        self.has_bias
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

    fn tile<'t>(&'t self, keys: Range<usize>, mut buffers: [&'t mut [f32]; 2]) -> Tile<'t> {
        for (buffer, size) in buffers.iter_mut().zip(self.sizes()) {
            let numbers = keys.start * size..keys.end * size;
            buffer.iter_mut().zip(numbers).for_each(|(to, i)| *to = Self::number(i, size));
        }
        let [key, value] = self.sizes().map(|size| keys.len() * size);
        let [keys_of, values] = buffers;
        Tile { first: keys.start, keys: &keys_of[..key], values: &values[..value] }
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
    for (count, has_bias) in (1..=9).flat_map(|count| [(count, false), (count, true)]) {
        let softcap = if count % 2 == 0 { 3.0 } else { 0.0 };
        let rows = MadeUp { softcap, has_bias, count, keys: 300 };
        let want = attend(Arch::Scalar, &rows, 0..300);
        for arch in processors() {
            let got = attend(arch, &rows, 0..300);
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
