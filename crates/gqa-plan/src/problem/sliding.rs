//! A rolling KV cache, and the call as it is counted from the cache's first row.
//!
//! Back ends compute the latter, which knows nothing of sliding: lengths are those of the rows that
//! the cache holds, positions are told, and attention_bias has those rows' columns. A token's row
//! finds room once the rows that it evicts have gone; several new rows need a cache with room for
//! all, because the first of them sees rows that the last ones evict. Of that cache the rows that
//! stay are copied afterwards.

use crate::problem::{Bias, CacheBinding, Phase, Problem, ProblemFields, Rotary};
use gqa_kernels::concept::sliding::{Slide, Sliding};
use gqa_tensor::Result;

impl Problem {
    /// Rows of a rolling KV cache or consists of blocks move as vectors of so many bytes.
    pub const VECTOR_BYTES: usize = 16;

    /// How the cache rolls; `None` where every sequence fits it, so that no row has to go.
    pub fn sliding(&self) -> Option<Sliding> {
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let slides = self.slides && self.total_len > self.capacity;
        slides.then(|| Sliding {
            window: size(self.window.unwrap_or(self.capacity)),
            capacity: size(self.capacity),
        })
    }

    /// Which row of a sequence of `total` is row 0 of its cache.
    pub fn first_cached(&self, total: usize) -> usize {
        let resident =
            |sliding: Sliding| sliding.resident(u32::try_from(total).unwrap_or(u32::MAX));
        self.sliding().map_or(0, |sliding| total - resident(sliding) as usize)
    }

    /// Whether attention has a cache of its own while this one rolls.
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

    /// What a call does to a sequence whose last row has index `last`; never more new rows than it
    /// has.
    pub fn slide(&self, sliding: Sliding, last: i32) -> Slide {
        let q_len = u32::try_from(self.q_len).unwrap_or(u32::MAX);
        let total = u32::try_from(i64::from(last) + 1).unwrap_or(0);
        match self.phase {
            Phase::FirstPrompt => sliding.slide(0, total.min(q_len)),
            _ => sliding.slide(total.saturating_sub(q_len), total),
        }
    }
}
