//! `com.microsoft.PagedAttention`: concatenated sequences of different lengths (varlen), and a
//! paged KV cache with a block table.

mod inputs;
mod quantization;
mod validate;

pub use inputs::{PagedCache, PagedInputs, PagedShapes};

use super::QuantType;
use super::validate::check_owner;
use crate::backend::{Backend, Io, run};
use gqa_plan::Problem;
pub use gqa_plan::contents::Bounds;
use gqa_plan::contents::{self, PagedLengths};
use gqa_plan::limits::shape;
use gqa_plan::plan::{TensorId, Tensors};
use gqa_tensor::{DType, Error, Result, Tensor};

/// The operator's attributes, with ONNX Runtime's defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct PagedAttention {
    num_heads: i64,
    kv_num_heads: i64,
    scale: f32,
    softcap: f32,
    local_window_size: i64,
    is_causal: i64,
    do_rotary: bool,
    rotary_interleaved: bool,
    qk_norm_epsilon: f32,
    k_quant_type: QuantType,
    v_quant_type: QuantType,
    k_cache_dtype: String,
    v_cache_dtype: String,
    kv_cache_layout: String,
    v_head_size: i64,
    rotary_offset: i64,
    lse: bool,
}

/// The layout of a cache with separate tensors of keys and values.
const SEPARATE: &str = "SEPARATE";
/// The layout of a cache with one tensor, for multi-head latent attention.
const LATENT: &str = "LATENT";

/// The operator's outputs.
#[derive(Clone, Debug)]
pub struct PagedOutputs {
    /// (num_tokens, N·H), or N · v_head_size in the latent layout.
    pub output: Tensor,
    /// float32 (N, num_tokens) where asked for.
    pub lse: Option<Tensor>,
}

impl PagedAttention {
    /// `num_heads` query heads over `kv_num_heads` KV heads.
    pub fn new(num_heads: i64, kv_num_heads: i64) -> Self {
        Self {
            num_heads,
            kv_num_heads,
            scale: 0.0,
            softcap: 0.0,
            local_window_size: -1,
            is_causal: 1,
            do_rotary: false,
            rotary_interleaved: false,
            qk_norm_epsilon: 1e-6,
            k_quant_type: QuantType::None,
            v_quant_type: QuantType::None,
            k_cache_dtype: String::new(),
            v_cache_dtype: String::new(),
            kv_cache_layout: SEPARATE.to_owned(),
            v_head_size: 0,
            rotary_offset: 0,
            lse: false,
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

    /// A query attends to the newest `size` keys up to its own, and to later ones if the call is
    /// not causal; negative: no window.
    pub fn local_window_size(self, size: i64) -> Self {
        Self { local_window_size: size, ..self }
    }

    /// 1: a query attends to no later key. 0: to all keys of its sequence.
    pub fn is_causal(self, is_causal: i64) -> Self {
        Self { is_causal, ..self }
    }

    /// Rotate query and key by cos_cache and sin_cache.
    pub fn do_rotary(self, on: bool) -> Self {
        Self { do_rotary: on, ..self }
    }

    /// Rotate pairs (2i, 2i+1) instead of (i, i + rotary_dim/2).
    pub fn rotary_interleaved(self, on: bool) -> Self {
        Self { rotary_interleaved: on, ..self }
    }

    /// The epsilon of QK-norm, added to the mean of squares; greater than 0.
    pub fn qk_norm_epsilon(self, epsilon: f32) -> Self {
        Self { qk_norm_epsilon: epsilon, ..self }
    }

    /// The quantization of key_cache; equal to v_quant_type. Requires k_scale and v_scale; the
    /// caches' type determines the format.
    pub fn k_quant_type(self, how: QuantType) -> Self {
        Self { k_quant_type: how, ..self }
    }

    /// The quantization of value_cache; equal to k_quant_type.
    pub fn v_quant_type(self, how: QuantType) -> Self {
        Self { v_quant_type: how, ..self }
    }

    /// The format of key_cache: `"int4"` or `"float4e2m1"` where it is uint8, two quantized values
    /// to a byte; else the name of its type, or `""`.
    pub fn k_cache_dtype(self, name: &str) -> Self {
        Self { k_cache_dtype: name.to_owned(), ..self }
    }

    /// The format of value_cache, likewise.
    pub fn v_cache_dtype(self, name: &str) -> Self {
        Self { v_cache_dtype: name.to_owned(), ..self }
    }

    /// `"SEPARATE"`, or `"LATENT"`: multi-head latent attention, where key_cache is the only cache,
    /// the leading v_head_size elements of its rows are the values, and there is one KV head.
    pub fn kv_cache_layout(self, name: &str) -> Self {
        Self { kv_cache_layout: name.to_owned(), ..self }
    }

    /// The head size of values and output in the latent layout, a multiple of 8; 0: head_size. If
    /// the two differ, scale must be given.
    pub fn v_head_size(self, size: i64) -> Self {
        Self { v_head_size: size, ..self }
    }

    /// The first element of each head that rotates, a multiple of 8.
    pub fn rotary_offset(self, offset: i64) -> Self {
        Self { rotary_offset: offset, ..self }
    }

    pub(super) fn is_latent(&self) -> bool {
        self.kv_cache_layout == LATENT
    }

    /// Also return the logarithm of each softmax denominator (beyond ONNX).
    pub fn log_sum_exp(self, on: bool) -> Self {
        Self { lse: on, ..self }
    }

    /// Applies the operator: writes the tokens' keys and values into their blocks of `cache`; then
    /// every token attends to its sequence's blocks.
    ///
    /// # Errors
    ///
    /// Those of [`problem`](Self::problem), and the back end's. After an error, the cache may
    /// already have the new rows.
    pub fn run(
        &self,
        inputs: &PagedInputs<'_>,
        cache: &mut PagedCache,
        backend: &dyn Backend,
    ) -> Result<PagedOutputs> {
        let problem = self.problem(inputs, cache)?;
        let mut output = Tensor::try_zeros("output", problem.dtype, &problem.output_shape())?;
        let lse = || Tensor::try_zeros("lse", DType::F32, &problem.lse_shape());
        let mut lse = problem.lse.then(lse).transpose()?;
        let mut nothing = Tensor::zeros(problem.dtype, &[0]);
        run(
            backend,
            &problem,
            &mut Io {
                inputs: inputs.tensors(),
                output: &mut output,
                present_key: &mut cache.key,
                present_value: cache.value.as_mut().unwrap_or(&mut nothing),
                row_scales: cache.scales.as_mut().map(|scales| scales.each_mut()),
                output_qk: None,
                lse: lse.as_mut(),
            },
        )?;
        Ok(PagedOutputs { output, lse })
    }

    /// Checks the call, including the contents of its tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gqa_tensor::Error::Invalid) names the input or attribute,
    /// what was got and what is allowed.
    pub fn problem(&self, inputs: &PagedInputs<'_>, cache: &PagedCache) -> Result<Problem> {
        let given = [inputs.k_scale, inputs.v_scale];
        check_owner(self.k_quant_type, given, cache.scales.as_ref())?;
        let (tokens, tensors) = (inputs.query.shape().first().copied(), inputs.tensors().views());
        let lengths = PagedLengths::of(&tensors, tokens.unwrap_or_default())?;
        let shapes = PagedShapes::of(inputs, cache, lengths.bounds());
        let problem = self.problem_from_shapes(&shapes)?;
        inputs
            .attention_metadata
            .map_or(Ok(()), |metadata| check_metadata(lengths.bounds(), metadata))?;
        contents::check(&problem, &tensors)?;
        Ok(problem)
    }
}

impl<'a> PagedInputs<'a> {
    /// By role.
    fn tensors(&self) -> Tensors<&'a Tensor> {
        Tensors::default()
            .with(TensorId::Query, self.query)
            .with(TensorId::Key, self.key)
            .with(TensorId::Value, self.value)
            .with(TensorId::SeqlensK, self.past_seqlens)
            .with(TensorId::CosCache, self.cos_cache)
            .with(TensorId::SinCache, self.sin_cache)
            .with(TensorId::HeadSink, self.head_sink)
            .with(TensorId::KScale, self.k_scale)
            .with(TensorId::VScale, self.v_scale)
            .with(TensorId::QNormWeight, self.q_norm_weight)
            .with(TensorId::KNormWeight, self.k_norm_weight)
            .with(TensorId::CumulativeSequenceLength, self.cumulative_sequence_length)
            .with(TensorId::BlockTable, self.block_table)
            .with(TensorId::SlotMapping, self.slot_mapping)
    }
}

/// Errs unless attention_metadata bounds the actual lengths.
fn check_metadata(most: Bounds, metadata: &Tensor) -> Result<()> {
    const NAME: &str = "attention_metadata";
    let bounds = contents::integers(NAME, metadata.view())?;
    if metadata.shape().len() != 1 || !(2..=3).contains(&bounds.len()) {
        return Err(Error::invalid(NAME, shape(metadata.shape()), "(2) or (3)"));
    }
    let Bounds { query_rows, keys } = most;
    for (&bound, most) in bounds.iter().zip([query_rows, keys]) {
        if !usize::try_from(bound).is_ok_and(|bound| bound == 0 || bound >= most) {
            let allowed = format!(
                "0, or at least {query_rows} and {keys}, the largest number of new tokens and the \
                 longest sequence"
            );
            return Err(Error::invalid(NAME, format!("{bounds:?}"), allowed));
        }
    }
    match bounds.get(2) {
        Some(&least) if !usize::try_from(least).is_ok_and(|least| least <= keys) => {
            let allowed =
                format!("0, or up to {keys}, the longest sequence, as the least it may have");
            Err(Error::invalid(NAME, format!("{bounds:?}"), allowed))
        }
        _ => Ok(()),
    }
}
