//! Sequences whose keys and values lie in blocks of a cache, and whose query rows are tokens that
//! lie one behind the other.
//!
//! **Row tiles** are numbered through all sequences (`row_tiles.rs`), but those with few tokens
//! where they are another kernel's.
//!
//! **SharedQueue**: a launch may be joined by another one, for SMs that become free later, whose
//! blocks draw from the same work. Neither needs the other: whichever comes first does what there
//! is. The secondary launch overlaps the one ahead of it, which attends to other sequences.
//!
//! **Key tiles** come in boxes, each of which lies in one block: the lower of both is their height.
//! Each lane of two warps copies one: a warp starts a copy in about 100 cycles, in which TMA is not
//! even half busy, and blocks of 16 rows make many.
//!
//! **Gaps**: the table may lead outside of the cache. TMA leaves zeros in place of such a box, and
//! the keys are masked. A warp of its own looks for gaps while the queries of a work tile are on
//! their way, so that steps over tiles of which all rows see all keys need not ask.

use super::ring::Ring;
use super::row_tiles::RowTiles;
use super::shape::{Arrival, CHUNK, Tile};
use super::work::{KeyTiles, Place, Slot, TileScheduler, Work, first_key};
use crate::concept::mask::Visible;
use crate::concept::seqlen::Seqlen;
use crate::num::quotient;
use crate::params::{AttentionParams, PagedHopperParams};
use crate::simt::*;
use crate::tile::pages::Sequences;

/// Where sequences are.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    pub(super) sequences: Sequences,
    /// (batch, blocks of a sequence)
    table: Global<i32>,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Logarithm of a block's rows.
    log_rows: u32,
    /// The cache's last block.
    last: u32,
    queue: SharedQueue,
}

/// The blocks that share work, of one launch or of two.
#[derive(Clone, Copy)]
struct SharedQueue {
    /// Blocks that begin with the work tile of their number.
    primary: u32,
    /// Those that do not.
    secondary: u32,
    /// Whether this is one of these.
    is_secondary: bool,
}

impl SharedQueue {
    /// The next work tile, or a number beyond the last. Every block draws until there is none, so
    /// draws are as many as work tiles, and one more for each helper.
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
            },
            table,
            per_sequence: p.per_sequence,
            log_rows: p.log_block_size,
            last: p.blocks - 1,
            queue: SharedQueue {
                primary: p.primary,
                secondary: p.secondary,
                is_secondary: p.is_secondary != 0,
            },
        }
    }

    /// Waits for the launch before this one, and lets the next one begin. A secondary launch runs
    /// beside the one before it, which attends to other sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn wait_for_launch_before(self) {
        if !self.queue.is_secondary {
            grid_dependency_wait();
            launch_dependents();
        }
    }

    /// What a secondary launch does in the end instead, so that whoever comes next finds both
    /// ended.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn wait_for_overlapped(self) {
        if self.queue.is_secondary {
            grid_dependency_wait();
        }
    }

    /// Where this lane's box of tile number `tile` is in the cache. Behind the keys `seen` there
    /// may be no blocks: the last one stands for them. Those wholly before a window may belong to
    /// another sequence by now: they are said to be behind the cache, from where zeros come, and
    /// so are those outside of it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find_box<S: Tile>(self, tile: u32, head: u32, batch: u32, seen: Visible) -> Spot {
        let height = self.box_rows::<S>();
        let key = tile * S::N + nth_box() * height;
        let seen = key.min(seen.end - 1).max(seen.first) & !(height - 1);
        let block = self.block(batch, seen >> self.log_rows).min(self.last + 1);
        let block = if seen > key { self.last + 1 } else { block };
        Spot { row: seen & ((1 << self.log_rows) - 1), head, block }
    }

    /// Entry `nth` of a sequence's row of the table.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block(self, batch: u32, nth: u32) -> u32 {
        self.table.load((batch * self.per_sequence + nth) as usize) as u32
    }

    /// Whether one of the blocks `first..=last` of a sequence is outside of the cache. The lanes of
    /// a warp share them, and each asks for several at a time: their latencies are what it costs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_gaps(self, batch: u32, [first, last]: [u32; 2]) -> bool {
        const TOGETHER: u32 = 4;
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

    /// Hides the keys of a tile that begins with row `key`, of a sequence of `total` rows, whose
    /// blocks are outside of the cache. Lanes ask for 16 keys each. Such keys are zeros, so that
    /// their scores are numbers, to which -inf is added: a choice for each piece would take more
    /// predicates than steps over edges leave.
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
            // A lane has eight scores of 16 keys.
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

/// Where a box is in the cache.
#[derive(Clone, Copy)]
struct Spot {
    row: u32,
    head: u32,
    block: u32,
}

/// The ring of K and V tiles as a warp sees it that copies its boxes of them.
struct Boxes {
    base: u32,
    ring: Ring,
    pages: Pages,
    k: TensorMap,
    v: TensorMap,
    /// Bytes of the warp's boxes of a tile.
    bytes: u32,
    /// The V tile that comes after the next K tile.
    behind: Option<Spot>,
}

impl Boxes {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<S: Tile>(base: u32, k: TensorMap, v: TensorMap, pages: Pages) -> Self {
        let height = pages.box_rows::<S>();
        let boxes = (quotient(S::N, height) + 1 - warp() / 2) / 2;
        let bytes = boxes * height * S::ARRIVAL.chunks * 128;
        Self { base, ring: Ring::START, pages, k, v, bytes, behind: None }
    }

    /// The tiles of a work tile, from the right to the left, K one ahead of V; calls `before_last`
    /// before it waits for room for the last.
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
        // Opaque, or the comparisons with 0 would take predicates from all the kernel.
        let head = quotient(place.head, quotient(opaque(p.q_heads), opaque(p.kv_heads)));
        let mut tile = keys.end;
        while tile > keys.first {
            tile -= 1;
            if tile == keys.first {
                before_last();
            }
            let spot = self.pages.find_box::<S>(tile, head, place.batch, seen);
            self.load::<S>(self.k, spot);
            self.load_behind::<S>();
            self.behind = Some(spot);
        }
    }

    /// The V tile of the last K tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_behind<S: Tile>(&mut self) {
        if let Some(spot) = self.behind {
            self.load::<S>(self.v, spot);
        }
    }

    /// Waits until the stage is free, starts copying this lane's box into it and moves on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load<S: Tile>(&mut self, map: TensorMap, spot: Spot) {
        let barrier = self.base + self.ring.barrier();
        let Arrival { offset, chunks, full } = S::ARRIVAL;
        mbarrier_wait(barrier + S::KV_EMPTY, self.ring.parity ^ 1);
        let destination = self.base + S::KV + self.ring.stage * S::STAGE_BYTES + offset;
        let full = barrier + full;
        // Each warp arrives, one without boxes too: what it has yet to read must not be written
        // over.
        if lane() == 0 {
            mbarrier_arrive_expect(full, self.bytes);
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

/// The first warp: draws work, describes it and loads its share of keys and values.
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
    // Made anew for each question: the count is in shared memory, for want of a register.
    let scheduler = || TileScheduler { counter, count: row_tiles.count() * p.q_heads };
    let leads = lane() == 0;
    let mut boxes = Boxes::new::<S>(base, k, v, pages);
    let mut n = 0;
    // The first lane's is the warp's.
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
        // The answer comes while the last tiles wait for room.
        boxes.load_all::<S>(work.place, work.keys, work.seqlen, p, draw_next);
    }
    if leads {
        Slot::announce::<S>(base, n, None);
    }
    boxes.load_behind::<S>();
}

/// The second warp: its share of the same keys and values.
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
        // The first lane arrives for all.
        sync_warp();
        boxes.load_all::<S>(place, keys, seqlen, p, || ());
    }
    boxes.load_behind::<S>();
}

/// The fourth warp: says of each work tile whether keys that it sees have no block in the cache,
/// before consumers have its queries.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn look_for_gaps<S: Tile>(base: u32, pages: Pages, p: &AttentionParams) {
    // Opaque, or its comparison with 0 would take a predicate from all the kernel.
    let p = &AttentionParams { window: opaque(p.window), ..*p };
    let (mut ring, mut n) = (Ring::START, 0);
    loop {
        let slot = Slot::drawn::<S>(base, n);
        let keys = slot.keys();
        let mut has_gaps = false;
        if !keys.is_empty() {
            let (place, seqlen) = (slot.place::<S>(), slot.seqlen());
            let first = first_key(place.row, seqlen, p);
            let last = (keys.end * S::N).min(seqlen.total).max(first + 1) - 1;
            let blocks = [first, last].map(|key| key >> pages.log_rows);
            has_gaps = pages.has_gaps(place.batch, blocks);
        }
        // The first lane tells and arrives for all.
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
        if keys.is_empty() {
            return;
        }
        n += 1;
        ring = ring.next(S::Q_STAGES);
    }
}

/// Number of this lane's box of a tile: warps 0 and 2 take turns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn nth_box() -> u32 {
    2 * lane() + warp() / 2
}

/// Rows of a box in blocks of `block_size` rows, a power of two, and tiles of `keys` keys, one too.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn box_rows(block_size: u32, keys: u32) -> u32 {
    if block_size < keys { block_size } else { keys }
}
