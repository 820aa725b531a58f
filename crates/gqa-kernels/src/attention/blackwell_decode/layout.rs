//! Shared memory, barriers and tensor memory.

use super::cache::Cache;
use super::work::Work;
use crate::simt::{fence_mbarrier_init, mbarrier_init};

/// Keys of a tile: lanes of tensor memory, and softmax threads.
pub const KEYS: u32 = 128;
/// Query rows of a part, which a thread has in registers at a time.
pub const PART: u32 = 16;
/// Fewest rows of a block of a paged KV cache: a lane copies a box.
pub const LEAST_BOX: u32 = 16;
/// Softmax warps.
pub(super) const WARPS: u32 = KEYS / 32;
/// Softmax, and the warps of TMA and of the issuer.
pub const THREADS: u32 = KEYS + 64;
/// Most query rows of a CTA: a softmax thread owns one.
pub const MOST_ROWS: u32 = 128;
/// 128 bytes of each row of a tile of keys or values.
pub(super) const CHUNK: u32 = KEYS * 128;
const MOST_STAGES: u32 = 8;

/// Dynamic shared memory of a CTA, in bytes.
pub const SHARED_BYTES: u32 = 225 << 10;
/// What precedes the barriers: all that depends on the number of rows.
const FIXED: u32 = SHARED_BYTES - (7 << 10);
const KEYS_FULL: u32 = FIXED;
const VALUES_FULL: u32 = KEYS_FULL + MOST_STAGES * 8;
const KEYS_EMPTY: u32 = VALUES_FULL + MOST_STAGES * 8;
const VALUES_EMPTY: u32 = KEYS_EMPTY + MOST_STAGES * 8;
const SCORED: u32 = VALUES_EMPTY + MOST_STAGES * 8;
const WEIGHED: u32 = SCORED + 2 * 8;
const ADDED: u32 = WEIGHED + 8;
const RECEIVED: u32 = ADDED + 8;
const SLOT: u32 = RECEIVED + 8;
const RISEN: u32 = SLOT + 8;
const TOPS: u32 = RISEN + 16;
const REFERENCES: u32 = TOPS + WARPS * MOST_ROWS * 4;
const FACTORS: u32 = REFERENCES + MOST_ROWS * 4;
const SCALES: u32 = FACTORS + MOST_ROWS * 4;
const BOUNDS: u32 = SCALES + MOST_ROWS * 4;
const STATES: u32 = BOUNDS + MOST_ROWS * 8;
/// Of each rank as many as a CTA merges rows.
const STATES_BYTES: u32 = (MOST_ROWS + super::MOST_RANKS) * 8;
const _: () = assert!(RISEN.is_multiple_of(16) && STATES + STATES_BYTES <= SHARED_BYTES);

/// Where everything of a CTA with `rows` columns of scores is: byte addresses in shared memory, and
/// columns of tensor memory.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    base: u32,
    /// Columns of scores: the query rows, rounded up to whole parts.
    pub(super) rows: u32,
    /// Q: for each term chunks of 128-byte rows.
    pub(super) queries: u32,
    /// P: 16 bytes of each key, part after part.
    pub(super) weights: u32,
    /// Outputs of all ranks for the rows that this one merges: (rank, row, head size), f32.
    pub(super) received: u32,
    tiles: u32,
    tile_bytes: u32,
    /// Pairs of a tile of keys and one of values.
    pub(super) stages: u32,
}

impl Layout {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new<C: Cache, const HEAD: u32>(base: u32, work: &Work) -> Self {
        let rows = work.rows.count().next_multiple_of(PART);
        let operand = C::TERMS * C::BYTES * rows;
        let weights = HEAD * operand;
        let received = weights + KEYS * operand;
        let tiles = received + (work.ranks * work.merged * HEAD * 4).next_multiple_of(1024);
        let tile_bytes = KEYS * HEAD * C::BYTES;
        let stages = ((FIXED - tiles) / (2 * tile_bytes)).min(MOST_STAGES);
        let (weights, received, tiles) = (base + weights, base + received, base + tiles);
        Self { base, rows, queries: base, weights, received, tiles, tile_bytes, stages }
    }

    /// Allocated columns of tensor memory: two buffers of scores, the sums of P, and the output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn columns<C: Cache>(self) -> u32 {
        let mut columns = 64;
        while columns < (3 + C::TERMS) * self.rows {
            columns *= 2;
        }
        columns
    }

    /// The keys of a stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys(self, stage: u32) -> u32 {
        self.tiles + 2 * stage * self.tile_bytes
    }

    /// The values of a stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn values(self, stage: u32) -> u32 {
        self.keys(stage) + self.tile_bytes
    }

    /// Bytes of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tile_bytes(self) -> u32 {
        self.tile_bytes
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys_full(self, stage: u32) -> u32 {
        self.base + KEYS_FULL + 8 * stage
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn values_full(self, stage: u32) -> u32 {
        self.base + VALUES_FULL + 8 * stage
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys_empty(self, stage: u32) -> u32 {
        self.base + KEYS_EMPTY + 8 * stage
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn values_empty(self, stage: u32) -> u32 {
        self.base + VALUES_EMPTY + 8 * stage
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn scored(self, buffer: u32) -> u32 {
        self.base + SCORED + 8 * buffer
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn weighed(self) -> u32 {
        self.base + WEIGHED
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn added(self) -> u32 {
        self.base + ADDED
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn arrived(self) -> u32 {
        self.base + RECEIVED
    }

    /// The address of tensor memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn slot(self) -> u32 {
        self.base + SLOT
    }

    /// For each softmax warp whether a reference of its rows has risen.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn risen(self) -> u32 {
        self.base + RISEN
    }

    /// A softmax warp's greatest score, or its sum, of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn top(self, warp: u32, row: u32) -> u32 {
        self.base + TOPS + 4 * (warp * MOST_ROWS + row)
    }

    /// What is subtracted from a row's scores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn reference(self, row: u32) -> u32 {
        self.base + REFERENCES + 4 * row
    }

    /// The factor of a row's sums and output, where its reference has risen.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn factor(self, row: u32) -> u32 {
        self.base + FACTORS + 4 * row
    }

    /// The factor of a row's products.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn scale(self, row: u32) -> u32 {
        self.base + SCALES + 4 * row
    }

    /// The first key that a row sees, and one past the last.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn bounds(self, row: u32) -> u32 {
        self.base + BOUNDS + 8 * row
    }

    /// References and sums of all ranks for the rows that this one merges: (rank, row).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn states(self) -> u32 {
        self.base + STATES
    }

    /// Initialises the barriers of the mainloop. By one thread; a barrier must follow.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn init_barriers(self) {
        for stage in 0..MOST_STAGES {
            mbarrier_init(self.keys_full(stage), 1);
            mbarrier_init(self.values_full(stage), 1);
            mbarrier_init(self.keys_empty(stage), 1);
            mbarrier_init(self.values_empty(stage), 1);
        }
        mbarrier_init(self.scored(0), 1);
        mbarrier_init(self.scored(1), 1);
        mbarrier_init(self.weighed(), KEYS);
        mbarrier_init(self.added(), 1);
        mbarrier_init(self.arrived(), 1);
        fence_mbarrier_init();
    }
}

/// Columns of tensor memory.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    start: u32,
    rows: u32,
}

impl Memory {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(start: u32, layout: Layout) -> Self {
        Self { start, rows: layout.rows }
    }

    /// The same in the lanes of a softmax warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn of_warp(self, warp: u32) -> Self {
        Self { start: self.start + (warp << 21), ..self }
    }

    /// A buffer of scores: keys in lanes, query rows in columns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn scores(self, buffer: u32) -> u32 {
        self.start + buffer * self.rows
    }

    /// Each key lane's sums of P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn sums(self) -> u32 {
        self.start + 2 * self.rows
    }

    /// The output, whose columns are query rows: of each term of P.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn output(self, term: u32) -> u32 {
        self.start + (3 + term) * self.rows
    }
}
