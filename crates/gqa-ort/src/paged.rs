//! com.microsoft.PagedAttention. ONNX Runtime itself has it for CUDA only.

use crate::api::Failure;
use crate::call::{Given, Made, check_apart, room};
use crate::schema::Kind::{Cache, Element};
use crate::schema::Literal::{Float, Int, Text};
use crate::schema::{Output, Schema, default, optional, required};
use crate::value::{Context, Value};
use gqa_host::op::{Bounds, PagedAttention, PagedInputs, PagedShapes};
use gqa_host::plan::TensorId::{self, *};
use gqa_host::{Error, Problem};

/// Its inputs and outputs.
pub static SCHEMA: Schema = Schema {
    name: c"PagedAttention",
    inputs: &PagedInputs::ONNX,
    outputs: &[
        Output { name: "output", kind: Element, role: TensorId::Output },
        Output { name: "key_cache_out", kind: Cache, role: PresentKey },
        Output { name: "value_cache_out", kind: Cache, role: PresentValue },
    ],
    attributes: &[
        required(c"num_heads"),
        required(c"kv_num_heads"),
        default(c"is_causal", Int(1)),
        optional(c"scale", Float(0.0)),
        optional(c"softcap", Float(0.0)),
        default(c"local_window_size", Int(-1)),
        optional(c"do_rotary", Int(0)),
        optional(c"rotary_interleaved", Int(0)),
        default(c"k_quant_type", Text("NONE")),
        default(c"v_quant_type", Text("NONE")),
        default(c"k_cache_dtype", Text("")),
        default(c"v_cache_dtype", Text("")),
        optional(c"qk_norm_epsilon", Float(1e-6)),
        default(c"kv_cache_layout", Text("SEPARATE")),
        optional(c"rotary_offset", Int(0)),
        optional(c"v_head_size", Int(0)),
    ],
    in_place: true,
};

/// A call's problem, and room for what it writes.
///
/// # Safety
///
/// Nobody else may write attention_metadata meanwhile.
pub unsafe fn call(
    op: &PagedAttention,
    context: Context,
    given: &Given,
) -> Result<(Problem, Made), Failure> {
    // SAFETY: as the caller says
    let bounds = unsafe { bounds(given) }?;
    let problem = op.problem_from_shapes(&shapes(given, bounds)?)?;
    let room = |id| room(context, given, id, &problem);
    let made = Made {
        output: room(TensorId::Output)?,
        present_key: Some(in_place(given, "key_cache", room(PresentKey)?)?),
        present_value: match PresentValue.spec(&problem) {
            Some(_) => Some(in_place(given, "value_cache", room(PresentValue)?)?),
            None => None,
        },
        output_qk: None,
    };
    check_apart(given, &made)?;
    Ok((problem, made))
}

/// The cache, which the node's output must be, if it has that.
fn in_place(given: &Given, name: &'static str, output: Option<Value>) -> Result<Value, Error> {
    let cache = given.required(name)?;
    match output {
        Some(output) if !cache.is_empty() && !cache.is(&output) => {
            let got = format!("memory at {:p}, and its output at {:p}", cache.data, output.data);
            Err(Error::invalid(name, got, "one memory for both, as the cache is updated in place"))
        }
        _ => Ok(cache.clone()),
    }
}

/// attention_metadata: the most new tokens of a sequence and the most in all, where it is given;
/// and the least that the longest sequence may have, which no kernel needs.
///
/// # Safety
///
/// Nobody else may write it meanwhile.
unsafe fn bounds(given: &Given) -> Result<Bounds, Error> {
    const NAME: &str = "attention_metadata";
    let Some(value) = given.get(NAME) else { return Ok(Bounds::default()) };
    // SAFETY: as the caller says; ONNX Runtime has it in the host's memory
    let numbers = unsafe { value.numbers(NAME) }?;
    let refused = |allowed| Error::invalid(NAME, format!("{numbers:?}"), allowed);
    let bound = |number: i32| usize::try_from(number);
    let bounds = match *numbers {
        [rows, keys] => [bound(rows), bound(keys), Ok(0)],
        [rows, keys, least] => [bound(rows), bound(keys), bound(least)],
        _ => return Err(refused("2 or 3 numbers")),
    };
    let [Ok(query_rows), Ok(keys), Ok(least)] = bounds else {
        return Err(refused("numbers of 0 or more"));
    };
    if keys > 0 && least > keys {
        return Err(refused("a third number that is not above the second"));
    }
    Ok(Bounds { query_rows, keys })
}

fn shapes(given: &Given, bounds: Bounds) -> Result<PagedShapes<'_>, Error> {
    Ok(PagedShapes {
        query: given.required_desc("query")?,
        key: given.desc("key"),
        value: given.desc("value"),
        key_cache: given.required_desc("key_cache")?,
        value_cache: given.desc("value_cache"),
        cumulative_sequence_length: given.required_desc("cumulative_sequence_length")?,
        past_seqlens: given.required_desc("past_seqlens")?,
        block_table: given.required_desc("block_table")?,
        cos_cache: given.desc("cos_cache"),
        sin_cache: given.desc("sin_cache"),
        slot_mapping: given.desc("slot_mapping"),
        head_sink: given.desc("head_sink"),
        q_norm_weight: given.desc("q_norm_weight"),
        k_norm_weight: given.desc("k_norm_weight"),
        k_scale: given.desc("k_scale"),
        v_scale: given.desc("v_scale"),
        bounds,
    })
}
