//! Attention over all keys, from attention over parts of them, on the CPU.

use crate::array::Array;
use crate::element::{Element, typed};
use crate::error::{invalid, raised};
use gqa_host::State;
use pyo3::prelude::*;

/// The arrays of a call: outputs of shape (batch, rows, heads, size), or without the first
/// dimension, and log-sum-exps of (batch, heads, rows), likewise.
pub struct Parts {
    pub outputs: Vec<Array>,
    pub lses: Vec<Array>,
    pub output: Array,
    pub lse: Array,
}

pub fn merge(py: Python<'_>, parts: &Parts) -> PyResult<()> {
    typed!(parts.output, typed_merge(py, parts))
}

fn typed_merge<T: Element>(py: Python<'_>, parts: &Parts) -> PyResult<()> {
    let shape = match parts.output.shape[..] {
        [batch, rows, heads, size] => [batch, rows, heads, size],
        [rows, heads, size] => [1, rows, heads, size],
        _ => {
            let got = format!("{:?}", parts.output.shape);
            return Err(invalid("outputs", got, "(batch, rows, heads, size)"));
        }
    };
    let [batch, rows, heads, size] = shape;
    let count = batch * rows * heads;
    let mut states = Vec::new();
    for (output, lse) in parts.outputs.iter().zip(&parts.lses) {
        states.push((output.elements::<T>(count * size)?, lse.elements::<f32>(count)?));
    }
    let output = parts.output.elements_mut::<T>(count * size)?;
    let lse = parts.lse.elements_mut::<f32>(count)?;
    py.detach(|| {
        let states: Vec<_> =
            states.iter().map(|(output, lse)| State { output: T::view(output), lse }).collect();
        gqa_host::merge_states(&states, shape, T::view_mut(output), lse)
    })
    .map_err(raised)
}
