//! Calls with few or no rows and keys, described as an engine does. The list in `tests/cases/doors`
//! is shared by the tests of all interfaces; its page explains the fields.

use gqa_host::backend::{Backend, Io, cpu::Cpu, sim::Sim};
use gqa_host::engine::{Dense, External, Heads, Layer, Paged};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem, Result, Sink, Tensor};
use ndarray::{Array2, arr1};
use serde_json::Value;

const HEADS: Heads = Heads { query: 2, kv: 1, size: 16 };

/// A call of the list.
struct Edge(Value);

impl Edge {
    fn all() -> Vec<Self> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/cases/doors/edges.json");
        let text = std::fs::read_to_string(path).expect("the list of edges");
        let edges: Vec<Value> = serde_json::from_str(&text).expect("a list");
        edges.into_iter().map(Self).collect()
    }

    fn name(&self) -> &str {
        self.0["name"].as_str().expect("a name")
    }

    fn is(&self, field: &str) -> bool {
        self.0[field] == true
    }

    /// 0 where there is none.
    fn number(&self, field: &str) -> usize {
        self.0[field].as_u64().unwrap_or_default() as usize
    }

    /// Rows or keys of each sequence.
    fn counts(&self, field: &str) -> Vec<i64> {
        let counts = self.0[field].as_array().expect("numbers");
        counts.iter().map(|n| n.as_i64().expect("a number")).collect()
    }

    /// The most rows or keys of a sequence.
    fn most(&self, field: &str) -> usize {
        let most = self.counts(field).into_iter().max();
        most.map_or(self.number(&format!("most_{field}")), |most| most.max(0) as usize)
    }

    /// Why an engine has no such call, if it has none.
    fn inexpressible(&self) -> Option<&'static str> {
        let is_ragged = self.0["call"] == "varlen" && self.0.get("block").is_none();
        [
            (self.0["by"] == "dynamic", "the compiler refuses it"),
            (is_ragged, "without blocks, all sequences of a call are equally long"),
            (self.number("rows_behind") > 0, "on the CPU, tokens are those of sequences"),
        ]
        .into_iter()
        .find_map(|(is, why)| is.then_some(why))
    }

    fn layer(&self) -> Layer {
        let mut layer = Layer::new(DType::F32, HEADS);
        if !self.is("causal") {
            layer = layer.bidirectional();
        }
        if self.is("sink") {
            layer = layer.sink(Sink::PerHead);
        }
        if let Some(softcap) = self.0["options"]["softcap"].as_f64() {
            layer = layer.softcap(softcap as f32);
        }
        match self.window(0) {
            Some(before) => layer.window(before + 1),
            None => layer,
        }
    }

    /// Keys before or behind a row's place.
    fn window(&self, side: usize) -> Option<usize> {
        self.0["window"][side].as_i64().and_then(|keys| usize::try_from(keys).ok())
    }

    /// Output and log-sum-exp of each row of a head.
    fn wanted(&self) -> Vec<[f64; 2]> {
        let sequences = self.0["seen"].as_array().expect("what rows see");
        let rows = sequences.iter().flat_map(|rows| rows.as_array().expect("rows"));
        let row = |seen: &Value| {
            let [first, end] = [0, 1].map(|i| seen[i].as_f64().expect("a key"));
            let (keys, sink) = (end - first, f64::from(u8::from(self.is("sink"))));
            // A row that sees no key has no sink either.
            let weights = if keys > 0.0 { keys + sink } else { 0.0 };
            [(first + 1.0 + end) / 2.0 * keys / weights.max(1.0), weights.ln()]
        };
        rows.map(row).collect()
    }
}

/// A call as an engine describes it, and its tensors.
struct Call {
    problem: Problem,
    inputs: Vec<(TensorId, Tensor)>,
    cache: [Tensor; 2],
}

impl Call {
    fn new(edge: &Edge) -> Result<Self> {
        match (edge.0.get("block"), edge.number("new")) {
            (Some(_), _) => Self::paged(edge),
            (None, 0) => Self::external(edge),
            (None, _) => Self::dense(edge),
        }
    }

    /// All keys are there: those of a KV cache, too.
    fn external(edge: &Edge) -> Result<Self> {
        let (batch, rows, keys) =
            (edge.counts("rows").len(), edge.most("rows"), edge.counts("keys"));
        let room =
            if edge.0["call"] == "cache" { edge.number("capacity") } else { edge.most("keys") };
        let shortest = keys.iter().copied().min().map_or(0, |least| least.max(0) as usize);
        let call = External::new(batch, rows, room).shortest(shortest.min(room)).log_sum_exp();
        let call = match edge.window(1).filter(|_| !edge.is("causal")) {
            Some(behind) => call.right_window(behind),
            None => call,
        };
        let [key, value] = cache(&[batch, room, HEADS.size], &held(&keys, room));
        Ok(Self {
            problem: edge.layer().external(call)?,
            inputs: vec![
                (TensorId::Query, zeros(&[batch, rows, HEADS.query * HEADS.size])),
                (TensorId::Key, key),
                (TensorId::Value, value),
                (TensorId::SeqlensK, integers(keys.iter().map(|keys| keys - 1))),
                (TensorId::HeadSink, zeros(&[HEADS.query])),
            ],
            cache: [zeros(&[0]), zeros(&[0])],
        })
    }

    /// Tokens are appended to a KV cache.
    fn dense(edge: &Edge) -> Result<Self> {
        let (new, capacity, keys) =
            (edge.number("new"), edge.number("capacity"), edge.counts("keys"));
        let (batch, total) = (keys.len(), keys.iter().map(|keys| keys + new as i64));
        let call = Dense::chunk(batch, new, capacity).log_sum_exp();
        let [key, value] = cache(&[batch, new, HEADS.size], &appended(&keys, new));
        Ok(Self {
            problem: edge.layer().dense(call)?,
            inputs: vec![
                (TensorId::Query, zeros(&[batch, new, HEADS.query * HEADS.size])),
                (TensorId::Key, key),
                (TensorId::Value, value),
                (TensorId::SeqlensK, integers(total.map(|total| total - 1))),
            ],
            cache: cache(&[batch, HEADS.kv, capacity, HEADS.size], &held(&keys, capacity)),
        })
    }

    /// Keys are in blocks, in falling order.
    fn paged(edge: &Edge) -> Result<Self> {
        let (size, new) = (edge.number("block"), edge.number("new"));
        let (rows, keys) = (edge.counts("rows"), edge.counts("keys"));
        let columns = edge.most("keys").max(edge.number("capacity")).div_ceil(size).max(1);
        let (batch, blocks) = (rows.len(), rows.len() * columns + 1);
        let starts: Vec<i64> = (0..=batch).map(|b| rows[..b].iter().sum()).collect();
        let tokens = starts[batch] as usize;
        let call = Paged::new(batch, tokens, [blocks, size, columns]).log_sum_exp();
        let call = call.most_tokens(edge.most("rows"));
        let call = if new == 0 { call.appended().total_lengths() } else { call };
        let table: Vec<i32> = (0..(batch * columns) as i32).rev().collect();
        let mut numbers = vec![f32::NAN; blocks * size];
        let sequences = held(&keys, columns * size);
        for (part, &block) in sequences.chunks(size).zip(&table) {
            numbers[block as usize * size..][..size].copy_from_slice(part);
        }
        let table = Array2::from_shape_vec((batch, columns), table).expect("as many");
        let [key, value] = cache(&[tokens, HEADS.size], &appended(&keys, new));
        Ok(Self {
            problem: edge.layer().paged(call)?,
            inputs: vec![
                (TensorId::Query, zeros(&[tokens, HEADS.query * HEADS.size])),
                (TensorId::Key, key),
                (TensorId::Value, value),
                (TensorId::CumulativeSequenceLength, integers(starts.into_iter())),
                (TensorId::SeqlensK, integers(keys.into_iter())),
                (TensorId::BlockTable, table.into()),
            ],
            cache: cache(&[blocks, size, HEADS.kv, HEADS.size], &numbers),
        })
    }

    /// Output and log-sum-exp of each row, the same of all heads and elements.
    fn run(&self, backend: &dyn Backend) -> Result<Vec<[f64; 2]>> {
        let p = &self.problem;
        let [mut output, mut lse] = [p.output_shape(), p.lse_shape()].map(|shape| nans(&shape));
        let [mut present_key, mut present_value] = self.cache.clone();
        let inputs = self.inputs.iter();
        let inputs = inputs.fold(Tensors::default(), |all, (id, tensor)| all.with(*id, tensor));
        let mut io = Io {
            inputs: inputs.only_of(p),
            output: &mut output,
            present_key: &mut present_key,
            present_value: &mut present_value,
            row_scales: None,
            output_qk: None,
            lse: Some(&mut lse),
        };
        backend.run(p, &mut io)?;
        // (batch or nothing, heads, rows)
        let (lse, rows) = (lse.to_f64(), p.lse_shape()[p.lse_shape().len() - 1].max(1));
        let lse = |row: usize, head| lse[(row / rows * HEADS.query + head) * rows + row % rows];
        let row = |(row, of_row): (usize, &[f64])| {
            let alike = of_row.iter().all(|x| *x == of_row[0]) && lse(row, 0) == lse(row, 1);
            assert!(alike, "row {row}: {of_row:?}");
            [of_row[0], lse(row, 0)]
        };
        let output = output.to_f64();
        Ok(output.chunks(HEADS.query * HEADS.size).enumerate().map(row).collect())
    }
}

/// Values of all keys of caches with room for `room` keys of a sequence; NaN where there is none.
fn held(keys: &[i64], room: usize) -> Vec<f32> {
    let of_key =
        |keys: i64, key: usize| if (key as i64) < keys { key as f32 + 1.0 } else { f32::NAN };
    keys.iter().flat_map(|&keys| (0..room).map(move |key| of_key(keys, key))).collect()
}

/// Values of `new` tokens after the keys of each sequence.
fn appended(keys: &[i64], new: usize) -> Vec<f32> {
    keys.iter().flat_map(|&keys| (0..new).map(move |i| (keys + i as i64) as f32 + 1.0)).collect()
}

/// Keys of 0 and these values; where a value is NaN, the key is NaN, too.
fn cache(shape: &[usize], numbers: &[f32]) -> [Tensor; 2] {
    let elements = |number: &f32| [*number; HEADS.size];
    let values: Vec<f32> = numbers.iter().flat_map(elements).collect();
    let keys: Vec<f32> = values.iter().map(|value| value * 0.0).collect();
    [keys, values].map(|x| match x.is_empty() {
        true => zeros(&[0]),
        false => Tensor::from_f32(DType::F32, shape, &x).expect("as many"),
    })
}

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape)
}

fn nans(shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    Tensor::from_f32(DType::F32, shape, &vec![f32::NAN; count]).expect("as many")
}

fn integers(numbers: impl Iterator<Item = i64>) -> Tensor {
    arr1(&numbers.map(|n| n as i32).collect::<Vec<_>>()).into()
}

#[test]
fn calls_of_engines() {
    let mut computed = 0;
    for edge in Edge::all() {
        if let Some(why) = edge.inexpressible() {
            println!("left out: {}: {why}", edge.name());
            continue;
        }
        computed += 1;
        for backend in [&Cpu::default() as &dyn Backend, &Reference, &Sim::default()] {
            let name = format!("{} on {}", edge.name(), backend.name());
            let got = Call::new(&edge).and_then(|call| call.run(backend));
            if let Some(argument) = edge.0["refused"].as_str() {
                // As an engine's tensors are called.
                let argument = if argument == "cache_seqlens" { "seqlens_k" } else { argument };
                let error = got.err().map(|error| error.to_string()).unwrap_or_default();
                assert!(error.starts_with(&format!("{argument}: got ")), "{name}: {error:?}");
                assert!(error.contains("; allowed: "), "{name}: {error}");
                continue;
            }
            let (got, want) =
                (got.unwrap_or_else(|error| panic!("{name}: {error}")), edge.wanted());
            assert_eq!(got.len(), want.len(), "{name}");
            for (row, (got, want)) in got.iter().flatten().zip(want.iter().flatten()).enumerate() {
                let near = got == want || (got - want).abs() < 1e-4;
                assert!(near, "{name}: {got} for {want} at {row}");
            }
        }
    }
    assert!(computed > 30, "{computed} calls");
}
