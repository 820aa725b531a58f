//! From a problem to launches: which kernels, in which shape, and why not the others. Pure; needs no GPU.

use gqa_kernels::registry::Entry;

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
    /// seqlens_k
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

/// What a pointer argument of a launch is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A null pointer.
    Null,
    /// A tensor of the call from byte `offset` on.
    Tensor {
        /// Which.
        id: TensorId,
        /// Bytes to its first element used.
        offset: usize,
    },
    /// `bytes` bytes of the workspace from byte `offset` on.
    Workspace {
        /// Multiple of 256.
        offset: usize,
        /// Length.
        bytes: usize,
    },
}

/// One kernel launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The kernel; it also says block size and shared memory.
    pub entry: &'static Entry,
    /// Blocks.
    pub grid: [u32; 3],
    /// Pointer arguments, in the order of [`Entry::arguments`].
    pub args: Vec<Arg>,
    /// Bytes of the parameter struct.
    pub params: Vec<u8>,
}
