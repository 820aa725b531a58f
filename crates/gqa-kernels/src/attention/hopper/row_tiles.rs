//! Numbers the work tiles of all sequences over a paged KV cache consecutively, for one query head
//! or as many as share row tiles. Sequences that another launch attends to have none, so that every
//! number is a work tile.
//!
//! **Shares**: the row tiles of a sequence that have more key tiles than an SM's share of all work
//! are split into parts, each a work tile, about half a share long: so no CTA is busy with a long
//! sequence while the others have nothing left. The lengths on the device decide.
//!
//! **Windows**: one warp counts the work tiles of 32 neighbouring sequences at a time, one per
//! lane. The window stays in shared memory, to save registers, until a work tile outside of it is
//! needed.

use super::packing::Packing;
use super::parts::Part;
use super::shape::Tile;
use crate::concept::pages::Sequence;
use crate::num::quotient;
use crate::params::{AttentionParams, PagedHopperParams};
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::warp::{LANES, sum, sum_up_to};

/// Bytes of a sequence's entry: its first token, new tokens, past length, and the inclusive prefix
/// sum of work tiles in the window; where row tiles may be split also the parts of one, the
/// inclusive prefix sum of parts of split ones, and the sequence's work tiles.
const SEQUENCE_BYTES: u32 = 32;
/// Bytes of shared memory: the window's entries, its [`Span`], and the [`Totals`].
pub(super) const BYTES: u32 = (LANES + 2) * SEQUENCE_BYTES;

/// The work tiles of a call, for one warp.
pub(super) struct RowTiles {
    sequences: Sequences,
    pub(super) packing: Packing,
    limits: Option<Limits>,
    /// Shared-memory address of the window.
    window: u32,
}

/// How far work may be split.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Equal shares in which work is counted.
    shares: u32,
    /// Parts that scratch memory has room for.
    parts: u32,
    /// Fewest key tiles of a part.
    shortest: u32,
}

impl Limits {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(p: &PagedHopperParams) -> Self {
        Self { shares: p.shares, parts: p.parts, shortest: p.shortest }
    }
}

/// A work tile's sequence, the number of its row tile within the sequence, and its part.
pub(super) struct Found {
    pub(super) batch: u32,
    pub(super) sequence: Sequence,
    pub(super) tile: u32,
    pub(super) part: Part,
}

/// The sequences and work tiles of a window.
#[derive(Clone, Copy)]
struct Span {
    /// Its first sequence.
    first: u32,
    /// Its work tiles are numbers `begin..end`.
    begin: u32,
    end: u32,
    /// The number of its first part of a split work tile, and the one behind its last.
    parts: [u32; 2],
}

/// What is the same for all sequences. It stays in shared memory, to save registers; where nothing
/// is split, its first field alone.
#[derive(Clone, Copy)]
struct Totals {
    /// Work tiles of the heads of a row tile.
    count: u32,
    /// Row tiles that the query heads take.
    groups: u32,
    /// Parts of split work tiles among `count`.
    parts: u32,
    /// Tokens of a row tile.
    tokens: u32,
    /// Key tiles of a share, and of a part.
    share: [u32; 2],
}

/// One sequence's lengths and its work tiles.
#[derive(Clone, Copy)]
struct Tiles {
    sequence: Sequence,
    /// Row tiles.
    rows: u32,
    /// Key tiles of the first row tile and of the last one.
    keys: [u32; 2],
}

impl Tiles {
    /// Key tiles of all row tiles, and one more for each, which stands for its beginning.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn work(self) -> f32 {
        let [first, last] = self.keys;
        self.rows as f32 * (0.5 * (first + last) as f32 + 1.0)
    }
}

impl RowTiles {
    /// Counts the work tiles. The window stands behind the last ones, which are drawn first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new<S: Tile>(
        base: u32,
        sequences: Sequences,
        packing: Packing,
        limits: Option<Limits>,
        p: &AttentionParams,
    ) -> Self {
        let tiles = Self { sequences, packing, limits, window: base + S::BYTES };
        if let Some(limits) = limits {
            tiles.set_totals(Totals {
                count: 0,
                groups: quotient(p.q_heads, packing.heads()),
                parts: 0,
                tokens: S::WARPGROUPS * packing.tokens(),
                share: [u32::MAX; 2],
            });
            // What is split is known once all work is.
            let passes = if limits.parts > 0 { 2 } else { 1 };
            for _ in Rolled(0..passes, 1) {
                tiles.count_all::<S>(limits, p);
            }
            let Totals { count, parts, .. } = tiles.totals();
            let behind = p.batch.next_multiple_of(LANES);
            tiles.set_span(Span { first: behind, begin: count, end: count, parts: [parts; 2] });
        } else {
            let mut count = 0;
            for first in Rolled(0..p.batch, LANES) {
                count = tiles.look_at::<S>(first, |_| [count, 0], p).end;
            }
            if lane() == 0 {
                st_shared(tiles.window + (LANES + 1) * SEQUENCE_BYTES, count);
            }
            sync_warp();
        }
        tiles
    }

    /// Counts the work tiles of all sequences, and how long a share of them is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn count_all<S: Tile>(&self, limits: Limits, p: &AttentionParams) {
        let (mut count, mut parts, mut work) = (0, 0, 0.0);
        for first in Rolled(0..p.batch, LANES) {
            let tiles = self.tiles::<S>(first + opaque(lane()), p);
            let [own, own_parts] = self.counts(&tiles);
            count += own;
            parts += own_parts;
            work += tiles.work();
        }
        for log in Rolled(0..LANES.ilog2(), 1) {
            count += shfl_xor_u32(count, 1 << log);
            parts += shfl_xor_u32(parts, 1 << log);
            work += shfl_xor_f32(work, 1 << log);
        }
        let totals = self.totals();
        let share = if limits.parts > 0 { self.share(limits, work) } else { totals.share };
        self.set_totals(Totals { count, parts, share, ..totals });
    }

    /// Work tiles of a sequence for the heads of a row tile, and how many of them are parts.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn counts(&self, tiles: &Tiles) -> [u32; 2] {
        let parts = self.parts(tiles.keys[1]);
        let count = tiles.rows * parts;
        [count, if parts > 1 { count } else { 0 }]
    }

    /// Whether row tiles may be split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn splits(&self) -> bool {
        self.limits.is_some()
    }

    /// Work tiles of all sequences and heads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count(&self, p: &AttentionParams) -> u32 {
        self.count_of_heads() * self.groups(p)
    }

    /// Work tiles of all sequences for the heads of a row tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn count_of_heads(&self) -> u32 {
        ld_shared(self.window + (LANES + 1) * SEQUENCE_BYTES)
    }

    /// Row tiles that the query heads take.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn groups(&self, p: &AttentionParams) -> u32 {
        if self.splits() { self.totals().groups } else { p.q_heads }
    }

    /// Tokens of a row tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tokens<S: Tile>(&self) -> u32 {
        if self.splits() { self.totals().tokens } else { S::ROWS }
    }

    /// Work tile number `nth`, which must exist, of the query heads with number `group`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find<S: Tile>(&self, nth: u32, group: u32, p: &AttentionParams) -> Found {
        let span = self.move_to::<S>(nth, p);
        let nth = nth - span.begin;
        let (lane, lanes) = (opaque(lane()), (p.batch - span.first).min(LANES));
        let [.., up_to] = self.entry(lane);
        let lane = sum(u32::from(lane < lanes && up_to <= nth), lanes).min(lanes - 1);
        let [start, new, past, up_to] = self.entry(lane);
        let (batch, sequence) = (span.first + lane, Sequence { start, new, past });
        let Some(limits) = self.limits else {
            let tile = nth + new.div_ceil(self.tokens::<S>()) - up_to;
            return Found { batch, sequence, tile, part: Part::WHOLE };
        };
        let [parts, parts_up_to, count] = self.counts_of(lane);
        let nth = nth + count - up_to;
        let tile = quotient(nth, parts);
        let before = parts_up_to.wrapping_sub(count).wrapping_add(span.parts[0]);
        let first = (group * self.totals().parts + tile * parts).wrapping_add(before);
        // Lengths that change meanwhile must not lead out of the scratch memory.
        let first = first.min(limits.parts.saturating_sub(parts));
        let first = if parts > 1 { first } else { 0 };
        Found { batch, sequence, tile, part: Part { nth: nth - tile * parts, of: parts, first } }
    }

    /// Moves the window to work tile `nth`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn move_to<S: Tile>(&self, nth: u32, p: &AttentionParams) -> Span {
        let mut span = self.span();
        let is_behind = |span: Span| nth >= span.end && span.first + LANES < p.batch;
        while nth < span.begin || is_behind(span) {
            let Span { first, begin, end, parts } = span;
            let (next, back) = (first + LANES, nth < begin);
            let first = if back { first - LANES } else { next };
            let begin = |[count, own]: [u32; 2]| match back {
                true => [begin - count, parts[0] - own],
                false => [end, parts[1]],
            };
            span = self.look_at::<S>(first, begin, p);
        }
        span
    }

    /// Moves the window to the sequences from `first` on. With so many work tiles and parts of
    /// split ones in the window, their numbers start at `begin(counts)`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn look_at<S: Tile>(
        &self,
        first: u32,
        begin: impl FnOnce([u32; 2]) -> [u32; 2],
        p: &AttentionParams,
    ) -> Span {
        // opaque(): otherwise derived values stay live across the loop over work tiles and spill.
        let lane = opaque(lane());
        let tiles = self.tiles::<S>(first + lane, p);
        let Sequence { start, new, past } = tiles.sequence;
        let parts = self.parts(tiles.keys[1]);
        let [count, of_parts] = self.counts(&tiles);
        let sum_of = |own: u32, is_wanted: bool| if is_wanted { sum_up_to(lane, own) } else { 0 };
        let [up_to, parts_up_to] = [sum_of(count, true), sum_of(of_parts, self.splits())];
        let counts = [up_to, parts_up_to].map(|sums| shfl_idx_u32(sums, LANES - 1));
        let [begin, own] = begin(counts);
        // All lanes have read the previous window.
        sync_warp();
        let at = self.window + lane * SEQUENCE_BYTES;
        st_shared_vec(at, [start, new, past, up_to]);
        if self.splits() {
            st_shared_vec(at + 16, [parts, parts_up_to, count, 0]);
        }
        let (end, parts) = (begin + counts[0], [own, own + counts[1]]);
        let span = Span { first, begin, end, parts };
        self.set_span(span);
        span
    }

    /// The tiles of sequence `b`; none behind the last one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn tiles<S: Tile>(&self, b: u32, p: &AttentionParams) -> Tiles {
        let none = Sequence { start: 0, new: 0, past: 0 };
        let sequence = if b < p.batch { self.sequences.get(b, p) } else { none };
        let tokens = self.tokens::<S>();
        let keys_of = |tokens: u32| {
            let end = (sequence.past.wrapping_add(tokens.min(sequence.new)) as i32).max(0) as u32;
            let end = if p.causal != 0 { end } else { sequence.seqlen().total };
            // opaque(): otherwise its comparison with 0 occupies a predicate across the kernel.
            let window = opaque(p.window);
            let seen = if window > 0 { end.min(window.saturating_add(tokens)) } else { end };
            seen.div_ceil(S::N)
        };
        let rows = sequence.new.div_ceil(tokens);
        Tiles { sequence, rows, keys: [keys_of(tokens), keys_of(sequence.new)] }
    }

    /// Key tiles of a share, and of a part: half of a share.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn share(&self, Limits { shares, shortest, .. }: Limits, work: f32) -> [u32; 2] {
        let share = work * self.totals().groups as f32 / shares as f32;
        let share = (share as u32 + 1).max(shortest);
        [share, share.div_ceil(2).max(shortest)]
    }

    /// Most parts of a row tile of a sequence whose last one has so many key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn parts(&self, keys: u32) -> u32 {
        let Some(limits) = self.limits else { return 1 };
        let Totals { share: [share, part], .. } = self.totals();
        // What a merge costs is about as much as the shortest part.
        let pays = keys > share.saturating_add(limits.shortest);
        if pays { keys.div_ceil(part).min(limits.parts) } else { 1 }
    }

    /// Parts of a row tile with so many key tiles, of at most `most`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn parts_of(&self, keys: u32, most: u32) -> u32 {
        let Totals { share: [_, part], .. } = self.totals();
        if most > 1 { keys.div_ceil(part).min(most) } else { 1 }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn totals(&self) -> Totals {
        let [count, groups, parts, tokens] = self.entry(LANES + 1);
        let [share, part, _] = self.counts_of(LANES + 1);
        Totals { count, groups, parts, tokens, share: [share, part] }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn set_totals(&self, Totals { count, groups, parts, tokens, share }: Totals) {
        // All lanes have read the previous ones.
        sync_warp();
        if lane() == 0 {
            let at = self.window + (LANES + 1) * SEQUENCE_BYTES;
            st_shared_vec(at, [count, groups, parts, tokens]);
            st_shared_vec(at + 16, [share[0], share[1], 0, 0]);
        }
        sync_warp();
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn set_span(&self, Span { first, begin, end, parts }: Span) {
        if lane() == 0 {
            let at = self.window + LANES * SEQUENCE_BYTES;
            st_shared_vec(at, [first, begin, end, 0]);
            if self.splits() {
                st_shared_vec(at + 16, [parts[0], parts[1], 0, 0]);
            }
        }
        sync_warp();
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn span(&self) -> Span {
        let [first, begin, end, _] = self.entry(LANES);
        let [from, to, _] = if self.splits() { self.counts_of(LANES) } else { [0; 3] };
        Span { first, begin, end, parts: [from, to] }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn entry(&self, lane: u32) -> [u32; 4] {
        ld_shared_vec(self.window + lane * SEQUENCE_BYTES)
    }

    /// The second half of an entry.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn counts_of(&self, lane: u32) -> [u32; 3] {
        let [a, b, c, _] = ld_shared_vec(self.window + lane * SEQUENCE_BYTES + 16);
        [a, b, c]
    }
}
