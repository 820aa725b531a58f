//! ONNX Attention in double precision: for float64, and for values of another type than queries.
//! Rows run in parallel; each holds all its scores in memory.

use super::executor::{Executor, each, threads_for};
use super::sequence::Sequence;
use super::sequences;
use crate::backend::IoViews;
use gqa_plan::plan::TensorId;
use gqa_plan::{Problem, QkOutput, RowLayout};
use gqa_tensor::{Result, TensorView, TensorViewMut};
use half::{bf16, f16};

/// Computes a call without RoPE, sinks and log-sum-exp, which ONNX Attention does not have.
pub(super) fn run(p: &Problem, io: &mut IoViews<'_>, executor: &dyn Executor) -> Result<()> {
    let sequences = sequences(p, io)?;
    let (key, value) = (io.need(TensorId::Key)?, io.need(TensorId::Value)?);
    let (key, value) = if p.has_present() {
        let (size, v_size) = (p.head_size, p.v_head_size);
        let new = [io.input(TensorId::PastKey), Some(key)];
        append(p, &sequences, new, p.key_layout(), size, io.present_key.appended("present_key")?)?;
        let new = [io.input(TensorId::PastValue), Some(value)];
        append(
            p,
            &sequences,
            new,
            p.value_layout(),
            v_size,
            io.present_value.appended("present_value")?,
        )?;
        (io.present_key.view(), io.present_value.view())
    } else {
        (key, value)
    };
    let call = Call {
        p,
        sequences,
        query: io.need(TensorId::Query)?.to_f64(),
        keys: key.to_f64(),
        values: value.to_f64(),
        bias: io.input(TensorId::AttentionBias).map(TensorView::to_f64),
    };
    let rows = call.rows(executor);
    let mut output = vec![0.0; rows.len() * p.v_head_size];
    for (i, row) in rows.iter().enumerate() {
        let (head, s) = (i / p.q_len, i % p.q_len);
        let at = p.output_layout().at(head / p.q_heads, head % p.q_heads, s);
        output[at..at + p.v_head_size].copy_from_slice(&row.output);
    }
    round(&output, &mut io.output);
    if let Some(output_qk) = &mut io.output_qk {
        let scores: Vec<f64> = rows.into_iter().flat_map(|row| row.scores).collect();
        round(&scores, output_qk);
    }
    Ok(())
}

/// A call's tensors in double precision.
struct Call<'a> {
    p: &'a Problem,
    sequences: Vec<Sequence>,
    query: Vec<f64>,
    keys: Vec<f64>,
    values: Vec<f64>,
    bias: Option<Vec<f64>>,
}

/// One query row's results.
#[derive(Default)]
struct Row {
    output: Vec<f64>,
    scores: Vec<f64>,
}

impl Call<'_> {
    /// All rows: (batch, query heads, query length).
    fn rows(&self, executor: &dyn Executor) -> Vec<Row> {
        let (p, per_entry) = (self.p, self.p.q_heads * self.p.q_len);
        let mut rows: Vec<_> = (0..p.batch * per_entry).map(|_| Row::default()).collect();
        let work = rows.len() * p.total_len * (p.head_size + p.v_head_size);
        each(threads_for(work, executor), rows.iter_mut().enumerate(), |(i, row)| {
            *row = self.row(i / per_entry, i % per_entry / p.q_len, i % p.q_len);
        });
        rows
    }

    fn row(&self, b: usize, n: usize, s: usize) -> Row {
        let (p, kv_head) = (self.p, n / self.p.group());
        let query = &self.query[p.query_layout().at(b, n, s)..][..p.head_size];
        let mut scores: Vec<f64> =
            (0..p.total_len).map(|j| self.scaled(query, b, kv_head, j)).collect();
        let scaled = if p.output_qk == QkOutput::Scaled { scores.clone() } else { Vec::new() };
        if let Some(cap) = p.softcap.map(f64::from) {
            scores.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        let capped = if p.output_qk == QkOutput::Capped { scores.clone() } else { Vec::new() };
        self.hide(b, n, s, &mut scores);
        let weights = weights(&scores);
        let mut output = vec![0.0; p.v_head_size];
        for (j, weight) in
            weights.iter().enumerate().filter(|(j, _)| scores[*j] > f64::NEG_INFINITY)
        {
            let value = &self.values[p.values_read().at(b, kv_head, j)..][..p.v_head_size];
            output.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
        }
        let scores = match p.output_qk {
            QkOutput::None => Vec::new(),
            QkOutput::Scaled => scaled,
            QkOutput::Capped => capped,
            QkOutput::Biased => scores,
            QkOutput::AfterSoftmax | QkOutput::BeforeSoftmax => weights,
        };
        Row { output, scores }
    }

    fn scaled(&self, query: &[f64], b: usize, kv_head: usize, j: usize) -> f64 {
        let key = &self.keys[self.p.keys_read().at(b, kv_head, j)..][..query.len()];
        self.p.scale * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>()
    }

    /// Adds the bias; masked scores become -inf.
    fn hide(&self, b: usize, n: usize, s: usize, scores: &mut [f64]) {
        let seen = self.sequences[b].visible(self.p, s);
        for (j, score) in scores.iter_mut().enumerate() {
            if !seen.contains(&j) {
                *score = f64::NEG_INFINITY;
                continue;
            }
            let (Some(bias), Some(layout)) = (&self.bias, self.p.bias_layout()) else { continue };
            let bias = bias[layout.at(b, n, s) + j];
            *score = match self.p.bias.is_some_and(|bias| bias.boolean) {
                true if bias != 0.0 => *score,
                true => f64::NEG_INFINITY,
                false if bias == f64::NEG_INFINITY => bias,
                false => *score + bias,
            };
        }
    }
}

/// Softmax; zeros where every score is -inf.
fn weights(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
    let powers: Vec<f64> = scores.iter().map(|x| (x - shift).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|x| if sum == 0.0 { 0.0 } else { x / sum }).collect()
}

/// Copies past rows and then new ones.
fn append(
    p: &Problem,
    sequences: &[Sequence],
    [past, new]: [Option<TensorView<'_>>; 2],
    layout: RowLayout,
    size: usize,
    present: TensorViewMut<'_>,
) -> Result<()> {
    let (element, bytes) = (present.dtype().size(), size * present.dtype().size());
    let of =
        |tensor: Option<TensorView<'_>>| tensor.map(|t| t.bytes().to_vec()).unwrap_or_default();
    let (past, new) = (of(past), of(new));
    for (i, to) in present.into_bytes()?.chunks_exact_mut(bytes).enumerate() {
        let (head, row) = (i / p.capacity, i % p.capacity);
        let kept = sequences[head / p.kv_heads].kept(p);
        let from = if row < kept {
            &past[(head * p.past_capacity + row) * bytes..]
        } else {
            let at = layout.at(head / p.kv_heads, head % p.kv_heads, row - kept);
            &new[at * element..]
        };
        to.copy_from_slice(&from[..bytes]);
    }
    Ok(())
}

/// Rounds all elements to the tensor's type.
fn round(values: &[f64], to: &mut TensorViewMut<'_>) {
    fn each<T>(to: &mut [T], values: &[f64], round: impl Fn(f64) -> T) {
        to.iter_mut().zip(values).for_each(|(to, &x)| *to = round(x));
    }
    match to {
        TensorViewMut::F64(to) => each(to, values, |x| x),
        TensorViewMut::F32(to) => each(to, values, |x| x as f32),
        TensorViewMut::F16(to) => each(to, values, f16::from_f64),
        TensorViewMut::BF16(to) => each(to, values, bf16::from_f64),
        _ => {}
    }
}
