//! Whether kernels are right on a GPU that the project never ran on.
//!
//! The first plan with such a kernel compares it with simpler ones on a small call with random
//! tensors ([`test`]), and remembers the answer in a file ([`memory`]), so that the next process,
//! or another one that waits meanwhile, need not ask again. A kernel that is wrong or does not end
//! is left out, with its family, and one line in the log says so.
//!
//! A test costs the calling program no more than time:
//! - It has a context of its own, so that a kernel that hangs keeps no other one from its work.
//! - Its PTX is changed so that waits for barriers in shared memory are limited in time
//!   ([`gqa_ptx::bound`]). A kernel that hangs in another way is abandoned: its context stays until
//!   the process ends, and shares the GPU's time with other contexts.
//! - It works in streams of its own in the thread's relaxed capture mode, so that it leaves graph
//!   captures of other threads alone.
//!
//! But a kernel that accesses invalid memory, or traps, ends all of the process's work on the GPU:
//! CUDA separates only the memory of contexts of one process. So the file records first that a test
//! has begun. A kernel whose tests did not end counts as wrong.

mod memory;
mod test;

use super::device::Device;
use gqa_kernels::registry::Entry;
use gqa_plan::Problem;
use gqa_plan::plan::{DeviceInfo, Doubts, Plan, PlanOptions, Planner, Prover};
use gqa_plan::sample::Trial;
use gqa_tensor::Result;
use memory::{Memory, Told};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub use memory::remembered;

/// The result of a test of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It computes what simpler kernels do.
    Agrees,
    /// It computes something else, fails, or does not end.
    Wrong(String),
    /// It could not be tested, for example for lack of memory. Holds for this process.
    Unknown(String),
}

/// Driver and GPU, a kernel's name, and a hash.
type Key = (String, &'static str, u64);

/// The results that this process knows.
static KNOWN: Mutex<BTreeMap<Key, Verdict>> = Mutex::new(BTreeMap::new());
/// Held during a test.
static TESTING: Mutex<()> = Mutex::new(());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// A planner for this GPU that leaves out kernels that are not trusted on it. A kernel is
    /// tested at its first use, and is not trusted if it differs from simpler kernels. On GPUs on
    /// which the project ran, nothing is tested. `GQA_TRUST`, [`PlanOptions::trust`], overrides
    /// this.
    pub fn planner(&self, options: PlanOptions) -> Planner {
        Planner::new(self.info().clone(), options).proven_by(Arc::new(Tests(self.clone())))
    }

    /// The plan of a call for this GPU, without kernels that are not trusted on it, as of
    /// [`planner`](Self::planner).
    ///
    /// # Errors
    /// As [`plan`](gqa_plan::plan::plan()).
    pub fn plan(&self, problem: &Problem, options: &PlanOptions) -> Result<Arc<Plan>> {
        self.planner(options.clone()).plan_as_it_is(problem)
    }
}

/// Tests on a GPU.
struct Tests(Device);

impl Prover for Tests {
    fn doubts(&self, plan: &Plan, may_test: bool) -> Doubts {
        let mut doubts = Doubts::default();
        for entry in plan.unproven() {
            match self.verdict(entry, plan, may_test) {
                Some(Verdict::Agrees) => {}
                Some(Verdict::Wrong(_)) => doubts.wrong.push(entry.family),
                Some(Verdict::Unknown(_)) | None => doubts.untested.push(entry.family),
            }
        }
        doubts
    }
}

impl Tests {
    /// The result for a kernel of the plan; `None` if it is not known and may not be tested.
    fn verdict(&self, entry: &'static Entry, plan: &Plan, may_test: bool) -> Option<Verdict> {
        let kind = memory::kind(plan.device(), self.0.version());
        let launch = plan.launches().iter().find(|launch| launch.entry().name == entry.name)?;
        let hash = memory::hash(launch, plan.device().sm, self.0.version());
        let key = (kind.clone(), entry.name, hash);
        let known = || lock(&KNOWN).get(&key).cloned();
        if let Some(verdict) = known() {
            return Some(verdict);
        }
        let _testing = lock(&TESTING);
        if let Some(verdict) = known() {
            return Some(verdict);
        }
        // Waits here while another process tests.
        let mut memory = Memory::open(&kind);
        let told = memory.as_mut().and_then(|memory| memory.told(entry.name, hash));
        let verdict = match told {
            Some(Told::Agrees) => Verdict::Agrees,
            Some(Told::Wrong(why)) => wrong(entry, plan.device(), why),
            None if !may_test => return None,
            None => {
                let mut write = |line: &str| {
                    memory.iter_mut().for_each(|memory| memory.write(entry.name, hash, line));
                };
                write("begun");
                let verdict = self.tested(entry, plan);
                match &verdict {
                    Verdict::Agrees => write("agrees"),
                    Verdict::Wrong(why) => write(&format!("wrong: {why}")),
                    Verdict::Unknown(_) => write("given up"),
                }
                verdict
            }
        };
        lock(&KNOWN).insert(key, verdict.clone());
        Some(verdict)
    }

    /// Tests a kernel of that plan, and logs a line.
    fn tested(&self, entry: &'static Entry, plan: &Plan) -> Verdict {
        let started = Instant::now();
        let verdict = match Trial::of(entry, plan) {
            Ok(trial) => test::run(&self.0, &trial, |_, text| text),
            Err(error) => Verdict::Unknown(error.to_string()),
        };
        let (entry_name, seconds) = (entry.name, started.elapsed().as_secs_f64());
        match verdict {
            Verdict::Agrees => {
                tracing::info!("{entry_name} agrees with simpler kernels ({seconds:.1} s)");
                Verdict::Agrees
            }
            Verdict::Wrong(why) => wrong(entry, plan.device(), why),
            Verdict::Unknown(why) => {
                tracing::warn!("{entry_name} could not be tested and is not used: {why}");
                Verdict::Unknown(why)
            }
        }
    }
}

fn wrong(entry: &Entry, device: &DeviceInfo, why: String) -> Verdict {
    tracing::warn!(
        "{} is not used on {}, nor others of its family ({}): {why}. Please open an issue with \
         what `gqa doctor --report FILE` writes",
        entry.name,
        device.name,
        entry.family.name(),
    );
    Verdict::Wrong(why)
}
