//! One warp loads keys and values through TMA: a box for each lane, which lies in one block.

use super::cache::Cache;
use super::layout::{CHUNK, KEYS, Layout};
use super::work::Work;
use crate::simt::*;
use crate::tile::ring::Ring;

/// Where the rows of a sequence are.
#[derive(Clone, Copy)]
pub(super) struct Pages {
    /// Blocks of the sequence; null where its rows lie side by side.
    entries: Global<i32>,
    /// Binary logarithm of the rows of a block.
    log_rows: u32,
    /// Number of blocks.
    blocks: u32,
}

impl Pages {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn none() -> Self {
        Self { entries: Global::null(), log_rows: 31, blocks: 1 }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(entries: Global<i32>, log_rows: u32, blocks: u32) -> Self {
        Self { entries, log_rows, blocks }
    }

    /// Rows of a box.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn box_rows(self) -> u32 {
        (1 << self.log_rows).min(KEYS)
    }

    /// Whether a key has no block, because the table has an index outside of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn lacks<const PAGED: bool>(self, key: u32, work: &Work) -> bool {
        PAGED && self.block(key, work) >= self.blocks
    }

    /// The block of a key. Keys that nobody sees have none: their blocks may be those of another
    /// sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block(self, key: u32, work: &Work) -> u32 {
        let seen = work.span.some;
        if key < seen.first || key >= seen.end {
            return self.blocks;
        }
        self.entries.load((key >> self.log_rows) as usize) as u32
    }

    /// Row, KV head and block or batch entry of the box at `key`. Where it has no block, TMA loads
    /// zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn spot<const PAGED: bool>(self, key: u32, work: &Work) -> [u32; 3] {
        let head = work.rows.kv_head;
        if !PAGED {
            return [key, head, work.rows.batch];
        }
        // The box may begin before the first key that somebody sees.
        let seen = key.max(work.span.some.first);
        let seen = if seen < key + self.box_rows() { seen } else { key };
        [key & ((1 << self.log_rows) - 1), head, self.block(seen, work).min(self.blocks)]
    }
}

/// The warp that copies.
pub(super) struct Loader {
    layout: Layout,
    maps: [TensorMap; 2],
    pages: Pages,
    /// The next tile, and its place.
    tile: u32,
    ring: Ring,
}

impl Loader {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(layout: Layout, maps: [TensorMap; 2], pages: Pages) -> Self {
        Self { layout, maps, pages, tile: 0, ring: Ring::START }
    }

    /// Loads all tiles before number `end`, each once its stage is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn run<C: Cache, const HEAD: u32, const PAGED: bool>(
        &mut self,
        end: u32,
        work: &Work,
    ) {
        let (layout, above) = (self.layout, lane() * self.pages.box_rows());
        for tile in Rolled(self.tile..end, 1) {
            let Ring { stage, parity } = self.ring;
            let key = work.begin + tile * KEYS + above;
            let spot = if above < KEYS { self.pages.spot::<PAGED>(key, work) } else { [0; 3] };
            for values in 0..2 {
                let (to, full, empty) = match values {
                    0 => (layout.keys(stage), layout.keys_full(stage), layout.keys_empty(stage)),
                    _ => {
                        let full = layout.values_full(stage);
                        (layout.values(stage), full, layout.values_empty(stage))
                    }
                };
                mbarrier_wait(empty, parity ^ 1);
                if lane() == 0 {
                    mbarrier_arrive_expect(full, layout.tile_bytes());
                }
                sync_warp();
                if above < KEYS {
                    for chunk in 0..HEAD * C::BYTES / 128 {
                        let [row, head, block] = spot;
                        let at = [chunk * 64, row, head, block];
                        let to = to + chunk * CHUNK + above * 128;
                        tma_load(to, self.maps[values], at, full);
                    }
                }
                sync_warp();
            }
            self.ring = self.ring.next(layout.stages);
        }
        self.tile = end;
    }
}
