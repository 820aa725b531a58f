//! Output in float8e4m3fn with a scale: computed in float32, then quantized.

use super::Run;
use super::element::elements;
use super::executor::{each, threads_for};
use crate::backend::IoViews;
use float8::F8E4M3;
use gqa_plan::plan::TensorId;
use gqa_plan::{Problem, ProblemFields};
use gqa_tensor::{CacheView, DType, Result, Tensor, TensorViewMut};

impl Run<'_> {
    /// Computes a call with quantized output.
    pub(super) fn quantized(&self, p: &Problem, io: &mut IoViews<'_>) -> Result<()> {
        const MAX: f32 = 448.0;
        const ELEMENTS: usize = 1 << 14;
        let exact = p.derive(|call| ProblemFields { out_dtype: DType::F32, ..call })?;
        let scale = elements::<f32>("output_scale", io.need(TensorId::OutputScale)?)?[0];
        let mut output = Tensor::try_zeros("output", DType::F32, &p.output_shape())?;
        let mut inner = IoViews {
            inputs: io.inputs,
            output: output.view_mut(),
            present_key: io.present_key.reborrow(),
            present_value: io.present_value.reborrow(),
            row_scales: io
                .row_scales
                .as_mut()
                .map(|scales| scales.each_mut().map(CacheView::reborrow)),
            output_qk: io.output_qk.as_mut().map(TensorViewMut::reborrow),
            lse: io.lse.as_mut().map(TensorViewMut::reborrow),
        };
        self.compute(&exact, &mut inner)?;
        let rounded = |x: f32| F8E4M3::from_f32((x / scale).clamp(-MAX, MAX)).to_bits();
        let values = elements::<f32>("output", output.view())?;
        let codes = io.output.reborrow().into_bytes()?.chunks_mut(ELEMENTS);
        let executor = threads_for(values.len(), self.executor);
        each(executor, codes.zip(values.chunks(ELEMENTS)), |(to, from)| {
            to.iter_mut().zip(from).for_each(|(to, x)| *to = rounded(*x));
        });
        Ok(())
    }
}
