//! Our errors as candle's.

use candle::Error;
use std::fmt::Display;

/// Our error as candle's, with the argument names of [`Attention::new`](crate::Attention::new).
pub(crate) fn ours(error: gqa_host::Error) -> Error {
    const NAMES: [(&str, &str); 4] = [
        ("heads.query", "query_heads"),
        ("heads.kv", "kv_heads"),
        ("heads.size", "head_size"),
        ("heads.values", "value_size"),
    ];
    let text = error.to_string();
    Error::msg(NAMES.iter().fold(text, |text, (name, here)| text.replace(name, here)))
}

/// One that names the argument, what was got and what is allowed.
pub(crate) fn invalid(argument: &'static str, got: impl Display, allowed: impl Display) -> Error {
    ours(gqa_host::Error::invalid(argument, got, allowed))
}
