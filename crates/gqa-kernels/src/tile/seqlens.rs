//! The tensors that say how long a call's sequences are, each with a cache of its own.

use crate::concept::seqlen::{Lengths, Seqlen};
use crate::params::AttentionParams;
use crate::simt::{Global, shfl_idx_u32};

/// int32 tensors of shape (batch). Kernels take their pointers as the registry's `seqlens_k`.
#[derive(Clone, Copy)]
pub struct Seqlens {
    last: Global<i32>,
}

impl Seqlens {
    /// `seqlens_k` has the index of each sequence's last token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(seqlens_k: Global<i32>) -> Self {
        Self { last: seqlens_k }
    }

    /// The lengths over a paged KV cache, whose meaning `concept::pages` has.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_pages(past_seqlens: Global<i32>) -> Self {
        Self::new(past_seqlens)
    }

    /// Loads what the tensors say of batch entry `b` of a call of `q_len` rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load(self, b: u32, q_len: u32) -> Lengths {
        Lengths { last: self.last.load(b as usize), tokens: q_len }
    }

    /// What lane 0 has loaded, for all lanes of the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_lane_0(self, loaded: Lengths, q_len: u32) -> Lengths {
        Lengths { last: shfl_idx_u32(loaded.last as u32, 0) as i32, tokens: q_len }
    }

    /// The sequence of batch entry `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn get(self, b: u32, p: &AttentionParams) -> Seqlen {
        Seqlen::new(self.load(b, p.q_len), p.capacity, p.first_prompt != 0)
    }
}
