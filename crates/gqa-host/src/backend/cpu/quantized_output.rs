//! Output in float8e4m3fn times a scale: computed in float32 and rounded then.

use super::Cpu;
use super::element::elements;
use crate::backend::Io;
use crate::plan::TensorId;
use crate::{DType, Problem, ProblemFields, Result, Tensor};
use float8::F8E4M3;
use rayon::prelude::*;

impl Cpu {
    /// Computes a call with quantized output.
    pub(super) fn run_quantized(&self, p: &Problem, io: &mut Io<'_>) -> Result<()> {
        const MAX: f32 = 448.0;
        let exact = p.derive(|call| ProblemFields { out_dtype: DType::F32, ..call });
        let scale = elements::<f32>("output_scale", io.need(TensorId::OutputScale)?)?[0];
        let mut output = Tensor::try_zeros("output", DType::F32, &p.output_shape())?;
        let mut inner = Io {
            inputs: io.inputs,
            output: &mut output,
            present_key: io.present_key,
            present_value: io.present_value,
            output_qk: io.output_qk.as_deref_mut(),
            lse: io.lse.as_deref_mut(),
        };
        self.compute(&exact, &mut inner)?;
        let rounded = |&x: &f32| F8E4M3::from_f32((x / scale).clamp(-MAX, MAX)).to_bits();
        let values = elements::<f32>("output", &output)?;
        let codes = io.output.bytes_mut()?.par_iter_mut();
        codes.zip(values.par_iter().map(rounded)).for_each(|(to, code)| *to = code);
        Ok(())
    }
}
