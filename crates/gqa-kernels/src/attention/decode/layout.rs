//! Where the rows of a cache are: contiguous or in the [blocks](Blocks) of a paged KV cache; and
//! whether heads are as wide as tiles ([`Whole`]) or [narrower](Padded).

use crate::concept::pages::{Length, Sequence};
use crate::concept::seqlen::{Lengths, Seqlen};
use crate::params::{AttentionParams, PagedDecodeParams, Strides};
use crate::simt::{Global, lane};
use crate::tile::pages::{BlockTable, is_somewhere};
use crate::tile::rows::Rows;
use crate::tile::swizzle::{Swizzled, WarpCopy};
use bytemuck::Pod;

/// Finds the cached rows of a head.
pub trait Layout: Copy {
    /// Whether a row tile may have no rows.
    const MAY_BE_EMPTY: bool;
    /// Whether the launch may run beside another one, which attends to other sequences.
    const MAY_OVERLAP: bool;
    /// Whether lengths may divide the keys of all sequences (`division.rs`).
    const DIVIDES: bool;
    /// Rows of a piece: so many rows, from a multiple of that number on, are always contiguous.
    const PIECE: u32;
    /// Whether heads may have fewer columns than tiles.
    const PADS: bool = false;
    /// Whether rows may have no block, because the block table points outside of the cache. Their
    /// keys are masked.
    const MAY_LACK_ROWS: bool = false;
    /// Page offsets: what is looked up to find the pieces of a tile.
    type Offsets: Copy;

    /// Whether a tile's column is past the end of the heads. Call it only if the layout
    /// [pads](Self::PADS), so that other kernels contain no test.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_padding(a: &AttentionParams, column: u32) -> bool {
        column >= a.head_size
    }

    /// The layout of one sequence.
    fn of_sequence(self, batch: u32) -> Self;

    /// The rows of a row tile that exist.
    fn rows(self, a: &AttentionParams, rows: Rows) -> Rows;

    /// The lengths of the sequence, from `lengths` as loaded from device memory.
    fn seqlen(self, a: &AttentionParams, rows: &Rows, lengths: Lengths) -> Seqlen;

    /// Number of the tile's row `r` among the query rows of its head in all sequences; `None` past
    /// the last row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new_row(self, a: &AttentionParams, rows: &Rows, r: u32) -> Option<usize> {
        let start = if Self::MAY_BE_EMPTY { rows.start } else { rows.batch * a.q_len };
        (r < rows.count()).then(|| (start + rows.row(r).s) as usize)
    }

    /// Element offset of the head's row at a [place](Self::place), in a tensor with these strides.
    fn element(self, cache: Strides, rows: &Rows, place: u32) -> usize;

    /// Per-token scales of the head: number of the first row's scale, and the distance between
    /// rows.
    fn scales(self, a: &AttentionParams, rows: &Rows) -> (usize, u32);

    /// The place of a row of the sequence in the cache, which also numbers per-token scales; not
    /// [`is_somewhere`](Self::is_somewhere) without a block.
    fn place(self, row: u32) -> u32;

    /// Whether a place is a row of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_somewhere(self, place: u32) -> bool {
        !Self::MAY_LACK_ROWS || is_somewhere(place)
    }

    /// The place of row `row`, the first row of a piece.
    fn place_of(self, offsets: Self::Offsets, piece: u32, row: u32) -> u32;

    /// Whether a piece has no block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_rows(self, _: Self::Offsets) -> bool {
        false
    }

    /// Looks up the page offsets of `rows` rows from `begin` on. Rows from `end` on need no block.
    fn find(self, begin: u32, end: u32, rows: u32) -> Self::Offsets;

    /// Row `row` of the head at `source`, where rows have `cells` cells; it is the first row of
    /// piece `piece` of a tile.
    fn row<E: Pod>(
        self,
        offsets: Self::Offsets,
        piece: u32,
        source: Global<E>,
        row: u32,
        cells: u32,
    ) -> Global<E>;

    /// Starts copying a piece, as [`WarpCopy::start`].
    fn start<E: Pod, const UNITS: usize>(
        self,
        lanes: &WarpCopy<UNITS>,
        tile: Swizzled<E, UNITS>,
        rows: u32,
        source: Global<E>,
        valid: u32,
    );
}

/// A contiguous cache: the rows of a head lie side by side.
#[derive(Clone, Copy)]
pub struct SideBySide;

impl Layout for SideBySide {
    const MAY_BE_EMPTY: bool = false;
    const MAY_OVERLAP: bool = false;
    const DIVIDES: bool = false;
    const PIECE: u32 = u32::MAX;
    type Offsets = ();

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_sequence(self, _: u32) -> Self {
        self
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(self, _: &AttentionParams, rows: Rows) -> Rows {
        rows
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn seqlen(self, a: &AttentionParams, _: &Rows, lengths: Lengths) -> Seqlen {
        Seqlen::new(lengths, a.capacity, a.first_prompt != 0)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn element(self, cache: Strides, rows: &Rows, place: u32) -> usize {
        cache.at(rows.batch, rows.kv_head, place)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scales(self, a: &AttentionParams, rows: &Rows) -> (usize, u32) {
        let head = (rows.batch * a.kv_heads + rows.kv_head) as usize;
        (head * a.capacity as usize, 1)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(self, row: u32) -> u32 {
        row
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of(self, (): (), _: u32, row: u32) -> u32 {
        row
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, _: u32, _: u32, _: u32) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row<E: Pod>(self, (): (), _: u32, source: Global<E>, row: u32, cells: u32) -> Global<E> {
        source.offset(row as usize * cells as usize)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start<E: Pod, const UNITS: usize>(
        self,
        lanes: &WarpCopy<UNITS>,
        tile: Swizzled<E, UNITS>,
        rows: u32,
        source: Global<E>,
        valid: u32,
    ) {
        lanes.start(tile, rows, source, valid);
    }
}

/// A paged KV cache, (block, row, KV head, head size) with any strides. A block table lists the
/// blocks of each sequence; the new tokens of all sequences are packed.
///
/// The rows of a block are a power of two, [`PIECE`](Layout::PIECE) or more, and tiles begin at
/// multiples of `PIECE`, so each piece of a tile lies in one block. The table is read one tile
/// ahead, so that copies do not wait for it.
///
/// Where the table points outside of the cache, nothing is read, and the piece is zero in the tile.
#[derive(Clone, Copy)]
pub struct Blocks {
    /// cu_seqlens, (batch + 1): where the tokens of each sequence begin; null if each has one.
    starts: Global<i32>,
    /// Tokens of all sequences.
    tokens: u32,
    /// Most tokens of a sequence.
    longest: u32,
    /// The block tables of all sequences, or of one.
    table: BlockTable,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Distance of two rows of a head, in cells.
    stride: u32,
    /// Whether the call appends its tokens.
    appends: bool,
    /// Whether the given lengths include the new tokens.
    counts_new: bool,
}

impl Blocks {
    /// The layout of all sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(in crate::attention) fn new(
        starts: Global<i32>,
        table: Global<i32>,
        p: &PagedDecodeParams,
    ) -> Self {
        Self {
            starts,
            tokens: p.tokens,
            longest: p.longest,
            table: BlockTable {
                entries: table,
                log_rows: p.log_block_size,
                last: p.blocks - 1,
                steps: p.steps,
            },
            per_sequence: p.per_sequence,
            stride: p.decode.attention.k.row as u32,
            appends: p.decode.new_len > 0,
            counts_new: p.counts_new != 0,
        }
    }
}

/// Most pieces of a tile.
const PIECES: usize = 4;

impl Layout for Blocks {
    const MAY_BE_EMPTY: bool = true;
    const MAY_OVERLAP: bool = true;
    const DIVIDES: bool = true;
    const MAY_LACK_ROWS: bool = true;
    const PIECE: u32 = 16;
    type Offsets = [u32; PIECES];

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_sequence(self, batch: u32) -> Self {
        let entries = self.table.entries.offset((batch * self.per_sequence) as usize);
        Self { table: BlockTable { entries, ..self.table }, ..self }
    }

    /// No rows if the sequence has more tokens than this launch takes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(self, a: &AttentionParams, rows: Rows) -> Rows {
        if self.starts.is_null() {
            return rows.among(rows.batch, 1);
        }
        let bounds = [0, 1].map(|next| self.starts.load((rows.batch + next) as usize));
        let most = self.longest.min(a.capacity);
        let [start, new, cut] = Sequence::tokens(bounds, self.tokens, most);
        let mut rows = rows.among(start, if new <= a.q_len { new } else { 0 });
        // Stands for the past length until that is known.
        rows.seqlen.past = cut;
        rows
    }

    /// Clamps the lengths so that appended tokens have rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn seqlen(self, a: &AttentionParams, rows: &Rows, lengths: Lengths) -> Seqlen {
        let Seqlen { total: new, past: cut } = rows.seqlen;
        let length = Length { rows: lengths.last, counts_new: self.counts_new };
        let least = if self.appends { 0 } else { -(new as i32) };
        let past = length.past(least, [new, cut], a.capacity);
        Seqlen { total: past.wrapping_add(new), past }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn element(self, cache: Strides, rows: &Rows, place: u32) -> usize {
        self.table.element(place) + cache.at(0, rows.kv_head, 0)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scales(self, a: &AttentionParams, rows: &Rows) -> (usize, u32) {
        (rows.kv_head as usize, a.kv_heads)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(self, row: u32) -> u32 {
        self.table.place(row)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of(self, offsets: [u32; PIECES], piece: u32, _: u32) -> u32 {
        offsets[piece as usize]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_rows(self, offsets: [u32; PIECES]) -> bool {
        !is_somewhere(offsets.into_iter().fold(0, |all, place| all | place))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, begin: u32, end: u32, rows: u32) -> [u32; PIECES] {
        core::array::from_fn(|piece| {
            let within = piece as u32 * Self::PIECE;
            if within < rows { self.table.place((begin + within).min(end.max(1) - 1)) } else { 0 }
        })
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row<E: Pod>(
        self,
        offsets: [u32; PIECES],
        piece: u32,
        source: Global<E>,
        _: u32,
        _: u32,
    ) -> Global<E> {
        source.offset(self.table.element(offsets[piece as usize]))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start<E: Pod, const UNITS: usize>(
        self,
        lanes: &WarpCopy<UNITS>,
        tile: Swizzled<E, UNITS>,
        rows: u32,
        source: Global<E>,
        valid: u32,
    ) {
        lanes.start_apart(tile, rows, source, self.stride, valid);
    }
}

/// Whether heads are as wide as tiles.
pub trait Heads {
    /// Whether they may have fewer columns.
    const PAD: bool;
    /// The layout of such heads over `L`.
    type Over<L: Layout>: Layout;

    /// The layout of a call's heads; `per_unit` is the number of columns in 16 bytes of a cache
    /// row.
    fn over<L: Layout>(layout: L, a: &AttentionParams, per_unit: u32) -> Self::Over<L>;
}

/// Heads as wide as tiles.
pub struct Whole;

impl Heads for Whole {
    const PAD: bool = false;
    type Over<L: Layout> = L;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn over<L: Layout>(layout: L, _: &AttentionParams, _: u32) -> L {
        layout
    }
}

/// Heads with as many columns or fewer. The remaining columns of tiles are zero.
pub struct Padded;

impl Heads for Padded {
    const PAD: bool = true;
    type Over<L: Layout> = Narrow<L>;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn over<L: Layout>(layout: L, a: &AttentionParams, per_unit: u32) -> Narrow<L> {
        Narrow { layout, stride: a.k.row as u32, units: a.head_size / per_unit }
    }
}

/// The layout of heads with fewer columns than tiles.
#[derive(Clone, Copy)]
pub struct Narrow<L> {
    layout: L,
    /// Distance of two rows of a head, in cells.
    stride: u32,
    /// 16-byte units of a row.
    units: u32,
}

impl<L: Layout> Layout for Narrow<L> {
    const MAY_BE_EMPTY: bool = L::MAY_BE_EMPTY;
    const MAY_OVERLAP: bool = L::MAY_OVERLAP;
    const DIVIDES: bool = L::DIVIDES;
    const PIECE: u32 = L::PIECE;
    const PADS: bool = true;
    const MAY_LACK_ROWS: bool = L::MAY_LACK_ROWS;
    type Offsets = L::Offsets;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_sequence(self, batch: u32) -> Self {
        Self { layout: self.layout.of_sequence(batch), ..self }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(self, a: &AttentionParams, rows: Rows) -> Rows {
        self.layout.rows(a, rows)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn seqlen(self, a: &AttentionParams, rows: &Rows, lengths: Lengths) -> Seqlen {
        self.layout.seqlen(a, rows, lengths)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn element(self, cache: Strides, rows: &Rows, place: u32) -> usize {
        self.layout.element(cache, rows, place)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scales(self, a: &AttentionParams, rows: &Rows) -> (usize, u32) {
        self.layout.scales(a, rows)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(self, row: u32) -> u32 {
        self.layout.place(row)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place_of(self, offsets: L::Offsets, piece: u32, row: u32) -> u32 {
        self.layout.place_of(offsets, piece, row)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_rows(self, offsets: L::Offsets) -> bool {
        self.layout.lacks_rows(offsets)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(self, begin: u32, end: u32, rows: u32) -> L::Offsets {
        self.layout.find(begin, end, rows)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row<E: Pod>(
        self,
        offsets: L::Offsets,
        piece: u32,
        source: Global<E>,
        row: u32,
        _: u32,
    ) -> Global<E> {
        self.layout.row(offsets, piece, source, row, self.stride)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn start<E: Pod, const UNITS: usize>(
        self,
        lanes: &WarpCopy<UNITS>,
        tile: Swizzled<E, UNITS>,
        rows: u32,
        source: Global<E>,
        valid: u32,
    ) {
        // A lane copies the same unit of each of its rows, or nothing.
        let valid = if lane() % (UNITS as u32) < self.units { valid } else { 0 };
        lanes.start_apart(tile, rows, source, self.stride, valid);
    }
}
