//! The shape an input must have, checked and printed from one description.

use crate::{DType, Error, Result, TensorDesc};
use std::fmt;

/// One dimension of a [`Pattern`], by its name in the operator's documentation.
#[derive(Clone, Copy)]
pub(in crate::op) enum Dim {
    /// Exactly that.
    Is(&'static str, usize),
    /// Either.
    Either(&'static str, usize, usize),
    /// That or more.
    AtLeast(&'static str, usize),
    /// That or less.
    AtMost(&'static str, usize),
    /// Anything.
    Any(&'static str),
}

impl Dim {
    fn takes(self, got: usize) -> bool {
        match self {
            Self::Is(_, n) => got == n,
            Self::Either(_, a, b) => got == a || got == b,
            Self::AtLeast(_, n) => got >= n,
            Self::AtMost(_, n) => got <= n,
            Self::Any(_) => true,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(name, n) => write!(f, "{name} = {n}"),
            Self::Either(name, a, b) => write!(f, "{name} = {a} or {b}"),
            Self::AtLeast(name, n) => write!(f, "{name} >= {n}"),
            Self::AtMost(name, n) => write!(f, "up to {name} = {n}"),
            Self::Any(name) => f.write_str(name),
        }
    }
}

/// What an input must look like.
pub(in crate::op) struct Pattern<'a> {
    /// Name of the input.
    pub(in crate::op) argument: &'static str,
    /// Its element type.
    pub(in crate::op) dtype: DType,
    /// Where the element type comes from, to be printed behind it.
    pub(in crate::op) why: &'static str,
    /// Its dimensions.
    pub(in crate::op) dims: &'a [Dim],
}

impl Pattern<'_> {
    /// Errs unless type, rank and every dimension fit.
    pub(in crate::op) fn check(&self, got: TensorDesc<'_>) -> Result<()> {
        if got.dtype != self.dtype {
            return Err(Error::invalid(
                self.argument,
                got.dtype,
                format!("{}{}", self.dtype, self.why),
            ));
        }
        let fits = got.shape.len() == self.dims.len();
        if !fits || !self.dims.iter().zip(got.shape).all(|(dim, &n)| dim.takes(n)) {
            return Err(Error::invalid(self.argument, shape(got.shape), shape(self.dims)));
        }
        addressable(self.argument, got.shape)
    }
}

/// Largest number of rows, batch entries or positions, and of rows of all heads and batch entries.
/// Kernels count them in 32 bits, of which one is to spare for sums.
pub(in crate::op) const MAX_COUNT: usize = i32::MAX as usize;

/// Largest number of heads: so many blocks a grid has in y and z, and 32 bits count their channels.
pub(in crate::op) const MAX_HEADS: usize = u16::MAX as usize;

/// Largest number of elements, such that no byte count overflows.
const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<f64>();

/// Errs for shapes that no memory holds. They come up where a shape is not that of an array, or
/// where one dimension is 0.
pub(in crate::op) fn addressable(argument: &'static str, dims: &[usize]) -> Result<()> {
    let elements =
        dims.iter().filter(|&&n| n > 0).try_fold(1usize, |product, &n| product.checked_mul(n));
    if dims.iter().all(|&n| n <= MAX_COUNT) && elements.is_some_and(|n| n <= MAX_ELEMENTS) {
        return Ok(());
    }
    let allowed = format!("dimensions up to {MAX_COUNT} and up to {MAX_ELEMENTS} elements");
    Err(Error::invalid(argument, shape(dims), allowed))
}

/// A number of heads.
pub(in crate::op) fn head_count(argument: &'static str, heads: i64) -> Result<usize> {
    match usize::try_from(heads) {
        Ok(heads @ 1..=MAX_HEADS) => Ok(heads),
        _ => Err(Error::invalid(argument, heads, format!("1 to {MAX_HEADS}"))),
    }
}

/// Errs where rows of that many outer dimensions are too many to be counted: the one place that
/// sees to it that no product of such dimensions overflows in a kernel.
pub(in crate::op) fn check_rows(argument: &'static str, dims: &[usize]) -> Result<()> {
    match dims.iter().try_fold(1usize, |all, &n| all.checked_mul(n)) {
        Some(0..=MAX_COUNT) => Ok(()),
        _ => {
            let allowed = format!("up to {MAX_COUNT} in all");
            Err(Error::invalid(argument, format!("{} rows", shape(dims)), allowed))
        }
    }
}

/// `(2, 3, 64)`
pub(in crate::op) fn shape(dims: &[impl fmt::Display]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("({})", dims.join(", "))
}
