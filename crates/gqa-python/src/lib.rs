//! What the Python package `gqa` is made of: attention on arrays of other libraries.

mod append;
mod array;
mod attend;
mod cuda;
mod dlpack;
mod element;
mod error;
mod heads;
mod mask;
mod merge;
mod scores;
mod sequences;

use array::Array;
use error::{DriverError, NoDriverError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use scores::Scores;
use sequences::{Given, Numbers, Table};

/// The keyword arguments of a call, by their names.
struct Arguments<'a, 'py>(&'a Bound<'py, PyDict>);

impl Arguments<'_, '_> {
    /// An array, which an error calls by the name that the caller knows.
    fn array(&self, argument: &str, name: &'static str) -> PyResult<Option<Array>> {
        match self.0.get_item(argument)? {
            Some(object) if !object.is_none() => Array::of(name, &object).map(Some),
            _ => Ok(None),
        }
    }

    fn need(&self, argument: &str, name: &'static str) -> PyResult<Array> {
        let array = self.array(argument, name)?;
        array.ok_or_else(|| error::invalid(name, "None", "an array"))
    }

    fn numbers(&self, name: &'static str) -> PyResult<Option<Numbers>> {
        Numbers::of(self.array(name, name)?.as_ref())
    }

    fn table(&self) -> PyResult<Option<Table>> {
        Table::of(self.array("block_table", "block_table")?.as_ref())
    }
}

/// Attention on the CPU. To a KV cache, so many tokens were `appended` to each sequence behind its
/// `cache_seqlens`.
#[pyfunction]
#[pyo3(name = "attend")]
fn attend_on_cpu(
    py: Python<'_>,
    scores: Scores,
    most: [Option<i64>; 2],
    appended: Option<usize>,
    arguments: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let arguments = Arguments(arguments);
    let [k, v] = if appended.is_some() { ["k_cache", "v_cache"] } else { ["k", "v"] };
    let given = Given {
        q_starts: arguments.numbers("cu_seqlens_q")?,
        k_starts: arguments.numbers("cu_seqlens_k")?,
        lengths: arguments.numbers("cache_seqlens")?,
        appended: appended.unwrap_or_default(),
        most,
        first_keys: arguments.numbers("cache_leftpad")?,
        entries: arguments.numbers("cache_batch_idx")?,
        table: arguments.table()?,
    };
    let arrays = attend::Arrays {
        q: arguments.need("q", "q")?,
        k: arguments.need("k", k)?,
        v: arguments.need("v", v)?,
        out: arguments.need("out", "out")?,
        lse: arguments.array("lse", "lse")?,
        sinks: arguments.array("sinks", "s_aux")?,
        slopes: arguments.array("alibi_slopes", "alibi_slopes")?,
        mask: arguments.array("mask", "mask")?,
    };
    attend::attend(py, &arrays, &given, scores)
}

/// New keys and values go into a KV cache on the CPU.
#[pyfunction]
#[pyo3(name = "append")]
fn append_on_cpu(
    py: Python<'_>,
    interleaved: bool,
    advance: bool,
    arguments: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let arguments = Arguments(arguments);
    let past = arguments.numbers("cache_seqlens")?;
    let places = append::Places {
        past: past
            .ok_or_else(|| error::invalid("cache_seqlens", "None", "a number or an array"))?,
        first: arguments.numbers("cache_leftpad")?,
        entries: arguments.numbers("cache_batch_idx")?,
        table: arguments.table()?,
        interleaved,
        advance,
    };
    let cos = arguments.array("rotary_cos", "rotary_cos")?;
    let sin = arguments.array("rotary_sin", "rotary_sin")?;
    let arrays = append::Arrays {
        q: arguments.need("q", "q")?,
        rotated: arguments.array("rotated", "rotated")?,
        key_cache: arguments.need("k_cache", "k_cache")?,
        value_cache: arguments.need("v_cache", "v_cache")?,
        k: arguments.need("k", "k")?,
        v: arguments.need("v", "v")?,
        turns: cos.zip(sin).map(|(cos, sin)| [cos, sin]),
    };
    append::append(py, &arrays, &places)
}

/// Attention over all keys, from attention over parts of them, on the CPU.
#[pyfunction]
#[pyo3(name = "merge_states")]
fn merge_on_cpu(
    py: Python<'_>,
    outputs: Vec<Bound<'_, PyAny>>,
    lses: Vec<Bound<'_, PyAny>>,
    output: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let arrays = |name, objects: &[Bound<'_, PyAny>]| {
        objects.iter().map(|object| Array::of(name, object)).collect::<PyResult<Vec<_>>>()
    };
    let parts = merge::Parts {
        outputs: arrays("outputs", &outputs)?,
        lses: arrays("log_sum_exps", &lses)?,
        output: Array::of("output", output)?,
        lse: Array::of("lse", lse)?,
    };
    merge::merge(py, &parts)
}

/// What the package imports.
#[pymodule]
fn _gqa(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DriverError", module.py().get_type::<DriverError>())?;
    module.add("NoDriverError", module.py().get_type::<NoDriverError>())?;
    module.add_class::<cuda::Gpu>()?;
    module.add_class::<cuda::Call>()?;
    module.add_function(wrap_pyfunction!(attend_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(append_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(merge_on_cpu, module)?)
}
