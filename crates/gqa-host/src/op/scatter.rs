//! Writes rows into a cache outside of attention, at a start row that differs among batch entries.

use super::KvCache;
use super::validate::{Dim, Pattern};
use crate::backend::{Backend, Io, run};
use gqa_plan::limits::{MAX_COUNT, addressable, check_rows, shape};
use gqa_plan::plan::{TensorId, Tensors};
use gqa_plan::{CacheBinding, CallKind, Layout, Phase, Problem, ProblemFields, WriteMode};
use gqa_tensor::{DType, Error, Result, Tensor, TensorDesc};
use ndarray::Array1;

/// ONNX `TensorScatter`, as operator set 24 defines it.
///
/// ```
/// use gqa_host::WriteMode;
/// use gqa_host::op::TensorScatter;
/// let rolling_cache = TensorScatter::new().mode(WriteMode::Circular);
/// # let _ = rolling_cache;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TensorScatter {
    axis: i64,
    mode: WriteMode,
}

impl Default for TensorScatter {
    fn default() -> Self {
        Self::new()
    }
}

impl TensorScatter {
    /// Every attribute as if it were not given.
    pub fn new() -> Self {
        Self { axis: -2, mode: WriteMode::Linear }
    }

    /// The dimension of the cache's rows, from the end where negative: any but the first, the
    /// batch. -2 by default.
    pub fn axis(self, axis: i64) -> Self {
        Self { axis, ..self }
    }

    /// The handling of rows past the cache's end.
    pub fn mode(self, mode: WriteMode) -> Self {
        Self { mode, ..self }
    }

    /// Applies the operator. The result is past_cache with the rows of update written into it.
    ///
    /// # Errors
    ///
    /// Where shapes do not match, or rows exceed the cache.
    pub fn run(&self, inputs: &ScatterInputs<'_>, backend: &dyn Backend) -> Result<Tensor> {
        let problem = self.problem(inputs)?;
        let first = first_rows(&problem, self.mode, inputs.write_indices)?;
        let (mut cache, update) = (moved_as(inputs.past_cache), moved_as(inputs.update));
        let mut no_value = Tensor::zeros(problem.dtype, &[0]);
        write(&problem, backend, &update, None, &first, [&mut cache, &mut no_value])?;
        Ok(match (inputs.past_cache, cache) {
            (Tensor::Bool(_), Tensor::U8(bytes)) => bytes.mapv(|byte| byte != 0).into(),
            (_, cache) => cache,
        })
    }

    /// Checks the call.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn problem(&self, inputs: &ScatterInputs<'_>) -> Result<Problem> {
        let cache = inputs.past_cache.desc();
        let update = inputs.update.desc();
        let axis = self.axis_of(cache.shape.len())?;
        check_update(cache, update, axis)?;
        let (batch, rows) = (cache.shape[0], update.shape[axis]);
        let dtype = if cache.dtype == DType::Bool { DType::U8 } else { cache.dtype };
        // The dimensions between batch and rows count as heads, those after the rows as elements of
        // a row.
        let heads = product("past_cache", cache, &cache.shape[1..axis])?;
        let size = product("past_cache", cache, &cache.shape[axis + 1..])?;
        let problem = Problem::new(ProblemFields {
            v_head_size: 0,
            ..update_of(self.mode, dtype, [batch, heads, cache.shape[axis], size], rows)
        })?;
        check_rows("past_cache", &[batch, heads, problem.capacity])?;
        first_rows(&problem, self.mode, inputs.write_indices)?;
        Ok(problem)
    }

    /// The axis from the front.
    fn axis_of(&self, rank: usize) -> Result<usize> {
        let from_front = if self.axis < 0 { self.axis + rank as i64 } else { self.axis };
        match usize::try_from(from_front) {
            Ok(axis) if (1..rank).contains(&axis) => Ok(axis),
            _ => {
                let got = format!("{} of {rank} dimensions of past_cache", self.axis);
                Err(Error::invalid("axis", got, "a dimension after the first, which is the batch"))
            }
        }
    }
}

/// The operator's inputs under their ONNX names; checked when the operator is applied.
#[derive(Clone, Copy, Debug)]
pub struct ScatterInputs<'a> {
    /// (B, …, C, …) of any type: C rows along `axis`.
    pub past_cache: &'a Tensor,
    /// (B, …, L, …), likewise: L rows, no more than C.
    pub update: &'a Tensor,
    /// int64 (B): the cache row of the first updated row; absent: row 0.
    pub write_indices: Option<&'a Tensor>,
}

impl KvCache {
    /// Writes the rows of `key` and `value`, (B, Nk, L, H) or (B, L, Nk·H), into the cache in
    /// place: those of batch entry `b` to rows `write_indices[b] ..`, int64 (B). With
    /// `nonpad_kv_seqlen = write_indices + L`, ONNX Attention then attends to the cache.
    ///
    /// # Errors
    ///
    /// Where shapes do not match, or rows exceed the cache.
    pub fn write(
        &mut self,
        key: &Tensor,
        value: &Tensor,
        write_indices: &Tensor,
        backend: &dyn Backend,
    ) -> Result<()> {
        self.write_as(WriteMode::Linear, [key, value], write_indices, backend)
    }

    /// As [`write`](Self::write), but rows past the cache's end wrap around to its start:
    /// `write_indices` may keep growing.
    ///
    /// # Errors
    ///
    /// Where shapes do not match, or an update has more rows than the cache.
    pub fn write_circular(
        &mut self,
        key: &Tensor,
        value: &Tensor,
        write_indices: &Tensor,
        backend: &dyn Backend,
    ) -> Result<()> {
        self.write_as(WriteMode::Circular, [key, value], write_indices, backend)
    }

    fn write_as(
        &mut self,
        mode: WriteMode,
        [key, value]: [&Tensor; 2],
        write_indices: &Tensor,
        backend: &dyn Backend,
    ) -> Result<()> {
        let problem = self.update(mode, key, value)?;
        let first = first_rows(&problem, mode, Some(write_indices))?;
        write(&problem, backend, key, Some(value), &first, [&mut self.key, &mut self.value])
    }

    /// The validated update.
    fn update(&self, mode: WriteMode, key: &Tensor, value: &Tensor) -> Result<Problem> {
        let cache = self.key.desc();
        let &[batch, heads, capacity, size] = cache.shape else {
            return Err(Error::invalid("past_key", shape(cache.shape), "4 dimensions"));
        };
        let dims = |rows| {
            let [batch, heads] = [Dim::Is("batch_size", batch), Dim::Is("kv_num_heads", heads)];
            [batch, heads, rows, Dim::Is("head_size", size)]
        };
        let check = |argument, tensor: &Tensor, dims: &[Dim]| {
            Pattern { argument, dtype: cache.dtype, why: ", the type of past_key", dims }
                .check(tensor.desc())
        };
        check("past_value", &self.value, &dims(Dim::Is("capacity", capacity)))?;
        let layout = Layout::of_rank(key.shape().len())
            .ok_or_else(|| Error::invalid("key", shape(key.shape()), "3 or 4 dimensions"))?;
        let rows = key.shape()[if layout == Layout::Bsnh { 1 } else { 2 }];
        if rows > capacity {
            let allowed = format!("up to {capacity} rows, those of the cache");
            return Err(Error::invalid("key", shape(key.shape()), allowed));
        }
        let new = Dim::Is("rows", rows);
        let dims = match layout {
            Layout::Bnsh => dims(new).to_vec(),
            Layout::Bsnh => {
                let width = Dim::Is("kv_num_heads * head_size", heads * size);
                vec![Dim::Is("batch_size", batch), new, width]
            }
        };
        check("key", key, &dims)?;
        check("value", value, &dims)?;
        check_rows("past_key", &[batch, heads, capacity])?;
        let sizes = [batch, heads, capacity, size];
        Problem::new(ProblemFields { layout, ..update_of(mode, cache.dtype, sizes, rows) })
    }
}

/// An update with these sizes.
fn update_of(
    mode: WriteMode,
    dtype: DType,
    [batch, heads, capacity, size]: [usize; 4],
    rows: usize,
) -> ProblemFields {
    ProblemFields {
        computes: CallKind::Update(mode),
        batch,
        q_heads: heads,
        kv_heads: heads,
        head_size: size,
        v_head_size: size,
        q_len: rows,
        new_len: rows,
        total_len: capacity,
        past_capacity: capacity,
        capacity,
        phase: Phase::SubsequentPrompt,
        cache: CacheBinding::Shared,
        layout: Layout::Bnsh,
        ..ProblemFields::plain("TensorScatter", dtype)
    }
}

/// Checks that the update has the cache's shape except along `axis`.
fn check_update(cache: TensorDesc<'_>, update: TensorDesc<'_>, axis: usize) -> Result<()> {
    addressable("past_cache", cache.shape)?;
    let dim = |(i, &n): (usize, &usize)| match i {
        0 => Dim::Is("batch_size", n),
        i if i == axis => Dim::AtMost("max_sequence_length", n),
        _ => Dim::Is("as past_cache", n),
    };
    let dims: Vec<_> = cache.shape.iter().enumerate().map(dim).collect();
    Pattern { argument: "update", dtype: cache.dtype, why: ", the type of past_cache", dims: &dims }
        .check(update)
}

/// The product of some dimensions, if it is within the kernels' limits.
fn product(argument: &'static str, tensor: TensorDesc<'_>, dims: &[usize]) -> Result<usize> {
    let product = dims.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    product.filter(|&product| product <= MAX_COUNT).ok_or_else(|| {
        let allowed = format!("up to {MAX_COUNT} elements on either side of the axis");
        Error::invalid(argument, shape(tensor.shape), allowed)
    })
}

/// The cache row of each batch entry's first updated row, int32 (B).
fn first_rows(p: &Problem, mode: WriteMode, write_indices: Option<&Tensor>) -> Result<Tensor> {
    const NAME: &str = "write_indices";
    let Some(indices) = write_indices else {
        return Ok(Array1::<i32>::zeros(p.batch).into());
    };
    let dims = [Dim::Is("batch_size", p.batch)];
    Pattern { argument: NAME, dtype: DType::I64, why: "", dims: &dims }.check(indices.desc())?;
    let Tensor::I64(indices) = indices else {
        return Err(Error::invalid(NAME, indices.dtype(), "int64"));
    };
    let last = p.capacity - p.q_len;
    let first = indices.iter().enumerate().map(|(b, &index)| {
        let row = match mode {
            WriteMode::Circular => index % p.capacity.max(1) as i64,
            WriteMode::Linear => index,
        };
        match (usize::try_from(row), mode) {
            (Ok(row), WriteMode::Circular) => Ok(row as i32),
            (Ok(row), WriteMode::Linear) if row <= last => Ok(row as i32),
            (_, mode) => {
                let allowed = match mode {
                    WriteMode::Circular => "0 or more".to_owned(),
                    WriteMode::Linear => {
                        format!("0 to {last}, so that {} rows fit into the cache", p.q_len)
                    }
                };
                Err(Error::invalid(NAME, format!("{index} for batch entry {b}"), allowed))
            }
        }
    });
    Ok(Array1::from(first.collect::<Result<Vec<i32>>>()?).into())
}

/// A copy with an element type that back ends can write: booleans as bytes.
fn moved_as(tensor: &Tensor) -> Tensor {
    match tensor {
        Tensor::Bool(array) => array.mapv(u8::from).into(),
        tensor => tensor.clone(),
    }
}

/// Runs the update.
fn write(
    problem: &Problem,
    backend: &dyn Backend,
    key: &Tensor,
    value: Option<&Tensor>,
    first: &Tensor,
    [present_key, present_value]: [&mut Tensor; 2],
) -> Result<()> {
    let mut output = Tensor::zeros(problem.dtype, &[0]);
    run(
        backend,
        problem,
        &mut Io {
            inputs: Tensors::default()
                .with(TensorId::Key, key)
                .with(TensorId::Value, value)
                .with(TensorId::WriteIndices, first),
            output: &mut output,
            present_key,
            present_value,
            row_scales: None,
            output_qk: None,
            lse: None,
        },
    )
}
