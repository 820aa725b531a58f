//! Calls as an inference engine describes them.
//!
//! A [`Layer`] has the fixed properties of an attention layer: element type, heads, scale, softcap,
//! window, RoPE and so on. A call over it is [`Dense`], where each sequence has a KV cache of its
//! own, or [`Paged`], where sequences of any lengths share one, or [`External`], where keys and
//! values are given and there is no cache. Each becomes a [`Problem`](crate::problem::Problem),
//! which a [`Planner`](crate::plan::Planner) turns into launches. Descriptions have no tensors: an
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
use crate::problem::{CacheBinding, Phase, ProblemFields, QkNorm, Quantization, Rotary, Sink};
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

/// Rotary position embedding. The tensors `cos_cache` and `sin_cache`, of the layer's element
/// type, have shape (positions, dim / 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Rope {
    /// Leading elements of each head that rotate.
    pub dim: usize,
    /// Rows of `cos_cache` and `sin_cache`.
    pub positions: usize,
    /// Pairs are neighbours (2i, 2i + 1), as in GPT-J, rather than halves (i, i + dim / 2), as in
    /// GPT-NeoX and Llama.
    pub interleaved: bool,
}

impl Rope {
    /// Rotates halves.
    pub const fn new(dim: usize, positions: usize) -> Self {
        Self { dim, positions, interleaved: false }
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
    scale: Option<f32>,
    softcap: Option<f32>,
    window: Option<usize>,
    causal: bool,
    sink: Sink,
    rope: Option<Rope>,
    qk_norm: Option<f32>,
    quantized: Option<Quantization>,
}

impl Layer {
    /// A causal layer with that element type: float32, float16 or bfloat16. Values are checked with
    /// each call.
    pub const fn new(dtype: DType, heads: Heads) -> Self {
        Self {
            dtype,
            heads,
            scale: None,
            softcap: None,
            window: None,
            causal: true,
            sink: Sink::None,
            rope: None,
            qk_norm: None,
            quantized: None,
        }
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

    /// A query sees later keys, too.
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
            v_head_size: size,
            cache: CacheBinding::Shared,
            quantized: self.quantized,
            qk_norm: self.qk_norm.map(|epsilon| QkNorm { q_epsilon: epsilon, k_epsilon: epsilon }),
            rotary: self.rope.map(Rope::implicit),
            scale: self.scale.map_or((size as f64).sqrt().recip(), f64::from),
            softcap,
            causal: self.causal,
            sink: self.sink,
            ..ProblemFields::plain(operator, self.dtype)
        })
    }

    /// The window, if it is shorter than `longest` tokens; a longer one hides nothing.
    fn window_within(&self, longest: usize) -> Option<usize> {
        self.window.filter(|&window| window < longest)
    }
}

impl Rope {
    /// RoPE with positions that follow from the lengths.
    fn implicit(self) -> Rotary {
        let Self { dim, positions, interleaved } = self;
        Rotary { dim, interleaved, max_positions: positions, explicit: None }
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
