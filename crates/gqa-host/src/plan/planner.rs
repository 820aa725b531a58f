//! Plans made before: a shape that was seen costs a look-up.

use super::compose::plan;
use super::device::DeviceInfo;
use super::launch::Plan;
use super::options::PlanOptions;
use crate::{Problem, ProblemFields, Result};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Makes plans for one device under one set of options, and keeps them.
///
/// A cache that grows by a token makes a new [`Problem`] of every step, though the kernels read lengths on the device. So where
/// nothing but the choice of kernels depends on it, `total_len` is rounded up to a power of two before the look-up, at most to the
/// capacity unless the cache slides: [`Plan::problem`] then says more rows than were asked for.
pub struct Planner {
    device: DeviceInfo,
    options: PlanOptions,
    plans: RwLock<HashMap<Problem, Arc<Plan>>>,
}

/// Where a program has so many shapes, keeping plans does not help it, and must not fill its memory.
const MOST_PLANS: usize = 1024;
/// Shorter sequences are planned as if they had this length.
const LEAST_LEN: usize = 256;

impl Planner {
    /// No plans yet.
    pub fn new(device: DeviceInfo, options: PlanOptions) -> Self {
        Self { device, options, plans: RwLock::default() }
    }

    /// The plan for that call: for a shape that was seen, the same one, without allocating memory.
    pub fn plan(&self, problem: &Problem) -> Result<Arc<Plan>> {
        let problem = rounded(problem);
        if let Some(plan) = self.plans.read().unwrap_or_else(PoisonError::into_inner).get(&problem)
        {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(plan(&problem, &self.device, &self.options)?);
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= MOST_PLANS {
            plans.clear();
        }
        plans.insert(problem, Arc::clone(&plan));
        Ok(plan)
    }
}

/// The problem for sequences up to a rounded length, where its tensors and its rows' meaning stay what they are.
fn rounded(problem: &Problem) -> Problem {
    if !problem.grows() {
        return problem.clone();
    }
    let least = problem.total_len.next_power_of_two().max(LEAST_LEN);
    let most = if problem.sliding().is_some() { usize::MAX } else { problem.capacity };
    let total_len = least.min(most).max(problem.total_len);
    problem.derive(|call| ProblemFields { total_len, ..call })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{GroupQueryAttention, Shapes};
    use crate::{CacheBinding, DType, TensorDesc};

    const CAPACITY: usize = 3000;

    fn step(rows: usize, total: usize) -> Problem {
        let f16 = |shape| TensorDesc { dtype: DType::F16, shape };
        let cache = f16(&[2, 2, CAPACITY, 64]);
        let (query, new) = ([2, rows, 4 * 64], [2, rows, 2 * 64]);
        let shapes = Shapes {
            key: Some(f16(&new)),
            value: Some(f16(&new)),
            past_key: Some(cache),
            past_value: Some(cache),
            ..Shapes::new(f16(&query), TensorDesc { dtype: DType::I32, shape: &[2] }, total)
        };
        GroupQueryAttention::new(4, 2).problem_from_shapes(&shapes, CacheBinding::Shared).unwrap()
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

    #[test]
    fn a_first_prompt_is_planned_as_it_is() {
        assert_eq!(planner().plan(&step(70, 70)).unwrap().problem, step(70, 70));
        assert_eq!(planner().plan(&step(70, 71)).unwrap().problem, step(70, LEAST_LEN));
    }

    #[test]
    fn plans_do_not_pile_up() {
        let planner = planner();
        for total in 1..=2 * MOST_PLANS {
            planner.plan(&step(total, total)).unwrap();
        }
        assert!(planner.plans.read().unwrap().len() <= MOST_PLANS);
    }
}
