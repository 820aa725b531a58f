//! Where the rows of a call are: in tensors that have them side by side, or in [blocks](Blocks).

use crate::num::Element;
use crate::params::PagedTiledParams;
use crate::simt::{Global, any_sync, lane, shfl_idx_u32};
use crate::tile::pages::{BlockTable, Sequences, is_somewhere};
use crate::tile::rows::{Row, Rows, Span};
use crate::tile::swizzle::{RowCopy, Swizzled};
use core::ops::Range;

/// What finds the rows of a tile's sequence.
pub trait Layout: Copy {
    /// Tiles of keys begin at multiples of as many rows.
    const PIECE: u32;
    /// Where the rows of a tile of keys are, as far as that is looked up.
    type Spots: Copy;

    /// The number of the tile's row `r` in tensors of queries, and its query head.
    fn query(self, rows: &Rows, r: u32) -> (u32, u32);

    /// The tile's row `r`, by that number.
    fn row(self, rows: &Rows, r: u32) -> Row;

    /// The keys that the tile sees.
    fn span(self, rows: &Rows) -> Span;

    /// Looks up where the keys of the tile from `begin + further` on are; for those from `end` on
    /// the last one before stands.
    fn find(self, begin: u32, further: u32, end: u32) -> Self::Spots;

    /// Whether a key of the tile is nowhere, because the table leads outside of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_keys(self, _: Self::Spots) -> bool {
        false
    }

    /// Whether key `key` is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_nowhere(self, _: u32) -> bool {
        false
    }

    /// Starts copying `rows` rows, a constant, from row `keys.start` on, of a head that starts at
    /// `source.0` and whose rows are `source.1` elements apart. Rows from `keys.end` on or that
    /// are nowhere, and columns from `width` on, become zero.
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

/// Tensors of (batch, head, row).
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

/// A paged KV cache, (block, row, KV head, head size), of which a table gives some blocks to each
/// sequence, whose queries are tokens that lie behind those of the sequence before.
///
/// Blocks have a power of two of rows, [`PIECE`](Layout::PIECE) or more, and tiles begin at
/// multiples of as many, so that each piece of a tile lies in one block. Each lane of a warp looks
/// one piece up while the tile before is on its way, and tells the others when that is copied:
/// copies that waited for the table would be late.
#[derive(Clone, Copy)]
pub struct Blocks(BlockTable);

impl Blocks {
    /// Those of sequence `batch`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(table: Global<i32>, batch: u32, p: &PagedTiledParams) -> Self {
        Self(BlockTable {
            entries: table.offset((batch * p.per_sequence) as usize),
            log_rows: p.log_block_size,
            last: p.blocks - 1,
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
        }
    }
}

/// Most pieces of a tile.
const PIECES: u32 = 4;

impl Layout for Blocks {
    const PIECE: u32 = 16;
    /// The place at which the lane's piece begins.
    type Spots = u32;

    /// Rows that the tile does not have are behind all tokens.
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
            let place = shfl_idx_u32(spots, r / Self::PIECE) + r % Self::PIECE;
            let exists = keys.start + r < keys.end && is_somewhere(place);
            (source.offset((u64::from(place) * stride) as usize), exists)
        });
    }
}
