//! `tiled_tma`: `tiled` with K and V by TMA: prefill on GPUs that have TMA, but not the `wgmma` of
//! `hopper`.

use super::{hopper, tiled};
use crate::Result;
use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::device::Capability;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, l2_swizzled_params};
use crate::plan::{requirements, select};
use gqa_kernels::attention::tiled::grid;
use gqa_kernels::registry::{self, Entry};

pub(super) struct TiledTma;

impl Family for TiledTma {
    fn module(&self) -> registry::Family {
        registry::Family::TiledTma
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::flash(call.problem)?;
        select::capabilities(&[Capability::Tma], call.device)?;
        let entry = select::smallest(self, call)?;
        suits(call, entry)?;
        requirements::narrow_output(call.problem)?;
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = l2_swizzled_params(&job, 1)?;
        let grid = grid(&params, kernel.entry.rows);
        let [k, v] = hopper::key_maps(job.problem, &params, &job.rows, kernel.entry)?;
        let mut arguments = arguments(job.problem, &job.rows);
        arguments.retain(|(name, _)| !["k", "v"].contains(name));
        arguments.extend([("k", k), ("v", v)]);
        Ok(vec![launch(kernel.entry, grid, &arguments, &params)?])
    }
}

/// Errs where `tiled` is faster.
fn suits(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    let p = call.problem;
    // If a kernel of this family is forced, `tiled` has none.
    let Ok(tiled) = tiled::smallest(call) else { return Ok(()) };
    if tiled.head_size < entry.head_size {
        return Err(Rejection::OtherHeadSize { got: p.head_size });
    }
    // A CTA with more rows than those of `tiled` takes a whole SM, which two CTAs of `tiled` share.
    // If the CTAs of `tiled` are so few that each has an SM to itself, `tiled` is faster.
    let (heads, sms) =
        (p.batch.saturating_mul(p.kv_heads).max(1), call.device.multiprocessors as usize);
    let min = entry.rows as usize * (sms / 2 + 1).div_ceil(heads);
    match entry.rows > tiled.rows && p.packed_rows() < min {
        true => Err(Rejection::FewRows { got: p.packed_rows(), min }),
        false => Ok(()),
    }
}
