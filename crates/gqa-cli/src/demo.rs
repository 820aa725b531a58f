//! `gqa demo`: a prefill and some decode steps of the attention layer of Llama 3 8B, with a cache
//! that past and present share.

use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use gqa_host::driver::Graph;
use gqa_host::plan::{Cost, DeviceInfo, PlanOptions, TensorId, plan};
use gqa_host::{Problem, Tensor};

use crate::backend::{Choice, Machine};
use crate::input::Noise;
use crate::options::count;
use crate::oracle::{Computed, Sampled};
use crate::shape::{Element, Layer, Shape, Tensors, lengths};

/// Arguments of `gqa demo`.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Where to compute; auto is the GPU if there is a usable one, else the CPU.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
    /// Tokens of the prefill [default: 4096 on a GPU, else 256].
    #[arg(long, value_parser = count(1 << 17))]
    prefill: Option<u64>,
    /// Decode steps after it [default: 64 on a GPU, else 16].
    #[arg(long, value_parser = count(1 << 14))]
    decode: Option<u64>,
}

/// Rows compared with the reference after the prefill.
const PREFILL_ROWS: usize = 32;
/// Rows compared with the reference after each decode step.
const DECODE_ROWS: usize = 2;

/// Runs the demonstration.
pub fn run(args: &Args) -> Result<ExitCode> {
    let (machine, device) = Machine::select(args.backend)?;
    let (rows, steps) = if matches!(machine, Machine::Gpu(_)) { (4096, 64) } else { (256, 16) };
    let rows = args.prefill.unwrap_or(rows) as usize;
    let steps = args.decode.unwrap_or(steps) as usize;
    let layer = Layer::llama3_8b(Element::Bf16);
    say!(
        "GroupQueryAttention, one layer of Llama 3 8B: 32 query heads over 8 KV heads of 128, bfloat16, rotary embedding"
    );
    say!("on {device}\n");

    let capacity = rows + steps;
    let prefill = Session::new(&machine, Shape { capacity, ..Shape::new(layer, 1, rows, 0) })?;
    let decode = Session::new(&machine, Shape::new(layer, 1, 1, capacity - 1))?;
    prefill.show_plan("prefill")?;
    decode.show_plan("a decode step")?;

    let mut noise = Noise::new(8);
    let mut tensors = prefill.shape.tensors(&prefill.problem, &mut noise)?;
    let mut checked = prefill.read(&mut tensors, &mut noise)?;
    checked.merge(&decode.generate(rows..capacity, &mut tensors, &mut noise)?);
    Ok(if checked.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verdict(sampled: &Sampled) -> String {
    let Sampled { rows, failed, max_abs } = sampled;
    match failed {
        0 => format!("max error {max_abs:.1e} in {rows} rows against the f64 reference: ok"),
        _ => format!(
            "max error {max_abs:.1e} in {rows} rows against the f64 reference: {failed} elements WRONG"
        ),
    }
}

/// One kind of call on a machine.
struct Session<'m> {
    machine: &'m Machine,
    shape: Shape,
    problem: Problem,
}

impl<'m> Session<'m> {
    fn new(machine: &'m Machine, shape: Shape) -> Result<Self> {
        Ok(Self { machine, shape, problem: shape.problem()? })
    }

    /// The plan on this GPU, or on the one it would have.
    fn show_plan(&self, what: &str) -> Result<()> {
        match self.machine {
            Machine::Gpu(gpu) => {
                say!("plan for {what}\n{}\n", gpu.plan(&self.problem)?.explain())
            }
            Machine::Host(_) => {
                let plan = plan(&self.problem, &DeviceInfo::h200(), &PlanOptions::from_env()?)?;
                say!("plan for {what}, if there were an H200\n{}\n", plan.explain());
            }
        }
        Ok(())
    }

    /// Runs the call once; seconds.
    fn step(&self, tensors: &mut Tensors) -> Result<f64> {
        match self.machine {
            Machine::Host(backend) => {
                let start = Instant::now();
                tensors.with_io(|io| backend.run(&self.problem, io))?;
                Ok(start.elapsed().as_secs_f64())
            }
            Machine::Gpu(gpu) => {
                let call = gpu.call(&gpu.plan(&self.problem)?, tensors)?;
                let mut graph = Graph::capture(&gpu.stream, std::slice::from_ref(&call))?;
                // The first launch uploads the graph.
                graph.replay(&gpu.stream)?;
                let seconds = gpu.stream.timed(|| graph.replay(&gpu.stream))?;
                gpu.download(&call, tensors)?;
                Ok(seconds)
            }
        }
    }

    fn check(
        &self,
        tensors: &Tensors,
        past_length: usize,
        rows: usize,
        noise: &mut Noise,
    ) -> Result<Sampled> {
        Computed { shape: &self.shape, problem: &self.problem, tensors, past_length }
            .sample(rows, noise)
    }

    /// The prefill.
    fn read(&self, tensors: &mut Tensors, noise: &mut Noise) -> Result<Sampled> {
        let seconds = self.step(tensors)?;
        let checked = self.check(tensors, 0, PREFILL_ROWS, noise)?;
        let (rows, rate) = (self.problem.q_len, Cost::of(&self.problem).flops / seconds * 1e-12);
        say!(
            "prefill of {rows} tokens  {:10.3} ms  {rate:.2} TFLOP/s  {}",
            seconds * 1e3,
            verdict(&checked)
        );
        Ok(checked)
    }

    /// Decode steps at those positions, one after the other; every eighth of them is reported.
    fn generate(
        &self,
        positions: Range<usize>,
        tensors: &mut Tensors,
        noise: &mut Noise,
    ) -> Result<Sampled> {
        let (first, count) = (positions.start, positions.len());
        let (mut times, mut sum) = (Vec::new(), Sampled::default());
        for past in positions {
            self.next_inputs(tensors, past, noise)?;
            let seconds = self.step(tensors)?;
            let checked = self.check(tensors, past, DECODE_ROWS, noise)?;
            if (past - first).is_multiple_of(count.div_ceil(8)) {
                say!("decode step {past:<9} {:10.3} ms  {}", seconds * 1e3, verdict(&checked));
            }
            times.push(seconds);
            sum.merge(&checked);
        }
        times.sort_by(f64::total_cmp);
        let median = times.get(count / 2).copied().unwrap_or_default();
        say!(
            "{count} decode steps        {:10.3} ms each (median)  {}",
            median * 1e3,
            verdict(&sum)
        );
        Ok(sum)
    }

    /// Query, key and value of the next token behind `past` rows; the cache stays.
    fn next_inputs(&self, tensors: &mut Tensors, past: usize, noise: &mut Noise) -> Result<()> {
        for id in [TensorId::Query, TensorId::Key, TensorId::Value] {
            if let Some(spec) = id.spec(&self.problem) {
                tensors.set(id, noise.tensor(spec.dtype, &spec.shape, 1.0)?);
            }
        }
        if let Some(spec) = TensorId::Output.spec(&self.problem) {
            tensors.set(TensorId::Output, Tensor::zeros(spec.dtype, &spec.shape));
        }
        tensors.set(TensorId::SeqlensK, lengths(1, past + 1).0);
        Ok(())
    }
}
