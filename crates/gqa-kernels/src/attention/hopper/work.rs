//! The work tiles of a CTA, in an order that keeps K and V in the L2 cache and ends with the
//! shortest tiles.

use super::parts;
use super::row_tiles::{Found, RowTiles};
use super::shape::{Tile, WORK_BYTES, WORK_SLOTS};
use crate::concept::pages::Sequence;
use crate::concept::seqlen::Seqlen;
use crate::num::quotient;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::seqlens::Seqlens;

/// One work tile: query rows of a head, and the key tiles that they see or one split of these.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) place: Place,
    pub(super) seqlen: Seqlen,
    /// Valid keys past the last column of the mask, which no row sees.
    hidden: u32,
    pub(super) keys: KeyTiles,
    /// Where the results of a piece of the keys go, in kernels that divide them among CTAs.
    pub(super) part: Option<u32>,
}

/// Position of a work tile in the output.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) batch: u32,
    pub(super) head: u32,
    /// First query row.
    pub(super) row: u32,
    /// Number of the KV split.
    pub(super) split: u32,
    /// The sequence's first token where the tokens of all sequences are packed; else 0.
    pub(super) token: u32,
}

/// Key tiles `first..end`. All rows see all keys of the tiles `full_first..full_end`. In the tiles
/// `..cached_end` all keys are valid, and every row sees some key.
#[derive(Clone, Copy)]
pub(super) struct KeyTiles {
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) full_first: u32,
    pub(super) full_end: u32,
    pub(super) cached_end: u32,
}

impl Work {
    /// Work tile `index` in the grid's numbering. Keys from `columns` on are hidden.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new<S: Tile>(
        index: u32,
        p: &AttentionParams,
        seqlens: Seqlens,
        columns: u32,
    ) -> Self {
        let (row_tiles, pairs) = (p.q_len.div_ceil(S::ROWS), p.q_heads * p.batch);
        let split = if S::SPLITS { quotient(index, row_tiles * pairs) } else { 0 };
        let index = index - split * row_tiles * pairs;
        let (pair, row_tile) = Self::within(index, row_tiles, pairs, p.l2_section);
        let batch = quotient(pair, p.q_heads);
        let seqlen = seqlens.get(batch, p);
        let hidden = seqlen.total.saturating_sub(columns);
        let row = row_tile * S::ROWS;
        let keys = KeyTiles::new([row, row + S::ROWS], seqlen, hidden, false, S::N, p);
        let keys = if S::SPLITS { keys.split(split, p.splits) } else { keys };
        let place = Place { batch, head: pair - batch * p.q_heads, row, split, token: 0 };
        Self { place, seqlen, hidden, keys, part: None }
    }

    /// Work tile `index` where rows are packed tokens of sequences over a paged KV cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_tokens<S: Tile>(
        index: u32,
        row_tiles: &RowTiles,
        p: &AttentionParams,
    ) -> Self {
        let (head, nth) = Self::within(index, row_tiles.count_of_head(), p.q_heads, p.l2_section);
        let Found { batch, sequence, tile } = row_tiles.find::<S>(nth, p);
        Self::of_row_tile(batch, [tile * S::ROWS, S::ROWS], sequence, S::N, p).of_head(head)
    }

    /// The row tile of `tokens` tokens of a sequence from `row` on, of the first query head, with
    /// tiles of `n` keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_row_tile(
        batch: u32,
        [row, tokens]: [u32; 2],
        sequence: Sequence,
        n: u32,
        p: &AttentionParams,
    ) -> Self {
        // opaque(): otherwise the comparison with 0 stays live across the loop over work tiles and
        // spills.
        let p = &AttentionParams { causal: opaque(p.causal), ..*p };
        let seqlen = sequence.seqlen();
        let keys = KeyTiles::new([row, row + tokens], seqlen, 0, true, n, p);
        let place = Place { batch, head: 0, row, split: 0, token: sequence.start };
        Self { place, seqlen, hidden: 0, keys, part: None }
    }

    /// The same of query head `head`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_head(self, head: u32) -> Self {
        Self { place: Place { head, ..self.place }, ..self }
    }

    /// A row tile of the first query head, as it lies in memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn words(&self) -> [[u32; 4]; 3] {
        let Self { place, seqlen, keys, .. } = self;
        [
            [keys.first, keys.end, keys.full_first, keys.full_end],
            [place.batch, place.row, place.token, keys.cached_end],
            [seqlen.past, seqlen.total, 0, 0],
        ]
    }

    /// The row tile of those [`words`](Self::words), of query head `head`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_words(words: [u32; 10], head: u32) -> Self {
        let [first, end, full_first, full_end, batch, row, token, cached_end, past, total] = words;
        Self {
            place: Place { batch, head, row, split: 0, token },
            seqlen: Seqlen { past, total },
            hidden: 0,
            keys: KeyTiles { first, end, full_first, full_end, cached_end },
            part: None,
        }
    }

    /// The piece that this CTA has, key tiles `from..to`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn piece(self, [from, to]: [u32; 2]) -> Self {
        let place = match (from > 0, to < self.keys.count()) {
            (false, false) => parts::WHOLE,
            (begun, _) => parts::place(block_idx_x(), begun),
        };
        Self { keys: self.keys.between([from, to]), part: Some(place), ..self }
    }

    /// Decodes work tile number `index` into a pair and a row tile of it. Each pair, of a head and
    /// a batch entry, or a head alone over a paged cache, has `row_tiles` row tiles. Sections of
    /// `l2_section` pairs follow each other; within a section the last row tiles come first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn within(index: u32, row_tiles: u32, pairs: u32, l2_section: u32) -> (u32, u32) {
        let section = quotient(index, l2_section * row_tiles);
        let within = index - section * l2_section * row_tiles;
        let here = (pairs - section * l2_section).min(l2_section);
        let nth = quotient(within, here);
        (section * l2_section + within - nth * here, row_tiles - 1 - nth)
    }

    /// Work tiles of the whole call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count<S: Tile>(p: &AttentionParams) -> u32 {
        let tiles = p.q_len.div_ceil(S::ROWS) * p.q_heads * p.batch;
        tiles * if S::SPLITS { p.splits } else { 1 }
    }
}

impl KeyTiles {
    /// The tiles of `n` keys that rows `row..end` see. `may_lack` says that rows may see no key:
    /// they then get one tile that is wholly masked, so that the consumers write their results.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(
        [row, end]: [u32; 2],
        seqlen: Seqlen,
        hidden: u32,
        may_lack: bool,
        n: u32,
        p: &AttentionParams,
    ) -> Self {
        let Seqlen { total, past } = seqlen;
        let last = end.min(p.q_len);
        // `past` may be negative, wrapped around: then no such key exists.
        let exists = |end: u32| if may_lack && (end as i32) < 0 { 0 } else { end.min(total) };
        // One past the last key that the first row sees, and that the last row sees.
        let (low, high) = if p.causal != 0 {
            (exists(past.wrapping_add(row).wrapping_add(1)), exists(past.wrapping_add(last)))
        } else {
            (total, total)
        };
        let seen = total - hidden;
        let has_rows = || if may_lack { row < seqlen.new_rows() } else { seqlen.is_token(row) };
        let window = |end: u32| if p.window > 0 { end.saturating_sub(p.window) } else { 0 };
        Self {
            first: window(low) / n,
            end: if has_rows() { high.min(seen).div_ceil(n).max(may_lack.into()) } else { 0 },
            full_first: window(high).div_ceil(n),
            full_end: low.min(seen) / n,
            cached_end: low.div_ceil(n).min(total / n),
        }
    }

    /// Key tiles of split `split` of `splits` equal splits; the last splits may be shorter or
    /// empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn split(self, split: u32, splits: u32) -> Self {
        let tiles = self.count().div_ceil(splits.max(1));
        let first = self.first + split * tiles;
        Self { first, end: (first + tiles).min(self.end), ..self }
    }

    /// Key tiles `from..to`, counted from the first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn between(self, [from, to]: [u32; 2]) -> Self {
        Self { first: self.first + from, end: self.first + to, ..self }
    }

    /// Number of key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count(self) -> u32 {
        self.end.saturating_sub(self.first)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_empty(&self) -> bool {
        self.first >= self.end
    }

    /// Broadcasts the fields from lane 0, so that the compiler knows that they are warp-uniform and
    /// uses uniform registers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn agreed(self) -> Self {
        let Self { first, end, full_first, full_end, cached_end } = self;
        let agreed = |word| shfl_idx_u32(word, 0);
        Self {
            first: agreed(first),
            end: agreed(end),
            full_first: agreed(full_first),
            full_end: agreed(full_end),
            cached_end: agreed(cached_end),
        }
    }
}

/// The first key that token `row` sees; later rows see none before it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn first_key(row: u32, seqlen: Seqlen, p: &AttentionParams) -> u32 {
    let next = seqlen.past.wrapping_add(row + 1) as i32;
    let end = (next.max(0) as u32).min(seqlen.total);
    if p.window > 0 { end.saturating_sub(p.window) } else { 0 }
}

/// Draws the work tiles of a CTA: the first is the CTA's own index, each further one comes from a
/// counter just before its keys are loaded. CTAs that finish early draw more.
pub(super) struct TileScheduler {
    /// Work tiles drawn by all CTAs; the last draw of the call resets it to 0.
    pub(super) counter: Global<u32>,
    pub(super) count: u32,
}

impl TileScheduler {
    /// The next work tile, or an index past the last. Every CTA draws until it gets no tile, so a
    /// call makes as many draws as it has work tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn next(&self) -> u32 {
        grid_dim_x() + self.counter.atomic_inc(0, self.count - 1)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_work(&self, index: u32) -> bool {
        index < self.count
    }
}

/// The description of a work tile in shared memory, written by the thread that draws the tile. The
/// writer cannot overwrite one that is still in use: it waits for a free stage of K and V, and
/// every reader must be done with earlier tiles to free one.
#[derive(Clone, Copy)]
pub(super) struct Slot(u32);

impl Slot {
    /// The slot of the CTA's work tile number `n`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new<S: Tile>(base: u32, n: u32) -> Self {
        Self(base + S::WORK + n % WORK_SLOTS * WORK_BYTES)
    }

    /// Waits until work tile `n` is drawn and returns its slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn drawn<S: Tile>(base: u32, n: u32) -> Self {
        mbarrier_wait(Self::full::<S>(base, n), n / WORK_SLOTS % 2);
        Self::new::<S>(base, n)
    }

    /// The full barrier of work tile `n`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn full<S: Tile>(base: u32, n: u32) -> u32 {
        base + S::WORK_FULL + 8 * (n % WORK_SLOTS)
    }

    /// Writes the description of work tile `n`; `None` marks the end of the work.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn announce<S: Tile>(base: u32, n: u32, work: Option<&Work>) {
        // opaque(): otherwise addresses occupy registers across the loop over work tiles.
        let base = opaque(base);
        let Self(at) = Self::new::<S>(base, n);
        if let Some(Work { place, seqlen, hidden, keys, part }) = work {
            if let Some(place) = *part {
                st_shared(at + (S::PARTS - S::WORK), place);
            }
            st_shared_vec(at, [keys.first, keys.end, keys.full_first, keys.full_end]);
            let last = if S::SPLITS { place.split } else { place.token };
            st_shared_vec(at + 16, [place.batch, place.head, place.row, last]);
            st_shared_vec(at + 32, [seqlen.past, seqlen.total, *hidden, keys.cached_end]);
        } else {
            let mut vector = 0;
            while vector < WORK_BYTES {
                st_shared_vec(at + vector, [0; 4]);
                vector += 16;
            }
        }
        mbarrier_arrive(Self::full::<S>(base, n));
    }

    /// Its key tiles; empty at the end of the work.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys(self) -> KeyTiles {
        let [first, end, full_first, full_end] = ld_shared_vec(self.0);
        KeyTiles { first, end, full_first, full_end, cached_end: ld_shared(self.0 + 44) }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn place<S: Tile>(self) -> Place {
        let [batch, head, row, last] = ld_shared_vec(self.0 + 16);
        let (split, token) = if S::SPLITS { (last, 0) } else { (0, last) };
        Place { batch, head, row, split, token }
    }

    /// Where the results of a piece go.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn part<S: Tile>(self) -> u32 {
        ld_shared(self.0 + (S::PARTS - S::WORK))
    }

    /// Records whether keys of the work tile have no block in a paged KV cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tell_gaps<S: Tile>(self, has_gaps: bool) {
        st_shared(self.0 + (S::GAPS - S::WORK), u32::from(has_gaps));
    }

    /// The flag that [`tell_gaps`](Self::tell_gaps) wrote.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn has_gaps<S: Tile>(self) -> bool {
        ld_shared::<u32>(self.0 + (S::GAPS - S::WORK)) != 0
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn seqlen(self) -> Seqlen {
        let [past, total, ..] = ld_shared_vec(self.0 + 32);
        Seqlen { past, total }
    }

    /// [`seqlen`](Self::seqlen) without the keys that the mask hides from all rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn seen<S: Tile>(self) -> Seqlen {
        let [past, total, hidden, _] = ld_shared_vec(self.0 + 32);
        Seqlen { past, total: if S::MASK_STAGES > 0 { total - hidden } else { total } }
    }
}
