//! Errors of ours as candle's.

use candle::Error;
use std::fmt::Display;

/// As candle's, with the same text.
pub(crate) fn ours(error: gqa_host::Error) -> Error {
    Error::msg(error)
}

/// One that names the argument, what was got and what is allowed.
pub(crate) fn invalid(argument: &'static str, got: impl Display, allowed: impl Display) -> Error {
    ours(gqa_host::Error::invalid(argument, got, allowed))
}
