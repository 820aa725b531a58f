//! What GroupQueryAttention is: the definition, in double precision, one row at a time.
//!
//! Every back end is compared with this one. It shares no code with them and is written to be read next to the formulas in
//! `docs/numerics.md`.

mod rows;

use crate::backend::{Backend, Io};
use crate::{CacheBinding, Phase, Problem, QkOutput, Result, Sink, Tensor};
use rayon::prelude::*;
use rows::{Heads, place, rounded, store};
use std::ops::Range;

/// The back end that computes by the definition.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let exact = exact(problem, io);
        store(io.output, 0, &exact.output);
        if let Some(output_qk) = io.output_qk.as_deref_mut() {
            store(output_qk, 0, &exact.output_qk);
        }
        if let Some(lse) = io.lse.as_deref_mut() {
            store(lse, 0, &exact.lse);
        }
        Ok(())
    }
}

/// A call's results before they are rounded, in the order of the outputs' elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Exact {
    /// output
    pub output: Vec<f64>,
    /// output_qk; empty where the call has none.
    pub output_qk: Vec<f64>,
    /// Log-sum-exp, wanted or not.
    pub lse: Vec<f64>,
}

/// Computes a call without rounding its results. The cache is part of what a call computes with, so present_key and
/// present_value are written, and rounded, here as well.
pub fn exact(problem: &Problem, io: &mut Io<'_>) -> Exact {
    Call::new(problem, io).attend()
}

/// A call's tensors in double precision.
struct Call<'a> {
    problem: &'a Problem,
    query: Heads,
    /// Last valid index of each sequence.
    seqlens_k: Vec<f64>,
    cos: Vec<f64>,
    sin: Vec<f64>,
    position_ids: Vec<f64>,
    bias: Vec<f64>,
    sink: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
}

/// One query row's results.
struct Row {
    output: Vec<f64>,
    scores: Vec<f64>,
    lse: f64,
}

impl<'a> Call<'a> {
    /// Reads the inputs and updates the cache.
    fn new(p: &'a Problem, io: &mut Io<'_>) -> Self {
        let values = |tensor: Option<&Tensor>| tensor.map(Tensor::to_f64).unwrap_or_default();
        let (n, nk) = (p.q_heads, p.kv_heads);
        let heads = |tensor: Option<&Tensor>, first, count, rows| match (p.packed, tensor) {
            (false, Some(tensor)) => Heads::new(p, tensor, count, 0, rows),
            _ => Heads::new(p, io.query, n + 2 * nk, first, p.q_len),
        };
        let (new_key, new_value) =
            (heads(io.key, n, nk, p.new_len), heads(io.value, n + nk, nk, p.new_len));
        let mut call = Self {
            problem: p,
            query: heads(Some(io.query), 0, n, p.q_len),
            seqlens_k: io.seqlens_k.to_f64(),
            cos: values(io.cos_cache),
            sin: values(io.sin_cache),
            position_ids: values(io.position_ids),
            bias: values(io.attention_bias),
            sink: values(io.head_sink),
            key: Vec::new(),
            value: Vec::new(),
        };
        let (past_key, past_value) = (values(io.past_key), values(io.past_value));
        call.key = call
            .present(io.present_key, &past_key, |b, head, s| call.rotated(&new_key, b, head, s));
        call.value = call.present(io.present_value, &past_value, |b, head, s| {
            new_value.row(b, head, s).to_vec()
        });
        call
    }

    /// Valid keys of a sequence, the new ones included.
    fn total(&self, b: usize) -> usize {
        self.seqlens_k[b] as usize + 1
    }

    /// Valid keys before the first query row's, and so that row's position.
    fn past(&self, b: usize) -> usize {
        match self.problem.phase {
            Phase::FirstPrompt => 0,
            _ => self.total(b) - self.problem.q_len,
        }
    }

    /// Writes the cache: the past's rows, the new rows, and, unless it is shared, zeros. Returns all of it.
    fn present(
        &self,
        tensor: &mut Tensor,
        past: &[f64],
        new: impl Fn(usize, usize, usize) -> Vec<f64>,
    ) -> Vec<f64> {
        let p = self.problem;
        let shared = p.cache == CacheBinding::Shared;
        for head in 0..p.batch * p.kv_heads {
            let b = head / p.kv_heads;
            let (total, kept) =
                (self.total(b), if p.new_len == 0 { self.total(b) } else { self.past(b) });
            let rows = if shared { kept..total } else { 0..p.capacity };
            for row in rows {
                let values = if row < kept {
                    past[(head * p.past_capacity + row) * p.head_size..][..p.head_size].to_vec()
                } else if row < total {
                    new(b, head % p.kv_heads, row - kept)
                } else {
                    vec![0.0; p.head_size]
                };
                store(tensor, (head * p.capacity + row) * p.head_size, &values);
            }
        }
        tensor.to_f64()
    }

    /// A new row, rotated to its position and rounded to the element type, as the cache holds it.
    fn rotated(&self, heads: &Heads, b: usize, head: usize, s: usize) -> Vec<f64> {
        let x = heads.row(b, head, s);
        let Some(rotary) = self.problem.rotary else { return x.to_vec() };
        let position = match rotary.explicit {
            Some(row_length) => self.position_ids[b * row_length + s] as usize,
            None => self.past(b) + s,
        };
        let half = rotary.dim / 2;
        let mut y = x.to_vec();
        for i in 0..half {
            let (first, second) =
                if rotary.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (cos, sin) = (self.cos[position * half + i], self.sin[position * half + i]);
            y[first] = x[first] * cos - x[second] * sin;
            y[second] = x[first] * sin + x[second] * cos;
        }
        rounded(self.problem, y)
    }

    /// All rows of all heads.
    fn attend(&self) -> Exact {
        let p = self.problem;
        let rows: Vec<Row> = (0..p.batch * p.q_heads)
            .into_par_iter()
            .flat_map_iter(|head| {
                (0..p.q_len).map(move |s| self.row(head / p.q_heads, head % p.q_heads, s))
            })
            .collect();
        let mut output = vec![0.0; rows.len() * p.head_size];
        for (i, row) in rows.iter().enumerate() {
            let (head, s) = (i / p.q_len, i % p.q_len);
            let at = place(p.layout, p.q_heads, p.q_len, [head / p.q_heads, head % p.q_heads, s]);
            output[at * p.head_size..][..p.head_size].copy_from_slice(&row.output);
        }
        Exact {
            output,
            output_qk: rows.iter().flat_map(|row| &row.scores).copied().collect(),
            lse: rows.iter().map(|row| row.lse).collect(),
        }
    }

    /// Query row `s` of query head `n`.
    fn row(&self, b: usize, n: usize, s: usize) -> Row {
        let visible = self.visible(b, s);
        let logits = self.logits(b, n, s, visible.clone());
        let (weights, lse) = softmax(&logits, if visible.is_empty() { None } else { self.sink(n) });
        let mut output = vec![0.0; self.problem.head_size];
        for (weight, j) in weights.iter().zip(visible.clone()) {
            let value = self.cached(&self.value, b, n, j);
            output.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
        }
        let scores = match self.problem.output_qk {
            QkOutput::None => Vec::new(),
            QkOutput::BeforeSoftmax => self.columns(visible, &logits),
            QkOutput::AfterSoftmax => self.columns(visible, &weights),
        };
        Row { output, scores, lse }
    }

    /// The keys that query row `s` sees; a row of padding sees none.
    fn visible(&self, b: usize, s: usize) -> Range<usize> {
        let (position, total) = (self.past(b) + s, self.total(b));
        if position >= total {
            return 0..0;
        }
        let end = if self.problem.causal { position + 1 } else { total };
        let first = self.problem.window.map_or(0, |window| end.saturating_sub(window));
        first..end
    }

    /// The scores of the visible keys: scale, softcap, bias.
    fn logits(&self, b: usize, n: usize, s: usize, visible: Range<usize>) -> Vec<f64> {
        let p = self.problem;
        let query = self.rotated(&self.query, b, n, s);
        let logit = |j| {
            let key = self.cached(&self.key, b, n, j);
            let scaled =
                f64::from(p.scale) * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
            let capped =
                p.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh());
            capped + self.bias(b, n, s, j)
        };
        visible.map(logit).collect()
    }

    fn bias(&self, b: usize, n: usize, s: usize, j: usize) -> f64 {
        let p = self.problem;
        let Some(broadcast) = p.bias else { return 0.0 };
        let heads = if broadcast.head { 1 } else { p.q_heads };
        let (b, n) = (if broadcast.batch { 0 } else { b }, if broadcast.head { 0 } else { n });
        self.bias[((b * heads + n) * p.q_len + s) * p.total_len + j]
    }

    fn sink(&self, n: usize) -> Option<f64> {
        match self.problem.sink {
            Sink::None => None,
            Sink::Zero => Some(0.0),
            Sink::PerHead => Some(self.sink[n]),
        }
    }

    /// Row `j` of the cache that query head `n` reads.
    fn cached<'c>(&self, cache: &'c [f64], b: usize, n: usize, j: usize) -> &'c [f64] {
        let p = self.problem;
        let head = b * p.kv_heads + n / (p.q_heads / p.kv_heads);
        &cache[(head * p.capacity + j) * p.head_size..][..p.head_size]
    }

    /// A row of output_qk: 0 where a key is not visible.
    fn columns(&self, visible: Range<usize>, values: &[f64]) -> Vec<f64> {
        let mut columns = vec![0.0; self.problem.total_len];
        columns[visible].copy_from_slice(values);
        columns
    }
}

/// Softmax weights, and the logarithm of their denominator. The sink joins the denominator and gets no weight. Where every logit
/// is -inf, all weights are 0.
fn softmax(logits: &[f64], sink: Option<f64>) -> (Vec<f64>, f64) {
    let sink = sink.unwrap_or(f64::NEG_INFINITY);
    if logits.iter().all(|&x| x == f64::NEG_INFINITY) {
        return (vec![0.0; logits.len()], sink);
    }
    let largest = logits.iter().copied().fold(sink, f64::max);
    let powers: Vec<f64> = logits.iter().map(|x| (x - largest).exp()).collect();
    let sum = powers.iter().sum::<f64>() + (sink - largest).exp();
    (powers.iter().map(|x| x / sum).collect(), largest + sum.ln())
}
