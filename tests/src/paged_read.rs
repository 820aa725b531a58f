//! A random call over a paged KV cache as an engine makes it, and its tensors. One of: a call that
//! appends nothing, whose sequences may have more tokens than keys; a call whose bound on the
//! tokens of a sequence is too small; a call over packed keys and values.

use crate::Tolerance;
use crate::call::{Data, poisoned};
use crate::case::any_scales;
use crate::compare::{optional, tensors};
use crate::paged::put_gaps;
use crate::parity::{Judge, Parity};
use gqa_host::backend::{Backend, Io, Machine};
use gqa_host::engine::{Heads, LatentHeads, Layer, Paged, Rope};
use gqa_host::plan::{PlanOptions, TensorId, Tensors, plan};
use gqa_host::reference::Reference;
use gqa_host::{
    DType, Problem, QuantFormat, Quantization, Result, RowStrides, Scales, Sink, Tensor,
};
use ndarray::{Array2, ArrayD, Axis, arr1};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// One call. Data follows from its seed.
#[derive(Clone, Debug)]
pub struct PagedReadCase {
    /// Type of queries and output.
    pub dtype: DType,
    /// The heads.
    pub heads: [usize; 3],
    /// Keys and tokens of each sequence; the last token has the last key's position.
    pub sequences: Vec<[usize; 2]>,
    /// Rows of a block.
    pub block_size: usize,
    /// The quantization of the cache, if any.
    pub quantized: Option<Quantization>,
    /// Newest keys that a token sees.
    pub window: Option<usize>,
    /// Lengths count the new tokens.
    pub counts_new: bool,
    /// A token sees no later one.
    pub causal: bool,
    /// Values are this number of leading elements of the keys.
    pub latent: Option<usize>,
    /// Words say which new tokens a token sees.
    pub tree_mask: bool,
    /// Queries rotate.
    pub rotates: bool,
    /// head_sink given.
    pub head_sink: bool,
    /// Log-sum-exp wanted.
    pub lse: bool,
    /// The table leads outside of the cache for some visible blocks.
    pub gaps: bool,
    /// The call appends its tokens' keys and values.
    pub appends: bool,
    /// Bound on the tokens of a sequence that the call states; further tokens are not computed.
    pub bound: Option<usize>,
    /// The cache is a strided view.
    pub view: Option<CacheView>,
    /// Keys and values are packed.
    pub rows: Option<Rows>,
    /// Of all data.
    pub seed: u64,
}

/// A strided view of a cache.
#[derive(Clone, Copy, Debug)]
pub struct CacheView {
    /// Within a block (KV head, row) rather than (row, KV head).
    pub heads_outside: bool,
    /// Padding in units of 16 bytes: after each row of a head, after each group of such rows in the
    /// inner order, and after each block.
    pub apart: [usize; 3],
}

/// Packed keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Elements of a value.
    pub value_size: usize,
    /// Rows of no sequence before each one, and behind the last one.
    pub apart: [usize; 2],
}

impl CacheView {
    fn any() -> impl Strategy<Value = Self> {
        (any::<bool>(), [0..=3usize, 0..=2, 0..=2])
            .prop_map(|(heads_outside, apart)| Self { heads_outside, apart })
    }

    /// Strides in elements of `dtype`, for heads of `width` elements.
    fn strides(&self, dtype: DType, [heads, rows, width]: [usize; 3]) -> RowStrides {
        let [inside, outside, behind] = self.apart.map(|units| units * 16 / dtype.size());
        let first = width + inside;
        let second = first * if self.heads_outside { rows } else { heads } + outside;
        let batch = second * if self.heads_outside { heads } else { rows } + behind;
        let [head, row] = if self.heads_outside { [second, first] } else { [first, second] };
        RowStrides { batch, head, row }
    }
}

/// Calls of these types and head sizes, in which sequences have up to `tokens` tokens each.
pub fn paged_reads(
    dtype: BoxedStrategy<DType>,
    head_sizes: &[usize],
    tokens: usize,
) -> BoxedStrategy<PagedReadCase> {
    let keys = prop_oneof![1 => Just(0), 3 => 0..=8usize, 3 => 0..=2 * tokens];
    let sequences = prop::collection::vec((keys, 0..=tokens), 1..=4);
    let heads = (1..=2usize, 1..=4usize, prop::sample::select(head_sizes.to_vec()));
    let format =
        prop::sample::select(vec![QuantFormat::Int8, QuantFormat::Int4, QuantFormat::Float4]);
    let scales = prop_oneof![3 => any_scales(), 1 => Just(Scales::PerToken)];
    let how = (format, scales);
    let how = how.prop_map(|(format, scales)| Quantization { format, scales });
    let quantized = prop::option::weighted(0.3, how);
    let window = prop::option::weighted(0.3, 1..=tokens);
    let block_size = prop::sample::select(vec![16usize, 32, 64]);
    let blocks = (block_size, prop::option::of(CacheView::any()));
    (dtype, heads, sequences, blocks, quantized, window, any::<[bool; 6]>(), any::<u64>())
        .prop_map(
            |(dtype, (kv, group, size), sequences, blocks, quantized, window, flags, seed)| {
                let (block_size, view) = blocks;
                let [counts_new, tree_mask, rotates, head_sink, lse, causal] = flags;
                let mut sequences: Vec<_> =
                    sequences.into_iter().map(|(keys, new)| [keys, new]).collect();
                sequences[0][1] = sequences[0][1].max(1);
                // Rows of quantized values are multiples of 16 bytes.
                let fits = |how: &Quantization| size % (16 * how.codes_per_element()) == 0;
                let tree_mask = tree_mask && sequences.iter().all(|[_, new]| *new <= 64);
                let causal = causal || tree_mask;
                // Tokens before the first key have no angles.
                let rotates =
                    rotates && (causal || sequences.iter().all(|[keys, new]| keys >= new));
                PagedReadCase {
                    dtype,
                    heads: [kv * group, kv, size],
                    sequences,
                    block_size,
                    quantized: quantized.filter(fits),
                    window: window.filter(|_| !tree_mask),
                    counts_new,
                    causal,
                    latent: None,
                    tree_mask,
                    rotates,
                    head_sink,
                    lse,
                    gaps: false,
                    appends: false,
                    bound: None,
                    view,
                    rows: None,
                    seed,
                }
            },
        )
        .boxed()
}

/// Such calls over latent caches, of these sizes of keys and values.
pub fn latent_reads(
    dtype: BoxedStrategy<DType>,
    sizes: &[[usize; 2]],
    tokens: usize,
) -> BoxedStrategy<PagedReadCase> {
    let heads =
        (prop::sample::select(vec![1usize, 3, 16, 20]), prop::sample::select(sizes.to_vec()));
    let latent = |(case, (query, [size, values])): (PagedReadCase, (usize, [usize; 2]))| {
        let (window, head_sink) = (case.window.filter(|_| values < 512), case.head_sink);
        // Rows of quantized values are multiples of 16 bytes.
        let quantized = case.quantized.filter(|_| size % 16 == 0);
        let format = if case.seed % 2 == 0 { QuantFormat::Float8 } else { QuantFormat::Int8 };
        PagedReadCase {
            heads: [query, 1, size],
            latent: Some(values),
            quantized: quantized.map(|how| Quantization { format, ..how }),
            tree_mask: false,
            rotates: false,
            view: case.view.map(|view| CacheView { heads_outside: false, ..view }),
            window,
            head_sink: head_sink && values < 512,
            ..case
        }
    };
    (paged_reads(dtype, &[16], tokens), heads).prop_map(latent).boxed()
}

/// Calls over packed keys and values, of these sizes of keys and values. Lengths are often those at
/// which tiles end.
pub fn packed_rows(
    dtype: BoxedStrategy<DType>,
    sizes: &[[usize; 2]],
    tokens: usize,
) -> BoxedStrategy<PagedReadCase> {
    let length = move || {
        let edges = [0, 1, 127, 128, 129, tokens];
        let edges: Vec<_> = edges.into_iter().filter(|&length| length <= tokens).collect();
        prop_oneof![prop::sample::select(edges), 0..=tokens]
    };
    let sequences = prop::collection::vec([length(), length()], 1..=5);
    let sizes = prop::sample::select(sizes.to_vec());
    let apart = prop_oneof![2 => Just(0), 1 => 0..=5usize];
    let packed = |(case, mut sequences, alike, [size, value_size], apart): (
        PagedReadCase,
        Vec<[usize; 2]>,
        bool,
        [usize; 2],
        [usize; 2],
    )| {
        sequences[0][1] = sequences[0][1].max(1);
        if alike {
            sequences.iter_mut().for_each(|[keys, new]| *keys = *new);
        }
        // A cache without rows is no call of a kernel's.
        let apart = [apart[0], apart[1].max(1)];
        let [query, kv, _] = case.heads;
        let view = case.view.map(|view| CacheView { heads_outside: false, ..view });
        PagedReadCase {
            heads: [query, kv, size],
            sequences,
            block_size: 1,
            quantized: None,
            tree_mask: false,
            rotates: false,
            counts_new: true,
            window: case.window.filter(|_| case.causal || size == value_size),
            // Other kernels read a copy of values that lie as keys do.
            view: view.filter(|_| size != value_size),
            rows: Some(Rows { value_size, apart }),
            ..case
        }
    };
    let cases = paged_reads(dtype, &[16], 24);
    (cases, sequences, any::<bool>(), sizes, [apart.clone(), apart]).prop_map(packed).boxed()
}

/// These calls with a bound that may be less than a sequence's tokens. Some calls append, but not
/// to a quantized cache, where the quantized value of a new key may round either way.
pub fn cut_off(cases: BoxedStrategy<PagedReadCase>) -> BoxedStrategy<PagedReadCase> {
    let cut = |(mut case, appends, share): (PagedReadCase, bool, f64)| {
        case.appends = appends && case.quantized.is_none();
        if case.appends {
            case.sequences.iter_mut().for_each(|[keys, new]| *keys = *(&*keys).max(new));
        }
        let bound = (share * case.most_tokens() as f64) as usize;
        // Causal, so that no token sees one that is cut off.
        PagedReadCase { bound: Some(bound.max(1)), causal: true, tree_mask: false, ..case }
    };
    (cases, any::<bool>(), 0.0..=1.0).prop_map(cut).boxed()
}

/// A GPU back end that does not check lengths before the launch.
#[derive(Debug)]
pub struct Unchecked<M>(pub M, pub PlanOptions);

impl<M: Machine> Backend for Unchecked<M> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        self.0.execute(&plan(problem, self.0.target(), &self.1)?, io)
    }
}

/// These calls with tables that lead outside of the cache.
pub fn reads_with_gaps(cases: BoxedStrategy<PagedReadCase>) -> BoxedStrategy<PagedReadCase> {
    cases.prop_map(|case| PagedReadCase { gaps: true, ..case }).boxed()
}

impl PagedReadCase {
    fn strides(&self, view: CacheView) -> RowStrides {
        let [_, kv_heads, size] = self.heads;
        let (dtype, per_element) = match self.quantized {
            Some(how) => (how.dtype(), how.codes_per_element()),
            None => (self.dtype, 1),
        };
        view.strides(dtype, [kv_heads, self.block_size, size / per_element])
    }

    /// Strides of packed keys and values, which differ.
    fn row_strides(&self, view: CacheView, Rows { value_size, .. }: Rows) -> [RowStrides; 2] {
        let [_, kv, size] = self.heads;
        let [inside, outside, behind] = view.apart;
        let of_values = CacheView { apart: [outside, behind, inside], ..view };
        [(view, size), (of_values, value_size)].map(|(view, size)| {
            let strides = view.strides(self.dtype, [kv, 1, size]);
            RowStrides { row: strides.batch, ..strides }
        })
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|[_, new]| new).sum()
    }

    fn most_tokens(&self) -> usize {
        self.sequences.iter().map(|[_, new]| *new).max().unwrap_or(0)
    }

    fn longest(&self) -> usize {
        self.sequences.iter().map(|[keys, new]| *keys.max(new)).max().unwrap_or(0)
    }

    /// What a tensor has along `axis` for tokens within the bound.
    fn computed(&self, tensor: &Tensor, axis: usize) -> Tensor {
        let Some(bound) = self.bound else { return tensor.clone() };
        let is_computed = self.sequences.iter().flat_map(|&[_, new]| (0..new).map(|i| i < bound));
        let tokens: Vec<_> =
            is_computed.enumerate().filter_map(|(token, is)| is.then_some(token)).collect();
        let values = tensor.to_f64().into_iter().map(|x| x as f32).collect();
        let values = ArrayD::from_shape_vec(tensor.shape(), values).expect("as many");
        let values = values.select(Axis(axis), &tokens);
        let contiguous: Vec<_> = values.iter().copied().collect();
        Tensor::from_f32(tensor.dtype(), values.shape(), &contiguous).expect("as many")
    }

    /// Blocks of a sequence, and in all.
    fn blocks(&self) -> [usize; 2] {
        if let Some(Rows { apart: [before, behind], .. }) = self.rows {
            let rows = self.sequences.iter().map(|[keys, _]| keys + before).sum::<usize>();
            return [1, rows + behind];
        }
        let columns = self.longest().div_ceil(self.block_size) + 1;
        [columns, columns * self.sequences.len() + 2]
    }

    fn layer(&self) -> Layer {
        let [query, kv, size] = self.heads;
        let mut layer = match self.latent {
            Some(values) => Layer::latent(self.dtype, LatentHeads { query, size, values }, 0.1),
            None => Layer::new(self.dtype, Heads { query, kv, size }),
        };
        if !self.causal {
            layer = layer.bidirectional();
        }
        if let Some(how) = self.quantized {
            layer = layer.quantized(how);
        }
        if let Some(window) = self.window {
            layer = layer.window(window);
        }
        if self.head_sink {
            layer = layer.sink(Sink::PerHead);
        }
        if self.rotates { layer.rope(Rope::new(16, self.longest() + 1)) } else { layer }
    }
}

/// A call's tensors.
struct Given {
    query: Tensor,
    /// Of the new tokens, where the call appends.
    new: Option<[Tensor; 2]>,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    rotary: Option<[Tensor; 2]>,
    head_sink: Option<Tensor>,
    scales: Option<Tensor>,
    words: Option<Tensor>,
    /// NaN, or quantized values with all bits set, where no sequence has keys.
    cache: [Tensor; 2],
}

impl Given {
    fn new(case: &PagedReadCase) -> Self {
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let [heads, kv, size] = case.heads;
        let before = |b: usize| case.sequences[..b].iter().map(|[_, new]| *new as i32).sum();
        let starts: Vec<i32> = (0..=case.sequences.len()).map(before).collect();
        let lengths = case
            .sequences
            .iter()
            .map(|&[keys, new]| keys as i32 - if case.counts_new { 0 } else { new as i32 });
        let (table, held) = match case.rows {
            Some(rows) => Self::rows(case, rows, &mut data),
            None => Self::table(case, &mut data),
        };
        let cache = Self::cache(case, &mut data, &held);
        let scales = case.quantized.map(|how| {
            let most = match how.format {
                QuantFormat::Int8 => 128.0,
                QuantFormat::Int4 => 8.0,
                QuantFormat::Float8 => 16.0,
                QuantFormat::Float4 => 6.0,
            };
            let mut scale = || data.rng.random_range(1.0..2.0f32) / most;
            let scales: Vec<_> = match how.scales.count(kv, size) {
                Some(count) => (0..count).map(|_| scale()).collect(),
                None => (0..held.len() * kv)
                    .map(|row| if held[row / kv] { scale() } else { f32::NAN })
                    .collect(),
            };
            arr1(&scales).into()
        });
        let angles = [(); 2].map(|()| data.normal(&[case.longest() + 1, 8], 1.0));
        Self {
            query: data.normal(&[case.tokens(), heads * size], 1.0),
            new: case
                .appends
                .then(|| [(); 2].map(|()| data.normal(&[case.tokens(), kv * size], 1.0))),
            starts: arr1(&starts).into(),
            lengths: arr1(&lengths.collect::<Vec<_>>()).into(),
            table,
            rotary: case.rotates.then_some(angles),
            head_sink: case.head_sink.then(|| data.normal(&[heads], 2.0)),
            scales,
            words: case.tree_mask.then(|| {
                let words = (0..case.tokens()).map(|_| data.rng.random::<i64>());
                arr1(&words.collect::<Vec<_>>()).into()
            }),
            cache,
        }
    }

    /// The first row of each sequence of packed keys, and which rows are keys.
    fn rows(
        case: &PagedReadCase,
        Rows { apart, .. }: Rows,
        data: &mut Data,
    ) -> (Tensor, Vec<bool>) {
        let [_, rows] = case.blocks();
        let (mut held, mut firsts, mut next) = (vec![false; rows], Vec::new(), 0);
        for [keys, _] in &case.sequences {
            next += apart[0];
            let is_outside = case.gaps && data.rng.random::<bool>();
            let outside = [i32::MIN, -1, rows as i32, i32::MAX];
            let outside = outside[data.rng.random_range(0..outside.len())];
            firsts.push(if is_outside { outside } else { next as i32 });
            held[next..next + keys].fill(!is_outside);
            next += keys;
        }
        let table = Array2::from_shape_vec((firsts.len(), 1), firsts);
        (table.expect("as many").into(), held)
    }

    /// The block table, and which rows of the blocks are keys.
    fn table(case: &PagedReadCase, data: &mut Data) -> (Tensor, Vec<bool>) {
        let [columns, blocks] = case.blocks();
        let mut order: Vec<_> = (0..blocks as i32).collect();
        order.shuffle(&mut data.rng);
        let mut table = order[..case.sequences.len() * columns].to_vec();
        let mut held = vec![false; blocks * case.block_size];
        for (row, [keys, _]) in table.chunks_exact_mut(columns).zip(&case.sequences) {
            if case.gaps {
                put_gaps(&mut row[..keys.div_ceil(case.block_size)], blocks, &mut data.rng);
            }
            for key in 0..*keys {
                let block = usize::try_from(row[key / case.block_size]).unwrap_or(blocks);
                if block < blocks {
                    held[block * case.block_size + key % case.block_size] = true;
                }
            }
        }
        let table = Array2::from_shape_vec((case.sequences.len(), columns), table);
        (table.expect("as many").into(), held)
    }

    /// Keys and values.
    fn cache(case: &PagedReadCase, data: &mut Data, held: &[bool]) -> [Tensor; 2] {
        let ([_, kv, size], [_, blocks]) = (case.heads, case.blocks());
        let mut cache = |size| {
            let shape = [blocks, case.block_size, kv, size];
            match case.quantized {
                Some(how) => data.codes(&shape, how, held),
                None => data.held_rows(&shape, 1.0, held),
            }
        };
        let keys = cache(size);
        let values = match case.latent {
            Some(_) => Tensor::zeros(case.dtype, &[0]),
            None => cache(case.rows.map_or(size, |rows| rows.value_size)),
        };
        [keys, values]
    }

    /// Output, and log-sum-exps on request, of the call on `backend`.
    fn run(&self, problem: &Problem, backend: &dyn Backend) -> Result<(Tensor, Option<Tensor>)> {
        let mut output = poisoned(problem.dtype, &problem.output_shape());
        let mut lse = problem.lse.then(|| poisoned(DType::F32, &problem.lse_shape()));
        let [mut present_key, mut present_value] = self.cache.clone();
        let rotary = self.rotary.as_ref();
        let of_rows = self.scales.as_ref().filter(|_| problem.has_row_scales());
        let none = Tensor::zeros(DType::F32, &[0]);
        let of_values = |scales: &Tensor| if problem.latent { none } else { scales.clone() };
        let mut of_rows = of_rows.map(|scales| [scales.clone(), of_values(scales)]);
        let of_all = self.scales.as_ref().filter(|_| !problem.has_row_scales());
        let new = self.new.as_ref();
        let inputs = Tensors::default()
            .with(TensorId::Query, &self.query)
            .with(TensorId::Key, new.map(|[key, _]| key))
            .with(TensorId::Value, new.map(|[_, value]| value))
            .with(TensorId::SeqlensK, &self.lengths)
            .with(TensorId::CumulativeSequenceLength, &self.starts)
            .with(TensorId::BlockTable, &self.table)
            .with(TensorId::CosCache, rotary.map(|[cos, _]| cos))
            .with(TensorId::SinCache, rotary.map(|[_, sin]| sin))
            .with(TensorId::KScale, of_all)
            .with(TensorId::VScale, of_all.filter(|_| !problem.latent))
            .with(TensorId::TreeMask, self.words.as_ref())
            .with(TensorId::HeadSink, self.head_sink.as_ref());
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key: &mut present_key,
            present_value: &mut present_value,
            row_scales: of_rows.as_mut().map(|scales| scales.each_mut()),
            output_qk: None,
            lse: lse.as_mut(),
        };
        backend.run(problem, &mut io)?;
        Ok((output, lse))
    }
}

impl Parity for PagedReadCase {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn problem(&self) -> Result<Problem> {
        let [columns, blocks] = self.blocks();
        let (sequences, tokens) = (self.sequences.len(), self.tokens());
        let call = match self.rows {
            Some(rows) => Paged::in_rows(sequences, tokens, blocks).value_size(rows.value_size),
            None => Paged::new(sequences, tokens, [blocks, self.block_size, columns]),
        };
        let call = call.most_tokens(self.bound.unwrap_or(self.most_tokens()));
        // A call that appends nothing may have more tokens of a sequence than it has keys.
        let keys = self.sequences.iter().map(|[keys, _]| *keys).max().unwrap_or(0);
        let call = match self.appends {
            true => call.longest(self.longest()),
            false => call.longest(keys).appended(),
        };
        let call = if self.counts_new { call.total_lengths() } else { call };
        let call = if self.tree_mask { call.tree_mask() } else { call };
        // Rows that have scales lie side by side.
        let by_token = self.quantized.is_some_and(|how| how.scales == Scales::PerToken);
        let call = match (self.view.filter(|_| !by_token), self.rows) {
            (Some(view), Some(rows)) => call.row_strides(self.row_strides(view, rows)),
            (Some(view), None) => call.cache_strides(self.strides(view)),
            (None, _) => call,
        };
        self.layer().paged(if self.lse { call.log_sum_exp() } else { call })
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let given = Given::new(self);
        let run = move |case: &PagedReadCase, backend: &dyn Backend| {
            let result = case.problem().and_then(|problem| given.run(&problem, backend));
            let (output, lse) = result.map_err(|e| format!("{}: {e}", backend.name()))?;
            Ok::<_, String>((self.computed(&output, 0), lse.map(|lse| self.computed(&lse, 1))))
        };
        let (want, want_lse) = run(&PagedReadCase { bound: None, ..self.clone() }, &Reference)?;
        let tolerance = match self.dtype {
            DType::F16 => Tolerance { absolute: 8e-3, relative: 4e-3 },
            DType::BF16 => Tolerance { absolute: 4e-2, relative: 2e-2 },
            _ => Tolerance { absolute: 2e-5, relative: 1e-4 },
        };
        Ok(Box::new(move |backend| {
            let (got, got_lse) = run(self, backend)?;
            optional("lse", &got_lse, &want_lse, tolerance)?;
            tensors("output", &got, &want, tolerance)
        }))
    }
}
