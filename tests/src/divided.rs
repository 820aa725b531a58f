//! The simulated GPU with decode steps over contiguous KV caches that divide the keys of all
//! sequences by their lengths.

use crate::Case;
use crate::parity::Parity as _;
use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io, Machine};
use gqa_host::plan::{DeviceInfo, Plan, PlanOptions, plan};
use gqa_host::{Problem, ProblemFields, Result};
use proptest::prelude::*;

/// A simulated GPU that expects most sequences to be short.
pub struct Divided {
    sim: Sim,
    device: DeviceInfo,
}

impl Divided {
    /// Of `device`.
    pub fn new(device: DeviceInfo) -> Self {
        Self { sim: Sim::default().with_device(device.clone()), device }
    }

    fn plan(&self, problem: &Problem) -> Result<Plan> {
        let problem = problem.derive(|call| ProblemFields { mean_len: Some(1), ..call })?;
        plan(&problem, &self.device, &PlanOptions::default())
    }

    /// Whether the plan of the call divides keys.
    pub fn divides(&self, problem: &Problem) -> bool {
        let lengths = vec![0; problem.batch];
        let divided = |plan: Plan| plan.division(None, &lengths);
        self.plan(problem).and_then(divided).expect("a plan").is_some()
    }

    /// Of these calls, the ones whose plans divide keys.
    pub fn cases(&self, cases: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
        let own = Self::new(self.device.clone());
        let is_divided = move |case: &Case| own.divides(&case.problem().expect("legal"));
        cases.prop_filter("keys are divided by lengths", is_divided).boxed()
    }
}

impl Backend for Divided {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        self.sim.execute(&self.plan(problem)?, io)
    }
}
