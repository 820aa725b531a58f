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
    let Some(value_cache) = inputs.value_cache else { return no_scales(inputs).map(|()| None) };
    check_name("v_cache_dtype", &op.v_cache_dtype, "value_cache", value_cache.dtype)?;
    if key_cache == value_cache.dtype && op.is_float4() != (op.v_cache_dtype == FLOAT4) {
        let (got, key) = (&op.v_cache_dtype, &op.k_cache_dtype);
        let allowed = format!("{key:?}, as k_cache_dtype");
        return Err(Error::invalid("v_cache_dtype", format!("{got:?}"), allowed));
    }
    let Some(scales) = how.scales() else { return no_scales(inputs).map(|()| None) };
    let format = match format(key_cache, how)? {
        QuantFormat::Int4 if op.is_float4() => QuantFormat::Float4,
        format => format,
    };
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

/// The dtype name of 4-bit floats.
const FLOAT4: &str = "float4e2m1";

impl PagedAttention {
    fn is_float4(&self) -> bool {
        self.k_cache_dtype == FLOAT4
    }
}

/// Checks that the attribute matches the cache's type.
fn check_name(argument: &'static str, name: &str, cache: &'static str, dtype: DType) -> Result<()> {
    let (fits, held) = match dtype {
        DType::U8 => (name == "int4" || name == FLOAT4, format!("\"int4\" or {FLOAT4:?}")),
        _ => (name.is_empty() || name == dtype.to_string(), format!("\"{dtype}\"")),
    };
    match fits {
        true => Ok(()),
        false => {
            let allowed = format!("{held}, as {cache} is {dtype}");
            Err(Error::invalid(argument, format!("{name:?}"), allowed))
        }
    }
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

/// The format that the key cache's element type implies.
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
