//! Calls over a contiguous KV cache that does not roll: a prologue, and attention.

use super::cascade;
use super::decision::Decision;
use super::device::DeviceInfo;
use super::family::{Call, FusedPrologue, Job, Task};
use super::launch::Launch;
use super::options::PlanOptions;
use super::positions::{Positions, positions};
use super::prologue::prologue;
use super::rebind::Rebind;
use super::requirements::one_type;
use super::scratch::Scratch;
use super::tree_mask::Expanded;
use crate::problem::{CallKind, Problem};
use gqa_tensor::{Error, Result};

/// Launches and decisions for a call; empty where it has nothing to do.
#[derive(Default)]
pub(super) struct Composed {
    pub(super) launches: Vec<Launch>,
    /// [`Plan::schedule`](super::Plan::schedule)
    pub(super) schedule: Option<Launch>,
    pub(super) decisions: Vec<Decision>,
    pub(super) positions: Option<Positions>,
}

impl Composed {
    /// Plans a call over a contiguous KV cache that does not roll.
    pub(super) fn of(
        problem: &Problem,
        device: &DeviceInfo,
        options: &PlanOptions,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        if problem.computes == CallKind::Attention && problem.q_len == 0 {
            return Self::of(&problem.cache_alone()?, device, options, scratch);
        }
        let fused = !options.disable_fused_kv;
        let positions = positions(problem, fused);
        if problem.computes != CallKind::Attention {
            one_type(problem).map_err(|rejection| Error::NoKernel(rejection.to_string()))?;
            let nothing = FusedPrologue::default();
            let (launches, _) = prologue(problem, device, fused, nothing, scratch)?;
            return Ok(Self { launches, positions, ..Self::default() });
        }
        let typical = problem.batch_invariant.then(|| problem.typical());
        let asked = typical.as_ref().unwrap_or(problem);
        let chosen = cascade::choose(&Call::new(asked, device, options));
        if problem.tree_mask && chosen.is_err() {
            return with_mask_over_all_keys(problem, device, options, scratch);
        }
        let (choice, decisions) = chosen?;
        let by_attention = choice.fuses(problem, fused);
        let (mut launches, rows) = prologue(problem, device, fused, by_attention, scratch)?;
        let task = Task::whole(problem, fused);
        launches.extend(choice.launches(Job { problem, device, rows, task, scratch })?);
        if problem.batch_invariant {
            has_grids(&launches)?;
        }
        Ok(Self { launches, schedule: None, decisions, positions })
    }
}

/// Errs where there are more CTAs than CUDA starts. Kernels of a batch-invariant call are chosen
/// for a fixed batch, so the check comes last.
fn has_grids(launches: &[Launch]) -> Result<()> {
    const MOST: u32 = 65_535;
    let too_many = launches.iter().find(|launch| launch.grid[1].max(launch.grid[2]) > MOST);
    too_many.map_or(Ok(()), |launch| {
        let allowed = format!("false: {} would have too many CTAs", launch.entry.name);
        Err(Error::invalid("batch_invariant", "true", allowed))
    })
}

/// The launches of a call with a tree mask that no kernel takes: `tree_mask_rows` expands it to a
/// mask over all keys.
fn with_mask_over_all_keys(
    problem: &Problem,
    device: &DeviceInfo,
    options: &PlanOptions,
    scratch: &mut Scratch,
) -> Result<Composed> {
    let expanded = Expanded::new(problem, problem, device, scratch)?;
    let call = Composed::of(&expanded.problem, device, options, scratch)?;
    let rebind = Rebind(vec![expanded.mask()]);
    let mut launches = vec![expanded.launch];
    launches.extend(call.launches.into_iter().map(|launch| rebind.launch(launch)));
    Ok(Composed { launches, ..call })
}
