//! Checks of a call before its first launch.

use super::overlap;
use super::raw;
use super::stream::Stream;
use super::views::{self, DeviceView, Views, Workspace};
use gqa_plan::contents;
use gqa_plan::plan::environment::CHECK;
use gqa_plan::plan::{Plan, TensorId, Tensors};
use gqa_plan::{Problem, ProblemFields};
use gqa_tensor::{DType, Error, Result, Tensor, TensorView};

/// Whether `GQA_CHECK` enables [`contents`].
///
/// # Errors
/// Where it is neither 0 nor 1.
pub(super) fn is_on() -> Result<bool> {
    let refused = |got: &str| Error::Switch { name: CHECK, got: got.into(), allowed: "0 or 1" };
    match std::env::var_os(CHECK).map(|value| value.to_string_lossy().trim().to_owned()).as_deref()
    {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(got) => Err(refused(got)),
    }
}

/// Checks tensors and scratch memory against the plan, and their contents if `contents` is set,
/// before anything is launched.
///
/// # Safety
/// With `contents`, tensors and workspace are device memory of their stated sizes.
pub(super) unsafe fn call(
    plan: &Plan,
    tensors: &Views<'_>,
    workspace: Workspace,
    stream: &Stream,
    contents: bool,
) -> Result<()> {
    views::check(tensors, plan)?;
    workspace.check(plan)?;
    overlap::check(plan, tensors, workspace)?;
    // SAFETY: the caller's.
    if contents { unsafe { self::contents(plan, tensors, workspace, stream) } } else { Ok(()) }
}

/// Checks the tensors that a plan's schedule is computed from, and the tensor that receives it.
pub(super) fn schedule(plan: &Plan, tensors: &Views<'_>) -> Result<()> {
    let ids = [TensorId::SeqlensK, TensorId::CumulativeSequenceLength, TensorId::Schedule];
    views::check_some(tensors, plan, ids)?;
    overlap::check_schedule(plan, tensors)
}

/// Waits for the stream, then checks that counters are zero, that lengths, positions and block
/// tables stay within the tensors that they index, and that a schedule is that of the lengths.
///
/// # Safety
/// As of [`call`].
unsafe fn contents(
    plan: &Plan,
    tensors: &Views<'_>,
    workspace: Workspace,
    stream: &Stream,
) -> Result<()> {
    // SAFETY: the stream lives.
    if stream.with(|| unsafe { raw::stream::is_captured(stream.raw()) })? {
        let allowed = "0 while a graph is captured, as contents change between its replays";
        return Err(Error::Switch { name: CHECK, got: "1".into(), allowed });
    }
    let counters = [plan.counters()];
    let counters = DeviceView::new(workspace.counters, DType::I32, &counters);
    // SAFETY: the caller's.
    zero(&unsafe { counters.download(stream) }?)?;
    let is_number = |dtype| matches!(dtype, DType::I32 | DType::I64);
    let numbers = plan
        .tensors()
        .iter()
        .filter(|(id, spec)| is_number(spec.dtype) && !id.is_output() && *id != TensorId::TreeMask);
    let given = numbers.filter_map(|&(id, _)| Some((id, tensors.get(id)?)));
    // SAFETY: the caller's.
    let read = given.map(|(id, view)| Ok((id, unsafe { view.download(stream) }?)));
    let read: Tensors<Tensor> = read.collect::<Result<_>>()?;
    let views = read.iter().map(|(id, tensor)| (id, tensor.view())).collect();
    let schedule = plan.check_schedule(&views);
    let (problem, views) = without_padding(plan.problem(), views)?;
    contents::check_on_device(&problem, &views)?;
    schedule
}

/// Every call leaves its counters at zero; checks that.
fn zero(counters: &Tensor) -> Result<()> {
    let TensorView::I32(counts) = counters.view() else { return Ok(()) };
    let Some(i) = counts.iter().position(|&count| count != 0) else { return Ok(()) };
    let got = format!("{} in counter {i} of {}", counts[i], counts.len());
    let allowed = "0, as every call leaves them: another call has them now, a kernel failed, or \
                   something else wrote there";
    Err(Error::invalid("workspace.counters", got, allowed))
}

/// Drops the padding rows after the last sequence's tokens, which belong to no sequence.
fn without_padding<'a>(
    problem: &Problem,
    views: Tensors<TensorView<'a>>,
) -> Result<(Problem, Tensors<TensorView<'a>>)> {
    let (Some(pages), Some(TensorView::I32(starts))) =
        (problem.pages, views.get(TensorId::CumulativeSequenceLength))
    else {
        return Ok((problem.clone(), views));
    };
    let tokens = starts.last().and_then(|&end| usize::try_from(end).ok());
    let Some(tokens) = tokens.filter(|&tokens| tokens <= pages.tokens) else {
        return Ok((problem.clone(), views));
    };
    let slots = views.get(TensorId::SlotMapping).map(|slots| match *slots {
        TensorView::I32(slots) => TensorView::I32(&slots[..tokens]),
        other => other,
    });
    let pages = gqa_plan::Pages { tokens, ..pages };
    let problem = problem.derive(|call| ProblemFields {
        pages: Some(pages),
        q_len: call.q_len.min(tokens),
        new_len: call.new_len.min(tokens),
        ..call
    })?;
    Ok((problem, views.with(TensorId::SlotMapping, slots)))
}
