//! com.microsoft.GroupQueryAttention.

use crate::api::Failure;
use crate::call::{Given, Made, check_apart, room};
use crate::schema::Kind::{Cache, Element};
use crate::schema::Literal::{Float, Int, Text};
use crate::schema::{Absent, Attribute, Output, Schema, default, optional, required};
use crate::value::{Context, Value};
use gqa_host::op::{GroupQueryAttention, Inputs, Shapes};
use gqa_host::plan::TensorId::{self, *};
use gqa_host::{CacheBinding, Error, Problem};

/// Its inputs and outputs.
pub static SCHEMA: Schema = Schema {
    name: c"GroupQueryAttention",
    inputs: &Inputs::ONNX,
    outputs: &[
        Output { name: "output", kind: Element, role: TensorId::Output },
        Output { name: "present_key", kind: Cache, role: PresentKey },
        Output { name: "present_value", kind: Cache, role: PresentValue },
        Output { name: "output_qk", kind: Element, role: OutputQk },
    ],
    attributes: &[
        required(c"num_heads"),
        required(c"kv_num_heads"),
        default(c"causal", Int(1)),
        optional(c"scale", Float(0.0)),
        optional(c"softcap", Float(0.0)),
        default(c"local_window_size", Int(-1)),
        default(c"sliding_window_cache", Int(0)),
        optional(c"do_rotary", Int(0)),
        optional(c"rotary_interleaved", Int(0)),
        default(c"smooth_softmax", Int(-1)),
        default(c"qk_output", Int(0)),
        default(c"k_quant_type", Text("NONE")),
        default(c"v_quant_type", Text("NONE")),
        optional(c"kv_cache_bit_width", Int(0)),
        default(c"qk_norm_epsilon", Float(1e-6)),
        Attribute { name: c"q_norm_epsilon", absent: Absent::As(c"qk_norm_epsilon") },
        Attribute { name: c"k_norm_epsilon", absent: Absent::As(c"qk_norm_epsilon") },
    ],
    in_place: false,
};

/// A call's problem, and room for what it writes.
///
/// # Safety
///
/// Nobody else may write total_sequence_length meanwhile.
pub unsafe fn call(
    op: &GroupQueryAttention,
    context: Context,
    given: &Given,
) -> Result<(Problem, Made), Failure> {
    // SAFETY: as the caller says
    let total = unsafe { total_sequence_length(given) }?;
    let shapes = shapes(given, total)?;
    let bound = |cache| op.problem_from_shapes(&shapes, cache);
    // Mostly past and present are one memory. Outputs, whose shapes are the same either way, show
    // it.
    let problem = bound(CacheBinding::Shared).or_else(|_| bound(CacheBinding::Separate))?;
    let room = |id| room(context, given, id, &problem);
    let made = Made {
        output: room(TensorId::Output)?,
        present_key: room(PresentKey)?,
        present_value: room(PresentValue)?,
        output_qk: room(OutputQk)?,
    };
    check_apart(given, &made)?;
    let cache = match shares_cache(given, &made)? {
        true => CacheBinding::Shared,
        false => CacheBinding::Separate,
    };
    let problem = if problem.cache == cache { problem } else { bound(cache)? };
    Ok((problem, made))
}

/// The number.
///
/// # Safety
///
/// Nobody else may write it meanwhile.
unsafe fn total_sequence_length(given: &Given) -> Result<usize, Error> {
    const NAME: &str = "total_sequence_length";
    // SAFETY: as the caller says; ONNX Runtime has it in the host's memory
    match unsafe { given.required(NAME)?.numbers(NAME) }? {
        &[total] => usize::try_from(total).map_err(|_| Error::invalid(NAME, total, "0 or more")),
        more => Err(Error::invalid(NAME, format!("{} elements", more.len()), "one element")),
    }
}

fn shapes(given: &Given, total: usize) -> Result<Shapes<'_>, Error> {
    let (query, seqlens_k) = (given.required_desc("query")?, given.required_desc("seqlens_k")?);
    Ok(Shapes::new(query, seqlens_k, total).with(|name| given.desc(name)))
}

/// Whether past and present are one memory: rows are then appended in place.
fn shares_cache(given: &Given, made: &Made) -> Result<bool, Error> {
    let is_one = |past: &str, present: Option<&Value>| match (given.get(past), present) {
        (Some(past), Some(present)) => !past.is_empty() && past.is(present),
        _ => false,
    };
    let keys = is_one("past_key", made.present_key.as_ref());
    let values = is_one("past_value", made.present_value.as_ref());
    if keys != values {
        let one = if keys { "past_key" } else { "past_value" };
        let allowed = "both in the memory of their present output, or none";
        return Err(Error::invalid("past_key, past_value", format!("{one} only"), allowed));
    }
    Ok(keys)
}
