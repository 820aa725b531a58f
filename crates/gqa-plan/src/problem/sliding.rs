//! A rolling KV cache, and the inner call, counted from the cache's first row.
//!
//! Back ends compute the inner call, which is not aware of rolling: its lengths count the rows in
//! the cache, positions are explicit, and attention_bias has columns for those rows only. One new
//! row fits after the evicted rows are gone. Several new rows need a larger temporary cache,
//! because the first of them attends to rows that the last ones evict; the surviving rows are
//! copied back afterwards.

use crate::problem::{Bias, CacheBinding, Phase, Problem, ProblemFields, Rotary};
use gqa_kernels::concept::sliding::Sliding;
use gqa_tensor::Result;

impl Problem {
    /// Vector width in bytes for moving rolling or paged rows.
    pub const VECTOR_BYTES: usize = 16;

    /// The geometry of the rolling cache; `None` where every sequence fits it, padding included, so
    /// that no row is evicted.
    pub fn sliding(&self) -> Option<Sliding> {
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let slides = self.slides && self.longest_padded() > self.capacity;
        slides.then(|| Sliding {
            window: size(self.window.unwrap_or(self.capacity)),
            capacity: size(self.capacity),
        })
    }

    /// The position of row 0 of the cache, for a sequence of length `total`.
    pub fn first_cached(&self, total: usize) -> usize {
        let resident =
            |sliding: Sliding| sliding.resident(u32::try_from(total).unwrap_or(u32::MAX));
        self.sliding().map_or(0, |sliding| total - resident(sliding) as usize)
    }

    /// Whether attention reads a temporary cache while this one rolls.
    pub fn is_staged(&self) -> bool {
        self.q_len > 1
    }

    /// This call, counted from the first row of a rolling KV cache. A first prompt's rows are the
    /// sequence's first ones anyway.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn counted_from_cache(&self) -> Result<Self> {
        let is_prompt = self.phase == Phase::FirstPrompt;
        let past_capacity = if is_prompt { 0 } else { self.capacity };
        let capacity = if self.is_staged() { past_capacity + self.new_len } else { self.capacity };
        let total_len = self.total_len.min(capacity);
        let explicit = |rotary: Rotary| rotary.explicit.or((!is_prompt).then_some(self.q_len));
        self.derive(|call| ProblemFields {
            slides: false,
            prefetch_cache: false,
            cache: if self.is_staged() { CacheBinding::Separate } else { CacheBinding::Shared },
            past_capacity,
            capacity,
            total_len,
            window: self.window.filter(|&window| window < capacity),
            rotary: self.rotary.map(|rotary| Rotary { explicit: explicit(rotary), ..rotary }),
            bias: self.bias.map(|bias| Bias {
                batch: bias.batch && is_prompt,
                columns: total_len,
                ..bias
            }),
            ..call
        })
    }
}
