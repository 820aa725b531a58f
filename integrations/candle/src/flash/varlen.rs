//! Sequences of any lengths, one behind the other.

use super::bias::Bias;
use super::scores::{Scores, Sizes};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{Gpu, Pointer};
use crate::error::invalid;
use crate::rows::{check_type, readable};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
#[cfg(feature = "cuda")]
use candle::backend::BackendDevice;
use candle::backend::BackendStorage;
use candle::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Problem, RowStrides, Strided, TensorView};
use std::ops::Range;

/// Where the rows of each sequence are, and its keys.
#[derive(Clone, Debug)]
pub(super) struct Starts {
    pub(super) rows: Vec<usize>,
    pub(super) keys: Vec<usize>,
}

impl Starts {
    /// Of the tensors `seqlens_q` and `seqlens_k`; no sequence is longer than `most` says.
    pub(super) fn of([q, k]: [&Tensor; 2], most: [usize; 2]) -> Result<Self> {
        let rows = starts("seqlens_q", q, ("max_seqlen_q", most[0]))?;
        let keys = starts("seqlens_k", k, ("max_seqlen_k", most[1]))?;
        if rows.len() != keys.len() {
            let allowed = format!("{}, as seqlens_q has", rows.len());
            return Err(invalid("seqlens_k", format!("{} numbers", keys.len()), allowed));
        }
        Ok(Self { rows, keys })
    }

    /// Each sequence's rows and keys.
    pub(super) fn sequences(&self) -> impl Iterator<Item = [Range<usize>; 2]> {
        let ranges = |starts: &[usize]| starts.windows(2).map(|w| w[0]..w[1]).collect::<Vec<_>>();
        ranges(&self.rows).into_iter().zip(ranges(&self.keys)).map(|(rows, keys)| [rows, keys])
    }

    /// Rows of all sequences; errs if the tensor has fewer. Further rows belong to no sequence.
    pub(super) fn check_rows(&self, rows: usize) -> Result<usize> {
        check_end("seqlens_q", &self.rows, rows)
    }
}

fn check_end(argument: &'static str, starts: &[usize], rows: usize) -> Result<usize> {
    let end = starts.last().copied().unwrap_or_default();
    match end <= rows {
        true => Ok(end),
        false => {
            let allowed = format!("up to {rows}, the rows that there are");
            Err(invalid(argument, format!("{end} at its end"), allowed))
        }
    }
}

/// Numbers that begin with 0 and do not fall, nor rise by more than `most`.
fn starts(
    argument: &'static str,
    tensor: &Tensor,
    (bound, most): (&'static str, usize),
) -> Result<Vec<usize>> {
    let starts = integers(argument, tensor)?;
    let starts: Option<Vec<usize>> = starts.into_iter().map(|n| n.try_into().ok()).collect();
    let rising = |starts: &Vec<usize>| starts.first() == Some(&0) && starts.is_sorted();
    let Some(starts) = starts.filter(rising) else {
        let allowed = "numbers from 0 on, none less than the one before";
        return Err(invalid(argument, tensor, allowed));
    };
    let longest = starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or_default();
    match longest <= most {
        true => Ok(starts),
        false => Err(invalid(bound, most, format!("{longest} or more, by {argument}"))),
    }
}

/// The elements of a tensor with one dimension.
pub(super) fn integers(argument: &'static str, tensor: &Tensor) -> Result<Vec<i64>> {
    match (tensor.dtype(), tensor.rank()) {
        (DType::U32, 1) => Ok(tensor.to_vec1::<u32>()?.into_iter().map(i64::from).collect()),
        (DType::I32, 1) => Ok(tensor.to_vec1::<i32>()?.into_iter().map(i64::from).collect()),
        (DType::I64, 1) => tensor.to_vec1(),
        (dtype, _) => {
            let got = format!("{dtype:?} {:?}", tensor.shape());
            Err(invalid(argument, got, "U32, I32 or I64 of one dimension"))
        }
    }
}

/// Attention of query, key and value, sequence by sequence.
pub(super) struct Varlen {
    scores: Scores,
    starts: Starts,
}

impl Varlen {
    pub(super) fn new(scores: Scores, starts: Starts) -> Self {
        Self { scores, starts }
    }

    pub(super) fn apply(self, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let ([rows, heads, size], [keys, kv_heads, _]) = (three("q", q)?, three("k", k)?);
        for (argument, tensor) in [("k", k), ("v", v)] {
            check_type(argument, tensor, q.dtype())?;
            if tensor.dims() != [keys, kv_heads, size] {
                let allowed = format!("(keys, KV heads, size = {size}), as q and each other");
                return Err(invalid(argument, format!("{:?}", tensor.dims()), allowed));
            }
        }
        if heads == 0 || kv_heads == 0 {
            return Err(invalid("q", format!("{heads} heads over {kv_heads}"), "1 or more"));
        }
        // Kernels read a tensor from where a sequence begins.
        let aligned = |heads: usize| (heads * size * q.dtype().size_in_bytes()).is_multiple_of(16);
        if !(q.device().is_cpu() || aligned(heads) && aligned(kv_heads)) {
            let got = format!("{heads} heads over {kv_heads} of {size} {:?}", q.dtype());
            return Err(invalid("q", got, "rows of a multiple of 16 bytes, on a GPU"));
        }
        self.starts.check_rows(rows)?;
        check_end("seqlens_k", &self.starts.keys, keys)?;
        readable(q)?.apply_op3(&readable(k)?, &readable(v)?, self)
    }
}

fn three(argument: &'static str, tensor: &Tensor) -> Result<[usize; 3]> {
    tensor.dims().try_into().map_err(|_| {
        invalid(argument, format!("{:?}", tensor.dims()), "(rows of all sequences, heads, size)")
    })
}

/// Strides of a tensor of shape (rows, heads, size); `None` if it is contiguous.
fn strides(layout: &Layout, rows: usize) -> Option<RowStrides> {
    if layout.is_contiguous() {
        return None;
    }
    let (dims, strides) = (layout.dims(), layout.stride());
    // Where there is one only, its distance to the next means nothing.
    let head = if dims[1] > 1 { strides[1] } else { 0 };
    let row = if rows > 1 { strides[0] } else { 0 };
    Some(RowStrides { batch: 0, head, row })
}

/// Rows of such a tensor; where it has strides, all that is behind the first of them.
fn rows<'a>(
    argument: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
    rows: Range<usize>,
) -> Result<TensorView<'a>> {
    let stride = layout.stride()[0];
    let all = cpu::count(storage);
    let start = (layout.start_offset() + rows.start * stride).min(all);
    let end = if layout.is_contiguous() { start + rows.len() * stride } else { all };
    cpu::part(argument, storage, start..end)
}

impl Varlen {
    /// The problem of one sequence of tensors with these layouts.
    fn problem(
        &self,
        dtype: DType,
        sizes: Sizes,
        [q, k, v]: [&Layout; 3],
        bias: Option<&Bias>,
    ) -> Result<Problem> {
        let strided = Strided {
            query: strides(q, sizes.rows),
            key: strides(k, sizes.keys),
            value: strides(v, sizes.keys),
            ..Strided::default()
        };
        let bias = bias.map(|bias| bias.heads);
        self.scores.problem(dtype, sizes, self.scores.window, bias, strided)
    }
}

impl CustomOp3 for Varlen {
    fn name(&self) -> &'static str {
        "flash-attn-varlen"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (shape, dims) = (q_layout.shape(), q_layout.dims());
        let mut output = cpu::zeros("output", q.dtype(), dims)?;
        let (heads, kv_heads, size) = (dims[1], k_layout.dims()[1], dims[2]);
        for [q_rows, keys] in self.starts.sequences().filter(|[rows, _]| !rows.is_empty()) {
            let sizes =
                Sizes { batch: 1, rows: q_rows.len(), keys: keys.len(), heads, kv_heads, size };
            let bias = Bias::alibi(&self.scores, sizes, q.dtype())?;
            let layouts = [q_layout, k_layout, v_layout];
            let problem = self.problem(q.dtype(), sizes, layouts, bias.as_ref())?;
            let last = [keys.len() as i32 - 1];
            let inputs = Tensors::default()
                .with(TensorId::Query, rows("q", q, q_layout, q_rows.clone())?)
                .with(TensorId::Key, rows("k", k, k_layout, keys.clone())?)
                .with(TensorId::Value, rows("v", v, v_layout, keys)?)
                .with(TensorId::SeqlensK, TensorView::I32(&last))
                .with(TensorId::AttentionBias, bias.as_ref().map(Bias::view).transpose()?);
            let row = heads * size;
            let to = q_rows.start * row..q_rows.end * row;
            cpu::attend(&problem, inputs, cpu::part_mut("output", &mut output, to)?)?;
        }
        Ok((output, shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (device, shape, dims) = (q.device(), q_layout.shape(), q_layout.dims());
        let (gpu, element) = (Gpu::of(device)?, q.dtype().size_in_bytes());
        let (heads, kv_heads, size) = (dims[1], k_layout.dims()[1], dims[2]);
        let mut output = device.zeros_impl(shape, q.dtype())?;
        for [rows, keys] in self.starts.sequences().filter(|[rows, _]| !rows.is_empty()) {
            let sizes =
                Sizes { batch: 1, rows: rows.len(), keys: keys.len(), heads, kv_heads, size };
            let bias = Bias::alibi(&self.scores, sizes, q.dtype())?;
            let problem =
                self.problem(q.dtype(), sizes, [q_layout, k_layout, v_layout], bias.as_ref())?;
            let last = gpu.numbers(&[keys.len() as i32 - 1])?;
            let bias = bias.map(|bias| bias.on(device)).transpose()?;
            let at = |layout: &Layout, row: usize| row * layout.stride()[0];
            let query = Pointer::read("q", q, q_layout, &gpu)?;
            let key = Pointer::read("k", k, k_layout, &gpu)?;
            let value = Pointer::read("v", v, v_layout, &gpu)?;
            let to = Pointer::written("output", &mut output, &gpu)?;
            let tensors = Tensors::default()
                .with(TensorId::Query, query.offset(at(q_layout, rows.start), element))
                .with(TensorId::Key, key.offset(at(k_layout, keys.start), element))
                .with(TensorId::Value, value.offset(at(v_layout, keys.start), element))
                .with(TensorId::SeqlensK, Pointer::of(&last, 0, &gpu))
                .with(
                    TensorId::AttentionBias,
                    bias.as_ref().map(|b| Pointer::all(b, &gpu)).transpose()?,
                )
                .with(TensorId::Output, to.offset(rows.start * heads * size, element));
            gpu.run(&problem, &tensors)?;
        }
        Ok((output, shape.clone()))
    }
}
