//! Sequences whose keys and values lie in blocks of a cache, and whose query rows are tokens that lie one behind the other.
//!
//! **Row tiles** are numbered through all sequences: those of sequence `b` begin with number `starts[b] / ROWS + b`, which leaves each as many as it needs,
//! and at most one more. So they are no more than tokens and sequences make necessary, however lengths differ, and a search finds whose one is.
//!
//! **Key tiles** come in boxes, each of which lies in one block: the lower of both is their height. Each lane of two warps copies one.

use super::producer::Part;
use super::shape::{CHUNK, Tile};
use super::work::quotient;
use crate::concept::pages::Sequence;
use crate::params::{AttentionParams, PagedHopperParams};
use crate::simt::*;

/// Where sequences are.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    /// (batch + 1)
    starts: Global<i32>,
    /// (batch)
    past_seqlens: Global<i32>,
    /// (batch, blocks of a sequence)
    table: Global<i32>,
    /// Tokens of all sequences.
    tokens: u32,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Logarithm of a block's rows.
    log_rows: u32,
    /// The cache's last block.
    last: u32,
}

/// Fewest rows of a box.
pub const LEAST_BOX: u32 = 16;

impl Pages {
    #[inline(always)]
    pub(super) fn new(
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        table: Global<i32>,
        p: &PagedHopperParams,
    ) -> Self {
        Self {
            starts,
            past_seqlens,
            table,
            tokens: p.tokens,
            per_sequence: p.per_sequence,
            log_rows: p.log_block_size,
            last: p.blocks - 1,
        }
    }

    /// Row tiles of all sequences.
    #[inline(always)]
    pub(super) fn row_tiles<S: Tile>(self, p: &AttentionParams) -> u32 {
        row_tiles(self.tokens, p.batch, S::ROWS)
    }

    /// Number of the first row tile of sequence `b`.
    #[inline(always)]
    fn first_tile<S: Tile>(self, b: u32) -> u32 {
        self.starts.load(b as usize) as u32 / S::ROWS + b
    }

    /// The sequence that has a row tile, and the tile's first row there.
    #[inline(always)]
    pub(super) fn find<S: Tile>(self, tile: u32, p: &AttentionParams) -> (u32, u32) {
        let (mut low, mut high) = (0, p.batch);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if self.first_tile::<S>(middle) <= tile {
                low = middle;
            } else {
                high = middle;
            }
        }
        (low, tile.saturating_sub(self.first_tile::<S>(low)) * S::ROWS)
    }

    /// Where the rows of sequence `b` are.
    #[inline(always)]
    pub(super) fn sequence(self, b: u32, p: &AttentionParams) -> Sequence {
        let [start, end] = [0, 1].map(|next| self.starts.load((b + next) as usize));
        let past = self.past_seqlens.load(b as usize);
        Sequence::new([start, end], past, self.tokens, p.q_len, p.capacity)
    }

    /// Where this lane's box of a part of a sequence with `keys` keys is in the cache; behind these it may be any of the sequence's.
    #[inline(always)]
    pub(super) fn find_box<S: Tile>(self, part: Part, keys: u32) -> Part {
        let height = self.box_rows::<S>();
        let key = (part.row + nth_box() * height).min(keys.max(1) - 1) & !(height - 1);
        let entry = part.batch * self.per_sequence + (key >> self.log_rows);
        let block = (self.table.load(entry as usize) as u32).min(self.last);
        Part { row: key & ((1 << self.log_rows) - 1), batch: block, ..part }
    }

    /// Two warps: start copying a tile, each lane its box.
    #[inline(always)]
    pub(super) fn load_tile<S: Tile>(
        self,
        destination: u32,
        map: TensorMap,
        part: Part,
        full: u32,
    ) {
        if thread_idx() == 0 {
            mbarrier_arrive_expect(full, S::N * S::CHUNKS * 128);
        }
        sync_warp();
        let above = nth_box() * self.box_rows::<S>();
        if above < S::N {
            let mut chunk = 0;
            while chunk < S::CHUNKS {
                let at = [chunk * CHUNK, part.row, part.head, part.batch];
                tma_load(destination + (chunk * S::N + above) * 128, map, at, full);
                chunk += 1;
            }
        }
    }

    /// Rows of a box.
    #[inline(always)]
    fn box_rows<S: Tile>(self) -> u32 {
        box_rows(1 << self.log_rows, S::N)
    }
}

/// Number of this lane's box of a tile: warps 0 and 2 take turns.
#[inline(always)]
fn nth_box() -> u32 {
    2 * lane() + warp() / 2
}

/// Row tiles of `rows` rows of so many sequences, which have so many tokens together.
#[inline(always)]
pub(super) fn row_tiles(tokens: u32, sequences: u32, rows: u32) -> u32 {
    quotient(tokens, rows) + sequences
}

/// Rows of a box in blocks of `block_size` rows, a power of two, and tiles of `keys` keys, one too.
#[inline(always)]
pub const fn box_rows(block_size: u32, keys: u32) -> u32 {
    if block_size < keys { block_size } else { keys }
}
