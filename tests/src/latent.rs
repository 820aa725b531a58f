//! A random call of multi-head latent attention, whose values are a part of its keys, and its
//! tensors.

use crate::Tolerance;
use crate::call::{Data, poisoned};
use crate::case::any_scales;
use crate::compare::{codes_rounded_before, equal_codes, optional, row_scales, tensors};
use crate::lengths::Lengths;
use crate::paged::put_gaps;
use crate::parity::{Judge, Parity};
use gqa_host::backend::{Backend, Io};
use gqa_host::engine::{Dense, External, LatentHeads, Layer, Paged, Rope};
use gqa_host::op::{PagedAttention, PagedCache, PagedInputs};
use gqa_host::plan::{DeviceInfo, PlanOptions, TensorId, Tensors, plan};
use gqa_host::reference::Reference;
use gqa_host::{
    CacheBinding, DType, Problem, ProblemFields, QuantFormat, Quantization, Result, RowStrides,
    Scales, Sink, Tensor,
};
use gqa_kernels::registry::{Entry, Family};
use ndarray::{Array2, arr1};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// Where the rows of a latent call are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LatentRows {
    /// In a cache of each sequence's own.
    Dense,
    /// In blocks of so many rows, with this many units of 16 bytes behind each row and behind each
    /// block.
    Paged(usize, [usize; 2]),
    /// Given, without a cache.
    External,
}

/// One call. Data follows from its seed.
#[derive(Clone, Debug)]
pub struct LatentCase {
    /// Type of all floating-point tensors.
    pub dtype: DType,
    /// The heads.
    pub heads: LatentHeads,
    /// Past and new tokens of each sequence. Unless the cache is paged, all sequences have as many
    /// new tokens as the first.
    pub sequences: Vec<[usize; 2]>,
    /// Where their rows are.
    pub rows: LatentRows,
    /// The quantization of the cache, if any.
    pub quantized: Option<Quantization>,
    /// Sequences begin with the call, and some are padded; contiguous caches only.
    pub first_prompt: bool,
    /// The new tokens are in the cache already.
    pub no_new_rows: bool,
    /// Elements of queries and keys that rotate: their number, and the first one.
    pub rotates: Option<[usize; 2]>,
    /// Pairs are neighbours.
    pub interleaved: bool,
    /// Newest keys that a token sees.
    pub window: Option<usize>,
    /// Scores are capped.
    pub softcap: Option<f32>,
    /// head_sink given.
    pub head_sink: bool,
    /// Words say which new tokens a token sees.
    pub tree_mask: bool,
    /// attention_bias given; contiguous caches only.
    pub bias: bool,
    /// Log-sum-exp wanted.
    pub lse: bool,
    /// Past and present are caches of their own, and output is float32; contiguous caches only.
    pub separate: bool,
    /// Lengths count the new tokens; paged caches only.
    pub counts_new: bool,
    /// The table leads outside of the cache for some visible blocks.
    pub gaps: bool,
    /// slot_mapping given; paged caches only.
    pub slots: bool,
    /// Of all data.
    pub seed: u64,
}

/// Calls of any type with these sizes of keys and values, over sequences of up to about `most`
/// tokens.
pub fn latent(sizes: &[[usize; 2]], most: usize) -> BoxedStrategy<LatentCase> {
    let beside_pages = prop_oneof![3 => 15..=17usize, 1 => 63..=65usize];
    let past = prop_oneof![2 => Just(0), 1 => Just(1), 4 => beside_pages, 3 => 0..=most];
    let new = prop_oneof![4 => Just(1), 1 => Just(0), 2 => 2..=4usize, 1 => 0..=most.min(40)];
    let sequences = prop::collection::vec((past, new), 1..=4);
    let blocks = (prop::sample::select(vec![1usize, 7, 16, 64]), [0..=2usize, 0..=2]);
    let rows = prop_oneof![
        3 => Just(LatentRows::Dense),
        6 => blocks.prop_map(|(rows, apart)| LatentRows::Paged(rows, apart)),
        1 => Just(LatentRows::External),
    ];
    let heads =
        (prop::sample::select(vec![1usize, 3, 16, 20, 64]), prop::sample::select(sizes.to_vec()));
    let scores = (prop::option::weighted(0.2, 1..=most), prop::option::weighted(0.2, 0.5..8.0f32));
    let call = (crate::any_dtype(), heads, sequences, rows, scores);
    (call, quantization(), any::<[bool; 13]>(), any::<u64>())
        .prop_map(|(call, quantized, flags, seed)| {
            let (dtype, (query, [size, values]), sequences, rows, scores) = call;
            let [first_prompt, no_new_rows, rotates, elsewhere, interleaved, head_sink, ..] = flags;
            let [.., tree_mask, bias, lse, separate, counts_new, gaps, slots] = flags;
            let is_paged = matches!(rows, LatentRows::Paged(..));
            let external = rows == LatentRows::External;
            let mut sequences: Vec<_> =
                sequences.into_iter().map(|(past, new)| [past, new]).collect();
            sequences[0][1] = sequences[0][1].max(1);
            let first_prompt = first_prompt && rows == LatentRows::Dense;
            let no_new_rows = no_new_rows && !first_prompt && seed % 3 == 0;
            let tree_mask = tree_mask && !external && seed % 5 == 0;
            // The last channels, as in DeepSeek's models, or any.
            let least = size - if elsewhere { size } else { values };
            // Rows of quantized values are multiples of 16 bytes.
            let fits = |how: &Quantization| size % (16 * how.codes_per_element()) == 0;
            let quantized = quantized.filter(fits).filter(|_| !external);
            let by_token = quantized.is_some_and(|how| how.scales == Scales::PerToken);
            let rotates = rotates && (quantized.is_none() || is_paged);
            let dim = if least >= 16 { least / 16 * 16 } else { 16 };
            let (dim, most) = (dim.min(64), size.saturating_sub(dim.min(64)));
            let offset = if elsewhere { seed as usize % (most / 8 + 1) * 8 } else { most };
            LatentCase {
                dtype,
                heads: LatentHeads { query, size, values },
                sequences,
                rows,
                quantized,
                first_prompt,
                no_new_rows,
                rotates: (rotates && !external && size % 16 == 0).then_some([dim, offset]),
                interleaved,
                window: scores.0.filter(|_| !tree_mask),
                softcap: scores.1,
                head_sink,
                tree_mask,
                bias: bias && rows == LatentRows::Dense && !tree_mask,
                lse,
                separate: separate && rows == LatentRows::Dense && !no_new_rows && !by_token,
                counts_new: counts_new && is_paged,
                gaps: gaps && is_paged && seed % 2 == 0,
                slots: slots && is_paged && !no_new_rows,
                seed,
            }
        })
        .boxed()
}

/// How a cache is quantized, most often to float8e4m3fn, or that it is not.
fn quantization() -> impl Strategy<Value = Option<Quantization>> {
    use QuantFormat::{Float4, Float8, Int4, Int8};
    let format = prop::sample::select(vec![Float8, Float8, Float8, Int8, Int4, Float4]);
    let scales = prop_oneof![2 => any_scales(), 1 => Just(Scales::PerToken)];
    let how = (format, scales).prop_map(|(format, scales)| Quantization { format, scales });
    prop::option::weighted(0.3, how)
}

/// Options with which kernels by `mma.sync` do not take the calls of few rows and keys from the
/// kernel for decode steps over a paged latent cache.
pub fn latent_options() -> PlanOptions {
    PlanOptions { distrusted: vec![Family::LatentMma], ..PlanOptions::default() }
}

/// Those calls with what the kernel for decode steps over a paged latent cache takes, and for which
/// it is taken on a device with [these options](latent_options).
pub fn latent_in_place(
    cases: BoxedStrategy<LatentCase>,
    device: &DeviceInfo,
) -> BoxedStrategy<LatentCase> {
    let rows = prop::sample::select(vec![16usize, 32, 64, 128]);
    let paged =
        (rows, [0..=2usize, 0..=2]).prop_map(|(rows, apart)| LatentRows::Paged(rows, apart));
    let takes = |entry: &Entry| entry.family == Family::Latent;
    of_kernels(takes, latent_options(), cases, paged.boxed(), device)
}

/// The same with options that have all keys divided by the lengths on the device.
pub fn latent_divided(
    cases: BoxedStrategy<LatentCase>,
    options: &PlanOptions,
    device: &DeviceInfo,
) -> BoxedStrategy<LatentCase> {
    let rows = prop::sample::select(vec![16usize, 32, 64, 128]);
    let paged =
        (rows, [0..=2usize, 0..=2]).prop_map(|(rows, apart)| LatentRows::Paged(rows, apart));
    let takes = |entry: &Entry| {
        entry.family == Family::Latent && entry.role == gqa_kernels::registry::Role::Merge
    };
    of_kernels(takes, options.clone(), cases, paged.boxed(), device)
}

/// Calls over sequences with these rows of the cache and new tokens, as kernels for decode steps
/// take them.
pub fn latent_ragged(sequences: Vec<[usize; 2]>) -> BoxedStrategy<LatentCase> {
    let heads = prop::sample::select(vec![16usize, 20, 64, 128]);
    let call = (crate::half_dtype(), heads, any::<[bool; 3]>(), any::<u64>());
    call.prop_map(move |(dtype, query, [lse, counts_new, gaps], seed)| LatentCase {
        dtype,
        heads: LatentHeads { query, size: 576, values: 512 },
        sequences: sequences.clone(),
        rows: LatentRows::Paged(64, [0, 0]),
        quantized: None,
        first_prompt: false,
        no_new_rows: false,
        rotates: None,
        interleaved: false,
        window: None,
        softcap: None,
        head_sink: false,
        tree_mask: false,
        bias: false,
        lse,
        separate: false,
        counts_new,
        gaps,
        slots: false,
        seed,
    })
    .boxed()
}

/// The same for `latent_mma`, over contiguous caches and blocks of any power of two of rows.
pub fn latent_by_mma(
    cases: BoxedStrategy<LatentCase>,
    device: &DeviceInfo,
) -> BoxedStrategy<LatentCase> {
    let rows = prop::sample::select(vec![1usize, 2, 16, 64, 128]);
    let paged =
        (rows, [0..=2usize, 0..=2]).prop_map(|(rows, apart)| LatentRows::Paged(rows, apart));
    let rows = prop_oneof![1 => Just(LatentRows::Dense), 2 => paged];
    let takes = |entry: &Entry| entry.family == Family::LatentMma;
    of_kernels(takes, PlanOptions::default(), cases, rows.boxed(), device)
}

/// Calls over float8 for the kernel of few rows whose keys `wgmma` multiplies as they are.
pub fn latent_by_wgmma(
    cases: BoxedStrategy<LatentCase>,
    device: &DeviceInfo,
) -> BoxedStrategy<LatentCase> {
    let rows = prop::sample::select(vec![1usize, 2, 16, 64, 128]);
    let paged =
        (rows, [0..=2usize, 0..=2]).prop_map(|(rows, apart)| LatentRows::Paged(rows, apart));
    let takes = |entry: &Entry| entry.name == "gqa_latent_mma_f8_bf16_r16_wgmma";
    of_kernels(takes, PlanOptions::default(), in_float8(cases), paged.boxed(), device)
}

/// Calls with such rows for which a device takes such a kernel.
fn of_kernels(
    takes: fn(&Entry) -> bool,
    options: PlanOptions,
    cases: BoxedStrategy<LatentCase>,
    rows: BoxedStrategy<LatentRows>,
    device: &DeviceInfo,
) -> BoxedStrategy<LatentCase> {
    let device = device.clone();
    (cases, crate::half_dtype(), rows)
        .prop_map(|(case, dtype, rows)| {
            let is_dense = rows == LatentRows::Dense;
            LatentCase {
                dtype,
                rows,
                first_prompt: case.first_prompt && is_dense,
                separate: case.separate && is_dense,
                window: None,
                head_sink: false,
                tree_mask: false,
                bias: false,
                counts_new: case.counts_new && !is_dense,
                gaps: case.gaps && !is_dense,
                slots: case.slots && !is_dense,
                ..case
            }
        })
        .prop_filter("taken by another kernel", move |case| {
            let plan = case.problem().and_then(|p| plan(&p, &device, &options));
            plan.is_ok_and(|plan| plan.launches().iter().any(|launch| takes(launch.entry())))
        })
        .boxed()
}

/// Such calls over caches of float8 with one scale.
pub fn latent_in_float8(
    cases: BoxedStrategy<LatentCase>,
    device: &DeviceInfo,
) -> BoxedStrategy<LatentCase> {
    latent_in_place(in_float8(cases), device)
}

/// Those calls over caches of float8 with one scale.
pub fn in_float8(cases: BoxedStrategy<LatentCase>) -> BoxedStrategy<LatentCase> {
    let scales = prop::sample::select(vec![Scales::PerTensor, Scales::PerHead]);
    let float8 = |(case, scales): (LatentCase, Scales)| LatentCase {
        quantized: Some(Quantization { format: QuantFormat::Float8, scales }),
        ..case
    };
    (cases, scales).prop_map(float8).boxed()
}

/// Calls of [`latent`] over paged caches that PagedAttention can express.
pub fn latent_operators(sizes: &[[usize; 2]], most: usize) -> BoxedStrategy<LatentOperator> {
    let cases = (latent(sizes, most), prop::sample::select(vec![1usize, 7, 16, 64]));
    let described = |(case, block_size): (LatentCase, usize)| {
        LatentOperator(LatentCase {
            rows: LatentRows::Paged(block_size, [0; 2]),
            quantized: None,
            first_prompt: false,
            no_new_rows: false,
            tree_mask: false,
            bias: false,
            separate: false,
            counts_new: false,
            ..case
        })
    };
    cases.prop_map(described).boxed()
}

impl Lengths for LatentCase {
    fn sequences(&self) -> &[[usize; 2]] {
        &self.sequences
    }

    fn block_size(&self) -> Option<usize> {
        match self.rows {
            LatentRows::Paged(rows, _) => Some(rows),
            LatentRows::Dense | LatentRows::External => None,
        }
    }

    fn is_first_prompt(&self) -> bool {
        self.first_prompt
    }
}

impl LatentCase {
    /// In some calls scores differ so much that row maxima change from tile to tile. Not in
    /// float32, where the rounding of such scores would exceed the tolerance.
    fn scale(&self) -> f32 {
        self.deviation() as f32 / (self.heads.size as f32).sqrt()
    }

    /// That of scores.
    fn deviation(&self) -> f64 {
        let is_wide = self.dtype != DType::F32 && self.seed % 3 == 0;
        if is_wide { 15.0 } else { 1.3 }
    }

    fn layer(&self) -> Layer {
        let mut layer = Layer::latent(self.dtype, self.heads, self.scale());
        if let Some(how) = self.quantized {
            layer = layer.quantized(how);
        }
        if let Some(softcap) = self.softcap {
            layer = layer.softcap(softcap);
        }
        if let Some(window) = self.window {
            layer = layer.window(window);
        }
        if self.head_sink {
            layer = layer.sink(Sink::PerHead);
        }
        match self.rotates {
            Some([dim, offset]) => {
                let rope = Rope::new(dim, self.longest() + 64).offset(offset);
                layer.rope(if self.interleaved { rope.interleaved() } else { rope })
            }
            None => layer,
        }
    }

    fn paged(&self, block_size: usize, apart: [usize; 2]) -> Result<Problem> {
        let [columns, blocks] = self.blocks();
        let call = Paged::new(self.sequences.len(), self.tokens(), [blocks, block_size, columns]);
        let call = call.most_tokens(self.most_new()).longest(self.longest());
        let call = if self.tree_mask { call.tree_mask() } else { call };
        let call = if self.lse { call.log_sum_exp() } else { call };
        let call = if self.counts_new { call.total_lengths() } else { call };
        let call = if self.no_new_rows { call.appended() } else { call };
        let call = if self.slots { call.slot_mapping() } else { call };
        let element = self.quantized.map_or(self.dtype, Quantization::dtype).size();
        let [behind_row, behind_block] = apart.map(|units| units * 16 / element);
        let per_element = self.quantized.map_or(1, Quantization::codes_per_element);
        let row = self.heads.size / per_element + behind_row;
        let strides = RowStrides { batch: block_size * row + behind_block, head: row, row };
        // Rows that have scales lie side by side.
        let by_token = self.quantized.is_some_and(|how| how.scales == Scales::PerToken);
        self.layer().paged(match apart {
            _ if by_token => call,
            [0, 0] => call,
            _ => call.cache_strides(strides),
        })
    }

    fn dense(&self) -> Result<Problem> {
        let (count, rows, capacity) = (self.sequences.len(), self.most_new(), self.capacity());
        let call = match self.first_prompt {
            true => Dense::prefill(count, rows, capacity),
            false => Dense::chunk(count, rows, capacity).longest(self.longest()),
        };
        let call = if self.no_new_rows { call.nothing_new() } else { call };
        let call = if self.tree_mask { call.tree_mask() } else { call };
        let call = if self.bias { call.bias(true, true) } else { call };
        let call = if self.lse { call.log_sum_exp() } else { call };
        if !self.separate {
            return self.layer().dense(call);
        }
        let call = self.layer().dense(call.float32_output())?;
        call.derive(|call| ProblemFields { cache: CacheBinding::Separate, ..call })
    }

    fn external(&self) -> Result<Problem> {
        let shortest = (0..self.sequences.len()).map(|b| self.lengths(b)[1]).min().unwrap_or(0);
        let call = External::new(self.sequences.len(), self.most_new(), self.longest());
        let call = call.shortest(shortest);
        self.layer().external(if self.lse { call.log_sum_exp() } else { call })
    }
}

/// A call's tensors.
#[derive(Clone)]
struct Given {
    query: Tensor,
    /// New rows, or all where there is no cache.
    key: Option<Tensor>,
    lengths: Tensor,
    starts: Tensor,
    table: Tensor,
    slots: Option<Tensor>,
    rotary: Option<[Tensor; 2]>,
    words: Option<Tensor>,
    bias: Option<Tensor>,
    head_sink: Option<Tensor>,
    /// NaN where no sequence has rows.
    cache: Tensor,
    /// Of a quantized cache: all of them, or those of its rows.
    scales: Option<Tensor>,
}

impl Given {
    fn new(case: &LatentCase, problem: &Problem) -> Self {
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let count = case.sequences.len();
        let query = data.normal(&problem.query_shape(), 1.0);
        let (cache, scales, table) = Self::cache(case, &mut data);
        let key = TensorId::Key.spec(problem).map(|spec| match case.rows {
            LatentRows::External => {
                let held = (0..count * case.longest())
                    .map(|row| row % case.longest() < case.lengths(row / case.longest())[1]);
                data.held_rows(&spec.shape, 1.0, &held.collect::<Vec<_>>())
            }
            _ => data.normal(&spec.shape, 1.0),
        });
        let starts = (0..=count).map(|b| (0..b).map(|b| case.new_tokens(b) as i32).sum::<i32>());
        let lengths = (0..count).map(|b| {
            let [past, total] = case.lengths(b);
            match (case.is_paged(), case.counts_new) {
                (true, false) => past as i32,
                (true, true) => total as i32,
                (false, _) => total as i32 - 1,
            }
        });
        let rotary = case.rotates.map(|[dim, _]| {
            let shape = [case.longest() + 64, dim / 2];
            let angles: Vec<f32> =
                (0..shape[0] * shape[1]).map(|_| data.rng.random_range(0.0..6.3)).collect();
            [f32::cos, f32::sin].map(|f| {
                data.tensor(&shape, &angles.iter().map(|&angle| f(angle)).collect::<Vec<_>>())
            })
        });
        let words = TensorId::TreeMask.spec(problem).map(|spec| {
            let words = (0..spec.len()).map(|_| data.rng.random::<i64>()).collect::<Vec<_>>();
            match case.is_paged() {
                true => arr1(&words).into(),
                false => {
                    Array2::from_shape_vec((count, case.most_new()), words).expect("as many").into()
                }
            }
        });
        let slots = case.slots.then(|| Self::slots(case, &table));
        Self {
            query,
            key,
            lengths: arr1(&lengths.collect::<Vec<_>>()).into(),
            starts: arr1(&starts.collect::<Vec<_>>()).into(),
            table: Array2::from_shape_vec((count, case.blocks()[0]), table)
                .expect("as many")
                .into(),
            slots,
            rotary,
            words,
            bias: problem.bias_shape().map(|shape| data.normal(&shape, 1.0)),
            head_sink: case.head_sink.then(|| data.normal(&[case.heads.query], 2.0)),
            cache,
            scales,
        }
    }

    /// The rows where the table has the new tokens.
    fn slots(case: &LatentCase, table: &[i32]) -> Tensor {
        let ([columns, blocks], size) = (case.blocks(), case.block_size().unwrap_or(1));
        let mut slots = Vec::new();
        for b in 0..case.sequences.len() {
            let [past, total] = case.lengths(b);
            slots.extend((past..total).map(|row| {
                let block = usize::try_from(table[b * columns + row / size]).unwrap_or(blocks);
                if block < blocks { (block * size + row % size) as i32 } else { -1 }
            }));
        }
        arr1(&slots).into()
    }

    /// The cache, its scales, and the table of blocks.
    fn cache(case: &LatentCase, data: &mut Data) -> (Tensor, Option<Tensor>, Vec<i32>) {
        let ([columns, blocks], count) = (case.blocks(), case.sequences.len());
        let mut order: Vec<_> = (0..blocks as i32).collect();
        order.shuffle(&mut data.rng);
        let mut table = order[..count * columns].to_vec();
        let valid = |b: usize| case.lengths(b)[usize::from(case.no_new_rows)];
        let mut held = Vec::new();
        let shape = match case.block_size() {
            None => {
                let rows = case.capacity();
                (0..count * rows).for_each(|i| held.push(i % rows < valid(i / rows)));
                [count, 1, rows, case.heads.size]
            }
            Some(size) => {
                held = vec![false; blocks * size];
                for (b, entries) in table.chunks_exact_mut(columns).enumerate() {
                    if case.gaps {
                        let seen = case.lengths(b)[1].div_ceil(size);
                        put_gaps(&mut entries[..seen], blocks, &mut data.rng);
                    }
                    for row in 0..valid(b) {
                        let block = usize::try_from(entries[row / size]).unwrap_or(blocks);
                        if block < blocks {
                            held[block * size + row % size] = true;
                        }
                    }
                }
                [blocks, size, 1, case.heads.size]
            }
        };
        let Some(how) = case.quantized else {
            return (data.held_rows(&shape, 1.0, &held), None, table);
        };
        let cache = data.codes(&shape, how, &held);
        let scales: Vec<_> = match how.scales.count(1, case.heads.size) {
            Some(count) => (0..count).map(|_| data.scale(how, 1.0)).collect(),
            None => held
                .iter()
                .map(|&held| if held { data.scale(how, 1.0) } else { f32::NAN })
                .collect(),
        };
        (cache, Some(arr1(&scales).into()), table)
    }

    /// Output, log-sum-exps on request, and the cache after the call on `backend`.
    fn run(&self, problem: &Problem, backend: &dyn Backend) -> Result<Got> {
        let of_rows = self.scales.as_ref().filter(|_| problem.has_row_scales());
        let of_all = self.scales.as_ref().filter(|_| !problem.has_row_scales());
        let mut of_rows = of_rows.map(|scales| [scales.clone(), Tensor::zeros(DType::F32, &[0])]);
        let mut output = poisoned(problem.out_dtype, &problem.output_shape());
        let mut lse = problem.lse.then(|| poisoned(DType::F32, &problem.lse_shape()));
        let past = (problem.cache == CacheBinding::Separate).then_some(&self.cache);
        let mut cache = match past {
            Some(past) => poisoned(past.dtype(), past.shape()),
            None => self.cache.clone(),
        };
        let [mut nothing, mut no_cache] = [0; 2].map(|n| Tensor::zeros(problem.dtype, &[n]));
        let [cos, sin] = match &self.rotary {
            Some(angles) => angles.each_ref().map(Some),
            None => [None; 2],
        };
        let is_paged = problem.pages.is_some();
        let inputs = Tensors::default()
            .with(TensorId::Query, &self.query)
            .with(TensorId::Key, self.key.as_ref())
            .with(TensorId::PastKey, past)
            .with(TensorId::SeqlensK, &self.lengths)
            .with(TensorId::CumulativeSequenceLength, is_paged.then_some(&self.starts))
            .with(TensorId::BlockTable, is_paged.then_some(&self.table))
            .with(TensorId::SlotMapping, self.slots.as_ref())
            .with(TensorId::CosCache, cos)
            .with(TensorId::SinCache, sin)
            .with(TensorId::TreeMask, self.words.as_ref())
            .with(TensorId::AttentionBias, self.bias.as_ref())
            .with(TensorId::HeadSink, self.head_sink.as_ref())
            .with(TensorId::KScale, of_all);
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key: if problem.has_present() { &mut cache } else { &mut no_cache },
            present_value: &mut nothing,
            row_scales: of_rows.as_mut().map(|scales| scales.each_mut()),
            output_qk: None,
            lse: lse.as_mut(),
        };
        backend.run(problem, &mut io)?;
        Ok(Got { output, lse, cache, scales: of_rows })
    }
}

impl Parity for LatentCase {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn problem(&self) -> Result<Problem> {
        match self.rows {
            LatentRows::Paged(block_size, apart) => self.paged(block_size, apart),
            LatentRows::Dense => self.dense(),
            LatentRows::External => self.external(),
        }
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let problem = self.problem().map_err(|e| e.to_string())?;
        let given = Given::new(self, &problem);
        if self.quantized.is_some() && self.rotates.is_some() {
            return self.judge_by_its_cache(problem, given);
        }
        self.judge_by(move |backend| given.run(&problem, backend))
    }
}

/// What a call leaves.
struct Got {
    output: Tensor,
    /// On request.
    lse: Option<Tensor>,
    cache: Tensor,
    /// Of the rows of the cache.
    scales: Option<[Tensor; 2]>,
}

impl LatentCase {
    /// If scores differ much, a few keys have most of the weight. Then the rounding of dequantized
    /// values has a larger effect.
    fn tolerance(&self) -> Tolerance {
        let rounds = if self.quantized.is_some() { self.deviation().max(1.0) } else { 1.0 };
        match self.dtype {
            DType::F16 => Tolerance { absolute: 8e-3 * rounds, relative: 4e-3 },
            DType::BF16 => Tolerance { absolute: 4e-2 * rounds, relative: 2e-2 },
            _ => Tolerance { absolute: 2e-5, relative: 1e-4 },
        }
    }

    /// Compares the results of a back end with those of the reference.
    fn judge_by<'a>(
        &'a self,
        run: impl Fn(&dyn Backend) -> Result<Got> + 'a,
    ) -> std::result::Result<Judge<'a>, String> {
        let run = named(run);
        let want = run(&Reference)?;
        let tolerance = self.tolerance();
        let exact = Tolerance { absolute: 0.0, relative: 0.0 };
        let keys = if self.rotates.is_some() { tolerance } else { exact };
        Ok(Box::new(move |backend| {
            let got = run(backend)?;
            let errors = tensors("output", &got.output, &want.output, tolerance)?;
            optional("lse", &got.lse, &want.lse, tolerance)?;
            row_scales(&got.scales, &want.scales, self.dtype, false)?;
            if self.quantized.is_some() {
                equal_codes("present_key", &got.cache, &want.cache)?;
            } else if self.rows != LatentRows::External {
                tensors("present_key", &got.cache, &want.cache, keys)?;
            }
            Ok(errors)
        }))
    }

    /// The same where a new key's quantized value may round either way near a tie: the output is
    /// compared for the resulting cache, with no new rows.
    fn judge_by_its_cache(
        &self,
        problem: Problem,
        given: Given,
    ) -> std::result::Result<Judge<'_>, String> {
        let read = Self { no_new_rows: true, slots: false, ..self.clone() };
        let read = read.problem().map_err(|e| e.to_string())?;
        let want = named(|backend| given.run(&problem, backend))(&Reference)?;
        Ok(Box::new(move |backend| {
            let got = named(|backend| given.run(&problem, backend))(backend)?;
            let of_keys = row_scales(&got.scales, &want.scales, self.dtype, true)?;
            codes_rounded_before("present_key", &got.cache, &want.cache, of_keys, self.dtype)?;
            let scales = got.scales.as_ref().map(|[keys, _]| keys.clone());
            let given = Given {
                key: None,
                slots: None,
                cache: got.cache.clone(),
                scales: scales.or_else(|| given.scales.clone()),
                ..given.clone()
            };
            let want = named(|backend| given.run(&read, backend))(&Reference)?;
            optional("lse", &got.lse, &want.lse, self.tolerance())?;
            tensors("output", &got.output, &want.output, self.tolerance())
        }))
    }
}

/// With the back end's name before errors.
fn named(
    run: impl Fn(&dyn Backend) -> Result<Got>,
) -> impl Fn(&dyn Backend) -> std::result::Result<Got, String> {
    move |backend| run(backend).map_err(|e| format!("{}: {e}", backend.name()))
}

/// A call of PagedAttention in the latent layout.
#[derive(Clone, Debug)]
pub struct LatentOperator(LatentCase);

impl LatentOperator {
    fn op(&self) -> PagedAttention {
        let case = &self.0;
        let LatentHeads { query, values, .. } = case.heads;
        PagedAttention::new(query as i64, 1)
            .kv_cache_layout("LATENT")
            .v_head_size(values as i64)
            .scale(case.scale())
            .softcap(case.softcap.unwrap_or_default())
            .local_window_size(case.window.map_or(-1, |window| window as i64))
            .do_rotary(case.rotates.is_some())
            .rotary_offset(case.rotates.map_or(0, |[_, offset]| offset as i64))
            .rotary_interleaved(case.interleaved)
            .log_sum_exp(case.lse)
    }

    fn given(&self) -> Result<Given> {
        Ok(Given::new(&self.0, &self.0.problem()?))
    }

    /// The operator, and its tensors by name.
    pub(crate) fn named(&self) -> (PagedAttention, Vec<(&'static str, Option<Tensor>)>) {
        let given = self.given().expect("a legal call");
        let [cos, sin] = given.rotary.map_or([None, None], |angles| angles.map(Some));
        let inputs = vec![
            ("query", Some(given.query)),
            ("key", given.key),
            ("value", None),
            ("cumulative_sequence_length", Some(given.starts)),
            ("past_seqlens", Some(given.lengths)),
            ("block_table", Some(given.table)),
            ("cos_cache", cos),
            ("sin_cache", sin),
            ("slot_mapping", given.slots),
            ("head_sink", given.head_sink),
            ("q_norm_weight", None),
            ("k_norm_weight", None),
            ("k_scale", None),
            ("v_scale", None),
            ("attention_metadata", None),
            ("key_cache", Some(given.cache)),
            ("value_cache", None),
        ];
        (self.op(), inputs)
    }
}

impl Given {
    fn inputs(&self) -> PagedInputs<'_> {
        PagedInputs {
            key: self.key.as_ref(),
            cos_cache: self.rotary.as_ref().map(|[cos, _]| cos),
            sin_cache: self.rotary.as_ref().map(|[_, sin]| sin),
            slot_mapping: self.slots.as_ref(),
            head_sink: self.head_sink.as_ref(),
            ..PagedInputs::new(&self.query, &self.starts, &self.lengths, &self.table)
        }
    }

    fn paged_cache(&self) -> PagedCache {
        PagedCache { key: self.cache.clone(), value: None, scales: None }
    }
}

impl Parity for LatentOperator {
    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn problem(&self) -> Result<Problem> {
        let given = self.given()?;
        self.op().problem(&given.inputs(), &given.paged_cache())
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let given = self.given().map_err(|e| e.to_string())?;
        self.0.judge_by(move |backend| {
            let mut cache = given.paged_cache();
            let outputs = self.op().run(&given.inputs(), &mut cache, backend)?;
            Ok(Got { output: outputs.output, lse: outputs.lse, cache: cache.key, scales: None })
        })
    }
}
