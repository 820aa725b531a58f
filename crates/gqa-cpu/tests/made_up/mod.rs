//! Rows of made-up numbers, for tests.

use gqa_cpu::{Rows, Softmax, Starts, StoredRows, StoredTile, Tile};
use half::bf16;
use std::ops::Range;

/// Queries, keys and values; each row attends to one key less at the end than the one before, and
/// the first 21 rows to one more at the front.
pub struct MadeUp {
    pub scale: f32,
    pub softcap: f32,
    pub has_bias: bool,
    pub count: usize,
    pub sizes: [usize; 2],
    /// Whether all values are representable in bfloat16, and the cache has that type.
    pub stored: bool,
    pub cache: [Vec<bf16>; 2],
    pub keys: usize,
    /// Called whenever rows are read, to test callbacks.
    pub meanwhile: fn(),
}

impl MadeUp {
    /// Numbers of rows, keys, and elements of a key and of a value.
    pub fn new(count: usize, keys: usize, sizes: [usize; 2]) -> Self {
        let numbers = |size: usize| (0..keys * size).map(move |i| Self::number(i, size));
        let cache = sizes.map(|size| numbers(size).map(bf16::from_f32).collect());
        Self {
            scale: 0.25,
            softcap: 0.0,
            has_bias: false,
            count,
            sizes,
            stored: false,
            cache,
            keys,
            meanwhile: || (),
        }
    }

    /// With NaN among the values of a key.
    pub fn poisoned(mut self, key: usize) -> Self {
        self.cache[1][key * self.sizes[1] + 1] = bf16::NAN;
        self
    }

    fn number(i: usize, seed: usize) -> f32 {
        ((i * 7919 + seed) * 104_729 % 10_007) as f32 / 5003.5 - 1.0
    }

    /// The result of a row over all keys, computed one element at a time: maximum, sum and weighted
    /// values.
    fn wanted(&self, row: usize) -> (f64, f64, Vec<f64>) {
        let [key_size, value_size] = self.sizes;
        let mut query = vec![0.0; key_size];
        self.query(row, &mut query);
        let score = |key: usize| {
            let numbers = &self.cache[0][key * key_size..];
            let products = query.iter().zip(numbers).map(|(q, k)| f64::from(*q) * k.to_f64());
            let score = products.sum::<f64>() * f64::from(self.scale);
            let cap = f64::from(self.softcap);
            let score = if cap > 0.0 { cap * (score / cap).tanh() } else { score };
            let bias = if self.has_bias { Self::number(key, row) } else { 0.0 };
            score + f64::from(bias)
        };
        let scores: Vec<_> = self.visible(row).map(score).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights = scores.iter().map(|score| (score - max).exp());
        let (mut sum, mut output) = (0.0, vec![0.0; value_size]);
        for (key, weight) in self.visible(row).zip(weights) {
            sum += weight;
            let numbers = &self.cache[1][key * value_size..];
            output.iter_mut().zip(numbers).for_each(|(to, value)| *to += weight * value.to_f64());
        }
        (max, sum, output)
    }

    /// Compares rows with the expected ones, up to the rounding of P.
    #[track_caller]
    pub fn check(&self, got: &[(Softmax, Vec<f32>)], rounding: f64, name: &str) {
        let name = format!("{name}, {} rows, {:?} numbers", self.count, self.sizes);
        assert_eq!(got.len(), self.count, "{name}");
        for (row, (softmax, means)) in got.iter().enumerate() {
            let (max, sum, wanted) = self.wanted(row);
            let wrong = format!("{name}, row {row}: {softmax:?} for {max} and {sum}");
            assert!((-1e-5..4.00001).contains(&(max - f64::from(softmax.max))), "{wrong}");
            // Relative to the same number.
            let factor = (f64::from(softmax.max) - max).exp();
            let got_sum = f64::from(softmax.sum) * factor;
            assert!((got_sum / sum - 1.0).abs() < 1e-5, "{wrong}");
            assert_eq!(means.len(), self.sizes[1], "{name}");
            let allowed = 1e-5 * sum + rounding * sum.sqrt();
            for (h, (got, want)) in means.iter().zip(wanted).enumerate() {
                let got = f64::from(*got) * sum;
                let same = (got - want).abs() < allowed || got.is_nan() && want.is_nan();
                assert!(same, "{name}, number {h} of row {row}: {got} for {want}");
            }
        }
    }
}

impl Rows for MadeUp {
    fn keys(&self) -> usize {
        self.keys
    }

    fn scale(&self) -> f32 {
        self.scale
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
        self.sizes
    }

    fn visible(&self, row: usize) -> Range<usize> {
        20_usize.saturating_sub(row)..self.keys - row
    }

    fn query(&self, row: usize, to: &mut [f32]) {
        (self.meanwhile)();
        let size = self.sizes[0];
        to[..size].iter_mut().enumerate().for_each(|(i, x)| {
            *x = bf16::from_f32(Self::number(i + row * size, 1)).to_f32();
        });
    }

    fn tile<'t>(&'t self, keys: Range<usize>, buffers: [&'t mut [f32]; 2]) -> Tile<'t> {
        (self.meanwhile)();
        let mut tile = [&[][..]; 2];
        for (which, buffer) in buffers.into_iter().enumerate() {
            let numbers = keys.start * self.sizes[which]..keys.end * self.sizes[which];
            let buffer = &mut buffer[..numbers.len()];
            buffer.iter_mut().zip(&self.cache[which][numbers]).for_each(|(to, x)| *to = x.to_f32());
            tile[which] = buffer;
        }
        Tile { keys: tile[0], values: tile[1] }
    }

    fn stored(&self, keys: &Range<usize>, lanes: usize) -> Option<StoredTile<'_>> {
        (self.meanwhile)();
        let rows = |which: usize| {
            let size = self.sizes[which];
            let starts = keys.clone().map(|key| key * size);
            // Row starts of a paged cache, or of a contiguous one.
            let starts = match self.count % 2 {
                0 => Starts::Each(starts.collect()),
                _ => Starts::Strided { first: keys.start * size, stride: size, count: keys.len() },
            };
            StoredRows::new(&self.cache[which], starts, size)
        };
        (self.stored && lanes > 1).then(|| StoredTile::BF16([rows(0), rows(1)]))
    }

    fn add_bias(&self, row: usize, first: usize, scores: &mut [f32]) {
        (self.meanwhile)();
        assert!(first + scores.len() <= self.keys, "bias of keys that are not there");
        let numbers = (first..).map(|key| Self::number(key, row));
        scores.iter_mut().zip(numbers).for_each(|(score, bias)| *score += bias);
    }
}
