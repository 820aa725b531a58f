//! ai.onnx.TensorScatter, as operator set 24 defines it.

use gqa_host::backend::Backend;
use gqa_host::op::{ScatterInputs, TensorScatter};
use gqa_host::{Problem, Tensor, WriteMode};

use super::{Arguments, check_lists};
use crate::attributes::{Attribute, Attributes, int, text};
use crate::error::{Error, Result};
use crate::proto::NodeProto;

/// Operator sets that define it.
pub(super) const DEFINITIONS: [i64; 1] = [24];

/// Inputs in ONNX's order.
pub(super) const INPUTS: [&str; 3] = ["past_cache", "update", "write_indices"];

/// Outputs in ONNX's order.
pub(super) const OUTPUTS: [&str; 1] = ["present_cache"];

/// Attributes, their types and defaults.
pub(super) static ATTRIBUTES: [Attribute; 2] = [int("axis", -2), text("mode", "linear")];

/// Positions of the inputs that must be there.
pub(super) const REQUIRED: [usize; 2] = [0, 1];

/// The operator of a node.
pub(super) fn from_node(node: &NodeProto) -> Result<TensorScatter> {
    let attributes = Attributes::of(node, &ATTRIBUTES)?;
    check_lists(node, &INPUTS, &OUTPUTS, &REQUIRED)?;
    let mode = match attributes.text("mode").as_str() {
        "linear" => WriteMode::Linear,
        "circular" => WriteMode::Circular,
        other => {
            return Err(Error::invalid("mode", format!("{other:?}"), "linear or circular"));
        }
    };
    Ok(TensorScatter::new().axis(attributes.required_int("axis")?).mode(mode))
}

/// The validated call.
pub(super) fn problem(op: &TensorScatter, arguments: &Arguments) -> Result<Problem> {
    Ok(op.problem(&inputs(arguments)?)?)
}

/// Computes the output.
pub(super) fn run(
    op: &TensorScatter,
    arguments: &Arguments,
    backend: &dyn Backend,
) -> Result<Vec<Option<Tensor>>> {
    Ok(vec![Some(op.run(&inputs(arguments)?, backend)?)])
}

fn inputs(arguments: &Arguments) -> Result<ScatterInputs<'_>> {
    let required = |i: usize| arguments.required(i, INPUTS[i]);
    Ok(ScatterInputs {
        past_cache: required(0)?,
        update: required(1)?,
        write_indices: arguments.get(2),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::AttributeProto;

    fn refusal(attribute: AttributeProto) -> String {
        let node = NodeProto {
            input: vec!["cache".into(), "update".into()],
            output: vec!["present".into()],
            attribute: vec![attribute],
            ..NodeProto::default()
        };
        from_node(&node).map_or_else(|e| e.to_string(), |_| "accepted".to_owned())
    }

    #[test]
    fn attributes_are_checked() {
        let mode = |word: &str| AttributeProto {
            name: "mode".into(),
            s: word.into(),
            r#type: 3,
            ..AttributeProto::default()
        };
        for word in ["linear", "circular"] {
            assert_eq!(refusal(mode(word)), "accepted");
        }
        let want = "mode: got \"Circular\"; allowed: linear or circular";
        assert_eq!(refusal(mode("Circular")), want);
        let axis = AttributeProto { name: "axis".into(), i: 1, ..AttributeProto::default() };
        assert_eq!(refusal(axis.clone()), "axis: got type undefined; allowed: type int");
        assert_eq!(refusal(AttributeProto { r#type: 2, ..axis }), "accepted");
    }
}
