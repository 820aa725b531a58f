//! Sequences of any lengths over a paged KV cache.

use super::dense::Dense;
use super::scores::{Scores, check_heads};
use super::varlen::{Starts, integers};
#[cfg(feature = "cuda")]
use crate::attention::element_type;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{Gpu, Pointer};
use crate::error::{invalid, ours};
use crate::rows::{check_type, contiguous};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
#[cfg(feature = "cuda")]
use candle::backend::BackendDevice;
use candle::backend::BackendStorage;
use candle::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};
use gqa_host::backend::IoViews;
use gqa_host::engine::{self, Heads, Layer};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Problem, TensorView};
use std::ops::Range;

/// Attention of query over blocks of keys and values.
pub(super) struct Paged {
    scores: Scores,
    starts: Starts,
    /// (sequences, blocks of a sequence)
    table: Vec<i32>,
    /// Blocks of a sequence at most.
    per_sequence: usize,
    /// Of each sequence, where there are some.
    ranges: Option<Vec<Vec<[i32; 2]>>>,
}

/// What the tensors of a call have in common.
#[derive(Clone, Copy)]
struct Cache {
    rows: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    blocks: usize,
    block_size: usize,
}

impl Paged {
    pub(super) fn new(
        scores: Scores,
        starts: Starts,
        table: &Tensor,
        ranges: Option<&Tensor>,
    ) -> Result<Self> {
        let sequences = starts.rows.len() - 1;
        let [rows, per_sequence] = *table.dims() else {
            let got = format!("{:?}", table.dims());
            return Err(invalid("block_table", got, "(batch, blocks of a sequence)"));
        };
        if rows != sequences {
            let allowed = format!("{sequences} rows, one for each sequence of seqlens_q");
            return Err(invalid("block_table", format!("{rows} rows"), allowed));
        }
        let table = integers("block_table", &table.flatten_all()?)?;
        // What is no block of any cache is none of this one.
        let table = table.into_iter().map(|block| block.try_into().unwrap_or(-1)).collect();
        let ranges = ranges.map(|ranges| of_sequences(ranges, sequences)).transpose()?;
        Ok(Self { scores, starts, table, per_sequence, ranges })
    }

    pub(super) fn apply(self, [q, k, v]: [&Tensor; 3], block_size: usize) -> Result<Tensor> {
        let cache = Cache::of(q.layout(), k.layout())?;
        for (argument, tensor) in [("k", k), ("v", v)] {
            check_type(argument, tensor, q.dtype())?;
            if tensor.dims() != [cache.blocks, block_size, cache.kv_heads, cache.size] {
                let Cache { kv_heads, size, .. } = cache;
                let allowed = format!(
                    "(blocks, page_block_size = {block_size}, KV heads = {kv_heads}, size = {size})"
                );
                return Err(invalid(argument, format!("{:?}", tensor.dims()), allowed));
            }
        }
        let rows = self.starts.check_rows(cache.rows)?;
        self.check_blocks(cache)?;
        let (behind, q) = (cache.rows - rows, q.narrow(0, 0, rows)?);
        let (k, v) = (contiguous(k)?, contiguous(v)?);
        let output = match self.in_place(cache.size) {
            true => contiguous(&q)?.apply_op3(&k, &v, self),
            false => self.gathered(cache, [&q, &k, &v]),
        };
        match behind {
            0 => output,
            behind => output?.pad_with_zeros(0, 0, behind),
        }
    }

    /// Errs unless every key has a place.
    fn check_blocks(&self, cache: Cache) -> Result<()> {
        for (b, [_, keys]) in self.starts.sequences().enumerate() {
            let needed = keys.len().div_ceil(cache.block_size.max(1));
            if needed > self.per_sequence {
                let allowed = format!("{needed} or more, for the {} keys of {b}", keys.len());
                return Err(invalid(
                    "block_table",
                    format!("{} columns", self.per_sequence),
                    allowed,
                ));
            }
            for (i, &block) in self.blocks(b).iter().take(needed).enumerate() {
                if !usize::try_from(block).is_ok_and(|block| block < cache.blocks) {
                    let allowed = format!("0 to {}, the last block", cache.blocks as i64 - 1);
                    return Err(invalid("block_table", format!("{block} at ({b}, {i})"), allowed));
                }
            }
        }
        Ok(())
    }

    /// The blocks of a sequence.
    fn blocks(&self, b: usize) -> &[i32] {
        &self.table[b * self.per_sequence..][..self.per_sequence]
    }

    /// Whether paged kernels support the window, so that they can read the cache in place.
    fn in_place(&self, size: usize) -> bool {
        let known = matches!(self.scores.window[1], None | Some(0)) && self.ranges.is_none();
        let fits = self.starts.sequences().all(|[rows, keys]| rows.len() <= keys.len());
        known && fits && size.is_multiple_of(8)
    }

    /// The problem of a call that reads the cache in place.
    fn problem(&self, cache: Cache, dtype: gqa_host::DType) -> Result<Problem> {
        let heads = Heads { query: cache.heads, kv: cache.kv_heads, size: cache.size };
        let layer = Layer::new(dtype, heads);
        let mut layer = layer.scale(self.scores.scale).softcap(self.scores.softcap);
        if let Some(left) = self.scores.window[0].filter(|left| *left < i32::MAX as usize) {
            layer = layer.window(left + 1);
        }
        if self.scores.window[1].is_none() {
            layer = layer.bidirectional();
        }
        let longest = |of: fn(&[Range<usize>; 2]) -> usize| {
            self.starts.sequences().map(|sequence| of(&sequence)).max().unwrap_or_default()
        };
        let blocks = [cache.blocks, cache.block_size, self.per_sequence];
        let call = engine::Paged::new(self.starts.rows.len() - 1, cache.rows, blocks)
            .most_tokens(longest(|[rows, _]| rows.len()))
            .longest(longest(|[_, keys]| keys.len()))
            .slot_mapping();
        layer.paged(call).map_err(ours)
    }

    /// Attention that reads the cache in place.
    fn run_in_place(
        &self,
        cache: Cache,
        [q, k, v]: [TensorView<'_>; 3],
        output: &mut CpuStorage,
    ) -> Result<()> {
        let dtype = output.dtype();
        let output = cpu::view_mut("output", output)?;
        let problem = self.problem(cache, q.dtype())?;
        let Lengths { past, starts } = Lengths::of(&self.starts);
        // The cache already has all keys: the call's own keys and values are dummies, with slot -1,
        // that are not written or read.
        let slots = vec![-1; cache.rows];
        let none = cpu::zeros("k", dtype, &[cache.rows, cache.kv_heads, cache.size])?;
        let inputs = Tensors::default()
            .with(TensorId::Query, q)
            .with(TensorId::Key, cpu::all("k", &none)?)
            .with(TensorId::Value, cpu::all("v", &none)?)
            .with(TensorId::SeqlensK, TensorView::I32(&past))
            .with(TensorId::CumulativeSequenceLength, TensorView::I32(&starts))
            .with(TensorId::SlotMapping, TensorView::I32(&slots))
            .with(TensorId::BlockTable, TensorView::I32(&self.table));
        let (present_key, present_value) = (k.into(), v.into());
        let mut io = IoViews {
            inputs,
            output,
            present_key,
            present_value,
            row_scales: None,
            output_qk: None,
            lse: None,
        };
        cpu::run(&problem, &mut io)
    }

    /// Gathers each sequence's keys and values; a bias expresses what a window cannot.
    fn gathered(&self, cache: Cache, [q, k, v]: [&Tensor; 3]) -> Result<Tensor> {
        let mut outputs = Vec::new();
        for (b, [rows, keys]) in
            self.starts.sequences().enumerate().filter(|(_, s)| !s[0].is_empty())
        {
            let places = (0..keys.len()).map(|row| self.place(b, row, cache.block_size));
            let places = Tensor::from_iter(places, k.device())?;
            let of = |cache: &Tensor| cache.flatten(0, 1)?.index_select(&places, 0)?.unsqueeze(0);
            let scores = Scores { slopes: None, ..self.scores };
            let ranges = self.ranges.as_ref().map(|ranges| ranges[b].clone());
            let query = q.narrow(0, rows.start, rows.len())?.unsqueeze(0)?;
            let output = Dense { scores, ranges }.apply([&query, &of(k)?, &of(v)?])?;
            outputs.push(output.squeeze(0)?);
        }
        match outputs.is_empty() {
            true => q.zeros_like(),
            false => Tensor::cat(&outputs, 0),
        }
    }

    /// Where a sequence's row is, through all blocks.
    fn place(&self, b: usize, row: usize, block_size: usize) -> i64 {
        let block = self.blocks(b)[row / block_size];
        i64::from(block) * block_size as i64 + (row % block_size) as i64
    }
}

/// The lengths of sequences, as paged kernels take them.
struct Lengths {
    /// Keys before the rows of each.
    past: Vec<i32>,
    /// First row of each, and their number.
    starts: Vec<i32>,
}

impl Lengths {
    fn of(starts: &Starts) -> Self {
        let past = starts.sequences().map(|[rows, keys]| (keys.len() - rows.len()) as i32);
        Self { past: past.collect(), starts: starts.rows.iter().map(|n| *n as i32).collect() }
    }
}

impl Cache {
    fn of(q: &Layout, k: &Layout) -> Result<Self> {
        let [rows, heads, size] = *q.dims() else {
            let got = format!("{:?}", q.dims());
            return Err(invalid("q", got, "(rows of all sequences, heads, size)"));
        };
        let [blocks, block_size, kv_heads, _] = *k.dims() else {
            let got = format!("{:?}", k.dims());
            return Err(invalid("k", got, "(blocks, page_block_size, KV heads, size)"));
        };
        check_heads(heads, kv_heads)?;
        Ok(Self { rows, heads, kv_heads, size, blocks, block_size })
    }
}

/// The ranges of each sequence, of a tensor of shape (sequences, ranges, 2).
fn of_sequences(ranges: &Tensor, sequences: usize) -> Result<Vec<Vec<[i32; 2]>>> {
    match (ranges.dtype(), ranges.dims()) {
        (DType::I32, &[n, _, 2]) if n == sequences => {
            let ranges = ranges.to_vec3::<i32>()?;
            let pairs =
                |ranges: Vec<Vec<i32>>| ranges.into_iter().map(|pair| [pair[0], pair[1]]).collect();
            Ok(ranges.into_iter().map(pairs).collect())
        }
        (dtype, dims) => {
            let allowed = format!("I32 of shape (batch = {sequences}, ranges, 2)");
            Err(invalid("mm_prefix_ranges", format!("{dtype:?} {dims:?}"), allowed))
        }
    }
}

impl CustomOp3 for Paged {
    fn name(&self) -> &'static str {
        "flash-attn-varlen-paged"
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
        let cache = Cache::of(q_layout, k_layout)?;
        let mut output = cpu::zeros("output", q.dtype(), q_layout.dims())?;
        let views = [
            cpu::view("q", q, q_layout)?,
            cpu::view("k", k, k_layout)?,
            cpu::view("v", v, v_layout)?,
        ];
        self.run_in_place(cache, views, &mut output)?;
        Ok((output, q_layout.shape().clone()))
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
        let (cache, device) = (Cache::of(q_layout, k_layout)?, q.device());
        let problem = self.problem(cache, element_type("q", q.dtype())?)?;
        let (gpu, lengths) = (Gpu::of(device)?, Lengths::of(&self.starts));
        let (past, starts) = (gpu.numbers(&lengths.past)?, gpu.numbers(&lengths.starts)?);
        let (slots, table) = (gpu.numbers(&vec![-1; cache.rows])?, gpu.numbers(&self.table)?);
        let none = Shape::from((cache.rows, cache.kv_heads, cache.size));
        let none = device.zeros_impl(&none, q.dtype())?;
        let mut output = device.zeros_impl(q_layout.shape(), q.dtype())?;
        let tensors = Tensors::default()
            .with(TensorId::Query, Pointer::read("q", q, q_layout, &gpu)?)
            .with(TensorId::Key, Pointer::all(&none, &gpu)?)
            .with(TensorId::Value, Pointer::all(&none, &gpu)?)
            .with(TensorId::SeqlensK, Pointer::of(&past, 0, &gpu))
            .with(TensorId::CumulativeSequenceLength, Pointer::of(&starts, 0, &gpu))
            .with(TensorId::SlotMapping, Pointer::of(&slots, 0, &gpu))
            .with(TensorId::BlockTable, Pointer::of(&table, 0, &gpu))
            // No slot is one of the cache's, so that it is only read.
            .with(TensorId::PresentKey, Pointer::read("k", k, k_layout, &gpu)?)
            .with(TensorId::PresentValue, Pointer::read("v", v, v_layout, &gpu)?)
            .with(TensorId::Output, Pointer::written("output", &mut output, &gpu)?);
        gpu.run(&problem, &tensors)?;
        drop(tensors);
        Ok((output, q_layout.shape().clone()))
    }
}
