//! A cache of plans: a known shape costs a lookup.

use super::compose::plan;
use super::device::DeviceInfo;
use super::launch::Plan;
use super::options::PlanOptions;
use super::trust::{Prover, plan_proven};
use crate::limits::MAX_COUNT;
use crate::problem::{Pages, Problem, ProblemFields};
use gqa_tensor::Result;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Makes plans for one device under one set of options, and caches the most recently used.
///
/// Every decode step has a new length and so a new [`Problem`], although the kernels read lengths
/// on the device. So lengths that only affect the choice of kernels are rounded up before the
/// lookup, and [`Plan::problem`] has the rounded ones:
///
/// - the longest sequence to a power of two, but not beyond the capacity of the cache, unless it
///   rolls. It stays exact in first prompts, and if a tensor has a column for each key;
/// - over a paged KV cache, the most new tokens of a sequence to a [`bucket`](Self::bucket).
///
/// The total number of new tokens is not rounded, because tensors have a row for each. An engine
/// that pads these tensors to [`bucket`](Self::bucket) rows needs few plans: rows after the last
/// sequence's tokens belong to no sequence.
pub struct Planner {
    device: DeviceInfo,
    options: PlanOptions,
    prover: Option<Arc<dyn Prover>>,
    plans: RwLock<HashMap<Problem, Kept>>,
    /// Counts look-ups.
    clock: AtomicU64,
}

/// A plan, and the time of its last look-up.
struct Kept {
    plan: Arc<Plan>,
    used: AtomicU64,
}

/// A bound on the memory of a program whose shapes vary without end.
const MOST_PLANS: usize = 1024;
/// Shorter sequences are planned as if they had this length.
const LEAST_LEN: usize = 256;

impl Planner {
    /// A planner without plans.
    pub fn new(device: DeviceInfo, options: PlanOptions) -> Self {
        Self { device, options, prover: None, plans: RwLock::default(), clock: AtomicU64::new(0) }
    }

    /// Leaves out kernels that the prover finds wrong or cannot test.
    pub fn proven_by(self, prover: Arc<dyn Prover>) -> Self {
        Self { prover: Some(prover), ..self }
    }

    /// The plan for a call. A known shape gets the same plan again, without allocating memory.
    ///
    /// # Errors
    /// As [`plan`](super::plan).
    pub fn plan(&self, problem: &Problem) -> Result<Arc<Plan>> {
        self.plan_when(problem, true)
    }

    /// As [`plan`](Self::plan), inside a graph capture, where kernels cannot be tested: untested
    /// kernels are left out.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_in_capture(&self, problem: &Problem) -> Result<Arc<Plan>> {
        self.plan_when(problem, false)
    }

    /// As [`plan`](Self::plan), but lengths are not rounded, and the plan is not kept.
    ///
    /// # Errors
    /// As [`plan`](super::plan).
    pub fn plan_as_it_is(&self, problem: &Problem) -> Result<Arc<Plan>> {
        Ok(self.make(problem, true)?.0)
    }

    fn plan_when(&self, problem: &Problem, may_test: bool) -> Result<Arc<Plan>> {
        let problem = rounded(problem)?;
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        let plans = self.plans.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = plans.get(&problem) {
            kept.used.store(now, Ordering::Relaxed);
            return Ok(Arc::clone(&kept.plan));
        }
        drop(plans);
        let (plan, lasts) = self.make(&problem, may_test)?;
        Ok(if lasts { self.keep(problem, plan, now) } else { plan })
    }

    /// A new plan, and whether it may be kept.
    fn make(&self, problem: &Problem, may_test: bool) -> Result<(Arc<Plan>, bool)> {
        let (device, options) = (&self.device, &self.options);
        let (plan, lasts) = match &self.prover {
            None => (plan(problem, device, options)?, true),
            Some(prover) => plan_proven(problem, device, options, &**prover, may_test)?,
        };
        Ok((Arc::new(plan), lasts))
    }

    /// Inserts a plan and returns the one in the map: another thread may have inserted one for the
    /// same shape meanwhile.
    fn keep(&self, problem: Problem, plan: Arc<Plan>, now: u64) -> Arc<Plan> {
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = plans.get(&problem) {
            return Arc::clone(&kept.plan);
        }
        if plans.len() >= MOST_PLANS {
            forget_oldest(&mut plans);
        }
        let kept = Kept { plan: Arc::clone(&plan), used: AtomicU64::new(now) };
        plans.insert(problem, kept);
        plan
    }

    /// `tokens` rounded up: exact up to 16, then to one of eight steps between powers of two.
    pub const fn bucket(tokens: usize) -> usize {
        const EXACT: usize = 16;
        if tokens <= EXACT || tokens > usize::MAX / 2 {
            return tokens;
        }
        tokens.next_multiple_of(tokens.next_power_of_two() / EXACT)
    }
}

/// Evicts the least recently used plan.
fn forget_oldest(plans: &mut HashMap<Problem, Kept>) {
    let used = |kept: &Kept| kept.used.load(Ordering::Relaxed);
    let oldest = plans.iter().min_by_key(|(_, kept)| used(kept));
    if let Some(oldest) = oldest.map(|(problem, _)| problem.clone()) {
        plans.remove(&oldest);
    }
}

/// The problem with rounded lengths, where its tensors and the meaning of its rows do not depend on
/// them.
fn rounded(problem: &Problem) -> Result<Problem> {
    match problem.pages {
        Some(pages) => rounded_paged(problem, pages),
        None if problem.grows() => {
            let most = if problem.sliding().is_some() { usize::MAX } else { problem.capacity };
            let total_len = rounded_len(problem, most);
            problem.derive(|call| ProblemFields { total_len, ..call })
        }
        None => Ok(problem.clone()),
    }
}

/// The longest sequence, rounded up.
fn rounded_len(problem: &Problem, most: usize) -> usize {
    let least = problem.total_len.next_power_of_two().max(LEAST_LEN);
    least.min(most).min(MAX_COUNT).max(problem.total_len)
}

fn rounded_paged(problem: &Problem, pages: Pages) -> Result<Problem> {
    let total_len = rounded_len(problem, pages.per_sequence * pages.block_size);
    let most = pages.tokens.min(total_len).max(problem.q_len);
    let q_len = Planner::bucket(problem.q_len).min(most);
    problem.derive(|call| ProblemFields {
        q_len,
        new_len: if problem.reads_pages_only() { 0 } else { q_len },
        total_len,
        past_capacity: total_len,
        capacity: total_len,
        ..call
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Dense, Heads, Layer, Paged};
    use gqa_tensor::DType;

    const CAPACITY: usize = 3000;

    fn step(rows: usize, total: usize) -> Problem {
        let layer = Layer::new(DType::F16, Heads { query: 4, kv: 2, size: 64 });
        layer.dense(Dense::chunk(2, rows, CAPACITY).longest(total)).unwrap()
    }

    fn planner() -> Planner {
        Planner::new(DeviceInfo::h200(), PlanOptions::default())
    }

    #[test]
    fn a_growing_sequence_keeps_its_plan_until_its_length_doubles() {
        let planner = planner();
        let plan = |total| planner.plan(&step(1, total)).unwrap();
        assert!(Arc::ptr_eq(&plan(1025), &plan(2048)));
        assert!(!Arc::ptr_eq(&plan(1024), &plan(1025)));
        assert!(Arc::ptr_eq(&plan(2), &plan(LEAST_LEN)));
        assert_eq!(plan(2049).problem.total_len, CAPACITY);
    }

    /// Two threads that found no plan have each made one.
    #[test]
    fn threads_that_plan_the_same_shape_at_once_get_the_same_plan() {
        let (planner, problem) = (planner(), rounded(&step(1, 1000)).unwrap());
        let [one, other] =
            [0, 1].map(|_| Arc::new(plan(&problem, &planner.device, &planner.options).unwrap()));
        assert!(Arc::ptr_eq(&planner.keep(problem.clone(), Arc::clone(&one), 0), &one));
        assert!(Arc::ptr_eq(&planner.keep(problem, other, 1), &one));
        assert!(Arc::ptr_eq(&planner.plan(&step(1, 1000)).unwrap(), &one));
    }

    #[test]
    fn a_first_prompt_is_planned_as_it_is() {
        assert_eq!(planner().plan(&step(70, 70)).unwrap().problem, step(70, 70));
        assert_eq!(planner().plan(&step(70, 71)).unwrap().problem, step(70, LEAST_LEN));
    }

    #[test]
    fn plans_do_not_pile_up_and_the_one_in_use_stays() {
        let planner = planner();
        let used = planner.plan(&step(1, 1000)).unwrap();
        for total in 1..=2 * MOST_PLANS {
            planner.plan(&step(total, total)).unwrap();
            assert!(Arc::ptr_eq(&planner.plan(&step(1, 1000)).unwrap(), &used), "{total}");
        }
        assert_eq!(planner.plans.read().unwrap().len(), MOST_PLANS);
    }

    #[test]
    fn buckets_are_few_and_not_much_larger() {
        let buckets: std::collections::BTreeSet<_> = (0..=8192).map(Planner::bucket).collect();
        assert_eq!(buckets.len(), 17 + 9 * 8);
        for tokens in 0..=8192 {
            let bucket = Planner::bucket(tokens);
            assert!(bucket >= tokens && bucket * 8 <= tokens * 9 + 8, "{bucket} for {tokens}");
            assert_eq!(Planner::bucket(bucket), bucket);
        }
        assert_eq!(Planner::bucket(usize::MAX), usize::MAX);
    }

    /// A call of `tokens` tokens of 4 sequences, of which one has `most` at most and `longest`
    /// keys.
    fn paged(tokens: usize, most: usize, longest: usize) -> Problem {
        let layer = Layer::new(DType::BF16, Heads { query: 8, kv: 2, size: 128 });
        let call = Paged::new(4, tokens, [1000, 16, 100]).most_tokens(most).longest(longest);
        layer.paged(call).unwrap()
    }

    #[test]
    fn calls_over_a_paged_cache_share_plans() {
        let planner = planner();
        let plan = |tokens, most, longest| planner.plan(&paged(tokens, most, longest)).unwrap();
        // A decode step each, while sequences grow.
        assert!(Arc::ptr_eq(&plan(4, 1, 520), &plan(4, 1, 1024)));
        assert!(!Arc::ptr_eq(&plan(4, 1, 1024), &plan(4, 1, 1025)));
        // Chunks of a prompt beside decode steps, padded to as many rows.
        assert!(Arc::ptr_eq(&plan(320, 290, 700), &plan(320, 310, 900)));
        let problem = plan(320, 290, 700).problem().clone();
        assert_eq!((problem.q_len, problem.new_len, problem.capacity), (320, 320, 1024));
        // No more than there can be.
        let problem = plan(301, 299, 1500).problem().clone();
        assert_eq!((problem.q_len, problem.total_len), (301, 1600));
    }

    #[test]
    fn a_server_makes_few_plans() {
        let planner = planner();
        for step in 0..4000 {
            let chunk = 1 + step * 37 % 512;
            let tokens = Planner::bucket(chunk + 3);
            planner.plan(&paged(tokens, chunk, (chunk + step % 1000).min(1600))).unwrap();
        }
        assert!(planner.plans.read().unwrap().len() < 400);
    }
}
