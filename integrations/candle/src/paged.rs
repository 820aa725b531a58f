//! KV caches of blocks, which sequences share.

use crate::attention::Attention;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{Gpu, Pointer};
use crate::device::Store;
use crate::error::ours;
use crate::rows::{check_shape, check_type, contiguous};
use crate::tables::{Sequence, Tables};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::backend::BackendStorage;
use candle::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use gqa_host::backend::IoViews;
use gqa_host::engine::Paged;
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Problem, TensorView};
use std::cell::RefCell;

/// A layer's keys, rotated, and values in blocks of rows. Sequences take blocks as they grow, and
/// give them back when they end, so that memory is for tokens that there are. A call takes new
/// tokens of any of them, as many of each as there are: decode steps and prompts together.
///
/// ```
/// # use candle::{DType, Device, Result, Tensor};
/// # use gqa_candle::{Attention, PagedKvCache};
/// # fn main() -> Result<()> {
/// let attention = Attention::new(2, 1, 8);
/// let mut cache = PagedKvCache::new(&attention, 8, 16, DType::F32, &Device::Cpu)?;
/// let (first, second) = (cache.begin(), cache.begin());
/// let heads = |tokens, n| Tensor::ones((tokens, n, 8), DType::F32, &Device::Cpu);
/// // A prompt of 20 tokens, and one of 3.
/// let batch = [(first, 20), (second, 3)];
/// cache.attend(&heads(23, 2)?, &heads(23, 1)?, &heads(23, 1)?, &batch)?;
/// assert_eq!((cache.length(first), cache.free_blocks()), (Some(20), 5));
/// cache.end(first);
/// assert_eq!(cache.free_blocks(), 7);
/// # Ok(())
/// # }
/// ```
pub struct PagedKvCache {
    attention: Attention,
    dtype: DType,
    blocks: usize,
    tables: Tables,
    keys: Store,
    values: Store,
}

impl PagedKvCache {
    /// Empty, with so many blocks of `block_size` rows each. Blocks of a power of two of 16 rows or
    /// more are read in place on every device.
    ///
    /// # Errors
    ///
    /// Where `attention` is not what kernels take, where the rotary embedding is of another type or
    /// on another device, and where there is no memory.
    pub fn new(
        attention: &Attention,
        blocks: usize,
        block_size: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        // What is wrong with the layer is told now, by a call that any cache would take.
        let layer = attention.layer(dtype)?;
        layer.paged(Paged::decode(1, [blocks, block_size, 1])).map_err(ours)?;
        attention.check_tensors(0, device)?;
        let shape = [blocks, block_size, attention.heads.kv, attention.cached_size()];
        let store = |argument| Store::new(argument, layer.cache_dtype(), &shape, device);
        let (keys, values) = (store("keys")?, store("values")?);
        let tables = Tables::new(blocks, block_size)?;
        Ok(Self { attention: attention.clone(), dtype, blocks, tables, keys, values })
    }

    /// Begins a sequence, which takes no block yet.
    pub fn begin(&mut self) -> Sequence {
        self.tables.begin()
    }

    /// Ends a sequence and gives its blocks to others. Whether there was one.
    pub fn end(&mut self, sequence: Sequence) -> bool {
        self.tables.end(sequence)
    }

    /// Tokens of a sequence.
    pub fn length(&self, sequence: Sequence) -> Option<usize> {
        self.tables.length(sequence)
    }

    /// Blocks that no sequence has.
    pub fn free_blocks(&self) -> usize {
        self.tables.free()
    }

    /// Appends keys and values of new tokens, so many of each sequence of `batch`, and lets their
    /// queries attend to all of their sequence up to themselves.
    ///
    /// The tokens of the sequences lie one behind the other: `query` has shape
    /// (tokens, query heads, size), `key` and `value` (tokens, KV heads, size), none of them
    /// rotated. Returns a tensor of the shape of `query`.
    ///
    /// # Errors
    ///
    /// Where a tensor has another type, shape or device than the cache's; where a sequence is not
    /// one of the cache or is there twice; where there are not enough blocks, or positions of the
    /// rotary embedding. Lengths and blocks are then as they were.
    pub fn attend(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        batch: &[(Sequence, usize)],
    ) -> Result<Tensor> {
        let heads = self.attention.heads;
        let positions = self.attention.rope.as_ref().map(|rope| rope.cos.dim(0)).transpose()?;
        let grown = self.tables.grown(batch, positions)?;
        let tokens = grown.tokens();
        for (name, tensor, n) in
            [("query", query, heads.query), ("key", key, heads.kv), ("value", value, heads.kv)]
        {
            check_shape(name, tensor, &[tokens, n, heads.size], "(tokens, heads, size)")?;
            check_type(name, tensor, self.dtype)?;
        }
        let [block_size, per_sequence] = [self.tables.block_size(), grown.per_sequence];
        let cache = [self.blocks, block_size, per_sequence];
        let most = batch.iter().map(|(_, tokens)| *tokens).max().unwrap_or_default();
        let call = match most == 1 && tokens == batch.len() {
            true => Paged::decode(batch.len(), cache),
            false => Paged::new(batch.len(), tokens, cache).most_tokens(most),
        };
        let call = call.longest(grown.longest);
        let problem = self.attention.layer(self.dtype)?.paged(call).map_err(ours)?;
        let step = Step {
            problem: &problem,
            attention: &self.attention,
            past: &grown.past,
            starts: &grown.starts,
            table: &grown.table,
            cache: RefCell::new([&mut self.keys, &mut self.values]),
        };
        let (query, key, value) = (contiguous(query)?, contiguous(key)?, contiguous(value)?);
        let output = query.apply_op3_no_bwd(&key, &value, &step)?;
        self.tables.commit(grown);
        Ok(output)
    }
}

/// One call: of query, key and value.
struct Step<'a> {
    problem: &'a Problem,
    attention: &'a Attention,
    past: &'a [i32],
    starts: &'a [i32],
    table: &'a [i32],
    /// Keys and values.
    cache: RefCell<[&'a mut Store; 2]>,
}

impl CustomOp3 for Step<'_> {
    fn name(&self) -> &'static str {
        "gqa-paged-kv-cache"
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
            .with(TensorId::SeqlensK, TensorView::I32(self.past))
            .with(TensorId::CumulativeSequenceLength, TensorView::I32(self.starts))
            .with(TensorId::BlockTable, TensorView::I32(self.table));
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
        let (past, starts) = (gpu.numbers(self.past)?, gpu.numbers(self.starts)?);
        let table = gpu.numbers(self.table)?;
        let mut output = Gpu::output(query, shape)?;
        let tensors = Tensors::default()
            .with(TensorId::Query, Pointer::read("query", query, query_layout, &gpu)?)
            .with(TensorId::Key, Pointer::read("key", key, key_layout, &gpu)?)
            .with(TensorId::Value, Pointer::read("value", value, value_layout, &gpu)?)
            .with(TensorId::SeqlensK, Pointer::of(&past, 0, &gpu))
            .with(TensorId::CumulativeSequenceLength, Pointer::of(&starts, 0, &gpu))
            .with(TensorId::BlockTable, Pointer::of(&table, 0, &gpu))
            .with(TensorId::PresentKey, Pointer::written("keys", keys, &gpu)?)
            .with(TensorId::PresentValue, Pointer::written("values", values, &gpu)?)
            .with(TensorId::Output, Pointer::written("output", &mut output, &gpu)?);
        gpu.run_layer(self.problem, tensors, self.attention)?;
        Ok((output, shape.clone()))
    }
}
