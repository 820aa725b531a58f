//! Why a family of kernels was chosen or rejected.

use super::device::{Capability, capability};
use crate::problem::{Alignment, QuantFormat};
use gqa_kernels::registry::{Entry, Family};
use gqa_tensor::DType;
use std::fmt;

/// Why a family was not chosen.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Rejection {
    /// An option disables it.
    Disabled {
        /// The option's environment variable.
        switch: &'static str,
    },
    /// Its kernels are not trusted on the GPU, by GQA_TRUST=none or by their test.
    Distrusted {
        /// The GPU's compute capability, times ten.
        sm: u32,
    },
    /// The kernel multiplies float8e4m3fn.
    Float8Products,
    /// Another kernel is forced.
    NotForced {
        /// Its name.
        forced: &'static str,
    },
    /// The kernels take other element types.
    ElementType {
        /// The call's.
        got: DType,
    },
    /// The kernel does not take that input or output.
    Argument {
        /// Its ONNX name.
        name: &'static str,
    },
    /// The kernel is for calls with a bias or a mask.
    NoMask,
    /// The kernel takes masks whose rows are multiples of 16 bytes.
    MaskRows {
        /// Bytes of the call's.
        got: usize,
    },
    /// The kernel is for quantized KV caches.
    NotQuantized,
    /// The kernel reads quantized KV caches of another format.
    Format {
        /// The call's.
        got: QuantFormat,
    },
    /// The kernel does not support per-token scales.
    RowScales,
    /// The kernel appends to the cache that it reads.
    NotShared,
    /// A piece of a key tile must lie in one block of the paged KV cache.
    BlockSize {
        /// The call's.
        got: usize,
        /// Rows of a piece.
        need: u32,
    },
    /// The kernel reads blocks of several rows, and the call has packed keys and values.
    Consecutive,
    /// The kernel needs rows at the beginning or at the end of the sequence.
    Alignment {
        /// The call's.
        got: Alignment,
    },
    /// The kernel's windows end with the row's own key.
    Window,
    /// The kernel needs keys and values of the same type and size.
    Values {
        /// The call's type of values.
        dtype: DType,
        /// The call's size of values.
        size: usize,
    },
    /// The kernel needs a tensor of values, which a latent call lacks.
    Latent,
    /// The kernel moves whole vectors of 8 elements.
    Vectors {
        /// The call's head size.
        got: usize,
    },
    /// Heads are larger than the largest tile.
    HeadSize {
        /// The call's.
        got: usize,
        /// The largest.
        max: u32,
    },
    /// The kernel is made for certain head sizes.
    OtherHeadSize {
        /// The call's.
        got: usize,
    },
    /// More rows or blocks than the kernel counts.
    TooLarge,
    /// Rows of a head's keys or values are not contiguous.
    Strided,
    /// CTAs would exceed the range of the device's counters.
    Counters {
        /// What the call needs.
        need: usize,
        /// The device's limit.
        max: usize,
    },
    /// The GPU is too old.
    ComputeCapability {
        /// The GPU's, times ten.
        have: u32,
        /// The kernel's, times ten.
        need: u32,
    },
    /// A CTA needs more shared memory than the GPU has.
    SharedMemory {
        /// The GPU's, in bytes.
        have: u32,
        /// The kernel's, in bytes.
        need: u32,
    },
    /// Too many packed query rows: faster are larger tiles, which read K and V less often, or a
    /// launch that first dequantizes the cache.
    Rows {
        /// The call's packed rows: query rows times heads of a group.
        got: usize,
        /// The most that count as few.
        max: u32,
    },
    /// A KV head has several row tiles, each of which reads all keys, and they are not all resident
    /// at once.
    RowTiles {
        /// Row tiles of all KV heads and sequences.
        got: usize,
        /// The most that are resident at once.
        max: u32,
    },
    /// New rows do not fit the kernel's tile for them.
    NewRows {
        /// The call's.
        got: usize,
        /// The most that fit.
        max: u32,
    },
    /// Too few query rows: most of a tile would be empty.
    FewRows {
        /// The call's query rows.
        got: usize,
        /// The fewest that pay.
        min: usize,
    },
    /// Too few keys: the prologue costs more than the faster kernel gains.
    FewKeys {
        /// The call's keys.
        got: usize,
        /// The fewest that pay.
        min: usize,
    },
    /// Faster kernels support the call once its rows are gathered.
    FasterTiles {
        /// The instructions.
        by: Capability,
    },
    /// The GPU lacks a feature that the kernel uses.
    Capability {
        /// The feature.
        need: Capability,
        /// The GPU's compute capability, times ten.
        sm: u32,
    },
    /// The kernel is not compiled for the GPU.
    Target {
        /// The GPU's compute capability, times ten.
        sm: u32,
    },
    /// The kernel's approximate tanh is too coarse for scores at this softcap.
    Softcap {
        /// The call's.
        got: f32,
        /// The kernel's.
        max: f32,
    },
    /// The kernel takes row maxima before scaling, so that the scale must be positive.
    Scale {
        /// The call's.
        got: f64,
    },
    /// The call has no keys, and the kernel needs at least one tile.
    NoKeys,
    /// The kernel writes its output in the type of its inputs only.
    OutputType {
        /// The call's type of output.
        got: DType,
    },
    /// The kernel does not split keys, which would make the call faster or is requested.
    Splits {
        /// Into how many.
        splits: u32,
    },
    /// Splitting the keys would not make the call faster.
    OneSplit,
    /// A faster family was chosen.
    Outranked,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled { switch } => write!(f, "switched off by {switch}"),
            Self::Distrusted { sm } => {
                write!(f, "not trusted on this GPU of compute capability {}", capability(*sm))
            }
            Self::Float8Products => write!(f, "the call does not allow float8 products"),
            Self::NotForced { forced } => write!(f, "GQA_FORCE={forced}"),
            Self::ElementType { got } => write!(f, "does not take {got}"),
            Self::Argument { name } => write!(f, "does not take {name}"),
            Self::NoMask => write!(f, "there is no attention_bias"),
            Self::MaskRows { got } => {
                write!(f, "rows of attention_bias are {got} bytes, no multiple of 16")
            }
            Self::NotQuantized => write!(f, "the KV cache is not quantized"),
            Self::Format { got } => write!(f, "does not take a KV cache of {got}"),
            Self::RowScales => write!(f, "does not take per-token scales"),
            Self::NotShared => write!(f, "past and present are not one cache"),
            Self::BlockSize { got, need } => {
                write!(f, "the block size {got} is not a power of two of {need} or more")
            }
            Self::Consecutive => write!(f, "does not read packed keys and values"),
            Self::Alignment { got } => write!(f, "does not take {got}"),
            Self::Window => write!(f, "does not take a window to the right, or only to the left"),
            Self::Values { dtype, size } => {
                write!(f, "does not take values of type {dtype} and size {size} with these keys")
            }
            Self::Latent => write!(f, "does not take a latent KV cache"),
            Self::Vectors { got } => write!(f, "head size {got} is not a multiple of 8"),
            Self::HeadSize { got, max } => write!(f, "head size {got} is over {max}"),
            Self::OtherHeadSize { got } => write!(f, "has no tile for head size {got}"),
            Self::TooLarge => write!(f, "is too large to be counted in 32 bits"),
            Self::Strided => write!(f, "rows of a head's keys and values are not contiguous"),
            Self::Counters { need, max } => write!(f, "needs {need} counters, over {max}"),
            Self::ComputeCapability { have, need } => write!(
                f,
                "needs compute capability {}, the device has {}",
                capability(*need),
                capability(*have)
            ),
            Self::SharedMemory { have, need } => {
                write!(f, "a CTA needs {need} bytes of shared memory, the device has {have}")
            }
            Self::Rows { got, max } => write!(f, "{got} packed query rows are over {max}"),
            Self::RowTiles { got, max } => {
                write!(f, "{got} row tiles, each reading all keys, are over {max}")
            }
            Self::NewRows { got, max } => write!(f, "{got} new rows are over {max}"),
            Self::FewRows { got, min } => write!(f, "{got} query rows are under {min}"),
            Self::FewKeys { got, min } => write!(f, "{got} keys are under {min}"),
            Self::FasterTiles { by } => {
                write!(f, "kernels with {by} are faster over gathered rows")
            }
            Self::Capability { need, sm } => {
                write!(f, "needs {need}, which compute capability {} lacks", capability(*sm))
            }
            Self::Target { sm } => {
                write!(f, "is not compiled for compute capability {}", capability(*sm))
            }
            Self::Softcap { got, max } => write!(f, "softcap {got} is more than {max}"),
            Self::Scale { got } => write!(f, "scale {got} is not positive"),
            Self::NoKeys => write!(f, "there are no keys"),
            Self::OutputType { got } => write!(f, "does not write output in {got}"),
            Self::Splits { splits } => {
                write!(f, "does not split keys; this call needs {splits} splits")
            }
            Self::OneSplit => write!(f, "one split of the keys is enough"),
            Self::Outranked => write!(f, "not needed"),
        }
    }
}

/// The decision about a family of kernels.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The family.
    pub family: Family,
    /// The chosen kernel, or the reason against the family.
    pub outcome: Result<&'static Entry, Rejection>,
}
