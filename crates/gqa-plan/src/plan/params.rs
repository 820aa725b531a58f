//! Arguments of attention kernels: tensors by name, and scalars.

use super::build::{seqlens, strides, tensor, u32_of};
use super::family::Job;
use super::launch::Arg;
use super::requirements;
use super::rows::Rows;
use crate::problem::{Alignment, Bias, Phase, Problem, QkOutput, Rotary, Scales, Sink};
use crate::tensors::TensorId;
use bytemuck::Zeroable;
use gqa_kernels::attention::hopper;
use gqa_kernels::params::{
    AttentionParams, MaskedParams, RotaryParams, Strides, alignment, qk_output, scales, sink,
    vectors,
};
use gqa_kernels::registry::Output;
use gqa_tensor::Result;

/// attention_bias as numbers or as booleans.
pub(super) fn bias_or_mask(p: &Problem) -> [(&'static str, Arg); 2] {
    let bias = tensor(p, TensorId::AttentionBias, 0);
    match p.bias {
        Some(Bias { boolean: true, .. }) => [("bias", Arg::Null), ("mask", bias)],
        _ => [("bias", bias), ("mask", Arg::Null)],
    }
}

/// Output in the element type, in f32, or in e4m3 times a scale.
pub(super) fn output(p: &Problem) -> [(&'static str, Arg); 4] {
    let output =
        |of| if requirements::output(p) == of { tensor(p, TensorId::Output, 0) } else { Arg::Null };
    [
        ("out", output(Output::Element)),
        ("out_f32", output(Output::F32)),
        ("out_f8", output(Output::E4M3)),
        ("out_scale", tensor(p, TensorId::OutputScale, 0)),
    ]
}

/// Everything an attention kernel may ask for.
pub(super) fn arguments(p: &Problem, rows: &Rows) -> Vec<(&'static str, Arg)> {
    let [k, v] = rows.attended;
    let [bias, mask] = bias_or_mask(p);
    let mut arguments = vec![
        ("q", rows.query.arg),
        ("k", k),
        ("v", v),
        bias,
        mask,
        ("head_sink", tensor(p, TensorId::HeadSink, 0)),
        ("tree_mask", tensor(p, TensorId::TreeMask, 0)),
        ("lse", tensor(p, TensorId::Lse, 0)),
        ("output_qk", tensor(p, TensorId::OutputQk, 0)),
    ];
    arguments.extend(seqlens(p));
    arguments.extend(output(p));
    arguments
}

/// Scalars of an attention kernel; `q` are the strides of the queries that it reads.
pub(super) fn params(p: &Problem, q: Strides, splits: u32) -> Result<AttentionParams> {
    // Kernels number the rows of all splits in 32 bits.
    let rows = p.batch.saturating_mul(p.q_heads).saturating_mul(p.q_len);
    u32_of("query rows of all splits", rows.saturating_mul(splits as usize))?;
    Ok(AttentionParams {
        q,
        k: strides(p.keys_read()),
        v: strides(p.values_read()),
        out: strides(p.output_layout()),
        bias: p.bias_layout().map_or_else(Strides::zeroed, strides),
        batch: u32_of("batch", p.batch)?,
        q_heads: u32_of("query heads", p.q_heads)?,
        kv_heads: u32_of("KV heads", p.kv_heads)?,
        head_size: u32_of("head size", p.head_size)?,
        q_len: u32_of("query rows", p.q_len)?,
        capacity: u32_of("present rows", p.capacity)?,
        first_prompt: (p.phase == Phase::FirstPrompt).into(),
        causal: p.causal.into(),
        window: u32_of("window", p.window.unwrap_or(0).min(p.capacity))?,
        sink: match p.sink {
            Sink::None => sink::NONE,
            Sink::Zero => sink::ZERO,
            Sink::PerHead => sink::PER_HEAD,
        },
        qk_output: match p.output_qk {
            QkOutput::None => qk_output::NONE,
            QkOutput::BeforeSoftmax => qk_output::BEFORE_SOFTMAX,
            QkOutput::AfterSoftmax => qk_output::AFTER_SOFTMAX,
            QkOutput::Scaled => qk_output::SCALED,
            QkOutput::Capped => qk_output::CAPPED,
            QkOutput::Biased => qk_output::BIASED,
        },
        qk_columns: u32_of("total_sequence_length", p.total_len)?,
        splits,
        // Kernels that output scores do not scale masked ones.
        scale: if p.output_qk == QkOutput::None { p.least_scale() } else { p.scale as f32 },
        softcap: p.softcap_in_f32(),
        l2_section: 0,
    })
}

/// k_scale and v_scale, whatever they are for.
pub(super) fn scale_tensors(p: &Problem) -> [(&'static str, Arg); 2] {
    let [keys, values] = match p.has_row_scales() {
        true => [TensorId::KRowScale, TensorId::VRowScale],
        false => [TensorId::KScale, TensorId::VScale],
    };
    let values = if p.latent { keys } else { values };
    let [k_scale, v_scale] = [keys, values].map(|id| tensor(p, id, 0));
    [("k_scale", k_scale), ("v_scale", v_scale)]
}

/// The granularity of the cache's scales, if it is quantized.
pub(super) fn scales(p: &Problem) -> u32 {
    match p.quantized.map(|how| how.scales) {
        None | Some(Scales::PerTensor) => scales::PER_TENSOR,
        Some(Scales::PerHead) => scales::PER_HEAD,
        Some(Scales::PerChannel) => scales::PER_CHANNEL,
        Some(Scales::PerToken) => scales::PER_TOKEN,
    }
}

/// What the call's cache holds, if it is quantized: a number of
/// [`Format`](gqa_kernels::num::Format).
pub(super) fn format(p: &Problem) -> u32 {
    p.quantized.map_or(0, |how| how.format as u32)
}

/// The same as [`params`] for a kernel that takes a bias or a mask.
pub(super) fn masked_params(p: &Problem, q: Strides, splits: u32) -> Result<MaskedParams> {
    let bound = |bound: Option<usize>| {
        bound.map_or(u32::MAX, |bound| u32::try_from(bound).unwrap_or(u32::MAX))
    };
    let (alignment, position) = match p.alignment {
        Alignment::Phase => (alignment::PHASE, 0),
        Alignment::Past(past) => (alignment::POSITION, past),
        Alignment::End => (alignment::END, 0),
    };
    let bias_row = p.bias.map_or(1, |bias| bias.row_bytes(p.dtype));
    let whole = |size: usize, flag| if size * p.dtype.size() % 16 == 0 { flag } else { 0 };
    Ok(MaskedParams {
        attention: params(p, q, splits)?,
        v_head_size: value_size(p)?,
        alignment,
        position: u32_of("past rows", position)?,
        left: bound(p.window.map(|window| window.saturating_sub(1))),
        right: if p.causal { 0 } else { bound(p.right_window) },
        columns: bound(p.bias.map(|bias| bias.columns)),
        vectors: whole(p.head_size, vectors::KEYS)
            | whole(p.v_head_size, vectors::VALUES)
            | if bias_row % 4 == 0 { vectors::MASK_WORDS } else { 0 },
        reserved: 0,
    })
}

/// RoPE parameters, if any; `position_stride` is the row stride of position_ids.
pub(super) fn rotary_params(rotary: Option<Rotary>, position_stride: u32) -> Result<RotaryParams> {
    Ok(RotaryParams {
        dim: u32_of("rotary_dim", rotary.map_or(0, |r| r.dim))?,
        interleaved: rotary.is_some_and(|r| r.interleaved).into(),
        max_positions: u32_of("rows of cos_cache", rotary.map_or(0, |r| r.max_positions))?,
        position_stride,
    })
}

/// The first element of a head that rotates.
pub(super) fn rope_offset(rotary: Option<Rotary>) -> Result<u32> {
    u32_of("rotary_offset", rotary.map_or(0, |rotary| rotary.offset))
}

/// The row stride of position_ids; 0 without them.
pub(super) fn position_stride(p: &Problem) -> Result<u32> {
    u32_of("a row of position_ids", p.rotary.and_then(|rotary| rotary.explicit).unwrap_or(0))
}

/// [`params`], with the order of work tiles among CTAs that keeps shared K and V in L2.
pub(super) fn l2_swizzled_params(job: &Job<'_>, splits: u32) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, splits)?;
    let l2_section = l2_section(job, &params)?;
    Ok(AttentionParams { l2_section, ..params })
}

/// [`hopper::l2_section`] by the mean head size of keys and values.
pub(super) fn l2_section(job: &Job<'_>, params: &AttentionParams) -> Result<u32> {
    let head_size = params.head_size.midpoint(value_size(job.problem)?);
    let params = AttentionParams { head_size, ..*params };
    Ok(hopper::l2_section(&params, job.device.l2_bytes, job.device.multiprocessors))
}

/// The head size of values.
pub(super) fn value_size(p: &Problem) -> Result<u32> {
    u32_of("value head size", p.v_head_size)
}
