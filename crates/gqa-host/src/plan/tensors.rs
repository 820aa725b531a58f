//! Which tensors a problem has, and how large they are.

use crate::{CacheBinding, Computes, DType, Problem, QkOutput, Sink};

/// A tensor of the call, by its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// query or packed QKV
    Query,
    /// key
    Key,
    /// value
    Value,
    /// past_key
    PastKey,
    /// past_value
    PastValue,
    /// seqlens_k, or past_seqlens where the cache consists of blocks
    SeqlensK,
    /// cos_cache
    CosCache,
    /// sin_cache
    SinCache,
    /// position_ids
    PositionIds,
    /// attention_bias
    AttentionBias,
    /// head_sink
    HeadSink,
    /// k_scale
    KScale,
    /// v_scale
    VScale,
    /// q_norm_weight
    QNormWeight,
    /// k_norm_weight
    KNormWeight,
    /// cumulative_sequence_length
    CumulativeSequenceLength,
    /// block_table
    BlockTable,
    /// slot_mapping
    SlotMapping,
    /// output
    Output,
    /// present_key
    PresentKey,
    /// present_value
    PresentValue,
    /// output_qk
    OutputQk,
    /// log-sum-exp
    Lse,
}

/// Element type and shape of one tensor of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        Self { dtype, shape: shape.into() }
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

impl TensorId {
    /// All roles.
    pub const ALL: [Self; 23] = [
        Self::Query,
        Self::Key,
        Self::Value,
        Self::PastKey,
        Self::PastValue,
        Self::SeqlensK,
        Self::CosCache,
        Self::SinCache,
        Self::PositionIds,
        Self::AttentionBias,
        Self::HeadSink,
        Self::KScale,
        Self::VScale,
        Self::QNormWeight,
        Self::KNormWeight,
        Self::CumulativeSequenceLength,
        Self::BlockTable,
        Self::SlotMapping,
        Self::Output,
        Self::PresentKey,
        Self::PresentValue,
        Self::OutputQk,
        Self::Lse,
    ];

    /// Name of the operator's input or output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::PastKey => "past_key",
            Self::PastValue => "past_value",
            Self::SeqlensK => "seqlens_k",
            Self::CosCache => "cos_cache",
            Self::SinCache => "sin_cache",
            Self::PositionIds => "position_ids",
            Self::AttentionBias => "attention_bias",
            Self::HeadSink => "head_sink",
            Self::KScale => "k_scale",
            Self::VScale => "v_scale",
            Self::QNormWeight => "q_norm_weight",
            Self::KNormWeight => "k_norm_weight",
            Self::CumulativeSequenceLength => "cumulative_sequence_length",
            Self::BlockTable => "block_table",
            Self::SlotMapping => "slot_mapping",
            Self::Output => "output",
            Self::PresentKey => "present_key",
            Self::PresentValue => "present_value",
            Self::OutputQk => "output_qk",
            Self::Lse => "lse",
        }
    }

    /// Whether kernels write the tensor.
    pub const fn is_output(self) -> bool {
        matches!(
            self,
            Self::Output | Self::PresentKey | Self::PresentValue | Self::OutputQk | Self::Lse
        )
    }

    /// Whether it is part of the cache that a call leaves.
    pub const fn is_present(self) -> bool {
        matches!(self, Self::PresentKey | Self::PresentValue)
    }

    /// The tensor of that role in `problem`; `None` where the call has none.
    pub fn spec(self, problem: &Problem) -> Option<TensorSpec> {
        match self {
            Self::Output | Self::PresentKey | Self::PresentValue | Self::OutputQk | Self::Lse => {
                self.output_spec(problem)
            }
            _ => self.input_spec(problem),
        }
    }

    fn input_spec(self, p: &Problem) -> Option<TensorSpec> {
        let shape = match self {
            Self::Query if p.computes == Computes::Cache => return None,
            Self::Key | Self::Value if p.computes == Computes::Rotation => return None,
            Self::Query if p.packed => p.packed_shape(),
            Self::Query => p.query_shape(),
            Self::Key | Self::Value if p.packed => return None,
            Self::Key => p.key_shape(),
            Self::Value => return Some(TensorSpec::new(p.v_dtype, p.value_shape())),
            Self::PastKey | Self::PastValue
                if p.cache != CacheBinding::Separate || p.past_capacity == 0 =>
            {
                return None;
            }
            Self::PastKey => {
                return Some(TensorSpec::new(
                    p.key_cache_dtype(),
                    p.key_cache_shape(p.past_capacity),
                ));
            }
            Self::PastValue => {
                return Some(TensorSpec::new(
                    p.value_cache_dtype(),
                    p.value_cache_shape(p.past_capacity),
                ));
            }
            Self::SeqlensK => return Some(TensorSpec::new(DType::I32, [p.batch])),
            Self::CosCache | Self::SinCache => {
                p.rotary.map(|r| vec![r.max_positions, r.dim / 2])?
            }
            Self::PositionIds => {
                return Some(TensorSpec::new(DType::I64, [p.batch, p.rotary?.explicit?]));
            }
            Self::AttentionBias => {
                let dtype = if p.bias?.boolean { DType::Bool } else { p.dtype };
                return Some(TensorSpec::new(dtype, p.bias_shape()?));
            }
            Self::QNormWeight | Self::KNormWeight => p.qk_norm.map(|_| vec![p.head_size])?,
            Self::KScale | Self::VScale => return Some(TensorSpec::new(DType::F32, [p.scales()?])),
            Self::CumulativeSequenceLength | Self::BlockTable | Self::SlotMapping => {
                return self.page_spec(p);
            }
            Self::HeadSink => (p.sink == Sink::PerHead).then(|| vec![p.q_heads])?,
            _ => return None,
        };
        Some(TensorSpec::new(p.dtype, shape))
    }

    fn page_spec(self, p: &Problem) -> Option<TensorSpec> {
        let pages = p.pages?;
        let shape = match self {
            Self::CumulativeSequenceLength => vec![p.batch + 1],
            Self::BlockTable => vec![p.batch, pages.per_sequence],
            _ => pages.slots.then(|| vec![pages.tokens])?,
        };
        Some(TensorSpec::new(DType::I32, shape))
    }

    fn output_spec(self, p: &Problem) -> Option<TensorSpec> {
        let shape = match self {
            Self::Output if p.computes == Computes::Cache => return None,
            Self::Output => return Some(TensorSpec::new(p.out_dtype, p.output_shape())),
            Self::PresentKey | Self::PresentValue if !p.has_present() => return None,
            Self::PresentKey => {
                return Some(TensorSpec::new(p.key_cache_dtype(), p.key_cache_shape(p.capacity)));
            }
            Self::PresentValue => {
                return Some(TensorSpec::new(
                    p.value_cache_dtype(),
                    p.value_cache_shape(p.capacity),
                ));
            }
            Self::OutputQk if p.output_qk == QkOutput::None => return None,
            Self::OutputQk => p.scores_shape().to_vec(),
            Self::Lse if p.lse => {
                return Some(TensorSpec::new(DType::F32, [p.batch, p.q_heads, p.q_len]));
            }
            _ => return None,
        };
        Some(TensorSpec::new(p.dtype, shape))
    }
}
