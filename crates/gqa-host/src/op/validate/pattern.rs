//! The shape an input must have, checked and printed from one description.

use gqa_plan::limits::{MAX_HEADS, addressable, shape};
use gqa_tensor::{DType, Error, Result, TensorDesc};
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
    /// The origin of the element type, printed after it.
    pub(in crate::op) why: &'static str,
    /// Its dimensions.
    pub(in crate::op) dims: &'a [Dim],
}

impl Pattern<'_> {
    /// Checks type, rank and every dimension.
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

/// A number of heads.
pub(in crate::op) fn head_count(argument: &'static str, heads: i64) -> Result<usize> {
    match usize::try_from(heads) {
        Ok(heads @ 1..=MAX_HEADS) => Ok(heads),
        _ => Err(Error::invalid(argument, heads, format!("1 to {MAX_HEADS}"))),
    }
}
