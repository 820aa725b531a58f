//! From a problem to launches: which kernels, in which shape, and why not the others.
//! Deterministic; needs no GPU.
//!
//! A plan depends on the [`Problem`](crate::problem::Problem) alone, never on data: lengths are
//! read on the device. So a plan and its CUDA graph stay valid while `seqlens_k` changes within
//! `total_sequence_length`.
//!
//! | what a call needs | launches before attention |
//! |---|---|
//! | QK-norm | `qk_norm`: writes Q and K to scratch, from which the other launches read them |
//! | shared cache, rotation | `unpack_qkv_with_rope_and_append_kv`: Q to scratch, K and V into the cache |
//! | shared cache | `concat_kv_in_place`; Q is read where it is |
//! | separate cache | `concat_new_to_past_kv`, which rotates K, and `rotary_embedding` for Q; `concat_rows` where rows are no vectors |
//! | quantized cache | as for a shared cache, but into a dequantized copy in scratch; then `quantize_kv`, which quantizes the new rows and dequantizes the whole cache |
//! | external cache | none |
//! | a paged KV cache | `qk_norm`, `paged_append`, `paged_gather`; after attention `paged_scatter` and `paged_gaps`; kernels that read blocks need `qk_norm` and `paged_append` only, or append themselves (`paged.rs`) |
//! | a rolling KV cache | `rolling_kv` or `rolling_lengths`, and what the rest of this table says; where rows are several, `rolling_kv` after attention |
//! | nothing to append | `rotary_embedding` for Q |
//!
//! `decode`, and `decode_quantized` where the cache is quantized, do all of this but QK-norm
//! themselves where the cache is shared. `hopper`, in its kernels of two warpgroups and without
//! parts of the keys, rotates queries itself where positions are implicit, so that Q is read where
//! it is: `concat_kv_in_place`, which rotates K then, or `concat_new_to_past_kv` is all that comes
//! before it, and nothing where there is nothing to append. The standalone RotaryEmbedding is one
//! launch, `rotary_embedding` or, where rows are no vectors, `rotary_rows`; a cache update is
//! `scatter_rows`. Attention reads K and V from the present cache, or where they are, by a kernel
//! of one of the families that `families/mod.rs` lists; a merge follows where it splits keys.

mod build;
mod cascade;
mod compose;
mod contiguous;
mod cost;
mod decision;
mod device;
mod division;
pub mod environment;
mod explain;
mod families;
mod family;
mod launch;
mod merge;
mod mixed;
mod options;
mod paged;
mod params;
mod planner;
mod positions;
mod prologue;
mod quantized_output;
mod rebind;
mod requirements;
mod rows;
mod scatter;
mod scratch;
mod seen;
mod select;
mod sliding;
#[cfg(test)]
mod tests;
mod tree_mask;
mod trust;

pub use cascade::candidates;
pub use compose::plan;
pub use cost::Cost;
pub use decision::{Decision, Rejection};
pub use device::{Capability, DeviceInfo};
pub use division::Division;
pub use explain::{Explanation, LaunchLine};
pub use gqa_kernels::attention::decode::Part;
pub use gqa_kernels::registry::Family;
pub use launch::{Arg, Launch, Plan, TensorMap};
pub use options::{Fold, PlanOption, PlanOptions};
pub use planner::Planner;
pub use positions::{Positions, positions};
pub(crate) use trust::plain_options;
pub use trust::{Doubts, Prover, Trust, is_proven};

pub use crate::tensors::{TensorId, TensorSpec, Tensors};
pub use device::capability;
