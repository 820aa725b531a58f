//! The operators a node can name.

mod attention;
mod gqa;
mod paged;
mod rotary;
mod scatter;

use gqa_host::backend::Backend;
use gqa_host::op::{
    Attention, GroupQueryAttention, PagedAttention, RotaryEmbedding, TensorScatter,
};
use gqa_host::{Problem, Tensor};

use crate::opset::{Imports, MICROSOFT, ONNX, domain_name};
use crate::proto::NodeProto;
use crate::{Error, Result};

/// An operator with its attributes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Operator {
    /// com.microsoft.GroupQueryAttention
    GroupQueryAttention(GroupQueryAttention),
    /// ai.onnx.Attention
    Attention {
        /// The operator.
        op: Attention,
        /// The operator set that defines it: 23, 24 or 25.
        opset: i64,
    },
    /// com.microsoft.PagedAttention
    PagedAttention(PagedAttention),
    /// ai.onnx.RotaryEmbedding
    RotaryEmbedding(RotaryEmbedding),
    /// ai.onnx.TensorScatter
    TensorScatter(TensorScatter),
}

/// What [`Operator::from_node`] knows, as messages list it.
const SUPPORTED: &str = "com.microsoft.GroupQueryAttention, com.microsoft.PagedAttention, ai.onnx.Attention, ai.onnx.RotaryEmbedding, ai.onnx.TensorScatter";

impl Operator {
    /// The node's operator, as the operator sets that the model imports define it.
    pub(crate) fn from_node(node: &NodeProto, imports: &Imports<'_>) -> Result<Self> {
        match (domain_name(&node.domain), node.op_type.as_str()) {
            (MICROSOFT, "GroupQueryAttention") => {
                imports.check_microsoft()?;
                gqa::from_node(node).map(Self::GroupQueryAttention)
            }
            (MICROSOFT, "PagedAttention") => {
                imports.check_microsoft()?;
                paged::from_node(node).map(Self::PagedAttention)
            }
            (ONNX, "Attention") => {
                let opset = imports.definition(&attention::DEFINITIONS)?;
                attention::from_node(node, opset).map(|op| Self::Attention { op, opset })
            }
            (ONNX, "RotaryEmbedding") => {
                imports.definition(&rotary::DEFINITIONS)?;
                rotary::from_node(node).map(Self::RotaryEmbedding)
            }
            (ONNX, "TensorScatter") => {
                imports.definition(&scatter::DEFINITIONS)?;
                scatter::from_node(node).map(Self::TensorScatter)
            }
            (domain, op) => {
                let got = format!("{:?}", format!("{domain}.{op}"));
                Err(Error::invalid("operator", got, SUPPORTED))
            }
        }
    }

    /// Names of the inputs, in ONNX's order.
    pub fn input_names(&self) -> &'static [&'static str] {
        match self {
            Self::GroupQueryAttention(_) => &gqa::INPUTS,
            Self::Attention { .. } => &attention::INPUTS,
            Self::PagedAttention(_) => &paged::INPUTS,
            Self::RotaryEmbedding(_) => &rotary::INPUTS,
            Self::TensorScatter(_) => &scatter::INPUTS,
        }
    }

    /// Names of the outputs, in ONNX's order.
    pub fn output_names(&self) -> &'static [&'static str] {
        match self {
            Self::GroupQueryAttention(_) => &gqa::OUTPUTS,
            Self::Attention { .. } => &attention::OUTPUTS,
            Self::PagedAttention(_) => &paged::OUTPUTS,
            Self::RotaryEmbedding(_) => &rotary::OUTPUTS,
            Self::TensorScatter(_) => &scatter::OUTPUTS,
        }
    }
}

/// Errs where a node has more inputs or outputs than its operator, or lacks a required one.
fn check_lists(
    node: &NodeProto,
    inputs: &[&'static str],
    outputs: &[&str],
    required: &[usize],
) -> Result<()> {
    for (list, most, what) in
        [(&node.input, inputs.len(), "inputs"), (&node.output, outputs.len(), "outputs")]
    {
        if list.len() > most {
            return Err(Error::invalid(what, list.len(), format_args!("at most {most}")));
        }
    }
    match required.iter().find(|&&i| !is_named(&node.input, i)) {
        Some(&missing) => {
            Err(Error::invalid(inputs[missing], "no input", "a tensor; it is required"))
        }
        None => Ok(()),
    }
}

/// Whether the list has a name at a position: "" and a list that ends earlier both mean absent.
fn is_named(list: &[String], index: usize) -> bool {
    list.get(index).is_some_and(|name| !name.is_empty())
}

/// A node's inputs, in ONNX's order; trailing ones may be left out.
#[derive(Clone, Debug)]
struct Arguments(Vec<Option<Tensor>>);

impl Arguments {
    fn get(&self, index: usize) -> Option<&Tensor> {
        self.0.get(index)?.as_ref()
    }

    fn required(&self, index: usize, name: &str) -> Result<&Tensor> {
        let missing = || Error::invalid(name, "no input", "a tensor; it is required");
        self.get(index).ok_or_else(missing)
    }
}

/// An operator with its inputs.
#[derive(Clone, Debug)]
pub struct Call {
    operator: Operator,
    arguments: Arguments,
}

impl Call {
    /// `inputs` in ONNX's order; trailing ones may be left out.
    pub(crate) fn new(operator: Operator, inputs: Vec<Option<Tensor>>) -> Self {
        Self { operator, arguments: Arguments(inputs) }
    }

    /// The validated call, as planners take it.
    ///
    /// # Errors
    ///
    /// The operator names the input or attribute that is not allowed.
    pub fn problem(&self) -> Result<Problem> {
        match &self.operator {
            Operator::GroupQueryAttention(op) => gqa::problem(op, &self.arguments),
            Operator::Attention { op, opset } => attention::problem(op, *opset, &self.arguments),
            Operator::PagedAttention(op) => paged::problem(op, &self.arguments),
            Operator::RotaryEmbedding(op) => rotary::problem(op, &self.arguments),
            Operator::TensorScatter(op) => scatter::problem(op, &self.arguments),
        }
    }

    /// Computes the outputs, in ONNX's order, of which the first `count` are wanted; `None` for
    /// those that the call does not have.
    ///
    /// # Errors
    ///
    /// Those of [`problem`](Self::problem), and the back end's.
    pub fn run(&self, backend: &dyn Backend, count: usize) -> Result<Vec<Option<Tensor>>> {
        match &self.operator {
            Operator::GroupQueryAttention(op) => gqa::run(op, &self.arguments, backend, count),
            Operator::Attention { op, opset } => {
                attention::run(op, *opset, &self.arguments, backend)
            }
            Operator::PagedAttention(op) => paged::run(op, &self.arguments, backend),
            Operator::RotaryEmbedding(op) => rotary::run(op, &self.arguments, backend),
            Operator::TensorScatter(op) => scatter::run(op, &self.arguments, backend),
        }
    }
}
