//! Shared memory, barriers and tensor memory.

use crate::simt::{fence_mbarrier_init, mbarrier_init};

/// Rows of a tile: lanes of tensor memory.
pub(super) const TILE: u32 = 128;
/// Query rows of a CTA.
pub const ROWS: u32 = 2 * TILE;
/// Keys of a tile.
pub const KEYS: u32 = 128;
/// Largest head size.
pub(super) const HEAD: u32 = 128;
pub(super) const WARPGROUP: u32 = 128;
/// Two softmax warpgroups, correction, and the warps of the issuer and of TMA.
pub const THREADS: u32 = 4 * WARPGROUP;

/// Bytes of 64 columns of a tile, and of all.
pub(super) const CHUNK: u32 = TILE * 128;
pub(super) const TILE_BYTES: u32 = HEAD / 64 * CHUNK;
/// Tiles of K and V.
pub(super) const STAGES: u32 = 4;
const STAGE: u32 = 2 * TILE_BYTES;

const BARRIERS: u32 = STAGE + STAGES * TILE_BYTES;
pub(super) const Q_FULL: u32 = BARRIERS;
pub(super) const FULL: u32 = Q_FULL + 2 * 8;
pub(super) const EMPTY: u32 = FULL + STAGES * 8;
pub(super) const SCORED: u32 = EMPTY + STAGES * 8;
pub(super) const TOLD: u32 = SCORED + 2 * 8;
pub(super) const WEIGHED: u32 = TOLD + 2 * 8;
pub(super) const CORRECTED: u32 = WEIGHED + 2 * 8;
pub(super) const ADDED: u32 = CORRECTED + 2 * 8;
pub(super) const SLOT: u32 = ADDED + 2 * 8;
const FACTORS: u32 = SLOT + 16;
/// Dynamic shared memory of a CTA, in bytes.
pub const SHARED_BYTES: u32 = FACTORS + ROWS * 4;

/// Columns of tensor memory.
pub(super) const COLUMNS: u32 = 512;

/// The tile of Q.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn queries(base: u32, tile: u32) -> u32 {
    base + tile * TILE_BYTES
}

/// A stage of K and V.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn stage(base: u32, stage: u32) -> u32 {
    base + STAGE + stage * TILE_BYTES
}

/// A barrier of a tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn of_tile(base: u32, barrier: u32, tile: u32) -> u32 {
    base + barrier + 8 * tile
}

/// The factor of a row of a tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn factor(base: u32, tile: u32, row: u32) -> u32 {
    base + FACTORS + 4 * (tile * TILE + row)
}

/// The columns of a tile's scores, and of its weights.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn scores(memory: u32, tile: u32) -> u32 {
    memory + tile * KEYS
}

/// The columns of a tile's output.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn output(memory: u32, tile: u32) -> u32 {
    memory + 2 * KEYS + tile * HEAD
}

/// Initialises all barriers. By one thread; a CTA barrier must follow.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn init_barriers(base: u32) {
    for stage in 0..STAGES {
        mbarrier_init(base + FULL + 8 * stage, 1);
        mbarrier_init(base + EMPTY + 8 * stage, 1);
    }
    for tile in 0..2 {
        for (barrier, arrivals) in [
            (Q_FULL, 1),
            (SCORED, 1),
            (TOLD, WARPGROUP),
            (WEIGHED, WARPGROUP),
            (CORRECTED, WARPGROUP),
            (ADDED, 1),
        ] {
            mbarrier_init(of_tile(base, barrier, tile), arrivals);
        }
    }
    fence_mbarrier_init();
}
