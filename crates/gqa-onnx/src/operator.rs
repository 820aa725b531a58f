//! The operators a node can name.

mod attention;
mod gqa;
mod paged;
mod rotary;

use gqa_host::backend::Backend;
use gqa_host::op::{Attention, GroupQueryAttention, PagedAttention, RotaryEmbedding};
use gqa_host::{Problem, Tensor};

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
        /// Operator set, 23 to 25.
        opset: i64,
    },
    /// com.microsoft.PagedAttention
    PagedAttention(PagedAttention),
    /// ai.onnx.RotaryEmbedding
    RotaryEmbedding(RotaryEmbedding),
}

/// What [`Operator::from_node`] knows, as messages list it.
const SUPPORTED: &str = "com.microsoft.GroupQueryAttention, com.microsoft.PagedAttention, ai.onnx.Attention, ai.onnx.RotaryEmbedding";

impl Operator {
    /// The node's operator. `version` gives the imported version of a domain.
    pub(crate) fn from_node(
        node: &NodeProto,
        version: impl Fn(&str) -> Option<i64>,
    ) -> Result<Self> {
        let domain = if node.domain.is_empty() { "ai.onnx" } else { &node.domain };
        match (domain, node.op_type.as_str()) {
            ("com.microsoft", "GroupQueryAttention") => {
                expect_version("com.microsoft", version("com.microsoft"), 1)?;
                gqa::from_node(node).map(Self::GroupQueryAttention)
            }
            ("com.microsoft", "PagedAttention") => {
                expect_version("com.microsoft", version("com.microsoft"), 1)?;
                paged::from_node(node).map(Self::PagedAttention)
            }
            ("ai.onnx", "Attention") => {
                let opset = onnx_version(version, 23..=25)?;
                attention::from_node(node, opset).map(|op| Self::Attention { op, opset })
            }
            ("ai.onnx", "RotaryEmbedding") => {
                onnx_version(version, 23..=25)?;
                rotary::from_node(node).map(Self::RotaryEmbedding)
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
        }
    }

    /// Names of the outputs, in ONNX's order.
    pub fn output_names(&self) -> &'static [&'static str] {
        match self {
            Self::GroupQueryAttention(_) => &gqa::OUTPUTS,
            Self::Attention { .. } => &attention::OUTPUTS,
            Self::PagedAttention(_) => &paged::OUTPUTS,
            Self::RotaryEmbedding(_) => &rotary::OUTPUTS,
        }
    }
}

/// Operator sets are numbered; ours come with exactly one number each.
fn expect_version(domain: &str, got: Option<i64>, allowed: i64) -> Result<()> {
    match got {
        Some(version) if version == allowed => Ok(()),
        Some(version) => {
            Err(Error::invalid(format_args!("opset_import of {domain}"), version, allowed))
        }
        None => Err(Error::invalid(format_args!("opset_import of {domain}"), "none", allowed)),
    }
}

/// The imported operator set of ai.onnx, which is also written as "".
fn onnx_version(
    version: impl Fn(&str) -> Option<i64>,
    allowed: std::ops::RangeInclusive<i64>,
) -> Result<i64> {
    let (first, last) = (*allowed.start(), *allowed.end());
    match version("").or_else(|| version("ai.onnx")) {
        Some(version) if allowed.contains(&version) => Ok(version),
        got => {
            let got = got.map_or_else(|| "none".to_owned(), |version| version.to_string());
            Err(Error::invalid("opset_import of ai.onnx", got, format_args!("{first} to {last}")))
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
    pub fn problem(&self) -> Result<Problem> {
        match &self.operator {
            Operator::GroupQueryAttention(op) => gqa::problem(op, &self.arguments),
            Operator::Attention { op, opset } => attention::problem(op, *opset, &self.arguments),
            Operator::PagedAttention(op) => paged::problem(op, &self.arguments),
            Operator::RotaryEmbedding(op) => rotary::problem(op, &self.arguments),
        }
    }

    /// Computes the outputs, in ONNX's order, of which the first `count` are wanted; `None` for those that the call does not have.
    pub fn run(&self, backend: &dyn Backend, count: usize) -> Result<Vec<Option<Tensor>>> {
        match &self.operator {
            Operator::GroupQueryAttention(op) => gqa::run(op, &self.arguments, backend, count),
            Operator::Attention { op, opset } => {
                attention::run(op, *opset, &self.arguments, backend)
            }
            Operator::PagedAttention(op) => paged::run(op, &self.arguments, backend),
            Operator::RotaryEmbedding(op) => rotary::run(op, &self.arguments, backend),
        }
    }
}
