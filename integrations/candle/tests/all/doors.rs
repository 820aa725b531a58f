//! Calls with few or no rows and keys. The list in `tests/cases/doors` is shared by the tests of
//! all interfaces; its page explains the fields.

use crate::devices::on_each;
use crate::refusal::refusal;
use candle::{DType, Device, Result, Tensor};
use gqa_candle::flash::*;
use gqa_candle::{Attention, KvCache, PagedKvCache};
use serde_json::Value;

const HEADS: usize = 2;
const SIZE: usize = 8;

/// A call of the list.
struct Call(Value);

impl Call {
    /// Those of a kind that candle's functions can say: they have no sinks, and types of their own.
    fn all(kind: &str) -> Vec<Self> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/cases/doors/edges.json");
        let text = std::fs::read_to_string(path).expect("the list of edges");
        let Value::Array(calls) = serde_json::from_str(&text).expect("JSON") else {
            panic!("{path}: no list");
        };
        let ours = calls.into_iter().filter(|call| {
            call["call"] == kind && call.get("sink").is_none() && call["by"] != "dynamic"
        });
        let ours: Vec<_> = ours.map(Self).collect();
        assert!(ours.len() > 9, "{} calls of {kind}", ours.len());
        ours
    }

    fn name(&self) -> &str {
        self.0["name"].as_str().expect("a name")
    }

    fn number(&self, field: &str) -> Option<usize> {
        self.0.get(field).map(|n| n.as_u64().expect("a number") as usize)
    }

    /// Rows or keys of each sequence.
    fn counts(&self, field: &str) -> Vec<usize> {
        let counts = self.0[field].as_array().expect("numbers");
        counts.iter().map(|n| n.as_u64().expect("a number") as usize).collect()
    }

    /// Of sequences that all have as many.
    fn each(&self, field: &str, most: &str) -> usize {
        self.counts(field).first().copied().or(self.number(most)).unwrap_or_default()
    }

    /// Keys before and behind a row's place.
    fn window(&self) -> [Option<usize>; 2] {
        let side = |i| self.0["window"][i].as_i64().and_then(|n| usize::try_from(n).ok());
        let right = if self.0["causal"] == true { Some(0) } else { side(1) };
        [side(0), right]
    }

    /// What each row is, those behind the last sequence too.
    fn wanted(&self) -> Vec<f32> {
        let sequences = self.0["seen"].as_array().expect("what rows see");
        let rows = sequences.iter().flat_map(|rows| rows.as_array().expect("rows"));
        let mean = |seen: &Value| match [0, 1].map(|i| seen[i].as_f64().expect("a key") as f32) {
            [first, end] if first == end => 0.,
            [first, end] => (first + 1. + end) / 2.,
        };
        let behind = self.number("rows_behind").unwrap_or_default();
        rows.map(mean).chain(std::iter::repeat_n(0., behind)).collect()
    }

    fn check(&self, output: &Tensor) -> Result<()> {
        let got = output.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        let want = self.wanted();
        assert_eq!(got.len(), want.len() * HEADS * SIZE, "{}", self.name());
        for (row, (got, want)) in got.chunks(HEADS * SIZE).zip(&want).enumerate() {
            let near = got.iter().all(|x| (x - want).abs() < 1e-4);
            assert!(near, "{}: row {row}: {got:?}, {want}", self.name());
        }
        Ok(())
    }
}

/// Rows of `heads` heads, all elements of each row the same number.
fn rows(numbers: &[f32], heads: usize, device: &Device) -> Result<Tensor> {
    let elements = numbers.iter().flat_map(|number| vec![*number; heads * SIZE]);
    Tensor::from_vec(elements.collect(), (numbers.len(), heads, SIZE), device)
}

/// Values of so many keys.
fn values(keys: std::ops::Range<usize>) -> Vec<f32> {
    keys.map(|key| key as f32 + 1.).collect()
}

fn zeros(shape: &[usize], device: &Device) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, device)
}

fn starts(counts: &[usize], device: &Device) -> Result<Tensor> {
    let mut starts = vec![0u32];
    starts.extend(counts.iter().scan(0, |sum, n| {
        *sum += *n as u32;
        Some(*sum)
    }));
    Tensor::new(starts, device)
}

#[test]
fn dense_calls() -> Result<()> {
    on_each(|device| {
        for call in Call::all("dense") {
            let (batch, keys) = (call.counts("rows").len(), call.each("keys", "most_keys"));
            let q = zeros(&[batch, call.each("rows", "most_rows"), HEADS, SIZE], device)?;
            let k = zeros(&[batch, keys, 1, SIZE], device)?;
            let v = rows(&values(0..keys).repeat(batch), 1, device)?.reshape(k.shape())?;
            let ([left, right], softcap) = (call.window(), &call.0["options"]["softcap"]);
            let softcap = softcap.as_f64().unwrap_or_default() as f32;
            let output =
                flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 1., left, right, softcap);
            match call.0["refused"].as_str() {
                Some(argument) => assert!(refusal(output).starts_with(argument)),
                None => call.check(&output?)?,
            }
        }
        Ok(())
    })
}

#[test]
fn calls_of_any_lengths() -> Result<()> {
    on_each(|device| {
        for call in Call::all("varlen") {
            let [row_counts, key_counts] = ["rows", "keys"].map(|field| call.counts(field));
            let of_no_sequence = |field| call.number(field).unwrap_or_default();
            let all_rows = row_counts.iter().sum::<usize>() + of_no_sequence("rows_behind");
            let q = zeros(&[all_rows, HEADS, SIZE], device)?;
            let [sq, sk] = [starts(&row_counts, device)?, starts(&key_counts, device)?];
            let longest = |counts: &[usize]| counts.iter().copied().max().unwrap_or_default();
            let (mq, mk) = (longest(&row_counts), longest(&key_counts));
            let [left, right] = call.window();
            let mut numbers: Vec<f32> = key_counts.iter().flat_map(|n| values(0..*n)).collect();
            let output = match call.number("block") {
                None => {
                    numbers.extend(vec![f32::NAN; of_no_sequence("keys_behind")]);
                    let v = rows(&numbers, 1, device)?;
                    let k = (&v * 0.)?;
                    flash_attn_varlen_windowed(&q, &k, &v, &sq, &sk, mq, mk, 1., left, right)?
                }
                Some(size) => {
                    let columns = mk.div_ceil(size).max(1);
                    let blocks = columns * key_counts.len();
                    let falling = (0..blocks as u32).rev().collect::<Vec<_>>();
                    let table = Tensor::from_vec(falling, (key_counts.len(), columns), device)?;
                    let mut numbers = vec![f32::NAN; blocks * size];
                    for (b, n) in key_counts.iter().enumerate() {
                        for key in 0..*n {
                            let block = blocks - 1 - (b * columns + key / size);
                            numbers[block * size + key % size] = key as f32 + 1.;
                        }
                    }
                    let v = rows(&numbers, 1, device)?.reshape((blocks, size, 1, SIZE))?;
                    let k = (&v * 0.)?;
                    flash_attn_varlen_paged_windowed(
                        &q, &k, &v, &sq, &sk, &table, None, mq, mk, 1., left, right, size, None,
                    )?
                }
            };
            call.check(&output)?;
        }
        Ok(())
    })
}

/// Those whose rows are all new, which candle's caches append.
#[test]
fn caches() -> Result<()> {
    on_each(|device| {
        let attention = Attention::new(HEADS, 1, SIZE);
        for call in Call::all("cache") {
            let (batch, new) = (call.counts("rows").len(), call.number("new").unwrap_or_default());
            let tokens = call.each("rows", "most_rows");
            let capacity = call.number("capacity").expect("a capacity");
            if tokens != new {
                continue;
            }
            let past = call.counts("keys");
            let q = zeros(&[batch, tokens, HEADS, SIZE], device)?;
            let k = zeros(&[batch, tokens, 1, SIZE], device)?;
            let numbers = past.iter().flat_map(|past| values(*past..past + new));
            let v = rows(&numbers.collect::<Vec<_>>(), 1, device)?.reshape(k.shape())?;

            // A dense cache begins with padded prompts, of one token or more each.
            let most = past.iter().copied().max().unwrap_or_default();
            if most == 0 || !past.contains(&0) {
                let mut cache = KvCache::new(&attention, batch, capacity, DType::F32, device)?;
                if most > 0 {
                    let of = |heads| zeros(&[batch, most, heads, SIZE], device);
                    let prompt = rows(&values(0..most).repeat(batch), 1, device)?;
                    let prompt = prompt.reshape((batch, most, 1, SIZE))?;
                    cache.attend_padded(&of(HEADS)?, &of(1)?, &prompt, &past)?;
                }
                let output = cache.attend(&q, &k, &v);
                if call.0.get("refused").is_some() {
                    assert!(refusal(output).starts_with("tokens: "));
                    continue;
                }
                call.check(&output?)?;
            }
            let mut cache = PagedKvCache::new(&attention, 16, 16, DType::F32, device)?;
            let sequences: Vec<_> = past.iter().map(|_| cache.begin()).collect();
            let flat = |tokens: usize, heads| zeros(&[tokens, heads, SIZE], device);
            let all = past.iter().sum();
            let numbers: Vec<f32> = past.iter().flat_map(|past| values(0..*past)).collect();
            let prompt: Vec<_> = sequences.iter().copied().zip(past).collect();
            cache.attend(
                &flat(all, HEADS)?,
                &flat(all, 1)?,
                &rows(&numbers, 1, device)?,
                &prompt,
            )?;
            let step: Vec<_> = sequences.into_iter().map(|sequence| (sequence, new)).collect();
            let flat = |tensor: &Tensor| tensor.flatten(0, 1);
            call.check(&cache.attend(&flat(&q)?, &flat(&k)?, &flat(&v)?, &step)?)?;
        }
        Ok(())
    })
}
