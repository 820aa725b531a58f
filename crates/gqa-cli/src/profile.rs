//! `gqa profile`: what each launch of a call takes, what the call takes of the processor, and how
//! to look inside with NVIDIA's profilers.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use gqa_host::driver::{Call, Graph};
use gqa_host::plan::Plan;
use serde::Serialize;

mod processor;

use crate::bench::measure::{cold_calls, replays, short_calls_repeated};
use crate::gpu::Gpu;
use crate::input::Noise;
use crate::options::count;
use crate::profile::processor::Processor;
use crate::shape::{Layer, Sizes};

/// Arguments of `gqa profile`.
#[derive(clap::Args)]
pub struct Args {
    /// Timed replays of each graph.
    #[arg(long, default_value_t = 30, value_parser = count(100_000))]
    runs: u64,
    /// Put the call into the stream that often and measure nothing: what ncu and nsys are given to
    /// run.
    #[arg(long, value_name = "TIMES", value_parser = count(100_000))]
    only_launch: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sizes: Sizes,
    #[command(flatten)]
    layer: Layer,
}

/// A call and its launches; times are medians in microseconds.
#[derive(Serialize)]
struct Profile {
    call: String,
    device: String,
    launches: Vec<Timed>,
    /// Sum of the launches, each alone.
    launches_us: f64,
    /// The whole call, replayed from a graph.
    graph_us: f64,
    /// The whole call, enqueued launch by launch.
    stream_us: f64,
    /// Least time by the vendor's figures.
    roofline_us: f64,
    processor: Processor,
    /// Command lines.
    ncu: String,
    nsys: String,
}

/// One launch.
#[derive(Serialize)]
struct Timed {
    entry: &'static str,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    us: f64,
}

/// Profiles a call; needs a GPU.
pub fn run(args: &Args) -> Result<ExitCode> {
    let gpu = Gpu::open().context("gqa profile times kernels on a GPU")?;
    let shape = args.sizes.shape(args.layer);
    let problem = shape.problem()?;
    let plan = gpu.plan(&problem)?;
    let tensors = shape.tensors_for_gpu(&problem, &mut Noise::new(1))?;
    if let Some(times) = args.only_launch {
        let call = gpu.call(&plan, &tensors)?;
        (0..times).try_for_each(|_| call.enqueue(&gpu.stream))?;
        gpu.stream.synchronize()?;
        return Ok(ExitCode::SUCCESS);
    }
    let calls = cold_calls(&gpu, &plan, &tensors)?;
    let profile = measure(&gpu, &plan, &calls, args.runs as usize)?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&profile)?);
    } else {
        show(&profile)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(gpu: &Gpu, plan: &Arc<Plan>, cold: &[Arc<Call>], runs: usize) -> Result<Profile> {
    let calls = &short_calls_repeated(gpu, plan, cold)[..];
    let mut whole = Graph::capture(&gpu.stream, calls)?;
    let graph_us = median_us(replays(gpu, &mut whole, runs)?);
    let mut launches = Vec::new();
    for (number, launch) in plan.launches().iter().enumerate() {
        let mut graph = Graph::capture_launch(&gpu.stream, calls, number)?;
        launches.push(Timed {
            entry: launch.entry().name,
            grid: launch.grid(),
            threads: launch.entry().threads,
            shared_bytes: launch.entry().shared_bytes,
            us: median_us(replays(gpu, &mut graph, runs)?),
        });
    }
    let enqueue = || calls.iter().try_for_each(|call| call.enqueue(&gpu.stream));
    let streamed: Result<Vec<_>> =
        (0..runs).map(|_| Ok(gpu.stream.timed(enqueue)? / calls.len() as f64)).collect();
    let (ncu, nsys) = command_lines(plan.launches().len());
    Ok(Profile {
        call: plan.problem().to_string(),
        device: gpu.device.info().to_string(),
        launches_us: launches.iter().map(|launch| launch.us).sum(),
        launches,
        graph_us,
        stream_us: median_us(streamed?),
        roofline_us: plan.cost().roofline_seconds(plan.problem().dtype, gpu.device.info()) * 1e6,
        processor: Processor::measure(gpu, plan.problem(), cold, runs)?,
        ncu,
        nsys,
    })
}

/// Median in microseconds.
fn median_us(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2] * 1e6
}

/// Counters behind the four numbers that docs/profiling.md explains, and the kernel's time.
const METRICS: &str = "gpu__time_duration.sum,dram__bytes.sum.per_second,dram__throughput.avg.pct_of_peak_sustained_elapsed,\
                       sm__warps_active.avg.pct_of_peak_sustained_active,lts__t_sector_hit_rate.pct,\
                       sm__inst_executed_pipe_tensor.sum";

/// ncu looks at the second call: the first loads modules. nsys shows all of them on a time line.
fn command_lines(launches: usize) -> (String, String) {
    let program = std::env::args().next().unwrap_or_else(|| "gqa".to_owned());
    let words: Vec<_> = std::env::args().skip(1).filter(|word| word != "--json").collect();
    let call = format!("{program} {} --only-launch", words.join(" "));
    let ncu = format!(
        "ncu --kernel-name regex:^gqa_ --launch-skip {launches} --launch-count {launches} --clock-control none --metrics {METRICS} {call} 2"
    );
    (ncu, format!("nsys profile --trace cuda,nvtx --output gqa {call} 100"))
}

fn show(profile: &Profile) -> Result<()> {
    let Profile {
        call,
        device,
        launches,
        launches_us,
        graph_us,
        stream_us,
        roofline_us,
        processor,
        ncu,
        nsys,
    } = profile;
    say!("{call}\non {device}\n");
    for Timed { entry, grid: [x, y, z], threads, shared_bytes, us } in launches {
        let share = us / launches_us * 100.0;
        say!(
            "{us:10.2} us {share:5.1}%  {entry}: {x}x{y}x{z} CTAs of {threads} threads, \
             {shared_bytes} bytes of shared memory"
        );
    }
    let over = |us: &f64| (us - launches_us) / us * 100.0;
    say!("{launches_us:10.2} us         launches, each alone");
    say!("{graph_us:10.2} us {:5.1}%  in a graph; the share is launch overhead", over(graph_us));
    say!("{stream_us:10.2} us {:5.1}%  enqueued launch by launch; likewise", over(stream_us));
    say!("{roofline_us:10.2} us         lower bound by the vendor's figures\n");
    processor.show()?;
    say!("counters:  {ncu}\ntime line: {nsys}");
    Ok(())
}
