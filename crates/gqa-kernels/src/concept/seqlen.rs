//! The length of a sequence, and the positions of this call's rows in it.

/// Lengths of one batch entry. `seqlens_k` holds the index of the last valid token, so the length
/// is one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seqlen {
    /// Valid keys, the new ones included.
    pub total: u32,
    /// Valid keys before this call; also the position of query row 0. Wraps below 0 where there are
    /// fewer keys than rows, which sequences over a [paged KV cache](super::pages) may have.
    pub past: u32,
}

impl Seqlen {
    /// From the entry's `seqlens_k`, clamped to the size of the buffers so that no value on the
    /// device can cause accesses outside of them. A negative value means an empty sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(last_index: i32, q_len: u32, capacity: u32, first_prompt: bool) -> Self {
        let total =
            if last_index < 0 { 0 } else { (last_index as u32).saturating_add(1).min(capacity) };
        let past = if first_prompt { 0 } else { total.saturating_sub(q_len) };
        Self { total, past }
    }

    /// Rows of this call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new_rows(self) -> u32 {
        self.total.wrapping_sub(self.past)
    }

    /// Whether query row `s` is a token of the sequence, rather than padding or a row without a
    /// key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_token(self, s: u32) -> bool {
        self.past.wrapping_add(s) < self.total
    }
}
