//! The definition of GroupQueryAttention and ONNX Attention in double precision, one row at a time.
//!
//! The oracle of every back end: it shares no code with them, and reads like the formulas in
//! `docs/numerics.md`.

mod paged;
mod quantized;
mod rows;
mod update;

use crate::backend::cpu::{Rayon, each};
use crate::backend::{Backend, Io};
use gqa_plan::plan::TensorId;
use gqa_plan::{
    Alignment, CacheBinding, CallKind, Phase, Problem, ProblemFields, QkNorm, QkOutput, Sink,
};
use gqa_tensor::{Result, Tensor};
use quantized::{Codes, Row as CachedRow};
use rows::{Heads, bnsh, place, rounded, store};
use std::ops::Range;

/// The back end that computes by the definition.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let problem = &*problem.contiguous();
        let exact = exact(problem, io)?;
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

/// A call's results before rounding, in the order of the outputs' elements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exact {
    /// The true output, before division by output_scale if the call has one.
    pub output: Vec<f64>,
    /// output_qk; empty where the call has none.
    pub output_qk: Vec<f64>,
    /// Log-sum-exp, even if the call has no such output.
    pub lse: Vec<f64>,
}

/// Computes a call without rounding its results, except for present_key and present_value, which
/// attention reads and which are rounded here as well.
///
/// # Errors
/// As [`Backend::run`].
pub fn exact(problem: &Problem, io: &mut Io<'_>) -> Result<Exact> {
    io.check(problem)?;
    match (problem.computes, problem.pages) {
        _ if problem.is_empty() => Ok(Exact::default()),
        (CallKind::Update(mode), _) => update::update(problem, mode, io).map(|()| Exact::default()),
        (_, Some(pages)) => paged::attend(problem, pages, io),
        _ => compute(problem, io),
    }
}

/// Computes a call on tensors that fit it.
fn compute(problem: &Problem, io: &mut Io<'_>) -> Result<Exact> {
    compute_without(Vec::new(), problem, io)
}

/// The same, for one sequence, with the keys in `hidden` masked from all rows.
fn compute_without(hidden: Vec<usize>, problem: &Problem, io: &mut Io<'_>) -> Result<Exact> {
    let call = Call { hidden, ..Call::new(problem, io)? };
    Ok(match problem.computes {
        CallKind::Attention if problem.quantizes_output() => {
            let scale = io.need(TensorId::OutputScale)?.to_f64()[0];
            let exact = call.attend();
            Exact { output: exact.output.iter().map(|x| x / scale).collect(), ..exact }
        }
        CallKind::Attention => call.attend(),
        CallKind::Rotation => call.rotate(),
        CallKind::Cache | CallKind::Update(_) => Exact::default(),
    })
}

/// A call's tensors in double precision.
struct Call<'a> {
    problem: &'a Problem,
    query: Heads,
    /// Last valid index of each sequence.
    seqlens_k: Vec<f64>,
    /// New tokens of each sequence of a padded chunk.
    query_seqlens: Vec<f64>,
    /// For each sequence, the position of row 0 of the cache that attention reads.
    first: Vec<usize>,
    cos: Vec<f64>,
    sin: Vec<f64>,
    position_ids: Vec<f64>,
    bias: Vec<f64>,
    tree_mask: Vec<i64>,
    /// Keys that no row sees, in order.
    hidden: Vec<usize>,
    sink: Vec<f64>,
    q_norm_weight: Vec<f64>,
    k_norm_weight: Vec<f64>,
    key: Heads,
    value: Heads,
}

/// What a row of the cache is made from.
enum Source {
    /// A row of past_key or past_value, by its index in the tensor.
    Past(usize),
    /// Batch entry, KV head and number of a new row.
    New([usize; 3]),
    /// Zeros.
    Nothing,
}

/// A rolling KV cache before the call, and the temporary cache for the call.
struct Joined {
    past: [Tensor; 2],
    present: [Tensor; 2],
}

/// One query row's results.
struct Row {
    output: Vec<f64>,
    scores: Vec<f64>,
    lse: f64,
}

impl<'a> Call<'a> {
    /// Reads the inputs and updates the cache.
    fn new(p: &'a Problem, io: &mut Io<'_>) -> Result<Self> {
        let inputs = io.inputs;
        // A cache update has no query.
        let nothing = Tensor::zeros(p.dtype, &[0]);
        let query = inputs.input(TensorId::Query).unwrap_or(&nothing);
        let values = |tensor: Option<&Tensor>| tensor.map(Tensor::to_f64).unwrap_or_default();
        let (n, nk, h) = (p.q_heads, p.kv_heads, p.head_size);
        let heads = |tensor: Option<&Tensor>, first, count, rows, size| match (p.packed, tensor) {
            (false, Some(tensor)) => Heads::new(p, tensor, count, 0, rows, size),
            _ => Heads::new(p, query, n + 2 * nk, first, p.q_len, h),
        };
        let mut call = Self {
            problem: p,
            query: heads(Some(query), 0, n, p.q_len, h),
            seqlens_k: io.need(TensorId::SeqlensK)?.to_f64(),
            query_seqlens: values(inputs.input(TensorId::QuerySeqlens)),
            first: Vec::new(),
            cos: values(inputs.input(TensorId::CosCache)),
            sin: values(inputs.input(TensorId::SinCache)),
            position_ids: values(inputs.input(TensorId::PositionIds)),
            bias: values(inputs.input(TensorId::AttentionBias)),
            tree_mask: words(inputs.input(TensorId::TreeMask)),
            hidden: Vec::new(),
            sink: values(inputs.input(TensorId::HeadSink)),
            q_norm_weight: values(inputs.input(TensorId::QNormWeight)),
            k_norm_weight: values(inputs.input(TensorId::KNormWeight)),
            key: heads(inputs.input(TensorId::Key), n, nk, p.new_len, h),
            value: match p.latent {
                true => bnsh(Vec::new(), 0, 0, 0),
                false => heads(inputs.input(TensorId::Value), n + nk, nk, p.new_len, p.v_head_size),
            },
        };
        call.first = (0..p.batch).map(|b| call.gone(b)).collect();
        if p.cache != CacheBinding::External {
            let new_key = |[b, head, s]: [usize; 3]| {
                call.rotated(
                    b,
                    s,
                    call.normed(call.key.row(b, head, s), &call.k_norm_weight, |norm| {
                        norm.k_epsilon
                    }),
                )
            };
            let new_value = |[b, head, s]: [usize; 3]| call.value.row(b, head, s).to_vec();
            let mut joined = p.slides.then(|| call.room_for_all(io)).transpose()?;
            let (past, [present_key, present_value]) = match &mut joined {
                Some(Joined { past, present }) => (past.each_ref().map(Some), present.each_mut()),
                None => (
                    [inputs.input(TensorId::PastKey), inputs.input(TensorId::PastValue)],
                    [&mut *io.present_key, &mut *io.present_value],
                ),
            };
            let [past_key, past_value] = past;
            let (key, value) = match p.quantized {
                // Without values of its own.
                None if p.latent => {
                    let nothing = bnsh(Vec::new(), 0, 0, 0);
                    (call.present(present_key, past_key, h, new_key), nothing)
                }
                None => (
                    call.present(present_key, past_key, h, new_key),
                    call.present(present_value, past_value, p.v_head_size, new_value),
                ),
                Some(how) => {
                    let given = match &io.row_scales {
                        Some(scales) => scales.each_ref().map(|scales| scales.to_f64()),
                        None => {
                            [TensorId::KScale, TensorId::VScale].map(|id| values(inputs.input(id)))
                        }
                    };
                    let [mut keys, mut codes] = given.map(|scales| Codes { how, scales });
                    let key = call.present_codes(present_key, past_key, h, &mut keys, new_key)?;
                    let value = match p.latent {
                        true => bnsh(Vec::new(), 0, 0, 0),
                        false => {
                            let past = past_value;
                            call.present_codes(present_value, past, h, &mut codes, new_value)?
                        }
                    };
                    if let Some([k_scale, v_scale]) = &mut io.row_scales {
                        store(k_scale, 0, &keys.scales);
                        store(v_scale, 0, &codes.scales);
                    }
                    (key, value)
                }
            };
            if let Some(Joined { present: [key, value], .. }) = &joined {
                call.keep_newest(key, io.present_key.bytes_mut()?);
                call.keep_newest(value, io.present_value.bytes_mut()?);
            }
            (call.key, call.value) = (key, value);
        }
        Ok(call)
    }

    /// A rolling KV cache, and a temporary one with room for its rows and the new ones.
    fn room_for_all(&self, io: &Io<'_>) -> Result<Joined> {
        let given =
            [(TensorId::PastKey, &*io.present_key), (TensorId::PastValue, &*io.present_value)];
        let past = given.map(|(id, present)| match self.problem.cache {
            CacheBinding::Shared => present.clone(),
            _ => io.input(id).unwrap_or(present).clone(),
        });
        let present = |name, past: &Tensor| {
            let [b, heads, _, size] = self.problem.key_cache_shape(0);
            Tensor::try_zeros(name, past.dtype(), &[b, heads, self.rows(), size])
        };
        let present = [present("present_key", &past[0])?, present("present_value", &past[1])?];
        Ok(Joined { past, present })
    }

    /// Copies the newest rows of the temporary cache back into the rolling one.
    fn keep_newest(&self, joined: &Tensor, present: &mut [u8]) {
        let p = self.problem;
        let row = p.key_cache_shape(0)[3] * joined.dtype().size();
        for (head, from) in joined.bytes().chunks_exact(self.rows() * row).enumerate() {
            let b = head / p.kv_heads;
            let kept = self.resident(self.total(b));
            let evicted = self.total(b) - self.first[b] - kept;
            let to = &mut present[head * p.capacity * row..][..p.capacity * row];
            to[..kept * row].copy_from_slice(&from[evicted * row..][..kept * row]);
            if p.cache == CacheBinding::Separate {
                to[kept * row..].fill(0);
            }
        }
    }

    /// Number of rows that a rolling KV cache holds after `total` tokens. When it is full, the
    /// oldest rows are evicted before the next token, except for those in that token's window.
    fn resident(&self, total: usize) -> usize {
        let ProblemFields { capacity, window, .. } = **self.problem;
        let evicted = capacity + 1 - window.unwrap_or(capacity);
        // Once full, the cache repeatedly evicts this many rows and fills up again.
        match total.saturating_sub(capacity) {
            0 => total,
            beyond => capacity - evicted + 1 + (beyond - 1) % evicted,
        }
    }

    /// Rows of the sequence evicted before the call.
    fn gone(&self, b: usize) -> usize {
        let past = self.position(b, 0).max(0) as usize;
        if self.problem.slides { past - self.resident(past) } else { 0 }
    }

    /// Rows of the cache that attention sees.
    fn rows(&self) -> usize {
        let p = self.problem;
        p.capacity + if p.slides { p.new_len } else { 0 }
    }

    /// Valid keys of a sequence, including the new ones.
    fn total(&self, b: usize) -> usize {
        (self.seqlens_k[b] + 1.0) as usize
    }

    /// The position of query row `s`, the last visible key of a causal call. Negative where the
    /// sequence has more query rows than keys.
    fn position(&self, b: usize, s: usize) -> i64 {
        let p = self.problem;
        let first = match (p.alignment, p.phase) {
            (Alignment::Past(past), _) => past as i64,
            (Alignment::Phase, Phase::FirstPrompt) => 0,
            (_, Phase::PaddedChunk) => self.total(b) as i64 - self.query_seqlens[b] as i64,
            _ => self.total(b) as i64 - p.q_len as i64,
        };
        first + s as i64
    }

    /// Rows of the cache before the new ones.
    fn kept(&self, b: usize) -> usize {
        if self.problem.new_len == 0 { self.total(b) } else { self.position(b, 0) as usize }
    }

    /// Writes the cache: past rows, new rows, and zeros unless it is shared. Returns all its
    /// values.
    fn present(
        &self,
        tensor: &mut Tensor,
        past: Option<&Tensor>,
        size: usize,
        new: impl Fn([usize; 3]) -> Vec<f64>,
    ) -> Heads {
        let (p, past) = (self.problem, past.map(Tensor::to_f64).unwrap_or_default());
        for (row, source) in self.rows_written() {
            let values = match source {
                Source::Past(row) => past[row * size..][..size].to_vec(),
                Source::New(row) => new(row),
                Source::Nothing => vec![0.0; size],
            };
            store(tensor, row * size, &values);
        }
        bnsh(tensor.to_f64(), p.kv_heads, self.rows(), size)
    }

    /// Writes a quantized cache: quantizes the new rows, and returns all dequantized values.
    fn present_codes(
        &self,
        tensor: &mut Tensor,
        past: Option<&Tensor>,
        size: usize,
        codes: &mut Codes,
        new: impl Fn([usize; 3]) -> Vec<f64>,
    ) -> Result<Heads> {
        let (p, bytes) = (self.problem, codes.bytes(size));
        let row_of = |number| CachedRow { number, head: number / self.rows() % p.kv_heads };
        let past = past.map(Tensor::bytes).unwrap_or_default();
        for (row, source) in self.rows_written() {
            let values = match source {
                Source::Past(row) => past[row * bytes..][..bytes].to_vec(),
                Source::New(new_row) => codes.encode(row_of(row), &new(new_row)),
                Source::Nothing => vec![0; bytes],
            };
            tensor.bytes_mut()?[row * bytes..][..bytes].copy_from_slice(&values);
        }
        let rows = tensor.bytes().chunks_exact(bytes).enumerate();
        let rows = rows.map(|(i, row)| codes.decode(row_of(i), row));
        Ok(bnsh(rows.flatten().collect(), p.kv_heads, self.rows(), size))
    }

    /// The cache rows that a call writes, by their index in the tensor, and their new content.
    fn rows_written(&self) -> Vec<(usize, Source)> {
        let (p, mut rows) = (self.problem, Vec::new());
        let shared = p.cache == CacheBinding::Shared && !p.slides;
        for head in 0..p.batch * p.kv_heads {
            let b = head / p.kv_heads;
            let (total, kept) = (self.total(b) - self.first[b], self.kept(b) - self.first[b]);
            for row in if shared { kept..total } else { 0..self.rows() } {
                let source = if row < kept {
                    Source::Past(head * p.past_capacity + row)
                } else if row < total {
                    Source::New([b, head % p.kv_heads, row - kept])
                } else {
                    Source::Nothing
                };
                rows.push((head * self.rows() + row, source));
            }
        }
        rows
    }

    /// A row divided by its root mean square, times the weight, rounded to the element type.
    fn normed(&self, x: &[f64], weights: &[f64], epsilon: fn(QkNorm) -> f32) -> Vec<f64> {
        let Some(norm) = self.problem.qk_norm else { return x.to_vec() };
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let root = (mean + f64::from(epsilon(norm))).sqrt();
        rounded(self.problem, x.iter().zip(weights).map(|(x, weight)| x / root * weight).collect())
    }

    /// New row `s`, rotated to its position and rounded to the element type, as in the cache.
    fn rotated(&self, b: usize, s: usize, x: Vec<f64>) -> Vec<f64> {
        let Some(rotary) = self.problem.rotary else { return x };
        let position = match rotary.explicit {
            Some(row_length) => self.position_ids[b * row_length + s] as i64,
            None => self.position(b, s),
        };
        // A row that stands before key 0 sees none.
        let Ok(position) = usize::try_from(position) else { return x };
        let half = rotary.dim / 2;
        let mut y = x.clone();
        for i in 0..half {
            let (first, second) =
                if rotary.interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (first, second) = (rotary.offset + first, rotary.offset + second);
            let (cos, sin) = (self.cos[position * half + i], self.sin[position * half + i]);
            y[first] = x[first] * cos - x[second] * sin;
            y[second] = x[first] * sin + x[second] * cos;
        }
        rounded(self.problem, y)
    }

    /// The rotated query alone.
    fn rotate(&self) -> Exact {
        let p = self.problem;
        let mut output = vec![0.0; p.batch * p.q_heads * p.q_len * p.head_size];
        for row in 0..p.batch * p.q_heads * p.q_len {
            let (head, s) = (row / p.q_len, row % p.q_len);
            let (b, n) = (head / p.q_heads, head % p.q_heads);
            let at = place(p.layout, p.q_heads, p.q_len, [b, n, s]) * p.head_size;
            output[at..at + p.head_size].copy_from_slice(&self.rotated(
                b,
                s,
                self.query.row(b, n, s).to_vec(),
            ));
        }
        Exact { output, output_qk: Vec::new(), lse: Vec::new() }
    }

    /// All rows of all heads.
    fn attend(&self) -> Exact {
        let p = self.problem;
        // Of the CPU back end only the threads are used, because they survive a fork.
        let mut heads: Vec<Vec<Row>> = (0..p.batch * p.q_heads).map(|_| Vec::new()).collect();
        each(&Rayon, heads.iter_mut().enumerate(), |(head, rows)| {
            let row = |s| self.row(head / p.q_heads, head % p.q_heads, s);
            *rows = (0..p.q_len).map(row).collect();
        });
        let rows: Vec<Row> = heads.into_iter().flatten().collect();
        let mut output = vec![0.0; rows.len() * p.v_head_size];
        for (i, row) in rows.iter().enumerate() {
            let (head, s) = (i / p.q_len, i % p.q_len);
            let at = place(p.layout, p.q_heads, p.q_len, [head / p.q_heads, head % p.q_heads, s]);
            output[at * p.v_head_size..][..p.v_head_size].copy_from_slice(&row.output);
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
        // Padding may have any position.
        let query = match visible.is_empty() && self.problem.rotary.is_some() {
            true => Vec::new(),
            false => self.rotated(
                b,
                s,
                self.normed(self.query.row(b, n, s), &self.q_norm_weight, |norm| norm.q_epsilon),
            ),
        };
        let logit = |j| match self.bias(b, n, s, j) {
            // Hidden, whatever the score: NaN too.
            _ if self.hides(b, s, j) => f64::NEG_INFINITY,
            f64::NEG_INFINITY => f64::NEG_INFINITY,
            bias => self.capped(self.scaled(&query, b, n, j)) + bias,
        };
        let logits: Vec<f64> = visible.clone().map(logit).collect();
        let (weights, lse) = softmax(&logits, if visible.is_empty() { None } else { self.sink(n) });
        let mut output = vec![0.0; self.problem.v_head_size];
        for (weight, j) in weights.iter().zip(visible.clone()) {
            let value = self.value(b, n / self.problem.group(), j - self.first[b]);
            output.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
        }
        let scores = match self.problem.output_qk {
            QkOutput::None => Vec::new(),
            QkOutput::BeforeSoftmax => self.columns(visible, &logits, 0.0),
            QkOutput::AfterSoftmax => self.columns(visible, &weights, 0.0),
            QkOutput::Scaled => self.all(|j| self.scaled(&query, b, n, j)),
            QkOutput::Capped => self.all(|j| self.capped(self.scaled(&query, b, n, j))),
            QkOutput::Biased => self.columns(visible, &logits, f64::NEG_INFINITY),
        };
        Row { output, scores, lse }
    }

    /// A value: in a latent call the leading elements of the key.
    fn value(&self, b: usize, head: usize, row: usize) -> &[f64] {
        match self.problem.latent {
            true => &self.key.row(b, head, row)[..self.problem.v_head_size],
            false => self.value.row(b, head, row),
        }
    }

    /// The keys that query row `s` attends to; a padding row attends to none, and neither does a
    /// row before key 0.
    fn visible(&self, b: usize, s: usize) -> Range<usize> {
        let p = self.problem;
        let (position, total) = (self.position(b, s), self.total(b) as i64);
        let is_padding = p.alignment == Alignment::Phase && position >= total;
        if is_padding || p.tree_mask && position < 0 {
            return 0..0;
        }
        let sees = |j: i64| {
            let valid = j < total && p.bias.is_none_or(|bias| j < bias.columns as i64);
            let right = if p.causal { Some(0) } else { p.right_window };
            valid
                && right.is_none_or(|right| j <= position.saturating_add_unsigned(right as u64))
                && p.window.is_none_or(|window| j > position.saturating_sub_unsigned(window as u64))
        };
        let oldest = self.first[b] as i64;
        let first = (oldest..total).find(|&j| sees(j)).unwrap_or(oldest);
        let end = (first..total).find(|&j| !sees(j)).unwrap_or(total);
        first as usize..end as usize
    }

    /// The score of a key after scale.
    fn scaled(&self, query: &[f64], b: usize, n: usize, j: usize) -> f64 {
        let key = self.key.row(b, n / self.problem.group(), j - self.first[b]);
        self.problem.scale * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>()
    }

    /// The same after softcap.
    fn capped(&self, scaled: f64) -> f64 {
        let cap = self.problem.softcap.map(f64::from);
        cap.map_or(scaled, |cap| cap * (scaled / cap).tanh())
    }

    /// Whether key `j` is masked from all rows, or by tree_mask, which can mask new keys only.
    fn hides(&self, b: usize, s: usize, j: usize) -> bool {
        if self.hidden.binary_search(&j).is_ok() {
            return true;
        }
        let new = j as i64 - self.position(b, 0);
        let word = self.tree_mask.get(b * self.problem.q_len + s);
        word.is_some_and(|word| new >= 0 && word.wrapping_shr(new as u32) & 1 == 0)
    }

    /// The bias of attention_bias or attn_mask; -inf for a masked key.
    fn bias(&self, b: usize, n: usize, s: usize, j: usize) -> f64 {
        let p = self.problem;
        let Some(bias) = p.bias else { return 0.0 };
        let (heads, rows) =
            (if bias.head { 1 } else { p.q_heads }, if bias.row { 1 } else { p.q_len });
        let index = |broadcast, i| if broadcast { 0 } else { i };
        let (b, n, s) = (index(bias.batch, b), index(bias.head, n), index(bias.row, s));
        let value = self.bias[((b * heads + n) * rows + s) * bias.columns + j];
        match bias.boolean {
            true if value == 0.0 => f64::NEG_INFINITY,
            true => 0.0,
            false => value,
        }
    }

    fn sink(&self, n: usize) -> Option<f64> {
        match self.problem.sink {
            Sink::None => None,
            Sink::Zero => Some(0.0),
            Sink::PerHead => Some(self.sink[n]),
        }
    }

    /// A row of output_qk, with `hidden` at masked keys.
    fn columns(&self, visible: Range<usize>, values: &[f64], hidden: f64) -> Vec<f64> {
        let mut columns = vec![hidden; self.problem.total_len];
        columns[visible].copy_from_slice(values);
        columns
    }

    /// A row of output_qk with every key in it.
    fn all(&self, score: impl Fn(usize) -> f64) -> Vec<f64> {
        (0..self.problem.total_len).map(score).collect()
    }
}

/// The elements of tree_mask.
fn words(tensor: Option<&Tensor>) -> Vec<i64> {
    match tensor {
        Some(Tensor::I64(words)) => words.iter().copied().collect(),
        _ => Vec::new(),
    }
}

/// Softmax weights and the logarithm of their denominator. The sink is part of the denominator and
/// has no weight. If every logit is -inf, all weights are 0.
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
