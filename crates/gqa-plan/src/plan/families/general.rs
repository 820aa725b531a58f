//! `general`: memory-efficient attention for every mask, bias, window and head size.

use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, masked_params};
use crate::plan::{requirements, select};
use crate::{Problem, QkOutput, Result};
use gqa_kernels::attention::general;
use gqa_kernels::registry;

pub(super) struct General;

impl Family for General {
    fn module(&self) -> registry::Family {
        registry::Family::General
    }

    fn takes_latent(&self) -> bool {
        true
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableMemoryEfficientAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::output_of(call.forced, p)?;
        scores_after_the_mask(p)?;
        let writes = |entry: &registry::Entry| requirements::writes(entry, p);
        let smallest = |entry: &registry::Entry| [entry.head_size as usize, 0, 0, 0];
        Ok(Kernel::whole(select::among(self, call, writes, smallest)?))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = masked_params(job.problem, job.rows.query.strides, 1)?;
        let grid = general::grid(&params.attention);
        let arguments = arguments(job.problem, &job.rows);
        Ok(vec![launch(kernel.entry, grid, &arguments, &params)?])
    }
}

/// It has no others.
fn scores_after_the_mask(p: &Problem) -> Result<(), Rejection> {
    match p.output_qk {
        QkOutput::None | QkOutput::BeforeSoftmax | QkOutput::AfterSoftmax => Ok(()),
        QkOutput::Scaled | QkOutput::Capped | QkOutput::Biased => {
            Err(Rejection::Argument { name: "qk_matmul_output in modes 0 to 2" })
        }
    }
}
