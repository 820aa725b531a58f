//! `split_kv`: flash attention over splits of the keys, and a merge, for few query rows and many
//! keys.

use super::hopper;
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, l2_swizzled_params, params};
use crate::plan::{merge, requirements, select};
use crate::{Problem, Result};
use bytemuck::Zeroable;
use gqa_kernels::attention::split_kv;
use gqa_kernels::params::Strides;
use gqa_kernels::registry::{self, Entry};

pub(super) struct SplitKv;

impl Family for SplitKv {
    fn module(&self) -> registry::Family {
        registry::Family::SplitKv
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFlashDecode, PlanOption::Splits]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::flash(call.problem)?;
        let entry = select::smallest(self, call)?;
        // Among the families with larger tiles, only `hopper` writes another output type.
        let has_rival = hopper::may_take(call.problem, call.device);
        Ok(Kernel::split(entry, splits(call, entry, 1, has_rival)?))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let Kernel { entry, splits, .. } = *kernel;
        let params = l2_swizzled_params(&job, splits)?;
        let arguments = arguments(job.problem, &job.rows);
        merge::launches(job, entry, split_kv::grid(&params), arguments, &params, splits > 1)
    }
}

/// Packed query rows up to which reading K and V once per 16 rows costs less than filling a tile of
/// `tiled` with few rows.
const FEW_ROWS: u32 = 64;

/// The best number of KV splits for a call of few rows; `None` if the call has many rows.
pub(super) fn splits_of_few_rows(p: &Problem, device: &DeviceInfo) -> Option<u32> {
    let params = params(p, Strides::zeroed(), 1).ok()?;
    (p.packed_rows() <= FEW_ROWS as usize)
        .then(|| split_kv::splits(&params, p.most_keys(), device.multiprocessors))
}

/// Number of KV splits if an SM holds `blocks` CTAs, or the reason why kernels with larger tiles
/// are better; `has_rival` if one of those writes the call's output type. GQA_SPLITS and GQA_FORCE
/// override the heuristic.
pub(super) fn splits(
    call: &Call<'_>,
    entry: &Entry,
    blocks: u32,
    has_rival: bool,
) -> Result<u32, Rejection> {
    let (p, device) = (call.problem, call.device);
    let least = select::least_splits(p);
    if let Some(splits) = call.options.splits {
        return Ok(splits.max(least));
    }
    let rows = p.packed_rows();
    let takes_all = call.options.force.is_some() || p.widens_output() && !has_rival;
    if rows > FEW_ROWS as usize && !takes_all {
        return Err(Rejection::Rows { got: rows, max: FEW_ROWS });
    }
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::OneSplit)?;
    let splits = split_kv::splits(&params, p.most_keys(), blocks * device.multiprocessors);
    // Up to two row tiles are still faster here, although each reads all keys.
    if splits == 1 && rows > 2 * entry.rows as usize && !takes_all {
        return Err(Rejection::OneSplit);
    }
    Ok(splits.max(least))
}
