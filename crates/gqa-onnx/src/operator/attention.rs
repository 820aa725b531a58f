//! ai.onnx.Attention, as operator sets 23, 24 and 25 define it.

use gqa_host::backend::Backend;
use gqa_host::op::{Attention, AttentionInputs};
use gqa_host::{Problem, Tensor};

use super::{Arguments, check_lists, is_named};
use crate::attributes::{Attribute, Attributes, Kind, float, int, optional};
use crate::error::{Error, Result};
use crate::proto::NodeProto;

/// Operator sets that define it.
pub(super) const DEFINITIONS: [i64; 3] = [23, 24, 25];

/// Inputs in ONNX's order.
pub(super) const INPUTS: [&str; 7] =
    ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"];

/// Outputs in ONNX's order.
pub(super) const OUTPUTS: [&str; 4] = ["Y", "present_key", "present_value", "qk_matmul_output"];

/// Attributes, their types and defaults; the last [`WINDOWS`] came with operator set 25.
static ATTRIBUTES: [Attribute; 9] = [
    int("is_causal", 0),
    optional("kv_num_heads", Kind::Int),
    optional("q_num_heads", Kind::Int),
    int("qk_matmul_output_mode", 0),
    optional("scale", Kind::Float),
    float("softcap", 0.0),
    optional("softmax_precision", Kind::Int),
    int("left_window_size", -1),
    int("right_window_size", -1),
];
const WINDOWS: usize = 2;

const ATTN_MASK: usize = 3;
const PAST_KEY: usize = 4;
const NONPAD_KV_SEQLEN: usize = 6;
const PRESENT_KEY: usize = 1;
const PRESENT_VALUE: usize = 2;
const QK_MATMUL_OUTPUT: usize = 3;

/// Positions of the inputs that must be there.
pub(super) const REQUIRED: [usize; 3] = [0, 1, 2];

/// The inputs of an operator set.
pub(super) fn inputs_of(opset: i64) -> &'static [&'static str] {
    if opset < 24 { &INPUTS[..NONPAD_KV_SEQLEN] } else { &INPUTS }
}

/// The attributes of an operator set.
pub(super) fn attributes_of(opset: i64) -> &'static [Attribute] {
    if opset < 25 { &ATTRIBUTES[..ATTRIBUTES.len() - WINDOWS] } else { &ATTRIBUTES }
}

/// The operator of a node, and its operator set.
pub(super) fn from_node(node: &NodeProto, opset: i64) -> Result<Attention> {
    let attributes = Attributes::of(node, attributes_of(opset))?;
    check_lists(node, inputs_of(opset), &OUTPUTS, &REQUIRED)?;
    check_cache(node)?;
    let mut op = Attention::new()
        .is_causal(attributes.required_int("is_causal")?)
        .softcap(attributes.float("softcap").unwrap_or(0.0))
        .qk_matmul_output_mode(attributes.required_int("qk_matmul_output_mode")?)
        .qk_matmul_output(is_named(&node.output, QK_MATMUL_OUTPUT))
        .present(is_named(&node.output, PRESENT_KEY) || is_named(&node.output, PRESENT_VALUE))
        .left_window_size(attributes.int("left_window_size").unwrap_or(-1))
        .right_window_size(attributes.int("right_window_size").unwrap_or(-1))
        .broadcast_columns(opset < 24);
    if let Some(scale) = attributes.float("scale") {
        op = op.scale(scale);
    }
    if let Some(precision) = attributes.int("softmax_precision") {
        op = op.softmax_precision(precision);
    }
    if let Some(heads) = attributes.int("q_num_heads") {
        op = op.q_num_heads(heads);
    }
    if let Some(heads) = attributes.int("kv_num_heads") {
        op = op.kv_num_heads(heads);
    }
    Ok(op)
}

/// A past requires the output present, which contains it. Without a past, present is K and V.
fn check_cache(node: &NodeProto) -> Result<()> {
    let past = is_named(&node.input, PAST_KEY);
    match [PRESENT_KEY, PRESENT_VALUE].iter().find(|&&i| !is_named(&node.output, i)) {
        Some(&missing) if past => {
            Err(Error::invalid(OUTPUTS[missing], "no output", "one, as past_key is given"))
        }
        _ => Ok(()),
    }
}

/// The validated call.
pub(super) fn problem(op: &Attention, opset: i64, arguments: &Arguments) -> Result<Problem> {
    let inputs = inputs(arguments)?;
    let problem = op.problem(&inputs)?;
    if opset >= 25 && inputs.q.shape().len() == 4 && op.has_head_counts() {
        let allowed = "no attribute where Q has four dimensions, from operator set 25 on";
        return Err(Error::invalid("q_num_heads, kv_num_heads", "an attribute", allowed));
    }
    Ok(problem)
}

/// Computes the outputs.
pub(super) fn run(
    op: &Attention,
    opset: i64,
    arguments: &Arguments,
    backend: &dyn Backend,
) -> Result<Vec<Option<Tensor>>> {
    problem(op, opset, arguments)?;
    let outputs = op.run(&inputs(arguments)?, backend)?;
    Ok(vec![Some(outputs.y), outputs.present_key, outputs.present_value, outputs.qk_matmul_output])
}

fn inputs(arguments: &Arguments) -> Result<AttentionInputs<'_>> {
    let required = |i: usize| arguments.required(i, INPUTS[i]);
    Ok(AttentionInputs {
        attn_mask: arguments.get(ATTN_MASK),
        past_key: arguments.get(PAST_KEY),
        past_value: arguments.get(PAST_KEY + 1),
        nonpad_kv_seqlen: arguments.get(NONPAD_KV_SEQLEN),
        ..AttentionInputs::new(required(0)?, required(1)?, required(2)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        NodeProto { input: names(inputs), output: names(outputs), ..NodeProto::default() }
    }

    fn refusal(inputs: &[&str], outputs: &[&str], opset: i64) -> String {
        let read = from_node(&node(inputs, outputs), opset);
        read.map_or_else(|e| e.to_string(), |_| "accepted".to_owned())
    }

    #[test]
    fn present_needs_no_past_and_a_past_needs_present() {
        let past = ["q", "k", "v", "", "pk", "pv"];
        for outputs in [&["y"][..], &["y", "k2"], &["y", "", "v2"], &["y", "k2", "v2", "qk"]] {
            assert_eq!(refusal(&past[..3], outputs, 23), "accepted");
        }
        assert_eq!(refusal(&past, &["y", "k2", "v2"], 23), "accepted");
        let missing = |name| format!("{name}: got no output; allowed: one, as past_key is given");
        assert_eq!(refusal(&past, &["y"], 23), missing("present_key"));
        assert_eq!(refusal(&past, &["y", "k2"], 23), missing("present_value"));
    }

    #[test]
    fn operator_set_24_brought_an_input() {
        let nonpad = ["q", "k", "v", "", "", "", "n"];
        assert_eq!(refusal(&nonpad, &["y"], 23), "inputs: got 7; allowed: at most 6");
        assert_eq!(refusal(&nonpad, &["y"], 24), "accepted");
    }
}
