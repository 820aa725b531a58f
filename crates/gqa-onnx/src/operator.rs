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

use crate::error::{Error, Result};
use crate::opset::{Imports, MICROSOFT, ONNX, domain_name};
use crate::proto::NodeProto;

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

/// The operators that [`Operator::from_node`] supports, for messages.
const SUPPORTED: &str = "com.microsoft.GroupQueryAttention, com.microsoft.PagedAttention, ai.onnx.Attention, ai.onnx.RotaryEmbedding, ai.onnx.TensorScatter";

impl Operator {
    /// The node's operator, defined by the operator sets that the model imports.
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

/// Whether the list has a name at an index: "" and a list that ends earlier both mean absent.
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

    /// The validated call, for planners.
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

    /// Computes the first `count` outputs, in ONNX's order; `None` for outputs that the call does
    /// not have.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attributes::{Absent, Attribute, Kind};
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    /// The error for a node that violates its operator's schema: (operator, list, name).
    type Differences = BTreeSet<(String, &'static str, String)>;

    /// What an operator declares.
    struct Declared {
        inputs: &'static [&'static str],
        required: &'static [usize],
        outputs: &'static [&'static str],
        attributes: &'static [Attribute],
    }

    fn declared(operator: &str, since: i64) -> Option<Declared> {
        let of = |inputs, required, outputs, attributes| Declared {
            inputs,
            required,
            outputs,
            attributes,
        };
        Some(match operator {
            "Attention" if attention::DEFINITIONS.contains(&since) => of(
                attention::inputs_of(since),
                &attention::REQUIRED,
                &attention::OUTPUTS,
                attention::attributes_of(since),
            ),
            "RotaryEmbedding" if rotary::DEFINITIONS.contains(&since) => {
                of(&rotary::INPUTS, &rotary::REQUIRED, &rotary::OUTPUTS, &rotary::ATTRIBUTES)
            }
            "TensorScatter" if scatter::DEFINITIONS.contains(&since) => {
                of(&scatter::INPUTS, &scatter::REQUIRED, &scatter::OUTPUTS, &scatter::ATTRIBUTES)
            }
            "GroupQueryAttention" if since == 1 => {
                of(&gqa::INPUTS, &gqa::REQUIRED, &gqa::OUTPUTS, &gqa::ATTRIBUTES)
            }
            "PagedAttention" if since == 1 => {
                of(&paged::INPUTS, &paged::REQUIRED, &paged::OUTPUTS, &paged::ATTRIBUTES)
            }
            _ => return None,
        })
    }

    fn text(value: &Value) -> String {
        value.as_str().expect("a string").to_owned()
    }

    /// Names by index, and whether a node must have each: of outputs, the first.
    fn compare_lists(operator: &str, schema: &Value, ours: &Declared, found: &mut Differences) {
        let inputs = ours.inputs.iter().enumerate();
        let inputs = inputs.map(|(i, name)| (*name, ours.required.contains(&i))).collect();
        let outputs = ours.outputs.iter().enumerate();
        let outputs = outputs.map(|(i, name)| (*name, i == 0)).collect();
        for (kind, ours) in [("inputs", inputs), ("outputs", outputs)] {
            let ours: Vec<(&str, bool)> = ours;
            let theirs = schema[kind].as_array().expect("a list");
            for i in 0..ours.len().max(theirs.len()) {
                let their = theirs.get(i).map(|value| (text(&value[0]), value[1] == true));
                let our = ours.get(i).map(|&(name, required)| (name.to_owned(), required));
                if our != their {
                    let name = their.map_or_else(|| ours[i].0.to_owned(), |their| their.0);
                    found.insert((operator.to_owned(), kind, name));
                }
            }
        }
    }

    /// Names, types and defaults.
    fn compare_attributes(
        operator: &str,
        schema: &Value,
        ours: &Declared,
        found: &mut Differences,
    ) {
        let of = |attribute: &Attribute| {
            let kind = match attribute.kind {
                Kind::Float => "FLOAT",
                Kind::Int => "INT",
                Kind::Text => "STRING",
            };
            let absent = match attribute.absent {
                Absent::Refused => json!("required"),
                Absent::Unset => Value::Null,
                Absent::Int(default) => json!([default]),
                Absent::Float(default) => json!([default]),
                Absent::Text(default) => json!([default]),
            };
            (attribute.name.to_owned(), json!([kind, absent]).to_string())
        };
        // Defaults of floats are printed in double precision.
        let single = |value: &Value| match value[1][0].as_f64() {
            Some(default) if value[0] == "FLOAT" => json!([value[0], [default as f32]]),
            _ => value.clone(),
        };
        let theirs = schema["attributes"].as_object().expect("attributes").iter();
        let theirs = theirs.map(|(name, value)| (name.clone(), single(value).to_string()));
        let (ours, theirs): (BTreeSet<_>, BTreeSet<_>) =
            (ours.attributes.iter().map(of).collect(), theirs.collect());
        for (name, _) in ours.symmetric_difference(&theirs) {
            found.insert((operator.to_owned(), "attributes", name.clone()));
        }
    }

    /// `tests/ort.py` reports when the packages' newest versions differ from the stored ones.
    #[test]
    fn operators_are_those_of_the_stored_schemas_but_for_what_is_refused() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/cases/schemas.json");
        let stored = std::fs::read_to_string(path).expect("stored schemas");
        let stored: Value = serde_json::from_str(&stored).expect("JSON");
        let schemas = stored["schemas"].as_array().expect("schemas");
        assert!(schemas.len() >= 7, "{}", schemas.len());
        let mut found = Differences::new();
        for schema in schemas {
            let (operator, since) = (text(&schema["operator"]), schema["since"].as_i64());
            let ours = declared(&operator, since.expect("a version"));
            let ours = ours.unwrap_or_else(|| panic!("{operator} of {since:?}: no definition"));
            compare_lists(&operator, schema, &ours, &mut found);
            compare_attributes(&operator, schema, &ours, &mut found);
        }
        let refused = stored["refused"].as_array().expect("what is refused").iter();
        let refused: BTreeSet<_> =
            refused.map(|refused| [0, 1, 2].map(|i| text(&refused[i]))).collect();
        let found: BTreeSet<_> = found
            .into_iter()
            .map(|(operator, kind, name)| [operator, kind.to_owned(), name])
            .collect();
        assert_eq!(found, refused);
    }
}
