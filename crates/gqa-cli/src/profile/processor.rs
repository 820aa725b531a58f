//! What a call costs the processor, in each of the ways to put it into a stream.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use gqa_host::Problem;
use gqa_host::driver::{Call, Graph};
use serde::Serialize;

use super::median_us;
use crate::gpu::Gpu;

/// What the processor takes for a call whose shape was seen.
#[derive(Serialize)]
pub struct Processor {
    /// To find its plan.
    plan: Cost,
    /// To put it into the stream launch by launch.
    enqueue: Cost,
    /// Enqueued through a recording, with the next set of buffers if there are several.
    recorded: Cost,
    /// By a graph of the call's own.
    graph: Cost,
}

/// Medians in microseconds.
#[derive(Serialize)]
struct Cost {
    /// Of calls that find the GPU idle.
    idle_us: f64,
    /// Of calls in a row, which the GPU is behind with.
    busy_us: f64,
}

/// Calls in a row: fewer than fill the driver's queue.
const ROW: usize = 100;

impl Processor {
    /// Puts the calls into the stream in turn, `runs` times [`ROW`] of them in each way.
    pub fn measure(gpu: &Gpu, problem: &Problem, calls: &[Arc<Call>], runs: usize) -> Result<Self> {
        let stream = &gpu.stream;
        let planner = gpu.planner();
        let mut recording = gpu.device.load(planner.plan(problem)?)?.record()?;
        let capture = |call| Ok(Graph::capture(stream, std::slice::from_ref(call))?);
        let mut graphs = calls.iter().map(capture).collect::<Result<Vec<_>>>()?;
        let cost = |work: &mut dyn FnMut(usize) -> Result<()>| {
            Ok::<_, anyhow::Error>(Cost {
                idle_us: median_of_rows(gpu, runs * ROW, 1, work)?,
                busy_us: median_of_rows(gpu, runs, ROW, work)?,
            })
        };
        Ok(Self {
            plan: cost(&mut |_| {
                std::hint::black_box(planner.plan(problem)?);
                Ok(())
            })?,
            enqueue: cost(&mut |turn| Ok(calls[turn % calls.len()].enqueue(stream)?))?,
            recorded: cost(&mut |turn| {
                Ok(calls[turn % calls.len()].enqueue_recorded(&mut recording, stream)?)
            })?,
            graph: cost(&mut |turn| {
                let turn = turn % graphs.len();
                Ok(graphs[turn].replay(stream)?)
            })?,
        })
    }

    /// Prints it.
    pub fn show(&self) -> Result<()> {
        say!("of the processor, where the GPU is idle and where it is behind:");
        for (cost, to) in [
            (&self.plan, "find the plan"),
            (&self.enqueue, "put the call into the stream launch by launch"),
            (&self.recorded, "the same by a recording, on other memory each time"),
            (&self.graph, "the same by a graph of its own"),
        ] {
            say!("{:10.2} us {:5.2} us  {to}", cost.idle_us, cost.busy_us);
        }
        say!();
        Ok(())
    }
}

/// Of calls put into the stream, `row` of them before each wait for it.
fn median_of_rows(
    gpu: &Gpu,
    rows: usize,
    row: usize,
    work: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<f64> {
    let warm = rows.div_ceil(10);
    let mut seconds = Vec::with_capacity(rows * row);
    for number in 0..warm + rows {
        for turn in 0..row {
            let start = Instant::now();
            work(number * row + turn)?;
            if number >= warm {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        gpu.stream.synchronize()?;
    }
    Ok(median_us(seconds))
}
