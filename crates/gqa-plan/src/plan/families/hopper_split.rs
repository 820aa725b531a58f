//! `hopper_paged` over a contiguous KV cache: the kernels that divide the work of all sequences by
//! the lengths on the device, for short chunks of several sequences.

use super::hopper::{self, LEAST_ROWS};
use super::hopper_paged::{Division, PagedCall, dividing, may_split, order, rows_apart};
use crate::Result;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::{requirements, select};
use crate::problem::Problem;
use gqa_kernels::concept::pages::CONTIGUOUS;
use gqa_kernels::registry::{self, Entry, Role};

pub(super) struct HopperSplit;

impl Family for HopperSplit {
    fn module(&self) -> registry::Family {
        registry::Family::HopperPaged
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        requirements::narrow_output(p)?;
        may_split(p)?;
        if p.batch_invariant {
            return Err(Rejection::Argument { name: "batch_invariant" });
        }
        let whole = select::among(self, call, |_| true, |entry| order(entry, p))?;
        let entry = dividing(whole).ok_or(Rejection::OneSplit)?;
        let is_forced = |forced: &Entry| forced.role == Role::Merge || forced.name == entry.name;
        if let Some(other) = call.forced.filter(|forced| !is_forced(forced)) {
            return Err(Rejection::NotForced { forced: other.name });
        }
        hopper::can_do(p, call.device)?;
        if rows_apart(p).is_err() {
            return Err(Rejection::Strided);
        }
        let division = Division::of(p, entry, call.device);
        if !division.fits(p) || p.capacity > CONTIGUOUS as usize {
            return Err(Rejection::TooLarge);
        }
        match call.forced.is_some() || pays(call, &division) {
            true => Ok(Kernel::whole(entry)),
            false => Err(Rejection::OneSplit),
        }
    }

    fn fuses(&self, p: &Problem, _: &Entry, fused: bool) -> FusedPrologue {
        let query_rotation = fused && p.rotary.is_some_and(hopper::knows);
        FusedPrologue { query_rotation, ..FusedPrologue::default() }
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let call = PagedCall::new(job, kernel.entry)?;
        call.launches(&call.params)
    }
}

/// Whether dividing the work pays: several sequences have few rows of each query head after many
/// keys. Of more rows, whole tiles keep all SMs busy for longer, the more so if lengths are equal;
/// one sequence has equal splits (measured: `docs/perf-log.md`).
fn pays(call: &Call<'_>, division: &Division) -> bool {
    let p = call.problem;
    let most = if p.mean_len.is_some() { 2 * LEAST_ROWS } else { LEAST_ROWS };
    call.options.splits.is_none() && p.batch > 1 && p.q_len <= most && division.pays()
}
