//! Calls described by numbers on the command line, and made-up tensors for them.

mod blocks;

use anyhow::{Context, Result, bail};
use gqa_host::backend::Io;
use gqa_host::op::{GroupQueryAttention, QuantType, Shapes};
use gqa_host::plan::TensorId;
use gqa_host::{
    CacheBinding, DType, Error, Problem, QuantFormat, Quantization, Scales, Tensor, TensorDesc,
};
use ndarray::Array1;

use crate::input::Noise;
use crate::options::{count, magnitude, number, whole};
use crate::usage::Usage;

/// Names of attributes and tensors, and the options that say what they are.
const OPTIONS: [(&str, &str); 13] = [
    ("num_heads", "--heads"),
    ("kv_num_heads", "--kv-heads"),
    ("head_size", "--head-size"),
    ("local_window_size", "--window"),
    ("sliding_window_cache", "--sliding-cache"),
    ("softcap", "--softcap"),
    ("scale", "--scale"),
    ("cos_cache", "--rotary"),
    ("query", "--batch, --query-length"),
    ("key", "--batch, --query-length"),
    ("sequence_length", "--query-length"),
    ("total_sequence_length", "--batch, --past-length"),
    ("past_key", "--batch, --past-length"),
];

/// The option that says what an attribute or a tensor is.
fn option(name: &str) -> Option<&'static str> {
    OPTIONS.iter().find_map(|(onnx, option)| (*onnx == name).then_some(*option))
}

/// A text with options for attributes and tensors. Names of one word may be no names.
fn with_options(text: &str) -> String {
    let of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| of_name(c) != of_name(first)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        words.push(option(word).filter(|_| word.contains('_')).unwrap_or(word));
        rest = behind;
    }
    words.concat().replace("--sliding-cache is 1", "there is --sliding-cache")
}

/// `--dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Element {
    /// float32
    #[value(alias = "float32")]
    F32,
    /// float16
    #[value(alias = "float16")]
    F16,
    /// bfloat16
    #[value(alias = "bfloat16")]
    Bf16,
}

impl From<Element> for DType {
    fn from(element: Element) -> Self {
        match element {
            Element::F32 => Self::F32,
            Element::F16 => Self::F16,
            Element::Bf16 => Self::BF16,
        }
    }
}

/// `--rotary`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Rotation {
    /// Q and K come as they are.
    None,
    /// Pairs (i, i + half).
    Half,
    /// Pairs (2i, 2i + 1).
    Interleaved,
}

/// `--scales`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ScalesPer {
    /// all of the cache
    Tensor,
    /// a KV head
    Head,
    /// an element of a KV head
    Channel,
    /// a row of the cache: a token's of a KV head
    Token,
}

impl From<ScalesPer> for Scales {
    fn from(per: ScalesPer) -> Self {
        match per {
            ScalesPer::Tensor => Self::PerTensor,
            ScalesPer::Head => Self::PerHead,
            ScalesPer::Channel => Self::PerChannel,
            ScalesPer::Token => Self::PerToken,
        }
    }
}

/// `--kv-cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Codes {
    /// int8
    Int8,
    /// 4-bit integers, two to a byte
    Int4,
    /// float8e4m3fn
    #[value(alias = "float8e4m3fn")]
    Float8,
    /// float4e2m1, two to a byte
    #[value(alias = "float4e2m1")]
    Float4,
}

impl Codes {
    fn dtype(self) -> DType {
        match self {
            Self::Int8 => DType::I8,
            Self::Int4 | Self::Float4 => DType::U8,
            Self::Float8 => DType::F8E4M3,
        }
    }

    fn format(self) -> QuantFormat {
        match self {
            Self::Int8 => QuantFormat::Int8,
            Self::Int4 => QuantFormat::Int4,
            Self::Float8 => QuantFormat::Float8,
            Self::Float4 => QuantFormat::Float4,
        }
    }

    fn bits(self) -> i64 {
        match self {
            Self::Int4 | Self::Float4 => 4,
            Self::Int8 | Self::Float8 => 8,
        }
    }

    /// Quantized values of an element of a cache.
    fn of_element(self) -> usize {
        8 / self.bits() as usize
    }

    /// A scale with which standard normal numbers have quantized values of all sizes.
    fn scale(self) -> f32 {
        match self {
            Self::Int8 => 1.0 / 40.0,
            Self::Int4 => 3.0 / 8.0,
            Self::Float8 => 1.0 / 16.0,
            Self::Float4 => 1.0 / 2.0,
        }
    }
}

/// Heads, element type and attributes.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Layer {
    /// Query heads.
    #[arg(long, default_value_t = 32, value_parser = count(65_535))]
    pub heads: u64,
    /// KV heads.
    #[arg(long, default_value_t = 8, value_parser = count(65_535))]
    pub kv_heads: u64,
    /// Elements of a head.
    #[arg(long, default_value_t = 128, value_parser = count(4096))]
    pub head_size: u64,
    /// Element type.
    #[arg(skip = Element::Bf16)]
    pub dtype: Element,
    /// Query, key and value are one tensor.
    #[arg(long)]
    pub packed: bool,
    /// The cache holds the new rows already: attention alone, nothing to append.
    #[arg(long, conflicts_with = "packed")]
    pub cached: bool,
    /// The launch ahead of a call writes nothing of it but query, key and value: a decode step may
    /// read its cache while that one ends.
    #[arg(long)]
    pub prefetch_cache: bool,
    /// Output of type float32, whatever the inputs'.
    #[arg(long)]
    pub float32_output: bool,
    /// Output of type float8e4m3fn, times a scale.
    #[arg(long, conflicts_with = "float32_output")]
    pub float8_output: bool,
    /// Rotary embedding of whole heads.
    #[arg(long, value_enum, default_value_t = Rotation::None)]
    pub rotary: Rotation,
    /// Rows of query and key divided by their root mean square before they rotate.
    #[arg(long)]
    pub qk_norm: bool,
    /// The cache holds quantized values.
    #[arg(long, value_enum)]
    pub kv_cache: Option<Codes>,
    /// What each scale of a quantized cache is for; without this option one is for all of it.
    #[arg(long, value_enum, requires = "kv_cache")]
    pub scales: Option<ScalesPer>,
    /// Over a cache of float8 the products may be of float8 too: queries and weights are rounded to
    /// it.
    #[arg(long, requires = "kv_cache", conflicts_with = "block_size")]
    pub float8_products: bool,
    /// Newest keys a query sees, its own included; -1: all.
    #[arg(long, default_value_t = -1, value_parser = whole(-1..=i64::MAX))]
    pub window: i64,
    /// The cache rolls: it has this many rows, the newest of a sequence, which may be longer.
    #[arg(long, value_parser = count(1 << 31))]
    pub sliding_cache: Option<u64>,
    /// The cache consists of blocks of this many rows, scattered (PagedAttention).
    #[arg(long, value_parser = count(1 << 31), conflicts_with_all = ["cached", "prefetch_cache", "float32_output", "float8_output", "sliding_cache", "smooth_softmax"])]
    pub block_size: Option<u64>,
    /// Scores become softcap * tanh(score / softcap); 0: off.
    #[arg(long, default_value_t = 0.0, value_parser = magnitude::<f32>)]
    pub softcap: f32,
    /// Factor on q.k; 0: 1 / sqrt(head size).
    #[arg(long, default_value_t = 0.0, value_parser = number)]
    pub scale: f32,
    /// A logit of 0 joins every softmax.
    #[arg(long)]
    pub smooth_softmax: bool,
    /// Queries see later keys too.
    #[arg(long)]
    pub bidirectional: bool,
    /// A mask over the new tokens says what they see of each other: those before them, as in a
    /// causal call.
    #[arg(long, conflicts_with_all = ["bidirectional", "sliding_cache"])]
    pub tree_mask: bool,
}

/// With which the output of a single standard normal value is no larger than float8e4m3fn has
/// numbers.
pub const OUTPUT_SCALE: f32 = 0.02;

impl Layer {
    /// The layer of Llama 3 8B.
    pub fn llama3_8b(dtype: Element) -> Self {
        Self {
            heads: 32,
            kv_heads: 8,
            head_size: 128,
            dtype,
            packed: false,
            cached: false,
            prefetch_cache: false,
            float32_output: false,
            float8_output: false,
            rotary: Rotation::Half,
            qk_norm: false,
            kv_cache: None,
            scales: None,
            float8_products: false,
            window: -1,
            sliding_cache: None,
            block_size: None,
            softcap: 0.0,
            scale: 0.0,
            smooth_softmax: false,
            bidirectional: false,
            tree_mask: false,
        }
    }

    /// The operator, with that many heads.
    pub fn op(&self, heads: u64, kv_heads: u64) -> GroupQueryAttention {
        GroupQueryAttention::new(heads as i64, kv_heads as i64)
            .scale(self.scale)
            .softcap(self.softcap)
            .local_window_size(self.window)
            .sliding_window_cache(self.sliding_cache.is_some())
            .causal(i64::from(!self.bidirectional))
            .do_rotary(self.rotary != Rotation::None)
            .rotary_interleaved(self.rotary == Rotation::Interleaved)
            .smooth_softmax(self.smooth_softmax)
            .k_quant_type(self.quant_type())
            .v_quant_type(self.quant_type())
            .kv_cache_bit_width(self.kv_cache.map_or(0, Codes::bits))
            .float4_cache(self.kv_cache == Some(Codes::Float4))
            .prefetch_cache(self.prefetch_cache)
            .float32_output(self.float32_output)
            .float8_products(self.float8_products)
    }

    fn quant_type(&self) -> QuantType {
        self.kv_cache.map(|_| self.scales_per()).into()
    }

    /// The cache's, if it is quantized.
    pub fn quantization(&self) -> Option<Quantization> {
        let scales = self.scales_per();
        self.kv_cache.map(|codes| Quantization { format: codes.format(), scales })
    }

    fn scales_per(&self) -> Scales {
        self.scales.map_or(Scales::PerTensor, Scales::from)
    }

    /// Shape of k_scale, and of v_scale, where the cache is quantized and has that shape.
    fn scale_shape(&self, [cache @ .., _]: [usize; 4]) -> Vec<usize> {
        let count = self.scales_per().count(self.kv_heads as usize, self.head_size as usize);
        count.map_or(cache.to_vec(), |count| vec![count])
    }

    /// An error of a call that options describe, by their names.
    fn by_option(&self, error: Error) -> anyhow::Error {
        let Self { heads, kv_heads, head_size, .. } = *self;
        let (option, got, allowed) = match error {
            Error::Invalid { .. } if heads % kv_heads != 0 => {
                ("--kv-heads", kv_heads.to_string(), format!("a divisor of --heads = {heads}"))
            }
            Error::Invalid { .. } if head_size % 8 != 0 => {
                ("--head-size", head_size.to_string(), "a multiple of 8".to_owned())
            }
            Error::Invalid { argument: "past_key", got, allowed }
                if self.sliding_cache.is_some() =>
            {
                ("--batch, --sliding-cache", got, with_options(&allowed))
            }
            // An attribute that is told by a tensor.
            Error::Invalid { ref got, ref allowed, .. } if got.starts_with("head_size ") => {
                let size = got.replace("head_size ", "");
                ("--head-size", size, allowed.replace("a head_size that is ", ""))
            }
            Error::Invalid { argument, got, allowed } => match option(argument) {
                Some(option) => (option, with_options(&got), with_options(&allowed)),
                None => return Error::Invalid { argument, got, allowed }.into(),
            },
            other => return other.into(),
        };
        Usage(format!("{option}: got {got}; allowed: {allowed}")).into()
    }

    /// Attributes that are not at their defaults, in words.
    pub fn features(&self) -> String {
        let mut features = String::new();
        for (present, text) in [
            (self.packed, " packed".to_owned()),
            (self.cached, " cached".to_owned()),
            (self.prefetch_cache, " prefetch_cache".to_owned()),
            (self.float32_output, " float32-output".to_owned()),
            (self.float8_output, " float8-output".to_owned()),
            (self.qk_norm, " qk-norm".to_owned()),
            (self.kv_cache == Some(Codes::Int8), " int8-cache".to_owned()),
            (self.kv_cache == Some(Codes::Int4), " int4-cache".to_owned()),
            (self.kv_cache == Some(Codes::Float8), " float8-cache".to_owned()),
            (self.kv_cache == Some(Codes::Float4), " float4-cache".to_owned()),
            (self.scales == Some(ScalesPer::Head), " per-head".to_owned()),
            (self.scales == Some(ScalesPer::Channel), " per-channel".to_owned()),
            (self.scales == Some(ScalesPer::Token), " per-token".to_owned()),
            (self.float8_products, " float8-products".to_owned()),
            (self.rotary == Rotation::Half, " rotary".to_owned()),
            (self.rotary == Rotation::Interleaved, " rotary-interleaved".to_owned()),
            (self.window >= 0, format!(" window={}", self.window)),
            (
                self.sliding_cache.is_some(),
                format!(" sliding-cache={}", self.sliding_cache.unwrap_or(0)),
            ),
            (self.block_size.is_some(), format!(" blocks={}", self.block_size.unwrap_or(0))),
            (self.softcap != 0.0, format!(" softcap={}", self.softcap)),
            (self.scale != 0.0, format!(" scale={}", self.scale)),
            (self.smooth_softmax, " smooth-softmax".to_owned()),
            (self.bidirectional, " bidirectional".to_owned()),
            (self.tree_mask, " tree-mask".to_owned()),
        ] {
            if present {
                features.push_str(&text);
            }
        }
        features
    }

    /// Base of the rotary angles (Llama 3's).
    const ROTARY_BASE: f64 = 500_000.0;

    /// cos_cache and sin_cache for positions below `positions`.
    pub fn rotary_caches(&self, positions: usize) -> Result<Option<(Tensor, Tensor)>> {
        if self.rotary == Rotation::None {
            return Ok(None);
        }
        let half = self.head_size as usize / 2;
        let table = |f: fn(f64) -> f64| -> Result<Tensor> {
            let angle =
                |p: usize, i: usize| p as f64 * Self::ROTARY_BASE.powf(-(i as f64) / half as f64);
            let values: Vec<f32> =
                (0..positions * half).map(|x| f(angle(x / half, x % half)) as f32).collect();
            let table = Tensor::from_f32(self.dtype.into(), &[positions, half], &values);
            Ok(table?)
        };
        Ok(Some((table(f64::cos)?, table(f64::sin)?)))
    }
}

/// Sizes of a call.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Sizes {
    /// Sequences.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 24))]
    batch: u64,
    /// Element type.
    #[arg(long, value_enum, default_value_t = Element::Bf16)]
    dtype: Element,
    /// New rows of each sequence [default: 1, a decode step].
    #[arg(long, value_parser = count(1 << 31))]
    query_length: Option<u64>,
    /// Rows in the cache before [default: 0 with --query-length, else 8191].
    #[arg(long, value_parser = whole(0..=(1u64 << 31) - 1))]
    past_length: Option<u64>,
}

impl Sizes {
    /// The call of these sizes through a layer of this element type.
    pub fn shape(&self, layer: Layer) -> Shape {
        /// Of a call that nothing is said of.
        const PAST_LENGTH: u64 = 8191;
        let past = self.query_length.map_or(PAST_LENGTH, |_| 0);
        let (query, past) = (self.query_length.unwrap_or(1), self.past_length.unwrap_or(past));
        let [batch, query, past] = [self.batch, query, past].map(|n| n as usize);
        Shape::new(Layer { dtype: self.dtype, ..layer }, batch, query, past)
    }

    /// The call of sequences with that many rows before it, by the longest of them.
    pub fn of_lengths(&self, layer: Layer, lengths: &[usize]) -> Shape {
        let past = lengths.iter().copied().max().unwrap_or_default();
        let query = self.query_length.unwrap_or(1) as usize;
        Shape::new(Layer { dtype: self.dtype, ..layer }, lengths.len(), query, past)
    }
}

/// A call with a shared cache in which all sequences have the same length.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads and attributes.
    pub layer: Layer,
    /// Sequences.
    pub batch: usize,
    /// New rows.
    pub query_length: usize,
    /// Rows in the cache before.
    pub past_length: usize,
    /// Rows of the cache.
    pub capacity: usize,
}

impl Shape {
    /// A call whose cache is full afterwards, unless that rolls.
    pub fn new(layer: Layer, batch: usize, query_length: usize, past_length: usize) -> Self {
        let capacity = layer.sliding_cache.map_or(query_length + past_length, |rows| rows as usize);
        Self { layer, batch, query_length, past_length, capacity }
    }

    /// Rows of a sequence afterwards.
    pub fn total(&self) -> usize {
        self.query_length + self.past_length
    }

    /// Positions that rows may have.
    fn positions(&self) -> usize {
        self.total().max(self.capacity)
    }

    /// The validated call with a shared cache; no memory of its size is needed.
    pub fn problem(&self) -> Result<Problem> {
        let problem = match self.layer.block_size {
            Some(block_size) => {
                self.paged_problem(block_size as usize, self.batch * self.query_length)?
            }
            None => self.bound(CacheBinding::Shared, self.capacity)?,
        };
        Ok(if self.layer.tree_mask { problem.with_tree_mask()? } else { problem })
    }

    /// The validated call over a paged KV cache. All sequences together have `tokens` tokens, the
    /// longest one `query_length`.
    pub fn ragged_problem(&self, tokens: usize) -> Result<Problem> {
        let most = self.batch * self.query_length;
        let block_size = match self.layer.block_size {
            Some(block_size) if (self.query_length..=most).contains(&tokens) => block_size,
            _ => {
                let allowed = format!("{} to {most} with --block-size", self.query_length);
                bail!(Usage(format!("--tokens: got {tokens}; allowed: {allowed}")));
            }
        };
        self.paged_problem(block_size as usize, tokens)
    }

    /// The validated call with different tensors for past and present.
    pub fn separate_problem(&self) -> Result<Problem> {
        let past_rows = self.layer.sliding_cache.map_or(self.past_length, |_| self.capacity);
        self.bound(CacheBinding::Separate, past_rows)
    }

    fn bound(&self, cache: CacheBinding, past_rows: usize) -> Result<Problem> {
        let Layer { heads, kv_heads, head_size, .. } = self.layer;
        let dtype = self.layer.dtype.into();
        let desc = |shape| TensorDesc { dtype, shape };
        let rows = |count, heads: u64| [self.batch, count, (heads * head_size) as usize];
        let query = rows(self.query_length, heads);
        let key = rows(if self.layer.cached { 0 } else { self.query_length }, kv_heads);
        let packed = rows(self.query_length, heads + 2 * kv_heads);
        let codes = self.layer.kv_cache;
        let width = head_size as usize / codes.map_or(1, Codes::of_element);
        let past = [self.batch, kv_heads as usize, past_rows, width];
        let scale = self.layer.scale_shape(past);
        let scale = codes.map(|_| TensorDesc { dtype: DType::F32, shape: &scale });
        let one = TensorDesc { dtype: DType::F32, shape: &[1] };
        let table = [self.positions(), head_size as usize / 2];
        let weight = [head_size as usize];
        let seqlens_k = TensorDesc { dtype: DType::I32, shape: &[self.batch] };
        let separate = (!self.layer.packed).then_some(desc(&key));
        let past = (past_rows > 0 || codes.is_some())
            .then_some(TensorDesc { dtype: codes.map_or(dtype, Codes::dtype), shape: &past });
        let table = (self.layer.rotary != Rotation::None).then_some(desc(&table));
        let weight = self.layer.qk_norm.then_some(desc(&weight));
        let query = desc(if self.layer.packed { &packed } else { &query });
        let shapes = Shapes {
            key: separate,
            value: separate,
            past_key: past,
            past_value: past,
            cos_cache: table,
            sin_cache: table,
            k_scale: scale,
            v_scale: scale,
            q_norm_weight: weight,
            k_norm_weight: weight,
            output_scale: self.layer.float8_output.then_some(one),
            ..Shapes::new(query, seqlens_k, self.total())
        };
        let problem = self.layer.op(heads, kv_heads).problem_from_shapes(&shapes, cache);
        problem.map_err(|error| self.layer.by_option(error))
    }

    /// Random tensors for every role that `problem` has; outputs are zero.
    pub fn tensors(&self, problem: &Problem, noise: &mut Noise) -> Result<Tensors> {
        self.drawn(problem, noise, Noise::whole)
    }

    /// The same for a GPU: the KV caches have only what is repeated there.
    pub fn tensors_for_gpu(&self, problem: &Problem, noise: &mut Noise) -> Result<Tensors> {
        self.drawn(problem, noise, Noise::block)
    }

    /// The same with KV caches that are drawn like that.
    fn drawn(
        &self,
        problem: &Problem,
        noise: &mut Noise,
        cache: impl Fn(&mut Noise, DType, &[usize]) -> Result<Tensor>,
    ) -> Result<Tensors> {
        let mut tensors = Tensors(Vec::new());
        for id in TensorId::ALL {
            let Some(spec) = id.spec(problem) else { continue };
            let tensor = match id {
                TensorId::SeqlensK => lengths(self.batch, self.total()).0,
                TensorId::Output => Tensor::try_zeros(id.name(), spec.dtype, &spec.shape)?,
                TensorId::CosCache | TensorId::SinCache => continue,
                TensorId::CumulativeSequenceLength | TensorId::BlockTable => continue,
                TensorId::KScale | TensorId::VScale | TensorId::KRowScale | TensorId::VRowScale => {
                    let scale = self.layer.kv_cache.map_or(1.0, Codes::scale);
                    Array1::from_elem(spec.len(), scale).into()
                }
                TensorId::OutputScale => Array1::from_elem(1, OUTPUT_SCALE).into(),
                TensorId::TreeMask => {
                    let word = |i: usize| (u64::MAX >> (63 - i % self.query_length)) as i64;
                    let words =
                        Array1::from_shape_fn(spec.len(), word).into_shape_clone(spec.shape)?;
                    Tensor::from(words.into_dyn())
                }
                TensorId::PresentKey | TensorId::PresentValue => {
                    cache(noise, spec.dtype, &spec.shape)?
                }
                _ => noise.whole(spec.dtype, &spec.shape)?,
            };
            tensors.set(id, tensor);
        }
        if let Some((cos, sin)) = self.layer.rotary_caches(self.positions())? {
            tensors.set(TensorId::CosCache, cos);
            tensors.set(TensorId::SinCache, sin);
        }
        if let Some(block_size) = self.layer.block_size {
            self.set_pages(block_size as usize, &mut tensors, noise)?;
        }
        Ok(tensors)
    }
}

/// seqlens_k and total_sequence_length of `batch` sequences of `total` rows.
pub fn lengths(batch: usize, total: usize) -> (Tensor, Tensor) {
    let last = i32::try_from(total).unwrap_or(i32::MAX) - 1;
    (Array1::from_elem(batch, last).into(), Array1::from_elem(1, last + 1).into())
}

/// Host tensors by role.
#[derive(Clone, Debug, Default)]
pub struct Tensors(Vec<(TensorId, Tensor)>);

impl Tensors {
    /// The tensor of that role.
    pub fn get(&self, id: TensorId) -> Option<&Tensor> {
        self.0.iter().find_map(|(have, tensor)| (*have == id).then_some(tensor))
    }

    /// The tensor of that role, which must be there.
    pub fn expect(&self, id: TensorId) -> Result<&Tensor> {
        self.get(id).with_context(|| format!("no {}", id.name()))
    }

    /// The tensor of that role, which must be there, to be written.
    pub fn expect_mut(&mut self, id: TensorId) -> Result<&mut Tensor> {
        let tensor = self.0.iter_mut().find_map(|(have, tensor)| (*have == id).then_some(tensor));
        tensor.with_context(|| format!("no {}", id.name()))
    }

    /// Puts a tensor in that role.
    pub fn set(&mut self, id: TensorId, tensor: Tensor) {
        self.0.retain(|(have, _)| *have != id);
        self.0.push((id, tensor));
    }

    /// Takes the tensor out of that role.
    pub fn take(&mut self, id: TensorId) -> Result<Tensor> {
        let at = self.0.iter().position(|(have, _)| *have == id);
        let at = at.with_context(|| format!("no {}", id.name()))?;
        Ok(self.0.swap_remove(at).1)
    }

    /// All tensors.
    pub fn iter(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        self.0.iter().map(|(id, tensor)| (*id, tensor))
    }

    /// Calls `run` with these tensors as a call with a shared cache.
    pub fn with_io<T>(
        &mut self,
        run: impl FnOnce(&mut Io<'_>) -> gqa_host::Result<T>,
    ) -> Result<T> {
        let mut output = self.take(TensorId::Output)?;
        let mut present_key = self.take(TensorId::PresentKey)?;
        let mut present_value = self.take(TensorId::PresentValue)?;
        let mut row_scales = match self.get(TensorId::KRowScale) {
            Some(_) => Some([self.take(TensorId::KRowScale)?, self.take(TensorId::VRowScale)?]),
            None => None,
        };
        let mut io = Io {
            inputs: self.iter().collect(),
            output: &mut output,
            present_key: &mut present_key,
            present_value: &mut present_value,
            row_scales: row_scales.as_mut().map(|scales| scales.each_mut()),
            output_qk: None,
            lse: None,
        };
        let result = run(&mut io);
        self.set(TensorId::Output, output);
        self.set(TensorId::PresentKey, present_key);
        self.set(TensorId::PresentValue, present_value);
        if let Some([k_scale, v_scale]) = row_scales {
            self.set(TensorId::KRowScale, k_scale);
            self.set(TensorId::VRowScale, v_scale);
        }
        Ok(result?)
    }
}
