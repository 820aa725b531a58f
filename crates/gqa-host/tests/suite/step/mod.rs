//! A small call on a shared cache, on which back ends are compared.

pub mod paged;

use gqa_host::backend::Backend;
use gqa_host::op::{GroupQueryAttention, Inputs, KvCache};
use gqa_host::{DType, Problem, Tensor};

/// Values in -1..1 that depend on `seed`.
pub fn random(dtype: DType, shape: &[usize], seed: u32) -> Tensor {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_f32(dtype, shape, &values).unwrap()
}

pub fn int(values: &[i32]) -> Tensor {
    Tensor::from(ndarray::Array1::from(values.to_vec()))
}

pub fn assert_close(got: &Tensor, want: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    for (i, (got, want)) in got.to_f64().into_iter().zip(want.to_f64()).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * (1.0 + want.abs()),
            "{what}: element {i} is {got}, not {want}"
        );
    }
}

pub const HEADS: i64 = 8;
pub const KV_HEADS: i64 = 2;
pub const SIZE: usize = 64;
pub const CAPACITY: usize = 300;

pub fn operator() -> GroupQueryAttention {
    GroupQueryAttention::new(HEADS, KV_HEADS).do_rotary(true)
}

/// A call on a shared cache.
pub struct Step {
    pub query: Tensor,
    pub key: Tensor,
    pub value: Tensor,
    pub cos: Tensor,
    pub sin: Tensor,
    pub cache: KvCache,
    pub seqlens_k: Tensor,
    pub total: Tensor,
}

impl Step {
    pub fn new(dtype: DType, rows: usize, lengths: &[i32], total: usize) -> Self {
        let batch = lengths.len();
        let new = |heads: i64, seed| random(dtype, &[batch, rows, heads as usize * SIZE], seed);
        let cache = |seed| random(dtype, &[batch, KV_HEADS as usize, CAPACITY, SIZE], seed);
        Self {
            query: new(HEADS, 1),
            key: new(KV_HEADS, 2),
            value: new(KV_HEADS, 3),
            cos: random(dtype, &[CAPACITY, SIZE / 2], 4),
            sin: random(dtype, &[CAPACITY, SIZE / 2], 5),
            cache: KvCache { key: cache(6), value: cache(7), scales: None },
            seqlens_k: int(&lengths.iter().map(|length| length - 1).collect::<Vec<_>>()),
            total: int(&[total as i32]),
        }
    }

    pub fn inputs(&self) -> Inputs<'_> {
        Inputs {
            key: Some(&self.key),
            value: Some(&self.value),
            cos_cache: Some(&self.cos),
            sin_cache: Some(&self.sin),
            ..Inputs::new(&self.query, &self.seqlens_k, &self.total)
        }
    }

    pub fn problem(&self) -> Problem {
        operator().problem_in_place(&self.inputs(), &self.cache).unwrap()
    }

    /// Output and cache afterwards.
    pub fn run(&self, backend: &dyn Backend) -> (Tensor, KvCache) {
        let mut cache = self.cache.clone();
        let outputs = operator().run_in_place(&self.inputs(), &mut cache, backend).unwrap();
        (outputs.output, cache)
    }
}

pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 2e-3,
        _ => 1.6e-2,
    }
}
