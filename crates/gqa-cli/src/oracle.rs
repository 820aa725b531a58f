//! Large calls against the f64 reference: not all of it, but some rows, each as calls of its own.
//!
//! The output row `s` of query head `n` depends on one query row and on the cache of one KV head.
//! The reference is asked for that row alone: one query head over one KV head, nothing to append,
//! and as cache the rows that the query sees. The new cache row `s` depends on one key and one
//! value row; the reference is asked for it as a prompt of one token at that position.

use anyhow::{Context, Result, bail};
use gqa_host::op::{Inputs, KvCache, Outputs};
use gqa_host::plan::TensorId;
use gqa_host::reference::Reference;
use gqa_host::{DType, Pages, Problem, RowLayout, Scales, Tensor};
use gqa_onnx::{Tolerance, compare};
use ndarray::{Array1, Array2};
use std::ops::Deref;

use crate::input::Noise;
use crate::shape::{OUTPUT_SCALE, Shape, Tensors, lengths};

/// What comparing sampled rows found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sampled {
    /// Rows of the output compared; as many rows of each cache.
    pub rows: usize,
    /// Elements out of tolerance.
    pub failed: usize,
    /// Largest difference.
    pub max_abs: f64,
}

impl Sampled {
    fn add(&mut self, got: &Tensor, want: &Tensor, tolerance: Tolerance) -> Result<()> {
        let found = compare(got, want, &[], tolerance)?;
        self.failed += found.failed;
        self.max_abs = self.max_abs.max(found.max_abs);
        Ok(())
    }

    /// Joins two samples.
    pub fn merge(&mut self, other: &Self) {
        self.rows += other.rows;
        self.failed += other.failed;
        self.max_abs = self.max_abs.max(other.max_abs);
    }
}

/// What rounding to the call's type allows the output to be off by: weights are rounded to it even
/// where output is not. Where a call allows products of float8 these have four significant bits,
/// and so have queries: with the program's normal numbers that is up to 1/16 of weights and as much
/// by their scores, of values three deviations away.
fn output_tolerance(p: &Problem) -> Tolerance {
    const FLOAT8: f64 = 3.0 / 8.0;
    let of_type = Tolerance::of(p.dtype);
    if p.out_dtype == DType::F8E4M3 {
        // Both are rounded by up to 1/16, the smallest ones by half of what they are apart.
        let absolute = of_type.absolute / f64::from(OUTPUT_SCALE) + 1.0 / 512.0;
        return Tolerance { absolute, relative: of_type.relative + 0.14 };
    }
    Tolerance { absolute: if p.float8_products { FLOAT8 } else { of_type.absolute }, ..of_type }
}

/// Output as numbers: a comparison of float8 tensors counts steps between float8 values, which are
/// tiny near 0.
fn numbers(output: Tensor) -> Result<Tensor> {
    if output.dtype() != DType::F8E4M3 {
        return Ok(output);
    }
    let numbers: Vec<f32> = output.to_f64().into_iter().map(|x| x as f32).collect();
    Ok(Tensor::from_f32(DType::F32, output.shape(), &numbers)?)
}

/// A computed call: its inputs and its outputs.
pub struct Computed<'a> {
    /// What was asked for.
    pub shape: &'a Shape,
    /// The same, validated.
    pub problem: &'a Problem,
    /// Inputs, and outputs as computed.
    pub tensors: &'a Tensors,
    /// Rows in each sequence's cache before.
    pub past_length: usize,
}

/// A row of a query head.
#[derive(Clone, Copy)]
struct Place {
    batch: usize,
    head: usize,
    row: usize,
}

/// A row that the reference computes.
struct Operands<'a> {
    query: &'a Tensor,
    key: &'a Tensor,
    value: &'a Tensor,
    past: Option<&'a KvCache>,
    kv_head: usize,
}

/// What the reference says.
struct Want {
    outputs: Outputs,
    /// Of the cache's rows, where each has one.
    scales: Option<[Tensor; 2]>,
}

impl Deref for Want {
    type Target = Outputs;

    fn deref(&self) -> &Outputs {
        &self.outputs
    }
}

impl Computed<'_> {
    /// Compares about `count` rows: the first, the last, and random ones.
    pub fn sample(&self, count: usize, noise: &mut Noise) -> Result<Sampled> {
        let p = self.problem;
        let last = Place { batch: p.batch - 1, head: p.q_heads - 1, row: p.q_len - 1 };
        let first = self.first_checkable();
        let mut places = vec![Place { batch: 0, head: 0, row: first }, last];
        places.extend((places.len()..count).map(|_| Place {
            batch: noise.below(p.batch),
            head: noise.below(p.q_heads),
            row: first + noise.below(p.q_len - first),
        }));
        let mut sampled = Sampled { rows: places.len(), ..Sampled::default() };
        for place in places {
            let kv = Place { head: place.head / p.group(), ..place };
            self.check_output(place, kv, &mut sampled)?;
            if p.new_len > 0 {
                self.check_cache(kv, &mut sampled)?;
            }
        }
        Ok(sampled)
    }

    /// The first query row whose keys are all still in the cache: a rolling KV cache may have
    /// evicted some.
    fn first_checkable(&self) -> usize {
        let seen_before = self.problem.window.map_or(0, |window| window - 1);
        let first = if self.first_cached() == 0 { 0 } else { self.first_cached() + seen_before };
        first.saturating_sub(self.past_length)
    }

    /// Which row of the sequences is row 0 of the cache.
    fn first_cached(&self) -> usize {
        self.problem.first_cached(self.past_length + self.problem.q_len)
    }

    /// The output row, from the cache as it was computed.
    fn check_output(&self, place: Place, kv: Place, sampled: &mut Sampled) -> Result<()> {
        let p = self.problem;
        let position = self.past_length + place.row;
        let is_causal = p.causal || p.tree_mask;
        let visible = if is_causal { position + 1 } else { self.past_length + p.q_len };
        let visible = visible - self.first_cached();
        let start = Place { row: 0, ..kv };
        let past = self.cache_of(start, visible)?;
        let query = self.rows(TensorId::Query, p.query_layout(), place, &[1, 1, p.head_size])?;
        let nothing = Tensor::zeros(p.dtype, &[1, 0, p.head_size]);
        let operands = Operands {
            query: &query,
            key: &nothing,
            value: &nothing,
            past: Some(&past),
            kv_head: kv.head,
        };
        let want = self.reference(&operands, position, visible)?;
        let got = self.rows(TensorId::Output, p.output_layout(), place, want.output.shape())?;
        sampled.add(&numbers(got)?, &numbers(want.output.clone())?, output_tolerance(p))
    }

    /// The row appended to each cache.
    fn check_cache(&self, kv: Place, sampled: &mut Sampled) -> Result<()> {
        let p = self.problem;
        let position = self.past_length + kv.row;
        let one = [1, 1, p.head_size];
        let (key, value) = if p.packed {
            (TensorId::Query, TensorId::Query)
        } else {
            (TensorId::Key, TensorId::Value)
        };
        let key = self.rows(key, p.key_layout(), kv, &one)?;
        let value = self.rows(value, p.value_layout(), kv, &one)?;
        // What a prompt finds in its cache does not matter, but says what quantized values are.
        let empty = Tensor::zeros(p.key_cache_dtype(), &self.cache_shape(1));
        let scale = || Tensor::zeros(DType::F32, &[1, 1, 1]);
        let scales = p.has_row_scales().then(|| [scale(), scale()]);
        let empty = KvCache { key: empty.clone(), value: empty, scales };
        let past = p.quantized.map(|_| &empty);
        let operands = Operands { query: &key, key: &key, value: &value, past, kv_head: kv.head };
        let want = self.reference(&operands, position, 1)?;
        let row = Place { row: position - self.first_cached(), ..kv };
        let got = self.cache_of(row, 1)?;
        sampled.add(&got.key, &want.present_key, Tolerance::of(p.key_cache_dtype()))?;
        sampled.add(&got.value, &want.present_value, Tolerance::of(p.value_cache_dtype()))?;
        for (got, want) in got.scales.iter().flatten().zip(want.scales.iter().flatten()) {
            sampled.add(got, want, Tolerance::of(p.dtype))?;
        }
        Ok(())
    }

    /// Consecutive rows of one head's cache, with their scales if they have such.
    fn cache_of(&self, first: Place, count: usize) -> Result<KvCache> {
        let scales = match self.problem.has_row_scales() {
            true => Some([
                self.scales_of_rows(TensorId::KRowScale, first, count)?,
                self.scales_of_rows(TensorId::VRowScale, first, count)?,
            ]),
            false => None,
        };
        let rows = |id| self.cached_rows(id, first, count);
        let (key, value) = (rows(TensorId::PresentKey)?, rows(TensorId::PresentValue)?);
        Ok(KvCache { key, value, scales })
    }

    /// The scales of consecutive rows of one head's cache, wherever its blocks are.
    fn scales_of_rows(&self, id: TensorId, first: Place, count: usize) -> Result<Tensor> {
        let (p, Tensor::F32(scales)) = (self.problem, self.tensors.expect(id)?) else {
            bail!("scales that are not float32");
        };
        let number = |row: usize| -> Result<usize> {
            match p.pages {
                None => Ok((first.batch * p.kv_heads + first.head) * p.capacity + row),
                Some(pages) => Ok(self.place(pages, first.batch, row)? * p.kv_heads + first.head),
            }
        };
        let scale = |row| {
            let scale = scales.as_slice().get(number(row)?);
            scale.copied().with_context(|| format!("{} ends early", id.name()))
        };
        let rows = first.row..first.row + count;
        let scales = rows.map(scale).collect::<Result<Vec<_>>>()?;
        Ok(Tensor::from_f32(DType::F32, &[1, 1, count], &scales)?)
    }

    /// The row of a paged cache, through all blocks, that has a row of a sequence.
    fn place(&self, pages: Pages, batch: usize, row: usize) -> Result<usize> {
        let Tensor::I32(table) = self.tensors.expect(TensorId::BlockTable)? else {
            bail!("a block_table that is not int32");
        };
        let block = table[[batch, row / pages.block_size]] as usize;
        Ok(block * pages.block_size + row % pages.block_size)
    }

    /// Shape of `rows` rows of one head's cache.
    fn cache_shape(&self, rows: usize) -> [usize; 4] {
        let [.., width] = self.problem.key_cache_shape(rows);
        [1, 1, rows, width]
    }

    /// Consecutive rows of one head's cache, wherever its blocks are.
    fn cached_rows(&self, id: TensorId, first: Place, count: usize) -> Result<Tensor> {
        let p = self.problem;
        let Some(pages) = p.pages else {
            return self.rows(id, p.cache_layout(p.capacity), first, &self.cache_shape(count));
        };
        let row_of_blocks = p.kv_heads * p.head_size;
        let layout = RowLayout { offset: 0, batch: 0, head: p.head_size, row: row_of_blocks };
        let mut rows = Tensor::zeros(p.key_cache_dtype(), &self.cache_shape(count));
        let width = rows.bytes().len() / count;
        for (i, to) in rows.bytes_mut()?.chunks_exact_mut(width).enumerate() {
            let row = self.place(pages, first.batch, first.row + i)?;
            let place = Place { row, ..first };
            let one = self.rows(id, layout, place, &self.cache_shape(1))?;
            to.copy_from_slice(one.bytes());
        }
        Ok(rows)
    }

    /// k_scale or v_scale of one KV head.
    fn scale(&self, id: TensorId, kv_head: usize) -> Option<Tensor> {
        let Tensor::F32(scales) = self.tensors.get(id)? else { return None };
        let (per, size) = (self.problem.quantized?.scales, self.problem.head_size);
        let count = per.count(1, size)?;
        let first = if per == Scales::PerTensor { 0 } else { kv_head * count };
        Some(Array1::from_iter(scales.iter().copied().skip(first).take(count)).into())
    }

    /// One query row at `position` over `total` keys, by the reference.
    fn reference(&self, operands: &Operands<'_>, position: usize, total: usize) -> Result<Want> {
        let (seqlens_k, total_length) = lengths(1, total);
        let position_ids = Tensor::from(Array2::from_elem((1, 1), position as i64));
        let [k_scale, v_scale] =
            [TensorId::KScale, TensorId::VScale].map(|id| self.scale(id, operands.kv_head));
        let in_place = self.problem.has_row_scales();
        let inputs = Inputs {
            key: Some(operands.key),
            value: Some(operands.value),
            past_key: operands.past.filter(|_| !in_place).map(|past| &past.key),
            past_value: operands.past.filter(|_| !in_place).map(|past| &past.value),
            cos_cache: self.tensors.get(TensorId::CosCache),
            sin_cache: self.tensors.get(TensorId::SinCache),
            position_ids: self.problem.rotary.map(|_| &position_ids),
            k_scale: k_scale.as_ref(),
            v_scale: v_scale.as_ref(),
            q_norm_weight: self.tensors.get(TensorId::QNormWeight),
            k_norm_weight: self.tensors.get(TensorId::KNormWeight),
            output_scale: self.tensors.get(TensorId::OutputScale),
            ..Inputs::new(operands.query, &seqlens_k, &total_length)
        };
        let op = self.shape.layer.op(1, 1).sliding_window_cache(false);
        let Some(mut cache) = operands.past.filter(|_| in_place).cloned() else {
            return Ok(Want { outputs: op.run(&inputs, &Reference)?, scales: None });
        };
        let outputs = op.run_in_place(&inputs, &mut cache, &Reference)?;
        let KvCache { key: present_key, value: present_value, scales } = cache;
        Ok(Want { outputs: Outputs { present_key, present_value, ..outputs }, scales })
    }

    /// Consecutive rows of one head, as a tensor of that shape.
    fn rows(
        &self,
        id: TensorId,
        layout: RowLayout,
        first: Place,
        shape: &[usize],
    ) -> Result<Tensor> {
        let source = self.tensors.expect(id)?;
        let mut rows = Tensor::zeros(source.dtype(), shape);
        // A number of a quantized cache may be less than an element.
        let bytes = |numbers: usize| match source.dtype() {
            DType::U8 => numbers / 2,
            dtype => numbers * dtype.size(),
        };
        let width = bytes(self.problem.head_size);
        for (i, row) in rows.bytes_mut()?.chunks_exact_mut(width).enumerate() {
            let start = bytes(layout.at(first.batch, first.head, first.row + i));
            let bytes = source.bytes().get(start..start + width);
            row.copy_from_slice(bytes.with_context(|| format!("{} ends early", id.name()))?);
        }
        Ok(rows)
    }
}
