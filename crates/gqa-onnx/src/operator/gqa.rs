//! com.microsoft.GroupQueryAttention.

use gqa_host::Tensor;
use gqa_host::backend::Backend;
use gqa_host::op::{GroupQueryAttention, Inputs, QuantType};
use gqa_host::{CacheBinding, Problem};

use super::{Arguments, check_lists, is_named};
use crate::attributes::{Attribute, Attributes, Kind, float, int, optional, required, text};
use crate::error::{Error, Result};
use crate::proto::NodeProto;

/// Inputs in ONNX's order.
pub(super) const INPUTS: [&str; Inputs::NAMES.len()] = Inputs::NAMES;

/// Outputs in ONNX's order.
pub(super) const OUTPUTS: [&str; 4] = ["output", "present_key", "present_value", "output_qk"];

/// Attributes, their types and defaults.
pub(super) static ATTRIBUTES: [Attribute; 17] = [
    required("num_heads"),
    required("kv_num_heads"),
    int("causal", 1),
    optional("scale", Kind::Float),
    optional("softcap", Kind::Float),
    int("local_window_size", -1),
    int("sliding_window_cache", 0),
    optional("do_rotary", Kind::Int),
    optional("rotary_interleaved", Kind::Int),
    int("smooth_softmax", -1),
    int("qk_output", 0),
    text("k_quant_type", "NONE"),
    text("v_quant_type", "NONE"),
    optional("kv_cache_bit_width", Kind::Int),
    float("qk_norm_epsilon", 1e-6),
    optional("q_norm_epsilon", Kind::Float),
    optional("k_norm_epsilon", Kind::Float),
];

/// Positions of the inputs that must be there.
pub(super) const REQUIRED: [usize; 3] = [0, 5, 6];
/// The index of the output that qk_output controls.
const OUTPUT_QK: usize = 3;

/// The operator of a GroupQueryAttention node.
pub(super) fn from_node(node: &NodeProto) -> Result<GroupQueryAttention> {
    let attributes = Attributes::of(node, &ATTRIBUTES)?;
    check_lists(node, &INPUTS, &OUTPUTS, &REQUIRED)?;
    let qk_output = attributes.required_int("qk_output")?;
    if qk_output != 0 && !is_named(&node.output, OUTPUT_QK) {
        let got = format!("{qk_output} without the output output_qk");
        return Err(Error::invalid("qk_output", got, "0, or a name for the node's 4th output"));
    }
    let (heads, kv_heads) =
        (attributes.required_int("num_heads")?, attributes.required_int("kv_num_heads")?);
    let mut op = GroupQueryAttention::new(heads, kv_heads)
        .scale(attributes.float("scale").unwrap_or(0.0))
        .softcap(attributes.float("softcap").unwrap_or(0.0))
        .local_window_size(attributes.required_int("local_window_size")?)
        .sliding_window_cache(sliding_window_cache(&attributes)?)
        .causal(attributes.required_int("causal")?)
        .do_rotary(attributes.on("do_rotary"))
        .rotary_interleaved(attributes.on("rotary_interleaved"))
        .smooth_softmax(attributes.on("smooth_softmax"))
        .qk_output(qk_output)
        .k_quant_type(quant_type(&attributes, "k_quant_type")?)
        .v_quant_type(quant_type(&attributes, "v_quant_type")?)
        .kv_cache_bit_width(attributes.int("kv_cache_bit_width").unwrap_or(0))
        .qk_norm_epsilon(attributes.required_float("qk_norm_epsilon")?);
    if let Some(epsilon) = attributes.float("q_norm_epsilon") {
        op = op.q_norm_epsilon(epsilon);
    }
    if let Some(epsilon) = attributes.float("k_norm_epsilon") {
        op = op.k_norm_epsilon(epsilon);
    }
    Ok(op)
}

/// k_quant_type or v_quant_type, case-insensitive.
pub(super) fn quant_type(attributes: &Attributes<'_>, name: &'static str) -> Result<QuantType> {
    let word = attributes.text(name);
    match word.to_ascii_uppercase().as_str() {
        "NONE" => Ok(QuantType::None),
        "PER_TENSOR" => Ok(QuantType::PerTensor),
        "PER_CHANNEL" => Ok(QuantType::PerChannel),
        _ => Err(Error::invalid(name, format!("{word:?}"), "NONE, PER_TENSOR, PER_CHANNEL")),
    }
}

fn sliding_window_cache(attributes: &Attributes<'_>) -> Result<bool> {
    match attributes.required_int("sliding_window_cache")? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid("sliding_window_cache", other, "0 or 1")),
    }
}

/// The validated call.
pub(super) fn problem(op: &GroupQueryAttention, arguments: &Arguments) -> Result<Problem> {
    Ok(op.problem(&inputs(arguments)?, CacheBinding::Separate)?)
}

/// Computes the outputs. output_qk is zero where the node has it and qk_output leaves it undefined.
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
    let named = |name: &str| arguments.get(INPUTS.iter().position(|input| *input == name)?);
    let required =
        Inputs::new(required(query)?, required(seqlens_k)?, required(total_sequence_length)?);
    Ok(required.with(named))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::AttributeProto;

    /// A node with such epsilons.
    fn node(epsilons: &[(&str, f32)]) -> NodeProto {
        let attribute = |name: &str, kind: Kind, i, f| AttributeProto {
            name: name.to_owned(),
            r#type: kind as i32,
            i,
            f,
            ..AttributeProto::default()
        };
        let heads = ["num_heads", "kv_num_heads"].map(|name| attribute(name, Kind::Int, 2, 0.0));
        let epsilons = epsilons.iter().map(|(name, f)| attribute(name, Kind::Float, 0, *f));
        NodeProto {
            input: INPUTS.map(str::to_owned).to_vec(),
            output: vec!["output".to_owned()],
            attribute: heads.into_iter().chain(epsilons).collect(),
            ..NodeProto::default()
        }
    }

    #[test]
    fn epsilons_of_query_and_key_override_that_of_both() {
        let op = GroupQueryAttention::new(2, 2);
        for (epsilons, want) in [
            (&[][..], op.clone()),
            (&[("qk_norm_epsilon", 0.5)], op.clone().qk_norm_epsilon(0.5)),
            (&[("q_norm_epsilon", 0.5)], op.clone().q_norm_epsilon(0.5)),
            (
                &[("k_norm_epsilon", 0.5), ("qk_norm_epsilon", 0.25)],
                op.qk_norm_epsilon(0.25).k_norm_epsilon(0.5),
            ),
        ] {
            assert_eq!(from_node(&node(epsilons)).unwrap(), want);
        }
    }
}
