//! Run by one warp: finds the blocks of the key tiles and copies them into the stages.

use super::{CHUNK_BYTES, CHUNKS, EMPTY, FULL, GAPS, KEYS, LEAST_BOX, STAGE_BYTES, STAGES, Work};
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::ring::Ring;

/// Boxes of the smallest rows in a tile.
const UNITS: u32 = KEYS / LEAST_BOX;
/// Tiles whose blocks the lanes hold at a time.
const HELD: u32 = 32 / UNITS;

/// Copies all tiles of the CTA, each as soon as its stage is empty.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load<T: MmaElement>(work: &Work<'_, T>, k: TensorMap) {
    let mut ring = Ring::START;
    let mut held = 0;
    for tile in Rolled(work.tiles.clone(), 1) {
        let nth = (tile - work.tiles.start) % HELD;
        if nth == 0 {
            held = work.block_of((tile * UNITS + lane()) * LEAST_BOX);
        }
        let unit = nth * UNITS;
        let blocks = [shfl_idx_u32(held, unit), shfl_idx_u32(held, unit + 1)];
        mbarrier_wait(work.barrier(EMPTY, ring), ring.parity ^ 1);
        if lane() == 0 {
            let [first, second] = blocks.map(|block| u32::from(block >= work.p.blocks));
            Shared::<u32>::at(GAPS).store(ring.stage, first | second << 1);
            mbarrier_arrive_expect(work.barrier(FULL, ring), STAGE_BYTES);
        }
        sync_warp();
        work.copy(k, tile, blocks, ring);
        ring = ring.next(STAGES);
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

    /// Copies a tile as one box, or as boxes of as many rows as a block has. Blocks outside of the
    /// cache become one past its end, where TMA loads zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy(&self, k: TensorMap, tile: u32, blocks: [u32; 2], ring: Ring) {
        let (stage, full) = (self.stage(ring), self.barrier(FULL, ring));
        let within = (1 << self.p.log_block_size) - 1;
        let [first, second] = blocks.map(|block| block.min(self.p.blocks));
        if self.p.log_block_size >= KEYS.ilog2() {
            if lane() == 0 {
                tma_load(stage, k, [0, (tile * KEYS) & within, 0, first], full);
            }
        } else if lane() < UNITS * CHUNKS {
            let (unit, chunk) = (lane() / CHUNKS, lane() % CHUNKS);
            let block = if unit == 0 { first } else { second };
            let to = stage + chunk * CHUNK_BYTES + unit * LEAST_BOX * 128;
            tma_load(to, k, [0, 0, chunk, block], full);
        }
    }
}
