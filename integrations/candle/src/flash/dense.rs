//! Sequences of the same lengths.

use super::bias::Bias;
use super::scores::{Scores, Sizes};
use crate::cpu;
use crate::rows::{check_type, readable, strides};
use candle::backend::BackendStorage;
use candle::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Strided, TensorView};

/// Attention of query, key and value.
pub(super) struct Dense {
    scores: Scores,
}

impl Dense {
    pub(super) fn new(scores: Scores) -> Self {
        Self { scores }
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
        let bias = Bias::alibi(&self.scores, sizes, q.dtype())?;
        let mut strided = Strided::default();
        strided.query = strides(q_layout);
        (strided.key, strided.value) = (strides(k_layout), strides(v_layout));
        let heads = bias.as_ref().map(|bias| bias.heads);
        let problem = self.scores.problem(q.dtype(), sizes, heads, strided)?;
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
}
