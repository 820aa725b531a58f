//! Which keys a query row sees: always one range.

use super::seqlen::Seqlen;

/// Keys `first..end` of one query row; empty where `first >= end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// First visible key.
    pub first: u32,
    /// One past the last visible key.
    pub end: u32,
}

/// The visibility rule of all rows of a call.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// Whether a row at position p sees only the keys 0..=p.
    pub causal: bool,
    /// Number of newest visible keys, the row's own included; 0: no window.
    pub window: u32,
}

impl Mask {
    /// The keys that query row `s` of a sequence sees. Padding rows see none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn visible(self, seqlen: Seqlen, s: u32) -> Visible {
        if !seqlen.is_token(s) {
            return Visible { first: 0, end: 0 };
        }
        let end = if self.causal { seqlen.past.wrapping_add(s) + 1 } else { seqlen.total };
        let first = if self.window > 0 { end.saturating_sub(self.window) } else { 0 };
        Visible { first, end }
    }
}
