//! Shared by the workspace's tests: random operator calls, poisoned outputs, comparison with the
//! reference.

mod alone;
mod attention;
mod call;
mod case;
mod compare;
mod divided;
mod entries;
mod external;
mod hostile;
mod latent;
mod lengths;
mod paged;
mod paged_read;
mod parity;
mod scheduled;
mod tree;
mod wide;

pub use alone::{Alone, invariant_cases};
pub use attention::{AttentionCase, AttentionMask, Cache, Hides, attention_case};
pub use call::Call;
pub use case::{
    Bias, Case, Positions, any_quantization, biased_prompts, case, float8_prompts, heads_in,
    heads_up_to, padded, prompts, prompts_of_wide_scores, prompts_over_float8, quantized,
    quantized_output, quantized_prompts, quantized_steps, ragged, rotated_prompts, sliding, steps,
    tall_steps, turned_float8_prompts, with_row_scales,
};
pub use compare::{Errors, Tolerance, compare};
pub use divided::Divided;
pub use entries::{every_entry, float8_kernels, is_of_attention};
pub use external::{ExternalCase, external};
pub use hostile::hostile;
pub use latent::{
    LatentCase, LatentOperator, LatentRows, in_float8, latent, latent_by_mma, latent_by_wgmma,
    latent_divided, latent_in_float8, latent_in_place, latent_operators, latent_options,
    latent_ragged,
};
pub use paged::{
    DECODE_KERNELS, PREFILL_KERNELS, PagedCase, copied, in_place, paged, paged_concurrent,
    paged_crowd_steps, paged_crowds, paged_in_parts, paged_long, paged_mixed, paged_prompts,
    paged_steps, slow_device, with_gaps, with_some_lse,
};
pub use paged_read::{
    PagedReadCase, Unchecked, cut_off, latent_reads, packed_rows, paged_reads, reads_with_gaps,
};
pub use parity::{Judge, Parity, any_dtype, half_dtype, identical, parity, sequences};
pub use scheduled::{Made, Scheduled};
pub use tree::{TreeCase, tree_steps, trees, turned_behind};
pub use wide::{taken_by, wide, wide_paged};
