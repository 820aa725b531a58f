//! Shared memory, barriers and tensor memory.

use crate::simt::{fence_mbarrier_init, mbarrier_init};

/// Rows of a tile: lanes of tensor memory.
pub(super) const TILE: u32 = 128;
/// Query rows of a CTA.
pub(super) const ROWS: u32 = 2 * TILE;
/// Keys of a tile.
pub(super) const KEYS: u32 = 128;
pub(super) const WARPGROUP: u32 = 128;
/// Two softmax warpgroups, correction, and the warps of the issuer and of TMA.
pub(super) const THREADS: u32 = 4 * WARPGROUP;

/// Bytes of 64 columns of a tile.
pub(super) const CHUNK: u32 = TILE * 128;

/// Columns of tensor memory.
pub(super) const COLUMNS: u32 = 512;

/// The columns and stages of a kernel.
pub(super) trait Tile {
    /// Columns of queries and keys, a multiple of 64.
    const HEAD: u32;
    /// Columns of values, a multiple of 64 up to 128.
    const VALUES: u32;
    /// Tiles of K and V in shared memory, at least 2.
    const STAGES: u32;

    /// Bytes of a tile of queries or keys, and of one of values.
    const KEY_BYTES: u32 = Self::HEAD / 64 * CHUNK;
    const VALUE_BYTES: u32 = Self::VALUES / 64 * CHUNK;
    const STAGE_BYTES: u32 =
        if Self::HEAD > Self::VALUES { Self::KEY_BYTES } else { Self::VALUE_BYTES };

    const STAGE: u32 = 2 * Self::KEY_BYTES;
    const Q_FULL: u32 = Self::STAGE + Self::STAGES * Self::STAGE_BYTES;
    const FULL: u32 = Self::Q_FULL + 2 * 8;
    const EMPTY: u32 = Self::FULL + Self::STAGES * 8;
    const SCORED: u32 = Self::EMPTY + Self::STAGES * 8;
    const TOLD: u32 = Self::SCORED + 2 * 8;
    const WEIGHED: u32 = Self::TOLD + 2 * 8;
    const CORRECTED: u32 = Self::WEIGHED + 2 * 8;
    const ADDED: u32 = Self::CORRECTED + 2 * 8;
    const SLOT: u32 = Self::ADDED + 2 * 8;
    const WORK: u32 = Self::SLOT + 16;
    const FACTORS: u32 = Self::WORK + 48;
    /// Dynamic shared memory of a CTA.
    const BYTES: u32 = Self::FACTORS + ROWS * 4;

    /// The tile of Q.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries(base: u32, tile: u32) -> u32 {
        base + tile * Self::KEY_BYTES
    }

    /// A stage of K and V.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage(base: u32, stage: u32) -> u32 {
        base + Self::STAGE + stage * Self::STAGE_BYTES
    }

    /// The factor of a row of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn factor(base: u32, tile: u32, row: u32) -> u32 {
        base + Self::FACTORS + 4 * (tile * TILE + row)
    }

    /// The columns of a tile's output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn output(memory: u32, tile: u32) -> u32 {
        memory + 2 * KEYS + tile * Self::VALUES
    }

    /// Initialises all barriers. By one thread; a CTA barrier must follow.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn init_barriers(base: u32) {
        for stage in 0..Self::STAGES {
            mbarrier_init(base + Self::FULL + 8 * stage, 1);
            mbarrier_init(base + Self::EMPTY + 8 * stage, 1);
        }
        for tile in 0..2 {
            let init = |barrier, arrivals| mbarrier_init(of_tile(base, barrier, tile), arrivals);
            init(Self::Q_FULL, 1);
            init(Self::SCORED, 1);
            init(Self::TOLD, WARPGROUP);
            init(Self::WEIGHED, WARPGROUP);
            init(Self::CORRECTED, WARPGROUP);
            init(Self::ADDED, 1);
        }
        fence_mbarrier_init();
    }
}

/// A barrier of a tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn of_tile(base: u32, barrier: u32, tile: u32) -> u32 {
    base + barrier + 8 * tile
}

/// The columns of a tile's scores, and of its weights.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn scores(memory: u32, tile: u32) -> u32 {
    memory + tile * KEYS
}
