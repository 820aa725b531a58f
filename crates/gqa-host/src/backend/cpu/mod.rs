//! The CPU back end: tiled attention with online softmax, in `f32`, on all cores, with the widest
//! vectors.
//!
//! A task is up to 512 query rows of one KV head: the query heads of a group count as rows, so that
//! keys and values are read once for all of them. The keys of a task with few rows are split into
//! parts that run in parallel. [`gqa_cpu`] has the inner loops. A task needs memory for its rows
//! and one tile of keys and values, but for no score matrix. The split depends on the problem only,
//! so that results do not depend on the number of cores.

mod append;
mod double;
mod element;
mod executor;
mod instructions;
mod norm;
mod paged;
mod parallel_for;
mod parts;
mod pool;
mod quantized;
mod quantized_output;
mod rope;
mod rows;
mod sequence;
mod sliding;
mod task;
mod update;

use super::{Backend, Io, IoViews};
use append::Append;
use element::{Element, elements, elements_mut};
pub(crate) use executor::each;
use executor::threads_for;
pub use executor::{Executor, Rayon};
use gqa_plan::contents;
use gqa_plan::plan::TensorId;
use gqa_plan::{CacheBinding, CallKind, Layout, Problem};
use gqa_tensor::{DType, Error, Result, TensorView};
use half::{bf16, f16};
pub use instructions::Instructions;
use norm::Norm;
use paged::Blocks;
use quantized::{Codes, given_scales};
use rope::Rope;
use rows::Outputs;
use sequence::Sequence;
use task::{Bias, Cached, Call};

/// Computes on the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    instructions: Instructions,
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        io.check(problem)?;
        self.with(&Rayon).checked(&problem.contiguous(), &mut io.views())
    }
}

impl Cpu {
    /// Uses these instructions; [`Cpu::default`] uses the widest.
    pub fn new(instructions: Instructions) -> Self {
        Self { instructions }
    }

    /// Computes `problem` in the caller's memory, without copies. Query, key and value may be
    /// strided; all other tensors are contiguous.
    ///
    /// ```
    /// use gqa_host::backend::{IoViews, cpu::Cpu};
    /// use gqa_host::engine::{Dense, Heads, Layer};
    /// use gqa_host::{DType, TensorView, TensorViewMut, plan::{TensorId, Tensors}};
    ///
    /// // A decode step of one head of 8 elements over a KV cache with room for 4 tokens.
    /// let layer = Layer::new(DType::F32, Heads { query: 1, kv: 1, size: 8 });
    /// let step = layer.dense(Dense::decode(1, 4))?;
    /// let (query, key, value) = (vec![0.0f32; 8], vec![1.0f32; 8], vec![3.0f32; 8]);
    /// let (mut keys, mut values) = (vec![0.0f32; 4 * 8], vec![0.0f32; 4 * 8]);
    /// let mut output = vec![0.0f32; 8];
    /// let last = [1]; // The index of its last token after the step: it has one token already.
    /// let inputs = Tensors::default()
    ///     .with(TensorId::Query, TensorView::from(&query[..]))
    ///     .with(TensorId::Key, TensorView::from(&key[..]))
    ///     .with(TensorId::Value, TensorView::from(&value[..]))
    ///     .with(TensorId::SeqlensK, TensorView::from(&last[..]));
    /// Cpu::default().run_on(&step, &mut IoViews {
    ///     inputs,
    ///     output: TensorViewMut::F32(&mut output),
    ///     present_key: TensorViewMut::F32(&mut keys).into(),
    ///     present_value: TensorViewMut::F32(&mut values).into(),
    ///     row_scales: None, output_qk: None,
    ///     lse: None,
    /// })?;
    /// assert_eq!((output[0], values[8]), (1.5, 3.0));
    /// # Ok::<(), gqa_host::Error>(())
    /// ```
    ///
    /// A layer of multi-head latent attention has one cache, whose rows are keys and, in their
    /// leading elements, values.
    ///
    /// ```
    /// use gqa_host::backend::{IoViews, cpu::Cpu};
    /// use gqa_host::engine::{Dense, LatentHeads, Layer};
    /// use gqa_host::plan::{TensorId, Tensors};
    /// use gqa_host::{CacheView, DType, TensorView, TensorViewMut};
    ///
    /// // One query head over rows of 24 elements, of which 16 are values.
    /// let heads = LatentHeads { query: 1, size: 24, values: 16 };
    /// let step = Layer::latent(DType::F32, heads, 0.25).dense(Dense::decode(1, 4))?;
    /// let (query, row, mut cache) = ([0.0f32; 24], [3.0f32; 24], [1.0f32; 4 * 24]);
    /// let (mut output, last) = ([0.0f32; 16], [1]);
    /// Cpu::default().run_on(&step, &mut IoViews {
    ///     inputs: Tensors::default()
    ///         .with(TensorId::Query, TensorView::from(&query[..]))
    ///         .with(TensorId::Key, TensorView::from(&row[..]))
    ///         .with(TensorId::SeqlensK, TensorView::from(&last[..])),
    ///     output: TensorViewMut::F32(&mut output),
    ///     present_key: TensorViewMut::F32(&mut cache).into(),
    ///     present_value: CacheView::NONE,
    ///     row_scales: None, output_qk: None,
    ///     lse: None,
    /// })?;
    /// // The new row is behind the first one, and the output is the mean of both.
    /// assert_eq!((cache[24], output), (3.0, [2.0; 16]));
    /// # Ok::<(), gqa_host::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Backend::run`], and where the problem has strides of the output or of a paged KV cache.
    pub fn run_on(&self, problem: &Problem, io: &mut IoViews<'_>) -> Result<()> {
        self.run_by(&Rayon, problem, io)
    }

    /// The same with the caller's threads.
    ///
    /// # Errors
    ///
    /// As [`Cpu::run_on`].
    pub fn run_by(
        &self,
        executor: &dyn Executor,
        problem: &Problem,
        io: &mut IoViews<'_>,
    ) -> Result<()> {
        let strided = problem.strided;
        for (name, strides) in [("output", strided.output), ("present_key", strided.pages)] {
            if let Some(strides) = strides {
                return Err(Error::invalid(name, format!("{strides:?}"), "contiguous on the CPU"));
            }
        }
        io.check(problem)?;
        self.with(executor).checked(problem, io)
    }

    fn with<'e>(&self, executor: &'e dyn Executor) -> Run<'e> {
        Run { instructions: self.instructions, executor }
    }
}

/// The instructions and threads of a call.
#[derive(Clone, Copy)]
struct Run<'e> {
    instructions: Instructions,
    executor: &'e dyn Executor,
}

impl Run<'_> {
    /// Computes a problem on tensors that fit it.
    fn checked(&self, problem: &Problem, io: &mut IoViews<'_>) -> Result<()> {
        match problem.quantizes_output() {
            true => self.quantized(problem, io),
            false => self.compute(problem, io),
        }
    }

    /// As [`checked`](Self::checked), for calls without quantized output.
    fn compute(&self, problem: &Problem, io: &mut IoViews<'_>) -> Result<()> {
        if problem.is_empty() {
            return Ok(());
        }
        if let CallKind::Update(mode) = problem.computes {
            return update::run(problem, mode, io, self.executor);
        }
        if let Some(pages) = problem.pages {
            return self.paged(problem, pages, io);
        }
        if let Some(sliding) = problem.sliding() {
            return self.sliding(problem, sliding, io);
        }
        match problem.dtype {
            dtype if dtype == DType::F64 || dtype != problem.v_dtype => {
                double::run(problem, io, self.executor)
            }
            DType::F16 => self.compute_as::<f16>(problem, io),
            DType::BF16 => self.compute_as::<bf16>(problem, io),
            _ => self.compute_as::<f32>(problem, io),
        }
    }

    fn compute_as<T: Element>(&self, p: &Problem, io: &mut IoViews<'_>) -> Result<()> {
        let sequences = sequences(p, io)?;
        let rope = rope::<T>(p, &sequences, io)?;
        if p.cache == CacheBinding::Separate || (p.has_present() && p.new_len > 0) {
            self.append::<T>(p, &sequences, rope.as_ref(), io)?;
        }
        match p.computes {
            CallKind::Attention if p.widens_output() => {
                self.attend::<T, f32>(p, &sequences, rope.as_ref(), None, io)
            }
            CallKind::Attention => self.attend::<T, T>(p, &sequences, rope.as_ref(), None, io),
            CallKind::Rotation => self.rotate::<T>(p, rope.as_ref(), io),
            CallKind::Cache | CallKind::Update(_) => Ok(()),
        }
    }

    /// Attention over the present cache, contiguous or paged, with output of type `O`.
    fn attend<T: Element, O: Element>(
        &self,
        p: &Problem,
        sequences: &[Sequence],
        rope: Option<&Rope>,
        blocks: Option<Blocks<'_>>,
        io: &mut IoViews<'_>,
    ) -> Result<()> {
        let inputs = io.inputs;
        let lse = io.lse.as_mut().map(|lse| elements_mut("lse", lse.reborrow())).transpose()?;
        let output_qk =
            io.output_qk.as_mut().map(|qk| elements_mut("output_qk", qk.reborrow())).transpose()?;
        let key = match (p.cache, inputs.input(TensorId::Key)) {
            (CacheBinding::External, Some(key)) => key,
            _ => io.present_key.view(),
        };
        let value = match (p.cache, inputs.input(TensorId::Value)) {
            _ if p.latent => key,
            (CacheBinding::External, Some(value)) => value,
            _ => io.present_value.view(),
        };
        let [key_codes, value_codes] = Codes::of(p, given_scales(&inputs, &io.row_scales))?;
        let call = Call {
            problem: p,
            sequences,
            query: elements::<T>("query", inputs.need(TensorId::Query)?)?,
            norm: norm(
                p.qk_norm.map(|norm| norm.q_epsilon),
                "q_norm_weight",
                inputs.input(TensorId::QNormWeight),
            )?,
            rope,
            keys: cached("key", key, key_codes, blocks)?,
            values: cached("value", value, value_codes, blocks)?,
            bias: inputs.input(TensorId::AttentionBias).map(Bias::of).transpose()?,
            tree: match inputs.input(TensorId::TreeMask) {
                Some(TensorView::I64(words)) => words,
                _ => &[],
            },
            head_sink: inputs
                .input(TensorId::HeadSink)
                .map(|sink| elements("head_sink", sink))
                .transpose()?,
        };
        let output = elements_mut::<O>("output", io.output.reborrow())?;
        let mut outputs = Outputs::new(p, output, output_qk, lse);
        parts::run(&call, &mut outputs, self.instructions, self.executor);
        Ok(())
    }

    /// Rotates the query into the output.
    fn rotate<T: Element>(
        &self,
        p: &Problem,
        rope: Option<&Rope>,
        io: &mut IoViews<'_>,
    ) -> Result<()> {
        const ROWS: usize = 64;
        let (query, layout) =
            (elements::<T>("query", io.need(TensorId::Query)?)?, p.query_layout());
        let heads = p.q_heads;
        let output = elements_mut::<T>("output", io.output.reborrow())?;
        let executor = threads_for(output.len(), self.executor);
        // Output has the layout of the query.
        let rows = output.chunks_mut(ROWS * p.head_size).enumerate();
        each(executor, rows, |(i, rows)| {
            let mut buffer = vec![0.0; p.head_size];
            for (row, to) in (i * ROWS..).zip(rows.chunks_exact_mut(p.head_size)) {
                let [b, head, s] = match p.layout {
                    Layout::Bsnh => [row / heads / p.q_len, row % heads, row / heads % p.q_len],
                    Layout::Bnsh => [row / p.q_len / heads, row / p.q_len % heads, row % p.q_len],
                };
                T::widen(&query[layout.at(b, head, s)..][..to.len()], &mut buffer);
                if let Some(rope) = rope {
                    rope.rotate(b, s, &mut buffer);
                }
                T::narrow(&buffer, to);
            }
        });
        Ok(())
    }

    /// Updates both caches, or the one of a latent call.
    fn append<T: Element>(
        &self,
        p: &Problem,
        sequences: &[Sequence],
        rope: Option<&Rope>,
        io: &mut IoViews<'_>,
    ) -> Result<()> {
        let rows = |name, new: Option<_>, layout, size, rope| -> Result<_> {
            let new = if p.packed { Some(io.need(TensorId::Query)?) } else { new };
            let new = all::<T>(name, new)?;
            Ok(Append {
                problem: p,
                sequences,
                new,
                layout,
                size,
                norm: None,
                rope,
                executor: self.executor,
            })
        };
        let key = rows("key", io.input(TensorId::Key), p.key_layout(), p.head_size, rope)?;
        let k_epsilon = p.qk_norm.map(|norm| norm.k_epsilon);
        let k_norm = norm(k_epsilon, "k_norm_weight", io.input(TensorId::KNormWeight))?;
        let key = Append { norm: k_norm, ..key };
        if !p.has_value_tensors() {
            return self.append_keys(p, &key, io);
        }
        let value =
            rows("value", io.input(TensorId::Value), p.value_layout(), p.v_head_size, None)?;
        if let (Some(how), Some([k_scale, v_scale])) = (p.quantized, &mut io.row_scales) {
            let scales = elements_mut("k_scale", k_scale.appended("k_scale")?)?;
            key.run_with_scales(how, io.present_key.appended("present_key")?.into_bytes()?, scales);
            let scales = elements_mut("v_scale", v_scale.appended("v_scale")?)?;
            let present = io.present_value.appended("present_value")?.into_bytes()?;
            value.run_with_scales(how, present, scales);
            return Ok(());
        }
        let codes = Codes::of(p, given_scales(&io.inputs, &None))?;
        if let [Some(key_codes), Some(value_codes)] = codes {
            let past_key = io.input(TensorId::PastKey).map(TensorView::bytes).unwrap_or_default();
            let past_value =
                io.input(TensorId::PastValue).map(TensorView::bytes).unwrap_or_default();
            let present_key = io.present_key.appended("present_key")?.into_bytes()?;
            let present_value = io.present_value.appended("present_value")?.into_bytes()?;
            key.run_quantized(key_codes, past_key, present_key);
            value.run_quantized(value_codes, past_value, present_value);
            return Ok(());
        }
        let (past_key, past_value) = (
            all("past_key", io.input(TensorId::PastKey))?,
            all("past_value", io.input(TensorId::PastValue))?,
        );
        let present_key = elements_mut("present_key", io.present_key.appended("present_key")?)?;
        let present_value =
            elements_mut("present_value", io.present_value.appended("present_value")?)?;
        key.run(past_key, present_key);
        value.run(past_value, present_value);
        Ok(())
    }

    /// Updates the cache of keys, which is all there is.
    fn append_keys<T: Element>(
        &self,
        p: &Problem,
        key: &Append<'_, T>,
        io: &mut IoViews<'_>,
    ) -> Result<()> {
        let past = io.input(TensorId::PastKey);
        let present = io.present_key.appended("present_key")?;
        if let (Some(how), Some([k_scale, _])) = (p.quantized, &mut io.row_scales) {
            let scales = elements_mut("k_scale", k_scale.appended("k_scale")?)?;
            key.run_with_scales(how, present.into_bytes()?, scales);
        } else if let [Some(codes), _] = Codes::of(p, given_scales(&io.inputs, &None))? {
            let past = past.map(TensorView::bytes).unwrap_or_default();
            key.run_quantized(codes, past, present.into_bytes()?);
        } else {
            key.run(all("past_key", past)?, elements_mut("present_key", present)?);
        }
        Ok(())
    }
}

/// The positions of each batch entry's rows.
fn sequences(p: &Problem, io: &IoViews<'_>) -> Result<Vec<Sequence>> {
    let lengths = contents::lengths(p, &io.inputs)?.into_iter();
    Ok(lengths.enumerate().map(|(b, lengths)| Sequence::new(p, b, lengths)).collect())
}

/// RoPE, if the call has it.
fn rope<T: Element>(p: &Problem, sequences: &[Sequence], io: &IoViews<'_>) -> Result<Option<Rope>> {
    let (Some(rotary), Some(cos), Some(sin)) =
        (p.rotary, io.input(TensorId::CosCache), io.input(TensorId::SinCache))
    else {
        return Ok(None);
    };
    let position_ids = match io.input(TensorId::PositionIds) {
        Some(TensorView::I64(ids)) => ids,
        _ => &[],
    };
    let tables = [elements::<T>("cos_cache", cos)?, elements("sin_cache", sin)?];
    Ok(Some(Rope::new(p, rotary, sequences, tables, position_ids)))
}

/// RMS normalisation with that epsilon and weight, if the call has it.
fn norm<'a, T: Element>(
    epsilon: Option<f32>,
    name: &'static str,
    weight: Option<TensorView<'a>>,
) -> Result<Option<Norm<'a, T>>> {
    let (Some(epsilon), Some(weight)) = (epsilon, weight) else { return Ok(None) };
    Ok(Some(Norm { epsilon, weight: elements(name, weight)? }))
}

/// The elements of an optional tensor.
fn all<'a, T: Element>(name: &'static str, tensor: Option<TensorView<'a>>) -> Result<&'a [T]> {
    tensor.map_or(Ok(&[]), |tensor| elements(name, tensor))
}

/// Rows that attention reads.
fn cached<'a, T: Element>(
    name: &'static str,
    tensor: TensorView<'a>,
    codes: Option<Codes<'a>>,
    blocks: Option<Blocks<'a>>,
) -> Result<Cached<'a, T>> {
    match (codes, blocks) {
        (Some(codes), None) => Ok(Cached::Codes(codes, tensor.bytes())),
        (Some(codes), Some(blocks)) => Ok(Cached::BlocksOfCodes(blocks, codes, tensor.bytes())),
        (None, Some(blocks)) => Ok(Cached::Blocks(blocks, elements(name, tensor)?)),
        (None, None) => elements(name, tensor).map(Cached::Numbers),
    }
}
