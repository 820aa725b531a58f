//! Paged KV cache: keys and values lie in blocks, and the query rows of all sequences are packed
//! one after the other.
//!
//! **Row tiles** are numbered across all sequences (`row_tiles.rs`), except for sequences with few
//! tokens where another kernel attends to them. In kernels of their own the query heads of a KV
//! head share row tiles (`packing.rs`), and CTAs have equal ranges of the work (`schedule.rs`,
//! `parts.rs`).
//!
//! **SharedQueue**: a secondary launch may join, for SMs that become free later; its CTAs draw from
//! the same work. Neither launch depends on the other: whichever starts first does the available
//! work. The secondary launch overlaps the launch before it, which attends to other sequences.
//!
//! **Key tiles** are loaded as boxes that each lie in one block, so that a box has as many rows as
//! the smaller of block and tile. Each lane of two warps copies one box: one warp starts a copy
//! every 100 cycles or so, which keeps TMA less than half busy, and blocks of 16 rows need many
//! copies.
//!
//! **Gaps**: the block table may hold indices outside of the cache. TMA fills such boxes with
//! zeros, and the consumers mask their keys. A separate warp looks for gaps while the Q tile of a
//! work tile loads, so that the unmasked mainloop need not check.
//!
//! **Consecutive rows** ([`CONSECUTIVE`](crate::concept::pages::CONSECUTIVE)): packed keys and
//! values, read in place. A sequence is one block, so that a key tile is one box. The block table
//! has the first row of each sequence; one outside of the tensor is a gap. A box past the end of
//! the sequence has rows of the next one, or zeros past the end of the tensor: their keys are
//! masked, and the consumers clear their values. The warp that looks for gaps also clears output
//! rows of no sequence, so that no launch before this one must clear all of them.
//!
//! **A contiguous cache** ([`CONTIGUOUS`](crate::concept::pages::CONTIGUOUS)) is one whose blocks
//! are the batch entries: block `b` is that of sequence `b`, and there are no gaps. Query rows are
//! those of a batch entry, and rows of padding are of no sequence.

use super::output::Destination;
use super::packing::Packing;
use super::parts::Parts;
use super::row_tiles::RowTiles;
use super::shape::{Arrival, CHUNK, Tile};
use super::work::{KeyTiles, Place, Slot, TileScheduler, Work, first_key};
use crate::attention::rows_of_none;
use crate::concept::mask::Visible;
use crate::concept::pages::{CONSECUTIVE, LOG_CONTIGUOUS};
use crate::concept::seqlen::Seqlen;
use crate::num::{MmaElement, quotient};
use crate::params::{AttentionParams, PagedHopperParams};
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::ring::Ring;

/// The sequences and their blocks.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    pub(super) sequences: Sequences,
    /// Block table, (batch, blocks of a sequence); with consecutive rows the first of each
    /// sequence, (batch)
    table: Global<i32>,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Binary logarithm of the rows of a block.
    log_rows: u32,
    /// The cache's last block; with consecutive rows its last row.
    last: u32,
    pub(super) packing: Packing,
    /// Where CTAs have equal ranges of the work, these, and scratch memory of pieces. None: work
    /// tiles are whole, and CTAs draw them.
    pub(super) parts: Option<Parts>,
    queue: SharedQueue,
}

/// CTAs of one or two launches that share work.
#[derive(Clone, Copy)]
struct SharedQueue {
    /// CTAs of the primary launch, each of which starts with the work tile of its own index.
    primary: u32,
    /// CTAs of the secondary launch, which draw all their work tiles.
    secondary: u32,
    /// Whether this CTA belongs to the secondary launch.
    is_secondary: bool,
}

impl SharedQueue {
    /// The next work tile, or an index past the last. Every CTA draws until it gets no tile, so a
    /// call makes as many draws as it has work tiles, plus one per secondary CTA.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn next(self, scheduler: &TileScheduler) -> u32 {
        self.primary + scheduler.counter.atomic_inc(0, scheduler.count + self.secondary - 1)
    }
}

/// Warps that copy boxes.
pub(super) const COPYING_WARPS: u32 = 2;
/// Fewest rows of a box.
pub const LEAST_BOX: u32 = 16;

impl Pages {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        table: Global<i32>,
        p: &PagedHopperParams,
    ) -> Self {
        Self {
            sequences: Sequences {
                starts,
                past_seqlens,
                tokens: p.tokens,
                least: p.least,
                counts_new: p.counts_new != 0,
                apart: is_contiguous(p.log_block_size).then_some(p.per_sequence),
            },
            table,
            per_sequence: p.per_sequence,
            log_rows: p.log_block_size,
            last: p.blocks - 1,
            packing: Packing::OneHead,
            parts: None,
            queue: SharedQueue {
                primary: p.primary,
                secondary: p.secondary,
                is_secondary: p.is_secondary != 0,
            },
        }
    }

    /// With row tiles that heads share, and equal ranges of the work.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn shared(self, parts: Parts, p: &PagedHopperParams) -> Self {
        Self { packing: Packing::Heads(p.tile_heads), parts: Some(parts), ..self }
    }

    /// Programmatic dependent launch: waits for the launch before this one and triggers the next
    /// one. A secondary launch does neither here: it overlaps the launch before it, which attends
    /// to other sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn wait_for_launch_before(self) {
        if !self.queue.is_secondary {
            grid_dependency_wait();
            launch_dependents();
        }
    }

    /// The wait of a secondary launch, at its end, so that the next launch finds both complete.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn wait_for_overlapped(self) {
        if self.queue.is_secondary {
            grid_dependency_wait();
        }
    }

    /// Position of this lane's box of key tile `tile` in the cache. Pages past the last visible key
    /// are undefined: the last visible page is loaded instead. Pages wholly before a window may
    /// belong to another sequence by now: they, and indices outside of the cache, become an index
    /// past its end, where TMA loads zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find_box<S: Tile>(self, tile: u32, head: u32, batch: u32, seen: Visible) -> Spot {
        let height = self.box_rows::<S>();
        let key = tile * S::N + nth_box() * height;
        let seen = key.min(seen.end - 1).max(seen.first) & !(height - 1);
        let block = self.block(batch, seen >> self.log_rows).min(self.last + 1);
        let block = if seen > key { self.last + 1 } else { block };
        let row = seen & ((1 << self.log_rows) - 1);
        if self.is_consecutive::<S>() {
            return Spot { row: block + row, head, block: 0 };
        }
        Spot { row, head, block }
    }

    /// Whether the rows of a sequence are consecutive. Rows of quantized values have blocks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_consecutive<S: Tile>(self) -> bool {
        !S::CONVERTS && self.log_rows == CONSECUTIVE.ilog2()
    }

    /// Where the Q tile of a warpgroup begins in the tensor map of the queries. There heads that
    /// share a row tile come before rows, and packed tokens of all sequences are one batch entry.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn queries(self, place: Place, warpgroup: u32) -> [u32; 3] {
        let Place { batch, head, row, token, .. } = place;
        let row = row + warpgroup * self.packing.tokens();
        let contiguous = is_contiguous(self.log_rows);
        let (row, batch) = if contiguous { (row, batch) } else { (token + row, 0) };
        if self.packing.heads() == 1 { [row, head, batch] } else { [head, row, batch] }
    }

    /// Entry `nth` of a sequence's row of the block table.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block(self, batch: u32, nth: u32) -> u32 {
        if is_contiguous(self.log_rows) {
            return batch;
        }
        self.table.load((batch * self.per_sequence + nth) as usize) as u32
    }

    /// Whether one of the blocks `first..=last` of a sequence is outside of the cache. The lanes
    /// share the entries and keep several loads in flight each, because latency is the cost.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_gaps(self, batch: u32, [first, last]: [u32; 2]) -> bool {
        const TOGETHER: u32 = 4;
        if is_contiguous(self.log_rows) {
            return false;
        }
        let mut highest = 0;
        for nth in Rolled(first + lane()..last + 1, 32 * TOGETHER) {
            let mut further = 0;
            while further < TOGETHER {
                highest = self.block(batch, (nth + 32 * further).min(last)).max(highest);
                further += 1;
            }
        }
        any_sync(highest > self.last)
    }

    /// Hides the keys of a tile whose blocks are outside of the cache; the tile begins with row
    /// `key` of a sequence of `total` rows. Each lane looks up 16 keys. TMA filled such keys with
    /// zeros, so their scores are finite, and adding -inf hides them: a select per score would take
    /// more predicates than are free here.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn hide_gaps<const C: usize>(
        self,
        s: &mut [f32; C],
        batch: u32,
        key: u32,
        total: u32,
    ) {
        let row = (key + LEAST_BOX * lane()).min(total.max(1) - 1);
        let is_outside = self.block(batch, row >> self.log_rows) > self.last;
        let bias = if is_outside { f32::NEG_INFINITY } else { 0.0 };
        let mut i = 0;
        while i < C {
            // A lane holds eight scores of every 16 keys.
            let bias = shfl_idx_f32(bias, i as u32 / 8);
            let mut n = i;
            while n < i + 8 {
                s[n] += bias;
                n += 1;
            }
            i += 8;
        }
    }

    /// Rows of a box.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn box_rows<S: Tile>(self) -> u32 {
        box_rows(1 << self.log_rows, S::N)
    }
}

/// Position of a box in the cache.
#[derive(Clone, Copy)]
struct Spot {
    row: u32,
    head: u32,
    block: u32,
}

/// Pipeline position of a warp that copies boxes of K and V tiles.
struct Boxes {
    base: u32,
    ring: Ring,
    pages: Pages,
    k: TensorMap,
    v: TensorMap,
    /// Bytes of the warp's boxes of a tile; of a chunk of these where values are narrower than
    /// keys.
    bytes: u32,
    /// The V box to load after the next K tile.
    behind: Option<Spot>,
}

impl Boxes {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<S: Tile>(base: u32, k: TensorMap, v: TensorMap, pages: Pages) -> Self {
        let height = pages.box_rows::<S>();
        let boxes = (quotient(S::N, height) + 1 - warp() / 2) / 2;
        let chunks = if S::ALTERNATES { 1 } else { S::ARRIVAL.chunks[0] };
        let bytes = boxes * height * chunks * 128;
        Self { base, ring: Ring::START, pages, k, v, bytes, behind: None }
    }

    /// Loads the key tiles of a work tile, from last to first, K one tile ahead of V. Calls
    /// `before_last` before it waits for a free stage for the last tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_all<S: Tile>(
        &mut self,
        place: Place,
        keys: KeyTiles,
        seqlen: Seqlen,
        p: &AttentionParams,
        mut before_last: impl FnMut(),
    ) {
        let first = first_key(place.row, seqlen, p);
        let seen = Visible { first, end: seqlen.total.max(1) };
        // opaque(): otherwise the comparisons with 0 occupy predicates across the kernel.
        let head = quotient(place.head, quotient(opaque(p.q_heads), opaque(p.kv_heads)));
        let mut tile = keys.end;
        while tile > keys.first {
            tile -= 1;
            if tile == keys.first {
                before_last();
            }
            let spot = self.pages.find_box::<S>(tile, head, place.batch, seen);
            self.load::<S>(self.k, spot, false);
            if S::ALTERNATES && self.behind.is_none() {
                self.skip::<S>();
            }
            self.load_behind::<S>();
            self.behind = Some(spot);
        }
    }

    /// Loads the V tile of the last K tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_behind<S: Tile>(&mut self) {
        if let Some(spot) = self.behind {
            self.load::<S>(self.v, spot, true);
        }
    }

    /// Leaves the stage empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn skip<S: Tile>(&mut self) {
        if lane() == 0 {
            mbarrier_arrive(self.base + self.ring.barrier() + S::ARRIVAL.full);
        }
        self.ring = self.ring.next(S::STAGES);
    }

    /// Waits until the stage is free, starts copying this lane's box into it and moves on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load<S: Tile>(&mut self, map: TensorMap, spot: Spot, is_value: bool) {
        let barrier = self.base + self.ring.barrier();
        let Arrival { offset, chunks, full } = S::ARRIVAL;
        let chunks = chunks[usize::from(is_value)];
        mbarrier_wait(barrier + S::KV_EMPTY, self.ring.parity ^ 1);
        let destination = self.base + S::stage(self.ring.stage) + offset;
        let full = barrier + full;
        // Each warp arrives, even without boxes: the stage must not be refilled before this warp
        // has passed its wait.
        if lane() == 0 {
            let bytes = if S::ALTERNATES { self.bytes * chunks } else { self.bytes };
            mbarrier_arrive_expect(full, bytes);
        }
        sync_warp();
        let above = nth_box() * self.pages.box_rows::<S>();
        if above < S::N {
            let mut chunk = 0;
            while chunk < chunks {
                let at = [chunk * CHUNK, spot.row, spot.head, spot.block];
                tma_load(destination + (chunk * S::N + above) * 128, map, at, full);
                chunk += 1;
            }
        }
        self.ring = self.ring.next(S::STAGES);
    }
}

/// Run by the first warp: draws work tiles, writes their descriptions and loads its share of K and
/// V.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_keys_and_values<S: Tile>(
    base: u32,
    k: TensorMap,
    v: TensorMap,
    pages: Pages,
    counter: Global<u32>,
    p: &AttentionParams,
) {
    let row_tiles = RowTiles::new::<S>(base, pages.sequences, p);
    // Rebuilt for each use: the count stays in shared memory to save a register.
    let scheduler = || TileScheduler { counter, count: row_tiles.count(p) };
    let leads = lane() == 0;
    let mut boxes = Boxes::new::<S>(base, k, v, pages);
    let mut n = 0;
    // Only the first lane's value counts.
    let mut drawn = match pages.queue.is_secondary {
        false => block_idx_x(),
        true if leads => pages.queue.next(&scheduler()),
        true => 0,
    };
    loop {
        let index = shfl_idx_u32(drawn, 0);
        if !scheduler().is_work(index) {
            break;
        }
        let mut draw_next = || {
            if leads {
                drawn = pages.queue.next(&scheduler());
            }
        };
        let work = Work::of_tokens::<S>(index, &row_tiles, p);
        if work.keys.is_empty() {
            draw_next();
            continue;
        }
        if leads {
            Slot::announce::<S>(base, n, Some(&work));
        }
        n += 1;
        // Draws early: the answer arrives while the last tiles wait for free stages.
        boxes.load_all::<S>(work.place, work.keys, work.seqlen, p, draw_next);
    }
    if leads {
        Slot::announce::<S>(base, n, None);
    }
    boxes.load_behind::<S>();
}

/// [`load_keys_and_values`] where CTAs have equal ranges of the work.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_range<S: Tile>(
    base: u32,
    k: TensorMap,
    v: TensorMap,
    pages: Pages,
    parts: Parts,
    p: &AttentionParams,
) {
    let leads = lane() == 0;
    let mut range = parts.schedule.range::<S>(pages.packing, p.q_heads);
    let mut boxes = Boxes::new::<S>(base, k, v, pages);
    let mut n = 0;
    while let Some(work) = range.next() {
        // A forged schedule may say so.
        if work.keys.is_empty() {
            continue;
        }
        if leads {
            Slot::announce::<S>(base, n, Some(&work));
        }
        n += 1;
        boxes.load_all::<S>(work.place, work.keys, work.seqlen, p, || ());
    }
    if leads {
        Slot::announce::<S>(base, n, None);
    }
    boxes.load_behind::<S>();
}

/// Run by the second copying warp: loads its share of the same K and V.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn share_keys_and_values<S: Tile>(
    base: u32,
    k: TensorMap,
    v: TensorMap,
    pages: Pages,
    p: &AttentionParams,
) {
    let mut boxes = Boxes::new::<S>(base, k, v, pages);
    let mut n = 0;
    loop {
        let slot = Slot::drawn::<S>(base, n);
        let keys = slot.keys();
        if keys.is_empty() {
            break;
        }
        n += 1;
        let (place, seqlen) = (slot.place::<S>(), slot.seqlen());
        // The first lane arrives on behalf of the warp.
        sync_warp();
        boxes.load_all::<S>(place, keys, seqlen, p, || ());
    }
    boxes.load_behind::<S>();
}

/// Run by the fourth warp: records for each work tile whether keys that it sees have no block in
/// the cache, before the consumers get its Q tile. Calls `behind_first` after the first one.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn look_for_gaps<S: Tile>(
    base: u32,
    pages: Pages,
    p: &AttentionParams,
    behind_first: impl Fn(),
) {
    // opaque(): otherwise its comparison with 0 occupies a predicate across the kernel.
    let p = &AttentionParams { window: opaque(p.window), ..*p };
    let (mut ring, mut n) = (Ring::START, 0);
    loop {
        let slot = Slot::drawn::<S>(base, n);
        let keys = slot.keys();
        let mut has_gaps = false;
        if !keys.is_empty() {
            let (place, seqlen) = (slot.place::<S>(), slot.seqlen());
            let first = first_key(place.row, seqlen, p);
            let first = if pages.parts.is_some() { first.max(keys.first * S::N) } else { first };
            let last = (keys.end * S::N).min(seqlen.total).max(first + 1) - 1;
            let blocks = [first, last].map(|key| key >> pages.log_rows);
            has_gaps = pages.has_gaps(place.batch, blocks);
        }
        // The first lane writes the flag and arrives on behalf of the warp.
        sync_warp();
        if lane() == 0 {
            slot.tell_gaps::<S>(has_gaps);
        }
        let mut warpgroup = 0;
        while warpgroup < S::WARPGROUPS {
            let barrier = base + 8 * (warpgroup * S::Q_STAGES + ring.stage);
            mbarrier_wait(barrier + S::Q_EMPTY, ring.parity ^ 1);
            if lane() == 0 {
                mbarrier_arrive(barrier + S::Q_FULL);
            }
            warpgroup += 1;
        }
        if n == 0 {
            behind_first();
        }
        if keys.is_empty() {
            return;
        }
        n += 1;
        ring = ring.next(S::Q_STAGES);
    }
}

/// Run by one warp of each CTA, where rows are consecutive or the cache is contiguous: clears its
/// share of the output rows that belong to no sequence.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn clear_rows_of_none<T: MmaElement, S: Tile>(
    pages: Pages,
    to: Destination<T>,
    p: &AttentionParams,
) {
    // opaque(), here and below: otherwise comparisons occupy predicates across the kernel.
    let pages = Pages { log_rows: opaque(pages.log_rows), ..pages };
    if !pages.is_consecutive::<S>() && !is_contiguous(pages.log_rows) {
        return;
    }
    let p = &AttentionParams { batch: opaque(p.batch), q_heads: opaque(p.q_heads), ..*p };
    rows_of_none::clear(pages.sequences, to.out, to.columns, to.lse, p);
}

/// Whether blocks of so many rows are the batch entries of a contiguous cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn is_contiguous(log_rows: u32) -> bool {
    log_rows == LOG_CONTIGUOUS
}

/// Number of this lane's box in a tile: even boxes belong to warp 0, odd ones to warp 2.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn nth_box() -> u32 {
    2 * lane() + warp() / 2
}

/// Rows of a box, for blocks of `block_size` rows and tiles of `keys` keys, both powers of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn box_rows(block_size: u32, keys: u32) -> u32 {
    if block_size < keys { block_size } else { keys }
}
