//! The cascade: tries the families in order; the first one that supports the call computes it.

use super::decision::{Decision, Rejection};
use super::families::CONTIGUOUS;
use super::family::{Call, Choice, Family};
use super::requirements;
use super::trust::{Trust, is_proven};
use crate::problem::Problem;
use gqa_kernels::registry::{self, Entry, entries};
use gqa_tensor::{Error, Result};

/// The families for a contiguous KV cache, in order.
pub fn candidates() -> impl Iterator<Item = registry::Family> {
    CONTIGUOUS.into_iter().map(|family| family.module())
}

/// The first family that supports a call over a contiguous KV cache, and the decision about each.
pub(super) fn choose(call: &Call<'_>) -> Result<(Choice, Vec<Decision>)> {
    let mut chosen: Option<Choice> = None;
    let mut decisions = Vec::new();
    for family in CONTIGUOUS {
        let outcome = match chosen {
            Some(_) => Err(Rejection::Outranked),
            None => consider(family, call),
        };
        decisions.push(decision(family, &outcome));
        chosen = chosen.or(outcome.ok());
    }
    match chosen {
        Some(choice) => Ok((choice, decisions)),
        None => Err(Error::NoKernel(refusals(&decisions))),
    }
}

/// The family's kernel for the call, or the first reason against it.
pub(super) fn consider(family: &'static dyn Family, call: &Call<'_>) -> Result<Choice, Rejection> {
    let mut off = family.options().iter().filter(|option| call.options.switches_off(**option));
    if let Some(option) = off.next() {
        return Err(Rejection::Disabled { switch: option.variable() });
    }
    distrusts(family, call)?;
    if let Some(forced) = call.forced.filter(|forced| forced.family != family.module()) {
        return Err(Rejection::NotForced { forced: forced.name });
    }
    requirements::one_type(call.problem)?;
    quantizes(family, call.problem)?;
    takes_tree_mask(family, call.problem)?;
    takes_latent(family, call.problem)?;
    takes_values(family, call.problem)?;
    Ok(Choice { family, kernel: family.choose(call)? })
}

/// Families that are not trusted on the GPU are left out, unless one of their kernels is forced.
fn distrusts(family: &dyn Family, call: &Call<'_>) -> Result<(), Rejection> {
    let (options, sm) = (call.options, call.device.sm);
    let module = family.module();
    let proven = options.trust != Trust::None || is_proven(module, sm) || call.forced.is_some();
    match proven && !options.distrusted.contains(&module) {
        true => Ok(()),
        false => Err(Rejection::Distrusted { sm }),
    }
}

/// Few families write quantized output.
fn quantizes(family: &dyn Family, p: &Problem) -> Result<(), Rejection> {
    let writes = |entry: &Entry| entry.family == family.module() && requirements::writes(entry, p);
    match p.quantizes_output() && !entries().any(writes) {
        true => Err(Rejection::OutputType { got: p.out_dtype }),
        false => Ok(()),
    }
}

/// Few families take a tree mask.
fn takes_tree_mask(family: &dyn Family, p: &Problem) -> Result<(), Rejection> {
    let takes = |entry: &Entry| entry.family == family.module() && entry.takes("tree_mask");
    match p.tree_mask && !entries().any(takes) {
        true => Err(Rejection::Argument { name: "tree_mask" }),
        false => Ok(()),
    }
}

/// Few families take values that are a part of the keys, or rotate from a later element on.
fn takes_latent(family: &dyn Family, p: &Problem) -> Result<(), Rejection> {
    let offset = p.rotary.map_or(0, |rotary| rotary.offset);
    match family.takes_latent() {
        false if p.latent => Err(Rejection::Latent),
        false if offset != 0 => Err(Rejection::Argument { name: "rotary_offset" }),
        _ => Ok(()),
    }
}

/// Few families take values of another head size than keys.
fn takes_values(family: &dyn Family, p: &Problem) -> Result<(), Rejection> {
    match p.v_head_size == p.head_size || family.takes_any_values() {
        true => Ok(()),
        false => Err(Rejection::Values { dtype: p.v_dtype, size: p.v_head_size }),
    }
}

/// The decision about a family.
pub(super) fn decision(family: &dyn Family, outcome: &Result<Choice, Rejection>) -> Decision {
    let outcome = outcome.as_ref().map(|choice| choice.kernel.entry).map_err(Clone::clone);
    Decision { family: family.module(), outcome }
}

/// The reason against each family; if a kernel is forced, only against the kernel's own family.
pub(super) fn refusals(decisions: &[Decision]) -> String {
    let other = |decision: &Decision| match decision.outcome {
        Err(Rejection::NotForced { forced }) => Some(forced),
        _ => None,
    };
    let refusal = |decision: &Decision| {
        let reason = decision.outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
        format!("{} {reason}", decision.family.name())
    };
    let asked = decisions.iter().filter(|decision| other(decision).is_none());
    let reasons = asked.map(refusal).collect::<Vec<_>>().join("; ");
    match decisions.iter().find_map(other) {
        None => reasons,
        Some(forced) if reasons.is_empty() => {
            format!("GQA_FORCE={forced}, whose family is for other KV caches")
        }
        Some(forced) => format!("GQA_FORCE={forced}, but {reasons}"),
    }
}
