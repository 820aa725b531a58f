//! Sequences over a paged KV cache: whose a row tile is, and where keys and values are.

use crate::concept::pages::{Length, Sequence};
use crate::num::quotient;
use crate::params::AttentionParams;
use crate::simt::Global;

/// The sequences of a call, whose tokens lie one behind the other.
///
/// Row tiles are numbered through all sequences: those of sequence `b` begin with number
/// `starts[b] * group / height + b`, which leaves each as many as it needs, and at most one more.
/// So they are no more than tokens and sequences make necessary, however lengths differ, and a
/// search finds whose one is. `group` are the rows that a token has in a tile, `height` those of
/// the tile.
#[derive(Clone, Copy)]
pub struct Sequences {
    /// (batch + 1)
    pub starts: Global<i32>,
    /// (batch)
    pub past_seqlens: Global<i32>,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Tokens of a sequence that is not another launch's.
    pub least: u32,
    /// Whether lengths count the new tokens.
    pub counts_new: bool,
}

impl Sequences {
    /// The sequence that has row tile `tile`, and the tile's number there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn find(self, tile: u32, batch: u32, group: u32, height: u32) -> (u32, u32) {
        let (mut low, mut high) = (0, batch);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if self.first_tile(middle, group, height) <= tile {
                low = middle;
            } else {
                high = middle;
            }
        }
        (low, tile.saturating_sub(self.first_tile(low, group, height)))
    }

    /// Number of the first row tile of sequence `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_tile(self, b: u32, group: u32, height: u32) -> u32 {
        (self.starts.load(b as usize) as u32).wrapping_mul(group) / height + b
    }

    /// Where the rows of sequence `b` are, if they are this launch's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn get(self, b: u32, p: &AttentionParams) -> Sequence {
        let [start, end] = [0, 1].map(|next| self.starts.load((b + next) as usize));
        let rows = self.past_seqlens.load(b as usize);
        let length = Length { rows, counts_new: self.counts_new };
        let sequence = Sequence::new([start, end], length, self.tokens, p.q_len, p.capacity);
        sequence.of_at_least(self.least)
    }
}

/// Row tiles of `height` rows of so many sequences, whose tokens have so many rows together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn row_tiles(rows: u32, sequences: u32, height: u32) -> u32 {
    quotient(rows, height) + sequences
}

/// Which blocks of a paged KV cache a sequence has.
#[derive(Clone, Copy)]
pub struct BlockTable {
    /// (blocks of the sequence)
    pub entries: Global<i32>,
    /// Logarithm of a block's rows.
    pub log_rows: u32,
    /// The cache's last block.
    pub last: u32,
}

/// In place of a row of the cache: the table gives the sequence a block outside of the cache. Rows
/// behind it have this bit, too, and no row of a cache has it.
const NOWHERE: u32 = 1 << 31;

/// Whether a place is a row of the cache. Of other places nothing is read or written, and the keys
/// that they would hold are masked.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn is_somewhere(place: u32) -> bool {
    place & NOWHERE == 0
}

impl BlockTable {
    /// The place of row `row` of the sequence: a row of the cache, or [nowhere](is_somewhere).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn place(self, row: u32) -> u32 {
        let block = self.entries.load((row >> self.log_rows) as usize) as u32;
        let within = row & ((1 << self.log_rows) - 1);
        if block > self.last { NOWHERE } else { (block << self.log_rows) + within }
    }
}
