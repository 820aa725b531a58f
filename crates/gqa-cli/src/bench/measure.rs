//! Timing.

use std::iter;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use cpu_time::{ProcessTime, ThreadTime};
use gqa_host::Problem;
use gqa_host::backend::Backend;
use gqa_host::driver::{Call, Graph};
use gqa_host::plan::{DeviceInfo, Plan, PlanOptions, plan};

use crate::backend::Machine;
use crate::gpu::Gpu;
use crate::shape::Tensors;

/// What was measured.
pub struct Measured {
    /// Of one call, ascending.
    pub seconds: Vec<f64>,
    /// Of processors, for one call: on a GPU, to put it into the stream.
    pub cpu_seconds: f64,
    /// Sets of buffers that the calls walk over.
    pub sets: usize,
    /// Kernels of a call, in order; none where a back end has no kernels.
    pub kernels: Vec<&'static str>,
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

/// Runs stop after that time, but not before there are a few.
const MOST_SECONDS: f64 = 10.0;
/// Enough for a median.
const FEW_RUNS: usize = 5;

/// Times `run` that often, or until it has taken long enough.
fn repeated(runs: usize, mut run: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    let (mut seconds, mut sum) = (Vec::with_capacity(runs), 0.0);
    while seconds.len() < runs && (seconds.len() < FEW_RUNS || sum < MOST_SECONDS) {
        let taken = run()?;
        seconds.push(taken);
        sum += taken;
    }
    Ok(seconds)
}

fn on_host(
    backend: &dyn Backend,
    problem: &Problem,
    tensors: &mut Tensors,
    runs: usize,
) -> Result<Measured> {
    tensors.with_io(|io| backend.run(problem, io))?;
    let cpu = ProcessTime::now();
    let seconds = repeated(runs, || {
        let start = Instant::now();
        tensors.with_io(|io| backend.run(problem, io))?;
        Ok(start.elapsed().as_secs_f64())
    })?;
    let cpu_seconds = cpu.elapsed().as_secs_f64() / seconds.len() as f64;
    let kernels = if backend.name() == "sim" {
        kernels(&plan(problem, &DeviceInfo::h200(), &PlanOptions::from_env()?)?)
    } else {
        Vec::new()
    };
    Ok(Measured { seconds, cpu_seconds, sets: 1, kernels })
}

fn kernels(plan: &Plan) -> Vec<&'static str> {
    plan.launches().iter().map(|launch| launch.entry().name).collect()
}

/// Calls in a graph at least, where a call is short: the time of one call is their mean.
const SHORT_CALLS: usize = 32;
/// A call that takes at least this long is long.
const LONG_SECONDS: f64 = 100e-6;
/// Share of device memory that sets of buffers may take.
const MEMORY_SHARE: f64 = 0.6;

fn on_gpu(gpu: &Gpu, problem: &Problem, tensors: &mut Tensors, runs: usize) -> Result<Measured> {
    let plan = gpu.plan(problem)?;
    let calls = cold_calls(gpu, &plan, tensors)?;
    let sequence = short_calls_repeated(gpu, &plan, &calls);
    let mut graph = Graph::capture(&gpu.stream, &sequence)?;
    let seconds = replays(gpu, &mut graph, runs)?;
    let cpu_seconds = enqueued(gpu, problem, &calls)?;
    gpu.download(&calls[calls.len() - 1], tensors)?;
    Ok(Measured { seconds, cpu_seconds, sets: calls.len(), kernels: kernels(&plan) })
}

/// The call on enough sets of buffers that no call finds its inputs in the L2 cache.
pub fn cold_calls(gpu: &Gpu, plan: &Arc<Plan>, tensors: &Tensors) -> Result<Vec<Arc<Call>>> {
    let bytes: usize = plan.tensors().iter().map(|(_, spec)| spec.bytes()).sum();
    let cold = (4.0 * gpu.device.info().l2_bytes as f64 / bytes as f64).ceil();
    let memory = MEMORY_SHARE * gpu.device.memory_bytes() as f64;
    let fits = (memory / (bytes + plan.workspace_bytes()) as f64).floor();
    let sets = cold.clamp(2.0, 64.0).min(fits).max(1.0) as usize;
    let first = gpu.call(plan, tensors)?;
    let others: Result<Vec<_>> = (1..sets).map(|_| gpu.another(&first)).collect();
    Ok(iter::once(first).chain(others?).collect())
}

/// The calls again and again until there are enough for a clock.
pub fn short_calls_repeated(gpu: &Gpu, plan: &Plan, calls: &[Arc<Call>]) -> Vec<Arc<Call>> {
    let least = plan.cost().roofline_seconds(plan.problem().dtype, gpu.device.info());
    let rounds = if least < LONG_SECONDS { SHORT_CALLS.div_ceil(calls.len()) } else { 1 };
    (0..rounds).flat_map(|_| calls.iter().cloned()).collect()
}

/// Seconds of one captured call, of each replay.
pub fn replays(gpu: &Gpu, graph: &mut Graph, runs: usize) -> Result<Vec<f64>> {
    for _ in 0..3 {
        graph.replay(&gpu.stream)?;
    }
    gpu.stream.synchronize()?;
    let calls = graph.calls().len() as f64;
    let seconds = repeated(runs, || Ok(gpu.stream.timed(|| graph.replay(&gpu.stream))?))?;
    Ok(seconds.into_iter().map(|seconds| seconds / calls).collect())
}

/// Calls that are put into the stream one by one: fewer than fill the driver's queue.
const ENQUEUED_CALLS: usize = 128;

/// Processor seconds to look the plan up and put one call into the stream, without a graph.
fn enqueued(gpu: &Gpu, problem: &Problem, calls: &[Arc<Call>]) -> Result<f64> {
    let planner = gpu.planner();
    planner.plan(problem)?;
    gpu.stream.synchronize()?;
    let start = ThreadTime::now();
    for call in calls.iter().cycle().take(ENQUEUED_CALLS) {
        std::hint::black_box(planner.plan(problem)?);
        call.enqueue(&gpu.stream)?;
    }
    let seconds = start.elapsed().as_secs_f64() / ENQUEUED_CALLS as f64;
    gpu.stream.synchronize()?;
    Ok(seconds)
}
