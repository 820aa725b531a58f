//! Calls as an inference engine describes them.
//!
//! A [`Layer`] has the fixed properties of an attention layer: element type, heads, scale, softcap,
//! window, RoPE and so on. A call is [`Dense`] (each sequence has its own KV cache), [`Paged`]
//! (sequences of any lengths share a paged cache) or [`External`] (keys and values are given,
//! without a cache). Each becomes a [`Problem`](crate::problem::Problem), which a
//! [`Planner`](crate::plan::Planner) turns into launches. Descriptions have no tensors, because an
//! engine's memory is on the GPU.
//!
//! ```
//! use gqa_plan::engine::{Dense, Heads, Layer, Rope};
//! use gqa_plan::plan::{DeviceInfo, Planner, PlanOptions};
//! use gqa_plan::DType;
//!
//! let layer = Layer::new(DType::BF16, Heads { query: 32, kv: 8, size: 128 })
//!     .rope(Rope::new(128, 8192));
//! let step = layer.dense(Dense::decode(1, 8192))?;
//! let plan = Planner::new(DeviceInfo::h200(), PlanOptions::default()).plan(&step)?;
//! assert_eq!(plan.launches().len(), 1);
//! # Ok::<(), gqa_plan::Error>(())
//! ```

mod dense;
mod external;
mod paged;

pub use dense::Dense;
pub use external::External;
pub use paged::Paged;

use crate::limits::MAX_HEAD_SIZE;
use crate::problem::{
    CacheBinding, Phase, ProblemFields, QkNorm, Quantization, Rotary, Sink, Strided,
};
use gqa_tensor::{DType, Error, Result};

/// The heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Query heads, a multiple of the KV heads.
    pub query: usize,
    /// KV heads: each is shared by the same number of query heads.
    pub kv: usize,
    /// Elements of a head: a multiple of 8, or any number in an [`External`] call.
    pub size: usize,
}

/// The heads of a layer of multi-head latent attention: [`Layer::latent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatentHeads {
    /// Query heads.
    pub query: usize,
    /// Elements of a query head, and of a token's row in the cache: a multiple of 8.
    pub size: usize,
    /// Leading elements of the row that are its value, and elements of an output head: a multiple
    /// of 8 up to `size`.
    pub values: usize,
}

/// Rotary position embedding. The tensors `cos_cache` and `sin_cache`, of the layer's element
/// type, have shape (positions, dim / 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Rope {
    /// Elements of each head that rotate.
    pub dim: usize,
    /// The first element that rotates, a multiple of 8. Elements outside of the `dim` from there on
    /// pass through.
    pub offset: usize,
    /// Rows of `cos_cache` and `sin_cache`.
    pub positions: usize,
    /// Pairs are neighbours (2i, 2i + 1), as in GPT-J, rather than halves (i, i + dim / 2), as in
    /// GPT-NeoX and Llama.
    pub interleaved: bool,
}

impl Rope {
    /// Rotates halves of the leading `dim` elements.
    pub const fn new(dim: usize, positions: usize) -> Self {
        Self { dim, offset: 0, positions, interleaved: false }
    }

    /// Rotates the elements from `first` on, a multiple of 8: the last 64 of 576 in DeepSeek's
    /// latent rows.
    pub const fn offset(self, first: usize) -> Self {
        Self { offset: first, ..self }
    }

    /// Rotates neighbours.
    pub const fn interleaved(self) -> Self {
        Self { interleaved: true, ..self }
    }
}

/// An attention layer: the properties that all its calls share. Softmax is over `softcap ·
/// tanh(scale · q·k / softcap)` of the visible keys: up to the query's own position, unless
/// [`bidirectional`](Self::bidirectional).
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    dtype: DType,
    heads: Heads,
    /// The size of values in a latent layer.
    latent: Option<usize>,
    scale: Option<f32>,
    softcap: Option<f32>,
    window: Option<usize>,
    causal: bool,
    sink: Sink,
    rope: Option<Rope>,
    qk_norm: Option<f32>,
    quantized: Option<Quantization>,
    batch_invariant: bool,
}

impl Layer {
    /// A causal layer with that element type: float32, float16 or bfloat16. Values are checked with
    /// each call.
    pub const fn new(dtype: DType, heads: Heads) -> Self {
        Self {
            dtype,
            heads,
            latent: None,
            scale: None,
            softcap: None,
            window: None,
            causal: true,
            sink: Sink::None,
            rope: None,
            qk_norm: None,
            quantized: None,
            batch_invariant: false,
        }
    }

    /// A causal layer of multi-head latent attention (MLA) with absorbed projections: all query
    /// heads attend to one KV head, whose rows of `heads.size` elements are keys, and whose values
    /// are the leading `heads.values` elements of the same rows. The scale of q·k is that of the
    /// model's own, shorter heads, and so is always given.
    ///
    /// Calls have one cache, `present_key`, and no tensors `value` and `present_value`; `key` has
    /// the new rows. `output` has heads of `heads.values` elements. Types are as in
    /// [`new`](Self::new). A [quantized](Self::quantized) cache has `k_scale` and no `v_scale`.
    /// QK-norm and packed tensors are not supported.
    ///
    /// ```
    /// use gqa_plan::DType;
    /// use gqa_plan::engine::{LatentHeads, Layer, Paged, Rope};
    /// use gqa_plan::plan::TensorId;
    ///
    /// // DeepSeek V3: 512 latent channels and 64 that rotate; the scale is that of heads of 192.
    /// let heads = LatentHeads { query: 128, size: 576, values: 512 };
    /// let layer = Layer::latent(DType::BF16, heads, 192f32.sqrt().recip())
    ///     .rope(Rope::new(64, 4096).offset(512).interleaved());
    /// let step = layer.paged(Paged::decode(2, [100, 64, 64]))?;
    /// let cache = TensorId::PresentKey.spec(&step).map(|spec| spec.shape);
    /// assert_eq!(cache, Some(vec![100, 64, 1, 576]));
    /// assert_eq!(TensorId::PresentValue.spec(&step), None);
    /// assert_eq!(step.output_shape(), [2, 128 * 512]);
    /// # Ok::<(), gqa_plan::Error>(())
    /// ```
    pub const fn latent(dtype: DType, heads: LatentHeads, scale: f32) -> Self {
        let LatentHeads { query, size, values } = heads;
        let layer = Self::new(dtype, Heads { query, kv: 1, size });
        Self { latent: Some(values), scale: Some(scale), ..layer }
    }

    /// The scale of q·k; the default is 1/√size.
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Soft-caps scores: `softcap · tanh(score / softcap)`. 0 disables it.
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    /// Sliding-window attention: a query attends to the newest `keys` keys, including its own.
    pub fn window(self, keys: usize) -> Self {
        Self { window: Some(keys), ..self }
    }

    /// A query also attends to later keys.
    pub fn bidirectional(self) -> Self {
        Self { causal: false, ..self }
    }

    /// An extra logit in each softmax denominator. With [`Sink::PerHead`] the tensor `head_sink`
    /// has one for each query head.
    pub fn sink(self, sink: Sink) -> Self {
        Self { sink, ..self }
    }

    /// Queries and new keys are rotated.
    pub fn rope(self, rope: Rope) -> Self {
        Self { rope: Some(rope), ..self }
    }

    /// Each head of query and new key is divided by its root mean square and multiplied by
    /// `q_norm_weight` and `k_norm_weight`, of shape (size), before it rotates. `epsilon` is added
    /// to the mean of squares.
    pub fn qk_norm(self, epsilon: f32) -> Self {
        Self { qk_norm: Some(epsilon), ..self }
    }

    /// The KV cache is quantized. The float32 tensors `k_scale` and `v_scale` have one element, one
    /// for each KV head, or one for each channel of each KV head, by [`Quantization::scales`].
    ///
    /// With [`Scales::PerToken`](crate::problem::Scales) they are part of the cache, shaped without
    /// its last dimension: (batch, KV heads, capacity), or (blocks, block size, KV heads). A call
    /// that appends rows computes their scales and writes them there.
    pub fn quantized(self, how: Quantization) -> Self {
        Self { quantized: Some(how), ..self }
    }

    /// A sequence's results have the same bits whatever other sequences a call has. Kernels are
    /// chosen as for a fixed number of sequences, and keys are not divided by the lengths of all
    /// sequences, so that calls with few or many sequences are slower.
    ///
    /// A sequence has the same bits in two calls of equal layers, on GPUs of the same model, by the
    /// same version and options of this library, if its new tokens and its earlier keys and values
    /// are the same, and
    /// - over a paged KV cache, both calls have the same block size and outputs, both append or
    ///   neither does, and both rotate or neither does. Numbers of sequences and tokens, bounds,
    ///   other lengths and the places of blocks may differ. There is no guarantee if a block table
    ///   leads outside of the cache, or if a sequence has fewer keys than tokens in a call that is
    ///   not causal;
    /// - with a separate cache for each sequence, both calls differ in the number of sequences and
    ///   the contents of tensors only.
    ///
    /// The planner refuses calls over a paged KV cache that gather keys from their blocks, that
    /// have a tree mask or heads of more than 256 elements, and those of latent layers.
    pub fn batch_invariant(self) -> Self {
        Self { batch_invariant: true, ..self }
    }

    /// Element type of the KV cache.
    pub fn cache_dtype(&self) -> DType {
        self.quantized.map_or(self.dtype, Quantization::dtype)
    }

    /// The fields of a call that the layer fixes. Head sizes must be multiples of `unit`.
    ///
    /// # Errors
    /// Where values of the layer are not supported.
    fn fields(&self, operator: &'static str, unit: usize) -> Result<ProblemFields> {
        let Heads { query, kv, size } = self.heads;
        if !matches!(self.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid("dtype", self.dtype, "float32, float16 or bfloat16"));
        }
        if !size.is_multiple_of(unit) || !(unit..=MAX_HEAD_SIZE).contains(&size) {
            let multiple = if unit == 1 { "" } else { "a multiple of 8 from " };
            let allowed = format!("{multiple}{unit} to {MAX_HEAD_SIZE}");
            return Err(Error::invalid("heads.size", size, allowed));
        }
        let softcap = self.softcap.filter(|cap| *cap != 0.0);
        Ok(ProblemFields {
            q_heads: query,
            kv_heads: kv,
            head_size: size,
            v_head_size: self.latent.unwrap_or(size),
            latent: self.latent.is_some(),
            cache: CacheBinding::Shared,
            quantized: self.quantized,
            qk_norm: self.qk_norm.map(|epsilon| QkNorm { q_epsilon: epsilon, k_epsilon: epsilon }),
            rotary: self.rope.map(Rope::implicit),
            scale: self.scale.map_or((size as f64).sqrt().recip(), f64::from),
            softcap,
            causal: self.causal,
            sink: self.sink,
            batch_invariant: self.batch_invariant,
            ..ProblemFields::plain(operator, self.dtype)
        })
    }

    /// The strides of a call's tensors; those of key and value are given together.
    fn strided(&self, strided: Strided) -> Strided {
        match self.latent {
            Some(_) => Strided { value: None, ..strided },
            None => strided,
        }
    }

    /// The window, if it is shorter than `longest` tokens; a longer one hides nothing.
    fn window_within(&self, longest: usize) -> Option<usize> {
        self.window.filter(|&window| window < longest)
    }
}

impl Rope {
    /// RoPE with positions that follow from the lengths.
    fn implicit(self) -> Rotary {
        let Self { dim, offset, positions, interleaved } = self;
        Rotary { dim, offset, interleaved, max_positions: positions, explicit: None }
    }
}

/// The phase of a call in which no sequence exceeds `longest` tokens afterwards.
fn phase(rows: usize, longest: usize) -> Phase {
    match rows {
        _ if rows == longest => Phase::FirstPrompt,
        1 => Phase::TokenGeneration,
        _ => Phase::SubsequentPrompt,
    }
}
