//! `tiled_wide`: flash attention on tensor cores for heads larger than 256, over splits of the keys
//! where rows are few.

use crate::Problem;
use crate::Result;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, l2_swizzled_params, params};
use crate::plan::{merge, requirements, select};
use bytemuck::Zeroable;
use gqa_kernels::attention::tiled_wide;
use gqa_kernels::params::Strides;
use gqa_kernels::registry::{self, Entry};

pub(super) struct TiledWide;

impl Family for TiledWide {
    fn module(&self) -> registry::Family {
        registry::Family::TiledWide
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::Splits]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        let entry = select::among(self, call, |_| true, |entry| order(entry, p))?;
        Ok(Kernel::split(entry, splits(call, entry)?))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let Kernel { entry, splits, .. } = *kernel;
        let params = l2_swizzled_params(&job, splits)?;
        let arguments = arguments(job.problem, &job.rows);
        let grid = tiled_wide::grid(&params, entry.rows);
        merge::launches(job, entry, grid, arguments, &params, splits > 1)
    }
}

/// The order of kernels for a call: first by the elements that all row tiles read per key, then by
/// rows per tile, both as few as possible, then by keys per tile, as many as possible.
fn order(entry: &Entry, p: &Problem) -> select::Order {
    let [rows, keys, size] = [entry.rows, entry.keys, entry.head_size].map(|n| n as usize);
    let tiles = p.packed_rows().div_ceil(rows);
    [tiles.saturating_mul(size), rows, usize::MAX - keys, 0]
}

/// Number of KV splits. GQA_SPLITS overrides the heuristic.
fn splits(call: &Call<'_>, entry: &Entry) -> Result<u32, Rejection> {
    let p = call.problem;
    let least = select::least_splits(p);
    if let Some(splits) = call.options.splits {
        return Ok(splits.max(least));
    }
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::TooLarge)?;
    let (keys, sms) = (p.most_keys(), call.device.multiprocessors);
    Ok(tiled_wide::splits(&params, entry.rows, entry.keys, keys, sms).max(least))
}
