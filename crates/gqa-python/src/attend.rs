//! Attention on the CPU, sequence by sequence, of arrays where they are.

use crate::array::Array;
use crate::arrays::Arrays;
use crate::element::Element;
use crate::error::{invalid, raised, room};
use crate::heads::{Heads, Place};
use crate::mask::Bias;
use crate::scores::Scores;
use crate::sequences::{Given, Keys, Sequence};
use gqa_host::backend::IoViews;
use gqa_host::backend::cpu::{Cpu, Executor, Instructions, Rayon};
use gqa_host::engine::{self, External, Paged};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{CacheView, Error, Problem, Strided, TensorView, TensorViewMut};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Attention that can be computed.
pub struct Attend<'a, T> {
    call: Call<T>,
    out: &'a mut [T],
    lse: Option<&'a mut [f32]>,
}

impl<'a, T: Element> Attend<'a, T> {
    /// # Errors
    ///
    /// Where arrays do not agree with each other.
    pub fn of(arrays: &'a Arrays, given: &Given, scores: Scores) -> PyResult<Self> {
        let call = Call::<T>::of(arrays, given, scores)?;
        let Heads { entries, rows, heads, .. } = call.q;
        let out = arrays.out.elements_mut(entries * rows * heads * call.v.size)?;
        let lse = arrays.lse.as_ref().map(|lse| lse.elements_mut(entries * rows * heads));
        Ok(Self { call, out, lse: lse.transpose()? })
    }

    pub fn sequences(&self) -> &[Sequence] {
        &self.call.sequences
    }

    /// # Errors
    ///
    /// Where the library does not compute such a call.
    pub fn check(&self) -> Result<(), Error> {
        let (call, with_lse) = (&self.call, self.lse.is_some());
        if !with_lse && call.reads_blocks() {
            return call.problem_in_blocks().map(drop);
        }
        let mut sequences = call.sequences.iter().filter(|sequence| !sequence.is_empty());
        sequences
            .try_for_each(|sequence| call.problem(sequence, Strided::default(), with_lse).map(drop))
    }

    /// Computes `out`, and `lse` if given.
    ///
    /// # Errors
    ///
    /// Where memory does not suffice.
    pub fn run(self) -> Result<(), Error> {
        self.call.run(self.out, self.lse)
    }
}

/// A call whose arrays agree.
struct Call<T> {
    q: Heads<T>,
    k: Heads<T>,
    v: Heads<T>,
    sequences: Vec<Sequence>,
    scores: Scores,
    sinks: Option<Vec<T>>,
    bias: Option<Bias<T>>,
    varlen: bool,
    cpu: Cpu,
}

/// A sequence and its part of the outputs.
struct Job<'a, T> {
    index: usize,
    sequence: &'a Sequence,
    output: &'a mut [T],
    lse: Option<Vec<f32>>,
}

/// What a lock keeps.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// q, k and v, which agree.
fn heads<T: Element>(arrays: &Arrays, varlen: bool, paged: bool) -> PyResult<[Heads<T>; 3]> {
    let q = match varlen {
        true => Heads::of(&arrays.q, 3, "(rows of all sequences, heads, size)")?,
        false => Heads::of(&arrays.q, 4, "(batch, rows, heads, size)")?,
    };
    let (dimensions, described) = match (paged, varlen) {
        (true, _) => (4, "(blocks, rows of a block, KV heads, size)"),
        (false, true) => (3, "(keys of all sequences, KV heads, size)"),
        (false, false) => (4, "(batch, keys, KV heads, size)"),
    };
    let k = Heads::<T>::of(&arrays.k, dimensions, described)?;
    let v = Heads::<T>::of(&arrays.v, dimensions, described)?;
    check_keys(&q, &k, &arrays.k)?;
    match paged {
        true => check_like(&arrays.k, &arrays.v)?,
        false => check_values(&arrays.k, &arrays.v)?,
    }
    Ok([q, k, v])
}

/// Errs unless keys have heads that q's can share.
pub fn check_keys<T>(q: &Heads<T>, keys: &Heads<T>, k: &Array) -> PyResult<()> {
    let &Heads { heads, size, .. } = q;
    if keys.heads == 0 || heads == 0 || heads % keys.heads != 0 || keys.size != size {
        let allowed =
            format!("heads of {size} elements, and a number of KV heads that divides q's {heads}");
        return Err(invalid(k.name, format!("{:?}", k.shape), allowed));
    }
    Ok(())
}

/// Errs unless keys and values have the same shape.
pub fn check_like(k: &Array, v: &Array) -> PyResult<()> {
    match v.shape == k.shape {
        true => Ok(()),
        false => Err(invalid(v.name, format!("{:?}", v.shape), format!("{:?}", k.shape))),
    }
}

/// Errs unless there are as many values as keys; their head size may differ.
fn check_values(k: &Array, v: &Array) -> PyResult<()> {
    match (v.shape.split_last(), k.shape.split_last()) {
        (Some((1.., values)), Some((_, keys))) if values == keys => Ok(()),
        (_, keys) => {
            let keys = keys.map_or(&[][..], |(_, keys)| keys);
            let allowed = format!("{keys:?} as k has, and a head size of 1 or more");
            Err(invalid(v.name, format!("{:?}", v.shape), allowed))
        }
    }
}

/// A number for each head.
fn of_heads<T: Element>(array: &Array, heads: usize) -> PyResult<Vec<T>> {
    match array.shape == [heads] {
        true => array.numbers(),
        false => {
            let allowed = format!("({heads},), one for each head");
            Err(invalid(array.name, format!("{:?}", array.shape), allowed))
        }
    }
}

impl<T: Element> Call<T> {
    fn of(arrays: &Arrays, given: &Given, scores: Scores) -> PyResult<Self> {
        let varlen = given.q_starts.is_some();
        let [q, k, v] = heads(arrays, varlen, given.table.is_some())?;
        let keys = Keys { name: arrays.k.name, entries: k.entries, rows: k.rows };
        let sequences = Sequence::all(given, [q.entries, q.rows], &keys)?;
        let sinks = arrays.sinks.as_ref().map(|sinks| of_heads(sinks, q.heads)).transpose()?;
        let bias = Bias::of(arrays, &q, &k, &sequences)?;
        let cpu = Cpu::new(Instructions::from_env().map_err(raised)?);
        Ok(Self { q, k, v, sequences, scores, sinks, bias, varlen, cpu })
    }

    fn layer(&self) -> engine::Layer {
        let heads = engine::Heads { query: self.q.heads, kv: self.k.heads, size: self.q.size };
        self.scores.layer(T::DTYPE, heads, self.sinks.is_some())
    }

    fn run(&self, out: &mut [T], lse: Option<&mut [f32]>) -> Result<(), Error> {
        tracing::debug!(
            backend = "cpu",
            dtype = %T::DTYPE,
            sequences = self.sequences.len(),
            rows = self.tokens(),
            longest = self.most(|sequence| sequence.keys),
            heads = self.q.heads,
            kv_heads = self.k.heads,
            size = self.q.size,
            "run"
        );
        if lse.is_none() && self.reads_blocks() {
            return self.run_in_blocks(out);
        }
        let mut rest = out;
        let mut jobs = room("q", self.sequences.len())?;
        for (index, sequence) in self.sequences.iter().enumerate() {
            let (output, behind) = rest.split_at_mut(sequence.rows * self.q.heads * self.v.size);
            rest = behind;
            let lse = lse.is_some().then(|| vec![0.; sequence.rows * self.q.heads]);
            jobs.push(Mutex::new(Job { index, sequence, output, lse }));
        }
        // Rows behind the last sequence.
        rest.fill(T::default());
        let failed = Mutex::new(Ok(()));
        Rayon.for_each(jobs.len(), &|i| {
            if let Err(error) = self.sequence(&mut locked(&jobs[i])) {
                *locked(&failed) = Err(error);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        let Some(lse) = lse else { return Ok(()) };
        lse.fill(f32::NEG_INFINITY);
        for job in jobs {
            let job = job.into_inner().unwrap_or_else(PoisonError::into_inner);
            job.lse.iter().for_each(|from| self.store(job.sequence, from, lse));
        }
        Ok(())
    }

    /// The call of a sequence that is not empty.
    fn problem(
        &self,
        sequence: &Sequence,
        strided: Strided,
        with_lse: bool,
    ) -> Result<Problem, Error> {
        let call = External::new(1, sequence.rows, sequence.keys).value_size(self.v.size);
        let mut call = call.strides(strided);
        if let Some(right) = self.scores.behind() {
            call = call.right_window(right);
        }
        if with_lse {
            call = call.log_sum_exp();
        }
        if let Some(bias) = &self.bias {
            call = bias.declared(call);
        }
        self.layer().external(call)
    }

    /// Copies log-sum-exps of shape (heads, rows) into (batch, heads, rows) or (heads, rows of all
    /// sequences). For a row that sees no key the result is its sink alone.
    fn store(&self, sequence: &Sequence, from: &[f32], to: &mut [f32]) {
        let (heads, rows) = (self.q.heads, sequence.rows);
        for (head, from) in from.chunks_exact(rows.max(1)).enumerate() {
            let at = match self.varlen {
                true => head * self.q.rows + sequence.first_row,
                false => (sequence.entry * heads + head) * self.q.rows,
            };
            let of_none = self.sinks.as_ref().map_or(f32::NEG_INFINITY, |all| all[head].to_f32());
            for (to, &lse) in to[at..at + rows].iter_mut().zip(from) {
                *to = if lse == f32::NEG_INFINITY { of_none } else { lse };
            }
        }
    }

    /// Attention of one sequence.
    fn sequence(&self, job: &mut Job<'_, T>) -> Result<(), Error> {
        let &Sequence { entry, first_row, rows, keys, .. } = job.sequence;
        if job.sequence.is_empty() {
            job.output.fill(T::default());
            job.lse.iter_mut().flatten().for_each(|lse| *lse = f32::NEG_INFINITY);
            return Ok(());
        }
        let place = job.sequence.place();
        // SAFETY: the sequences were checked against the sizes of the arrays, and the caller does
        // not write these during the call
        let [query, key, value] = unsafe {
            let queries = Place::Rows { entry, first: first_row };
            [self.q.rows(queries, rows)?, self.k.rows(place, keys)?, self.v.rows(place, keys)?]
        };
        let strided = Strided {
            query: query.strides,
            key: key.strides,
            value: value.strides,
            ..Strided::default()
        };
        let problem = self.problem(job.sequence, strided, job.lse.is_some())?;
        let bias = self.bias.as_ref().map(|bias| bias.sequence(job.index, job.sequence));
        let bias = bias.transpose()?;
        let last = [keys as i32 - 1];
        let inputs = Tensors::default()
            .with(TensorId::Query, T::view(&query.elements))
            .with(TensorId::Key, T::view(&key.elements))
            .with(TensorId::Value, T::view(&value.elements))
            .with(TensorId::SeqlensK, TensorView::I32(&last))
            .with(TensorId::HeadSink, self.sinks.as_deref().map(T::view))
            .with(TensorId::AttentionBias, bias.as_ref().map(|bias| bias.view()));
        let [present_key, present_value] = [CacheView::NONE; 2];
        self.cpu.run_on(
            &problem,
            &mut IoViews {
                inputs,
                output: T::view_mut(job.output),
                present_key,
                present_value,
                row_scales: None,
                output_qk: None,
                lse: job.lse.as_deref_mut().map(TensorViewMut::F32),
            },
        )?;
        if let (Some(lse), Some(Bias::Alibi(alibi))) = (&mut job.lse, &self.bias) {
            alibi.correct(job.index, job.sequence, lse);
        }
        Ok(())
    }

    /// Whether all sequences can be one paged call, which reads blocks in place: its windows and
    /// positions suffice.
    fn reads_blocks(&self) -> bool {
        let blocks = self.sequences.iter().all(|sequence| sequence.blocks().is_some());
        let fits = self.sequences.iter().all(|sequence| sequence.rows <= sequence.keys);
        let known = matches!(self.scores.behind(), None | Some(0)) && self.bias.is_none();
        // 0 is the usual scale there.
        let known = known && self.scores.scale != 0.;
        let in_place = self.k.is_contiguous && self.v.is_contiguous;
        let some = self.sequences.iter().any(|sequence| sequence.rows > 0);
        blocks && fits && known && in_place && self.q.size % 8 == 0 && some
    }

    /// The most of something that a sequence has.
    fn most(&self, of: fn(&Sequence) -> usize) -> usize {
        self.sequences.iter().map(of).max().unwrap_or(0)
    }

    /// Blocks of a sequence in one call.
    fn columns(&self) -> usize {
        self.most(|sequence| sequence.blocks().map_or(0, <[usize]>::len)).max(1)
    }

    /// Rows of all sequences.
    fn tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.rows).sum()
    }

    /// All sequences as one call.
    fn problem_in_blocks(&self) -> Result<Problem, Error> {
        let cache = [self.k.entries, self.k.rows, self.columns()];
        let call = Paged::new(self.sequences.len(), self.tokens(), cache)
            .most_tokens(self.most(|sequence| sequence.rows))
            .longest(self.most(|sequence| sequence.keys))
            .appended();
        self.layer().paged(call)
    }

    /// All sequences in one call.
    fn run_in_blocks(&self, out: &mut [T]) -> Result<(), Error> {
        let (problem, columns) = (self.problem_in_blocks()?, self.columns());
        let (mut starts, mut past, mut table) = (vec![0], Vec::new(), Vec::new());
        for sequence in &self.sequences {
            starts.push(starts[starts.len() - 1] + sequence.rows as i32);
            past.push((sequence.keys - sequence.rows) as i32);
            let blocks = sequence.blocks().unwrap_or_default();
            table.extend(blocks.iter().map(|&block| block as i32));
            table.resize(starts.len().saturating_sub(1) * columns, -1);
        }
        // SAFETY: all rows, which nobody writes meanwhile
        let (query, keys, values) = unsafe { (self.q.packed()?, self.k.all(), self.v.all()) };
        let used = self.tokens() * self.q.heads * self.q.size;
        let (out, behind) = out.split_at_mut(used);
        behind.fill(T::default());
        let inputs = Tensors::default()
            .with(TensorId::Query, T::view(&query[..used]))
            .with(TensorId::SeqlensK, TensorView::I32(&past))
            .with(TensorId::CumulativeSequenceLength, TensorView::I32(&starts))
            .with(TensorId::BlockTable, TensorView::I32(&table))
            .with(TensorId::HeadSink, self.sinks.as_deref().map(T::view));
        let (present_key, present_value) = (T::view(keys).into(), T::view(values).into());
        let output = T::view_mut(out);
        let mut io = IoViews {
            inputs,
            output,
            present_key,
            present_value,
            row_scales: None,
            output_qk: None,
            lse: None,
        };
        self.cpu.run_on(&problem, &mut io)
    }
}
