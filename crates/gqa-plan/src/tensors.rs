//! The table of a call's tensors: one row each, from which everything with one value per tensor is
//! generated.

use crate::problem::{CacheBinding, CallKind, Phase, Problem, QkOutput, RowStrides, Sink};
use gqa_kernels::attention::decode::schedule_words;
use gqa_kernels::attention::hopper::given_words;
use gqa_tensor::{DType, Error, Result};
use gqa_tensor::{Tensor, TensorView};

/// One row per tensor of a call: its role, its name as an input or output of the operator, whether
/// the call reads or writes it, and its type and shape in a problem; `None` where the problem lacks
/// it.
macro_rules! tensors {
    ($($(#[$doc:meta])* $id:ident: $name:literal, $kind:ident, $spec:expr;)*) => {
        /// A tensor of the call, by its role.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum TensorId {
            $($(#[$doc])* $id,)*
        }

        impl TensorId {
            /// All roles.
            pub const ALL: [Self; [$(Self::$id),*].len()] = [$(Self::$id),*];

            /// Name of the operator's input or output.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$id => $name,)*
                }
            }

            const fn kind(self) -> Kind {
                match self {
                    $(Self::$id => Kind::$kind,)*
                }
            }

            /// The tensor of that role in `problem`; `None` where the call lacks it.
            pub fn spec(self, problem: &Problem) -> Option<TensorSpec> {
                let spec: fn(&Problem) -> Option<TensorSpec> = match self {
                    $(Self::$id => $spec,)*
                };
                spec(problem)
            }
        }
    };
}

/// What a call does with a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Reads it.
    Input,
    /// Writes it.
    Output,
    /// Written; read too where the cache is shared.
    Cache,
}

tensors! {
    /// query or packed QKV
    Query: "query", Input, |p| {
        let shape = if p.packed { p.packed_shape() } else { p.query_shape() };
        Some(spec(has_rows_out(p), p.dtype, shape)?.strided(p.strided.query))
    };
    /// key
    Key: "key", Input, |p| {
        Some(spec(has_rows(p), p.dtype, p.key_shape())?.strided(p.strided.key))
    };
    /// value
    Value: "value", Input, |p| {
        let is_there = has_rows(p) && p.has_value_tensors();
        Some(spec(is_there, p.v_dtype, p.value_shape())?.strided(p.strided.value))
    };
    /// past_key
    PastKey: "past_key", Input, |p| {
        spec(has_past(p), p.key_cache_dtype(), p.key_cache_shape(p.past_capacity))
    };
    /// past_value
    PastValue: "past_value", Input, |p| {
        let is_there = has_past(p) && p.has_value_tensors();
        spec(is_there, p.value_cache_dtype(), p.value_cache_shape(p.past_capacity))
    };
    /// seqlens_k, or past_seqlens where the cache is paged
    SeqlensK: "seqlens_k", Input, |p| spec(!is_update(p), DType::I32, [p.batch]);
    /// query_seqlens
    QuerySeqlens: "query_seqlens", Input, |p| {
        spec(p.phase == Phase::PaddedChunk, DType::I32, [p.batch])
    };
    /// The cache row of the first row of an update
    WriteIndices: "write_indices", Input, |p| spec(is_update(p), DType::I32, [p.batch]);
    /// cos_cache
    CosCache: "cos_cache", Input, rotations;
    /// sin_cache
    SinCache: "sin_cache", Input, rotations;
    /// position_ids
    PositionIds: "position_ids", Input, |p| {
        let columns = p.rotary?.explicit?;
        spec(true, DType::I64, [p.batch, columns])
    };
    /// attention_bias
    AttentionBias: "attention_bias", Input, |p| {
        let dtype = if p.bias?.boolean { DType::Bool } else { p.dtype };
        spec(true, dtype, p.bias_shape()?)
    };
    /// Mask among the new tokens of a sequence: bit `j` for new token `j`
    TreeMask: "tree_mask", Input, |p| spec(p.tree_mask, DType::I64, p.tree_mask_shape());
    /// head_sink
    HeadSink: "head_sink", Input, |p| spec(p.sink == Sink::PerHead, p.dtype, [p.q_heads]);
    /// k_scale
    KScale: "k_scale", Input, |p| spec(true, DType::F32, [p.scales()?]);
    /// v_scale
    VScale: "v_scale", Input, |p| spec(p.has_value_tensors(), DType::F32, [p.scales()?]);
    /// k_scale of a cache with per-token scales: part of the cache
    KRowScale: "k_scale", Cache, |p| spec(true, DType::F32, p.row_scales_shape()?);
    /// v_scale, likewise
    VRowScale: "v_scale", Cache, |p| {
        spec(p.has_value_tensors(), DType::F32, p.row_scales_shape()?)
    };
    /// output_scale
    OutputScale: "output_scale", Input, |p| spec(p.quantizes_output(), DType::F32, [1]);
    /// q_norm_weight
    QNormWeight: "q_norm_weight", Input, |p| spec(p.qk_norm.is_some(), p.dtype, [p.head_size]);
    /// k_norm_weight
    KNormWeight: "k_norm_weight", Input, |p| spec(p.qk_norm.is_some(), p.dtype, [p.head_size]);
    /// cumulative_sequence_length
    CumulativeSequenceLength: "cumulative_sequence_length", Input, |p| {
        spec(p.pages.is_some(), DType::I32, [p.batch + 1])
    };
    /// block_table
    BlockTable: "block_table", Input, |p| {
        spec(true, DType::I32, [p.batch, p.pages?.columns()])
    };
    /// A division of the work by lengths: [`Plan::schedule`](crate::plan::Plan::schedule)
    Schedule: "schedule", Input, |p| {
        let words = schedule_words(p.batch).max(given_words(p.batch));
        spec(p.pages?.scheduled, DType::I32, [words])
    };
    /// slot_mapping
    SlotMapping: "slot_mapping", Input, |p| {
        let pages = p.pages?;
        spec(pages.slots, DType::I32, [pages.tokens])
    };
    /// output
    Output: "output", Output, |p| {
        let shape = p.output_shape();
        Some(spec(has_rows_out(p), p.out_dtype, shape)?.strided(p.strided.output))
    };
    /// present_key
    PresentKey: "present_key", Cache, |p| {
        let shape = p.key_cache_shape(p.capacity);
        Some(spec(p.has_present(), p.key_cache_dtype(), shape)?.strided(p.strided.pages))
    };
    /// present_value
    PresentValue: "present_value", Cache, |p| {
        let is_there = p.has_present() && p.has_value_tensors();
        let shape = p.value_cache_shape(p.capacity);
        Some(spec(is_there, p.value_cache_dtype(), shape)?.strided(p.strided.values_of_pages()))
    };
    /// output_qk
    OutputQk: "output_qk", Output, |p| {
        spec(p.output_qk != QkOutput::None, p.dtype, p.scores_shape())
    };
    /// log-sum-exp
    Lse: "lse", Output, |p| spec(p.lse, DType::F32, p.lse_shape());
}

fn spec(is_there: bool, dtype: DType, shape: impl Into<Vec<usize>>) -> Option<TensorSpec> {
    is_there.then(|| TensorSpec { dtype, shape: shape.into(), strides: None })
}

/// Whether the call has tensors key and value.
fn has_rows(p: &Problem) -> bool {
    p.computes != CallKind::Rotation && !p.packed && !p.reads_pages_only()
}

/// Whether output rows correspond to query rows.
fn has_rows_out(p: &Problem) -> bool {
    matches!(p.computes, CallKind::Attention | CallKind::Rotation)
}

fn is_update(p: &Problem) -> bool {
    matches!(p.computes, CallKind::Update(_))
}

fn has_past(p: &Problem) -> bool {
    p.cache == CacheBinding::Separate && p.past_capacity > 0
}

/// cos_cache and sin_cache.
fn rotations(p: &Problem) -> Option<TensorSpec> {
    let rotary = p.rotary?;
    spec(true, p.dtype, [rotary.max_positions, rotary.dim / 2])
}

impl TensorId {
    /// Batch entries, heads, rows and head size of query, key, value or output, or of a KV cache.
    /// Over a paged KV cache all tokens are rows of one batch entry, and a block of the cache is a
    /// batch entry.
    pub fn row_dims(self, p: &Problem) -> [usize; 4] {
        match self {
            Self::PresentKey | Self::PresentValue => {
                let [batch, heads, rows, size] = match self {
                    Self::PresentKey => p.key_cache_shape(p.capacity),
                    _ => p.value_cache_shape(p.capacity),
                };
                // (block, row, KV head, head size)
                if p.pages.is_some() {
                    [batch, rows, heads, size]
                } else {
                    [batch, heads, rows, size]
                }
            }
            Self::Query => p.row_dims(p.q_heads, p.q_len, p.head_size),
            Self::Key => p.row_dims(p.kv_heads, p.new_len, p.head_size),
            Self::Value => p.row_dims(p.kv_heads, p.new_len, p.v_head_size),
            _ => p.row_dims(p.q_heads, p.q_len, p.v_head_size),
        }
    }

    /// Whether kernels write the tensor.
    pub const fn is_output(self) -> bool {
        !matches!(self.kind(), Kind::Input)
    }

    /// Whether it is part of the cache after the call.
    pub const fn is_present(self) -> bool {
        matches!(self.kind(), Kind::Cache)
    }
}

/// One value for each tensor of a call, by its role.
#[derive(Clone, Copy, Debug)]
pub struct Tensors<T>([Option<T>; TensorId::ALL.len()]);

impl<T> Default for Tensors<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| None))
    }
}

impl<T> Tensors<T> {
    /// A tensor's value.
    #[inline]
    pub fn get(&self, id: TensorId) -> Option<&T> {
        self.0[id as usize].as_ref()
    }

    /// A mutable reference to a tensor's value.
    pub fn get_mut(&mut self, id: TensorId) -> Option<&mut T> {
        self.0[id as usize].as_mut()
    }

    /// Sets or removes a tensor's value.
    #[inline]
    pub fn with(mut self, id: TensorId, value: impl Into<Option<T>>) -> Self {
        self.0[id as usize] = value.into();
        self
    }

    /// The tensors that a call of `problem` uses: an operator may have inputs that its attributes
    /// make unused.
    pub fn only_of(self, problem: &Problem) -> Self {
        let mut all = self;
        for (id, value) in TensorId::ALL.into_iter().zip(&mut all.0) {
            if value.is_some() && id.spec(problem).is_none() {
                *value = None;
            }
        }
        all
    }

    /// Applies `f` to each value.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Tensors<U> {
        Tensors(self.0.map(|value| value.map(&mut f)))
    }

    /// The values that are set, in the order of [`TensorId::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (TensorId, &T)> {
        TensorId::ALL.into_iter().filter_map(|id| Some((id, self.get(id)?)))
    }

    /// Mutable references to the values that are set.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (TensorId, &mut T)> {
        let all = TensorId::ALL.into_iter().zip(&mut self.0);
        all.filter_map(|(id, value)| Some((id, value.as_mut()?)))
    }
}

impl<T> FromIterator<(TensorId, T)> for Tensors<T> {
    fn from_iter<I: IntoIterator<Item = (TensorId, T)>>(values: I) -> Self {
        let mut all = Self::default();
        values.into_iter().for_each(|(id, value)| all.0[id as usize] = Some(value));
        all
    }
}

impl<T: Copy> Tensors<T> {
    /// The tensor in that role.
    pub fn input(&self, id: TensorId) -> Option<T> {
        self.get(id).copied()
    }

    /// The required tensor in that role.
    ///
    /// # Errors
    /// Where there is none.
    pub fn need(&self, id: TensorId) -> Result<T> {
        self.input(id).ok_or_else(|| Error::invalid(id.name(), "nothing", "a tensor"))
    }
}

impl<'a> Tensors<&'a Tensor> {
    /// Views of the tensors.
    pub fn views(self) -> Tensors<TensorView<'a>> {
        self.map(Tensor::view)
    }
}

/// Element type and shape of one tensor of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Strides of heads and rows; `None`: row-major and contiguous.
    pub strides: Option<RowStrides>,
}

impl TensorSpec {
    fn strided(self, strides: Option<RowStrides>) -> Self {
        Self { strides, ..self }
    }

    /// The tensors of a problem by their roles.
    pub fn all(problem: &Problem) -> Vec<(TensorId, Self)> {
        TensorId::ALL.into_iter().filter_map(|id| Some((id, id.spec(problem)?))).collect()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether some dimension is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}
