//! Attributes of a node, checked for name and type.

use crate::error::{Error, Result};
use crate::proto::{AttributeProto, NodeProto};

/// AttributeProto.AttributeType, as far as the operators use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Float = 1,
    Int = 2,
    Text = 3,
}

/// Names of AttributeProto.AttributeType, by number.
const KINDS: [&str; 15] = [
    "undefined",
    "float",
    "int",
    "string",
    "tensor",
    "graph",
    "floats",
    "ints",
    "strings",
    "tensors",
    "graphs",
    "sparse_tensor",
    "sparse_tensors",
    "type_proto",
    "type_protos",
];

impl Kind {
    fn name(number: i32) -> &'static str {
        usize::try_from(number).ok().and_then(|n| KINDS.get(n)).unwrap_or(&"of an unknown type")
    }
}

/// A node's attributes: each is known to the operator, has the right type, and occurs once.
pub(crate) struct Attributes<'a>(&'a [AttributeProto]);

impl<'a> Attributes<'a> {
    /// Checks the node's attributes against those `known`.
    pub fn of(node: &'a NodeProto, known: &[(&str, Kind)]) -> Result<Self> {
        for (i, attribute) in node.attribute.iter().enumerate() {
            let name = attribute.name.as_str();
            let Some((_, kind)) = known.iter().find(|(known, _)| *known == name) else {
                let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
                return Err(Error::invalid(
                    "attribute",
                    format_args!("{name:?}"),
                    names.join(", "),
                ));
            };
            if attribute.r#type != *kind as i32 || !attribute.ref_attr_name.is_empty() {
                let got = match attribute.ref_attr_name.as_str() {
                    "" => format!("type {}", Kind::name(attribute.r#type)),
                    reference => format!("a reference to {reference:?}"),
                };
                return Err(Error::invalid(
                    name,
                    got,
                    format_args!("type {}", Kind::name(*kind as i32)),
                ));
            }
            if node.attribute[..i].iter().any(|earlier| earlier.name == name) {
                return Err(Error::invalid(name, "the attribute twice", "once"));
            }
        }
        Ok(Self(&node.attribute))
    }

    fn get(&self, name: &str) -> Option<&'a AttributeProto> {
        self.0.iter().find(|attribute| attribute.name == name)
    }

    /// An integer, where given.
    pub fn int(&self, name: &str) -> Option<i64> {
        self.get(name).map(|attribute| attribute.i)
    }

    /// An integer that has no default.
    pub fn required_int(&self, name: &str) -> Result<i64> {
        self.int(name).ok_or_else(|| Error::invalid(name, "no attribute of that name", "an int"))
    }

    /// A switch: only the value 1 is on.
    pub fn on(&self, name: &str) -> bool {
        self.int(name) == Some(1)
    }

    /// A number, where given.
    pub fn float(&self, name: &str) -> Option<f32> {
        self.get(name).map(|attribute| attribute.f)
    }

    /// A word, where given.
    pub fn text(&self, name: &str) -> Option<String> {
        self.get(name).map(|attribute| String::from_utf8_lossy(&attribute.s).into_owned())
    }
}
