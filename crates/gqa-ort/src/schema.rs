//! What ONNX Runtime asks about the inputs and outputs of an operator.

use gqa_host::DType;
use gqa_host::plan::TensorId;
use std::ffi::CStr;

/// An operator's name, inputs and outputs, in ONNX Runtime's order.
pub struct Schema {
    /// In the domain com.microsoft.
    pub name: &'static CStr,
    /// Inputs.
    pub inputs: &'static [Input],
    /// Outputs.
    pub outputs: &'static [Output],
    /// Whether outputs 1 and 2 are the caches that inputs 3 and 4 are.
    pub in_place: bool,
}

/// Element type of a tensor.
#[derive(Clone, Copy)]
pub enum Kind {
    /// That of query.
    Element,
    /// That of the KV cache.
    Cache,
    /// This one.
    Always(DType),
}

/// Element types of a kernel's tensors.
#[derive(Clone, Copy)]
pub struct Types {
    /// That of query.
    pub element: DType,
    /// That of the KV cache.
    pub cache: DType,
}

/// An input.
pub struct Input {
    /// As messages name it.
    pub name: &'static str,
    /// What it is in a call; `None` for numbers that the host reads.
    pub role: Option<TensorId>,
    /// Its type.
    pub kind: Kind,
    /// Whether a node must have it.
    pub required: bool,
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

/// An input that a node may lack.
pub const fn input(name: &'static str, role: TensorId, kind: Kind) -> Input {
    Input { name, role: Some(role), kind, required: false }
}

/// int32 numbers that the host reads, whatever device computes.
pub const fn numbers(name: &'static str) -> Input {
    Input { name, role: None, kind: Kind::Always(DType::I32), required: false }
}

impl Input {
    /// One that a node must have.
    pub const fn required(self) -> Self {
        Self { required: true, ..self }
    }
}

impl Kind {
    /// The type, among those of a kernel.
    pub fn of(self, types: Types) -> DType {
        match self {
            Self::Element => types.element,
            Self::Cache => types.cache,
            Self::Always(dtype) => dtype,
        }
    }
}
