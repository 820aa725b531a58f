//! From a problem to a plan.

use super::contiguous::Composed;
use super::cost::Cost;
use super::device::DeviceInfo;
use super::launch::{Launch, Plan};
use super::options::PlanOptions;
use super::scratch::Scratch;
use super::{paged, quantized_output, scatter, sliding};
use crate::problem::{CallKind, Problem};
use crate::tensors::TensorSpec;
use gqa_tensor::{Error, Result};

/// Chooses the kernels for `problem` on `device`.
///
/// # Errors
/// Where the device has no SMs, or more than a GPU has, and where the options force splits or a
/// cluster size that no kernel supports. [`Error::NoKernel`] where no family takes the call, with
/// each one's reason, or where the kernel that `options` force does not support the call.
pub fn plan(problem: &Problem, device: &DeviceInfo, options: &PlanOptions) -> Result<Plan> {
    check_device(device)?;
    options.check()?;
    let mut scratch = Scratch::default();
    let compose =
        |problem: &Problem, scratch: &mut Scratch| composed(problem, device, options, scratch);
    let composed = match problem.quantizes_output() {
        true => quantized_output::compose(problem, device, &mut scratch, compose)?,
        false => compose(problem, &mut scratch)?,
    };
    let Composed { launches, schedule, decisions, positions } = composed;
    check_forced(options, &launches)?;
    Ok(Plan {
        problem: problem.clone(),
        device: device.clone(),
        tensors: TensorSpec::all(problem),
        launches,
        schedule,
        workspace_bytes: scratch.bytes,
        counters: scratch.counters,
        decisions,
        positions,
        cost: Cost::of(problem),
        fold: options.fold,
    })
}

/// The launches of a call, by the kind of its KV cache.
fn composed(
    problem: &Problem,
    device: &DeviceInfo,
    options: &PlanOptions,
    scratch: &mut Scratch,
) -> Result<Composed> {
    match (problem.pages, problem.sliding()) {
        _ if problem.is_empty() => Ok(Composed::default()),
        (Some(pages), _) => paged::compose(problem, pages, device, options, scratch),
        (None, Some(how)) => sliding::compose(problem, how, device, options, scratch),
        (None, None) => match problem.computes {
            CallKind::Update(mode) => scatter::compose(problem, mode, device),
            _ => Composed::of(problem, device, options, scratch),
        },
    }
}

/// Work is divided among SMs, and totals over all SMs are counted in 32 bits.
fn check_device(device: &DeviceInfo) -> Result<()> {
    const MOST: u32 = 4096;
    match device.multiprocessors {
        1..=MOST => Ok(()),
        got => Err(Error::invalid("device.multiprocessors", got, format!("1 to {MOST}"))),
    }
}

/// GQA_FORCE means this kernel or an error, unless the call has nothing to do.
fn check_forced(options: &PlanOptions, launches: &[Launch]) -> Result<()> {
    match options.force {
        Some(_) if launches.is_empty() => Ok(()),
        Some(forced) if launches.iter().all(|launch| launch.entry.name != forced) => {
            let names: Vec<_> = launches.iter().map(|launch| launch.entry.name).collect();
            let names = names.join(", ");
            Err(Error::NoKernel(format!("GQA_FORCE={forced} is none of its kernels, {names}")))
        }
        _ => Ok(()),
    }
}
