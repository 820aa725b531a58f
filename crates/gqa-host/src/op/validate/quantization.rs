//! The quantization of the cache, from attributes, types and scales.

use super::pattern::{Dim, Pattern};
use crate::op::{GroupQueryAttention, QuantType, Shapes};
use gqa_plan::limits::shape;
use gqa_plan::{CacheBinding, QuantFormat, Quantization, Scales};
use gqa_tensor::{DType, Error, Result, Tensor, TensorDesc};

/// How the call's cache is quantized, if it is.
pub(super) fn quantization(
    op: &GroupQueryAttention,
    inputs: &Shapes<'_>,
    (kv_heads, head_size): (usize, usize),
    cache: CacheBinding,
) -> Result<Option<Quantization>> {
    let (how, bits) = (op.k_quant_type, op.kv_cache_bit_width);
    if !matches!(bits, 0 | 4 | 8) {
        return Err(Error::invalid("kv_cache_bit_width", bits, "0, 4 or 8"));
    }
    if op.float4_cache && bits != 4 {
        let got = format!("true with kv_cache_bit_width = {bits}");
        return Err(Error::invalid("float4_cache", got, "false, or kv_cache_bit_width = 4"));
    }
    check_types(how, op.v_quant_type)?;
    let scales = match (how.scales(), bits) {
        (None, 0) => return Ok(None),
        (None, _) => {
            let allowed = "0, as k_quant_type is NONE";
            return Err(Error::invalid("kv_cache_bit_width", bits, allowed));
        }
        (_, 0) => {
            let allowed = format!("8 or 4, as k_quant_type is {how}");
            return Err(Error::invalid("kv_cache_bit_width", bits, allowed));
        }
        (Some(scales), _) => scales,
    };
    let given = [inputs.k_scale, inputs.v_scale];
    match scales.count(kv_heads, head_size) {
        Some(count) => check_scales(how, count, given)?,
        None => lie_beside_the_cache(op, cache)?,
    }
    let format = match format(inputs.past_key, bits)? {
        QuantFormat::Int4 if op.float4_cache => QuantFormat::Float4,
        format => format,
    };
    Ok(Some(Quantization { format, scales }))
}

/// Checks that keys and values have the same quantization.
pub(in crate::op) fn check_types(k_quant_type: QuantType, v_quant_type: QuantType) -> Result<()> {
    if v_quant_type == k_quant_type {
        return Ok(());
    }
    Err(Error::invalid("v_quant_type", v_quant_type, format!("{k_quant_type}, as k_quant_type")))
}

/// Checks that a cache with per-token scales is shared by past and present, and does not roll.
fn lie_beside_the_cache(op: &GroupQueryAttention, cache: CacheBinding) -> Result<()> {
    let why = match cache {
        CacheBinding::Shared if op.sliding_window_cache => "sliding_window_cache is 1",
        CacheBinding::Shared => return Ok(()),
        CacheBinding::Separate | CacheBinding::External => "past and present are not one cache",
    };
    let allowed = format!("NONE, PER_TENSOR, PER_HEAD or PER_CHANNEL, as {why}");
    Err(Error::invalid("k_quant_type", op.k_quant_type, allowed))
}

/// Checks that per-token k_scale and v_scale have the cache's dimensions except the last.
pub(in crate::op) fn check_row_scales(
    quantized: Option<Quantization>,
    scales: [Option<TensorDesc<'_>>; 2],
    dims: [Dim; 3],
) -> Result<()> {
    if quantized.is_none_or(|how| how.scales != Scales::PerToken) {
        return Ok(());
    }
    for (argument, scales) in ["k_scale", "v_scale"].into_iter().zip(scales) {
        let Some(scales) = scales else {
            let allowed = format!("{}, as k_quant_type is PER_TOKEN", shape(&dims));
            return Err(Error::invalid(argument, "no input", allowed));
        };
        Pattern { argument, dtype: DType::F32, why: "", dims: &dims }.check(scales)?;
    }
    Ok(())
}

/// Checks that scales come as inputs or with the cache, as the quantization requires.
pub(in crate::op) fn check_owner(
    how: QuantType,
    inputs: [Option<&Tensor>; 2],
    of_cache: Option<&[Tensor; 2]>,
) -> Result<()> {
    let given = ["k_scale", "v_scale"].into_iter().zip(inputs).find(|(_, input)| input.is_some());
    match (how, given, of_cache) {
        (QuantType::PerToken, Some((argument, _)), _) => {
            let allowed = "no input: the cache has its scales where k_quant_type is PER_TOKEN";
            Err(Error::invalid(argument, "a tensor", allowed))
        }
        (QuantType::PerToken, None, _) | (_, _, None) => Ok(()),
        (_, _, Some(_)) => {
            let allowed = format!("none, as k_quant_type is {how}");
            Err(Error::invalid("k_scale", "scales of the cache", allowed))
        }
    }
}

/// k_scale and v_scale of a cache with per-token scales.
pub(in crate::op) fn row_scales(of_cache: Option<&[Tensor; 2]>) -> [Option<&Tensor>; 2] {
    of_cache.map_or([None; 2], |scales| scales.each_ref().map(Some))
}

/// Checks that k_scale and v_scale have `count` elements, as the granularity `how` requires.
pub(in crate::op) fn check_scales(
    how: QuantType,
    count: usize,
    [k_scale, v_scale]: [Option<TensorDesc<'_>>; 2],
) -> Result<()> {
    check_scale("k_scale", k_scale, how, count)?;
    check_scale("v_scale", v_scale, how, count)
}

/// What the cache's element type says.
fn format(past_key: Option<TensorDesc<'_>>, bits: i64) -> Result<QuantFormat> {
    let Some(past_key) = past_key else {
        let allowed = "a tensor, whose type is the format of the quantized KV cache";
        return Err(Error::invalid("past_key", "no input", allowed));
    };
    match (past_key.dtype, bits) {
        (DType::I8, 8) => Ok(QuantFormat::Int8),
        (DType::F8E4M3, 8) => Ok(QuantFormat::Float8),
        (DType::U8, 4) => Ok(QuantFormat::Int4),
        (got, _) => {
            let types = if bits == 8 { "int8 or float8e4m3fn" } else { "uint8" };
            let allowed = format!("{types}, as kv_cache_bit_width is {bits}");
            Err(Error::invalid("past_key", got, allowed))
        }
    }
}

fn check_scale(
    argument: &'static str,
    scale: Option<TensorDesc<'_>>,
    how: QuantType,
    count: usize,
) -> Result<()> {
    let allowed = format!("{count} elements, as k_quant_type is {how}");
    let Some(scale) = scale else { return Err(Error::invalid(argument, "no input", allowed)) };
    if scale.dtype != DType::F32 {
        return Err(Error::invalid(argument, scale.dtype, "float32"));
    }
    match scale.shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n)) {
        Some(elements) if elements == count => Ok(()),
        _ => Err(Error::invalid(argument, shape(scale.shape), allowed)),
    }
}
