//! `com.microsoft.GroupQueryAttention`.

use super::Inputs;
use crate::backend::{Backend, Io, run};
use gqa_plan::{CacheBinding, Layout, Problem, QkOutput, Scales};
use gqa_tensor::{DType, Result, Tensor};

/// How a cache is quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QuantType {
    /// Not quantized.
    #[default]
    None,
    /// One scale for the cache.
    PerTensor,
    /// One scale per KV head (beyond ONNX).
    PerHead,
    /// One scale per channel of each KV head.
    PerChannel,
    /// One scale per token and KV head, as part of a shared cache (beyond ONNX).
    PerToken,
}

impl QuantType {
    pub(crate) fn scales(self) -> Option<Scales> {
        match self {
            Self::None => None,
            Self::PerTensor => Some(Scales::PerTensor),
            Self::PerHead => Some(Scales::PerHead),
            Self::PerChannel => Some(Scales::PerChannel),
            Self::PerToken => Some(Scales::PerToken),
        }
    }
}

impl From<Option<Scales>> for QuantType {
    fn from(scales: Option<Scales>) -> Self {
        match scales {
            None => Self::None,
            Some(Scales::PerTensor) => Self::PerTensor,
            Some(Scales::PerHead) => Self::PerHead,
            Some(Scales::PerChannel) => Self::PerChannel,
            Some(Scales::PerToken) => Self::PerToken,
        }
    }
}

impl std::fmt::Display for QuantType {
    /// ONNX's name, or a similar one.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "NONE",
            Self::PerTensor => "PER_TENSOR",
            Self::PerHead => "PER_HEAD",
            Self::PerChannel => "PER_CHANNEL",
            Self::PerToken => "PER_TOKEN",
        })
    }
}

/// The operator's attributes, with ONNX's defaults.
///
/// ```
/// use gqa_host::op::GroupQueryAttention;
/// let llama3_8b = GroupQueryAttention::new(32, 8).do_rotary(true);
/// # let _ = llama3_8b;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct GroupQueryAttention {
    pub(crate) num_heads: i64,
    pub(crate) kv_num_heads: i64,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) local_window_size: i64,
    pub(crate) sliding_window_cache: bool,
    pub(crate) causal: i64,
    pub(crate) do_rotary: bool,
    pub(crate) rotary_interleaved: bool,
    pub(crate) smooth_softmax: bool,
    pub(crate) qk_output: i64,
    pub(crate) qk_norm_epsilon: f32,
    pub(crate) q_norm_epsilon: Option<f32>,
    pub(crate) k_norm_epsilon: Option<f32>,
    pub(crate) k_quant_type: QuantType,
    pub(crate) v_quant_type: QuantType,
    pub(crate) kv_cache_bit_width: i64,
    pub(crate) float4_cache: bool,
    pub(crate) layout: Layout,
    pub(crate) lse: bool,
    pub(crate) prefetch_cache: bool,
    pub(crate) float32_output: bool,
    pub(crate) float8_products: bool,
}

impl GroupQueryAttention {
    /// `num_heads` query heads over `kv_num_heads` KV heads. Checked, with everything else, when
    /// the operator is applied.
    pub fn new(num_heads: i64, kv_num_heads: i64) -> Self {
        Self {
            num_heads,
            kv_num_heads,
            scale: 0.0,
            softcap: 0.0,
            local_window_size: -1,
            sliding_window_cache: false,
            causal: 1,
            do_rotary: false,
            rotary_interleaved: false,
            smooth_softmax: false,
            qk_output: 0,
            qk_norm_epsilon: 1e-6,
            q_norm_epsilon: None,
            k_norm_epsilon: None,
            k_quant_type: QuantType::None,
            v_quant_type: QuantType::None,
            kv_cache_bit_width: 0,
            float4_cache: false,
            layout: Layout::Bsnh,
            lse: false,
            prefetch_cache: false,
            float32_output: false,
            float8_products: false,
        }
    }

    /// Factor on q·k; 0 means 1/sqrt(head_size).
    pub fn scale(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// Scores become `softcap · tanh(score / softcap)`; 0 or less: off.
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap, ..self }
    }

    /// A query attends to the newest `size` keys, including its own; negative: no window.
    pub fn local_window_size(self, size: i64) -> Self {
        Self { local_window_size: size, ..self }
    }

    /// A rolling cache, which holds the newest rows of a sequence, at least local_window_size of
    /// them. past_key and past_value have the cache's capacity of C rows, also in a first prompt.
    /// Of a sequence of T rows the cache holds, from its row 0 on, all rows if T <= C, and else the
    /// newest `T - G * ceil((T - C) / G)` rows with `G = C - local_window_size + 1`. Lengths,
    /// positions and attention_bias still count from the sequence's first row. A first prompt must
    /// not be padded.
    pub fn sliding_window_cache(self, on: bool) -> Self {
        Self { sliding_window_cache: on, ..self }
    }

    /// 1: a query attends to no later key. 0: to all valid keys.
    pub fn causal(self, causal: i64) -> Self {
        Self { causal, ..self }
    }

    /// Rotate query and key by cos_cache and sin_cache.
    pub fn do_rotary(self, on: bool) -> Self {
        Self { do_rotary: on, ..self }
    }

    /// Rotate pairs (2i, 2i+1) instead of (i, i + rotary_dim/2).
    pub fn rotary_interleaved(self, on: bool) -> Self {
        Self { rotary_interleaved: on, ..self }
    }

    /// Adds a logit of 0 to every softmax denominator.
    pub fn smooth_softmax(self, on: bool) -> Self {
        Self { smooth_softmax: on, ..self }
    }

    /// output_qk: 0 none, 1 scores before softmax, 2 softmax weights.
    pub fn qk_output(self, mode: i64) -> Self {
        Self { qk_output: mode, ..self }
    }

    /// The epsilon of QK-norm, added to the mean of squares; greater than 0. Used only with
    /// q_norm_weight and k_norm_weight.
    pub fn qk_norm_epsilon(self, epsilon: f32) -> Self {
        Self { qk_norm_epsilon: epsilon, ..self }
    }

    /// The epsilon of query heads, in place of [`qk_norm_epsilon`](Self::qk_norm_epsilon).
    pub fn q_norm_epsilon(self, epsilon: f32) -> Self {
        Self { q_norm_epsilon: Some(epsilon), ..self }
    }

    /// The epsilon of key heads, in place of [`qk_norm_epsilon`](Self::qk_norm_epsilon).
    pub fn k_norm_epsilon(self, epsilon: f32) -> Self {
        Self { k_norm_epsilon: Some(epsilon), ..self }
    }

    /// The quantization of past_key and present_key; equal to v_quant_type. Requires k_scale and
    /// v_scale, and past_key and past_value, whose type determines the format: int8, float8e4m3fn,
    /// or uint8 with two 4-bit values to a byte.
    pub fn k_quant_type(self, how: QuantType) -> Self {
        Self { k_quant_type: how, ..self }
    }

    /// The quantization of past_value and present_value; equal to k_quant_type.
    pub fn v_quant_type(self, how: QuantType) -> Self {
        Self { v_quant_type: how, ..self }
    }

    /// Bits of a quantized value: 8 or 4 where the cache is quantized, else 0.
    pub fn kv_cache_bit_width(self, bits: i64) -> Self {
        Self { kv_cache_bit_width: bits, ..self }
    }

    /// A 4-bit cache holds float4e2m1 instead of integers (beyond ONNX).
    pub fn float4_cache(self, on: bool) -> Self {
        Self { float4_cache: on, ..self }
    }

    /// Order of the dimensions of query, key, value and output (beyond ONNX, which has BSNH only).
    pub fn layout(self, layout: Layout) -> Self {
        Self { layout, ..self }
    }

    /// Also return the logarithm of each softmax denominator (beyond ONNX).
    pub fn log_sum_exp(self, on: bool) -> Self {
        Self { lse: on, ..self }
    }

    /// Output is float32 whatever the inputs' type, for callers that merge parts of a sequence by
    /// their log-sum-exps or continue in float32 (beyond ONNX).
    pub fn float32_output(self, on: bool) -> Self {
        Self { float32_output: on, ..self }
    }

    /// Promises that the preceding kernel in the stream writes no input of the call except query,
    /// key and value, and triggers dependent launches only after its own dependencies have
    /// completed. That is true if the kernel is the layer's QKV projection or another layer's
    /// attention, and the cache was last written in the previous step. `decode` may then read
    /// lengths and cached keys while that kernel still runs (programmatic dependent launch). Other
    /// kernels ignore the promise. If it is broken, results may be wrong. Beyond ONNX.
    pub fn prefetch_cache(self, on: bool) -> Self {
        Self { prefetch_cache: on, ..self }
    }

    /// Allows float8 matrix products over a float8e4m3fn cache, which double the rate of the tensor
    /// cores. Then `hopper_float8` computes prefill from some 8192 keys on, or 4096 at head sizes
    /// over 128. It rounds P and rotated queries, times k_scale and divided by a power of two for
    /// each row, to e4m3, which has four significant bits. Other kernels are not affected. Off by
    /// default. Beyond ONNX.
    pub fn float8_products(self, on: bool) -> Self {
        Self { float8_products: on, ..self }
    }

    /// Applies the operator. present_* are new tensors: past is copied, new rows follow.
    ///
    /// # Errors
    ///
    /// Those of [`problem`](Self::problem), and the back end's.
    pub fn run(&self, inputs: &Inputs<'_>, backend: &dyn Backend) -> Result<Outputs> {
        let problem = self.problem(inputs, CacheBinding::Separate)?;
        let mut outputs = Outputs::new(&problem)?;
        run(backend, &problem, &mut outputs.io(inputs))?;
        Ok(outputs)
    }

    /// Applies the operator with a cache that past and present share: `cache` is read as past_key
    /// and past_value (those inputs must be absent) and the new rows are appended in place. The
    /// outputs' present tensors are empty.
    ///
    /// # Errors
    ///
    /// Those of [`problem_in_place`](Self::problem_in_place), and the back end's. After an error,
    /// the cache may already have the new rows.
    pub fn run_in_place(
        &self,
        inputs: &Inputs<'_>,
        cache: &mut KvCache,
        backend: &dyn Backend,
    ) -> Result<Outputs> {
        let problem = self.problem_in_place(inputs, cache)?;
        let mut outputs = Outputs::without_present(&problem)?;
        let mut io = outputs.io(inputs);
        io.present_key = &mut cache.key;
        io.present_value = &mut cache.value;
        io.row_scales = cache.scales.as_mut().map(|scales| scales.each_mut());
        run(backend, &problem, &mut io)?;
        Ok(outputs)
    }
}

/// A shared KV cache: (B, Nk, capacity, H) each; H/2 for 4-bit values.
#[derive(Clone, Debug, PartialEq)]
pub struct KvCache {
    /// Rotated keys.
    pub key: Tensor,
    /// Values.
    pub value: Tensor,
    /// Per-token k_scale and v_scale, float32 (B, Nk, capacity); the inputs of these names are then
    /// absent.
    pub scales: Option<[Tensor; 2]>,
}

/// The operator's outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// Shape of query without the packed heads; of its type, float32 on request, or float8e4m3fn
    /// with output_scale.
    pub output: Tensor,
    /// (B, Nk, max(P, T), H), or (B, Nk, P, H) with sliding_window_cache; empty where the cache is
    /// shared.
    pub present_key: Tensor,
    /// As present_key.
    pub present_value: Tensor,
    /// (B, N, S, T) where qk_output asks for it.
    pub output_qk: Option<Tensor>,
    /// float32 (B, N, S) where asked for.
    pub lse: Option<Tensor>,
}

impl Outputs {
    /// Allocates the outputs of `problem`.
    ///
    /// # Errors
    ///
    /// Where memory does not suffice.
    pub fn new(problem: &Problem) -> Result<Self> {
        let p = problem;
        let (key, value) = (p.key_cache_shape(p.capacity), p.value_cache_shape(p.capacity));
        Ok(Self {
            present_key: Tensor::try_zeros("present_key", p.key_cache_dtype(), &key)?,
            present_value: Tensor::try_zeros("present_value", p.value_cache_dtype(), &value)?,
            ..Self::without_present(p)?
        })
    }

    fn without_present(p: &Problem) -> Result<Self> {
        let scores = || Tensor::try_zeros("output_qk", p.dtype, &p.scores_shape());
        let lse = || Tensor::try_zeros("lse", DType::F32, &p.lse_shape());
        let empty = Tensor::zeros(p.dtype, &[0]);
        Ok(Self {
            output: Tensor::try_zeros("output", p.out_dtype, &p.output_shape())?,
            present_key: empty.clone(),
            present_value: empty,
            output_qk: (p.output_qk != QkOutput::None).then(scores).transpose()?,
            lse: p.lse.then(lse).transpose()?,
        })
    }

    /// The call's tensors: these outputs and those inputs.
    pub fn io<'a>(&'a mut self, inputs: &Inputs<'a>) -> Io<'a> {
        Io {
            inputs: inputs.tensors(),
            output: &mut self.output,
            present_key: &mut self.present_key,
            present_value: &mut self.present_value,
            row_scales: None,
            output_qk: self.output_qk.as_mut(),
            lse: self.lse.as_mut(),
        }
    }
}
