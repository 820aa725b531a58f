//! Work before attention: take packed QKV apart, normalise, rotate, update the cache.
//!
//! Every kernel has the same shape: a grid of [`THREADS`]-thread blocks walks an index space
//! ([`walk`]) of 16-byte vectors or pairs of them, and each is copied or rotated ([`rope`]) on its
//! own; in [`norm`] neighbouring lanes share a row, and in `rolling_kv` a block moves rows
//! together, and [`gaps`] is attention. No shared memory, no barriers but theirs, no template on
//! the head size; the only limits are that head_size is a multiple of 8, rotary_dim of 16, and that
//! every row starts on a 16-byte boundary.
//!
//! | kernel | does | where |
//! |---|---|---|
//! | `append_dequantized` | appends K and V to a quantized cache, and makes numbers of all of it | [`mod@append_dequantized`] |
//! | `append_quantized` | appends K and V to a quantized cache | [`append`] |
//! | `concat_kv_in_place` | appends K and V to a shared cache | [`append`] |
//! | `concat_new_to_past_kv` | past and new K and V into a separate cache | [`mod@concat`] |
//! | `concat_rows` | the same of K or V alone, rows of any size | [`mod@concat`] |
//! | `unpack_qkv` | packed QKV into three tensors | [`unpack`] |
//! | `unpack_qkv_with_rope_and_append_kv` | everything for a shared cache in one launch | [`unpack`] |
//! | `paged_append`, `paged_append_quantized`, `paged_gather`, `paged_scatter` | a paged KV cache and tokens one behind the other, as a cache and rows without | [`paged`] |
//! | `paged_dequantize` | the dequantized values in blocks, in blocks that lie side by side | [`dequantize`] |
//! | `paged_gaps` | attention anew for sequences whose block tables lead outside of the cache | [`gaps`] |
//! | `qk_norm` | divides rows of Q and K by their root mean square | [`norm`] |
//! | `quantize_kv` | quantized values of new rows in a quantized cache, and all dequantized values | [`quantize`] |
//! | `quantize_output` | results as e4m3 times a scale, behind attention | [`mod@quantize_output`] |
//! | `rotary_embedding` | rotates Q | [`rope`] |
//! | `rotary_rows` | the same, rows of any size | [`rope`] |
//! | `scatter_rows` | writes rows into a cache at a row of each sequence's own | [`scatter`] |
//! | `seqlens_to_pos_ids` | positions from lengths | [`positions`] |
//! | `tree_mask_rows` | a mask over the new tokens, as one over all keys | [`tree`] |
//! | `rolling_kv`, `rolling_lengths`, `rolling_bias` | a rolling KV cache, as one that does not roll | [`rolling`] |

/// Evaluates an expression with the [`Code`](crate::num::Code) of the format that a parameter
/// names, of 4 or of 8 bits. Which, is a constant of the kernel's text once a plan is loaded.
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
