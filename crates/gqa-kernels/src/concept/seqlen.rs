//! The length of a sequence, and the positions of this call's rows in it.

/// The lengths that a call gives for a batch entry, unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// Index of the last valid token: the length is one more. Negative: there is no token.
    pub last: i32,
    /// Number of new tokens, for a sequence that began before the call.
    pub tokens: u32,
}

impl Lengths {
    /// Valid tokens, the new ones included: at most `capacity`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn total(self, capacity: u32) -> u32 {
        if self.last < 0 { 0 } else { (self.last as u32).saturating_add(1).min(capacity) }
    }
}

/// The lengths of one batch entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seqlen {
    /// Valid keys, the new ones included.
    pub total: u32,
    /// Valid keys before this call; also the position of query row 0. Wraps below 0 where there are
    /// fewer keys than rows, which sequences over a [paged KV cache](super::pages) may have.
    pub past: u32,
}

impl Seqlen {
    /// From the entry's lengths, clamped to the size of the buffers so that no value on the device
    /// can cause accesses outside of them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(lengths: Lengths, capacity: u32, first_prompt: bool) -> Self {
        let total = lengths.total(capacity);
        let past = if first_prompt { 0 } else { total.saturating_sub(lengths.tokens) };
        Self { total, past }
    }

    /// Rows of this call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new_rows(self) -> u32 {
        self.total.wrapping_sub(self.past)
    }

    /// Whether query row `s` is a token of the sequence with a key of its own, rather than padding
    /// or a row before the first key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_token(self, s: u32) -> bool {
        self.past.wrapping_add(s) < self.total
    }
}
