//! com.microsoft.GroupQueryAttention.

use gqa_host::Tensor;
use gqa_host::backend::Backend;
use gqa_host::op::{GroupQueryAttention, Inputs};
use gqa_host::{CacheBinding, Problem};

use super::{Arguments, check_lists, is_named};
use crate::attributes::{Attributes, Kind};
use crate::proto::NodeProto;
use crate::{Error, Result};

/// Inputs in ONNX's order.
pub(super) const INPUTS: [&str; 16] = [
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
];

/// Outputs in ONNX's order.
pub(super) const OUTPUTS: [&str; 4] = ["output", "present_key", "present_value", "output_qk"];

/// Attributes and their types.
const ATTRIBUTES: [(&str, Kind); 15] = [
    ("num_heads", Kind::Int),
    ("kv_num_heads", Kind::Int),
    ("causal", Kind::Int),
    ("scale", Kind::Float),
    ("softcap", Kind::Float),
    ("local_window_size", Kind::Int),
    ("sliding_window_cache", Kind::Int),
    ("do_rotary", Kind::Int),
    ("rotary_interleaved", Kind::Int),
    ("smooth_softmax", Kind::Int),
    ("qk_output", Kind::Int),
    ("k_quant_type", Kind::Text),
    ("v_quant_type", Kind::Text),
    ("kv_cache_bit_width", Kind::Int),
    ("qk_norm_epsilon", Kind::Float),
];

/// Positions of the inputs that must be there.
const REQUIRED: [usize; 3] = [0, 5, 6];
/// Positions of k_scale and v_scale.
const SCALES: [usize; 2] = [12, 13];
/// Position of the output that qk_output asks for.
const OUTPUT_QK: usize = 3;

/// The operator of a GroupQueryAttention node.
pub(super) fn from_node(node: &NodeProto) -> Result<GroupQueryAttention> {
    let attributes = Attributes::of(node, &ATTRIBUTES)?;
    refuse_what_is_not_there_yet(node, &attributes)?;
    check_lists(node, &INPUTS, &OUTPUTS, &REQUIRED)?;
    let qk_output = attributes.int("qk_output").unwrap_or(0);
    if qk_output != 0 && !is_named(&node.output, OUTPUT_QK) {
        let got = format!("{qk_output} without the output output_qk");
        return Err(Error::invalid("qk_output", got, "0, or a name for the node's 4th output"));
    }
    let (heads, kv_heads) =
        (attributes.required_int("num_heads")?, attributes.required_int("kv_num_heads")?);
    Ok(GroupQueryAttention::new(heads, kv_heads)
        .scale(attributes.float("scale").unwrap_or(0.0))
        .softcap(attributes.float("softcap").unwrap_or(0.0))
        .local_window_size(attributes.int("local_window_size").unwrap_or(-1))
        .causal(attributes.int("causal").unwrap_or(1))
        .do_rotary(attributes.on("do_rotary"))
        .rotary_interleaved(attributes.on("rotary_interleaved"))
        .smooth_softmax(attributes.on("smooth_softmax"))
        .qk_output(qk_output)
        .qk_norm_epsilon(attributes.float("qk_norm_epsilon").unwrap_or(1e-6)))
}

/// Quantised and windowed caches.
fn refuse_what_is_not_there_yet(node: &NodeProto, attributes: &Attributes<'_>) -> Result<()> {
    for name in ["k_quant_type", "v_quant_type"] {
        let word = attributes.text(name).unwrap_or_else(|| "NONE".to_owned());
        match word.to_ascii_uppercase().as_str() {
            "NONE" => {}
            "PER_TENSOR" | "PER_CHANNEL" => return Err(not_yet(name, &word, "NONE")),
            _ => {
                let got = format!("{word:?}");
                return Err(Error::invalid(name, got, "NONE, PER_TENSOR, PER_CHANNEL"));
            }
        }
    }
    match attributes.int("kv_cache_bit_width").unwrap_or(0) {
        0 => {}
        width @ (4 | 8) => return Err(not_yet("kv_cache_bit_width", width, "0")),
        width => return Err(Error::invalid("kv_cache_bit_width", width, "0, 4, 8")),
    }
    match attributes.int("sliding_window_cache").unwrap_or(0) {
        0 => {}
        1 => return Err(not_yet("sliding_window_cache", 1, "0, with local_window_size")),
        other => return Err(Error::invalid("sliding_window_cache", other, "0, 1")),
    }
    match SCALES.into_iter().find(|&i| is_named(&node.input, i)) {
        Some(given) => Err(not_yet(INPUTS[given], "a tensor", "leave the input out")),
        None => Ok(()),
    }
}

fn not_yet(argument: &'static str, got: impl ToString, instead: &'static str) -> Error {
    gqa_host::Error::NotSupportedYet { argument, got: got.to_string(), instead }.into()
}

/// The validated call.
pub(super) fn problem(op: &GroupQueryAttention, arguments: &Arguments) -> Result<Problem> {
    Ok(op.problem(&inputs(arguments)?, CacheBinding::Separate)?)
}

/// Computes the outputs. output_qk is zero where it is asked for and qk_output leaves it undefined.
pub(super) fn run(
    op: &GroupQueryAttention,
    arguments: &Arguments,
    backend: &dyn Backend,
    count: usize,
) -> Result<Vec<Option<Tensor>>> {
    let outputs = op.run(&inputs(arguments)?, backend)?;
    let output_qk = match outputs.output_qk {
        None if count > OUTPUT_QK => {
            let problem = problem(op, arguments)?;
            Some(Tensor::try_zeros("output_qk", problem.dtype, &problem.scores_shape())?)
        }
        output_qk => output_qk,
    };
    Ok(vec![
        Some(outputs.output),
        Some(outputs.present_key),
        Some(outputs.present_value),
        output_qk,
    ])
}

fn inputs(arguments: &Arguments) -> Result<Inputs<'_>> {
    let required = |i: usize| arguments.required(i, INPUTS[i]);
    let [query, seqlens_k, total_sequence_length] = REQUIRED;
    Ok(Inputs {
        key: arguments.get(1),
        value: arguments.get(2),
        past_key: arguments.get(3),
        past_value: arguments.get(4),
        cos_cache: arguments.get(7),
        sin_cache: arguments.get(8),
        position_ids: arguments.get(9),
        attention_bias: arguments.get(10),
        head_sink: arguments.get(11),
        q_norm_weight: arguments.get(14),
        k_norm_weight: arguments.get(15),
        ..Inputs::new(required(query)?, required(seqlens_k)?, required(total_sequence_length)?)
    })
}
