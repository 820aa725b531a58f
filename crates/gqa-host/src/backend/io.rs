//! A call's tensors by their role.

use super::Io;
use crate::plan::{TensorId, Tensors};
use crate::{Error, Result, Tensor};

impl<'a> Tensors<&'a Tensor> {
    /// The tensor in that role.
    pub fn input(&self, id: TensorId) -> Option<&'a Tensor> {
        self.get(id).copied()
    }

    /// The tensor in that role, which the call cannot do without.
    pub(crate) fn need(&self, id: TensorId) -> Result<&'a Tensor> {
        self.input(id).ok_or_else(|| Error::invalid(id.name(), "nothing", "a tensor"))
    }
}

impl<'a> Io<'a> {
    /// The input in that role.
    pub fn input(&self, id: TensorId) -> Option<&'a Tensor> {
        self.inputs.input(id)
    }

    /// The input in that role, which the call cannot do without.
    pub(crate) fn need(&self, id: TensorId) -> Result<&'a Tensor> {
        self.inputs.need(id)
    }

    /// The outputs that the call has.
    pub fn outputs(&mut self) -> impl Iterator<Item = (TensorId, &mut Tensor)> {
        let outputs = [
            (TensorId::Output, Some(&mut *self.output)),
            (TensorId::PresentKey, Some(&mut *self.present_key)),
            (TensorId::PresentValue, Some(&mut *self.present_value)),
            (TensorId::OutputQk, self.output_qk.as_deref_mut()),
            (TensorId::Lse, self.lse.as_deref_mut()),
        ];
        outputs.into_iter().filter_map(|(id, tensor)| Some((id, tensor?)))
    }
}
