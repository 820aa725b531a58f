//! Timing.

use std::time::Instant;

use anyhow::Result;
use gqa_host::Problem;
use gqa_host::backend::Backend;
use gqa_host::driver::Graph;
use gqa_host::plan::TensorId;

use crate::backend::Machine;
use crate::gpu::Gpu;
use crate::shape::Tensors;

/// What was measured.
pub struct Measured {
    /// Of one call, ascending.
    pub seconds: Vec<f64>,
    /// Sets of buffers that the calls walk over.
    pub sets: usize,
    /// Kernels of a call, in order.
    pub kernels: Vec<&'static str>,
    /// What the hardware needs at least; known for GPUs.
    pub roofline_seconds: Option<f64>,
}

/// Times `runs` runs; `tensors` hold the results afterwards.
pub fn measure(
    machine: &Machine,
    problem: &Problem,
    tensors: &mut Tensors,
    runs: usize,
) -> Result<Measured> {
    let mut measured = match machine {
        Machine::Gpu(gpu) => on_gpu(gpu, problem, tensors, runs)?,
        Machine::Host(backend) => on_host(backend.as_ref(), problem, tensors, runs)?,
    };
    measured.seconds.sort_by(f64::total_cmp);
    Ok(measured)
}

/// On a host, runs stop after that time, but not before there are a few.
const HOST_SECONDS: f64 = 10.0;
/// Enough for a median.
const FEW_RUNS: usize = 5;

fn on_host(
    backend: &dyn Backend,
    problem: &Problem,
    tensors: &mut Tensors,
    runs: usize,
) -> Result<Measured> {
    tensors.with_io(|io| backend.run(problem, io))?;
    let mut seconds = Vec::with_capacity(runs);
    while seconds.len() < runs
        && (seconds.len() < FEW_RUNS || seconds.iter().sum::<f64>() < HOST_SECONDS)
    {
        let start = Instant::now();
        tensors.with_io(|io| backend.run(problem, io))?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(Measured { seconds, sets: 1, kernels: vec![backend.name()], roofline_seconds: None })
}

/// Calls in a graph at least, where a call is short: the time of one call is their mean.
const SHORT_CALLS: usize = 32;
/// A call that takes at least this long is long.
const LONG_SECONDS: f64 = 100e-6;
/// Share of device memory that sets of buffers may take.
const MEMORY_SHARE: f64 = 0.6;

fn on_gpu(gpu: &Gpu, problem: &Problem, tensors: &mut Tensors, runs: usize) -> Result<Measured> {
    let plan = gpu.plan(problem)?;
    let info = gpu.device.info();
    let roofline = plan.cost.roofline_seconds(problem.dtype, info);
    let bytes: usize =
        TensorId::ALL.iter().filter_map(|id| id.spec(problem)).map(|spec| spec.bytes()).sum();
    let cold = (4.0 * info.l2_bytes as f64 / bytes as f64).ceil();
    let fits = (MEMORY_SHARE * gpu.device.memory_bytes() as f64
        / (bytes + plan.workspace_bytes) as f64)
        .floor();
    let sets = cold.clamp(2.0, 64.0).min(fits).max(1.0) as usize;
    let calls = (0..sets).map(|_| gpu.call(&plan, tensors)).collect::<Result<Vec<_>>>()?;
    let rounds = if roofline < LONG_SECONDS { SHORT_CALLS.div_ceil(sets) } else { 1 };
    let sequence: Vec<_> = (0..rounds).flat_map(|_| calls.iter().cloned()).collect();
    let graph = Graph::capture(&gpu.stream, &sequence)?;
    for _ in 0..3 {
        graph.replay(&gpu.stream)?;
    }
    gpu.stream.synchronize()?;
    let mut seconds = Vec::with_capacity(runs);
    for _ in 0..runs {
        seconds.push(gpu.stream.timed(|| graph.replay(&gpu.stream))? / sequence.len() as f64);
    }
    gpu.download(&calls[sets - 1], tensors)?;
    let kernels = plan.launches.iter().map(|launch| launch.entry.name).collect();
    Ok(Measured { seconds, sets, kernels, roofline_seconds: Some(roofline) })
}
