//! Sequences over a paged KV cache: which one a row tile belongs to, and where its keys and values
//! lie. A contiguous cache has a block for each.

use crate::concept::pages::{Length, Sequence};
use crate::num::quotient;
use crate::params::{AttentionParams, PageSteps};
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

/// The sequences of a call, whose tokens are packed one after the other.
///
/// Row tiles are numbered across all sequences: the row tiles of sequence `b` start at number
/// `starts[b] * group / height + b`, which gives each sequence at most one more than it needs. So
/// the total depends only on the numbers of tokens and sequences, however lengths differ, and a
/// binary search finds a tile's sequence. `group` is the number of rows per token, `height` the
/// rows per tile.
#[derive(Clone, Copy)]
pub struct Sequences {
    /// cu_seqlens of the new tokens, (batch + 1); over a contiguous cache the number of tokens of
    /// each batch entry, (batch), or null: all rows are tokens.
    pub starts: Global<i32>,
    /// Past lengths, (batch); over a contiguous cache seqlens_k.
    pub past_seqlens: Global<i32>,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Sequences with fewer tokens than this belong to another launch.
    pub least: u32,
    /// Whether the past lengths include the new tokens.
    pub counts_new: bool,
    /// Over a contiguous cache, whose batch entries have S rows each, rows of the output from one
    /// entry to the next.
    pub apart: Option<u32>,
}

impl Sequences {
    /// The sequence of row tile `tile`, and the tile's number within it.
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

    /// Rows and lengths of sequence `b`; empty if it belongs to another launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn get(self, b: u32, p: &AttentionParams) -> Sequence {
        if let Some(apart) = self.apart {
            let seqlen = Seqlens::new(self.past_seqlens, self.starts).get(b, p);
            let new = seqlen.new_rows().min(p.q_len);
            return Sequence { start: b * apart, new, past: seqlen.past };
        }
        let [start, end] = [0, 1].map(|next| self.starts.load((b + next) as usize));
        let rows = self.past_seqlens.load(b as usize);
        let length = Length { rows, counts_new: self.counts_new };
        let sequence = Sequence::new([start, end], length, self.tokens, p.q_len, p.capacity);
        sequence.of_at_least(self.least)
    }
}

/// Row tiles of `height` rows for `sequences` sequences with `rows` rows in total.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn row_tiles(rows: u32, sequences: u32, height: u32) -> u32 {
    quotient(rows, height) + sequences
}

/// Block table of one sequence over a paged KV cache.
#[derive(Clone, Copy)]
pub struct BlockTable {
    /// (blocks of the sequence)
    pub entries: Global<i32>,
    /// Binary logarithm of the rows of a block.
    pub log_rows: u32,
    /// The cache's last block.
    pub last: u32,
    /// How far rows are apart.
    pub steps: PageSteps,
}

/// Stands for a row outside of the cache, where the block table holds an index outside of it. No
/// place in the cache has this bit.
const NOWHERE: u32 = 1 << 31;

/// Whether a place is a row of the cache. Other places are neither read nor written, and their keys
/// are masked.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn is_somewhere(place: u32) -> bool {
    place & NOWHERE == 0
}

impl BlockTable {
    /// Place of row `row` of the sequence, in units from the first row of the cache on, or a place
    /// for which [`is_somewhere`] is false.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn place(self, row: u32) -> u32 {
        let block = self.entries.load((row >> self.log_rows) as usize) as u32;
        let within = row & ((1 << self.log_rows) - 1);
        if block > self.last { NOWHERE } else { block * self.steps.block + within * self.steps.row }
    }

    /// Index of the first element of a place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn element(self, place: u32) -> usize {
        place as usize * self.steps.unit as usize
    }
}
