//! `split_kv_masked`: `split_kv` with a bias or a mask.

use super::split_kv::splits;
use crate::Result;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, masked_params};
use crate::plan::{merge, requirements, select};
use gqa_kernels::attention::split_kv;
use gqa_kernels::registry;

pub(super) struct SplitKvMasked;

/// Blocks to an SM: one alone takes longer for a step than its loads do.
const BLOCKS: u32 = 2;

impl Family for SplitKvMasked {
    fn module(&self) -> registry::Family {
        registry::Family::SplitKvMasked
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFlashDecode, PlanOption::Splits]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::masked_flash(call.problem)?;
        let entry = select::smallest(self, call)?;
        Ok(Kernel::split(entry, splits(call, entry, BLOCKS, false)?))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let Kernel { entry, splits, .. } = *kernel;
        let params = masked_params(job.problem, job.rows.query.strides, splits)?;
        let arguments = arguments(job.problem, &job.rows);
        let grid = split_kv::grid(&params.attention);
        merge::launches(job, entry, grid, arguments, &params, splits > 1)
    }
}
