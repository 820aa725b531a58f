//! From attributes and inputs to a [`Problem`].

mod inputs;
mod pattern;
mod quantization;
mod sliding;

use super::{GroupQueryAttention, Inputs, KvCache, Shapes};
use gqa_plan::contents;
use gqa_plan::limits::{addressable, check_rows, shape};
use gqa_plan::{CacheBinding, Phase, Problem, ProblemFields, QkNorm, QkOutput, Rotary, Sink};
use gqa_tensor::{DType, Error, Result, Tensor};
pub(super) use inputs::both;
use inputs::{Heads, Query};
pub(super) use pattern::{Dim, Pattern, head_count};
use quantization::quantization;
pub(super) use quantization::{
    check_owner, check_row_scales, check_scales, check_types, row_scales,
};

impl GroupQueryAttention {
    /// Checks the call. With [`CacheBinding::Shared`], past_key and past_value are the shared
    /// cache.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] names the input or attribute that is not allowed, what was got and what
    /// is allowed.
    pub fn problem(&self, inputs: &Inputs<'_>, cache: CacheBinding) -> Result<Problem> {
        let total = total_sequence_length(inputs.total_sequence_length)?;
        let problem = self.problem_from_shapes(&Shapes::of(inputs, total), cache)?;
        contents::check(&problem, &inputs.tensors().views())?;
        Ok(problem)
    }

    /// Checks a call whose past and present are `cache`; past_key and past_value must be absent.
    ///
    /// # Errors
    ///
    /// As [`problem`](Self::problem).
    pub fn problem_in_place(&self, inputs: &Inputs<'_>, cache: &KvCache) -> Result<Problem> {
        for (argument, past) in [("past_key", inputs.past_key), ("past_value", inputs.past_value)] {
            if let Some(past) = past {
                return Err(Error::invalid(
                    argument,
                    shape(past.shape()),
                    "no input: the cache given is the past",
                ));
            }
        }
        let given = [inputs.k_scale, inputs.v_scale];
        check_owner(self.k_quant_type, given, cache.scales.as_ref())?;
        let [k_scale, v_scale] = row_scales(cache.scales.as_ref());
        let inputs = Inputs {
            past_key: Some(&cache.key),
            past_value: Some(&cache.value),
            k_scale: inputs.k_scale.or(k_scale),
            v_scale: inputs.v_scale.or(v_scale),
            ..*inputs
        };
        self.problem(&inputs, CacheBinding::Shared)
    }

    /// Checks types and shapes. The contents of seqlens_k and position_ids are not checked: kernels
    /// stay within their tensors for any values.
    ///
    /// # Errors
    ///
    /// As [`problem`](Self::problem), except for contents.
    pub fn problem_from_shapes(&self, inputs: &Shapes<'_>, cache: CacheBinding) -> Result<Problem> {
        if cache == CacheBinding::External {
            let allowed = "a cache, shared or separate; only ONNX Attention has external ones";
            return Err(Error::invalid("past_key", "an external cache", allowed));
        }
        let heads = self.heads()?;
        self.check_numbers()?;
        let query = Query::of(inputs, heads, self.layout)?;
        let quantized = quantization(self, inputs, (query.kv_heads(), query.head_size), cache)?;
        let rows = Rows {
            query: query.rows,
            total: inputs.total_sequence_length,
            new: query.new_rows(inputs)?,
            past: query.past_rows(inputs, quantized, cache)?,
        };
        query.check_seqlens_k(inputs)?;
        let padded = self.check_query_seqlens(inputs, &query, rows)?;
        query.check_row_scales(inputs, quantized, rows.past)?;
        self.check_sliding(inputs, quantized, rows)?;
        let capacity = self.present_rows(rows, cache, padded)?;
        self.check_sizes(&query, rows, capacity)?;
        Problem::new(ProblemFields {
            out_dtype: self.output_type(inputs, query.dtype)?,
            batch: query.batch,
            q_heads: heads.query,
            kv_heads: heads.kv,
            head_size: query.head_size,
            v_head_size: query.head_size,
            q_len: query.rows,
            new_len: rows.new,
            total_len: rows.total,
            past_capacity: rows.past,
            capacity,
            phase: if padded { Phase::PaddedChunk } else { phase(query.rows, rows.total) },
            cache,
            slides: self.sliding_window_cache,
            quantized,
            packed: query.packed,
            layout: self.layout,
            qk_norm: query.qk_norm(inputs, self.epsilons())?,
            rotary: self.rotary(inputs, &query)?,
            scale: scale(Some(self.scale).filter(|&scale| scale != 0.0), query.head_size),
            softcap: (self.softcap > 0.0).then_some(self.softcap),
            window: self.window(capacity.max(rows.total)),
            causal: self.causal == 1,
            sink: sink(query.head_sink(inputs)?, self.smooth_softmax),
            bias: query.bias(inputs)?,
            output_qk: self.output_qk()?,
            lse: self.lse,
            prefetch_cache: self.prefetch_cache,
            float8_products: self.float8_products,
            ..ProblemFields::plain("GroupQueryAttention", query.dtype)
        })
    }

    /// Whether the call has query_seqlens; checks its type and shape, and the inputs that it
    /// requires.
    fn check_query_seqlens(&self, inputs: &Shapes<'_>, query: &Query, rows: Rows) -> Result<bool> {
        const NAME: &str = "query_seqlens";
        let Some(given) = inputs.query_seqlens else { return Ok(false) };
        let dims = [Dim::Is("batch_size", query.batch)];
        Pattern { argument: NAME, dtype: DType::I32, why: "", dims: &dims }.check(given)?;
        let refuse = |argument, got: String, allowed: String| {
            Err(Error::invalid(argument, got, format!("{allowed}, as {NAME} is given")))
        };
        if self.causal != 1 {
            return refuse("causal", self.causal.to_string(), "1".to_owned());
        }
        if inputs.past_key.is_none() {
            return refuse("past_key", "no input".to_owned(), "a tensor".to_owned());
        }
        if rows.new != rows.query {
            let got = format!("kv_sequence_length = {}", rows.new);
            return refuse("key", got, format!("sequence_length = {}", rows.query));
        }
        Ok(true)
    }

    /// Errs where the rows or elements of a tensor of the call exceed the kernels' limits.
    fn check_sizes(&self, query: &Query, rows: Rows, capacity: usize) -> Result<()> {
        const TOTAL: &str = "total_sequence_length";
        let (batch, heads, kv_heads) = (query.batch, query.heads(), query.kv_heads());
        check_rows("query", &[batch, heads, rows.query])?;
        check_rows(TOTAL, &[batch, kv_heads, capacity])?;
        addressable(TOTAL, &[batch, kv_heads, capacity, query.head_size])?;
        if i32::try_from(rows.total).is_err() {
            let allowed = format!("up to {}, as seqlens_k is int32", i32::MAX);
            return Err(Error::invalid(TOTAL, rows.total, allowed));
        }
        let of_scores = if self.qk_output == 0 { TOTAL } else { "qk_output" };
        addressable(of_scores, &[batch, heads, rows.query, rows.total])
    }

    /// Type of output: float8e4m3fn with output_scale.
    fn output_type(&self, inputs: &Shapes<'_>, dtype: DType) -> Result<DType> {
        let Some(scale) = inputs.output_scale else {
            return Ok(if self.float32_output { DType::F32 } else { dtype });
        };
        let got = format!("{} {}", scale.dtype, shape(scale.shape));
        if scale.dtype != DType::F32 || scale.shape.iter().any(|&size| size != 1) {
            return Err(Error::invalid("output_scale", got, "float32, one element"));
        }
        if self.float32_output {
            return Err(Error::invalid("output_scale", got, "no input, with float32_output"));
        }
        Ok(DType::F8E4M3)
    }

    fn heads(&self) -> Result<Heads> {
        let heads = Heads {
            query: head_count("num_heads", self.num_heads)?,
            kv: head_count("kv_num_heads", self.kv_num_heads)?,
        };
        if heads.query % heads.kv != 0 {
            return Err(Error::invalid(
                "num_heads",
                heads.query,
                format!("a multiple of kv_num_heads = {}", heads.kv),
            ));
        }
        Ok(heads)
    }

    /// The epsilons of QK-norm.
    fn epsilons(&self) -> QkNorm {
        let epsilon = |own: Option<f32>| own.unwrap_or(self.qk_norm_epsilon);
        QkNorm { q_epsilon: epsilon(self.q_norm_epsilon), k_epsilon: epsilon(self.k_norm_epsilon) }
    }

    /// Checks of single attributes.
    fn check_numbers(&self) -> Result<()> {
        check_factors(self.scale, self.softcap)?;
        check_epsilon("qk_norm_epsilon", self.qk_norm_epsilon)?;
        check_epsilon("q_norm_epsilon", self.epsilons().q_epsilon)?;
        check_epsilon("k_norm_epsilon", self.epsilons().k_epsilon)?;
        if !(0..=1).contains(&self.causal) {
            return Err(Error::invalid("causal", self.causal, "0 or 1"));
        }
        match (self.local_window_size, self.causal) {
            (0, _) => Err(Error::invalid("local_window_size", 0, "1 or more, or -1 for no window")),
            (1.., 0) => {
                let got = format!("{} with causal = 0", self.local_window_size);
                Err(Error::invalid("local_window_size", got, "-1, or causal = 1"))
            }
            _ => self.output_qk().map(drop),
        }
    }

    fn output_qk(&self) -> Result<QkOutput> {
        match self.qk_output {
            0 => Ok(QkOutput::None),
            1 => Ok(QkOutput::BeforeSoftmax),
            2 => Ok(QkOutput::AfterSoftmax),
            other => Err(Error::invalid("qk_output", other, "0, 1 or 2")),
        }
    }

    /// The window; `None` if it is at least as long as every sequence.
    fn window(&self, longest: usize) -> Option<usize> {
        usize::try_from(self.local_window_size).ok().filter(|&window| window < longest)
    }

    /// Rows of present_key and present_value: of a rolling KV cache, of a past plus new rows, or of
    /// a past that is long enough already. The longest of `padded` chunks may be any.
    fn present_rows(&self, rows: Rows, cache: CacheBinding, padded: bool) -> Result<usize> {
        let Rows { query, total, new, past } = rows;
        let grown = past.saturating_add(new);
        let allowed = match cache {
            _ if total < query && !(padded && self.sliding_window_cache) => {
                format!("{query} or more, the rows of query")
            }
            _ if total <= past || self.sliding_window_cache => return Ok(past),
            CacheBinding::Separate if total == grown || padded => return Ok(total),
            CacheBinding::Separate if past == 0 => format!("{new}, as there is no past"),
            CacheBinding::Separate if new > 0 => {
                format!("{grown} (past_key and the new rows), or up to {past} (past_key)")
            }
            _ => format!("up to {past}, the rows of past_key"),
        };
        Err(Error::invalid("total_sequence_length", total, allowed))
    }

    fn rotary(&self, inputs: &Shapes<'_>, query: &Query) -> Result<Option<Rotary>> {
        let caches = query.rotary_caches(inputs)?;
        let explicit = query.position_ids(inputs)?;
        match caches {
            _ if !self.do_rotary => Ok(None),
            None => Err(Error::invalid(
                "cos_cache",
                "no input",
                "cos_cache and sin_cache, which do_rotary = 1 needs",
            )),
            Some((max_positions, half)) => Ok(Some(Rotary {
                dim: 2 * half,
                offset: 0,
                interleaved: self.rotary_interleaved,
                max_positions,
                explicit,
            })),
        }
    }
}

/// The scale of q·k: 1/sqrt(head_size) by default.
pub(super) fn scale(given: Option<f32>, head_size: usize) -> f64 {
    given.map_or_else(|| (head_size as f64).sqrt().recip(), f64::from)
}

/// Errs where scores would not be finite.
pub(super) fn check_factors(scale: f32, softcap: f32) -> Result<()> {
    for (argument, number) in [("scale", scale), ("softcap", softcap)] {
        if !number.is_finite() {
            return Err(Error::invalid(argument, number, "a finite number"));
        }
    }
    Ok(())
}

/// Errs where norms would not be finite.
pub(super) fn check_epsilon(argument: &'static str, epsilon: f32) -> Result<()> {
    match epsilon.is_finite() && epsilon > 0.0 {
        true => Ok(()),
        false => Err(Error::invalid(argument, epsilon, "a finite number greater than 0")),
    }
}

/// The phase of the call, which these two lengths determine.
fn phase(rows: usize, total: usize) -> Phase {
    match rows {
        _ if rows == total => Phase::FirstPrompt,
        1 => Phase::TokenGeneration,
        _ => Phase::SubsequentPrompt,
    }
}

/// Bounds on total_sequence_length.
#[derive(Clone, Copy)]
struct Rows {
    query: usize,
    total: usize,
    new: usize,
    past: usize,
}

/// The value of total_sequence_length.
fn total_sequence_length(tensor: &Tensor) -> Result<usize> {
    const ARGUMENT: &str = "total_sequence_length";
    match *contents::integers(ARGUMENT, tensor.view())? {
        [total] if total >= 0 => Ok(total as usize),
        [total] => Err(Error::invalid(ARGUMENT, total, "0 or more")),
        _ => Err(Error::invalid(ARGUMENT, shape(tensor.shape()), "one element")),
    }
}

/// The sink: head_sink takes precedence over smooth_softmax.
fn sink(head_sink: bool, smooth_softmax: bool) -> Sink {
    match (head_sink, smooth_softmax) {
        (true, _) => Sink::PerHead,
        (false, true) => Sink::Zero,
        (false, false) => Sink::None,
    }
}
