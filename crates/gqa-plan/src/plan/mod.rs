//! Plans: which kernels compute a call, in which shape, and why not others. Planning is
//! deterministic and needs no GPU.
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
//! Over a shared cache `decode` and `decode_quantized` do all of this themselves, except QK-norm.
//! The kernels of `hopper` with two warpgroups and without splits rotate queries themselves if
//! positions are implicit. Then Q is read in place, and the only other launch is
//! `concat_kv_in_place`, which rotates K, or `concat_new_to_past_kv`, or none if nothing is
//! appended. The standalone RotaryEmbedding is one launch: `rotary_embedding`, or `rotary_rows` if
//! rows are not multiples of 16 bytes. A cache update is `scatter_rows`. The attention kernel is of
//! one of the families in `families/mod.rs`, and reads K and V from the present cache, or in place
//! without one. If it splits keys, a merge follows.

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
