//! Sequences over a paged KV cache: the number of new tokens of each, and the cached rows before
//! them.
//!
//! In a call that appends nothing a sequence may have more tokens than rows. Then the number of
//! rows before the tokens is negative, and that many of the first tokens have no row. With a causal
//! mask those tokens see no key; without one they see all rows, as other tokens do.

use super::seqlen::Seqlen;

/// Stands for the rows of a block where the rows of each sequence are contiguous in the cache. The
/// block table then holds the first row of each sequence.
pub const CONSECUTIVE: u32 = 1 << 31;

/// Stands for the rows of a block where the cache is contiguous: each batch entry is a block, and
/// there is no block table.
pub const CONTIGUOUS: u32 = 1 << 30;
/// Its binary logarithm.
pub const LOG_CONTIGUOUS: u32 = CONTIGUOUS.ilog2();

/// A sequence's length as stored in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Rows before or after the call.
    pub rows: i32,
    /// Whether `rows` includes the new tokens.
    pub counts_new: bool,
}

impl Length {
    /// Number of rows before the new tokens: `new` tokens are computed, the last `cut` ones are
    /// not. At least `least`; wraps below 0 if there are fewer rows than tokens. Clamped so that
    /// the rows of computed tokens are within `capacity`, which is at least `new`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn past(self, least: i32, [new, cut]: [u32; 2], capacity: u32) -> u32 {
        let counted = if self.counts_new { new + cut } else { 0 };
        self.rows.wrapping_sub(counted as i32).max(least).min((capacity - new) as i32) as u32
    }
}

/// The tokens of a sequence and its rows in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Index of its first token among the tokens of all sequences.
    pub start: u32,
    /// Number of computed tokens.
    pub new: u32,
    /// Rows before them; wraps below 0 if there are fewer rows than tokens.
    pub past: u32,
}

impl Sequence {
    /// From the bounds of its tokens and its length, which are clamped so that no value in device
    /// memory leads out of bounds: there are `tokens` tokens of all sequences, at most `q_len` of
    /// one, and `capacity` rows in its blocks. Tokens from `q_len` on are cut off.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(bounds: [i32; 2], length: Length, tokens: u32, q_len: u32, capacity: u32) -> Self {
        let [start, new, cut] = Self::tokens(bounds, tokens, q_len.min(capacity));
        Self { start, new, past: length.past(-(new as i32), [new, cut], capacity) }
    }

    /// The first token, how many there are up to `most`, and how many more.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn tokens(bounds: [i32; 2], tokens: u32, most: u32) -> [u32; 3] {
        let [start, end] = bounds.map(|token| (token.max(0) as u32).min(tokens));
        let all = end.saturating_sub(start);
        let new = all.min(most);
        [start, new, all - new]
    }

    /// The sequence, or no tokens if it has fewer than `least`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_at_least(self, least: u32) -> Self {
        Self { new: if self.new < least { 0 } else { self.new }, ..self }
    }

    /// The sequence's length, including the new rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn seqlen(self) -> Seqlen {
        Seqlen { total: self.past.wrapping_add(self.new), past: self.past }
    }

    /// The row of token `i`, if it has one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn position(self, i: u32) -> Option<u32> {
        let position = self.past.wrapping_add(i) as i32;
        (position >= 0).then_some(position as u32)
    }

    /// Number of first tokens that have no row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn without_row(self) -> u32 {
        (self.past as i32).min(0).unsigned_abs()
    }

    /// Whether row `row` is before the window of the first token, so that no token sees it; window
    /// 0: no window. Its block may belong to another sequence by now.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_hidden(self, row: u32, window: u32) -> bool {
        row < self.first_seen(window)
    }

    /// The first row within the window of the first token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn first_seen(self, window: u32) -> u32 {
        let next = (self.past as i32 + 1).max(0).unsigned_abs();
        if window > 0 { next.saturating_sub(window) } else { 0 }
    }

    /// The token of row `row`, where the last of `q_len` rows is the sequence's last token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn token(self, row: u32, q_len: u32) -> Option<u32> {
        let Seqlen { total, past } = self.seqlen();
        let position = total.saturating_sub(q_len) + row;
        let is_token = position as i32 >= past as i32 && position < total;
        is_token.then(|| position.wrapping_sub(past))
    }
}
