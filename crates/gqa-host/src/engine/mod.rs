//! Calls as an inference engine describes them.
//!
//! A [`Layer`] says what all calls of an attention layer have in common: element type, heads, and
//! what happens to scores, queries and keys. A call over it is [`Dense`], where each sequence has a
//! KV cache of its own, or [`Paged`], where sequences of any lengths share one, or [`External`],
//! where keys and values are all there are. Each becomes a [`Problem`](crate::Problem), which a
//! [`Planner`](crate::plan::Planner) turns into launches. Nothing here needs a tensor: an engine's
//! memory is on the GPU.
//!
//! ```
//! use gqa_host::engine::{Dense, Heads, Layer, Rope};
//! use gqa_host::plan::{DeviceInfo, Planner, PlanOptions};
//! use gqa_host::DType;
//!
//! let layer = Layer::new(DType::BF16, Heads { query: 32, kv: 8, size: 128 })
//!     .rope(Rope::new(128, 8192));
//! let step = layer.dense(Dense::decode(1, 8192))?;
//! let plan = Planner::new(DeviceInfo::h200(), PlanOptions::default()).plan(&step)?;
//! assert_eq!(plan.launches().len(), 1);
//! # Ok::<(), gqa_host::Error>(())
//! ```

mod dense;
mod external;
mod paged;

pub use dense::Dense;
pub use external::External;
pub use paged::Paged;

use crate::op::{GroupQueryAttention, QuantType};
use crate::{DType, QuantFormat, Quantization, Sink, TensorDesc};

/// The heads of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Query heads, a multiple of the KV heads.
    pub query: usize,
    /// KV heads: each is shared by the same number of query heads.
    pub kv: usize,
    /// Elements of a head: a multiple of 8.
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

/// An attention layer: what its calls have in common. Softmax is over
/// `softcap · tanh(scale · q·k / softcap)` of the keys that a query sees: those up to its own
/// position, unless [`bidirectional`](Self::bidirectional).
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
    /// A causal layer of that element type: float32, float16 or bfloat16. Whether the numbers make
    /// sense is checked with each call.
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

    /// The factor on q·k; 1/√size where it is not given.
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Soft-caps scores.
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    /// Sliding-window attention: a query sees the newest `keys` keys, its own included.
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
    /// for each KV head, or one for each element of each KV head, as [`Quantization::scales`] says.
    ///
    /// With [`Scales::PerToken`](crate::Scales) they are part of the cache, of its shape without
    /// its last dimension: (batch, KV heads, capacity), or (blocks, block size, KV heads). A call
    /// that appends rows computes their scales and writes them there.
    pub fn quantized(self, how: Quantization) -> Self {
        Self { quantized: Some(how), ..self }
    }

    /// Element type of the KV cache.
    pub fn cache_dtype(&self) -> DType {
        self.quantized.map_or(self.dtype, Quantization::dtype)
    }

    /// Elements of the KV cache that hold a head.
    fn cached_size(&self) -> usize {
        self.heads.size / self.quantized.map_or(1, Quantization::codes_per_element)
    }

    fn quant_type(&self) -> QuantType {
        self.quantized.map(|how| how.scales).into()
    }

    fn bits(&self) -> i64 {
        match self.quantized.map(|how| how.format) {
            None => 0,
            Some(QuantFormat::Int4) => 4,
            Some(_) => 8,
        }
    }

    /// Shape of `k_scale` and `v_scale`, beside a cache of that shape.
    fn scales(&self, [cache @ .., _]: [usize; 4]) -> Option<Vec<usize>> {
        let count = |how: Quantization| how.scales.count(self.heads.kv, self.heads.size);
        self.quantized.map(|how| count(how).map_or(cache.to_vec(), |count| vec![count]))
    }

    /// Shape of `cos_cache` and `sin_cache`.
    fn rotations(&self) -> Option<[usize; 2]> {
        self.rope.map(|rope| [rope.positions, rope.dim / 2])
    }

    /// The window as an ONNX attribute.
    fn local_window(&self) -> i64 {
        self.window.map_or(-1, |keys| i64::try_from(keys).unwrap_or(i64::MAX))
    }

    fn has_head_sink(&self) -> bool {
        self.sink == Sink::PerHead
    }

    fn desc<'a>(&self, shape: &'a [usize]) -> TensorDesc<'a> {
        TensorDesc { dtype: self.dtype, shape }
    }

    /// The operator that computes the layer over caches of their own.
    fn operator(&self) -> GroupQueryAttention {
        let rope = self.rope.is_some_and(|rope| rope.interleaved);
        GroupQueryAttention::new(count(self.heads.query), count(self.heads.kv))
            .scale(self.scale.unwrap_or_default())
            .softcap(self.softcap.unwrap_or_default())
            .local_window_size(self.local_window())
            .causal(self.causal.into())
            .do_rotary(self.rope.is_some())
            .rotary_interleaved(rope)
            .smooth_softmax(self.sink == Sink::Zero)
            .qk_norm_epsilon(self.qk_norm.unwrap_or(1e-6))
            .k_quant_type(self.quant_type())
            .v_quant_type(self.quant_type())
            .kv_cache_bit_width(self.bits())
    }
}

/// A number as an ONNX attribute.
fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn i32s(shape: &[usize]) -> TensorDesc<'_> {
    TensorDesc { dtype: DType::I32, shape }
}

fn f32s(shape: &[usize]) -> TensorDesc<'_> {
    TensorDesc { dtype: DType::F32, shape }
}
