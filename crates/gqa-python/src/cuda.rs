//! Attention on a GPU, in memory and streams of others: what `_cuda.py` puts into the stream.

use crate::device::OpenGpu;
use crate::error::{invalid, raised};
use crate::gpu::GpuArray;
use crate::scores::Scores;
use gqa_host::driver::{
    DeviceTensor, DeviceView, Exchange, LoadedPlan, PartShape, PartTensors, PeerMerge, Views,
    Workspace,
};
use gqa_host::engine::{External, Heads, LatentHeads, Layer, Paged, Rope};
use gqa_host::plan::{DeviceInfo, PlanOptions, Planner, TensorId, TensorSpec};
use gqa_host::{
    DType, Error, Problem, QuantFormat, Quantization, RowStrides, Scales, Strided, Tensor,
};
use pyo3::prelude::*;
use std::sync::Arc;

/// A GPU by its number.
#[pyclass(frozen)]
#[derive(Clone)]
pub struct Gpu(Arc<OpenGpu>);

#[pymethods]
impl Gpu {
    #[new]
    fn new(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        let opened = py.detach(|| OpenGpu::open(ordinal));
        opened.map(Arc::new).map(Self).map_err(raised)
    }

    /// An array of another library in the GPU's memory, for work in that stream. Streams are
    /// handles that last, or 1: the legacy default stream. `allowed` are the types of elements
    /// that an error names.
    fn array(
        &self,
        name: &str,
        object: &Bound<'_, PyAny>,
        stream: usize,
        allowed: &str,
    ) -> PyResult<GpuArray> {
        GpuArray::of(&self.0, name, object, stream, allowed)
    }

    /// A new array, whose elements are whatever they are.
    fn empty(&self, py: Python<'_>, shape: Vec<usize>, dtype: &str) -> PyResult<GpuArray> {
        let dtype = dtype_of("dtype", dtype)?;
        let memory = py.detach(|| DeviceTensor::new(&self.0.device, dtype, &shape));
        Ok(GpuArray::own(&self.0, dtype, memory.map_err(raised)?))
    }

    /// A new array of one number.
    fn filled(
        &self,
        py: Python<'_>,
        shape: Vec<usize>,
        dtype: &str,
        number: f32,
        stream: usize,
    ) -> PyResult<GpuArray> {
        let dtype = dtype_of("dtype", dtype)?;
        let numbers = vec![number; shape.iter().product()];
        let tensor = Tensor::from_f32(dtype, &shape, &numbers).map_err(raised)?;
        self.uploaded(py, &tensor, stream)
    }

    /// A new array of int32.
    fn integers(&self, py: Python<'_>, numbers: Vec<i32>, stream: usize) -> PyResult<GpuArray> {
        let mut tensor = Tensor::zeros(DType::I32, &[numbers.len()]);
        let bytes = numbers.iter().flat_map(|number| number.to_ne_bytes());
        tensor.with_bytes_mut(|to| to.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte));
        self.uploaded(py, &tensor, stream)
    }

    /// Waits until all that is in the stream is done.
    fn synchronize(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        py.detach(|| self.0.stream(stream)?.synchronize()).map_err(raised)
    }

    /// How many kernels the plan for a call launches.
    fn launches(&self, py: Python<'_>, call: &Call) -> PyResult<usize> {
        let plan = py.detach(|| self.0.planner.plan(&call.0)).map_err(raised)?;
        Ok(plan.launches().len())
    }

    /// Whether the plan for a call reads packed keys and values in place.
    fn reads_in_place(&self, py: Python<'_>, call: &Call) -> PyResult<bool> {
        in_place(py.detach(|| self.0.planner.plan(&call.0)))
    }

    /// The plan for a call, with compiled kernels. They are specialized for the layer's constants
    /// at once, or after many launches of such calls. While a graph is `captured`, no kernel is
    /// tested.
    #[pyo3(signature = (call, at_once = false, captured = false))]
    fn plan(&self, py: Python<'_>, call: &Call, at_once: bool, captured: bool) -> PyResult<Plan> {
        let gpu = Arc::clone(&self.0);
        let loaded = py.detach(|| {
            let plan = match captured {
                true => gpu.planner.plan_in_capture(&call.0)?,
                false => gpu.planner.plan(&call.0)?,
            };
            if at_once { gpu.device.load(plan) } else { gpu.device.load_deferred(plan) }
        });
        let loaded = loaded.map_err(raised)?;
        Ok(Plan { gpu, loaded })
    }
}

/// The merge of several GPUs' results of shape (batch, rows, heads, size), with log-sum-exps of
/// these strides: the kernel on one GPU.
#[pyclass(frozen)]
pub struct Merge {
    gpu: Arc<OpenGpu>,
    merge: PeerMerge,
}

#[pymethods]
impl Merge {
    #[new]
    fn new(
        py: Python<'_>,
        gpu: &Gpu,
        dtype: &str,
        shape: (usize, usize, usize, usize),
        lse: (usize, usize, usize),
    ) -> PyResult<Self> {
        let shape = part_shape(dtype, shape, lse)?;
        let merge = py.detach(|| gpu.0.device.peer_merge(&shape)).map_err(raised)?;
        Ok(Self { gpu: Arc::clone(&gpu.0), merge })
    }

    /// 16-byte pairs that a GPU sends of such a part; None where no kernel merges it.
    #[staticmethod]
    fn pairs(dtype: &str, shape: (usize, usize, usize, usize)) -> PyResult<Option<usize>> {
        Ok(part_shape(dtype, shape, (0, 0, 0))?.pairs().ok())
    }

    /// Bytes of an inbox for these numbers of GPUs and pairs.
    #[staticmethod]
    fn inbox_bytes(count: usize, capacity: usize) -> usize {
        Exchange::inbox_bytes(count, capacity)
    }

    /// Bytes of a GPU's state.
    #[classattr]
    const STATE_BYTES: usize = Exchange::STATE_BYTES;

    /// Most GPUs that merge.
    #[classattr]
    const MOST: usize = Exchange::MOST;

    /// Puts the merge into a stream. `exchange` has the rank, the inboxes, the pairs of a part, the
    /// state, and the word for late ranks; `tensors` has the part, its log-sum-exps, and the merged
    /// output and log-sum-exps. `timeout` is in microseconds.
    fn enqueue(
        &self,
        exchange: (usize, Vec<u64>, usize, u64, u64),
        tensors: [u64; 4],
        timeout: u32,
        stream: usize,
    ) -> PyResult<()> {
        let (rank, inboxes, capacity, state, late) = exchange;
        let exchange = Exchange { rank, inboxes, capacity, state, late };
        let [part, part_lse, out, lse] = tensors;
        let tensors = PartTensors { part, part_lse, out, lse };
        // SAFETY: tensors of these shapes, and memory that distributed.py keeps; it sees to the
        // order of merges, as far as one process can
        let enqueued = unsafe {
            let stream = self.gpu.stream(stream);
            stream.and_then(|stream| self.merge.enqueue(&exchange, &tensors, timeout, &stream))
        };
        enqueued.map_err(raised)
    }
}

fn part_shape(
    dtype: &str,
    (batch, rows, heads, size): (usize, usize, usize, usize),
    (a, b, c): (usize, usize, usize),
) -> PyResult<PartShape> {
    let dtype = dtype_of("q", dtype)?;
    Ok(PartShape { dtype, batch, rows, heads, size, lse: [a, b, c] })
}

impl Gpu {
    fn uploaded(&self, py: Python<'_>, tensor: &Tensor, stream: usize) -> PyResult<GpuArray> {
        let memory = py.detach(|| {
            let memory = DeviceTensor::new(&self.0.device, tensor.dtype(), tensor.shape())?;
            memory.upload(tensor, &*self.0.stream(stream)?)?;
            Ok(memory)
        });
        let memory = memory.map_err(raised)?;
        Ok(GpuArray::own(&self.0, tensor.dtype(), memory))
    }
}

/// Whether a plan copies no rows of the cache. Of calls that no kernel takes there is none.
fn in_place(plan: gqa_host::Result<Arc<gqa_host::plan::Plan>>) -> PyResult<bool> {
    match plan {
        Ok(plan) => Ok(!plan.gathers()),
        Err(gqa_host::Error::NoKernel(_)) => Ok(false),
        Err(error) => Err(raised(error)),
    }
}

/// What the tensors of a call have in common.
#[derive(FromPyObject)]
struct Sizes {
    dtype: String,
    heads: usize,
    kv_heads: usize,
    size: usize,
    scores: Scores,
    sinks: bool,
}

impl Sizes {
    fn layer(&self) -> PyResult<Layer> {
        let dtype = dtype_of("q", &self.dtype)?;
        let heads = Heads { query: self.heads, kv: self.kv_heads, size: self.size };
        Ok(self.scores.layer(dtype, heads, self.sinks))
    }
}

fn dtype_of(argument: &str, name: &str) -> PyResult<DType> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        other => Err(invalid(argument, other, "float32, float16 or bfloat16")),
    }
}

/// What a KV cache holds, and what each of its scales is for.
fn quantization(format: &str, scales: &str) -> PyResult<Quantization> {
    let format = match format {
        "int8" => QuantFormat::Int8,
        "int4" => QuantFormat::Int4,
        "float8" => QuantFormat::Float8,
        other => return Err(invalid("k_cache", other, "int8, int4 or float8")),
    };
    let scales = match scales {
        "tensor" => Scales::PerTensor,
        "head" => Scales::PerHead,
        "channel" => Scales::PerChannel,
        "token" => Scales::PerToken,
        other => return Err(invalid("k_descale", other, "tensor, head, channel or token")),
    };
    Ok(Quantization { format, scales })
}

/// Strides of batch entries or blocks, rows and heads.
type StridesOfOne = (usize, usize, usize);
/// The same of a tensor that may be contiguous.
type Strides = Option<StridesOfOne>;

fn strides(strides: Strides) -> Option<RowStrides> {
    strides.map(row_strides)
}

fn row_strides((batch, row, head): StridesOfOne) -> RowStrides {
    RowStrides { batch, row, head }
}

/// A call that was checked.
#[pyclass(frozen)]
pub struct Call(Problem);

#[pymethods]
impl Call {
    /// Attention over given keys and values, read in place. `values` is the head size of values;
    /// `padded` says whether some rows of a sequence are padding.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "each is a number of the call")]
    #[pyo3(signature = (
        sizes, batch, rows, keys, shortest, values, padded, q, k, v, lse, bias
    ))]
    fn external(
        sizes: Sizes,
        batch: usize,
        rows: usize,
        keys: usize,
        shortest: usize,
        values: usize,
        padded: bool,
        q: Strides,
        k: Strides,
        v: Strides,
        lse: bool,
        bias: Option<(bool, bool, bool, usize)>,
    ) -> PyResult<Self> {
        let strided =
            Strided { query: strides(q), key: strides(k), value: strides(v), ..Strided::default() };
        let call = External::new(batch, rows, keys).shortest(shortest).value_size(values);
        let call = if padded { call.padded() } else { call };
        let mut call = call.strides(strided);
        if let Some(right) = sizes.scores.behind() {
            call = call.right_window(right);
        }
        if lse {
            call = call.log_sum_exp();
        }
        call = match bias {
            Some((per_sequence, per_head, true, columns)) => {
                call.mask(per_sequence, per_head).bias_columns(columns)
            }
            Some((per_sequence, per_head, false, columns)) => {
                call.bias(per_sequence, per_head).bias_columns(columns)
            }
            None => call,
        };
        sizes.layer()?.external(call).map(Self).map_err(raised)
    }

    /// Plans attention over a paged KV cache; `sizes` are blocks, rows of a block, and blocks of a
    /// sequence.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "each is a number of the call")]
    #[pyo3(signature = (
        sizes, sequences, tokens, cache, most_tokens, longest, rope, counts_new, appended, lse,
        tree_mask, quantized, q, kv, pages, one_each, scheduled = false
    ))]
    fn paged(
        sizes: Sizes,
        sequences: usize,
        tokens: usize,
        cache: (usize, usize, usize),
        most_tokens: usize,
        longest: usize,
        rope: Option<(usize, usize, bool)>,
        counts_new: bool,
        appended: bool,
        lse: bool,
        tree_mask: bool,
        quantized: Option<(String, String)>,
        q: Strides,
        kv: Strides,
        pages: Strides,
        one_each: bool,
        scheduled: bool,
    ) -> PyResult<Self> {
        let mut layer = sizes.layer()?;
        if let Some((format, scales)) = quantized {
            layer = layer.quantized(quantization(&format, &scales)?);
        }
        if let Some((dim, positions, interleaved)) = rope {
            let rope = Rope::new(dim, positions);
            layer = layer.rope(if interleaved { rope.interleaved() } else { rope });
        }
        // Callers of flash-attn often pass bounds that are too large.
        let longest = longest.min(cache.1.saturating_mul(cache.2));
        let most_tokens = most_tokens.min(tokens);
        let most_tokens = if appended { most_tokens } else { most_tokens.min(longest) };
        let call = match one_each {
            true => Paged::decode(sequences, cache.into()),
            false => Paged::new(sequences, tokens, cache.into()).most_tokens(most_tokens),
        };
        let call = call.longest(longest);
        let call = if counts_new { call.total_lengths() } else { call };
        let call = if appended { call.appended() } else { call };
        let call = if lse { call.log_sum_exp() } else { call };
        let call = if tree_mask { call.tree_mask() } else { call };
        let call = if scheduled { call.scheduled() } else { call };
        let call = strides(q).map_or(call, |q| call.query_strides(q));
        let call = strides(kv).map_or(call, |kv| call.key_value_strides(kv));
        let call = strides(pages).map_or(call, |pages| call.cache_strides(pages));
        layer.paged(call).map(Self).map_err(raised)
    }

    /// Attention over packed keys and values, read in place; `key_rows` is the number of keys of
    /// all sequences, `values` the head size of values.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "each is a number of the call")]
    fn in_rows(
        sizes: Sizes,
        sequences: usize,
        tokens: usize,
        key_rows: usize,
        most_tokens: usize,
        longest: usize,
        values: usize,
        lse: bool,
        q: Strides,
        kv: Option<(StridesOfOne, StridesOfOne)>,
    ) -> PyResult<Self> {
        let call = Paged::in_rows(sequences, tokens, key_rows).value_size(values);
        let call = call.most_tokens(most_tokens.min(tokens)).longest(longest.min(key_rows).max(1));
        let call = if lse { call.log_sum_exp() } else { call };
        let call = strides(q).map_or(call, |q| call.query_strides(q));
        let call = match kv {
            Some((k, v)) => call.row_strides([k, v].map(row_strides)),
            None => call,
        };
        sizes.layer()?.paged(call).map(Self).map_err(raised)
    }

    /// Multi-head latent attention over a paged latent KV cache that has the new rows, with lengths
    /// that count them: `values` are the leading elements of its rows.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "each is a number of the call")]
    fn latent(
        sizes: Sizes,
        values: usize,
        sequences: usize,
        rows: usize,
        cache: (usize, usize, usize),
        q: Strides,
        pages: Strides,
        quantized: Option<(String, String)>,
    ) -> PyResult<Self> {
        let dtype = dtype_of("q", &sizes.dtype)?;
        let heads = LatentHeads { query: sizes.heads, size: sizes.size, values };
        let layer = Layer::latent(dtype, heads, sizes.scores.scale);
        let layer = if sizes.scores.behind() == Some(0) { layer } else { layer.bidirectional() };
        let layer = match quantized {
            Some((format, scales)) => layer.quantized(quantization(&format, &scales)?),
            None => layer,
        };
        let call = match rows {
            1 => Paged::decode(sequences, cache.into()),
            _ => Paged::new(sequences, sequences * rows, cache.into()).most_tokens(rows),
        };
        let call = call.total_lengths().appended().log_sum_exp();
        let call = strides(q).map_or(call, |q| call.query_strides(q));
        let call = strides(pages).map_or(call, |pages| call.cache_strides(pages));
        layer.paged(call).map(Self).map_err(raised)
    }

    /// The kernels that a GPU of that name would launch for it, which no GPU is needed to know.
    fn kernels(&self, gpu: &str) -> PyResult<Vec<&'static str>> {
        let plan = self.planned(gpu)?;
        Ok(plan.launches().iter().map(|launch| launch.entry().name).collect())
    }

    /// Whether that GPU would read packed keys and values where they are, likewise.
    fn reads_in_place(&self, gpu: &str) -> PyResult<bool> {
        let Some(device) = DeviceInfo::known(gpu) else { return Err(unknown(gpu)) };
        in_place(Planner::new(device, PlanOptions::default()).plan(&self.0))
    }

    /// Names of the plan's tensors, and how many elements each has, likewise.
    fn tensors(&self, gpu: &str) -> PyResult<Vec<(&'static str, usize)>> {
        let plan = self.planned(gpu)?;
        Ok(read(&plan).map(|(id, spec)| (id.name(), spec.len())).collect())
    }

    /// Bytes of the plan's workspace, and how many counters it has, likewise.
    fn scratch(&self, gpu: &str) -> PyResult<(usize, usize)> {
        let plan = self.planned(gpu)?;
        Ok((plan.workspace_bytes(), plan.counters()))
    }

    /// 32-bit words of the schedule that the plan's calls read, likewise; 0 where they read none.
    fn schedule_words(&self, gpu: &str) -> PyResult<usize> {
        Ok(schedule_words(&*self.planned(gpu)?))
    }
}

impl Call {
    fn planned(&self, gpu: &str) -> PyResult<Arc<gqa_host::plan::Plan>> {
        let Some(device) = DeviceInfo::known(gpu) else { return Err(unknown(gpu)) };
        Planner::new(device, PlanOptions::default()).plan(&self.0).map_err(raised)
    }
}

fn unknown(gpu: &str) -> PyErr {
    invalid("gpu", gpu, "the name of a known GPU, such as h200")
}

/// A plan whose kernels are on a GPU.
#[pyclass(frozen)]
pub struct Plan {
    gpu: Arc<OpenGpu>,
    loaded: LoadedPlan,
}

#[pymethods]
impl Plan {
    /// Names of its tensors, in the order in which `enqueue` takes their addresses.
    #[getter]
    fn tensors(&self) -> Vec<&'static str> {
        read(self.loaded.plan()).map(|(id, _)| id.name()).collect()
    }

    /// 32-bit words of the schedule that its calls read; 0 where they read none.
    #[getter]
    fn schedule_words(&self) -> usize {
        schedule_words(self.loaded.plan())
    }

    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.loaded.plan().workspace_bytes()
    }

    #[getter]
    fn counters(&self) -> usize {
        self.loaded.plan().counters()
    }

    /// Which kernels it launches, and why.
    fn explain(&self) -> String {
        self.loaded.plan().explain().to_string()
    }

    /// Enqueues the plan on a stream. The package's functions ensure that the addresses are of
    /// tensors with the plan's types and shapes.
    fn enqueue(
        &self,
        addresses: Vec<u64>,
        workspace: u64,
        counters: u64,
        stream: usize,
    ) -> PyResult<()> {
        let plan = self.loaded.plan();
        let tensors = read(plan).count();
        if addresses.len() != tensors {
            return Err(invalid("addresses", addresses.len(), tensors));
        }
        let views = read(plan).zip(&addresses).map(|((id, spec), &address)| {
            let view = DeviceView::new(address, spec.dtype, &spec.shape);
            (*id, spec.strides.map_or(view, |strides| view.strided(strides)))
        });
        let views: Views<'_> = views.collect();
        let workspace = Workspace::new(workspace, plan.workspace_bytes(), counters);
        // SAFETY: the tensors have the plan's types and shapes. torch reuses their memory only for
        // later work on the same stream, and never destroys its streams
        let enqueued = unsafe {
            let stream = self.gpu.stream(stream);
            stream.and_then(|stream| self.loaded.enqueue(&views, workspace, &stream))
        };
        enqueued.map_err(named).map_err(raised)
    }

    /// Puts the kernel into a stream that writes the schedule of calls which read one, by the
    /// addresses of `cumulative_sequence_length`, `seqlens_k` and the schedule.
    fn schedule(&self, starts: u64, lengths: u64, words: u64, stream: usize) -> PyResult<()> {
        let ids = [
            (TensorId::CumulativeSequenceLength, starts),
            (TensorId::SeqlensK, lengths),
            (TensorId::Schedule, words),
        ];
        let views = read(self.loaded.plan()).filter_map(|(id, spec)| {
            let (_, address) = ids.iter().find(|(wanted, _)| wanted == id)?;
            Some((*id, DeviceView::new(*address, spec.dtype, &spec.shape)))
        });
        let views: Views<'_> = views.collect();
        // SAFETY: as above
        let enqueued = unsafe {
            let stream = self.gpu.stream(stream);
            stream.and_then(|stream| self.loaded.schedule(&views, &stream))
        };
        enqueued.map_err(raised)
    }
}

/// The error with the argument's name as Python has it.
fn named(error: Error) -> Error {
    match error {
        Error::Invalid { argument, got, allowed } if argument == TensorId::Schedule.name() => {
            Error::invalid("scheduler_metadata", got, allowed)
        }
        other => other,
    }
}

/// The tensors that calls of the plan read or write: a schedule only where it divides keys.
fn read(plan: &gqa_host::plan::Plan) -> impl Iterator<Item = &(TensorId, TensorSpec)> {
    let has_schedule = plan.schedule().is_some();
    plan.tensors().iter().filter(move |(id, _)| has_schedule || *id != TensorId::Schedule)
}

fn schedule_words(plan: &gqa_host::plan::Plan) -> usize {
    let schedule = read(plan).find(|(id, _)| *id == TensorId::Schedule);
    schedule.map_or(0, |(_, spec)| spec.len())
}
