//! A random call over given keys and values, whose heads may have other sizes than keys, and its
//! tensors.

use crate::Tolerance;
use crate::call::{Data, poisoned};
use crate::compare::{optional, tensors};
use crate::parity::{Judge, Parity};
use gqa_host::backend::{Backend, Io};
use gqa_host::engine::{External, Heads, Layer};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem, Result, Sink, Tensor};
use ndarray::arr1;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// One call. Data follows from its seed.
#[derive(Clone, Debug)]
pub struct ExternalCase {
    /// Type of all floating-point tensors.
    pub dtype: DType,
    /// The heads of queries and keys.
    pub heads: Heads,
    /// Elements of a head of values.
    pub value_size: usize,
    /// Query rows of each sequence.
    pub rows: usize,
    /// Keys of each sequence before its rows.
    pub past: Vec<usize>,
    /// query_seqlens: how many of each sequence's rows are tokens.
    pub tokens: Option<Vec<usize>>,
    /// A row does not see later keys.
    pub causal: bool,
    /// Newest keys that a row sees; in causal calls only.
    pub window: Option<usize>,
    /// Scores are capped.
    pub softcap: Option<f32>,
    /// head_sink given.
    pub head_sink: bool,
    /// Log-sum-exp wanted.
    pub lse: bool,
    /// Standard deviation of queries and keys.
    pub spread: f32,
    /// Of all data.
    pub seed: u64,
}

/// Calls of those types with these sizes of keys and values, over up to `most_rows` query rows of a
/// sequence and up to `most_past` keys before them.
pub fn external(
    dtype: BoxedStrategy<DType>,
    sizes: &[[usize; 2]],
    [most_rows, most_past]: [usize; 2],
) -> BoxedStrategy<ExternalCase> {
    let past = prop_oneof![1 => Just(0), 3 => 0..=most_past];
    let shape = (1..=3usize, 1..=4usize, 1..=most_rows, prop::collection::vec(past, 1..=3));
    let most = most_rows + most_past;
    let scores = (
        prop::option::weighted(0.3, 1..=most),
        prop::option::weighted(0.2, 0.5..8.0f32),
        prop_oneof![4 => Just(1.0f32), 1 => Just(3.0)],
    );
    let sizes = prop::sample::select(sizes.to_vec());
    let padding = prop::option::weighted(0.3, prop::collection::vec(0..=most_rows, 3));
    (dtype, sizes, shape, padding, scores, any::<[bool; 3]>(), any::<u64>())
        .prop_map(|(dtype, [size, value_size], shape, padding, scores, flags, seed)| {
            let ((kv, group, rows, past), (window, softcap, spread)) = (shape, scores);
            let tokens = |padding: Vec<usize>| {
                past.iter().zip(padding).map(|(_, n)| rows - n.min(rows)).collect()
            };
            let tokens = padding.map(tokens);
            let [causal, head_sink, lse] = flags;
            let heads = Heads { query: kv * group, kv, size };
            let window = window.filter(|_| causal);
            ExternalCase {
                dtype,
                heads,
                value_size,
                rows,
                past,
                tokens,
                causal,
                window,
                softcap,
                head_sink,
                lse,
                spread,
                seed,
            }
        })
        .boxed()
}

impl ExternalCase {
    /// Keys of each sequence.
    fn lengths(&self) -> impl Iterator<Item = usize> {
        let tokens = |b: usize| self.tokens.as_ref().map_or(self.rows, |tokens| tokens[b]);
        self.past.iter().enumerate().map(move |(b, past)| past + tokens(b))
    }

    /// Rows of the tensors of keys and values.
    fn keys(&self) -> usize {
        self.lengths().max().unwrap_or(0).max(1)
    }

    fn layer(&self) -> Layer {
        let layer = Layer::new(self.dtype, self.heads).softcap(self.softcap.unwrap_or(0.0));
        let layer = if self.causal { layer } else { layer.bidirectional() };
        let layer = if self.head_sink { layer.sink(Sink::PerHead) } else { layer };
        self.window.map_or(layer.clone(), |window| layer.window(window))
    }

    fn tolerance(&self) -> Tolerance {
        // Scores are as far apart as the products of two spreads.
        let scores = f64::from(self.spread * self.spread);
        match self.dtype {
            DType::F16 => Tolerance { absolute: 8e-3, relative: 4e-3 },
            DType::BF16 => Tolerance { absolute: 4e-2, relative: 2e-2 },
            _ => Tolerance { absolute: 2e-5 * scores, relative: 1e-4 },
        }
    }
}

/// A call's tensors.
struct Given {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    tokens: Option<Tensor>,
    head_sink: Option<Tensor>,
}

impl Given {
    fn new(case: &ExternalCase, problem: &Problem) -> Self {
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let keys = case.keys();
        let held: Vec<_> = case.lengths().flat_map(|n| (0..keys).map(move |key| key < n)).collect();
        let lengths: Vec<_> = case.lengths().map(|n| n as i32 - 1).collect();
        let tokens = case.tokens.as_ref().map(|tokens| {
            let tokens: Vec<_> = tokens.iter().map(|&n| n as i32).collect();
            arr1(&tokens).into()
        });
        Self {
            query: data.normal(&problem.query_shape(), case.spread),
            key: data.held_rows(&problem.key_shape(), case.spread, &held),
            value: data.held_rows(&problem.value_shape(), 1.0, &held),
            lengths: arr1(&lengths).into(),
            tokens,
            head_sink: case.head_sink.then(|| data.normal(&[case.heads.query], 2.0)),
        }
    }

    /// Output, and log-sum-exps on request.
    fn run(&self, problem: &Problem, backend: &dyn Backend) -> Result<(Tensor, Option<Tensor>)> {
        let mut output = poisoned(problem.out_dtype, &problem.output_shape());
        let mut lse = problem.lse.then(|| poisoned(DType::F32, &problem.lse_shape()));
        let [mut no_keys, mut no_values] = [(); 2].map(|()| Tensor::zeros(problem.dtype, &[0]));
        let inputs = Tensors::default()
            .with(TensorId::Query, &self.query)
            .with(TensorId::Key, &self.key)
            .with(TensorId::Value, &self.value)
            .with(TensorId::SeqlensK, &self.lengths)
            .with(TensorId::QuerySeqlens, self.tokens.as_ref())
            .with(TensorId::HeadSink, self.head_sink.as_ref());
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key: &mut no_keys,
            present_value: &mut no_values,
            row_scales: None,
            output_qk: None,
            lse: lse.as_mut(),
        };
        backend.run(problem, &mut io)?;
        Ok((output, lse))
    }
}

impl Parity for ExternalCase {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn problem(&self) -> Result<Problem> {
        let call = External::new(self.past.len(), self.rows, self.keys());
        let call = call.shortest(self.lengths().min().unwrap_or(0));
        let call = if self.tokens.is_some() { call.padded() } else { call };
        let call = call.value_size(self.value_size);
        self.layer().external(if self.lse { call.log_sum_exp() } else { call })
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let problem = self.problem().map_err(|e| e.to_string())?;
        let (given, tolerance) = (Given::new(self, &problem), self.tolerance());
        let run = move |backend: &dyn Backend| {
            given.run(&problem, backend).map_err(|e| format!("{}: {e}", backend.name()))
        };
        let (want, want_lse) = run(&Reference)?;
        Ok(Box::new(move |backend| {
            let (got, got_lse) = run(backend)?;
            let errors = tensors("output", &got, &want, tolerance)?;
            optional("lse", &got_lse, &want_lse, tolerance)?;
            Ok(errors)
        }))
    }
}
