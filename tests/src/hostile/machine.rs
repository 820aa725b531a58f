//! What plans and computes a call.

use super::Report;
use super::draw::Draw;
use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, cpu::Cpu};
use gqa_host::plan::{DeviceInfo, PlanOptions, Planner, TensorSpec, plan};
use gqa_host::reference::Reference;
use gqa_host::{Problem, RowStrides, Strided};

/// A device and the choices of its owner.
#[derive(Clone, Debug)]
pub struct Machine {
    pub device: DeviceInfo,
    options: PlanOptions,
    strided: Strided,
    total_len: usize,
    /// The simulator is a thousand times slower than the other back ends.
    simulates: bool,
    seed: u64,
}

/// One in this number of calls runs on the simulator.
const SIMULATED: usize = 50;
/// The most pairs of a query row and a key on the simulator.
const MOST_PAIRS: usize = 1 << 12;

impl Machine {
    pub fn draw(draw: &mut Draw) -> Self {
        let mut stride = || draw.of(&[0, 8, 512, 4096, 7]) * draw.of(&[1, 1, 1, 3, 1 << 50]);
        let strides = RowStrides { batch: stride(), head: stride(), row: stride() };
        let mut strided = Strided::default();
        match draw.below(4) {
            0 => strided.query = Some(strides),
            1 => (strided.key, strided.value) = (Some(strides), Some(strides)),
            2 => strided.value = Some(strides),
            _ => strided.output = Some(strides),
        }
        Self {
            device: draw.device(),
            options: draw.options(),
            strided,
            total_len: draw.size(5),
            simulates: draw.one_in(SIMULATED),
            seed: draw.seed(),
        }
    }

    /// Plans the problem and problems derived from it, and calls every method of the plans.
    pub fn plans(&self, problem: &Problem, report: &mut Report) {
        self.plan(problem, report);
        self.plan(&problem.appended(), report);
        let strided = report.note("other strides", problem.with_strides(self.strided));
        let longer = report.note("another length", problem.with_total_len(self.total_len));
        [strided, longer].iter().flatten().for_each(|problem| self.plan(problem, report));
    }

    fn plan(&self, problem: &Problem, report: &mut Report) {
        let Self { device, options, .. } = self;
        let made = report.note("plan", plan(problem, device, options));
        let planner = Planner::new(device.clone(), options.clone());
        for step in ["planner", "planner again"] {
            let kept = report.note(step, planner.plan(problem));
            if kept.is_none() && made.is_some() && options.force.is_none() {
                report.fault(format!("{step}: no plan, but there is one"));
            }
        }
        let _ = (problem.to_string(), problem.is_empty(), problem.bias_layout());
        let Some(made) = made else { return };
        let specs = TensorSpec::all(problem);
        let bytes = specs.iter().fold(0usize, |all, (_, spec)| all.saturating_add(spec.bytes()));
        let _ = (bytes, made.explain().to_string(), format!("{:?}", made.launches()));
        let seconds = made.cost().roofline_seconds(problem.dtype, device);
        if seconds < 0.0 && device.bandwidth > 0.0 && device.tensor_flops > 0.0 {
            report.fault(format!("a call takes {seconds} seconds"));
        }
    }

    /// What computes a call of that problem.
    pub fn backends(&self, problem: Option<&Problem>) -> Vec<Box<dyn Backend>> {
        let mut backends: Vec<Box<dyn Backend>> =
            vec![Box::new(Cpu::default()), Box::new(Reference)];
        if let Some(sim) = problem.and_then(|problem| self.sim(problem)) {
            backends.push(Box::new(sim));
        }
        backends
    }

    /// The simulator, for some problems.
    pub fn sim(&self, problem: &Problem) -> Option<Sim> {
        let rows = problem.batch * problem.q_heads * problem.q_len;
        let is_small = rows.saturating_mul(problem.total_len.min(problem.capacity)) <= MOST_PAIRS;
        let sim = Sim::default().with_seed(self.seed).with_options(self.options.clone());
        (self.simulates && is_small).then(|| sim.with_device(self.device.clone()))
    }
}
