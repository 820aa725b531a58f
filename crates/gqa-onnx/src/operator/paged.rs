//! com.microsoft.PagedAttention.

use gqa_host::backend::Backend;
use gqa_host::op::{PagedAttention, PagedCache, PagedInputs};
use gqa_host::{Problem, Tensor};

use super::gqa::quant_type;
use super::{Arguments, check_lists, is_named};
use crate::attributes::{Attribute, Attributes, Kind, int, optional, required, text};
use crate::error::{Error, Result};
use crate::proto::NodeProto;

/// Inputs in ONNX Runtime's order.
pub(super) const INPUTS: [&str; PagedInputs::NAMES.len()] = PagedInputs::NAMES;

/// Outputs in ONNX Runtime's order.
pub(super) const OUTPUTS: [&str; 3] = ["output", "key_cache_out", "value_cache_out"];

/// Attributes, their types and defaults.
pub(super) static ATTRIBUTES: [Attribute; 16] = [
    required("num_heads"),
    required("kv_num_heads"),
    optional("scale", Kind::Float),
    optional("softcap", Kind::Float),
    int("local_window_size", -1),
    int("is_causal", 1),
    optional("do_rotary", Kind::Int),
    optional("rotary_interleaved", Kind::Int),
    optional("rotary_offset", Kind::Int),
    optional("qk_norm_epsilon", Kind::Float),
    text("kv_cache_layout", "SEPARATE"),
    optional("v_head_size", Kind::Int),
    text("k_quant_type", "NONE"),
    text("v_quant_type", "NONE"),
    text("k_cache_dtype", ""),
    text("v_cache_dtype", ""),
];

/// Positions of the inputs that must be there.
pub(super) const REQUIRED: [usize; 5] = [0, 3, 5, 6, 7];
/// The index of an output that the latent layout lacks.
const VALUE_CACHE_OUT: usize = 2;

/// The operator of a node.
pub(super) fn from_node(node: &NodeProto) -> Result<PagedAttention> {
    let attributes = Attributes::of(node, &ATTRIBUTES)?;
    check_lists(node, &INPUTS, &OUTPUTS, &REQUIRED)?;
    let layout = attributes.text("kv_cache_layout");
    if layout == "LATENT" && is_named(&node.output, VALUE_CACHE_OUT) {
        let allowed = "none, as kv_cache_layout is LATENT";
        return Err(Error::invalid(OUTPUTS[VALUE_CACHE_OUT], "an output", allowed));
    }
    let (heads, kv_heads) =
        (attributes.required_int("num_heads")?, attributes.required_int("kv_num_heads")?);
    Ok(PagedAttention::new(heads, kv_heads)
        .k_quant_type(quant_type(&attributes, "k_quant_type")?)
        .v_quant_type(quant_type(&attributes, "v_quant_type")?)
        .k_cache_dtype(&attributes.text("k_cache_dtype"))
        .v_cache_dtype(&attributes.text("v_cache_dtype"))
        .kv_cache_layout(&layout)
        .v_head_size(attributes.int("v_head_size").unwrap_or(0))
        .rotary_offset(attributes.int("rotary_offset").unwrap_or(0))
        .scale(attributes.float("scale").unwrap_or(0.0))
        .softcap(attributes.float("softcap").unwrap_or(0.0))
        .local_window_size(attributes.required_int("local_window_size")?)
        .is_causal(attributes.required_int("is_causal")?)
        .do_rotary(attributes.on("do_rotary"))
        .rotary_interleaved(attributes.on("rotary_interleaved"))
        .qk_norm_epsilon(attributes.float("qk_norm_epsilon").unwrap_or(1e-6)))
}

/// The validated call.
pub(super) fn problem(op: &PagedAttention, arguments: &Arguments) -> Result<Problem> {
    Ok(op.problem(&inputs(arguments)?, &cache(arguments)?)?)
}

/// Computes the output and the caches. The given caches are not changed.
pub(super) fn run(
    op: &PagedAttention,
    arguments: &Arguments,
    backend: &dyn Backend,
) -> Result<Vec<Option<Tensor>>> {
    let mut cache = cache(arguments)?;
    let outputs = op.run(&inputs(arguments)?, &mut cache, backend)?;
    Ok(vec![Some(outputs.output), Some(cache.key), cache.value])
}

fn cache(arguments: &Arguments) -> Result<PagedCache> {
    let key = arguments.required(3, INPUTS[3])?.clone();
    Ok(PagedCache { key, value: arguments.get(4).cloned(), scales: None })
}

fn inputs(arguments: &Arguments) -> Result<PagedInputs<'_>> {
    let required = |i: usize| arguments.required(i, INPUTS[i]);
    Ok(PagedInputs {
        key: arguments.get(1),
        value: arguments.get(2),
        cos_cache: arguments.get(8),
        sin_cache: arguments.get(9),
        slot_mapping: arguments.get(10),
        head_sink: arguments.get(11),
        q_norm_weight: arguments.get(12),
        k_norm_weight: arguments.get(13),
        k_scale: arguments.get(14),
        v_scale: arguments.get(15),
        attention_metadata: arguments.get(16),
        ..PagedInputs::new(required(0)?, required(5)?, required(6)?, required(7)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::AttributeProto;

    fn refusal(outputs: &[&str], layout: &str, numbers: &[(&str, i64)]) -> String {
        let attribute = |name: &str, kind: Kind, i, s: &str| AttributeProto {
            name: name.to_owned(),
            r#type: kind as i32,
            i,
            s: s.into(),
            ..AttributeProto::default()
        };
        let heads = [("num_heads", 2), ("kv_num_heads", 1)];
        let numbers = heads.iter().chain(numbers);
        let numbers = numbers.map(|&(name, number)| attribute(name, Kind::Int, number, ""));
        let layout = attribute("kv_cache_layout", Kind::Text, 0, layout);
        let node = NodeProto {
            input: INPUTS[..8].iter().map(|&name| name.to_owned()).collect(),
            output: outputs.iter().map(|&name| name.to_owned()).collect(),
            attribute: numbers.chain([layout]).collect(),
            ..NodeProto::default()
        };
        from_node(&node).map_or_else(|e| e.to_string(), |_| "accepted".to_owned())
    }

    #[test]
    fn the_latent_layout_has_no_values() {
        let one = ["output", "key_cache_out"];
        assert_eq!(refusal(&OUTPUTS, "SEPARATE", &[]), "accepted");
        assert_eq!(refusal(&one, "LATENT", &[("v_head_size", 512)]), "accepted");
        let got = "value_cache_out: got an output; allowed: none, as kv_cache_layout is LATENT";
        assert_eq!(refusal(&OUTPUTS, "LATENT", &[("v_head_size", 512)]), got);
    }
}
