//! A call's tensors by their role, and whether they are those of a problem.

use super::Io;
use crate::op::validate::values;
use crate::plan::{TensorId, TensorSpec, Tensors};
use crate::{Error, Problem, Result, Tensor};

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

    /// The output in that role.
    fn output(&self, id: TensorId) -> Option<&Tensor> {
        match id {
            TensorId::Output => Some(self.output),
            TensorId::PresentKey => Some(self.present_key),
            TensorId::PresentValue => Some(self.present_value),
            TensorId::OutputQk => self.output_qk.as_deref(),
            TensorId::Lse => self.lse.as_deref(),
            _ => None,
        }
    }

    /// Errs unless the tensors are those of `problem`, and lengths, positions and blocks lead into
    /// the tensors that they index. Back ends compute what passes.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        self.check_tensors(problem)?;
        values::check(problem, &self.inputs)
    }

    /// Errs unless all tensors of `problem` are there, with its types and as many elements as it
    /// says.
    pub(crate) fn check_tensors(&self, problem: &Problem) -> Result<()> {
        for id in TensorId::ALL {
            let tensor = if id.is_output() { self.output(id) } else { self.input(id) };
            match (id.spec(problem), tensor) {
                (Some(spec), tensor) => check_tensor(id, &spec, tensor)?,
                (None, Some(_)) if matches!(id, TensorId::OutputQk | TensorId::Lse) => {
                    let allowed = "none, as the problem has none";
                    return Err(Error::invalid(id.name(), "a tensor", allowed));
                }
                (None, _) => {}
            }
        }
        Ok(())
    }
}

/// Errs unless the tensor has the type and as many elements. One without elements is not looked at.
fn check_tensor(id: TensorId, spec: &TensorSpec, tensor: Option<&Tensor>) -> Result<()> {
    let allowed = || format!("{} {:?}, as the problem says", spec.dtype, spec.shape);
    match tensor {
        _ if spec.is_empty() => Ok(()),
        None => Err(Error::invalid(id.name(), "no tensor", allowed())),
        Some(tensor) if tensor.dtype() == spec.dtype && tensor.len() == spec.len() => Ok(()),
        Some(tensor) => {
            let got = format!("{} {:?}", tensor.dtype(), tensor.shape());
            Err(Error::invalid(id.name(), got, allowed()))
        }
    }
}
