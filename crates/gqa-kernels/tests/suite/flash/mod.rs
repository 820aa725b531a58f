//! Random attention calls, run on the simulator and compared with attention as it is defined.

use crate::support::{query_seqlens, some_tokens};
use bytemuck::Zeroable;
use gqa_kernels::num::{DType, Element};
use gqa_kernels::params::{AttentionParams, Strides, sink};
use gqa_kernels::registry::{Entry, entries};
use gqa_sim::{Arg, Launch, Report, launch};
use proptest::prelude::*;

/// One call.
#[derive(Clone, Debug)]
pub struct Case {
    pub dtype: DType,
    pub kv_heads: u32,
    pub group: u32,
    pub head_size: u32,
    pub q_len: u32,
    /// Valid keys of each sequence, the new ones included.
    pub totals: Vec<u32>,
    /// Cache rows behind the longest sequence.
    pub spare: u32,
    pub first_prompt: bool,
    /// query_seqlens, if it is given: never more than rows or the sequence's tokens.
    pub tokens: Option<Vec<u32>>,
    pub causal: bool,
    pub window: u32,
    pub scale: f32,
    pub softcap: f32,
    pub sink: u32,
    pub want_lse: bool,
    /// Heads before rows in memory.
    pub bnsh: bool,
    /// Elements between rows that belong to nobody: 8 or none.
    pub gap: u64,
    pub seed: u64,
}

/// Head sizes that fill a tile, and some that do not.
const HEAD_SIZES: [u32; 19] =
    [8, 16, 32, 40, 56, 64, 72, 80, 88, 96, 104, 128, 136, 160, 184, 192, 200, 224, 256];

/// Calls with up to `most_rows` packed rows per KV head (about) and up to `most_keys` keys.
pub fn case(most_rows: u32, most_keys: u32) -> impl Strategy<Value = Case> {
    let shape =
        (1..=2u32, 1..=8u32, proptest::sample::select(&HEAD_SIZES[..]), any::<bool>(), 1..=3usize)
            .prop_flat_map(move |(kv_heads, group, head_size, first_prompt, batch)| {
                let most_q = (most_rows / group).max(1);
                (1..=most_q).prop_flat_map(move |q_len| {
                    let totals = if first_prompt { 0..=q_len } else { 0..=most_keys.max(q_len) };
                    let shape = (
                        Just(kv_heads),
                        Just(group),
                        Just(head_size),
                        Just(first_prompt),
                        Just(q_len),
                    );
                    (shape, proptest::collection::vec(totals, batch))
                })
            });
    let mask = (any::<bool>(), prop_oneof![Just(0), 1..=most_keys]);
    let score = (
        prop_oneof![Just(1.0f32), Just(-0.7), Just(3.0)],
        prop_oneof![3 => Just(0.0f32), 1 => Just(2.0), 1 => Just(50.0)],
        prop_oneof![Just(sink::NONE), Just(sink::ZERO), Just(sink::PER_HEAD)],
    );
    let layout = (any::<bool>(), prop_oneof![Just(0), Just(8)], 0..=5u32, any::<bool>());
    (shape, mask, score, layout, any::<bool>(), any::<u64>()).prop_map(
        |(
            shape,
            (causal, window),
            (scale, softcap, sink),
            (bnsh, gap, spare, want_lse),
            half,
            seed,
        )| {
            let ((kv_heads, group, head_size, first_prompt, q_len), totals) = shape;
            let dtype = if half { DType::F16 } else { DType::BF16 };
            let tokens = some_tokens(seed, q_len, &totals);
            let scale = scale / (head_size as f32).sqrt();
            Case {
                dtype,
                kv_heads,
                group,
                head_size,
                q_len,
                totals,
                spare,
                first_prompt: first_prompt && tokens.is_none(),
                tokens,
                causal,
                window,
                scale,
                softcap,
                sink,
                want_lse,
                bnsh,
                gap,
                seed,
            }
        },
    )
}

impl Case {
    /// Rows of a sequence of `total` keys that hold a query.
    fn tokens(&self, b: u32, total: u32) -> u32 {
        match &self.tokens {
            Some(tokens) => tokens[b as usize],
            None if self.first_prompt => total,
            None => self.q_len,
        }
    }

    /// Keys before this call's rows.
    pub fn past(&self, b: u32) -> u32 {
        let total = self.totals[b as usize];
        if self.first_prompt { 0 } else { total.saturating_sub(self.tokens(b, total)) }
    }

    pub fn q_heads(&self) -> u32 {
        self.kv_heads * self.group
    }

    fn capacity(&self) -> u32 {
        self.totals.iter().max().copied().unwrap_or(0).max(1) + self.spare
    }

    fn strides(&self, heads: u32, rows: u32) -> Strides {
        let width = u64::from(self.head_size) + self.gap;
        let (heads, rows) = (u64::from(heads), u64::from(rows));
        if self.bnsh {
            Strides { batch: heads * rows * width, head: rows * width, row: width }
        } else {
            Strides { batch: heads * rows * width, head: width, row: heads * width }
        }
    }

    fn elements(&self, heads: u32, rows: u32) -> usize {
        self.totals.len()
            * (heads * rows) as usize
            * (u64::from(self.head_size) + self.gap) as usize
    }

    /// What the kernel is told.
    pub fn params(&self, splits: u32) -> AttentionParams {
        let cache = self.strides(self.kv_heads, self.capacity());
        let query = self.strides(self.q_heads(), self.q_len);
        AttentionParams {
            q: query,
            k: cache,
            v: cache,
            out: query,
            bias: Strides::default(),
            batch: self.totals.len() as u32,
            q_heads: self.q_heads(),
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            q_len: self.q_len,
            capacity: self.capacity(),
            first_prompt: self.first_prompt.into(),
            causal: self.causal.into(),
            window: self.window,
            sink: self.sink,
            qk_output: 0,
            qk_columns: 0,
            splits,
            scale: self.scale,
            softcap: self.softcap,
            ..Zeroable::zeroed()
        }
    }

    /// The kernel that the planner would take.
    pub fn entry(&self, kernel: &str) -> &'static Entry {
        let mine = entries().filter(|e| {
            e.name.starts_with(kernel) && e.dtype == self.dtype && e.head_size >= self.head_size
        });
        mine.min_by_key(|entry| entry.head_size).expect("a kernel")
    }
}

/// Everything a launch reads, and poisoned outputs.
pub struct Tensors<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub seqlens_k: Vec<i32>,
    pub query_seqlens: Option<Vec<i32>>,
    pub head_sink: Vec<T>,
    pub out: Vec<T>,
    pub lse: Vec<f32>,
}

impl<T: Element> Tensors<T> {
    /// Random values where a tensor has any, NaN elsewhere: behind sequences, in gaps and in padded
    /// queries.
    pub fn new(case: &Case) -> Self {
        let mut random = Random(case.seed | 1);
        let nan = T::from_f32(f32::NAN);
        let mut q = vec![nan; case.elements(case.q_heads(), case.q_len)];
        let mut k = vec![nan; case.elements(case.kv_heads, case.capacity())];
        let mut v = k.clone();
        let p = case.params(1);
        let width = case.head_size as usize;
        for (b, &total) in (0..).zip(&case.totals) {
            for head in 0..case.q_heads() {
                for s in 0..case.tokens(b, total) {
                    random.fill(&mut q[p.q.at(b, head, s)..][..width]);
                }
            }
            for head in 0..case.kv_heads {
                for j in 0..total {
                    random.fill(&mut k[p.k.at(b, head, j)..][..width]);
                    random.fill(&mut v[p.v.at(b, head, j)..][..width]);
                }
            }
        }
        let mut head_sink = vec![nan; case.q_heads() as usize];
        random.fill(&mut head_sink);
        Self {
            k,
            v,
            seqlens_k: case.totals.iter().map(|&total| total as i32 - 1).collect(),
            query_seqlens: query_seqlens(&case.tokens),
            head_sink,
            out: vec![nan; q.len()],
            lse: vec![f32::NAN; case.totals.len() * (case.q_heads() * case.q_len) as usize],
            q,
        }
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Roughly normal values.
    fn fill<T: Element>(&mut self, values: &mut [T]) {
        for value in values {
            let sum: f64 = (0..4).map(|_| self.next() - 0.5).sum();
            *value = T::from_f32((sum * 3f64.sqrt()) as f32);
        }
    }
}

/// Runs one kernel of the case.
pub fn start(
    case: &Case,
    entry: &Entry,
    grid: [u32; 3],
    arguments: &[Arg<'_>],
) -> Result<Report, TestCaseError> {
    let Entry { name, threads, shared_bytes, .. } = *entry;
    let shape = Launch { name, grid, threads, shared_bytes, seed: case.seed, ..Launch::default() };
    launch(&shape, &entry.simulate, arguments)
        .map_err(|fault| TestCaseError::fail(fault.to_string()))
}

/// Binds lse if the case wants it.
pub fn lse<'a>(case: &Case, lse: &'a mut [f32]) -> Arg<'a> {
    if case.want_lse { Arg::write(lse) } else { Arg::null() }
}

/// Calls a generic function with the case's element type.
macro_rules! with_type {
    ($case:expr, $f:ident $(, $argument:expr)*) => {
        match $case.dtype {
            DType::F16 => $f::<gqa_kernels::num::f16>($case $(, $argument)*),
            _ => $f::<gqa_kernels::num::bf16>($case $(, $argument)*),
        }
    };
}
pub(crate) use with_type;

/// One row as it is defined, in f64.
pub struct Want {
    /// Output.
    pub out: Vec<f64>,
    /// Σ weight·|value|, to which the rounding of weights is relative.
    magnitude: Vec<f64>,
    lse: f64,
}

/// The row as attention is defined.
pub fn row<T: Element>(case: &Case, t: &Tensors<T>, b: u32, head: u32, s: u32) -> Want {
    let width = case.head_size as usize;
    let p = case.params(1);
    let at = |tensor: &[T], start: usize| -> Vec<f64> {
        tensor[start..][..width].iter().map(|x| f64::from(x.to_f32())).collect()
    };
    let nothing =
        Want { out: vec![0.0; width], magnitude: vec![0.0; width], lse: f64::NEG_INFINITY };

    let total = i64::from(case.totals[b as usize]);
    let past = i64::from(case.past(b));
    let position = past + i64::from(s);
    if position >= total {
        return nothing;
    }
    let end = if case.causal { position + 1 } else { total };
    let first = if case.window > 0 { (end - i64::from(case.window)).max(0) } else { 0 };

    let query = at(&t.q, p.q.at(b, head, s));
    let score = |j: i64| {
        let key = at(&t.k, p.k.at(b, head / case.group, j as u32));
        let x = f64::from(case.scale) * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
        let cap = f64::from(case.softcap);
        if cap > 0.0 { cap * (x / cap).tanh() } else { x }
    };
    let scores: Vec<f64> = (first..end).map(score).collect();
    let sink = match case.sink {
        sink::NONE => f64::NEG_INFINITY,
        sink::ZERO => 0.0,
        _ => f64::from(t.head_sink[head as usize].to_f32()),
    };
    let max = scores.iter().copied().fold(sink, f64::max);
    let sum = scores.iter().map(|x| (x - max).exp()).sum::<f64>() + (sink - max).exp();
    let mut want = Want { lse: max + sum.ln(), ..nothing };
    for (j, x) in (first..end).zip(scores) {
        let value = at(&t.v, p.v.at(b, head / case.group, j as u32));
        let weight = (x - max).exp() / sum;
        for i in 0..width {
            want.out[i] += weight * value[i];
            want.magnitude[i] += weight * value[i].abs();
        }
    }
    want
}

/// Checks out and lse, and that nothing else was written.
pub fn check<T: Element>(case: &Case, t: &Tensors<T>) -> Result<(), TestCaseError> {
    // Half a unit in the last place for the output, as much for each weight, and as much again for
    // f32.
    let unit = match case.dtype {
        DType::F32 => 0.5f64.powi(20),
        DType::F16 => 0.5f64.powi(11),
        DType::BF16 => 0.5f64.powi(8),
    };
    let p = case.params(1);
    let mut written = vec![false; t.out.len()];
    for b in 0..case.totals.len() as u32 {
        for head in 0..case.q_heads() {
            for s in 0..case.q_len {
                let want = row(case, t, b, head, s);
                let start = p.out.at(b, head, s);
                for i in 0..case.head_size as usize {
                    let got = f64::from(t.out[start + i].to_f32());
                    let allowed = 1.1 * unit * (want.out[i].abs() + want.magnitude[i]) + 2e-5;
                    prop_assert!(
                        (got - want.out[i]).abs() <= allowed,
                        "out batch {b} head {head} row {s} column {i}: got {got}, want {}",
                        want.out[i]
                    );
                    written[start + i] = true;
                }
                let index = ((b * case.q_heads() + head) * case.q_len + s) as usize;
                let got = f64::from(t.lse[index]);
                if case.want_lse {
                    let same =
                        got == want.lse || (got - want.lse).abs() <= 1e-5 * (1.0 + want.lse.abs());
                    prop_assert!(
                        same,
                        "lse batch {b} head {head} row {s}: got {got}, want {}",
                        want.lse
                    );
                }
            }
        }
    }
    let intact = (0..t.out.len()).all(|i| written[i] || t.out[i].to_f32().is_nan());
    prop_assert!(intact, "a gap between rows of out was written");
    Ok(())
}
