//! What ONNX Runtime needs to know of an operator: inputs, outputs and attributes.

use gqa_host::DType;
pub use gqa_host::op::{Input, Kind};
use gqa_host::plan::TensorId;
use std::ffi::CStr;
use std::fmt::{self, Display};

/// An operator's name, inputs and outputs, in ONNX Runtime's order, and its attributes.
pub struct Schema {
    /// In the domain com.microsoft.
    pub name: &'static CStr,
    /// Inputs.
    pub inputs: &'static [Input],
    /// Outputs.
    pub outputs: &'static [Output],
    /// Attributes.
    pub attributes: &'static [Attribute],
    /// Whether outputs 1 and 2 are the caches that inputs 3 and 4 are.
    pub in_place: bool,
}

/// Element types of a kernel's tensors.
#[derive(Clone, Copy)]
pub struct Types {
    /// That of query.
    pub element: DType,
    /// That of the KV cache.
    pub cache: DType,
}

/// An output. The first is required, the others are not.
pub struct Output {
    /// As messages name it.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// What it is in a call.
    pub role: TensorId,
}

/// An attribute.
pub struct Attribute {
    /// Its name.
    pub name: &'static CStr,
    /// What a node without it means.
    pub absent: Absent,
}

/// What a node without an attribute means.
#[derive(Clone, Copy)]
pub enum Absent {
    /// Nothing: it must have it.
    Refused,
    /// The operator's default.
    Default(Literal),
    /// This, though the operator has no default.
    Means(Literal),
    /// What that other attribute says.
    As(&'static CStr),
}

/// The value of an attribute.
#[derive(Clone, Copy)]
pub enum Literal {
    /// An integer.
    Int(i64),
    /// A float.
    Float(f32),
    /// A string, of ASCII without quotes.
    Text(&'static str),
}

/// An integer that a node must have.
pub const fn required(name: &'static CStr) -> Attribute {
    Attribute { name, absent: Absent::Refused }
}

/// One with a default.
pub const fn default(name: &'static CStr, value: Literal) -> Attribute {
    Attribute { name, absent: Absent::Default(value) }
}

/// One without.
pub const fn optional(name: &'static CStr, means: Literal) -> Attribute {
    Attribute { name, absent: Absent::Means(means) }
}

/// What there is, as JSON: lists of [name, whether a node must have it], and attributes by
/// name: "required", null, or [default].
impl Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: Vec<String>| items.join(", ");
        let inputs = self.inputs.iter().map(|i| format!("[{:?}, {}]", i.name, i.required));
        let outputs = self.outputs.iter().enumerate();
        let outputs = outputs.map(|(i, output)| format!("[{:?}, {}]", output.name, i == 0));
        let attributes = self.attributes.iter().map(|Attribute { name, absent }| match absent {
            Absent::Refused => format!("{name:?}: \"required\""),
            Absent::Means(_) | Absent::As(_) => format!("{name:?}: null"),
            Absent::Default(value) => format!("{name:?}: [{value}]"),
        });
        write!(
            f,
            "{:?}: {{\"inputs\": [{}], \"outputs\": [{}], \"attributes\": {{{}}}}}",
            self.name,
            list(inputs.collect()),
            list(outputs.collect()),
            list(attributes.collect())
        )
    }
}

impl Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "{number:?}"),
            Self::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl Types {
    /// The type of such a tensor.
    pub fn of(self, kind: Kind) -> DType {
        kind.of(self.element, self.cache)
    }
}
