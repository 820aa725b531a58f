//! Tensors of rows of heads, wherever their elements are.

use crate::error::invalid;
use candle::{DType, Layout, Result, Tensor};
use gqa_host::RowStrides;

/// The tensor itself where kernels can read it: the elements of a head are contiguous, and heads,
/// rows and batch entries are multiples of 16 bytes apart, on a GPU from its memory's start too.
/// Otherwise a contiguous copy.
pub(crate) fn readable(tensor: &Tensor) -> Result<Tensor> {
    let layout = tensor.layout();
    let (dims, strides, size) = (layout.dims(), layout.stride(), tensor.dtype().size_in_bytes());
    let moves = |i: &usize| dims[*i] > 1;
    let aligned = |i: usize| (strides[i] * size).is_multiple_of(16);
    let Some(last) = dims.len().checked_sub(1) else { return Ok(tensor.clone()) };
    let in_place = strides[last] == 1 || dims[last] == 1;
    let begins = tensor.device().is_cpu() || (layout.start_offset() * size).is_multiple_of(16);
    match in_place && begins && (0..last).filter(moves).all(aligned) {
        true => Ok(tensor.clone()),
        false => tensor.force_contiguous(),
    }
}

/// The tensor itself where it is contiguous and kernels can read it; otherwise such a copy.
pub(crate) fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    readable(&tensor.contiguous()?)
}

/// Strides of a tensor of shape (batch, rows, heads, size); `None` where it is contiguous.
pub(crate) fn strides(layout: &Layout) -> Option<RowStrides> {
    if layout.is_contiguous() {
        return None;
    }
    let (dims, strides) = (layout.dims(), layout.stride());
    // Where there is one only, its distance to the next means nothing.
    let stride = |i: usize| if dims[i] > 1 { strides[i] } else { 0 };
    Some(RowStrides { batch: stride(0), row: stride(1), head: stride(2) })
}

/// Errs unless the tensor has that shape, which is described so.
pub(crate) fn check_shape(
    argument: &'static str,
    tensor: &Tensor,
    shape: &[usize],
    described: &str,
) -> Result<()> {
    match tensor.dims() == shape {
        true => Ok(()),
        false => {
            let allowed = format!("{shape:?}, {described}");
            Err(invalid(argument, format!("{:?}", tensor.dims()), allowed))
        }
    }
}

/// Errs unless the tensor has that element type.
pub(crate) fn check_type(argument: &'static str, tensor: &Tensor, dtype: DType) -> Result<()> {
    match tensor.dtype() == dtype {
        true => Ok(()),
        false => Err(invalid(argument, format!("{:?}", tensor.dtype()), format!("{dtype:?}"))),
    }
}
