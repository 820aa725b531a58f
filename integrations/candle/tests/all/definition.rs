//! Attention as it is defined, row by row in float64.

use candle::{Device, IndexOp, Result, Shape, Tensor};

/// Numbers that are made up, on that device.
pub fn noise(shape: impl Into<Shape>, seed: u32, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let numbers = (0..shape.elem_count() as u32).map(|i| {
        let mixed =
            (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)).wrapping_mul(2_246_822_519);
        (mixed >> 8) as f32 / (1 << 23) as f32 - 1.
    });
    Tensor::from_iter(numbers, device)?.reshape(shape)
}

/// What becomes of scores.
#[derive(Clone)]
pub struct Definition {
    pub scale: f32,
    pub window: [Option<usize>; 2],
    pub softcap: f32,
    pub slopes: Option<Vec<f32>>,
    /// Of each sequence.
    pub ranges: Option<Vec<Vec<[i32; 2]>>>,
}

impl Definition {
    pub fn new(scale: f32, window: [Option<usize>; 2]) -> Self {
        Self { scale, window, softcap: 0., slopes: None, ranges: None }
    }

    /// Of tensors of shape (batch, rows, heads, size).
    pub fn batch(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let entries = (0..q.dim(0)?).map(|b| self.sequence(b, &q.i(b)?, &k.i(b)?, &v.i(b)?));
        Tensor::stack(&entries.collect::<Result<Vec<_>>>()?, 0)
    }

    /// Of sequences that lie one behind the other.
    pub fn sequences(&self, [q, k, v]: [&Tensor; 3], rows: &[u32], keys: &[u32]) -> Result<Tensor> {
        let part = |tensor: &Tensor, starts: &[u32], b: usize| {
            tensor.narrow(0, starts[b] as usize, (starts[b + 1] - starts[b]) as usize)
        };
        let used = (0..rows.len() - 1).filter(|b| rows[*b] < rows[b + 1]);
        let outputs = used
            .map(|b| self.sequence(b, &part(q, rows, b)?, &part(k, keys, b)?, &part(v, keys, b)?));
        Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, 0)
    }

    fn sequence(&self, b: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (shape, group) = (q.shape().clone(), q.dim(1)? / k.dim(1)?);
        let offset = k.dim(0)? as i64 - q.dim(0)? as i64;
        let [q, k, v] = [q.to_vec3::<f32>()?, k.to_vec3::<f32>()?, v.to_vec3::<f32>()?];
        let mut output = Vec::new();
        for (i, row) in q.iter().enumerate() {
            let place = i as i64 + offset;
            for (head, query) in row.iter().enumerate() {
                let score = |key: usize| {
                    self.score(b, head, [place, key as i64], query, &k[key][head / group])
                };
                let scores: Vec<f64> = (0..k.len()).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max).max(-1e30);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum = weights.iter().sum::<f64>().max(1e-300);
                output.extend((0..query.len()).map(|x| {
                    let terms =
                        weights.iter().zip(&v).map(|(w, v)| w * f64::from(v[head / group][x]));
                    (terms.sum::<f64>() / sum) as f32
                }));
            }
        }
        Tensor::from_vec(output, shape, &Device::Cpu)
    }

    fn score(&self, b: usize, head: usize, [place, key]: [i64; 2], q: &[f32], k: &[f32]) -> f64 {
        let within = |side: Option<usize>, distance: i64| side.is_none_or(|n| distance <= n as i64);
        let shared = self.ranges.as_ref().is_some_and(|ranges| {
            let contains =
                |[begin, end]: &[i32; 2], x| (i64::from(*begin)..i64::from(*end)).contains(&x);
            ranges[b].iter().any(|range| contains(range, place) && contains(range, key))
        });
        let [before, behind] = [place - key, key - place];
        let seen = within(self.window[0], before) && within(self.window[1], behind);
        if !(seen || shared) {
            return f64::NEG_INFINITY;
        }
        let product: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let (score, cap) = (product * f64::from(self.scale), f64::from(self.softcap));
        let score = if cap > 0. { cap * (score / cap).tanh() } else { score };
        let slope = self.slopes.as_ref().map_or(0., |slopes| f64::from(slopes[head]));
        score - slope * (place - key).abs() as f64
    }
}
