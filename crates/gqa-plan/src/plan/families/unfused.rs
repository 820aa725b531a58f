//! `unfused`: all scores in memory, in three launches, for what no other family takes.

use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, masked_params};
use crate::plan::{requirements, select};
use crate::{Error, Problem, Result};
use gqa_kernels::attention::unfused;
use gqa_kernels::registry::{self, Entry, Role, entries};

pub(super) struct Unfused;

impl Family for Unfused {
    fn module(&self) -> registry::Family {
        registry::Family::Unfused
    }

    fn takes_latent(&self) -> bool {
        true
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        Ok(Kernel::whole(select::smallest(self, call)?))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, scores) = (job.problem, kernel.entry);
        let mut params = masked_params(p, job.rows.query.strides, 1)?;
        params.columns = params.columns.min(params.attention.qk_columns);
        let elements = p.scores_shape().iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let mut arguments = arguments(p, &job.rows);
        let taken = job.scratch.take(elements.unwrap_or(usize::MAX), size_of::<f32>())?;
        arguments.push(("scores", taken));
        let kernels = [
            (scores, unfused::scores_grid(&params)),
            (behind(scores, Role::Softmax, p)?, unfused::softmax_grid(&params)),
            (behind(scores, Role::Values, p)?, unfused::values_grid(&params)),
        ];
        let launches =
            kernels.into_iter().map(|(entry, grid)| launch(entry, grid, &arguments, &params));
        launches.collect()
    }
}

/// A later kernel for the element type of the scores' kernel.
fn behind(scores: &Entry, role: Role, p: &Problem) -> Result<&'static Entry> {
    let ends = role != Role::Values;
    let is_it = |entry: &&Entry| {
        entry.role == role
            && entry.dtype == scores.dtype
            && (ends || requirements::writes(entry, p))
    };
    entries()
        .find(is_it)
        .ok_or_else(|| Error::NoKernel(format!("{} has no kernel for {}", role.name(), p.dtype)))
}
