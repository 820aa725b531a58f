//! Limits on the sizes of calls. They guarantee that no product of sizes overflows, on the host or
//! in a kernel.

use gqa_tensor::{Error, Result};
use std::fmt::Display;

/// Largest number of rows, batch entries or positions, and of rows over all heads and batch
/// entries. Kernels count them in 32 bits, with one bit of headroom for sums.
pub const MAX_COUNT: usize = i32::MAX as usize;

/// Largest number of heads: a grid has that many CTAs in y and z, and 32 bits count their channels.
pub const MAX_HEADS: usize = u16::MAX as usize;

/// Largest head size: heads are counted in 32 bits, with room for rounding up.
pub const MAX_HEAD_SIZE: usize = 1 << 16;

/// Largest number of elements, such that no byte count overflows.
const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<f64>();

/// Errs for shapes larger than any memory. Such a shape can come from a description without a
/// tensor, or from a tensor with a dimension of 0.
///
/// # Errors
/// Names `argument` and its shape.
pub fn addressable(argument: &'static str, dims: &[usize]) -> Result<()> {
    let elements =
        dims.iter().filter(|&&n| n > 0).try_fold(1usize, |product, &n| product.checked_mul(n));
    if dims.iter().all(|&n| n <= MAX_COUNT) && elements.is_some_and(|n| n <= MAX_ELEMENTS) {
        return Ok(());
    }
    let allowed = format!("dimensions up to {MAX_COUNT} and up to {MAX_ELEMENTS} elements");
    Err(Error::invalid(argument, shape(dims), allowed))
}

/// Errs where the product of these outer dimensions exceeds the limit on rows.
///
/// # Errors
/// Names `argument` and the dimensions.
pub fn check_rows(argument: &'static str, dims: &[usize]) -> Result<()> {
    match dims.iter().try_fold(1usize, |all, &n| all.checked_mul(n)) {
        Some(0..=MAX_COUNT) => Ok(()),
        _ => {
            let allowed = format!("up to {MAX_COUNT} in all");
            Err(Error::invalid(argument, format!("{} rows", shape(dims)), allowed))
        }
    }
}

/// `(2, 3, 64)`
pub fn shape(dims: &[impl Display]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("({})", dims.join(", "))
}
