//! `tiled_f32`: flash attention in float32, each product three of TF32.

use crate::Result;
use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, l2_swizzled_params};
use crate::plan::{requirements, select};
use gqa_kernels::attention::tiled;
use gqa_kernels::registry;

pub(super) struct TiledF32;

impl Family for TiledF32 {
    fn module(&self) -> registry::Family {
        registry::Family::TiledF32
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::flash(call.problem)?;
        let entry = select::smallest(self, call)?;
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = l2_swizzled_params(&job, 1)?;
        let grid = tiled::grid(&params, kernel.entry.rows);
        let arguments = arguments(job.problem, &job.rows);
        Ok(vec![launch(kernel.entry, grid, &arguments, &params)?])
    }
}
