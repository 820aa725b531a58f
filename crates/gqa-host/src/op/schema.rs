//! Inputs as nodes of a model have them.

use gqa_plan::plan::TensorId;
use gqa_tensor::DType;

/// An input of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// ONNX Runtime's name.
    pub name: &'static str,
    /// What it is in a call; `None` for int32 numbers that the host reads.
    pub role: Option<TensorId>,
    /// Its element type.
    pub kind: Kind,
    /// Whether a node must have it.
    pub required: bool,
}

/// Element type of an operator's tensor.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// That of query.
    Element,
    /// That of the KV cache.
    Cache,
    /// This one.
    Always(DType),
}

impl Kind {
    /// The type, where query and KV cache have these.
    pub const fn of(self, element: DType, cache: DType) -> DType {
        match self {
            Self::Element => element,
            Self::Cache => cache,
            Self::Always(dtype) => dtype,
        }
    }
}

impl Input {
    /// One that a node must have.
    pub(super) const fn required(self) -> Self {
        Self { required: true, ..self }
    }
}

/// An input that a node may lack.
pub(super) const fn input(name: &'static str, role: TensorId, kind: Kind) -> Input {
    Input { name, role: Some(role), kind, required: false }
}

/// An input of integers that the host reads on every back end.
pub(super) const fn numbers(name: &'static str) -> Input {
    Input { name, role: None, kind: Kind::Always(DType::I32), required: false }
}

/// Their names.
pub(super) const fn names<const N: usize>(inputs: &[Input; N]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut i = 0;
    while i < N {
        names[i] = inputs[i].name;
        i += 1;
    }
    names
}
