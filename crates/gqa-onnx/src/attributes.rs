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

/// An attribute that an operator has.
pub(crate) struct Attribute {
    pub name: &'static str,
    pub kind: Kind,
    /// What a node without it means.
    pub absent: Absent,
}

/// What a node without an attribute means.
pub(crate) enum Absent {
    /// Nothing: it must have it.
    Refused,
    /// What the operator's definition says: the attribute has no default.
    Unset,
    /// The default.
    Int(i64),
    /// The default.
    Float(f32),
    /// The default.
    Text(&'static str),
}

/// An integer that a node must have.
pub(crate) const fn required(name: &'static str) -> Attribute {
    Attribute { name, kind: Kind::Int, absent: Absent::Refused }
}

/// An attribute without a default.
pub(crate) const fn optional(name: &'static str, kind: Kind) -> Attribute {
    Attribute { name, kind, absent: Absent::Unset }
}

/// An integer with a default.
pub(crate) const fn int(name: &'static str, default: i64) -> Attribute {
    Attribute { name, kind: Kind::Int, absent: Absent::Int(default) }
}

/// A float with a default.
pub(crate) const fn float(name: &'static str, default: f32) -> Attribute {
    Attribute { name, kind: Kind::Float, absent: Absent::Float(default) }
}

/// A string with a default.
pub(crate) const fn text(name: &'static str, default: &'static str) -> Attribute {
    Attribute { name, kind: Kind::Text, absent: Absent::Text(default) }
}

/// A node's attributes: each is known to the operator, has the right type, and occurs once.
pub(crate) struct Attributes<'a> {
    given: &'a [AttributeProto],
    known: &'static [Attribute],
}

impl<'a> Attributes<'a> {
    /// Checks the node's attributes against those `known`.
    pub fn of(node: &'a NodeProto, known: &'static [Attribute]) -> Result<Self> {
        for (i, attribute) in node.attribute.iter().enumerate() {
            let name = attribute.name.as_str();
            let Some(Attribute { kind, .. }) = known.iter().find(|known| known.name == name) else {
                let names: Vec<_> = known.iter().map(|known| known.name).collect();
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
        Ok(Self { given: &node.attribute, known })
    }

    fn get(&self, name: &str) -> Option<&'a AttributeProto> {
        self.given.iter().find(|attribute| attribute.name == name)
    }

    /// What a node without that attribute means.
    fn absent(&self, name: &str) -> &'static Absent {
        let known = self.known.iter().find(|known| known.name == name);
        known.map_or(&Absent::Unset, |known| &known.absent)
    }

    /// An integer: as given, or its default.
    pub fn int(&self, name: &str) -> Option<i64> {
        match (self.get(name), self.absent(name)) {
            (Some(attribute), _) => Some(attribute.i),
            (None, Absent::Int(default)) => Some(*default),
            _ => None,
        }
    }

    /// An integer that is given or has a default.
    pub fn required_int(&self, name: &str) -> Result<i64> {
        self.int(name).ok_or_else(|| Error::invalid(name, "no attribute of that name", "an int"))
    }

    /// A switch: only the value 1 is on.
    pub fn on(&self, name: &str) -> bool {
        self.int(name) == Some(1)
    }

    /// A number: as given, or its default.
    pub fn float(&self, name: &str) -> Option<f32> {
        match (self.get(name), self.absent(name)) {
            (Some(attribute), _) => Some(attribute.f),
            (None, Absent::Float(default)) => Some(*default),
            _ => None,
        }
    }

    /// A number that is given or has a default.
    pub fn required_float(&self, name: &str) -> Result<f32> {
        self.float(name).ok_or_else(|| Error::invalid(name, "no attribute of that name", "a float"))
    }

    /// A word: as given, or its default; empty where it has none.
    pub fn text(&self, name: &str) -> String {
        match (self.get(name), self.absent(name)) {
            (Some(attribute), _) => String::from_utf8_lossy(&attribute.s).into_owned(),
            (None, Absent::Text(default)) => (*default).to_owned(),
            _ => String::new(),
        }
    }
}
