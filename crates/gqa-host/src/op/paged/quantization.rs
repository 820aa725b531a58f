//! The quantization of PagedAttention's caches, from attributes, types and scales.

use super::{PagedAttention, PagedShapes};
use crate::op::QuantType;
use crate::op::validate::{check_scales, check_types};
use gqa_plan::{Problem, QuantFormat, Quantization};
use gqa_tensor::{DType, Error, Result};

/// The quantization of the call's caches, if any.
pub(super) fn quantization(
    op: &PagedAttention,
    inputs: &PagedShapes<'_>,
    kv_heads: usize,
    head_size: usize,
) -> Result<Option<Quantization>> {
    let (how, key_cache) = (op.k_quant_type, inputs.key_cache.dtype);
    check_types(how, op.v_quant_type)?;
    check_name("k_cache_dtype", &op.k_cache_dtype, "key_cache", key_cache)?;
    check_name("v_cache_dtype", &op.v_cache_dtype, "value_cache", inputs.value_cache.dtype)?;
    let Some(scales) = how.scales() else { return no_scales(inputs).map(|()| None) };
    let format = format(key_cache, how)?;
    if let Some(count) = scales.count(kv_heads, head_size) {
        check_scales(how, count, [inputs.k_scale, inputs.v_scale])?;
    }
    let quantized = Quantization { format, scales };
    let together = Problem::VECTOR_BYTES * quantized.codes_per_element();
    if head_size % together != 0 {
        let allowed =
            format!("a head_size that is a multiple of {together}, 16 bytes of quantized values");
        return Err(Error::invalid("query", format!("head_size {head_size}"), allowed));
    }
    Ok(Some(quantized))
}

/// Checks that the attribute matches the cache's type.
fn check_name(argument: &'static str, name: &str, cache: &'static str, dtype: DType) -> Result<()> {
    let held = if dtype == DType::U8 { "int4".to_owned() } else { dtype.to_string() };
    if name == held || name.is_empty() && dtype != DType::U8 {
        return Ok(());
    }
    Err(Error::invalid(argument, format!("{name:?}"), format!("{held:?}, as {cache} is {dtype}")))
}

fn no_scales(inputs: &PagedShapes<'_>) -> Result<()> {
    let scales = [("k_scale", inputs.k_scale), ("v_scale", inputs.v_scale)];
    match scales.into_iter().find(|(_, scale)| scale.is_some()) {
        None => Ok(()),
        Some((argument, _)) => {
            Err(Error::invalid(argument, "a tensor", "no input, as k_quant_type is NONE"))
        }
    }
}

/// What the key cache's element type says.
fn format(key_cache: DType, how: QuantType) -> Result<QuantFormat> {
    match key_cache {
        DType::I8 => Ok(QuantFormat::Int8),
        DType::F8E4M3 => Ok(QuantFormat::Float8),
        DType::U8 => Ok(QuantFormat::Int4),
        got => {
            let allowed = format!("int8, float8e4m3fn or uint8, as k_quant_type is {how}");
            Err(Error::invalid("key_cache", got, allowed))
        }
    }
}
