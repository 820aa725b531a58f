//! `tiled`: flash attention on tensor cores, for prefill on every GPU that has them.

use crate::Result;
use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, l2_swizzled_params};
use crate::plan::{requirements, select};
use gqa_kernels::attention::tiled;
use gqa_kernels::registry::{self, Entry};

pub(super) struct Tiled;

impl Family for Tiled {
    fn module(&self) -> registry::Family {
        registry::Family::Tiled
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::flash(call.problem)?;
        let entry = smallest(call)?;
        requirements::narrow_output(call.problem)?;
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = l2_swizzled_params(&job, 1)?;
        let grid = tiled::grid(&params, kernel.entry.rows);
        let arguments = arguments(job.problem, &job.rows);
        Ok(vec![launch(kernel.entry, grid, &arguments, &params)?])
    }
}

/// The kernel with the smallest tile that holds the call's heads; among several the one with the
/// most keys of which two CTAs fit an SM, else the one with the fewest.
pub(super) fn smallest(call: &Call<'_>) -> Result<&'static Entry, Rejection> {
    select::among(
        &Tiled,
        call,
        |_| true,
        |entry| {
            let [size, keys] = [entry.head_size, entry.keys].map(|n| n as usize);
            match select::fits_twice(entry, call.device) {
                true => [size, 0, usize::MAX - keys, 0],
                false => [size, 1, keys, 0],
            }
        },
    )
}
