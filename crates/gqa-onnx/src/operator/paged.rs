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
pub(super) const INPUTS: [&str; 17] = [
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",
];

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
/// The index of an input that only the latent layout lacks.
const VALUE_CACHE: usize = 4;

/// The operator of a node.
pub(super) fn from_node(node: &NodeProto) -> Result<PagedAttention> {
    let attributes = Attributes::of(node, &ATTRIBUTES)?;
    let layout = attributes.text("kv_cache_layout");
    if layout != "SEPARATE" {
        return Err(Error::invalid("kv_cache_layout", format!("{layout:?}"), "\"SEPARATE\""));
    }
    for name in ["rotary_offset", "v_head_size"] {
        match attributes.int(name).unwrap_or(0) {
            0 => {}
            other => return Err(Error::invalid(name, other, "0, as kv_cache_layout is SEPARATE")),
        }
    }
    check_lists(node, &INPUTS, &OUTPUTS, &REQUIRED)?;
    if !is_named(&node.input, VALUE_CACHE) {
        let allowed = "a tensor, as kv_cache_layout is SEPARATE";
        return Err(Error::invalid(INPUTS[VALUE_CACHE], "no input", allowed));
    }
    let (heads, kv_heads) =
        (attributes.required_int("num_heads")?, attributes.required_int("kv_num_heads")?);
    Ok(PagedAttention::new(heads, kv_heads)
        .k_quant_type(quant_type(&attributes, "k_quant_type")?)
        .v_quant_type(quant_type(&attributes, "v_quant_type")?)
        .k_cache_dtype(&attributes.text("k_cache_dtype"))
        .v_cache_dtype(&attributes.text("v_cache_dtype"))
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

/// Computes the output and both caches. The given caches are not changed.
pub(super) fn run(
    op: &PagedAttention,
    arguments: &Arguments,
    backend: &dyn Backend,
) -> Result<Vec<Option<Tensor>>> {
    let mut cache = cache(arguments)?;
    let outputs = op.run(&inputs(arguments)?, &mut cache, backend)?;
    Ok(vec![Some(outputs.output), Some(cache.key), Some(cache.value)])
}

fn cache(arguments: &Arguments) -> Result<PagedCache> {
    let required = |i: usize| arguments.required(i, INPUTS[i]).cloned();
    Ok(PagedCache { key: required(3)?, value: required(VALUE_CACHE)?, scales: None })
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

    fn refusal(names: &[&str], layout: &str, numbers: &[(&str, i64)]) -> String {
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
            input: names.iter().map(|&name| name.to_owned()).collect(),
            output: vec!["output".to_owned()],
            attribute: numbers.chain([layout]).collect(),
            ..NodeProto::default()
        };
        from_node(&node).map_or_else(|e| e.to_string(), |_| "accepted".to_owned())
    }

    #[test]
    fn the_latent_layout_is_refused_by_name() {
        let all = &INPUTS[..8];
        assert_eq!(refusal(all, "SEPARATE", &[]), "accepted");
        let latent = ["query", "", "", "key_cache", "", "starts", "past", "table"];
        let got = "kv_cache_layout: got \"LATENT\"; allowed: \"SEPARATE\"";
        assert_eq!(refusal(&latent, "LATENT", &[("v_head_size", 512)]), got);
        for name in ["v_head_size", "rotary_offset"] {
            let got = format!("{name}: got 8; allowed: 0, as kv_cache_layout is SEPARATE");
            assert_eq!(refusal(all, "SEPARATE", &[(name, 8)]), got);
        }
        let got = "value_cache: got no input; allowed: a tensor, as kv_cache_layout is SEPARATE";
        assert_eq!(refusal(&latent, "SEPARATE", &[]), got);
    }
}
