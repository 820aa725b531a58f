//! What an error says.

use candle::{Error, Result};

/// The text of a refusal, without the trace that candle adds where `RUST_BACKTRACE` is set.
pub fn refusal<T>(result: Result<T>) -> String {
    match result.err().expect("refused") {
        Error::WithBacktrace { inner, .. } => inner.to_string(),
        error => error.to_string(),
    }
}
