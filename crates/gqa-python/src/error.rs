//! Errors as Python's exceptions.

use gqa_host::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

create_exception!(gqa, DriverError, PyRuntimeError, "The GPU could not be used.");
create_exception!(gqa, NoDriverError, DriverError, "There is no NVIDIA driver on this machine.");

/// A caller's error: which argument, what was got and what is allowed.
pub fn invalid(argument: &str, got: impl ToString, allowed: impl ToString) -> PyErr {
    PyValueError::new_err(message(argument, got, allowed))
}

/// The same where an argument is an object of another kind.
pub fn mistyped(argument: &str, got: impl ToString, allowed: impl ToString) -> PyErr {
    PyTypeError::new_err(message(argument, got, allowed))
}

fn message(argument: &str, got: impl ToString, allowed: impl ToString) -> String {
    format!("{argument}: got {}; allowed: {}", got.to_string(), allowed.to_string())
}

/// A vector with room for `count` elements.
///
/// # Errors
///
/// Where there is not as much, as arrays that repeat their elements may seem to have more of them
/// than memory holds.
pub fn room<T>(argument: &'static str, count: usize) -> Result<Vec<T>, Error> {
    let mut room = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    room.try_reserve_exact(count).map_err(|_| Error::OutOfMemory { argument, bytes })?;
    Ok(room)
}

/// An error of the library.
pub fn raised(error: Error) -> PyErr {
    let text = error.to_string();
    match error.cause() {
        Some(gqa_host::driver::DriverError::NoDriver { .. }) => {
            return NoDriverError::new_err(text);
        }
        Some(_) => return DriverError::new_err(text),
        None => {}
    }
    match error {
        Error::OutOfMemory { .. } => PyMemoryError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}
