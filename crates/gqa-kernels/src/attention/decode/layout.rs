//! Where the rows of a cache are, side by side or in [blocks](Blocks), and whether they are as wide
//! as tiles ([`Whole`]) or [narrower](Padded).

use crate::concept::pages::{Length, Sequence};
use crate::concept::seqlen::{Lengths, Seqlen};
use crate::params::{AttentionParams, PagedDecodeParams, Strides};
use crate::simt::{Global, lane};
use crate::tile::pages::{BlockTable, is_somewhere};
use crate::tile::rows::Rows;
use crate::tile::swizzle::{Swizzled, WarpCopy};
use bytemuck::Pod;

/// What finds the rows of one head.
pub trait Layout: Copy {
    /// Whether a row tile may have no rows.
    const MAY_BE_EMPTY: bool;
    /// Whether the launch may run beside another one, which attends to other sequences.
    const MAY_OVERLAP: bool;
    /// Whether lengths may divide the keys of all sequences (`division.rs`).
    const DIVIDES: bool;
    /// Most rows of a tile, from a multiple of as many on, that are certain to be of one piece.
    const PIECE: u32;
    /// Whether heads may have fewer columns than tiles.
    const PADS: bool = false;
    /// Whether rows may be nowhere, because a table leads outside of the cache. Their keys are
    /// masked.
    const MAY_LACK_ROWS: bool = false;
    /// Where the pieces of a tile are, as far as that is looked up.
    type Offsets: Copy;

    /// Whether heads are too narrow to have that column of tiles: to be asked only of a layout that
    /// [pads](Self::PADS), so that of others the compiler sees no question.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_padding(a: &AttentionParams, column: u32) -> bool {
        column >= a.head_size
    }

    /// The same for a sequence.
    fn of_sequence(self, batch: u32) -> Self;

    /// Those of a row tile's rows that there are.
    fn rows(self, a: &AttentionParams, rows: Rows) -> Rows;

    /// Lengths of the sequence that has them, of which the device tells `length`.
    fn seqlen(self, a: &AttentionParams, rows: &Rows, lengths: Lengths) -> Seqlen;

    /// Which of the call's query rows of one head the tile's row `r` is, counted through all
    /// sequences; `None` where the tile has no such row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new_row(self, a: &AttentionParams, rows: &Rows, r: u32) -> Option<usize> {
        let start = if Self::MAY_BE_EMPTY { rows.start } else { rows.batch * a.q_len };
        (r < rows.count()).then(|| (start + rows.row(r).s) as usize)
    }

    /// Where the row of the head at a [place](Self::place) is in a tensor with these strides.
    fn element(self, cache: Strides, rows: &Rows, place: u32) -> usize;

    /// Among the scales of rows, where each row of the cache has its own, that of the head's first
    /// row, and how far it is from one row to the next.
    fn scales(self, a: &AttentionParams, rows: &Rows) -> (usize, u32);

    /// The place in the cache of a row of the sequence, or nowhere. Where rows have scales it is
    /// the row's number among these.
    fn place(self, row: u32) -> u32;

    /// Whether a place is a row of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_somewhere(self, place: u32) -> bool {
        !Self::MAY_LACK_ROWS || is_somewhere(place)
    }

    /// The place of the first row of a piece, which is row `row`.
    fn place_of(self, offsets: Self::Offsets, piece: u32, row: u32) -> u32;

    /// Whether a piece is nowhere.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_rows(self, _: Self::Offsets) -> bool {
        false
    }

    /// Looks up where the `rows` rows from `begin` on are, of which those from `end` on may be
    /// nowhere.
    fn find(self, begin: u32, end: u32, rows: u32) -> Self::Offsets;

    /// Row `row`, of so many cells, of the head that starts at `source`: the first one of a tile's
    /// piece of that number.
    fn row<E: Pod>(
        self,
        offsets: Self::Offsets,
        piece: u32,
        source: Global<E>,
        row: u32,
        cells: u32,
    ) -> Global<E>;

    /// Starts copying a piece from there on: as [`WarpCopy::start`].
    fn start<E: Pod, const UNITS: usize>(
        self,
        lanes: &WarpCopy<UNITS>,
        tile: Swizzled<E, UNITS>,
        rows: u32,
        source: Global<E>,
        valid: u32,
    );
}

/// A head's rows are one piece of memory.
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

/// A paged KV cache, (block, row, KV head, head size) with any strides, of which a table gives some
/// to each sequence, whose new rows are tokens that lie behind those of the sequence before.
///
/// Blocks have a power of two of rows, [`PIECE`](Layout::PIECE) or more, and tiles begin at
/// multiples of as many, so that each piece of a tile lies in one block. Where that is, is looked
/// up while the tile before it is on its way: copies that waited for the table would be late.
///
/// A table may lead outside of the cache. Of such a piece nothing is read, and tiles have zeros in
/// its place.
#[derive(Clone, Copy)]
pub struct Blocks {
    /// Where the tokens of each sequence begin, (batch + 1), or null: each has one.
    starts: Global<i32>,
    /// Tokens of all sequences.
    tokens: u32,
    /// Most tokens of a sequence.
    longest: u32,
    /// That of the first sequence, behind which those of the others are.
    table: BlockTable,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Cells from one row of a head to the next.
    stride: u32,
    /// Whether the call appends its tokens' rows.
    appends: bool,
    /// Whether lengths count the new tokens.
    counts_new: bool,
}

impl Blocks {
    /// The table, with the numbers that say how it is read.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(starts: Global<i32>, table: Global<i32>, p: &PagedDecodeParams) -> Self {
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

    /// None of a sequence with more tokens than this launch takes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(self, a: &AttentionParams, rows: Rows) -> Rows {
        if self.starts.is_null() {
            return rows.among(rows.batch, 1);
        }
        let bounds = [0, 1].map(|next| self.starts.load((rows.batch + next) as usize));
        let most = self.longest.min(a.capacity);
        let [start, new, cut] = Sequence::tokens(bounds, self.tokens, most);
        let mut rows = rows.among(start, if new <= a.q_len { new } else { 0 });
        // In place of the rows before them until its length is known.
        rows.seqlen.past = cut;
        rows
    }

    /// Tokens that are appended have rows, whatever `lengths` are.
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

/// How heads fill tiles.
pub trait Heads {
    /// Whether they may have fewer columns than tiles.
    const PAD: bool;
    /// What finds their rows.
    type Over<L: Layout>: Layout;

    /// The same for a call's heads, of which 16 bytes of a row in the cache have `per_unit`
    /// columns.
    fn over<L: Layout>(layout: L, a: &AttentionParams, per_unit: u32) -> Self::Over<L>;
}

/// Heads of as many columns as tiles have.
pub struct Whole;

impl Heads for Whole {
    const PAD: bool = false;
    type Over<L: Layout> = L;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn over<L: Layout>(layout: L, _: &AttentionParams, _: u32) -> L {
        layout
    }
}

/// Heads of as many columns or fewer; the others of tiles are zero.
pub struct Padded;

impl Heads for Padded {
    const PAD: bool = true;
    type Over<L: Layout> = Narrow<L>;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn over<L: Layout>(layout: L, a: &AttentionParams, per_unit: u32) -> Narrow<L> {
        Narrow { layout, stride: a.k.row as u32, units: a.head_size / per_unit }
    }
}

/// Rows with fewer columns than tiles have.
#[derive(Clone, Copy)]
pub struct Narrow<L> {
    layout: L,
    /// Cells from one row of a head to the next.
    stride: u32,
    /// Units of a row.
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
