//! Writes position_ids for callers of rotary embeddings that need them; the other kernels compute
//! positions from `seqlens_k`.

use super::seqlen;
use super::walk::Walk;
use crate::params::PrologueParams;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// Index space of [`seqlens_to_pos_ids`]: (batch, row).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn seqlens_to_pos_ids_size(p: &PrologueParams) -> [u32; 4] {
    [p.batch, 1, 1, p.q_len]
}

/// `position_ids[b, s] = past_b + s`, padding rows included.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn seqlens_to_pos_ids(seqlens: Seqlens, position_ids: Global<i64>, p: PrologueParams) {
    for [b, .., s] in Walk::over(seqlens_to_pos_ids_size(&p)) {
        let at = b as usize * p.rotary.position_stride as usize + s as usize;
        position_ids.store(at, (seqlen(&p, seqlens, b).past + s) as i64);
    }
}
