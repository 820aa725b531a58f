//! Work before attention: take packed QKV apart, normalise, rotate, update the cache.
//!
//! Almost every kernel has the same shape: a grid of [`THREADS`]-thread CTAs strides over an index
//! space ([`walk`]) of 16-byte vectors or pairs of vectors, and each thread copies or rotates
//! ([`rope`]) its own. Three are different: in [`norm`] adjacent lanes share a row, in `rolling_kv`
//! a CTA moves rows together, and [`gaps`] computes attention. The others use neither barriers nor
//! shared memory. No kernel is specialized for a head size. Head sizes are multiples of 8,
//! rotary_dim is a multiple of 16, and every row starts on a 16-byte boundary.
//!
//! | kernel | does | where |
//! |---|---|---|
//! | `append_dequantized` | appends K and V to a quantized cache, and dequantizes the whole cache into scratch | [`mod@append_dequantized`] |
//! | `append_quantized` | appends K and V to a quantized cache | [`append`] |
//! | `concat_kv_in_place` | appends K and V to a shared cache | [`append`] |
//! | `concat_new_to_past_kv` | copies past and new K and V into a separate cache | [`mod@concat`] |
//! | `concat_rows` | the same of K or V alone, rows of any size | [`mod@concat`] |
//! | `unpack_qkv` | copies packed QKV into three tensors | [`unpack`] |
//! | `unpack_qkv_with_rope_and_append_kv` | unpacks, rotates and appends to a shared cache in one launch | [`unpack`] |
//! | `paged_append`, `paged_append_quantized`, `paged_gather`, `paged_scatter` | append to a paged KV cache; convert between packed tokens and blocks, and contiguous rows | [`paged`] |
//! | `paged_dequantize` | dequantizes a paged KV cache into new blocks, contiguous per sequence | [`dequantize`] |
//! | `paged_gaps` | recomputes attention for sequences whose block tables point outside of the cache | [`gaps`] |
//! | `qk_norm` | divides rows of Q and K by their root mean square | [`norm`] |
//! | `quantize_kv` | quantizes new rows into a separate quantized cache, and dequantizes the whole cache | [`quantize`] |
//! | `quantize_output` | quantizes the output to e4m3, after attention | [`mod@quantize_output`] |
//! | `rotary_embedding` | rotates Q | [`rope`] |
//! | `rotary_rows` | the same, rows of any size | [`rope`] |
//! | `scatter_rows` | writes rows into a cache, from a different first row for each sequence | [`scatter`] |
//! | `seqlens_to_pos_ids` | computes position_ids from lengths | [`positions`] |
//! | `tree_mask_rows` | expands a tree mask to a mask over all keys | [`tree`] |
//! | `rolling_kv`, `rolling_lengths`, `rolling_bias` | present a rolling KV cache to other kernels as an ordinary one | [`rolling`] |

/// Evaluates an expression with the [`Code`](crate::num::Code), of 4 or 8 bits, of the format that
/// a kernel parameter names. When a plan is loaded, the format becomes a constant of the PTX.
macro_rules! with_code {
    ($format:expr, |$code:ident| $body:expr) => {
        if crate::num::Format::has_four_bits($format) {
            let $code = <crate::num::Bits4 as crate::num::Code>::of($format);
            $body
        } else {
            let $code = <crate::num::Bits8 as crate::num::Code>::of($format);
            $body
        }
    };
}

pub mod append;
pub mod append_dequantized;
pub mod concat;
pub mod dequantize;
pub mod gaps;
pub mod norm;
pub mod paged;
pub mod positions;
pub mod quantize;
pub mod quantize_output;
pub mod rolling;
pub mod rope;
pub(crate) mod row_scales;
pub mod scatter;
pub mod tree;
pub mod unpack;
pub mod walk;

use crate::concept::seqlen::Seqlen;
use crate::params::PrologueParams;
use crate::tile::seqlens::Seqlens;

/// Threads of every block.
pub const THREADS: u32 = 256;

/// Lengths of batch entry `b`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn seqlen(p: &PrologueParams, seqlens: Seqlens, b: u32) -> Seqlen {
    Seqlen::new(seqlens.load(b, p.q_len), p.capacity, p.first_prompt != 0)
}
