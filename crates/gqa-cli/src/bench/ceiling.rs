//! How fast this machine can be at best, measured in the run whose results are compared with it.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use gqa_host::DType;
use gqa_host::driver::DeviceTensor;
use gqa_host::plan::Cost;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::gpu::Gpu;

/// A rate, and where it is from.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Rate {
    /// Bytes or operations per second.
    pub per_second: f64,
    /// How it was found, in words.
    pub source: String,
}

/// The roofline.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Ceilings {
    /// Bytes per second of memory.
    pub memory: Rate,
    /// Operations per second on 16-bit elements with float32 sums.
    pub half: Rate,
    /// Operations per second on float32.
    pub single: Rate,
}

impl Ceilings {
    /// Most repetitions of a measurement. The best one counts, because a ceiling is an upper bound.
    pub const MOST_TRIES: u64 = 7;

    /// Operations per second on that element type.
    pub fn arithmetic(&self, dtype: DType) -> &Rate {
        if dtype == DType::F32 { &self.single } else { &self.half }
    }

    /// Seconds that a call takes at least.
    pub fn seconds(&self, cost: &Cost, dtype: DType) -> f64 {
        let (arithmetic, memory) = (self.arithmetic(dtype).per_second, self.memory.per_second);
        (cost.flops / arithmetic).max(cost.bytes / memory)
    }

    /// Of a GPU: bandwidth is measured, arithmetic is the vendor's.
    pub fn of_gpu(gpu: &Gpu, tries: u64) -> Result<Self> {
        let info = gpu.device.info();
        let vendor = |per_second| Rate { per_second, source: "the vendor's figure".to_owned() };
        Ok(Self {
            memory: Rate {
                per_second: copied(gpu, tries)?,
                source: "measured: copies in device memory, bytes read and written".to_owned(),
            },
            half: vendor(info.tensor_flops),
            single: vendor(info.f32_flops),
        })
    }

    /// Of the CPU: both are measured. It computes 16-bit elements in float32, but for prefill in
    /// bfloat16 where it has tiles (AMX), which is beyond this ceiling.
    pub fn of_cpu(tries: u64) -> Self {
        let arithmetic = Rate {
            per_second: best(tries, || Arch::new().dispatch(MultiplyAdd)),
            source: "measured: float32 multiply-adds on all cores".to_owned(),
        };
        let memory = Rate {
            per_second: streamed(tries),
            source: "measured: memory read by all cores".to_owned(),
        };
        Self { memory, half: arithmetic.clone(), single: arithmetic }
    }
}

fn best(tries: u64, mut measure: impl FnMut() -> f64) -> f64 {
    (0..tries).map(|_| measure()).fold(0.0, f64::max)
}

/// Bytes per second of a copy far larger than the L2 cache.
fn copied(gpu: &Gpu, tries: u64) -> Result<f64> {
    let elements = (gpu.device.memory_bytes() / 64).min(1 << 30) / 4;
    let tensor = || DeviceTensor::new(&gpu.device, DType::I32, &[elements]);
    let (from, to) = (tensor()?, tensor()?);
    from.fill(1, &gpu.stream)?;
    let mut rate = 0.0f64;
    for _ in 0..tries {
        let seconds = gpu.stream.timed(|| to.copy_from(&from, &gpu.stream))?;
        rate = rate.max(2.0 * from.bytes() as f64 / seconds);
    }
    Ok(rate)
}

/// Bytes that are read: more than caches hold.
const STREAMED_BYTES: usize = 512 << 20;

fn streamed(tries: u64) -> f64 {
    let words = vec![1u64; STREAMED_BYTES / 8];
    best(tries, || {
        let start = Instant::now();
        let chunks = words.par_chunks(1 << 16);
        black_box(chunks.map(|chunk| chunk.iter().fold(0, |sum: u64, x| sum ^ x)).sum::<u64>());
        STREAMED_BYTES as f64 / start.elapsed().as_secs_f64()
    })
}

/// Multiply-adds in registers on all cores: operations per second.
struct MultiplyAdd;

/// Chains that do not depend on each other: enough to hide an addition's latency.
const CHAINS: usize = 10;
const ROUNDS: usize = 1 << 24;

impl WithSimd for MultiplyAdd {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f64 {
        let start = Instant::now();
        rayon::broadcast(|_| {
            // Closures do not inherit vector features: vectorize enters them again.
            simd.vectorize(Chains);
        });
        let lanes = size_of::<S::f32s>() / size_of::<f32>();
        let operations = 2 * lanes * CHAINS * ROUNDS * rayon::current_num_threads();
        operations as f64 / start.elapsed().as_secs_f64()
    }
}

/// The work of one core.
struct Chains;

impl WithSimd for Chains {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (factor, term) = (simd.splat_f32s(black_box(0.5)), simd.splat_f32s(black_box(0.25)));
        let mut sums = [term; CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = simd.mul_add_f32s(*sum, factor, term);
            }
        }
        black_box(sums.map(|sum| simd.reduce_sum_f32s(sum)));
    }
}
