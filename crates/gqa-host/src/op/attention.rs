//! ONNX `Attention`, as operator sets 23, 24 and 25 define it.

use crate::backend::{Backend, Io, run};
use gqa_plan::plan::{TensorId, Tensors};
use gqa_plan::{Problem, QkOutput};
use gqa_tensor::{DType, Result, Tensor};

/// The operator's attributes, with ONNX's defaults.
///
/// ```
/// use gqa_host::op::Attention;
/// let causal_with_window = Attention::new().is_causal(1).left_window_size(127);
/// # let _ = causal_with_window;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub(crate) is_causal: i64,
    pub(crate) q_num_heads: Option<i64>,
    pub(crate) kv_num_heads: Option<i64>,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: f32,
    pub(crate) softmax_precision: Option<i64>,
    pub(crate) qk_matmul_output_mode: i64,
    pub(crate) qk_matmul_output: bool,
    pub(crate) present: bool,
    pub(crate) left_window_size: i64,
    pub(crate) right_window_size: i64,
    pub(crate) broadcast_columns: bool,
}

impl Default for Attention {
    fn default() -> Self {
        Self::new()
    }
}

impl Attention {
    /// The operator with all attributes at their defaults.
    pub fn new() -> Self {
        Self {
            is_causal: 0,
            q_num_heads: None,
            kv_num_heads: None,
            scale: None,
            softcap: 0.0,
            softmax_precision: None,
            qk_matmul_output_mode: 0,
            qk_matmul_output: false,
            present: false,
            left_window_size: -1,
            right_window_size: -1,
            broadcast_columns: false,
        }
    }

    /// 1: a query attends to no key after its own position.
    pub fn is_causal(self, is_causal: i64) -> Self {
        Self { is_causal, ..self }
    }

    /// Query heads and KV heads. Required with three dimensions; with four they must match Q and K.
    pub fn num_heads(self, q_num_heads: i64, kv_num_heads: i64) -> Self {
        Self { q_num_heads: Some(q_num_heads), kv_num_heads: Some(kv_num_heads), ..self }
    }

    /// Query heads alone.
    pub fn q_num_heads(self, heads: i64) -> Self {
        Self { q_num_heads: Some(heads), ..self }
    }

    /// KV heads alone.
    pub fn kv_num_heads(self, heads: i64) -> Self {
        Self { kv_num_heads: Some(heads), ..self }
    }

    /// Whether head counts are given.
    pub fn has_head_counts(&self) -> bool {
        self.q_num_heads.is_some() || self.kv_num_heads.is_some()
    }

    /// Factor on q·k, 0 or more; by default 1/sqrt(head_size).
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Scores become `softcap · tanh(score / softcap)`; 0: off.
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap, ..self }
    }

    /// Type of the softmax: 1 float32, 10 float16, 11 float64, 16 bfloat16. It is computed in
    /// float32 or, for float64 inputs, in float64 on the CPU.
    pub fn softmax_precision(self, dtype: i64) -> Self {
        Self { softmax_precision: Some(dtype), ..self }
    }

    /// Content of qk_matmul_output: 0 scaled scores, 1 after softcap, 2 after softcap and mask, 3
    /// softmax weights.
    pub fn qk_matmul_output_mode(self, mode: i64) -> Self {
        Self { qk_matmul_output_mode: mode, ..self }
    }

    /// Whether to output qk_matmul_output.
    pub fn qk_matmul_output(self, on: bool) -> Self {
        Self { qk_matmul_output: on, ..self }
    }

    /// Whether to output present_key and present_value without past_key; with past_key they are
    /// always written.
    pub fn present(self, on: bool) -> Self {
        Self { present: on, ..self }
    }

    /// A query at position p attends to no key before p - size; -1: no bound.
    pub fn left_window_size(self, size: i64) -> Self {
        Self { left_window_size: size, ..self }
    }

    /// A query at position p attends to no key after p + size; -1: no bound.
    pub fn right_window_size(self, size: i64) -> Self {
        Self { right_window_size: size, ..self }
    }

    /// The columns of attn_mask broadcast: one column applies to every key, and otherwise fewer
    /// columns than keys are an error, as in operator set 23. From set 24 on, the default, they do
    /// not broadcast: missing columns hide their keys.
    ///
    /// [`run`](Self::run) expands the column. A [`Problem`] of such a call has all columns.
    pub fn broadcast_columns(self, on: bool) -> Self {
        Self { broadcast_columns: on, ..self }
    }

    /// Applies the operator.
    ///
    /// # Errors
    ///
    /// Those of [`problem`](Self::problem), and the back end's.
    pub fn run(
        &self,
        inputs: &AttentionInputs<'_>,
        backend: &dyn Backend,
    ) -> Result<AttentionOutputs> {
        let problem = self.problem(inputs)?;
        let mut outputs = AttentionOutputs::new(&problem)?;
        if problem.is_empty() {
            return Ok(outputs);
        }
        let repeated = inputs.attn_mask.map(|mask| repeated(mask, &problem)).transpose()?.flatten();
        let inputs =
            &AttentionInputs { attn_mask: repeated.as_ref().or(inputs.attn_mask), ..*inputs };
        let seqlens_k = inputs.seqlens_k(&problem);
        let mut no_cache = [Tensor::zeros(DType::F32, &[0]), Tensor::zeros(DType::F32, &[0])];
        run(backend, &problem, &mut outputs.io(inputs, &seqlens_k, &mut no_cache))?;
        Ok(outputs)
    }
}

/// attn_mask with its one column repeated for every key; `None` if it has all columns already.
fn repeated(mask: &Tensor, problem: &Problem) -> Result<Option<Tensor>> {
    let leading = match mask.shape() {
        [leading @ .., columns] if Some(*columns) == problem.bias.map(|bias| bias.columns) => {
            return Ok(None);
        }
        [leading @ .., _] => leading,
        [] => &[],
    };
    let shape = [leading, &[problem.total_len]].concat();
    let mut repeated = Tensor::try_zeros("attn_mask", mask.dtype(), &shape)?;
    let (size, elements) = (mask.dtype().size(), mask.bytes());
    repeated.with_bytes_mut(|bytes| {
        let row = (problem.total_len * size).max(1);
        for (row, element) in bytes.chunks_exact_mut(row).zip(elements.chunks_exact(size)) {
            row.chunks_exact_mut(size).for_each(|to| to.copy_from_slice(element));
        }
    });
    Ok(Some(repeated))
}

/// The operator's inputs under their ONNX names; shapes and lengths are checked when the operator
/// is applied.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// (B, S, N·H) or (B, N, S, H)
    pub q: &'a Tensor,
    /// (B, L, Nk·H) or (B, Nk, L, H), as many dimensions as Q
    pub k: &'a Tensor,
    /// (B, L, Nk·Hv) or (B, Nk, L, Hv), as many dimensions as Q; any floating-point type
    pub v: &'a Tensor,
    /// bool, true where a key is visible, or a bias of Q's type; one to four dimensions that
    /// broadcast to (B, N, S, T), the last T = P + L or less: missing columns hide their keys. With
    /// [`Attention::broadcast_columns`] the last dimension is T or 1, and broadcasts; a scalar is
    /// allowed
    pub attn_mask: Option<&'a Tensor>,
    /// (B, Nk, P, H)
    pub past_key: Option<&'a Tensor>,
    /// (B, Nk, P, Hv)
    pub past_value: Option<&'a Tensor>,
    /// int64 (B): number of valid rows of K and V, which are a whole cache in such a call
    pub nonpad_kv_seqlen: Option<&'a Tensor>,
}

impl<'a> AttentionInputs<'a> {
    /// The required inputs; set the optional ones as fields.
    pub fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Self {
        Self { q, k, v, attn_mask: None, past_key: None, past_value: None, nonpad_kv_seqlen: None }
    }

    /// The tensor seqlens_k of back ends: int32 (B), the index of each sequence's last valid key,
    /// -1 for an empty one.
    pub fn seqlens_k(&self, problem: &Problem) -> Tensor {
        let last = match self.nonpad_kv_seqlen {
            Some(Tensor::I64(lengths)) => lengths.iter().map(|&n| n as i32 - 1).collect(),
            _ => vec![problem.total_len as i32 - 1; problem.batch],
        };
        ndarray::Array1::from(last).into()
    }
}

/// The operator's outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutputs {
    /// (B, S, N·Hv) or (B, N, S, Hv), as Q
    pub y: Tensor,
    /// (B, Nk, T, H) where past_key is given or [`Attention::present`] asks for it
    pub present_key: Option<Tensor>,
    /// (B, Nk, T, Hv), likewise
    pub present_value: Option<Tensor>,
    /// (B, N, S, T) where asked for
    pub qk_matmul_output: Option<Tensor>,
}

impl AttentionOutputs {
    /// Allocates the outputs of `problem`.
    ///
    /// # Errors
    ///
    /// Where memory does not suffice.
    pub fn new(problem: &Problem) -> Result<Self> {
        let p = problem;
        let (key, value) = (p.key_cache_shape(p.capacity), p.value_cache_shape(p.capacity));
        let key = || Tensor::try_zeros("present_key", p.dtype, &key);
        let value = || Tensor::try_zeros("present_value", p.v_dtype, &value);
        let scores = || Tensor::try_zeros("qk_matmul_output", p.dtype, &p.scores_shape());
        Ok(Self {
            y: Tensor::try_zeros("Y", p.dtype, &p.output_shape())?,
            present_key: p.has_present().then(key).transpose()?,
            present_value: p.has_present().then(value).transpose()?,
            qk_matmul_output: (p.output_qk != QkOutput::None).then(scores).transpose()?,
        })
    }

    /// The call's tensors: these outputs, those inputs, [`AttentionInputs::seqlens_k`], and
    /// temporary present tensors if the call outputs none.
    pub fn io<'a>(
        &'a mut self,
        inputs: &AttentionInputs<'a>,
        seqlens_k: &'a Tensor,
        [no_key, no_value]: &'a mut [Tensor; 2],
    ) -> Io<'a> {
        Io {
            inputs: Tensors::default()
                .with(TensorId::Query, inputs.q)
                .with(TensorId::Key, inputs.k)
                .with(TensorId::Value, inputs.v)
                .with(TensorId::PastKey, inputs.past_key)
                .with(TensorId::PastValue, inputs.past_value)
                .with(TensorId::SeqlensK, seqlens_k)
                .with(TensorId::AttentionBias, inputs.attn_mask),
            output: &mut self.y,
            present_key: self.present_key.as_mut().unwrap_or(no_key),
            present_value: self.present_value.as_mut().unwrap_or(no_value),
            row_scales: None,
            output_qk: self.qk_matmul_output.as_mut(),
            lse: None,
        }
    }
}
