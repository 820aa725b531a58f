//! Sequences over a paged KV cache: how many tokens a call brings each, and behind which rows they
//! stand.

use super::seqlen::Seqlen;

/// Where the rows of a sequence are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Its first token, among those of all sequences.
    pub start: u32,
    /// Its tokens.
    pub new: u32,
    /// Its rows before them.
    pub past: u32,
}

impl Sequence {
    /// From where its tokens begin and end and from the rows before them, clamped to what there is,
    /// so that no value on the device can lead outside: `tokens` of all sequences, `q_len` of one
    /// at most, `capacity` rows in its blocks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(bounds: [i32; 2], past: i32, tokens: u32, q_len: u32, capacity: u32) -> Self {
        let [start, end] = bounds.map(|token| (token.max(0) as u32).min(tokens));
        let new = end.saturating_sub(start).min(q_len).min(capacity);
        Self { start, new, past: (past.max(0) as u32).min(capacity - new) }
    }

    /// The same without tokens if it has fewer than so many.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_at_least(self, least: u32) -> Self {
        Self { new: if self.new < least { 0 } else { self.new }, ..self }
    }

    /// Its rows, with the new ones.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn seqlen(self) -> Seqlen {
        Seqlen { total: self.past + self.new, past: self.past }
    }

    /// Whether none of its tokens sees its row `row`, because that is before the window of the
    /// first token; a window of 0 is none. The row's block may belong to another sequence by now.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_hidden(self, row: u32, window: u32) -> bool {
        window > 0 && row < (self.past + 1).saturating_sub(window)
    }

    /// The token that is row `row` of `q_len` rows, of which the last stands at the end of the
    /// sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn token(self, row: u32, q_len: u32) -> Option<u32> {
        let Seqlen { total, past } = self.seqlen();
        let position = total.saturating_sub(q_len) + row;
        (position >= past && position < total).then(|| position - past)
    }
}
