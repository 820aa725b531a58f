//! The tensors of a [`Case`]: fresh random inputs, poisoned outputs.

use crate::{Case, Positions};
use float8::F8E4M3;
use gqa_host::backend::Backend;
use gqa_host::op::{Inputs, KvCache, Outputs};
use gqa_host::plan::TensorId;
use gqa_host::reference::Reference;
use gqa_host::{DType, Layout, Problem, QuantFormat, Quantization, Result, Scales, Tensor};
use ndarray::{ArrayD, IxDyn};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Normal};
use std::ops::Deref;

/// A case with data. Past rows after each sequence's valid length hold NaN, and so do the rows that
/// are padding by query_seqlens: no result may depend on them.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it was made from.
    pub case: Case,
    query: Tensor,
    key: Option<Tensor>,
    value: Option<Tensor>,
    past: Option<KvCache>,
    seqlens_k: Tensor,
    query_seqlens: Option<Tensor>,
    total_sequence_length: Tensor,
    cos_cache: Option<Tensor>,
    sin_cache: Option<Tensor>,
    position_ids: Option<Tensor>,
    attention_bias: Option<Tensor>,
    head_sink: Option<Tensor>,
    /// k_scale and v_scale that are inputs.
    scales: Option<[Tensor; 2]>,
    /// q_norm_weight and k_norm_weight.
    norm_weights: Option<[Tensor; 2]>,
    output_scale: Option<Tensor>,
}

impl Call {
    /// Draws the data of `case`.
    pub fn new(case: &Case) -> Self {
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let (heads, size) = (case.kv_heads * case.group, case.head_size);
        let new_rows = if case.no_new_rows { 0 } else { case.q_len };
        let (query, key, value) = if case.packed {
            let width = (heads + 2 * case.kv_heads) * size;
            let query = data.normal(&[case.batch(), case.q_len, width], case.spread);
            (padded(case, query), None, None)
        } else {
            let shape = |heads, rows| case_rows_shape(case, heads, rows);
            (
                padded(case, data.normal(&shape(heads, case.q_len), case.spread)),
                Some(padded(case, data.normal(&shape(case.kv_heads, new_rows), case.spread))),
                Some(padded(case, data.normal(&shape(case.kv_heads, new_rows), 1.0))),
            )
        };
        let (cos_cache, sin_cache, position_ids) = data.rotary(case);
        let scales = case.quantized.and_then(|how| data.scales(case, how));
        Self {
            query,
            key,
            value,
            past: data.past(case),
            seqlens_k: data.seqlens(case),
            query_seqlens: case.tokens.as_ref().map(|tokens| integers(tokens)),
            total_sequence_length: Tensor::from(
                ndarray::arr1(&[case.total_len() as i32]).into_dyn(),
            ),
            cos_cache,
            sin_cache,
            position_ids,
            attention_bias: data.bias(case),
            head_sink: case.head_sink.then(|| data.normal(&[heads], 2.0)),
            scales,
            norm_weights: case.qk_norm.then(|| [(); 2].map(|()| data.normal(&[size], 1.0))),
            output_scale: case.output_scale.map(|scale| ndarray::arr1(&[scale]).into()),
            case: case.clone(),
        }
    }

    /// Its tensors by name.
    pub(crate) fn named(&self) -> Vec<(&'static str, Option<Tensor>)> {
        let of = |pair: &Option<[Tensor; 2]>, i: usize| pair.as_ref().map(|pair| pair[i].clone());
        let of_rows = self.past.as_ref().and_then(|past| past.scales.clone());
        let scales = self.scales.clone().or(of_rows);
        vec![
            ("query", Some(self.query.clone())),
            ("key", self.key.clone()),
            ("value", self.value.clone()),
            ("past_key", self.past.as_ref().map(|past| past.key.clone())),
            ("past_value", self.past.as_ref().map(|past| past.value.clone())),
            ("seqlens_k", Some(self.seqlens_k.clone())),
            ("total_sequence_length", Some(self.total_sequence_length.clone())),
            ("cos_cache", self.cos_cache.clone()),
            ("sin_cache", self.sin_cache.clone()),
            ("position_ids", self.position_ids.clone()),
            ("attention_bias", self.attention_bias.clone()),
            ("head_sink", self.head_sink.clone()),
            ("k_scale", of(&scales, 0)),
            ("v_scale", of(&scales, 1)),
            ("query_seqlens", self.query_seqlens.clone()),
            ("q_norm_weight", of(&self.norm_weights, 0)),
            ("k_norm_weight", of(&self.norm_weights, 1)),
            ("output_scale", self.output_scale.clone()),
        ]
    }

    /// The next step of the same sequences: new rows after those that `cache` holds, which must
    /// have room for them.
    pub fn next(&self, cache: KvCache) -> Self {
        let case = Case {
            past: (0..self.case.batch()).map(|b| self.case.total(b)).collect(),
            spare_rows: self.case.spare_rows - self.case.q_len,
            seed: self.case.seed.wrapping_add(1),
            ..self.case.clone()
        };
        Self { past: Some(cache), ..Self::new(&case) }
    }

    /// What the operator makes of the call.
    pub fn problem(&self) -> Result<Problem> {
        let op = self.case.op();
        match (&self.past, self.case.shared) {
            (Some(past), true) => op.problem_in_place(&self.inputs(), past),
            _ => op.problem(&self.inputs(), self.case.cache()),
        }
    }

    /// Runs the call on `backend`, with every output poisoned with NaN first. A shared cache is
    /// returned as present_*, with its per-token scales.
    pub fn run(&self, backend: &dyn Backend) -> Result<Results> {
        let problem = self.problem()?;
        let mut outputs = Outputs::new(&problem)?;
        for tensor in [
            Some(&mut outputs.output),
            Some(&mut outputs.present_key),
            Some(&mut outputs.present_value),
            outputs.output_qk.as_mut(),
            outputs.lse.as_mut(),
        ] {
            tensor.into_iter().for_each(|t| t.with_bytes_mut(|bytes| bytes.fill(0xff)));
        }
        if let (true, Some(past)) = (self.case.shared, &self.past) {
            outputs.present_key = past.key.clone();
            outputs.present_value = past.value.clone();
        }
        let mut scales = self.past.as_ref().and_then(|past| past.scales.clone());
        let mut io = outputs.io(&self.inputs());
        io.inputs = io.inputs.only_of(&problem);
        io.row_scales = scales.as_mut().map(|scales| scales.each_mut());
        backend.run(&problem, &mut io)?;
        Ok(Results { outputs, scales })
    }

    /// The call's expected results, given the cache that it left: as if nothing were appended any
    /// more.
    pub fn reference_after(&self, cache: &Results) -> Result<Results> {
        let problem = self.problem()?;
        let (mut outputs, problem) = (Outputs::new(&problem)?, problem.appended());
        outputs.present_key = cache.present_key.clone();
        outputs.present_value = cache.present_value.clone();
        let mut scales = cache.scales.clone();
        let mut io = outputs.io(&self.inputs());
        io.inputs = io.inputs.only_of(&problem);
        io.inputs = io.inputs.with(TensorId::Key, None).with(TensorId::Value, None);
        io.row_scales = scales.as_mut().map(|scales| scales.each_mut());
        Reference.run(&problem, &mut io)?;
        Ok(Results { outputs, scales })
    }

    /// As above in float32, with queries rounded as for float8 products: times k_scale, divided by
    /// the least power of two with which none exceeds 448.
    pub(crate) fn with_float8_queries(&self) -> Self {
        let case = Case { dtype: DType::F32, ..self.case.clone() };
        let widened = |tensor: &Tensor| -> Tensor {
            let values: Vec<f32> = tensor.to_f64().into_iter().map(|x| x as f32).collect();
            Tensor::from_f32(DType::F32, tensor.shape(), &values).expect("a floating-point type")
        };
        let mut query = widened(&self.query);
        let heads = case.kv_heads * case.group;
        let [k_scale, _] = self.scales.as_ref().expect("a quantized KV cache");
        let how = case.quantized.expect("a quantized KV cache");
        let k_scale: Vec<f32> = k_scale.to_f64().into_iter().map(|x| x as f32).collect();
        let Tensor::F32(values) = &mut query else { unreachable!("widened") };
        let values = values.as_slice_mut();
        let of_row = if case.packed { heads + 2 * case.kv_heads } else { heads };
        for (index, row) in values.chunks_exact_mut(case.head_size).enumerate() {
            let head = match case.layout {
                Layout::Bsnh => index % of_row,
                Layout::Bnsh => index / case.q_len % heads,
            };
            if head < heads {
                let kv_head = head / case.group;
                round_to_float8(row, |i| match how.scales {
                    Scales::PerTensor => k_scale[0],
                    Scales::PerHead => k_scale[kv_head],
                    Scales::PerChannel => k_scale[kv_head * case.head_size + i],
                    Scales::PerToken => unreachable!("no products of float8"),
                });
            }
        }
        Self {
            query,
            key: self.key.as_ref().map(widened),
            value: self.value.as_ref().map(widened),
            head_sink: self.head_sink.as_ref().map(widened),
            case,
            ..self.clone()
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        let past = self.past.as_ref().filter(|_| !self.case.shared);
        Inputs {
            key: self.key.as_ref(),
            value: self.value.as_ref(),
            past_key: past.map(|p| &p.key),
            past_value: past.map(|p| &p.value),
            cos_cache: self.cos_cache.as_ref(),
            sin_cache: self.sin_cache.as_ref(),
            position_ids: self.position_ids.as_ref(),
            attention_bias: self.attention_bias.as_ref(),
            head_sink: self.head_sink.as_ref(),
            k_scale: self.scales.as_ref().map(|[key, _]| key),
            v_scale: self.scales.as_ref().map(|[_, value]| value),
            query_seqlens: self.query_seqlens.as_ref(),
            q_norm_weight: self.norm_weights.as_ref().map(|[query, _]| query),
            k_norm_weight: self.norm_weights.as_ref().map(|[_, key]| key),
            output_scale: self.output_scale.as_ref(),
            ..Inputs::new(&self.query, &self.seqlens_k, &self.total_sequence_length)
        }
    }
}

/// What a call gives.
#[derive(Clone, Debug)]
pub struct Results {
    /// The operator's outputs, including a shared cache.
    pub outputs: Outputs,
    /// The per-token k_scale and v_scale after the call, if the cache has them.
    pub scales: Option<[Tensor; 2]>,
}

impl Deref for Results {
    type Target = Outputs;

    fn deref(&self) -> &Outputs {
        &self.outputs
    }
}

/// A tensor of integers, one for each batch entry.
fn integers(values: &[usize]) -> Tensor {
    let values: Vec<i32> = values.iter().map(|&value| value as i32).collect();
    Tensor::from(ndarray::arr1(&values).into_dyn())
}

/// The rows of a call, with NaN in those that are padding by query_seqlens.
fn padded(case: &Case, rows: Tensor) -> Tensor {
    if case.tokens.is_none() {
        return rows;
    }
    let heads = if case.layout == Layout::Bsnh { 1 } else { rows.shape()[1] };
    let mut values: Vec<f32> = rows.to_f64().into_iter().map(|x| x as f32).collect();
    let size = values.len() / (case.batch() * heads * case.q_len);
    for (index, row) in values.chunks_exact_mut(size).enumerate() {
        let (b, s) = (index / case.q_len / heads, index % case.q_len);
        if s >= case.tokens(b) {
            row.fill(f32::NAN);
        }
    }
    Tensor::from_f32(case.dtype, rows.shape(), &values).expect("a floating-point type")
}

/// A tensor for results, of NaN.
pub(crate) fn poisoned(dtype: DType, shape: &[usize]) -> Tensor {
    let mut tensor = Tensor::zeros(dtype, shape);
    tensor.with_bytes_mut(|bytes| bytes.fill(0xff));
    tensor
}

/// Standard deviations of keys and values.
fn spreads(case: &Case) -> [f32; 2] {
    [if case.qk_norm { 1.0 } else { case.spread }, 1.0]
}

/// A row of queries; `scale` maps it to the values that are rounded.
fn round_to_float8(row: &mut [f32], scale: impl Fn(usize) -> f32) {
    const MAX: f32 = 448.0;
    let scaled: Vec<f32> = row.iter().enumerate().map(|(i, x)| x * scale(i)).collect();
    let top = scaled.iter().fold(0.0, |top: f32, x| top.max(x.abs()));
    let mut unit = (-120f32).exp2();
    while top > MAX * unit {
        unit *= 2.0;
    }
    for (i, (x, scaled)) in row.iter_mut().zip(scaled).enumerate() {
        *x = F8E4M3::from_f32(scaled / unit).to_f32() * unit / scale(i);
    }
}

fn case_rows_shape(case: &Case, heads: usize, rows: usize) -> Vec<usize> {
    match case.layout {
        Layout::Bsnh => vec![case.batch(), rows, heads * case.head_size],
        Layout::Bnsh => vec![case.batch(), heads, rows, case.head_size],
    }
}

/// Random tensors.
pub(crate) struct Data {
    /// Their type.
    pub(crate) dtype: DType,
    /// Where they come from.
    pub(crate) rng: SmallRng,
}

impl Data {
    pub(crate) fn tensor(&self, shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_f32(self.dtype, shape, values).expect("a floating-point type")
    }

    pub(crate) fn values(&mut self, count: usize, spread: f32) -> Vec<f32> {
        let normal = Normal::new(0.0, spread).expect("a positive deviation");
        (0..count).map(|_| normal.sample(&mut self.rng)).collect()
    }

    pub(crate) fn normal(&mut self, shape: &[usize], spread: f32) -> Tensor {
        let values = self.values(shape.iter().product(), spread);
        self.tensor(shape, &values)
    }

    /// Rows of that shape: random where `held`, NaN elsewhere.
    pub(crate) fn held_rows(&mut self, shape: &[usize], spread: f32, held: &[bool]) -> Tensor {
        let mut values = self.values(shape.iter().product(), spread);
        let row = values.len() / held.len().max(1);
        for (row, held) in values.chunks_exact_mut(row.max(1)).zip(held) {
            if !held {
                row.fill(f32::NAN);
            }
        }
        self.tensor(shape, &values)
    }

    /// The past, NaN behind the valid rows.
    fn past(&mut self, case: &Case) -> Option<KvCache> {
        let rows = case.past_rows();
        if rows == 0 && !case.shared && case.quantized.is_none() {
            return None;
        }
        let valid = |b: usize| match (case.first_prompt, case.no_new_rows) {
            (true, _) => 0,
            (false, true) => case.total(b),
            (false, false) => case.cached(case.past[b]),
        };
        let heads = case.batch() * case.kv_heads;
        let is_held = |head: usize| (0..rows).map(move |row| row < valid(head / case.kv_heads));
        let held: Vec<bool> = (0..heads).flat_map(is_held).collect();
        let mut cache = |spread| {
            let shape = [case.batch(), case.kv_heads, rows, case.head_size];
            match case.quantized {
                Some(how) => self.codes(&shape, how, &held),
                None => self.held_rows(&shape, spread, &held),
            }
        };
        let (key, value) = (cache(case.spread), cache(1.0));
        let shape = [case.batch(), case.kv_heads, rows];
        let scales = case.quantized.and_then(|how| self.row_scales(case, how, &shape, &held));
        Some(KvCache { key, value, scales })
    }

    /// Rows of random quantized values where `held`; elsewhere all bits are set, which is NaN as an
    /// 8-bit float.
    pub(crate) fn codes(&mut self, shape: &[usize], how: Quantization, held: &[bool]) -> Tensor {
        let [outer @ .., size] = shape else { panic!("rows have a size") };
        let shape = IxDyn(&[outer, &[size / how.codes_per_element()]].concat());
        let mut bytes = ArrayD::from_elem(shape, 0xff);
        let row = bytes.len() / held.len().max(1);
        let rows = bytes.as_slice_mut().expect("as it lies in memory").chunks_exact_mut(row.max(1));
        for (row, _) in rows.zip(held).filter(|(_, held)| **held) {
            row.fill_with(|| match self.rng.random() {
                // The two that are NaN.
                0x7f | 0xff if how.format == QuantFormat::Float8 => 0,
                // Up to 16; of integers all there are.
                code if how.format == QuantFormat::Float8 => code & 0x80 | (code & 0x7f).min(0x58),
                code => code,
            });
        }
        match how.format {
            QuantFormat::Int8 => Tensor::from(bytes.mapv(|byte| byte as i8)),
            QuantFormat::Int4 | QuantFormat::Float4 => Tensor::from(bytes),
            QuantFormat::Float8 => Tensor::from(bytes.mapv(F8E4M3::from_bits)),
        }
    }

    /// k_scale and v_scale such that quantized values reach about two standard deviations of keys
    /// and values, so that some are clamped; `None` for per-token scales.
    pub(crate) fn scales(&mut self, case: &Case, how: Quantization) -> Option<[Tensor; 2]> {
        let count = how.scales.count(case.kv_heads, case.head_size)?;
        Some(spreads(case).map(|spread| {
            let scale = || self.scale(how, spread);
            Tensor::from(ArrayD::from_shape_simple_fn(IxDyn(&[count]), scale))
        }))
    }

    /// Per-token scales for the rows in `held`, and NaN for the others.
    pub(crate) fn row_scales(
        &mut self,
        case: &Case,
        how: Quantization,
        shape: &[usize],
        held: &[bool],
    ) -> Option<[Tensor; 2]> {
        (how.scales == Scales::PerToken).then(|| {
            let rows: usize = shape.iter().product();
            let each = rows / held.len().max(1);
            let is_held = |row: usize| held[row / each.max(1)];
            spreads(case).map(|spread| {
                let scale = |row| if is_held(row) { self.scale(how, spread) } else { f32::NAN };
                let scales = (0..rows).map(scale).collect();
                Tensor::from(ArrayD::from_shape_vec(IxDyn(shape), scales).expect("as many"))
            })
        })
    }

    /// A scale of that many standard deviations of keys or values.
    pub(crate) fn scale(&mut self, how: Quantization, spread: f32) -> f32 {
        let most = match how.format {
            QuantFormat::Int8 => 127.0,
            QuantFormat::Int4 => 7.0,
            QuantFormat::Float8 => 16.0,
            QuantFormat::Float4 => 6.0,
        };
        let sign = if self.rng.random_bool(0.2) { -1.0 } else { 1.0 };
        sign * spread * self.rng.random_range(1.5..2.5) / most
    }

    fn seqlens(&self, case: &Case) -> Tensor {
        let last = (0..case.batch()).map(|b| case.total(b) as i32 - 1).collect::<Vec<_>>();
        Tensor::from(ndarray::arr1(&last).into_dyn())
    }

    /// Cosines and sines of random angles, and legal positions; those of padding are arbitrary.
    fn rotary(&mut self, case: &Case) -> (Option<Tensor>, Option<Tensor>, Option<Tensor>) {
        let Some((sixteenths, _, positions)) = case.rotary else { return (None, None, None) };
        let rows = case.total_len().max(case.past_rows()) + 3;
        let shape = [rows, sixteenths * 8];
        let angles: Vec<f32> =
            (0..rows * shape[1]).map(|_| self.rng.random_range(0.0..6.3)).collect();
        let cos = self.tensor(&shape, &angles.iter().map(|a| a.cos()).collect::<Vec<_>>());
        let sin = self.tensor(&shape, &angles.iter().map(|a| a.sin()).collect::<Vec<_>>());
        let ids = match positions {
            Positions::Implicit => None,
            Positions::Explicit { extra } => {
                let shape = IxDyn(&[case.batch(), case.q_len + extra]);
                let is_padding = |b: usize, s: usize| s >= case.tokens(b);
                Some(Tensor::from(ArrayD::from_shape_fn(shape, |at| {
                    match is_padding(at[0], at[1]) {
                        true => self.rng.random(),
                        false => self.rng.random_range(0..rows as i64),
                    }
                })))
            }
        };
        (Some(cos), Some(sin), ids)
    }

    fn bias(&mut self, case: &Case) -> Option<Tensor> {
        let bias = case.bias?;
        let heads = if bias.head { 1 } else { case.kv_heads * case.group };
        let batch = if bias.batch { 1 } else { case.batch() };
        let shape = [batch, heads, case.q_len, case.total_len()];
        let mut values = self.values(shape.iter().product(), 1.0);
        for (row, scores) in values.chunks_exact_mut(case.total_len()).enumerate() {
            if bias.masked_rows > 0 && row % (2 * bias.masked_rows) == 1 {
                scores.fill(f32::NEG_INFINITY);
            }
        }
        Some(self.tensor(&shape, &values))
    }
}
