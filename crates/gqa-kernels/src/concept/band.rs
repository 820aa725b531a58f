//! Which keys a query row sees, with windows on both sides and every alignment: still one range.

use super::mask::Visible;
use super::seqlen::Lengths;
use crate::params::{MaskedParams, alignment};

/// The visibility rule of one batch entry.
#[derive(Clone, Copy, Debug)]
pub struct Band {
    /// Valid keys.
    pub total: u32,
    /// Position of query row 0; negative where there are more rows than keys.
    position: i64,
    /// Whether rows past the sequence's end are padding.
    padded: bool,
    left: u32,
    right: u32,
    /// Keys from this one on are hidden.
    limit: u32,
}

impl Band {
    /// The rule of the entry with these lengths, clamped to the size of the buffers so that no
    /// value on the device can cause accesses outside of them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(lengths: Lengths, p: &MaskedParams) -> Self {
        let (capacity, q_len) = (p.attention.capacity, p.attention.q_len);
        let total = lengths.total(capacity);
        let position = match p.alignment {
            alignment::POSITION => p.position as i64,
            alignment::END => total as i64 - q_len as i64,
            _ if p.attention.first_prompt != 0 => 0,
            _ => total.saturating_sub(lengths.tokens) as i64,
        };
        Self {
            total,
            position,
            padded: p.alignment == alignment::PHASE,
            left: p.left,
            right: p.right,
            limit: total.min(p.columns),
        }
    }

    /// The keys that query row `s` sees. Both ends grow with the row, even where the range is
    /// empty; padding sees no key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn visible(&self, s: u32) -> Visible {
        let at = self.position + s as i64;
        if self.padded && at >= self.total as i64 {
            return Visible { first: 0, end: 0 };
        }
        let clamp = |key: i64| key.max(0).min(self.limit as i64) as u32;
        let first = if self.left == u32::MAX { 0 } else { clamp(at - self.left as i64) };
        let end =
            if self.right == u32::MAX { self.limit } else { clamp(at + self.right as i64 + 1) };
        Visible { first, end }
    }

    /// The smallest range that contains the keys of all rows `first ..= last`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn visible_to(&self, first: u32, last: u32) -> Visible {
        let mut last = last;
        if self.padded {
            let tokens = (self.total as i64 - self.position).max(0) as u32;
            if first >= tokens {
                return Visible { first: 0, end: 0 };
            }
            last = last.min(tokens - 1);
        }
        Visible { first: self.visible(first).first, end: self.visible(last).end }
    }
}
