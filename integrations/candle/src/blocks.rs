//! KV caches in blocks, whatever their rows are: what calls of them have in common.

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
use candle::{CpuStorage, CustomOp2, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use gqa_host::backend::IoViews;
use gqa_host::engine::Paged;
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{CacheView, Problem, TensorView};
use std::cell::RefCell;

/// A layer's keys and values in blocks. A latent layer's keys are its values, too.
pub(crate) struct Blocks {
    attention: Attention,
    dtype: DType,
    count: usize,
    pub(crate) tables: Tables,
    keys: Store,
    values: Option<Store>,
}

impl Blocks {
    /// Empty, with so many blocks of `block_size` rows each.
    pub(crate) fn new(
        attention: &Attention,
        count: usize,
        block_size: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        // Checks the layer now, with a call that every cache allows.
        let layer = attention.layer(dtype)?;
        layer.paged(Paged::decode(1, [count, block_size, 1])).map_err(ours)?;
        attention.check_tensors(0, device)?;
        let shape = [count, block_size, attention.heads.kv, attention.cached_size()];
        let store = |argument| Store::new(argument, layer.cache_dtype(), &shape, device);
        let has_values = attention.latent.is_none();
        let (keys, values) = (store("keys")?, has_values.then(|| store("values")).transpose()?);
        let tables = Tables::new(count, block_size)?;
        Ok(Self { attention: attention.clone(), dtype, count, tables, keys, values })
    }

    /// Appends new tokens, so many of each sequence of `batch`, and lets their queries attend.
    /// Tensors have shape (tokens, heads, size); a latent layer has rows of shape (tokens, size)
    /// for `key`, and no `value`.
    pub(crate) fn attend(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: Option<&Tensor>,
        batch: &[(Sequence, usize)],
    ) -> Result<Tensor> {
        let heads = self.attention.heads;
        let positions = self.attention.rope.as_ref().map(|rope| rope.cos.dim(0)).transpose()?;
        let grown = self.tables.grown(batch, positions)?;
        let tokens = grown.tokens();
        let of_heads = |name, tensor, n| {
            check_shape(name, tensor, &[tokens, n, heads.size], "(tokens, heads, size)")?;
            check_type(name, tensor, self.dtype)
        };
        of_heads("query", query, heads.query)?;
        match value {
            Some(value) => {
                of_heads("key", key, heads.kv)?;
                of_heads("value", value, heads.kv)?;
            }
            None => {
                check_shape("rows", key, &[tokens, heads.size], "(tokens, head size)")?;
                check_type("rows", key, self.dtype)?;
            }
        }
        let cache = [self.count, self.tables.block_size(), grown.per_sequence];
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
            output: Shape::from((tokens, heads.query, self.attention.value_size())),
            past: &grown.past,
            starts: &grown.starts,
            table: &grown.table,
            cache: RefCell::new((&mut self.keys, self.values.as_mut())),
        };
        let (query, key) = (contiguous(query)?, contiguous(key)?);
        let output = match value {
            Some(value) => query.apply_op3_no_bwd(&key, &contiguous(value)?, &step),
            None => query.apply_op2_no_bwd(&key, &step),
        }?;
        self.tables.commit(grown);
        Ok(output)
    }
}

/// One call: of query, key and, unless the layer is latent, value.
struct Step<'a> {
    problem: &'a Problem,
    attention: &'a Attention,
    output: Shape,
    past: &'a [i32],
    starts: &'a [i32],
    table: &'a [i32],
    /// Keys and values.
    cache: RefCell<(&'a mut Store, Option<&'a mut Store>)>,
}

/// A tensor on the CPU.
type OnCpu<'a> = (&'a CpuStorage, &'a Layout);

/// A tensor on a GPU.
#[cfg(feature = "cuda")]
type OnGpu<'a> = (&'a CudaStorage, &'a Layout);

impl Step<'_> {
    fn on_cpu(
        &self,
        query: OnCpu<'_>,
        key: OnCpu<'_>,
        value: Option<OnCpu<'_>>,
    ) -> Result<(CpuStorage, Shape)> {
        let (keys, values) = &mut *self.cache.borrow_mut();
        let present_key = keys.on_cpu()?.into();
        let present_value = match values {
            Some(values) => values.on_cpu()?.into(),
            None => CacheView::NONE,
        };
        let mut output = cpu::zeros("output", query.0.dtype(), self.output.dims())?;
        let value = value.map(|(value, layout)| cpu::view("value", value, layout)).transpose()?;
        let inputs = Tensors::default()
            .with(TensorId::Query, cpu::view("query", query.0, query.1)?)
            .with(TensorId::Key, cpu::view("key", key.0, key.1)?)
            .with(TensorId::Value, value)
            .with(TensorId::SeqlensK, TensorView::I32(self.past))
            .with(TensorId::CumulativeSequenceLength, TensorView::I32(self.starts))
            .with(TensorId::BlockTable, TensorView::I32(self.table));
        let io = IoViews {
            inputs,
            output: cpu::view_mut("output", &mut output)?,
            present_key,
            present_value,
            row_scales: None,
            output_qk: None,
            lse: None,
        };
        cpu::run_layer(self.problem, io, self.attention)?;
        Ok((output, self.output.clone()))
    }

    #[cfg(feature = "cuda")]
    fn on_gpu(
        &self,
        query: OnGpu<'_>,
        key: OnGpu<'_>,
        value: Option<OnGpu<'_>>,
    ) -> Result<(CudaStorage, Shape)> {
        let (keys, values) = &mut *self.cache.borrow_mut();
        let keys = keys.on_gpu()?;
        let values = values.as_mut().map(|values| values.on_gpu()).transpose()?;
        let gpu = Gpu::beside(keys, query.0)?;
        let (past, starts) = (gpu.numbers(self.past)?, gpu.numbers(self.starts)?);
        let table = gpu.numbers(self.table)?;
        let mut output = Gpu::output(query.0, &self.output)?;
        let value = value.map(|(value, layout)| Pointer::read("value", value, layout, &gpu));
        let values = values.map(|values| Pointer::written("values", values, &gpu)).transpose()?;
        let tensors = Tensors::default()
            .with(TensorId::Query, Pointer::read("query", query.0, query.1, &gpu)?)
            .with(TensorId::Key, Pointer::read("key", key.0, key.1, &gpu)?)
            .with(TensorId::Value, value.transpose()?)
            .with(TensorId::SeqlensK, Pointer::of(&past, 0, &gpu))
            .with(TensorId::CumulativeSequenceLength, Pointer::of(&starts, 0, &gpu))
            .with(TensorId::BlockTable, Pointer::of(&table, 0, &gpu))
            .with(TensorId::PresentKey, Pointer::written("keys", keys, &gpu)?)
            .with(TensorId::PresentValue, values)
            .with(TensorId::Output, Pointer::written("output", &mut output, &gpu)?);
        gpu.run_layer(self.problem, tensors, self.attention)?;
        Ok((output, self.output.clone()))
    }
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
        self.on_cpu((query, query_layout), (key, key_layout), Some((value, value_layout)))
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
        self.on_gpu((query, query_layout), (key, key_layout), Some((value, value_layout)))
    }
}

impl CustomOp2 for Step<'_> {
    fn name(&self) -> &'static str {
        "gqa-latent-kv-cache"
    }

    fn cpu_fwd(
        &self,
        query: &CpuStorage,
        query_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_cpu((query, query_layout), (key, key_layout), None)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        query: &CudaStorage,
        query_layout: &Layout,
        key: &CudaStorage,
        key_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_gpu((query, query_layout), (key, key_layout), None)
    }
}
