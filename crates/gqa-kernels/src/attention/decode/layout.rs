//! Where the rows of a sequence are: its tokens among those of the step, and its cached rows, which
//! are contiguous or in the blocks of a paged KV cache. Also whether heads are as wide as tiles
//! ([`Whole`]) or [narrower](Padded).

use crate::concept::pages::{LOG_CONTIGUOUS, Length, Sequence};
use crate::concept::seqlen::{Lengths, Seqlen};
use crate::params::{AttentionParams, PageSteps, PagedDecodeParams, Strides};
use crate::simt::Global;
use crate::tile::pages::{BlockTable, is_somewhere};
use crate::tile::rows::Rows;

/// Finds the rows of a sequence. A kernel's text serves both kinds of caches: which one it is, is a
/// parameter, which becomes a constant when a plan is loaded.
///
/// **A contiguous cache** is (batch, KV head, row): a row's place is its number.
///
/// **A paged KV cache** is (block, row, KV head, head size) with any strides. A block table lists
/// the blocks of each sequence; the new tokens of all sequences are packed. The rows of a block are
/// a power of two, [`PIECE`](Layout::PIECE) or more, and tiles begin at multiples of `PIECE`, so
/// each piece of a tile lies in one block. The table is read one tile ahead, so that copies do not
/// wait for it. Where it points outside of the cache, nothing is read, and the piece is zero in the
/// tile.
#[derive(Clone, Copy)]
pub struct Layout {
    /// cu_seqlens, (batch + 1): where the tokens of each sequence begin; null if each has one.
    starts: Global<i32>,
    /// Tokens of all sequences.
    tokens: u32,
    /// Most tokens of a sequence.
    longest: u32,
    /// The block tables of all sequences, or of one; in a contiguous cache without entries.
    table: BlockTable,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Distance of two rows of a head, in cells.
    pub(super) stride: u32,
    /// Elements of a head.
    pub(super) head_size: u32,
    /// Whether the call appends its tokens.
    appends: bool,
    /// Whether the given lengths include the new tokens.
    counts_new: bool,
}

/// Most pieces of a tile.
const PIECES: usize = 4;

/// Page offsets: the places of the pieces of a tile.
pub(super) type Offsets = [u32; PIECES];

impl Layout {
    /// Rows of a piece: so many rows, from a multiple of that number on, lie in one block.
    pub const PIECE: u32 = 16;

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
                last: p.blocks.wrapping_sub(1),
                steps: p.steps,
            },
            per_sequence: p.per_sequence,
            stride: p.decode.attention.k.row as u32,
            head_size: p.decode.attention.head_size,
            appends: p.decode.new_len > 0,
            counts_new: p.counts_new != 0,
        }
    }

    /// The layout of sequences in a contiguous cache whose rows the caller finds.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(in crate::attention) fn contiguous() -> Self {
        let (entries, steps) =
            (Global::null(), PageSteps { block: 0, row: 0, unit: 0, reserved: 0 });
        Self {
            starts: Global::null(),
            tokens: 0,
            longest: 0,
            table: BlockTable { entries, log_rows: LOG_CONTIGUOUS, last: 0, steps },
            per_sequence: 0,
            stride: 0,
            head_size: 0,
            appends: false,
            counts_new: false,
        }
    }

    /// Whether the cache consists of blocks. Then row tiles may have no rows, and rows may have no
    /// block, because the block table points outside of the cache; their keys are masked.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(in crate::attention) fn is_paged(self) -> bool {
        self.table.log_rows != LOG_CONTIGUOUS
    }

    /// Number of packed tokens; 0 where sequences have rows of their own.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn packed_tokens(self) -> u32 {
        if self.is_paged() { self.tokens } else { 0 }
    }

    /// The layout of one sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_sequence(self, batch: u32) -> Self {
        let entries = self.table.entries.offset((batch * self.per_sequence) as usize);
        Self { table: BlockTable { entries, ..self.table }, ..self }
    }

    /// The rows of a row tile that exist. No rows if the tokens are packed and the sequence has
    /// more than this launch takes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(in crate::attention) fn rows(self, a: &AttentionParams, rows: Rows) -> Rows {
        if !self.is_paged() {
            return rows;
        }
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

    /// The lengths of the sequence, from `lengths` as loaded from device memory: clamped so that
    /// appended tokens have rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(in crate::attention) fn seqlen(
        self,
        a: &AttentionParams,
        rows: &Rows,
        lengths: Lengths,
    ) -> Seqlen {
        if !self.is_paged() {
            return Seqlen::new(lengths, a.capacity, a.first_prompt != 0);
        }
        let Seqlen { total: new, past: cut } = rows.seqlen;
        let length = Length { rows: lengths.last, counts_new: self.counts_new };
        let least = if self.appends { 0 } else { -(new as i32) };
        let past = length.past(least, [new, cut], a.capacity);
        Seqlen { total: past.wrapping_add(new), past }
    }

    /// Number of the tile's row `r` among the query rows of its head in all sequences; `None` past
    /// the last row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new_row(self, a: &AttentionParams, rows: &Rows, r: u32) -> Option<usize> {
        let start = if self.is_paged() { rows.start } else { rows.batch * a.q_len };
        (r < rows.count()).then(|| (start + rows.row(r).s) as usize)
    }

    /// The place of a row of the sequence in the cache, which also numbers per-token scales; not
    /// [`is_somewhere`](Self::is_somewhere) without a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn place(self, row: u32) -> u32 {
        if self.is_paged() { self.table.place(row) } else { row }
    }

    /// Whether a place is a row of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_somewhere(self, place: u32) -> bool {
        !self.is_paged() || is_somewhere(place)
    }

    /// Element offset of a place, from the first row of the head on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn offset(self, place: u32) -> usize {
        self.table.element(place)
    }

    /// Element offset of the head's row at a [place](Self::place), in a tensor with these strides.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn element(self, cache: Strides, rows: &Rows, place: u32) -> usize {
        self.offset(place) + cache.at(rows.batch, rows.kv_head, 0)
    }

    /// Per-token scales of the head: number of the first row's scale, and the distance between
    /// rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn scales(self, a: &AttentionParams, rows: &Rows) -> (usize, u32) {
        if self.is_paged() {
            return (rows.kv_head as usize, a.kv_heads);
        }
        let head = (rows.batch * a.kv_heads + rows.kv_head) as usize;
        (head * a.capacity as usize, 1)
    }

    /// Looks up the page offsets of `rows` rows from `begin` on. Rows from `end` on need no block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find(self, begin: u32, end: u32, rows: u32) -> Offsets {
        if !self.is_paged() {
            return [0; PIECES];
        }
        core::array::from_fn(|piece| {
            let within = piece as u32 * Self::PIECE;
            if within < rows { self.table.place((begin + within).min(end.max(1) - 1)) } else { 0 }
        })
    }

    /// The place of row `within` of the rows from `begin` on: the first row of piece `piece`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn place_of(self, offsets: Offsets, piece: u32, begin: u32, within: u32) -> u32 {
        if self.is_paged() { offsets[piece as usize] } else { begin + within }
    }

    /// Whether a piece has no block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lacks_rows(self, offsets: Offsets) -> bool {
        self.is_paged() && !is_somewhere(offsets.into_iter().fold(0, |all, place| all | place))
    }
}

/// Whether heads are as wide as tiles.
pub trait Heads {
    /// Whether they may have fewer columns. The remaining columns of tiles are zero.
    const PAD: bool;

    /// Whether a tile's column is past the end of the heads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_padding(a: &AttentionParams, column: u32) -> bool {
        Self::PAD && column >= a.head_size
    }
}

/// Heads as wide as tiles.
pub struct Whole;

impl Heads for Whole {
    const PAD: bool = false;
}

/// Heads with as many columns or fewer.
pub struct Padded;

impl Heads for Padded {
    const PAD: bool = true;
}
