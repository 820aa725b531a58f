//! Where the rows of a call lie: in contiguous tensors, or in the [blocks](Blocks) of a paged KV
//! cache.

use crate::num::Element;
use crate::params::PagedTiledParams;
use crate::simt::{Global, any_sync, lane, shfl_idx_u32};
use crate::tile::pages::{BlockTable, Sequences, is_somewhere};
use crate::tile::rows::{Row, Rows, Span};
use crate::tile::swizzle::{RowCopy, Swizzled};
use core::ops::Range;

/// Finds the rows of a tile's sequence.
pub trait Layout: Copy {
    /// Key tiles begin at multiples of this many rows.
    const PIECE: u32;
    /// Page offsets of the rows of a key tile, as far as they are looked up in advance.
    type Spots: Copy;

    /// Number of the tile's row `r` in the tensor of queries, and its query head.
    fn query(self, rows: &Rows, r: u32) -> (u32, u32);

    /// The tile's row `r`, with that number.
    fn row(self, rows: &Rows, r: u32) -> Row;

    /// The keys that the tile sees.
    fn span(self, rows: &Rows) -> Span;

    /// Looks up the page offsets of the key tile from `begin + further` on; keys from `end` on
    /// repeat the last one before `end`.
    fn find(self, begin: u32, further: u32, end: u32) -> Self::Spots;

    /// Whether a key of the tile lies outside of the cache because its block table entry does.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_keys(self, _: Self::Spots) -> bool {
        false
    }

    /// Whether key `key` lies outside of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_nowhere(self, _: u32) -> bool {
        false
    }

    /// Starts copying `rows` rows, a constant, from row `keys.start` on, of a head that starts at
    /// `source.0` and whose rows are `source.1` elements apart. Rows from `keys.end` on or outside
    /// of the cache, and columns from `width` on, become zero.
    fn start<T: Element, const UNITS: usize, const THREADS: u32>(
        self,
        copy: RowCopy<UNITS, THREADS>,
        tile: Swizzled<T, UNITS>,
        rows: u32,
        width: u32,
        source: (Global<T>, u64),
        keys: Range<u32>,
        spots: Self::Spots,
    );
}

/// Contiguous tensors (batch, head, row).
#[derive(Clone, Copy)]
pub struct SideBySide;

impl Layout for SideBySide {
    const PIECE: u32 = 1;
    type Spots = ();

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn query(self, rows: &Rows, r: u32) -> (u32, u32) {
        rows.query(r)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(self, rows: &Rows, r: u32) -> Row {
        rows.row(r)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn span(self, rows: &Rows) -> Span {
        rows.span()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, _: u32, _: u32, _: u32) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start<T: Element, const UNITS: usize, const THREADS: u32>(
        self,
        copy: RowCopy<UNITS, THREADS>,
        tile: Swizzled<T, UNITS>,
        rows: u32,
        width: u32,
        source: (Global<T>, u64),
        keys: Range<u32>,
        (): (),
    ) {
        copy.start_rows(tile, rows, width, source, keys);
    }
}

/// A paged KV cache, (block, row, KV head, head size) with any strides, and a sequence's row of the
/// block table. The queries of all sequences are packed.
///
/// A block has a power of two of rows, at least [`PIECE`](Layout::PIECE), and key tiles begin at
/// multiples of that, so that each piece of a tile lies in one block. Each lane of a warp looks up
/// one piece while the previous tile is in flight, and broadcasts its offset when the tile is
/// copied: copies that waited for the table would start late.
#[derive(Clone, Copy)]
pub struct Blocks(BlockTable);

impl Blocks {
    /// The blocks of sequence `batch`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(table: Global<i32>, batch: u32, p: &PagedTiledParams) -> Self {
        Self(BlockTable {
            entries: table.offset((batch * p.per_sequence) as usize),
            log_rows: p.log_block_size,
            last: p.blocks - 1,
            steps: p.steps,
        })
    }

    /// The sequences of a call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sequences(
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        p: &PagedTiledParams,
    ) -> Sequences {
        Sequences {
            starts,
            past_seqlens,
            tokens: p.tokens,
            least: p.least,
            counts_new: p.counts_new != 0,
            apart: None,
        }
    }
}

/// Most pieces of a tile.
const PIECES: u32 = 4;

impl Layout for Blocks {
    const PIECE: u32 = 16;
    /// The place at which the lane's piece begins.
    type Spots = u32;

    /// Rows past the tile's last one get a number past all tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn query(self, rows: &Rows, r: u32) -> (u32, u32) {
        let (s, head) = rows.query(r);
        (if r < rows.count() { rows.start + s } else { u32::MAX }, head)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(self, rows: &Rows, r: u32) -> Row {
        Row { s: self.query(rows, r).0, ..rows.row(r) }
    }

    /// The first row may be a token without a key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn span(self, rows: &Rows) -> Span {
        rows.span_of_tokens()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, begin: u32, further: u32, end: u32) -> u32 {
        let piece = begin + further + lane() % PIECES * Self::PIECE;
        self.0.place(piece.min(end.max(1) - 1))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_keys(self, spots: u32) -> bool {
        any_sync(!is_somewhere(spots))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_nowhere(self, key: u32) -> bool {
        !is_somewhere(self.0.place(key))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start<T: Element, const UNITS: usize, const THREADS: u32>(
        self,
        copy: RowCopy<UNITS, THREADS>,
        tile: Swizzled<T, UNITS>,
        rows: u32,
        width: u32,
        (source, stride): (Global<T>, u64),
        keys: Range<u32>,
        spots: u32,
    ) {
        copy.start(tile, rows, width, |r| {
            let place = shfl_idx_u32(spots, r / Self::PIECE);
            let exists = keys.start + r < keys.end && is_somewhere(place);
            let within = u64::from(r % Self::PIECE) * stride;
            (source.offset(self.0.element(place) + within as usize), exists)
        });
    }
}
