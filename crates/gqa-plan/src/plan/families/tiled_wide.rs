//! `tiled_wide`: flash attention on tensor cores for heads larger than 256, over splits of the keys
//! where rows are few.

use crate::Problem;
use crate::Result;
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
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
        let (p, device) = (call.problem, call.device);
        requirements::flash(p)?;
        let entry = select::among(self, call, |_| true, |entry| unsuited(entry, p, device))?;
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

/// A tile that fits, with as few tiles of the rows as there can be, as few rows to a tile, and as
/// many keys.
fn unsuited(entry: &Entry, p: &Problem, device: &DeviceInfo) -> [usize; 4] {
    let (rows, keys) = (entry.rows as usize, entry.keys as usize);
    let fits = entry.shared_bytes <= device.shared_bytes;
    let tiles = p.packed_rows().div_ceil(rows);
    [(!fits).into(), tiles, rows, usize::MAX - keys]
}

/// Into how many parts the keys are split. GQA_SPLITS knows better than the heuristic.
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
