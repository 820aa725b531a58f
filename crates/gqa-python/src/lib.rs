//! What the Python package `gqa` is made of: attention on arrays of other libraries.

mod append;
mod array;
mod arrays;
mod attend;
mod cuda;
mod device;
mod dlpack;
mod element;
mod error;
mod gpu;
mod heads;
mod layouts;
mod log;
mod mask;
mod memory;
mod merge;
mod scores;
mod sequences;

use append::{Append, Turning};
use array::{Array, Kind};
use attend::Attend;
use element::{Element, typed};
use error::{DriverError, NoDriverError, raised};
use gqa_host::DType;
use memory::{Memory, check_apart};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use scores::Scores;
use sequences::{Given, Numbers, Table};

/// The keyword arguments of a call, by their names.
struct Arguments<'a, 'py>(&'a Bound<'py, PyDict>);

impl Arguments<'_, '_> {
    /// An array, which an error calls by the name that the caller knows.
    fn array(&self, argument: &str, name: &'static str, kind: Kind) -> PyResult<Option<Array>> {
        match self.0.get_item(argument)? {
            Some(object) if !object.is_none() => Array::of(name, &object, kind).map(Some),
            _ => Ok(None),
        }
    }

    /// An array that there must be.
    fn need(&self, argument: &str, name: &'static str, kind: Kind) -> PyResult<Array> {
        let array = self.array(argument, name, kind)?;
        array.ok_or_else(|| error::mistyped(name, "None", "an array"))
    }

    /// Whether the call has that argument.
    fn has(&self, argument: &str) -> PyResult<bool> {
        Ok(self.0.get_item(argument)?.is_some_and(|object| !object.is_none()))
    }

    fn numbers(&self, name: &'static str) -> PyResult<Option<Numbers>> {
        Numbers::of(self.array(name, name, Kind::Integers)?.as_ref())
    }

    /// The call's sequences; `before` is the window to the left.
    fn given(
        &self,
        appended: usize,
        most: [Option<i64>; 2],
        before: Option<usize>,
    ) -> PyResult<Given> {
        let lengths = match self.numbers("cache_seqlens")? {
            None => self.numbers("seqused_k")?,
            lengths => lengths,
        };
        let table = self.array("block_table", "block_table", Kind::Integers)?;
        Ok(Given {
            q_starts: self.numbers("cu_seqlens_q")?,
            k_starts: self.numbers("cu_seqlens_k")?,
            most,
            lengths,
            appended,
            before,
            first_keys: self.numbers("cache_leftpad")?,
            entries: self.numbers("cache_batch_idx")?,
            table: Table::of(table.as_ref())?,
        })
    }

    /// The arrays of attention. `q`, `k` and `v` are each an argument and its name in errors.
    fn attended(&self, [q, k, v]: [(&str, &'static str); 3]) -> PyResult<arrays::Arrays> {
        let q = self.need(q.0, q.1, Kind::Heads)?;
        let kind = match k.1 == "k_cache" || self.has("block_table")? {
            true => Kind::Cache(q.dtype),
            false => Kind::Like(q.dtype, "q"),
        };
        Ok(arrays::Arrays {
            q,
            k: self.need(k.0, k.1, kind)?,
            v: self.need(v.0, v.1, kind)?,
            out: self.need("out", "out", Kind::Heads)?,
            lse: self.array("lse", "lse", Kind::Numbers)?,
            sinks: self.array("sinks", "s_aux", Kind::Numbers)?,
            slopes: self.array("alibi_slopes", "alibi_slopes", Kind::Numbers)?,
            mask: self.array("mask", "mask", Kind::Mask)?,
            tree_mask: self.array("tree_mask", "tree_mask", Kind::Integers)?,
        })
    }

    /// What is appended to a KV cache, if something is.
    fn appended(&self, turning: Turning) -> PyResult<Option<append::Arrays>> {
        if !self.has("k")? {
            return Ok(None);
        }
        let q = self.need("q", "q", Kind::Heads)?;
        let (cache, new) = (Kind::Cache(q.dtype), Kind::Like(q.dtype, "q"));
        let cos = self.array("rotary_cos", "rotary_cos", new)?;
        let sin = self.array("rotary_sin", "rotary_sin", new)?;
        Ok(Some(append::Arrays {
            q,
            rotated: self.array("rotated", "q", Kind::Heads)?,
            key_cache: self.need("k_cache", "k_cache", cache)?,
            value_cache: self.need("v_cache", "v_cache", cache)?,
            k: self.need("k", "k", new)?,
            v: self.need("v", "v", new)?,
            turns: cos.zip(sin).map(|(cos, sin)| [cos, sin]),
            turning,
        }))
    }
}

/// Attention on the CPU.
#[pyfunction]
#[pyo3(name = "attend")]
fn attend_on_cpu(
    py: Python<'_>,
    scores: Scores,
    most: [Option<i64>; 2],
    arguments: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let arguments = Arguments(arguments);
    let arrays = arguments.attended([("q", "q"), ("k", "k"), ("v", "v")])?;
    let given = arguments.given(0, most, scores.before())?;
    typed!(arrays.q, run(py, &arrays, &given, scores, None))
}

/// Attention on the CPU to a KV cache, to which k and v are appended first where they are given.
#[pyfunction]
#[pyo3(name = "attend_to_cache")]
fn attend_to_cache_on_cpu(
    py: Python<'_>,
    scores: Scores,
    turning: Turning,
    arguments: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let arguments = Arguments(arguments);
    let appended = arguments.appended(turning)?;
    let is_rotated = appended.as_ref().is_some_and(|arrays| arrays.rotated.is_some());
    let q = if is_rotated { "rotated" } else { "q" };
    let cache = [(q, "q"), ("k_cache", "k_cache"), ("v_cache", "v_cache")];
    let arrays = arguments.attended(cache)?;
    let rows = appended.as_ref().and_then(|arrays| arrays.k.shape.get(1).copied());
    let given = arguments.given(rows.unwrap_or_default(), [None; 2], scores.before())?;
    typed!(arrays.q, run(py, &arrays, &given, scores, appended.as_ref()))
}

/// Errs where the output, which may be the caller's, lies in memory of something else.
fn check_output(arrays: &arrays::Arrays, appended: Option<&append::Arrays>) -> PyResult<()> {
    let read = arrays.read().chain(appended.into_iter().flat_map(append::Arrays::read));
    let output = (arrays.out.name, arrays.out.memory());
    check_apart(output, read.map(|array| (array.name, array.memory())))
}

/// A tensor by its name: its address, shape, strides in elements, and bytes of an element.
type Placed = (String, usize, Vec<usize>, Vec<isize>, usize);

/// Errs where a tensor that is written lies in memory of one that is read, wherever that is.
#[pyfunction]
#[pyo3(name = "check_apart")]
fn check_apart_by_address(written: Placed, read: Vec<Placed>) -> PyResult<()> {
    fn placed((name, address, shape, strides, size): &Placed) -> (&str, Memory<'_>) {
        (name, Memory { address: *address, shape, strides, size: *size })
    }
    check_apart(placed(&written), read.iter().map(placed))
}

/// All that a caller can do wrong is found before anything is written.
fn run<T: Element>(
    py: Python<'_>,
    arrays: &arrays::Arrays,
    given: &Given,
    scores: Scores,
    appended: Option<&append::Arrays>,
) -> PyResult<()> {
    check_output(arrays, appended)?;
    let append = appended.map(|arrays| Append::<T>::of(arrays, given)).transpose()?;
    let attend = Attend::<T>::of(arrays, given, scores)?;
    if let Some(append) = &append {
        append.check_readers(given, attend.sequences())?;
        attend.check().map_err(raised)?;
    }
    py.detach(|| {
        append.into_iter().for_each(Append::run);
        attend.run()
    })
    .map_err(raised)
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
    let arrays = |name, objects: &[Bound<'_, PyAny>], kind| {
        objects.iter().map(|object| Array::of(name, object, kind)).collect::<PyResult<Vec<_>>>()
    };
    let output = Array::of("output", output, Kind::Heads)?;
    let first = Kind::Like(output.dtype, "the first");
    let parts = merge::Parts {
        outputs: arrays("outputs", &outputs, first)?,
        lses: arrays("log_sum_exps", &lses, Kind::Like(DType::F32, "these functions return"))?,
        lse: Array::of("lse", lse, Kind::Numbers)?,
        output,
    };
    merge::merge(py, &parts)
}

/// What the package imports.
#[pymodule]
fn _gqa(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::start().map_err(raised)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("DriverError", module.py().get_type::<DriverError>())?;
    module.add("NoDriverError", module.py().get_type::<NoDriverError>())?;
    module.add_class::<cuda::Gpu>()?;
    module.add_class::<cuda::Call>()?;
    module.add_class::<cuda::Plan>()?;
    module.add_class::<cuda::Merge>()?;
    module.add_class::<gpu::GpuArray>()?;
    module.add_class::<layouts::Layouts>()?;
    module.add_function(wrap_pyfunction!(attend_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(attend_to_cache_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(merge_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(check_apart_by_address, module)?)
}
