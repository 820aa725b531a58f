//! A call's tensors by their role, and checks against a problem.

use super::{Io, IoViews};
use gqa_plan::Problem;
use gqa_plan::contents;
use gqa_plan::plan::{TensorId, TensorSpec};
use gqa_tensor::{DType, Error, Result, Tensor, TensorView, TensorViewMut};

impl<'a> Io<'a> {
    /// The input in that role.
    pub fn input(&self, id: TensorId) -> Option<&'a Tensor> {
        self.inputs.input(id)
    }

    /// The required input in that role.
    pub(crate) fn need(&self, id: TensorId) -> Result<&'a Tensor> {
        self.inputs.need(id)
    }

    /// The outputs that the call has.
    pub fn outputs(&mut self) -> impl Iterator<Item = (TensorId, &mut Tensor)> {
        let [k_scale, v_scale] = match &mut self.row_scales {
            Some(scales) => scales.each_mut().map(|tensor| Some(&mut **tensor)),
            None => [None, None],
        };
        let outputs = [
            (TensorId::Output, Some(&mut *self.output)),
            (TensorId::PresentKey, Some(&mut *self.present_key)),
            (TensorId::PresentValue, Some(&mut *self.present_value)),
            (TensorId::KRowScale, k_scale),
            (TensorId::VRowScale, v_scale),
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
            TensorId::KRowScale => self.row_scales.as_ref().map(|[k_scale, _]| &**k_scale),
            TensorId::VRowScale => self.row_scales.as_ref().map(|[_, v_scale]| &**v_scale),
            TensorId::OutputQk => self.output_qk.as_deref(),
            TensorId::Lse => self.lse.as_deref(),
            _ => None,
        }
    }

    /// Checks the tensors against `problem`, and that lengths, positions and block tables stay
    /// within the tensors that they index. Back ends compute calls that pass.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        self.check_tensors(problem)?;
        contents::check(problem, &self.inputs.views())
    }

    /// Checks that all tensors of `problem` are present, with the right types and numbers of
    /// elements, and no others.
    pub(crate) fn check_tensors(&self, problem: &Problem) -> Result<()> {
        TensorId::ALL.into_iter().try_for_each(|id| {
            let tensor = if id.is_output() { self.output(id) } else { self.input(id) };
            let got = tensor.map(|tensor| Got {
                dtype: tensor.dtype(),
                len: tensor.len(),
                shape: Some(tensor.shape()),
            });
            check_tensor(id, id.spec(problem), got, |spec, len| len == spec.len())
        })
    }

    /// The elements of all tensors.
    pub fn views(&mut self) -> IoViews<'_> {
        IoViews {
            inputs: self.inputs.views(),
            output: self.output.view_mut(),
            present_key: self.present_key.view_mut().into(),
            present_value: self.present_value.view_mut().into(),
            row_scales: self
                .row_scales
                .as_mut()
                .map(|scales| scales.each_mut().map(|tensor| tensor.view_mut().into())),
            output_qk: self.output_qk.as_deref_mut().map(Tensor::view_mut),
            lse: self.lse.as_deref_mut().map(Tensor::view_mut),
        }
    }
}

impl<'a> IoViews<'a> {
    /// The input in that role.
    pub(crate) fn input(&self, id: TensorId) -> Option<TensorView<'a>> {
        self.inputs.input(id)
    }

    /// The required input in that role.
    pub(crate) fn need(&self, id: TensorId) -> Result<TensorView<'a>> {
        self.inputs.need(id)
    }

    /// The output in that role.
    fn output(&self, id: TensorId) -> Option<TensorView<'_>> {
        match id {
            TensorId::Output => Some(self.output.view()),
            TensorId::PresentKey => Some(self.present_key.view()),
            TensorId::PresentValue => Some(self.present_value.view()),
            TensorId::KRowScale => self.row_scale(0),
            TensorId::VRowScale => self.row_scale(1),
            TensorId::OutputQk => self.output_qk.as_ref().map(TensorViewMut::view),
            TensorId::Lse => self.lse.as_ref().map(TensorViewMut::view),
            _ => None,
        }
    }

    /// k_scale or v_scale of each row.
    pub(crate) fn row_scale(&self, number: usize) -> Option<TensorView<'_>> {
        self.row_scales.as_ref().map(|scales| scales[number].view())
    }

    /// As [`Io::check`]; a strided tensor must have all elements that its strides reach.
    pub(crate) fn check(&self, problem: &Problem) -> Result<()> {
        TensorId::ALL.into_iter().try_for_each(|id| {
            let view = if id.is_output() { self.output(id) } else { self.input(id) };
            let got = view.map(|view| Got { dtype: view.dtype(), len: view.len(), shape: None });
            check_tensor(id, id.spec(problem), got, |spec, len| {
                has_elements(problem, id, spec, len)
            })
        })?;
        contents::check(problem, &self.inputs)
    }
}

/// A call's tensor in some role.
struct Got<'a> {
    dtype: DType,
    len: usize,
    /// Its shape, if it has one.
    shape: Option<&'a [usize]>,
}

/// Whether the number of elements is the tensor's, or as large as its strides reach.
fn has_elements(p: &Problem, id: TensorId, spec: &TensorSpec, len: usize) -> bool {
    let Some(strides) = spec.strides else { return len == spec.len() };
    strides.extent(id.row_dims(p)).is_some_and(|extent| len >= extent)
}

/// Checks a tensor's presence, type and number of elements. One without elements is optional, and
/// may be given where the problem has none.
fn check_tensor(
    id: TensorId,
    spec: Option<TensorSpec>,
    got: Option<Got<'_>>,
    suffice: impl FnOnce(&TensorSpec, usize) -> bool,
) -> Result<()> {
    let has_elements = got.as_ref().is_some_and(|got| got.len > 0);
    let Some(spec) = spec else {
        let refusal = || Error::invalid(id.name(), "a tensor", "none, as the problem has none");
        return (!has_elements).then_some(()).ok_or_else(refusal);
    };
    let allowed = || format!("{} {:?}, as the problem says", spec.dtype, spec.shape);
    match got {
        _ if spec.is_empty() && !has_elements => Ok(()),
        None => Err(Error::invalid(id.name(), "no tensor", allowed())),
        Some(got) if got.dtype == spec.dtype && suffice(&spec, got.len) => Ok(()),
        Some(Got { dtype, shape: Some(shape), .. }) => {
            Err(Error::invalid(id.name(), format!("{dtype} {shape:?}"), allowed()))
        }
        Some(Got { dtype, len, shape: None }) => {
            Err(Error::invalid(id.name(), format!("{len} elements of {dtype}"), allowed()))
        }
    }
}
