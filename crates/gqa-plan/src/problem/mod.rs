//! One validated call: plain numbers, no data.

mod check;
mod paged;
mod sliding;

pub use gqa_kernels::num::Format as QuantFormat;
use gqa_tensor::{DType, Error, Result};
use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, Range};

/// What `seqlens_k` means for this call's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// `sequence_length == total_sequence_length`: no past, right-padded.
    FirstPrompt,
    /// Several new rows after a past (chunked prefill, speculative decoding).
    SubsequentPrompt,
    /// One new row after a past.
    TokenGeneration,
    /// Rows after a past, padded at the right: query_seqlens has the number of tokens of each
    /// sequence. A sequence without tokens is idle.
    PaddedChunk,
}

impl Phase {
    /// Its name in logs and explanations.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::FirstPrompt => "first prompt",
            Self::SubsequentPrompt => "subsequent prompt",
            Self::TokenGeneration => "token generation",
            Self::PaddedChunk => "right-padded chunk",
        }
    }
}

/// The positions of query rows among the keys, which decide the visible keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// As [`Phase`] says: the rows of a first prompt begin at position 0, and rows at or after the
    /// sequence's length are padding; other rows are the last ones of the sequence.
    Phase,
    /// Row 0 has this position in every sequence, whatever its length; no row is padding.
    Past(usize),
    /// The rows are the last ones of the sequence. If there are more query rows than keys, the
    /// first rows precede key 0.
    End,
}

/// What a call computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// Attention's outputs and the cache.
    Attention,
    /// RoPE alone: output is the rotated query.
    Rotation,
    /// The cache, with new rows.
    Cache,
    /// A cache updated in place: each sequence's new rows go to rows of its choice. Rows may have
    /// any type; where `v_head_size` is 0 there is one tensor, key and present_key.
    Update(WriteMode),
}

/// The handling of rows written past the end of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WriteMode {
    /// Not allowed: all rows fit.
    #[default]
    Linear,
    /// They wrap around to the first rows of the cache.
    Circular,
}

/// Memory of present_key and present_value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheBinding {
    /// Present is past: new rows are appended in place, all other rows stay untouched.
    Shared,
    /// Past is copied, new rows follow, and rows past the sequence's length are zero.
    Separate,
    /// No cache: attention reads key and value in place, in the call's layout.
    External,
}

/// Order of the dimensions of query, key, value and output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// (batch, sequence, heads · head_size), as ONNX has it.
    #[default]
    Bsnh,
    /// (batch, heads, sequence, head_size).
    Bnsh,
}

impl Layout {
    /// The layout of tensors with that many dimensions.
    pub fn of_rank(rank: usize) -> Option<Self> {
        match rank {
            3 => Some(Self::Bsnh),
            4 => Some(Self::Bnsh),
            _ => None,
        }
    }
}

/// Rotary embedding of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// Elements of each head that rotate, from `offset` on.
    pub dim: usize,
    /// The first of them, a multiple of 8. Elements before it pass through, and those from
    /// `offset + dim` on; pairs are counted from it.
    pub offset: usize,
    /// Pairs are (2i, 2i+1) rather than (i, i + dim/2).
    pub interleaved: bool,
    /// Rows of cos_cache and sin_cache.
    pub max_positions: usize,
    /// Row length of position_ids where given; else position = past + row.
    pub explicit: Option<usize>,
}

/// RMS normalisation of each head of query and key before RoPE (QK-norm).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// Added to the mean of squares of a query head.
    pub q_epsilon: f32,
    /// Added to that of a key head.
    pub k_epsilon: f32,
}

/// A quantized cache: dequantized value = quantized value * scale (`gqa_kernels::num::Code` has the
/// formats).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// Format of the quantized values.
    pub format: QuantFormat,
    /// Granularity of the scales.
    pub scales: Scales,
}

/// The granularity of the scales of a quantized KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// One scale for the cache.
    PerTensor,
    /// One scale per KV head: (KV heads).
    PerHead,
    /// One scale per channel of each KV head: (KV heads, head_size).
    PerChannel,
    /// Per token and KV head. These scales are part of the cache: tensors of its shape without the
    /// last dimension, which a call that appends rows writes as well.
    ///
    /// A row's scale is its largest absolute value divided by the largest quantized value (127, 7,
    /// 448 or 6). It is 1 where the quotient is zero, subnormal or infinite. NaN is ignored.
    PerToken,
}

impl Scales {
    /// The number of scales; `None` for per-token scales, whose number depends on the cache.
    pub fn count(self, kv_heads: usize, head_size: usize) -> Option<usize> {
        match self {
            Self::PerTensor => Some(1),
            Self::PerHead => Some(kv_heads),
            Self::PerChannel => Some(kv_heads.saturating_mul(head_size)),
            Self::PerToken => None,
        }
    }
}

impl Quantization {
    /// Element type of the cache's tensors.
    pub fn dtype(self) -> DType {
        match self.format {
            QuantFormat::Int8 => DType::I8,
            QuantFormat::Int4 | QuantFormat::Float4 => DType::U8,
            QuantFormat::Float8 => DType::F8E4M3,
        }
    }

    /// Quantized values per element of the cache's tensors: 2 for 4-bit values.
    pub fn codes_per_element(self) -> usize {
        if self.format.bits() == 4 { 2 } else { 1 }
    }
}

/// A paged KV cache, and sequences whose new tokens are concatenated: `query`, `key`, `value` and
/// `output` are (tokens, heads · head_size), the cache is (blocks, rows of a block, KV heads,
/// head_size).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pages {
    /// New tokens of all sequences.
    pub tokens: usize,
    /// Blocks of the cache.
    pub blocks: usize,
    /// Rows of a block.
    pub block_size: usize,
    /// Maximum blocks of a sequence.
    pub per_sequence: usize,
    /// slot_mapping, rather than block_table, has the cache rows of new tokens.
    pub slots: bool,
    /// Lengths include the new tokens.
    pub counts_new: bool,
    /// Each sequence has one new token, so that cumulative_sequence_length need not be read.
    pub one_each: bool,
    /// The call has a tensor `schedule`: [`Plan::schedule`](crate::plan::Plan::schedule).
    pub scheduled: bool,
    /// Blocks have one row, and the blocks of a sequence are consecutive: block_table has one
    /// column, the first block of each sequence.
    pub consecutive: bool,
}

impl Pages {
    /// Columns of block_table.
    pub const fn columns(&self) -> usize {
        if self.consecutive { 1 } else { self.per_sequence }
    }

    /// The block that a sequence's row of block_table has for its block `nth`; `None` outside of
    /// the cache.
    pub fn block(&self, table: &[i32], nth: usize) -> Option<usize> {
        let (column, behind) = if self.consecutive { (0, nth) } else { (nth, 0) };
        let block = usize::try_from(table[column]).ok()?.checked_add(behind)?;
        (block < self.blocks).then_some(block)
    }

    /// The visible rows of a sequence of `past` rows and `new` tokens: those that some new token
    /// attends to.
    pub fn rows_read(window: Option<usize>, past: usize, new: usize) -> Range<usize> {
        match new {
            0 => 0..0,
            _ => window.map_or(0, |window| (past + 1).saturating_sub(window))..past + new,
        }
    }

    /// The blocks of those rows. Blocks entirely before the window may already belong to other
    /// sequences.
    pub fn blocks_read(&self, window: Option<usize>, past: usize, new: usize) -> Range<usize> {
        let rows = Self::rows_read(window, past, new);
        rows.start / self.block_size..rows.end.div_ceil(self.block_size)
    }
}

/// The extra logit in the softmax denominator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sink {
    /// None.
    None,
    /// Zero for every head: smooth softmax.
    Zero,
    /// `head_sink[query head]`.
    PerHead,
}

/// attention_bias or attn_mask: (B or 1, N or 1, S or 1, columns).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bias {
    /// One for all batch entries.
    pub batch: bool,
    /// One for all query heads.
    pub head: bool,
    /// One for all query rows.
    pub row: bool,
    /// Row length. Keys from there on are hidden.
    pub columns: usize,
    /// A boolean mask, which hides keys where it is false, rather than a bias.
    pub boolean: bool,
}

impl Bias {
    /// Bytes of a row; `dtype` is the type of a bias.
    pub fn row_bytes(&self, dtype: DType) -> usize {
        self.columns * if self.boolean { 1 } else { dtype.size() }
    }
}

/// What output_qk receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QkOutput {
    /// Not wanted.
    None,
    /// After scale, softcap and bias; masked entries 0.
    BeforeSoftmax,
    /// Softmax weights; masked entries 0.
    AfterSoftmax,
    /// After scale, for all keys, masked or not.
    Scaled,
    /// After scale and softcap, for all keys, masked or not.
    Capped,
    /// After scale, softcap and bias; masked entries -inf.
    Biased,
}

/// Strides of a (batch, head, row) tensor in elements, and the offset of its first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowLayout {
    /// Index of (0, 0, 0).
    pub offset: usize,
    /// From one batch entry to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one row to the next.
    pub row: usize,
}

impl RowLayout {
    /// The same offset with other strides, if given.
    fn with(self, strides: Option<RowStrides>) -> Self {
        let RowStrides { batch, head, row } = strides.unwrap_or(self.into());
        Self { offset: self.offset, batch, head, row }
    }

    /// Index of the first element of a head's row.
    pub fn at(&self, batch: usize, head: usize, row: usize) -> usize {
        self.offset + batch * self.batch + head * self.head + row * self.row
    }
}

/// Strides of a (batch, head, row) tensor with contiguous heads, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowStrides {
    /// From one batch entry to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one row to the next.
    pub row: usize,
}

impl From<RowLayout> for RowStrides {
    fn from(RowLayout { batch, head, row, .. }: RowLayout) -> Self {
        Self { batch, head, row }
    }
}

impl RowStrides {
    /// Elements from the first to the end of the last row of a tensor with these strides.
    pub fn extent(self, [batch, heads, rows, size]: [usize; 4]) -> Option<usize> {
        if [batch, heads, rows, size].contains(&0) {
            return Some(0);
        }
        let steps = [(batch, self.batch), (heads, self.head), (rows, self.row)];
        steps
            .into_iter()
            .try_fold(size, |extent, (n, stride)| extent.checked_add((n - 1).checked_mul(stride)?))
    }

    /// Whether no two indices of such a tensor share an element.
    fn is_injective(self, [batch, heads, rows, size]: [usize; 4]) -> bool {
        let mut steps = [(self.batch, batch), (self.head, heads), (self.row, rows)];
        steps.sort_unstable();
        let mut moving = steps.into_iter().filter(|&(_, n)| n > 1);
        let behind = moving.try_fold(size, |behind, (stride, n)| {
            let apart = (stride >= behind).then_some(behind)?;
            apart.checked_add((n - 1).checked_mul(stride)?)
        });
        behind.is_some()
    }
}

/// The greatest common divisor of both strides; 1 if both are 0.
pub(crate) fn greatest_unit([mut a, mut b]: [u64; 2]) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

/// Strides of non-contiguous tensors in device memory, such as slices of a larger tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Strides of query.
    pub query: Option<RowStrides>,
    /// Strides of key.
    pub key: Option<RowStrides>,
    /// Strides of value.
    pub value: Option<RowStrides>,
    /// Strides of output.
    pub output: Option<RowStrides>,
    /// Strides of a paged KV cache, both of `present_key` and of `present_value`, in elements of
    /// these tensors; a batch entry is a block.
    pub pages: Option<RowStrides>,
    /// Strides of `present_value` in a cache of consecutive rows, if they differ from `pages`.
    pub page_values: Option<RowStrides>,
}

impl Strided {
    /// All tensors are contiguous.
    pub const NONE: Self =
        Self { query: None, key: None, value: None, output: None, pages: None, page_values: None };

    /// Strides of `present_value` in a paged KV cache.
    pub fn values_of_pages(&self) -> Option<RowStrides> {
        self.page_values.or(self.pages)
    }
}

/// A checked call. A [layer](crate::engine::Layer) makes it from an engine's description, an ONNX
/// operator from its tensors, and [`new`](Self::new) from its [fields](ProblemFields). Fields can
/// be read and never written: plans rely on the checks.
///
/// ```compile_fail,E0594
/// # fn example(problem: &mut gqa_plan::Problem) {
/// problem.kv_heads = 0;
/// # }
/// ```
/// ```compile_fail,E0423
/// # fn example(problem: gqa_plan::ProblemFields) {
/// gqa_plan::Problem(problem);
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem(ProblemFields);

impl Deref for Problem {
    type Target = ProblemFields;

    fn deref(&self) -> &ProblemFields {
        &self.0
    }
}

/// All properties of a [`Problem`].
#[derive(Clone, Debug, PartialEq)]
pub struct ProblemFields {
    /// The operator's name.
    pub operator: &'static str,
    /// What it computes.
    pub computes: CallKind,
    /// Type of query, key, bias, sink, output_qk, and of the key cache unless that is quantized.
    pub dtype: DType,
    /// Type of value and value cache, likewise. It differs from `dtype` only in some calls of ONNX
    /// Attention.
    pub v_dtype: DType,
    /// Type of output: `dtype`, or float32 or float8e4m3fn where the call requests that.
    pub out_dtype: DType,
    /// B: batch entries.
    pub batch: usize,
    /// N: query heads.
    pub q_heads: usize,
    /// Nk: KV heads, a divisor of N.
    pub kv_heads: usize,
    /// H, the head size of query and key: a multiple of 8 in GroupQueryAttention.
    pub head_size: usize,
    /// The head size of value and output; H in GroupQueryAttention.
    pub v_head_size: usize,
    /// Multi-head latent attention: a token's cache row is one vector of `head_size` elements, its
    /// key, and the leading `v_head_size` elements of that row are its value. There is one KV head.
    /// The call has no tensors value, past_value and present_value; key, past_key and present_key
    /// hold the rows.
    pub latent: bool,
    /// S: query rows per batch entry.
    pub q_len: usize,
    /// L: new K and V rows per batch entry. In GroupQueryAttention S, or 0 where the cache already
    /// holds them.
    pub new_len: usize,
    /// T: the batch's longest sequence; columns of output_qk.
    pub total_len: usize,
    /// P: rows of past_key and past_value; 0 where absent.
    pub past_capacity: usize,
    /// Rows of present_key and present_value, or of key and value if the cache is external.
    pub capacity: usize,
    /// Whether the rows are a first prompt, a later chunk or a decode step.
    pub phase: Phase,
    /// Positions of the rows.
    pub alignment: Alignment,
    /// Memory of present_key and present_value.
    pub cache: CacheBinding,
    /// The cache may be shorter than a sequence: it holds the newest rows, `window` of them or
    /// more, from its row 0 on. Otherwise row `j` of a sequence is row `j` of the cache.
    pub slides: bool,
    /// The paged KV cache, if the call has one; then a sequence has up to `q_len` new tokens and
    /// `total_len` in all.
    pub pages: Option<Pages>,
    /// Quantization of the KV cache, if any.
    pub quantized: Option<Quantization>,
    /// Query, key and value are one tensor, all Q heads, then all K heads, then all V heads.
    pub packed: bool,
    /// Order of the dimensions of query, key, value and output.
    pub layout: Layout,
    /// Strides of tensors that are not contiguous.
    pub strided: Strided,
    /// Normalisation of query and key.
    pub qk_norm: Option<QkNorm>,
    /// Rotary embedding.
    pub rotary: Option<Rotary>,
    /// The resolved scale of q·k, in double precision for float64 values.
    pub scale: f64,
    /// Scores become softcap · tanh(score / softcap).
    pub softcap: Option<f32>,
    /// A query at position p attends to keys from p - window + 1 on: `window` keys, including its
    /// own.
    pub window: Option<usize>,
    /// A query at position p attends to keys up to p + right_window. `None` where causal.
    pub right_window: Option<usize>,
    /// A query at position p attends to keys 0..=p; otherwise to all valid keys.
    pub causal: bool,
    /// The attention sink.
    pub sink: Sink,
    /// Additive bias or boolean mask.
    pub bias: Option<Bias>,
    /// tree_mask decides which new tokens a token attends to; then the call is not causal.
    pub tree_mask: bool,
    /// Score output.
    pub output_qk: QkOutput,
    /// Whether the call outputs the log-sum-exp.
    pub lse: bool,
    /// The preceding kernel writes no input except query, key and value, so that the others may be
    /// read while it still runs.
    pub prefetch_cache: bool,
    /// Over a float8e4m3fn cache, queries and P may also be rounded to that type.
    pub float8_products: bool,
    /// The bits of a sequence's results do not depend on the other sequences of the call:
    /// [`Layer::batch_invariant`](crate::engine::Layer::batch_invariant).
    pub batch_invariant: bool,
    /// Tokens of a sequence on average, where the caller expects fewer than `total_len`:
    /// [`Dense::mean`](crate::engine::Dense::mean).
    pub mean_len: Option<usize>,
}

/// [`Problem::new`] refuses NaN.
impl Eq for ProblemFields {}

impl Hash for ProblemFields {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // What varies between the calls of a program.
        [self.batch, self.q_heads, self.kv_heads, self.head_size].hash(state);
        [self.q_len, self.new_len, self.total_len, self.past_capacity, self.capacity].hash(state);
        (self.operator, self.dtype, self.packed, self.window, self.slides, self.quantized)
            .hash(state);
        (self.latent, self.v_head_size, self.batch_invariant, self.mean_len).hash(state);
        self.strided.hash(state);
        self.pages.hash(state);
    }
}

impl ProblemFields {
    /// An empty call without features: the starting point of the operators.
    pub const fn plain(operator: &'static str, dtype: DType) -> Self {
        Self {
            operator,
            computes: CallKind::Attention,
            dtype,
            v_dtype: dtype,
            out_dtype: dtype,
            batch: 0,
            q_heads: 0,
            kv_heads: 0,
            head_size: 0,
            v_head_size: 0,
            latent: false,
            q_len: 0,
            new_len: 0,
            total_len: 0,
            past_capacity: 0,
            capacity: 0,
            phase: Phase::FirstPrompt,
            alignment: Alignment::Phase,
            cache: CacheBinding::External,
            slides: false,
            pages: None,
            quantized: None,
            packed: false,
            layout: Layout::Bsnh,
            strided: Strided::NONE,
            qk_norm: None,
            rotary: None,
            scale: 1.0,
            softcap: None,
            window: None,
            right_window: None,
            causal: false,
            sink: Sink::None,
            bias: None,
            tree_mask: false,
            output_qk: QkOutput::None,
            lse: false,
            prefetch_cache: false,
            float8_products: false,
            batch_invariant: false,
            mean_len: None,
        }
    }

    /// Batch entries, heads, rows and head size of a tensor. Over a paged KV cache all tokens are
    /// rows of one batch entry.
    pub(crate) fn row_dims(&self, heads: usize, rows: usize, size: usize) -> [usize; 4] {
        match self.pages {
            Some(pages) => [1, heads, pages.tokens, size],
            None => [self.batch, heads, rows, size],
        }
    }
}

impl Problem {
    /// Checks a call: consistent heads, countable and addressable sizes, and no contradicting
    /// features.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the argument as [`engine`](crate::engine) does.
    pub fn new(fields: ProblemFields) -> Result<Self> {
        fields.check().map(|()| Self(fields))
    }

    /// A call derived from this one.
    ///
    /// # Errors
    /// As [`new`](Self::new): the derived call may be larger, by a length that is rounded up.
    pub fn derive(&self, change: impl FnOnce(ProblemFields) -> ProblemFields) -> Result<Self> {
        Self::new(change(self.0.clone()))
    }

    /// The call for which the kernels of a batch-invariant call are chosen. Its number of sequences
    /// is fixed, and over a paged KV cache its number of keys, too. It is never launched, so it
    /// need not pass the checks.
    pub(crate) fn typical(&self) -> Self {
        /// Enough sequences for a decode step to occupy most SMs.
        const SEQUENCES: usize = 8;
        /// Keys of a sequence in a paged KV cache.
        const KEYS: usize = 8192;
        let call = ProblemFields { batch: SEQUENCES, ..self.0.clone() };
        let Some(pages) = self.pages else { return Self(call) };
        let per_sequence = KEYS.div_ceil(pages.block_size.max(1));
        let pages = Pages {
            tokens: SEQUENCES * self.q_len,
            blocks: SEQUENCES * per_sequence,
            per_sequence,
            ..pages
        };
        let (total_len, past_capacity, capacity) = (KEYS, KEYS, KEYS);
        let pages = Some(pages);
        Self(ProblemFields { pages, total_len, past_capacity, capacity, ..call })
    }

    /// The same call on tensors in device memory that are not contiguous.
    ///
    /// # Errors
    /// Where strides are not multiples of 16 bytes, where elements of the output would overlap,
    /// where tensors cannot be addressed, where the call is packed, and where the output of a call
    /// over a paged KV cache is not contiguous.
    pub fn with_strides(&self, strided: Strided) -> Result<Self> {
        self.derive(|call| ProblemFields { strided, ..call })
    }

    /// The same call where the int64 tensor tree_mask, of shape (B, S) or over a paged KV cache
    /// (tokens of all sequences), is a mask among the new tokens of a sequence: a token attends to
    /// new token `j` where bit `j` is set.
    ///
    /// # Errors
    /// Where the call is not causal, or has a window, an attention_bias or output_qk, and where a
    /// sequence may have more than 64 new tokens.
    pub fn with_tree_mask(&self) -> Result<Self> {
        if !self.causal {
            return Err(Error::invalid("causal", "false", "true, with tree_mask"));
        }
        self.derive(|call| ProblemFields { tree_mask: true, causal: false, ..call })
    }

    /// The same call on contiguous tensors, as tensors in host memory are.
    pub fn contiguous(&self) -> Cow<'_, Self> {
        match self.strided == Strided::default() {
            true => Cow::Borrowed(self),
            // `check` does not depend on strides.
            false => {
                Cow::Owned(Self(ProblemFields { strided: Strided::default(), ..self.0.clone() }))
            }
        }
    }

    /// The same call for sequences of up to `total_len` tokens, so that its plan serves all decode
    /// steps up to that length.
    ///
    /// # Errors
    /// Where the meaning of a tensor depends on the longest sequence: a first prompt, a cache that
    /// is not shared, an attention_bias or output_qk; and where the cache is shorter.
    pub fn with_total_len(&self, total_len: usize) -> Result<Self> {
        let argument = "total_sequence_length";
        if !self.grows() {
            let allowed = format!("{}, as this call's tensors depend on it", self.total_len);
            return Err(Error::invalid(argument, total_len, allowed));
        }
        let most = if self.slides { i32::MAX as usize } else { self.capacity };
        if !(self.q_len..=most).contains(&total_len) {
            let allowed = format!("{} to {most}, as the cache holds", self.q_len);
            return Err(Error::invalid(argument, total_len, allowed));
        }
        Self::new(ProblemFields { total_len, ..self.0.clone() })
    }

    /// The same call when the cache (present_key and present_value) already holds its new rows:
    /// nothing is appended. Over a paged KV cache the call then has no tensors key and value.
    pub fn appended(&self) -> Self {
        // Only the rows of key change for `check`, and they decrease.
        Self(ProblemFields { new_len: 0, cache: CacheBinding::Shared, ..self.0.clone() })
    }

    /// Whether a call over a paged KV cache leaves the cache unchanged.
    pub fn reads_pages_only(&self) -> bool {
        self.pages.is_some() && self.new_len == 0 && self.q_len > 0
    }

    /// Whether a sequence may have more new tokens than keys. Tokens before the first key are not
    /// rotated.
    pub fn may_lack_rows(&self) -> bool {
        self.reads_pages_only() && (self.is_ordered() || self.rotary.is_none())
    }

    /// Whether a token before the first key of its sequence sees none.
    fn is_ordered(&self) -> bool {
        self.causal || self.tree_mask
    }

    /// Whether tokens before the first key of their sequence may see keys.
    pub(crate) fn may_lack_seeing_rows(&self) -> bool {
        self.may_lack_rows() && !self.is_ordered() && self.q_len > 1
    }

    /// Whether the longest sequence only affects the choice of kernels.
    pub fn grows(&self) -> bool {
        self.cache == CacheBinding::Shared
            && self.pages.is_none()
            && self.computes == CallKind::Attention
            && self.alignment == Alignment::Phase
            && self.phase != Phase::FirstPrompt
            && self.output_qk == QkOutput::None
            && self.bias.is_none()
    }

    /// Whether output is float32 and the element type is not.
    pub fn widens_output(&self) -> bool {
        self.out_dtype == DType::F32 && self.dtype != DType::F32
    }

    /// Whether output is quantized: true output = stored output * output_scale.
    pub fn quantizes_output(&self) -> bool {
        self.computes == CallKind::Attention && self.out_dtype == DType::F8E4M3
    }

    /// Whether the call has nothing to compute or to write: no query row, and no cache to write.
    pub fn is_empty(&self) -> bool {
        let rows = self.pages.map_or(self.q_len, |pages| pages.tokens);
        let copies = self.cache == CacheBinding::Separate && self.batch * self.capacity > 0;
        [self.batch, self.q_heads, rows, self.head_size].contains(&0) && !copies
    }

    /// The cache update of a call without query rows.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn cache_alone(&self) -> Result<Self> {
        self.derive(|call| ProblemFields {
            computes: CallKind::Cache,
            qk_norm: None,
            rotary: None,
            ..call
        })
    }

    /// Query heads per KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads.max(1)
    }

    /// Query rows per KV head, over all query heads of the group.
    pub fn packed_rows(&self) -> usize {
        self.q_len.saturating_mul(self.group())
    }

    /// The length of the longest sequence in 32 bits.
    pub fn most_keys(&self) -> u32 {
        u32::try_from(self.total_len).unwrap_or(u32::MAX)
    }

    /// Rows that a sequence may have in the call: its tokens, and padding after them.
    pub(crate) fn longest_padded(&self) -> usize {
        let padding = if self.phase == Phase::PaddedChunk { self.q_len } else { 0 };
        self.total_len.saturating_add(padding)
    }

    /// The scale for kernels that scale masked scores (-inf), too: never 0, nor a value that
    /// float32 flushes to 0.
    pub fn least_scale(&self) -> f32 {
        const LEAST: f32 = 1e-30;
        let scale = self.scale as f32;
        if scale.abs() < LEAST { LEAST.copysign(scale) } else { scale }
    }

    /// The softcap in float32; 0: none. One that is too large to change a score is dropped. A tiny
    /// one becomes the smallest usable value, with which all scores are equal anyway.
    pub fn softcap_in_f32(&self) -> f32 {
        const LEAST: f32 = 1e-30;
        const NO_EFFECT: f32 = 1e20;
        self.softcap.filter(|cap| *cap < NO_EFFECT).map_or(0.0, |cap| cap.max(LEAST))
    }

    /// Whether there are present tensors.
    pub fn has_present(&self) -> bool {
        self.cache != CacheBinding::External
    }

    /// Whether values have tensors of their own: not in a latent call, nor where an update has keys
    /// only.
    pub fn has_value_tensors(&self) -> bool {
        !self.latent && self.v_head_size > 0
    }

    /// KV heads of the value tensors; 0 without these.
    pub(crate) fn value_heads(&self) -> usize {
        if self.has_value_tensors() { self.kv_heads } else { 0 }
    }

    /// Elements of a token in the cache for one KV head: its key, and its value unless that is a
    /// part of the key.
    pub(crate) fn row_elements(&self) -> usize {
        self.head_size + if self.latent { 0 } else { self.v_head_size }
    }

    /// Shape of a tensor with `heads` heads of `size` elements and `rows` rows in this call's
    /// layout.
    fn shape(&self, heads: usize, rows: usize, size: usize) -> Vec<usize> {
        if let Some(pages) = self.pages {
            return vec![pages.tokens, heads * size];
        }
        match self.layout {
            Layout::Bsnh => vec![self.batch, rows, heads * size],
            Layout::Bnsh => vec![self.batch, heads, rows, size],
        }
    }

    /// Shape of query, unpacked.
    pub fn query_shape(&self) -> Vec<usize> {
        self.shape(self.q_heads, self.q_len, self.head_size)
    }

    /// Shape of a packed query, which contains keys and values.
    pub fn packed_shape(&self) -> Vec<usize> {
        self.shape(self.q_heads + 2 * self.kv_heads, self.q_len, self.head_size)
    }

    /// Shape of key.
    pub fn key_shape(&self) -> Vec<usize> {
        self.shape(self.kv_heads, self.new_len, self.head_size)
    }

    /// Shape of value.
    pub fn value_shape(&self) -> Vec<usize> {
        self.shape(self.kv_heads, self.new_len, self.v_head_size)
    }

    /// Shape of output.
    pub fn output_shape(&self) -> Vec<usize> {
        self.shape(self.q_heads, self.q_len, self.v_head_size)
    }

    /// Shape of present_key, or of past_key with `rows` rows.
    pub fn key_cache_shape(&self, rows: usize) -> [usize; 4] {
        self.cache_shape(rows, self.head_size)
    }

    /// Shape of present_value, or of past_value with `rows` rows.
    pub fn value_cache_shape(&self, rows: usize) -> [usize; 4] {
        self.cache_shape(rows, self.v_head_size)
    }

    fn cache_shape(&self, rows: usize, size: usize) -> [usize; 4] {
        match self.pages {
            Some(pages) => [pages.blocks, pages.block_size, self.kv_heads, self.cached(size)],
            None => [self.batch, self.kv_heads, rows, self.cached(size)],
        }
    }

    /// Elements of a cache tensor that hold `numbers` quantized values.
    fn cached(&self, numbers: usize) -> usize {
        numbers / self.quantized.map_or(1, Quantization::codes_per_element)
    }

    /// Element type of present_key.
    pub fn key_cache_dtype(&self) -> DType {
        self.quantized.map_or(self.dtype, Quantization::dtype)
    }

    /// Element type of present_value.
    pub fn value_cache_dtype(&self) -> DType {
        self.quantized.map_or(self.v_dtype, Quantization::dtype)
    }

    /// Elements of k_scale, and of v_scale, where the call only reads them; their shape does not
    /// matter.
    pub fn scales(&self) -> Option<usize> {
        self.quantized.and_then(|how| how.scales.count(self.kv_heads, self.head_size))
    }

    /// Whether the cache has per-token scales.
    pub fn has_row_scales(&self) -> bool {
        self.quantized.is_some_and(|how| how.scales == Scales::PerToken)
    }

    /// Shape of per-token k_scale and v_scale: that of the cache without its last dimension.
    pub fn row_scales_shape(&self) -> Option<[usize; 3]> {
        let [outer, middle, inner, _] = self.key_cache_shape(self.capacity);
        self.has_row_scales().then_some([outer, middle, inner])
    }

    /// Shape of output_qk.
    pub fn scores_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.total_len]
    }

    /// Whether a bias or mask changes scores, beyond positions.
    pub fn has_mask(&self) -> bool {
        self.bias.is_some() || self.tree_mask
    }

    /// Shape of tree_mask: (B, S), or over a paged KV cache (tokens of all sequences).
    pub fn tree_mask_shape(&self) -> Vec<usize> {
        match self.pages {
            Some(pages) => vec![pages.tokens],
            None => vec![self.batch, self.q_len],
        }
    }

    /// Shape of lse: (B, N, S), or over a paged KV cache (N, tokens of all sequences).
    pub fn lse_shape(&self) -> Vec<usize> {
        match self.pages {
            Some(pages) => vec![self.q_heads, pages.tokens],
            None => vec![self.batch, self.q_heads, self.q_len],
        }
    }

    /// Layout of a dense tensor with `heads` heads of `h` elements and `rows` rows.
    fn rows_layout(&self, heads: usize, rows: usize, h: usize) -> RowLayout {
        match self.layout {
            Layout::Bsnh => {
                RowLayout { offset: 0, batch: rows * heads * h, head: h, row: heads * h }
            }
            Layout::Bnsh => {
                RowLayout { offset: 0, batch: heads * rows * h, head: rows * h, row: h }
            }
        }
    }

    /// The offset of head `first` of the packed tensor, and its strides.
    fn packed_layout(&self, first: usize) -> RowLayout {
        let row = (self.q_heads + 2 * self.kv_heads) * self.head_size;
        RowLayout {
            offset: first * self.head_size,
            batch: self.q_len * row,
            head: self.head_size,
            row,
        }
    }

    /// Queries, inside `query`.
    pub fn query_layout(&self) -> RowLayout {
        if self.packed {
            self.packed_layout(0)
        } else {
            let dense = self.rows_layout(self.q_heads, self.q_len, self.head_size);
            dense.with(self.strided.query)
        }
    }

    /// New keys: inside `key`, or inside `query` where packed.
    pub fn key_layout(&self) -> RowLayout {
        if self.packed {
            self.packed_layout(self.q_heads)
        } else {
            let dense = self.rows_layout(self.kv_heads, self.new_len, self.head_size);
            dense.with(self.strided.key)
        }
    }

    /// New values: inside `value`, or inside `query` where packed.
    pub fn value_layout(&self) -> RowLayout {
        if self.packed {
            self.packed_layout(self.q_heads + self.kv_heads)
        } else {
            let dense = self.rows_layout(self.kv_heads, self.new_len, self.v_head_size);
            dense.with(self.strided.value)
        }
    }

    /// The output.
    pub fn output_layout(&self) -> RowLayout {
        let dense = self.rows_layout(self.q_heads, self.q_len, self.v_head_size);
        dense.with(self.strided.output)
    }

    /// A BNSH cache of `rows` keys. Strides count values, of which an element of a 4-bit cache
    /// holds two. It is the layout of values, too, if they have the same size.
    pub fn cache_layout(&self, rows: usize) -> RowLayout {
        self.bnsh(rows, self.head_size)
    }

    /// Strides of the keys of a paged KV cache in elements of their tensor; a batch entry is a
    /// block.
    pub fn pages_strides(&self, pages: Pages) -> RowStrides {
        let [.., width] = self.key_cache_shape(0);
        self.strided.pages.unwrap_or(self.contiguous_pages(pages, width))
    }

    /// The same of the values.
    pub fn page_values_strides(&self, pages: Pages) -> RowStrides {
        let [.., width] = self.value_cache_shape(0);
        self.strided.values_of_pages().unwrap_or(self.contiguous_pages(pages, width))
    }

    fn contiguous_pages(&self, pages: Pages, width: usize) -> RowStrides {
        let row = self.kv_heads * width;
        RowStrides { batch: pages.block_size * row, head: width, row }
    }

    /// Whether values of a paged KV cache have the strides of keys, so that kernels that move rows
    /// of keys can move both.
    pub(crate) fn has_values_like_keys(&self, pages: Pages) -> bool {
        let strides = self.page_values_strides(pages);
        self.latent || self.v_head_size == self.head_size && strides == self.pages_strides(pages)
    }

    fn bnsh(&self, rows: usize, h: usize) -> RowLayout {
        RowLayout { offset: 0, batch: self.kv_heads * rows * h, head: rows * h, row: h }
    }

    /// The keys that attention reads: present_key, or key without a cache.
    pub fn keys_read(&self) -> RowLayout {
        if self.has_present() { self.cache_layout(self.capacity) } else { self.key_layout() }
    }

    /// The values that attention reads: in a latent call the leading elements of the keys.
    pub fn values_read(&self) -> RowLayout {
        if self.latent {
            self.keys_read()
        } else if self.has_present() {
            self.bnsh(self.capacity, self.v_head_size)
        } else {
            self.value_layout()
        }
    }

    /// Shape of attention_bias or attn_mask with four dimensions.
    pub fn bias_shape(&self) -> Option<[usize; 4]> {
        let bias = self.bias?;
        let dim = |broadcast, n| if broadcast { 1 } else { n };
        let leading = [(bias.batch, self.batch), (bias.head, self.q_heads), (bias.row, self.q_len)];
        let [b, n, s] = leading.map(|(broadcast, n)| dim(broadcast, n));
        Some([b, n, s, bias.columns])
    }

    /// Rows of attention_bias or attn_mask; the stride of a broadcast dimension is 0.
    pub fn bias_layout(&self) -> Option<RowLayout> {
        let (bias, [_, n, s, columns]) = (self.bias?, self.bias_shape()?);
        let stride = |broadcast, n| if broadcast { 0 } else { n };
        Some(RowLayout {
            offset: 0,
            batch: stride(bias.batch, n * s * columns),
            head: stride(bias.head, s * columns),
            row: stride(bias.row, columns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_follows_from_another_is_checked() {
        let largest = ProblemFields {
            batch: 1,
            q_heads: 1,
            kv_heads: 1,
            head_size: 8,
            v_head_size: 8,
            q_len: 1 << 30,
            new_len: 1 << 30,
            total_len: (1 << 30) + 1,
            past_capacity: 1 << 30,
            capacity: 1 << 30,
            phase: Phase::SubsequentPrompt,
            cache: CacheBinding::Shared,
            slides: true,
            window: Some(16),
            ..ProblemFields::plain("GroupQueryAttention", DType::F16)
        };
        let problem = Problem::new(largest).unwrap();
        // A cache with room for new rows after the old ones.
        let error = problem.counted_from_cache().unwrap_err().to_string();
        assert!(error.starts_with("present_key: got (1, 1, 2147483648, "), "{error}");
        let error = problem.derive(|call| ProblemFields { kv_heads: 2, ..call }).unwrap_err();
        assert!(
            error.to_string().starts_with("heads.kv: got 2; allowed: a divisor of heads.query = 1")
        );
        assert_eq!(problem.derive(|call| call).unwrap(), problem);
    }
}
