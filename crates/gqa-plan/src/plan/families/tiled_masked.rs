//! `tiled_masked`: `tiled` with a bias or a mask.

use crate::Result;
use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, l2_swizzled_params, masked_params};
use crate::plan::{requirements, select};
use gqa_kernels::attention::tiled;
use gqa_kernels::registry;

pub(super) struct TiledMasked;

impl Family for TiledMasked {
    fn module(&self) -> registry::Family {
        registry::Family::TiledMasked
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::masked_flash(call.problem)?;
        let entry = select::smallest(self, call)?;
        requirements::narrow_output(call.problem)?;
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let mut params = masked_params(job.problem, job.rows.query.strides, 1)?;
        params.attention = l2_swizzled_params(&job, 1)?;
        let grid = tiled::grid(&params.attention, kernel.entry.rows);
        let arguments = arguments(job.problem, &job.rows);
        Ok(vec![launch(kernel.entry, grid, &arguments, &params)?])
    }
}
