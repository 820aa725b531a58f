//! A random call with a tree mask over the new tokens, as in speculative decoding, and its tensors.

use crate::Tolerance;
use crate::call::{Data, poisoned};
use crate::compare::{optional, tensors};
use crate::lengths::Lengths;
use crate::parity::{Judge, Parity};
use gqa_host::backend::{Backend, Io};
use gqa_host::engine::{Dense, Heads, Layer, Paged, Rope};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem, Result, Sink, Tensor};
use ndarray::{Array2, arr1};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// One call. Data follows from its seed.
#[derive(Clone, Debug)]
pub struct TreeCase {
    /// Type of all floating-point tensors.
    pub dtype: DType,
    /// The heads.
    pub heads: [usize; 3],
    /// Past and new tokens of each sequence. With contiguous caches, all sequences have as many new
    /// tokens as the first.
    pub sequences: Vec<[usize; 2]>,
    /// Rows of a block where the cache is paged.
    pub block_size: Option<usize>,
    /// Sequences begin with the call, and some are padded; contiguous caches only.
    pub first_prompt: bool,
    /// The new tokens are in the cache already.
    pub no_new_rows: bool,
    /// Words are those of trees, rather than any.
    pub is_tree: bool,
    /// Queries and keys rotate.
    pub rotates: bool,
    /// From this element on.
    pub offset: usize,
    /// Scores are capped.
    pub softcap: Option<f32>,
    /// head_sink given.
    pub head_sink: bool,
    /// Log-sum-exp wanted.
    pub lse: bool,
    /// Of all data.
    pub seed: u64,
}

/// Calls for the decode families: their types and head sizes, up to 128 packed query rows for each
/// sequence.
pub fn tree_steps(max_rows: usize) -> BoxedStrategy<TreeCase> {
    let sizes = prop::sample::select(vec![64usize, 128, 256]);
    (
        trees(crate::half_dtype(), sizes.boxed(), max_rows),
        prop::sample::select(vec![16usize, 32, 64]),
    )
        .prop_map(|(mut case, blocks)| {
            case.block_size = case.block_size.map(|_| blocks);
            let most = if case.heads[2] == 256 { 16 } else { 64 };
            case.sequences.iter_mut().for_each(|[_, new]| *new = (*new).min(most));
            let longest = case.sequences.iter().map(|[_, new]| *new).max().unwrap_or(1).max(1);
            let [_, kv, size] = case.heads;
            let group = case.heads[0] / kv;
            case.heads = [kv * group.min((128 / longest).max(1)), kv, size];
            case
        })
        .boxed()
}

/// Calls of any type and head size.
pub fn trees(
    dtype: BoxedStrategy<DType>,
    head_size: BoxedStrategy<usize>,
    max_rows: usize,
) -> BoxedStrategy<TreeCase> {
    let new = prop_oneof![3 => 1..=8usize, 1 => 0..=64usize];
    let sequences = prop::collection::vec((0..=max_rows, new), 1..=4);
    let heads = (1..=2usize, 1..=8usize, head_size);
    let block_size = prop::option::of(prop::sample::select(vec![1usize, 7, 16, 64]));
    let softcap = prop::option::weighted(0.2, 0.5..8.0f32);
    (dtype, heads, sequences, block_size, any::<[bool; 6]>(), softcap, any::<u64>())
        .prop_map(|(dtype, (kv, group, size), sequences, block_size, flags, softcap, seed)| {
            let [first_prompt, no_new_rows, is_tree, rotates, head_sink, lse] = flags;
            let mut sequences: Vec<_> =
                sequences.into_iter().map(|(past, new)| [past, new]).collect();
            sequences[0][1] = sequences[0][1].max(1);
            let first_prompt = first_prompt && seed % 4 == 0 && block_size.is_none();
            TreeCase {
                dtype,
                heads: [kv * group, kv, size],
                sequences,
                block_size,
                first_prompt,
                no_new_rows: no_new_rows && seed % 3 == 0 && !first_prompt,
                is_tree,
                rotates: rotates && size % 16 == 0,
                offset: 0,
                softcap,
                head_sink,
                lse,
                seed,
            }
        })
        .boxed()
}

/// These calls with RoPE, which in most of them begins after the first element of a head.
pub fn turned_behind(cases: BoxedStrategy<TreeCase>) -> BoxedStrategy<TreeCase> {
    let turned = |case: TreeCase| {
        let [.., size] = case.heads;
        let places = size.saturating_sub(16) / 8 + 1;
        TreeCase { rotates: true, offset: case.seed as usize % places * 8, ..case }
    };
    cases.prop_filter("heads that can", |case| case.heads[2] % 16 == 0).prop_map(turned).boxed()
}

impl Lengths for TreeCase {
    fn sequences(&self) -> &[[usize; 2]] {
        &self.sequences
    }

    fn block_size(&self) -> Option<usize> {
        self.block_size
    }

    fn is_first_prompt(&self) -> bool {
        self.first_prompt
    }
}

impl TreeCase {
    /// The same over contiguous or paged caches.
    pub fn paged(self, block_size: Option<usize>) -> Self {
        let first_prompt = self.first_prompt && block_size.is_none();
        Self { block_size, first_prompt, ..self }
    }

    fn layer(&self) -> Layer {
        let [query, kv, size] = self.heads;
        let layer = Layer::new(self.dtype, Heads { query, kv, size });
        let layer = match self.softcap {
            Some(softcap) => layer.softcap(softcap),
            None => layer,
        };
        let layer = if self.head_sink { layer.sink(Sink::PerHead) } else { layer };
        match self.rotates {
            true => layer.rope(Rope::new(16, self.longest() + 64).offset(self.offset)),
            false => layer,
        }
    }

    /// Whether the mask also determines RoPE positions.
    fn has_positions(&self) -> bool {
        self.rotates && !self.is_paged()
    }
}

/// A call's tensors.
struct Given {
    query: Tensor,
    new: Option<[Tensor; 2]>,
    last_or_past: Tensor,
    starts: Tensor,
    table: Tensor,
    slots: Option<Tensor>,
    rotary: Option<[Tensor; 2]>,
    positions: Option<Tensor>,
    words: Tensor,
    head_sink: Option<Tensor>,
    /// NaN where no sequence has rows.
    cache: [Tensor; 2],
}

impl Given {
    fn new(case: &TreeCase) -> Self {
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let ([heads, kv, size], count) = (case.heads, case.sequences.len());
        let rows = |heads: usize| match case.is_paged() {
            true => vec![case.tokens(), heads * size],
            false => vec![count, case.most_new(), heads * size],
        };
        let query = data.normal(&rows(heads), 1.0);
        let has_new = case.is_paged() || !case.no_new_rows;
        let new = has_new.then(|| [(); 2].map(|()| data.normal(&rows(kv), 1.0)));
        let (cache, table) = Self::cache(case, &mut data);
        let starts = (0..=count).map(|b| (0..b).map(|b| case.new_tokens(b) as i32).sum::<i32>());
        let starts = starts.collect::<Vec<_>>();
        let last_or_past = (0..count).map(|b| {
            let [past, total] = case.lengths(b);
            if case.is_paged() { past as i32 } else { total as i32 - 1 }
        });
        let last_or_past: Vec<_> = last_or_past.collect();
        let (words, depths) = words(case, &mut data.rng);
        let rotary = case.rotates.then(|| {
            let shape = [case.longest() + 64, 8];
            let angles = shape[0] * shape[1];
            let angles: Vec<f32> = (0..angles).map(|_| data.rng.random_range(0.0..6.3)).collect();
            [f32::cos, f32::sin].map(|f| {
                data.tensor(&shape, &angles.iter().map(|&angle| f(angle)).collect::<Vec<_>>())
            })
        });
        let integers = |values: &[i64]| match case.is_paged() {
            true => Tensor::from(arr1(values)),
            false => Array2::from_shape_vec((count, case.most_new()), values.to_vec())
                .expect("as many")
                .into(),
        };
        Self {
            query,
            new,
            last_or_past: arr1(&last_or_past).into(),
            starts: arr1(&starts).into(),
            table,
            slots: (case.is_paged() && case.no_new_rows)
                .then(|| arr1(&vec![-1i32; case.tokens()]).into()),
            rotary,
            positions: case.has_positions().then(|| integers(&depths)),
            words: integers(&words),
            head_sink: case.head_sink.then(|| data.normal(&[heads], 2.0)),
            cache,
        }
    }

    /// Keys, values, and the table of blocks.
    fn cache(case: &TreeCase, data: &mut Data) -> ([Tensor; 2], Tensor) {
        let ([_, kv, size], [columns, blocks]) = (case.heads, case.blocks());
        let mut order: Vec<_> = (0..blocks as i32).collect();
        order.shuffle(&mut data.rng);
        let table = &order[..case.sequences.len() * columns];
        let valid = |b: usize| case.lengths(b)[usize::from(case.no_new_rows)];
        let mut held = Vec::new();
        let shape = match case.block_size {
            None => {
                let rows = case.capacity();
                for b in 0..case.sequences.len() {
                    (0..kv * rows).for_each(|i| held.push(i % rows < valid(b)));
                }
                [case.sequences.len(), kv, rows, size]
            }
            Some(block_size) => {
                held = vec![false; blocks * block_size * kv];
                for b in 0..case.sequences.len() {
                    for row in 0..valid(b) {
                        let block = table[b * columns + row / block_size] as usize;
                        let row = block * block_size + row % block_size;
                        held[row * kv..][..kv].fill(true);
                    }
                }
                [blocks, block_size, kv, size]
            }
        };
        let cache = [(); 2].map(|()| data.held_rows(&shape, 1.0, &held));
        let table = Array2::from_shape_vec((case.sequences.len(), columns), table.to_vec());
        (cache, table.expect("as many").into())
    }

    /// Output, log-sum-exps on request, and caches after the call on `backend`.
    fn run(
        &self,
        problem: &Problem,
        backend: &dyn Backend,
    ) -> Result<(Tensor, Option<Tensor>, [Tensor; 2])> {
        let mut output = poisoned(problem.dtype, &problem.output_shape());
        let mut lse = problem.lse.then(|| poisoned(DType::F32, &problem.lse_shape()));
        let mut cache = self.cache.clone();
        let [present_key, present_value] = &mut cache;
        let [key, value] = both(&self.new);
        let [cos, sin] = both(&self.rotary);
        let is_paged = problem.pages.is_some();
        let inputs = Tensors::default()
            .with(TensorId::Query, &self.query)
            .with(TensorId::Key, key)
            .with(TensorId::Value, value)
            .with(TensorId::SeqlensK, &self.last_or_past)
            .with(TensorId::CumulativeSequenceLength, is_paged.then_some(&self.starts))
            .with(TensorId::BlockTable, is_paged.then_some(&self.table))
            .with(TensorId::SlotMapping, self.slots.as_ref())
            .with(TensorId::CosCache, cos)
            .with(TensorId::SinCache, sin)
            .with(TensorId::PositionIds, self.positions.as_ref())
            .with(TensorId::TreeMask, &self.words)
            .with(TensorId::HeadSink, self.head_sink.as_ref());
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key,
            present_value,
            row_scales: None,
            output_qk: None,
            lse: lse.as_mut(),
        };
        backend.run(problem, &mut io)?;
        Ok((output, lse, cache))
    }
}

fn both(pair: &Option<[Tensor; 2]>) -> [Option<&Tensor>; 2] {
    pair.as_ref().map_or([None; 2], |pair| pair.each_ref().map(Some))
}

/// What each new token sees, and its position.
fn words(case: &TreeCase, rng: &mut SmallRng) -> (Vec<i64>, Vec<i64>) {
    let (mut words, mut positions) = (Vec::new(), Vec::new());
    for b in 0..case.sequences.len() {
        let first = words.len();
        for i in 0..case.new_tokens(b) {
            let parent = (i > 0).then(|| first + rng.random_range(0..i));
            let own = 1i64 << i;
            let ancestors = parent.map_or(0, |parent| words[parent]);
            words.push(match rng.random_range(0..8) {
                _ if case.is_tree => ancestors | own,
                0 => 0,
                1 => -1,
                _ => rng.random(),
            });
            let past = case.lengths(b)[0] as i64;
            positions.push(past + rng.random_range(0..=i as i64));
        }
    }
    (words, positions)
}

impl Parity for TreeCase {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn problem(&self) -> Result<Problem> {
        let (layer, count) = (self.layer(), self.sequences.len());
        if let Some(block_size) = self.block_size {
            let [columns, blocks] = self.blocks();
            let call = Paged::new(count, self.tokens(), [blocks, block_size, columns]);
            let call = call.most_tokens(self.most_new()).longest(self.longest()).tree_mask();
            let call = if self.lse { call.log_sum_exp() } else { call };
            return layer.paged(if self.no_new_rows { call.slot_mapping() } else { call });
        }
        let (rows, capacity) = (self.most_new(), self.capacity());
        let call = match self.first_prompt {
            true => Dense::prefill(count, rows, capacity),
            false => Dense::chunk(count, rows, capacity).longest(self.longest()),
        };
        let call = if self.no_new_rows { call.nothing_new() } else { call }.tree_mask();
        let call = if self.has_positions() { call.explicit_positions() } else { call };
        layer.dense(if self.lse { call.log_sum_exp() } else { call })
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let problem = self.problem().map_err(|e| e.to_string())?;
        let given = Given::new(self);
        let run = move |backend: &dyn Backend| {
            given.run(&problem, backend).map_err(|e| format!("{}: {e}", backend.name()))
        };
        let (want, want_lse, want_cache) = run(&Reference)?;
        let tolerance = match self.dtype {
            DType::F16 => Tolerance { absolute: 6e-3, relative: 4e-3 },
            DType::BF16 => Tolerance { absolute: 3e-2, relative: 2e-2 },
            _ => Tolerance { absolute: 2e-5, relative: 1e-4 },
        };
        let exact = Tolerance { absolute: 0.0, relative: 0.0 };
        let keys = if self.rotates { tolerance } else { exact };
        Ok(Box::new(move |backend| {
            let (got, got_lse, got_cache) = run(backend)?;
            let errors = tensors("output", &got, &want, tolerance)?;
            optional("lse", &got_lse, &want_lse, tolerance)?;
            tensors("present_key", &got_cache[0], &want_cache[0], keys)?;
            tensors("present_value", &got_cache[1], &want_cache[1], exact)?;
            Ok(errors)
        }))
    }
}
