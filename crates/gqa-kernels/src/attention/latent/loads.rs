//! Run by one warp: finds the blocks of the key tiles and copies them into the buffers.

use super::{BUFFERS, CHUNK_BYTES, GAPS, GROUPS, KEYS, LEAST_BOX, OWN_GROUPS, ROTATED, Work};
use crate::num::MmaElement;
use crate::simt::*;

/// Blocks of the fewest rows in a tile.
const UNITS: u32 = KEYS / LEAST_BOX;
/// Tiles whose blocks the lanes hold at a time.
const HELD: u32 = 32 / UNITS;

/// Copies all tiles of the CTA, each group of chunks as soon as it is empty.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load<T: MmaElement>(work: &Work<'_, T>, k: TensorMap) {
    let mut held = 0;
    for tile in Rolled(work.tiles.clone(), 1) {
        let nth = tile - work.tiles.start;
        if nth % HELD == 0 {
            held = work.block_of((tile * UNITS + lane()) * LEAST_BOX);
        }
        let buffer = nth % BUFFERS;
        let boxes = Boxes::new(work, k, held, [tile, buffer]);
        // Parity of the phase in which the buffer becomes empty for this tile.
        let empty = (nth / BUFFERS + 1) % 2;
        boxes.copy(work, ROTATED, empty);
        for i in Rolled(0..GROUPS - 1, 1) {
            boxes.copy(work, (buffer * OWN_GROUPS + i) % ROTATED, empty);
        }
    }
}

/// A tile's boxes of one chunk: one for each lane of the first ones.
struct Boxes {
    k: TensorMap,
    /// Boxes of a chunk.
    units: u32,
    /// The lane's box in a chunk: its block, its first row in the block and in the tile.
    block: u32,
    row: u32,
    place: u32,
    buffer: u32,
    /// Which 16 rows of the tile are outside of the cache.
    gaps: u32,
}

impl Boxes {
    /// Of a tile and its buffer, whose blocks are among those that the lanes hold. A box has as
    /// many rows as a block, but not more than the tile. Blocks outside of the cache become one
    /// past its end, where TMA loads zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<T>(work: &Work<'_, T>, k: TensorMap, held: u32, [tile, buffer]: [u32; 2]) -> Self {
        let log_block = work.p.log_block_size;
        let log_rows = log_block.min(KEYS.ilog2());
        let units = KEYS >> log_rows;
        let place = (lane() % units) << log_rows;
        let first = (tile - work.tiles.start) % HELD * UNITS;
        let mut gaps = 0;
        for unit in 0..UNITS {
            let block = shfl_idx_u32(held, first + unit);
            gaps |= u32::from(block >= work.p.blocks) << unit;
        }
        let block = shfl_idx_u32(held, first + place / LEAST_BOX).min(work.p.blocks);
        let row = (tile * KEYS + place) & ((1 << log_block) - 1);
        Self { k, units, block, row, place, buffer, gaps }
    }

    /// Copies a group's chunks, once it is empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy<T: MmaElement>(&self, work: &Work<'_, T>, group: u32, empty: u32) {
        let chunk = 2 * group + lane() / self.units;
        let is_used = lane() < if group == ROTATED { self.units } else { 2 * self.units };
        let full = work.full(self.buffer, chunk);
        mbarrier_wait(work.empty(self.buffer, group), empty);
        if group == ROTATED && lane() == 0 {
            Shared::<u32>::at(GAPS).store(self.buffer, self.gaps);
        }
        if is_used && self.place == 0 {
            mbarrier_arrive_expect(full, CHUNK_BYTES);
        }
        sync_warp();
        if is_used {
            let to = work.buffer(self.buffer) + chunk * CHUNK_BYTES + self.place * 128;
            tma_load(to, self.k, [0, self.row, chunk, self.block], full);
        }
    }
}

impl<T: MmaElement> Work<'_, T> {
    /// The block of a row of the sequence; of rows that no query row sees, whose entries are
    /// undefined, the last one that is seen.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block_of(&self, row: u32) -> u32 {
        let nth = row.min(self.end - 1) >> self.p.log_block_size;
        let entry = self.rows.batch as usize * self.p.per_sequence as usize + nth as usize;
        self.to.block_table.load(entry) as u32
    }
}
