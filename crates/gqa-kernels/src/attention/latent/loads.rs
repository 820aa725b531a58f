//! Run by a warp, or by two where values are apart: finds the blocks of the tiles and copies them
//! into the buffers.

use super::convert;
use super::{
    BUFFERS, CHUNK, CHUNK_BYTES, CONTIGUOUS, KEYS, LEAST_BOX, MAX_CLUSTER, MULTIPLYING, OWN_GROUPS,
    ROTATED, Shape, VALUES, Work,
};
use crate::num::MmaElement;
use crate::simt::*;

/// Blocks of a tile if blocks have the fewest rows.
const UNITS: u32 = KEYS / LEAST_BOX;
/// Tiles whose block numbers the lanes hold at a time.
const HELD: u32 = 32 / UNITS;

/// Run by the last warpgroup.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Shape, T: MmaElement>(work: &mut Work<'_, S, T>, [k, v]: [TensorMap; 2]) {
    match warp() - MULTIPLYING / 32 {
        0 if S::APART => load(work, k, Tiles::Keys),
        1 if S::APART => load(work, v, Tiles::Values),
        0 => load(work, k, Tiles::Both),
        warp if S::CONVERTS => convert::run(work, warp - 1),
        _ => {}
    }
}

/// What the tiles hold that a warp copies.
#[derive(Clone, Copy, PartialEq)]
enum Tiles {
    Keys,
    Values,
    /// Keys, parts of which are values.
    Both,
}

impl Tiles {
    /// The buffer of the `nth` tile, the parity of the phase in which it becomes empty for this
    /// tile, and the set of the barriers `FULL`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn buffer(self, nth: u32) -> [u32; 3] {
        match self {
            Self::Keys => [0, (nth + 1) % 2, nth % 2],
            Self::Values => [1, (nth + 1) % 2, VALUES],
            Self::Both => [nth % BUFFERS, (nth / BUFFERS + 1) % 2, nth % 2],
        }
    }

    /// The group of tile `nth` that becomes empty first, apart from the rotated channels. The half
    /// that owns the previous tile multiplies its values first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_group(self, nth: u32) -> u32 {
        match self {
            Self::Keys => 0,
            Self::Values => (nth + 1) % 2 * OWN_GROUPS,
            Self::Both => nth % 2 * OWN_GROUPS,
        }
    }
}

/// Copies all tiles of the CTA, each group of chunks as soon as it is empty.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load<S: Shape, T: MmaElement>(work: &mut Work<'_, S, T>, map: TensorMap, tiles: Tiles) {
    // Tiles of earlier pieces.
    let mut before = 0;
    loop {
        let mut held = 0;
        for tile in Rolled(work.tiles.clone(), 1) {
            let within = tile - work.tiles.start;
            if within % HELD == 0 {
                held = work.block_of((tile * UNITS + lane()) * LEAST_BOX);
            }
            let nth = before + within;
            let [buffer, empty, set] = tiles.buffer(nth);
            let boxes = Boxes::new(work, map, held, [tile, buffer, set]);
            if tiles == Tiles::Both {
                boxes.copy(work, ROTATED, empty);
            }
            for i in Rolled(0..ROTATED, 1) {
                boxes.copy(work, (tiles.first_group(nth) + i) % ROTATED, empty);
            }
        }
        if !S::DIVIDES {
            return;
        }
        before += work.tiles.end - work.tiles.start;
        if !work.turn_to_next() {
            return;
        }
    }
}

/// The TMA boxes of one chunk of a tile. Each of the first lanes copies one box.
struct Boxes {
    map: TensorMap,
    /// Boxes of a chunk.
    units: u32,
    /// The lane's box in a chunk: its block, its first row in the block and in the tile.
    block: u32,
    row: u32,
    place: u32,
    buffer: u32,
    /// The set of the barriers `FULL`.
    set: u32,
    /// Bit `i`: rows 16 i to 16 i + 15 of the tile lie outside of the cache.
    gaps: u32,
}

impl Boxes {
    /// The boxes of a tile, whose block numbers the lanes hold in `held`. A box has as many rows as
    /// a block, or as the tile if that is smaller. A block number outside of the cache is replaced
    /// by one past its end, where TMA loads zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<S: Shape, T: MmaElement>(
        work: &Work<'_, S, T>,
        map: TensorMap,
        held: u32,
        [tile, buffer, set]: [u32; 3],
    ) -> Self {
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
        Self { map, units, block, row, place, buffer, set, gaps }
    }

    /// Copies the chunks of a group once it is empty. In a cluster of two, each CTA copies one of
    /// the chunks to both CTAs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, group: u32, empty: u32) {
        if S::CONVERTS {
            return self.copy_codes(work, group, empty);
        }
        let chunk = 2 * group + lane() / self.units;
        let is_used = lane() < 2 * self.units && chunk < S::CHUNKS;
        let full = work.full(self.set, chunk);
        if S::APART {
            mbarrier_wait_cluster(work.empty(self.buffer, group), empty);
        } else {
            mbarrier_wait(work.empty(self.buffer, group), empty);
        }
        if group == S::LAST_GROUP && lane() == 0 {
            Shared::<u32>::at(S::GAPS).store(self.buffer, self.gaps);
        }
        if is_used && self.place == 0 {
            mbarrier_arrive_expect(full, CHUNK_BYTES);
        }
        sync_warp();
        if is_used {
            let to = work.buffer(self.buffer) + chunk * CHUNK_BYTES + self.place * 128;
            let from = [chunk * CHUNK, self.row, work.rows.kv_head, self.block];
            if !S::APART || work.cluster == 1 {
                tma_load(to, self.map, from, full);
            } else if chunk % MAX_CLUSTER == work.rank {
                tma_load_multicast(to, self.map, from, full, (1 << MAX_CLUSTER) - 1);
            }
        }
    }

    /// The same for a float8 cache: the float8 values of a group are one chunk in size, and are
    /// copied to the place of the group's last chunk.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy_codes<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, group: u32, empty: u32) {
        let codes = work.codes(self.buffer, group);
        mbarrier_wait(work.empty(self.buffer, group), empty);
        if group == S::LAST_GROUP && lane() == 0 {
            Shared::<u32>::at(S::GAPS).store(self.buffer, self.gaps);
        }
        if lane() == 0 {
            mbarrier_arrive_expect(codes, CHUNK_BYTES);
        }
        sync_warp();
        if lane() < self.units {
            let to = work.chunk(self.buffer, convert::last_chunk::<S>(group)) + self.place * 128;
            tma_load(to, self.map, [group * CHUNK, self.row, work.rows.kv_head, self.block], codes);
        }
    }
}

impl<S: Shape, T: MmaElement> Work<'_, S, T> {
    /// The block of a row of the sequence. Table entries past the last visible row are undefined,
    /// so rows past it get the block of the last visible row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block_of(&self, row: u32) -> u32 {
        if S::APART && self.p.log_block_size == CONTIGUOUS {
            return self.rows.batch;
        }
        let nth = row.min(self.end - 1) >> self.p.log_block_size;
        let entry = self.rows.batch as usize * self.p.per_sequence as usize + nth as usize;
        self.to.block_table.load(entry) as u32
    }
}
