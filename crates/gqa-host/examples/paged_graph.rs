//! A decode step over a paged KV cache in a CUDA graph, compared with the same step over a
//! contiguous cache. Graphs walk over several caches, so that each step finds its own in device
//! memory. Block tables and lengths are read on the GPU: a graph stays good while sequences grow
//! within the bounds.
//!
//! `cargo run --release --example paged_graph`; without a GPU it says so.

use gqa_host::driver::{Call, Device, Graph, Stream};
use gqa_host::engine::{Dense, Heads, Layer, Paged};
use gqa_host::plan::{PlanOptions, TensorId, plan};
use gqa_host::{DType, Problem, Result, Tensor};
use ndarray::{Array1, Array2};
use std::sync::Arc;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const SIZE: usize = 128;
const BLOCK: usize = 64;
const RUNS: usize = 60;
/// What the L2 does not hold.
const COLD_BYTES: usize = 256 << 20;

fn layer() -> Layer {
    Layer::new(DType::BF16, Heads { query: HEADS, kv: KV_HEADS, size: SIZE })
}

/// A token of each of `batch` sequences of `keys` rows in all, in blocks.
fn paged(batch: usize, keys: usize) -> Result<Problem> {
    let blocks = keys.div_ceil(BLOCK);
    layer().paged(Paged::decode(batch, [batch * blocks, BLOCK, blocks]).longest(keys))
}

/// The same where every sequence has a cache.
fn apart(batch: usize, keys: usize) -> Result<Problem> {
    layer().dense(Dense::decode(batch, keys))
}

/// Median microseconds of a step.
fn microseconds(
    device: &Device,
    problem: &Problem,
    options: &PlanOptions,
    keys: usize,
) -> Result<f64> {
    let stream = Stream::new(device)?;
    let plan = Arc::new(plan(problem, device.info(), options)?);
    let batch = problem.batch;
    let bytes = 4 * batch * keys * KV_HEADS * SIZE;
    let calls: Vec<_> = (0..COLD_BYTES.div_ceil(bytes) + 1)
        .map(|_| Call::new(device, plan.clone()).map(Arc::new))
        .collect::<Result<_>>()?;
    for call in &calls {
        let last = Tensor::from(Array1::from_elem(batch, keys as i32 - 1));
        call.upload(TensorId::SeqlensK, &last, &stream)?;
        if let Some(pages) = problem.pages {
            // No sequence's blocks are neighbours.
            let blocks = |b: usize, i: usize| ((i * batch + b) * 7919 % pages.blocks) as i32;
            let shape = (batch, pages.per_sequence);
            let table = Array2::from_shape_fn(shape, |(b, i)| blocks(b, i)).into();
            call.upload(TensorId::BlockTable, &table, &stream)?;
            let starts = Array1::from_iter(0..=batch as i32).into();
            call.upload(TensorId::CumulativeSequenceLength, &starts, &stream)?;
        }
    }
    let mut graph = Graph::capture(&stream, &calls)?;
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        times.push(stream.timed(|| graph.replay(&stream))? / calls.len() as f64 * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}

fn main() -> Result<()> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => {
            println!("no GPU to show this on: {reason}");
            return Ok(());
        }
    };
    let reads = PlanOptions::default();
    let gathers = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    println!(
        "bfloat16, {HEADS}/{KV_HEADS} heads of {SIZE}, blocks of {BLOCK} rows; microseconds of a step"
    );
    println!("sequences x keys    in blocks    gathered    apart");
    for (batch, keys) in [
        (1, 1024),
        (1, 8192),
        (8, 1024),
        (8, 8192),
        (32, 512),
        (32, 2048),
        (32, 8192),
        (128, 512),
        (128, 2048),
    ] {
        let (paged, apart) = (paged(batch, keys)?, apart(batch, keys)?);
        let time = |problem, options| microseconds(&device, problem, options, keys);
        let times = [time(&paged, &reads)?, time(&paged, &gathers)?, time(&apart, &reads)?];
        println!("{batch:>9} x {keys:<8} {:>10.1} {:>11.1} {:>8.1}", times[0], times[1], times[2]);
    }
    Ok(())
}
