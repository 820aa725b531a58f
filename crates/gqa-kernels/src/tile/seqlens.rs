//! The tensors that say how long a call's sequences are, each with a cache of its own.

use crate::concept::seqlen::{Lengths, Seqlen};
use crate::params::AttentionParams;
use crate::simt::{Global, shfl_idx_u32};

/// int32 tensors of shape (batch). Kernels take their pointers as the registry's `seqlens_k`.
#[derive(Clone, Copy)]
pub struct Seqlens {
    last: Global<i32>,
    tokens: Global<i32>,
}

impl Seqlens {
    /// `seqlens_k` has the index of each sequence's last token, `query_seqlens` how many of the
    /// call's rows are tokens; null: all.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(seqlens_k: Global<i32>, query_seqlens: Global<i32>) -> Self {
        Self { last: seqlens_k, tokens: query_seqlens }
    }

    /// The lengths over a paged KV cache; `concept::pages` explains them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_pages(past_seqlens: Global<i32>) -> Self {
        Self::new(past_seqlens, Global::null())
    }

    /// Loads what the tensors say of batch entry `b` of a call of `q_len` rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn load(self, b: u32, q_len: u32) -> Lengths {
        let last = self.last.load(b as usize);
        if self.tokens.is_null() {
            return Lengths { last, tokens: q_len };
        }
        Lengths { last, tokens: (self.tokens.load(b as usize).max(0) as u32).min(q_len) }
    }

    /// Broadcasts what lane 0 has loaded to the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_lane_0(self, loaded: Lengths, q_len: u32) -> Lengths {
        let last = shfl_idx_u32(loaded.last as u32, 0) as i32;
        // The pointer is the same in all lanes.
        let tokens = if self.tokens.is_null() { q_len } else { shfl_idx_u32(loaded.tokens, 0) };
        Lengths { last, tokens }
    }

    /// The sequence of batch entry `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn get(self, b: u32, p: &AttentionParams) -> Seqlen {
        Seqlen::new(self.load(b, p.q_len), p.capacity, p.first_prompt != 0)
    }
}
