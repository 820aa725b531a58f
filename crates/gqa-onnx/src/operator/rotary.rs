//! ai.onnx.RotaryEmbedding, as operator set 23 defines it.

use gqa_host::backend::Backend;
use gqa_host::op::{RotaryEmbedding, RotaryInputs};
use gqa_host::{Problem, Tensor};

use super::{Arguments, check_lists};
use crate::attributes::{Attribute, Attributes, Kind, int, optional};
use crate::error::Result;
use crate::proto::NodeProto;

/// Operator sets that define it.
pub(super) const DEFINITIONS: [i64; 1] = [23];

/// Inputs in ONNX's order.
pub(super) const INPUTS: [&str; 4] = ["X", "cos_cache", "sin_cache", "position_ids"];

/// Outputs in ONNX's order.
pub(super) const OUTPUTS: [&str; 1] = ["Y"];

/// Attributes, their types and defaults.
pub(super) static ATTRIBUTES: [Attribute; 3] =
    [int("interleaved", 0), optional("num_heads", Kind::Int), int("rotary_embedding_dim", 0)];

/// Positions of the inputs that must be there.
pub(super) const REQUIRED: [usize; 3] = [0, 1, 2];

/// The operator of a node.
pub(super) fn from_node(node: &NodeProto) -> Result<RotaryEmbedding> {
    let attributes = Attributes::of(node, &ATTRIBUTES)?;
    check_lists(node, &INPUTS, &OUTPUTS, &REQUIRED)?;
    let int = |name| attributes.int(name).unwrap_or(0);
    Ok(RotaryEmbedding::new()
        .interleaved(int("interleaved"))
        .num_heads(int("num_heads"))
        .rotary_embedding_dim(int("rotary_embedding_dim")))
}

/// The validated call.
pub(super) fn problem(op: &RotaryEmbedding, arguments: &Arguments) -> Result<Problem> {
    Ok(op.problem(&inputs(arguments)?)?)
}

/// Computes the output.
pub(super) fn run(
    op: &RotaryEmbedding,
    arguments: &Arguments,
    backend: &dyn Backend,
) -> Result<Vec<Option<Tensor>>> {
    Ok(vec![Some(op.run(&inputs(arguments)?, backend)?)])
}

fn inputs(arguments: &Arguments) -> Result<RotaryInputs<'_>> {
    let required = |i: usize| arguments.required(i, INPUTS[i]);
    Ok(RotaryInputs {
        x: required(0)?,
        cos_cache: required(1)?,
        sin_cache: required(2)?,
        position_ids: arguments.get(3),
    })
}
