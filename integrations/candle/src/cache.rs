//! KV caches of sequences that each have room of their own.

use crate::attention::Attention;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{Gpu, Pointer};
use crate::device::Store;
use crate::error::{invalid, ours};
use crate::rows::{check_shape, check_type, readable, strides};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::backend::BackendStorage;
use candle::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use gqa_host::backend::IoViews;
use gqa_host::engine::Dense;
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Problem, Strided, TensorView};
use std::cell::RefCell;

/// A layer's keys, rotated, and values, with room for a number of tokens of each of `batch`
/// sequences. Calls append to it in place, and then attend.
///
/// ```
/// # use candle::{DType, Device, Result, Tensor};
/// # use gqa_candle::{Attention, KvCache};
/// # fn main() -> Result<()> {
/// let mut cache = KvCache::new(&Attention::new(2, 1, 8), 1, 16, DType::F32, &Device::Cpu)?;
/// let query = Tensor::ones((1, 3, 2, 8), DType::F32, &Device::Cpu)?;
/// let value = Tensor::ones((1, 3, 1, 8), DType::F32, &Device::Cpu)?;
/// let output = cache.attend(&query, &value, &value)?;
/// assert_eq!((output.dims(), cache.lengths()), (&[1, 3, 2, 8][..], &[3][..]));
/// # Ok(())
/// # }
/// ```
pub struct KvCache {
    attention: Attention,
    dtype: DType,
    batch: usize,
    capacity: usize,
    lengths: Vec<usize>,
    keys: Store,
    values: Store,
}

impl KvCache {
    /// Empty, with room for `capacity` tokens of each of `batch` sequences, in that element type.
    ///
    /// # Errors
    ///
    /// Where `attention` is not what kernels take, where the rotary embedding has fewer positions
    /// than the capacity, or is of another type or on another device, and where there is no memory.
    pub fn new(
        attention: &Attention,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        // Checks the layer now, with a call that every cache allows.
        let layer = attention.layer(dtype)?;
        attention.check_tensors(capacity, device)?;
        layer.dense(Dense::decode(batch, capacity)).map_err(ours)?;
        let shape = [batch, attention.heads.kv, capacity, attention.cached_size()];
        let store = |argument| Store::new(argument, layer.cache_dtype(), &shape, device);
        let (keys, values) = (store("keys")?, store("values")?);
        let lengths = vec![0; batch];
        Ok(Self { attention: attention.clone(), dtype, batch, capacity, lengths, keys, values })
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Tokens that a sequence has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all tokens of every sequence but the first `tokens`, such as drafts that were
    /// refused.
    pub fn truncate(&mut self, tokens: usize) {
        self.lengths.iter_mut().for_each(|length| *length = (*length).min(tokens));
    }

    /// Appends keys and values of as many new tokens of every sequence, and lets their queries
    /// attend to all of the sequence up to themselves.
    ///
    /// `query` has shape (batch, tokens, query heads, size), `key` and `value`
    /// (batch, tokens, KV heads, size), none of them rotated. They are read where they are, if
    /// heads are contiguous, and rows a multiple of 16 bytes apart. Returns a tensor of the shape
    /// of `query`.
    ///
    /// # Errors
    ///
    /// Where a tensor has another type, shape or device than the cache's, and where it has no room
    /// for the tokens. The cache is then as it was.
    pub fn attend(&mut self, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Tensor> {
        let rows = self.rows(query)?;
        self.run([query, key, value], rows, &vec![rows; self.batch])
    }

    /// The same for prompts of different lengths, which begin with this call: of sequence `b` the
    /// first `tokens[b]` rows are tokens, 1 or more, and the others padding, whose output means
    /// nothing.
    ///
    /// # Errors
    ///
    /// As [`attend`](Self::attend), and where a sequence has tokens already.
    pub fn attend_padded(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        tokens: &[usize],
    ) -> Result<Tensor> {
        let rows = self.rows(query)?;
        if tokens.len() != self.batch || tokens.iter().any(|n| !(1..=rows).contains(n)) {
            let allowed = format!("{} numbers from 1 to {rows}, the rows of query", self.batch);
            return Err(invalid("tokens", format!("{tokens:?}"), allowed));
        }
        if self.lengths.iter().any(|length| *length > 0) {
            let got = format!("{:?} tokens in the KV cache", self.lengths);
            return Err(invalid("tokens", got, "none: padded prompts begin their sequences"));
        }
        self.run([query, key, value], rows, tokens)
    }

    /// Rows of a query of this cache's shape.
    fn rows(&self, query: &Tensor) -> Result<usize> {
        match *query.dims() {
            [_, rows, _, _] => Ok(rows),
            ref dims => {
                let allowed = "(batch, tokens, query heads, size)";
                Err(invalid("query", format!("{dims:?}"), allowed))
            }
        }
    }

    /// Appends and attends. `tokens` says how many of each sequence's `rows` rows are tokens.
    fn run(&mut self, tensors: [&Tensor; 3], rows: usize, tokens: &[usize]) -> Result<Tensor> {
        let heads = self.attention.heads;
        let names = ["query", "key", "value"];
        for ((name, tensor), n) in
            names.into_iter().zip(tensors).zip([heads.query, heads.kv, heads.kv])
        {
            let shape = [self.batch, rows, n, heads.size];
            check_shape(name, tensor, &shape, "(batch, tokens, heads, size)")?;
            check_type(name, tensor, self.dtype)?;
        }
        let lengths = self.lengths_with(tokens)?;
        let [query, key, value] = tensors;
        if rows == 0 {
            return query.zeros_like();
        }
        let [query, key, value] = [readable(query)?, readable(key)?, readable(value)?];
        let first = self.lengths.iter().all(|length| *length == 0);
        let call = match first {
            true => Dense::prefill(self.batch, rows, self.capacity),
            false => Dense::chunk(self.batch, rows, self.capacity),
        };
        let strided = Strided {
            query: strides(query.layout()),
            key: strides(key.layout()),
            value: strides(value.layout()),
            ..Strided::default()
        };
        let problem = self.attention.layer(self.dtype)?.dense(call);
        let problem = problem.and_then(|problem| problem.with_strides(strided)).map_err(ours)?;
        let last: Vec<i32> = lengths.iter().map(|length| *length as i32 - 1).collect();
        let step = Step {
            problem: &problem,
            attention: &self.attention,
            last: &last,
            cache: RefCell::new([&mut self.keys, &mut self.values]),
        };
        let output = query.apply_op3_no_bwd(&key, &value, &step)?;
        self.lengths = lengths;
        Ok(output)
    }

    /// Tokens of each sequence after a call with so many new ones.
    fn lengths_with(&self, tokens: &[usize]) -> Result<Vec<usize>> {
        let lengths = self.lengths.iter().zip(tokens).map(|(length, new)| length + new);
        let lengths: Vec<usize> = lengths.collect();
        match lengths.iter().position(|length| *length > self.capacity) {
            None => Ok(lengths),
            Some(b) => {
                let got = format!("{} for sequence {b}, which has {}", tokens[b], self.lengths[b]);
                let allowed =
                    format!("up to {} in all, the capacity of the KV cache", self.capacity);
                Err(invalid("tokens", got, allowed))
            }
        }
    }
}

/// One call: of query, key and value.
struct Step<'a> {
    problem: &'a Problem,
    attention: &'a Attention,
    /// seqlens_k
    last: &'a [i32],
    /// Keys and values.
    cache: RefCell<[&'a mut Store; 2]>,
}

impl CustomOp3 for Step<'_> {
    fn name(&self) -> &'static str {
        "gqa-kv-cache"
    }

    fn cpu_fwd(
        &self,
        query: &CpuStorage,
        query_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
        value: &CpuStorage,
        value_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let [keys, values] = &mut *self.cache.borrow_mut();
        let (keys, values) = (keys.on_cpu()?, values.on_cpu()?);
        let shape = query_layout.shape();
        let mut output = cpu::zeros("output", query.dtype(), shape.dims())?;
        let inputs = Tensors::default()
            .with(TensorId::Query, cpu::view("query", query, query_layout)?)
            .with(TensorId::Key, cpu::view("key", key, key_layout)?)
            .with(TensorId::Value, cpu::view("value", value, value_layout)?)
            .with(TensorId::SeqlensK, TensorView::I32(self.last));
        let io = IoViews {
            inputs,
            output: cpu::view_mut("output", &mut output)?,
            present_key: keys.into(),
            present_value: values.into(),
            row_scales: None,
            output_qk: None,
            lse: None,
        };
        cpu::run_layer(self.problem, io, self.attention)?;
        Ok((output, shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        query: &CudaStorage,
        query_layout: &Layout,
        key: &CudaStorage,
        key_layout: &Layout,
        value: &CudaStorage,
        value_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let [keys, values] = &mut *self.cache.borrow_mut();
        let (keys, values) = (keys.on_gpu()?, values.on_gpu()?);
        let (gpu, shape) = (Gpu::beside(keys, query)?, query_layout.shape());
        let last = gpu.numbers(self.last)?;
        let mut output = Gpu::output(query, shape)?;
        let tensors = Tensors::default()
            .with(TensorId::Query, Pointer::read("query", query, query_layout, &gpu)?)
            .with(TensorId::Key, Pointer::read("key", key, key_layout, &gpu)?)
            .with(TensorId::Value, Pointer::read("value", value, value_layout, &gpu)?)
            .with(TensorId::SeqlensK, Pointer::of(&last, 0, &gpu))
            .with(TensorId::PresentKey, Pointer::written("keys", keys, &gpu)?)
            .with(TensorId::PresentValue, Pointer::written("values", values, &gpu)?)
            .with(TensorId::Output, Pointer::written("output", &mut output, &gpu)?);
        gpu.run_layer(self.problem, tensors, self.attention)?;
        Ok((output, shape.clone()))
    }
}
