//! What attributes, cache and scales say about quantized values, and whether they agree.

use super::inputs::Heads;
use super::pattern::shape;
use crate::op::{GroupQueryAttention, QuantType, Shapes};
use crate::{DType, Error, QuantFormat, Quantization, Result, TensorDesc};

/// How the call's cache is quantized, if it is.
pub(super) fn quantization(
    op: &GroupQueryAttention,
    inputs: &Shapes<'_>,
    heads: Heads,
    head_size: usize,
) -> Result<Option<Quantization>> {
    let (how, bits) = (op.k_quant_type, op.kv_cache_bit_width);
    if !matches!(bits, 0 | 4 | 8) {
        return Err(Error::invalid("kv_cache_bit_width", bits, "0, 4 or 8"));
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
    let count = scales.count(heads.kv, head_size);
    check_scales(how, count, [inputs.k_scale, inputs.v_scale])?;
    Ok(Some(Quantization { format: format(inputs.past_key, bits)?, scales }))
}

/// Errs unless keys and values are quantized alike.
pub(in crate::op) fn check_types(k_quant_type: QuantType, v_quant_type: QuantType) -> Result<()> {
    if v_quant_type == k_quant_type {
        return Ok(());
    }
    Err(Error::invalid("v_quant_type", v_quant_type, format!("{k_quant_type}, as k_quant_type")))
}

/// Errs unless k_scale and v_scale have `count` elements, as many as `how` says.
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
