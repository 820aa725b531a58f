//! Sequences of the same lengths.

use super::bias::Bias;
use super::scores::{Scores, Sizes};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{Gpu, Pointer};
use crate::rows::{check_type, readable, strides};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::backend::BackendStorage;
use candle::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Problem, Strided, TensorView};

/// Attention of query, key and value.
pub(super) struct Dense {
    pub(super) scores: Scores,
    /// Ranges of positions within which rows see all keys, regardless of the window. With ranges, a
    /// bias decides which keys are visible.
    pub(super) ranges: Option<Vec<[i32; 2]>>,
}

impl Dense {
    pub(super) fn new(scores: Scores) -> Self {
        Self { scores, ranges: None }
    }

    /// What is added to scores.
    fn bias(&self, sizes: Sizes, dtype: DType) -> Result<Option<Bias>> {
        match &self.ranges {
            Some(ranges) => Bias::ranges(self.scores.window, ranges, sizes, dtype).map(Some),
            None => Bias::alibi(&self.scores, sizes, dtype),
        }
    }

    /// The problem of tensors with these layouts.
    fn problem(
        &self,
        dtype: DType,
        [q, k, v]: [&Layout; 3],
        sizes: Sizes,
        bias: Option<&Bias>,
    ) -> Result<Problem> {
        let strided =
            Strided { query: strides(q), key: strides(k), value: strides(v), ..Strided::default() };
        let window = if self.ranges.is_some() { [None; 2] } else { self.scores.window };
        let bias = bias.map(|bias| bias.heads);
        self.scores.problem(dtype, sizes, window, bias, strided)
    }

    pub(super) fn apply(self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        check_type("k", k, q.dtype())?;
        check_type("v", v, q.dtype())?;
        readable(q)?.apply_op3(&readable(k)?, &readable(v)?, self)
    }
}

impl CustomOp3 for Dense {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let sizes = Sizes::of([q_layout, k_layout, v_layout])?;
        let layouts = [q_layout, k_layout, v_layout];
        let bias = self.bias(sizes, q.dtype())?;
        let problem = self.problem(q.dtype(), layouts, sizes, bias.as_ref())?;
        let last = vec![sizes.keys as i32 - 1; sizes.batch];
        let inputs = Tensors::default()
            .with(TensorId::Query, cpu::view("q", q, q_layout)?)
            .with(TensorId::Key, cpu::view("k", k, k_layout)?)
            .with(TensorId::Value, cpu::view("v", v, v_layout)?)
            .with(TensorId::SeqlensK, TensorView::I32(&last))
            .with(TensorId::AttentionBias, bias.as_ref().map(Bias::view).transpose()?);
        let shape = q_layout.shape();
        let mut output = cpu::zeros("output", q.dtype(), shape.dims())?;
        cpu::attend(&problem, inputs, cpu::view_mut("output", &mut output)?)?;
        Ok((output, shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let layouts = [q_layout, k_layout, v_layout];
        let sizes = Sizes::of(layouts)?;
        let bias = self.bias(sizes, q.dtype())?;
        let problem = self.problem(q.dtype(), layouts, sizes, bias.as_ref())?;
        let (device, shape) = (q.device(), q_layout.shape());
        let gpu = Gpu::of(device)?;
        let last = gpu.numbers(&vec![sizes.keys as i32 - 1; sizes.batch])?;
        let bias = bias.map(|bias| bias.on(device)).transpose()?;
        let mut output = Gpu::output(q, shape)?;
        let tensors = Tensors::default()
            .with(TensorId::Query, Pointer::read("q", q, q_layout, &gpu)?)
            .with(TensorId::Key, Pointer::read("k", k, k_layout, &gpu)?)
            .with(TensorId::Value, Pointer::read("v", v, v_layout, &gpu)?)
            .with(TensorId::SeqlensK, Pointer::of(&last, 0, &gpu))
            .with(
                TensorId::AttentionBias,
                bias.as_ref().map(|b| Pointer::all(b, &gpu)).transpose()?,
            )
            .with(TensorId::Output, Pointer::written("output", &mut output, &gpu)?);
        gpu.run(&problem, &tensors)?;
        drop(tensors);
        Ok((output, shape.clone()))
    }
}
