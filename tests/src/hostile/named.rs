//! The inputs of a call by name, to be damaged.

use super::draw::{Draw, TYPES};
use gqa_host::{DType, Tensor, TensorDesc};
use std::fmt;
use std::sync::LazyLock;

/// Inputs by name, some of which are absent.
#[derive(Clone)]
pub struct Named<T>(pub Vec<(&'static str, Option<T>)>);

/// An input's type and shape.
pub type Desc = (DType, Vec<usize>);

/// The most elements of a damaged tensor.
const MOST_ELEMENTS: usize = 1 << 16;

/// Stands for missing required inputs.
static NOTHING: LazyLock<Tensor> = LazyLock::new(|| Tensor::zeros(DType::F32, &[0]));

impl<T> Named<T> {
    fn find(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(have, _)| *have == name)?.1.as_ref()
    }

    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(name, _)| *name)
    }
}

impl Named<Tensor> {
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.find(name)
    }

    pub fn need(&self, name: &str) -> &Tensor {
        self.find(name).unwrap_or(&NOTHING)
    }

    /// Types and shapes.
    pub fn descs(&self) -> Named<Desc> {
        Named(self.0.iter().map(|(name, tensor)| (*name, tensor.as_ref().map(desc))).collect())
    }
}

impl Named<Desc> {
    pub fn get(&self, name: &str) -> Option<TensorDesc<'_>> {
        self.find(name).map(|(dtype, shape)| TensorDesc { dtype: *dtype, shape })
    }

    pub fn need(&self, name: &str) -> TensorDesc<'_> {
        self.get(name).unwrap_or(TensorDesc { dtype: DType::F32, shape: &[] })
    }

    /// The dimensions of all.
    pub fn dims(&mut self) -> impl Iterator<Item = &mut usize> {
        self.0.iter_mut().filter_map(|(_, desc)| Some(&mut desc.as_mut()?.1)).flatten()
    }
}

impl<T: Spoil> Named<T> {
    /// Spoils one of them.
    pub fn spoil(&mut self, draw: &mut Draw) {
        let [at, other] = [(); 2].map(|()| draw.below(self.0.len()));
        self.0[at].1 = match (&self.0[at].1, draw.below(10)) {
            (None, _) | (_, 0) => self.0[other].1.clone(),
            (_, 1) => None,
            (Some(given), _) => Some(given.spoilt(draw)),
        };
    }
}

impl<T: Spoil> fmt::Debug for Named<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = self.0.iter().filter_map(|(name, given)| Some((name, given.as_ref()?.show())));
        f.debug_map().entries(given).finish()
    }
}

/// What has a spoilt form.
pub trait Spoil: Clone {
    fn spoilt(&self, draw: &mut Draw) -> Self;

    /// In one line.
    fn show(&self) -> String;
}

impl Spoil for Desc {
    fn spoilt(&self, draw: &mut Draw) -> Self {
        let (mut dtype, mut shape) = self.clone();
        let at = draw.below(shape.len() + 1);
        match draw.below(8) {
            0 | 1 => dtype = draw.of(&TYPES),
            2 => shape.insert(at, draw.of(&[1, 1, 0, 2])),
            3 => shape = vec![shape.iter().fold(1, |all: usize, n| all.wrapping_mul(*n))],
            4 => drop(shape.pop()),
            _ => shape.iter_mut().skip(at).take(1).for_each(|n| *n = draw.size(*n)),
        }
        (dtype, shape)
    }

    fn show(&self) -> String {
        format!("{} {:?}", self.0, self.1)
    }
}

impl Spoil for Tensor {
    fn spoilt(&self, draw: &mut Draw) -> Self {
        match draw.below(10) {
            0..5 => with_other_values(self, draw),
            5 => turned(self),
            _ => with_other_desc(self, draw),
        }
    }

    fn show(&self) -> String {
        const SHOWN: usize = 24;
        let values: Vec<_> = self.to_f64().into_iter().take(SHOWN).collect();
        format!("{} {values:?}", desc(self).show())
    }
}

fn desc(tensor: &Tensor) -> Desc {
    (tensor.dtype(), tensor.shape().to_vec())
}

/// The tensor with another type or shape, and the same elements as far as possible.
fn with_other_desc(tensor: &Tensor, draw: &mut Draw) -> Tensor {
    let (dtype, mut shape) = desc(tensor).spoilt(draw);
    let elements = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    if elements.is_none_or(|n| n > MOST_ELEMENTS) {
        // A tensor without elements takes no memory, however large a dimension is.
        let at = draw.below(shape.len());
        shape[at] = 0;
    }
    let Ok(mut made) = Tensor::try_zeros("shape", dtype, &shape) else { return tensor.clone() };
    if dtype == tensor.dtype() && made.len() == tensor.len() {
        made.with_bytes_mut(|bytes| bytes.copy_from_slice(tensor.bytes()));
    }
    made
}

/// The tensor from an array in another memory order.
fn turned(tensor: &Tensor) -> Tensor {
    match tensor.clone() {
        Tensor::F32(a) => a.into_array().reversed_axes().into(),
        Tensor::F16(a) => a.into_array().reversed_axes().into(),
        Tensor::BF16(a) => a.into_array().reversed_axes().into(),
        Tensor::I32(a) => a.into_array().reversed_axes().into(),
        other => other,
    }
}

/// The tensor with up to three of its elements replaced.
pub fn with_other_values(tensor: &Tensor, draw: &mut Draw) -> Tensor {
    let mut tensor = tensor.clone();
    let size = tensor.dtype().size();
    for _ in 0..if tensor.is_empty() { 0 } else { 1 + draw.below(3) } {
        let at = draw.below(tensor.len());
        match &mut tensor {
            Tensor::I32(a) => a.as_slice_mut()[at] = draw.integer() as i32,
            Tensor::I64(a) => a.as_slice_mut()[at] = draw.integer(),
            Tensor::F32(a) => a.as_slice_mut()[at] = draw.float(),
            Tensor::F64(a) => a.as_slice_mut()[at] = draw.float().into(),
            // The byte with the sign and the exponent.
            other => other.with_bytes_mut(|bytes| bytes[at * size + size - 1] = draw.byte()),
        }
    }
    tensor
}
