//! Which kernels are trusted on which GPUs.
//!
//! On Hopper every family has been run and compared with the reference. For other GPUs kernels were
//! at most simulated and assembled. So if a plan for such a GPU has kernels of an unproven family,
//! a [`Prover`] compares these with the simplest kernels on that GPU, by small calls, and the
//! planner leaves out those that differ.

use super::compose::plan;
use super::device::DeviceInfo;
use super::launch::Plan;
use super::options::PlanOptions;
use crate::problem::Problem;
use gqa_kernels::registry::{Entry, Family, Role};
use gqa_tensor::{Error, Result};

/// Which kernels are used on GPUs on which the project never ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trust {
    /// All, untested.
    All,
    /// Kernels that agree with simpler ones on this GPU; each is tested at its first use.
    #[default]
    Tested,
    /// Only the simplest kernels, with which the others are compared.
    None,
}

/// The families that were run and compared on GPUs of a compute capability, times ten.
static PROVEN: [(u32, &[Family]); 1] = [(90, &Family::ALL)];

/// The simplest families: others are compared with them, and they are used if no other family is
/// trusted.
const PLAIN: [Family; 3] = [Family::Prologue, Family::General, Family::Unfused];

/// Whether kernels of the family need no test on GPUs of that compute capability, times ten.
pub fn is_proven(family: Family, sm: u32) -> bool {
    let has = |&(proven, families): &(u32, &[Family])| proven == sm && families.contains(&family);
    PLAIN.contains(&family) || PROVEN.iter().any(has)
}

/// Options that plan only the simplest kernels, for comparison.
pub(crate) fn plain_options() -> PlanOptions {
    let others = Family::ALL.into_iter().filter(|family| !PLAIN.contains(family));
    PlanOptions { disable_fused_kv: true, distrusted: others.collect(), ..PlanOptions::default() }
}

/// Families in a plan whose kernels are not known to be right.
#[derive(Clone, Debug, Default)]
pub struct Doubts {
    /// A test showed that a kernel of the family computes wrong results or does not end.
    pub wrong: Vec<Family>,
    /// A kernel of the family could not be tested, at least not now.
    pub untested: Vec<Family>,
}

/// Tests kernels on a GPU, and remembers the results.
pub trait Prover: Send + Sync {
    /// Doubts about the plan's kernels that are not [proven](is_proven). With `may_test`, kernels
    /// without a known result are tested; inside a graph capture that is not possible.
    fn doubts(&self, plan: &Plan, may_test: bool) -> Doubts;
}

impl Plan {
    /// The attention kernels of families that are not [proven](is_proven) on the plan's GPU, each
    /// once.
    pub fn unproven(&self) -> Vec<&'static Entry> {
        let mut entries: Vec<&'static Entry> = Vec::new();
        for launch in self.launches() {
            let entry = launch.entry();
            let attends = matches!(entry.role, Role::Attention | Role::SplitAttention);
            let is_new = entries.iter().all(|known| known.name != entry.name);
            if attends && is_new && !is_proven(entry.family, self.device().sm) {
                entries.push(entry);
            }
        }
        entries
    }
}

/// As [`plan`](super::plan()), without the families that the prover doubts. Also returns whether
/// the plan may be kept: not if a kernel is left out only because it could not be tested now.
pub(super) fn plan_proven(
    problem: &Problem,
    device: &DeviceInfo,
    given: &PlanOptions,
    prover: &dyn Prover,
    may_test: bool,
) -> Result<(Plan, bool)> {
    let mut options = given.clone();
    let mut lasts = true;
    loop {
        let plan = plan(problem, device, &options)?;
        let asks = options.trust == Trust::Tested && options.force.is_none();
        if !asks || plan.unproven().is_empty() {
            return Ok((plan, lasts));
        }
        let Doubts { wrong, untested } = prover.doubts(&plan, may_test);
        lasts &= untested.is_empty() || may_test;
        let doubted: Vec<Family> = wrong.into_iter().chain(untested).collect();
        if doubted.is_empty() {
            return Ok((plan, lasts));
        }
        if let Some(again) = doubted.iter().find(|family| options.distrusted.contains(family)) {
            let reason = format!("{} is not trusted on this GPU, and is chosen", again.name());
            return Err(Error::NoKernel(reason));
        }
        options.distrusted.extend(doubted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Dense, Heads, Layer};
    use crate::plan::{Decision, Planner, Rejection};
    use gqa_tensor::DType;
    use std::sync::{Arc, Mutex};

    fn step() -> Problem {
        let layer = Layer::new(DType::BF16, Heads { query: 8, kv: 2, size: 128 });
        layer.dense(Dense::decode(2, 3000).longest(2000)).unwrap()
    }

    fn device(name: &str) -> DeviceInfo {
        DeviceInfo::known(name).unwrap()
    }

    /// A prover that finds some families wrong, and records the families that it was asked about.
    #[derive(Default)]
    struct Told {
        wrong: Vec<Family>,
        asked: Mutex<Vec<&'static str>>,
    }

    impl Prover for Told {
        fn doubts(&self, plan: &Plan, may_test: bool) -> Doubts {
            let families = plan.unproven().into_iter().map(|entry| entry.family);
            let families: Vec<_> = families.collect();
            self.asked.lock().unwrap().extend(families.iter().map(|family| family.name()));
            let is_wrong = |family: &Family| self.wrong.contains(family);
            let (wrong, others) = families.into_iter().partition(is_wrong);
            Doubts { wrong, untested: if may_test { Vec::new() } else { others } }
        }
    }

    fn planner(device: DeviceInfo, options: PlanOptions, wrong: &[Family]) -> (Planner, Arc<Told>) {
        let told = Arc::new(Told { wrong: wrong.to_vec(), ..Told::default() });
        (Planner::new(device, options).proven_by(told.clone()), told)
    }

    fn families(plan: &Plan) -> Vec<&'static str> {
        plan.launches().iter().map(|launch| launch.entry().family.name()).collect()
    }

    #[test]
    fn on_hopper_nothing_is_asked() {
        let (planner, told) = planner(DeviceInfo::h200(), PlanOptions::default(), &Family::ALL);
        assert_eq!(families(&planner.plan(&step()).unwrap()), ["decode"]);
        assert!(told.asked.lock().unwrap().is_empty());
    }

    #[test]
    fn a_family_that_is_wrong_is_replaced_by_the_next_one() {
        let b200 = || (device("b200"), PlanOptions::default());
        let (all_right, _) = planner(b200().0, b200().1, &[]);
        let first = families(&all_right.plan(&step()).unwrap());
        assert_eq!(first, ["prologue", "blackwell_decode"]);
        let wrong = [Family::BlackwellDecode, Family::Decode, Family::Tiled];
        let (some, told) = planner(b200().0, b200().1, &wrong);
        let plan = some.plan(&step()).unwrap();
        assert_eq!(families(&plan), ["prologue", "split_kv", "split_kv"]);
        assert!(Arc::ptr_eq(&some.plan(&step()).unwrap(), &plan));
        assert_eq!(*told.asked.lock().unwrap(), ["blackwell_decode", "decode", "split_kv"]);
        let of_decode = |decision: &&Decision| decision.family == Family::Decode;
        let outcome = plan.decisions().iter().find(of_decode).unwrap().outcome.clone();
        assert_eq!(outcome.unwrap_err(), Rejection::Distrusted { sm: 100 });
        let (none, _) = planner(b200().0, b200().1, &Family::ALL);
        assert_eq!(families(&none.plan(&step()).unwrap()), ["prologue", "general"]);
    }

    #[test]
    fn in_a_capture_the_plan_is_not_kept() {
        let (planner, _) = planner(device("rtx4090"), PlanOptions::default(), &[]);
        let plan = planner.plan_in_capture(&step()).unwrap();
        assert_eq!(families(&plan), ["prologue", "general"]);
        let tested = planner.plan(&step()).unwrap();
        assert_eq!(families(&tested), ["decode"]);
        assert!(Arc::ptr_eq(&planner.plan_in_capture(&step()).unwrap(), &tested));
    }

    #[test]
    fn the_option_and_forced_kernels_override() {
        let (a100, all) = (device("a100"), &Family::ALL);
        let with = |trust, force| PlanOptions { trust, force, ..PlanOptions::default() };
        let planned = |options| {
            let (planner, told) = planner(a100.clone(), options, all);
            let families = families(&planner.plan(&step()).unwrap());
            assert!(told.asked.lock().unwrap().is_empty());
            families
        };
        assert_eq!(planned(with(Trust::All, None)), ["decode"]);
        assert_eq!(planned(with(Trust::None, None)), ["prologue", "general"]);
        let forced = Some("gqa_decode_bf16_d128_r8");
        assert_eq!(planned(with(Trust::Tested, forced)), ["decode"]);
        assert_eq!(planned(with(Trust::None, forced)), ["decode"]);
    }
}
