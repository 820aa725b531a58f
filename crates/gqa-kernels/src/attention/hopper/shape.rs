//! Shapes of work and the shared-memory maps that follow from them.

use super::row_tiles;

/// Columns of a swizzled chunk: 128 bytes.
pub(super) const CHUNK: u32 = 64;
/// Columns of a tile of V, transposed, of e4m3: its keys, and beside them its keys of the head's
/// columns from [`TRANSPOSED_ROWS`] on.
pub(super) const TRANSPOSED_COLUMNS: u32 = 128;
/// Rows of such a tile, at most: columns of the head.
pub(super) const TRANSPOSED_ROWS: u32 = 128;
/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// Query rows of a warpgroup.
pub(super) const WARPGROUP_ROWS: u32 = 64;
/// Work tiles whose descriptions are kept: the one that is drawn, those with tiles in the ring, two
/// each at least, two that consumers may still be at, and one to spare.
pub(super) const WORK_SLOTS: u32 = MAX_STAGES;
/// Bytes of a description.
pub(super) const WORK_BYTES: u32 = 48;
/// Shared memory of an SM that one block can have.
const SHARED: u32 = 227 * 1024;
/// More K and V tiles in flight hide no more latency.
const MAX_STAGES: u32 = 8;

/// Byte offset of the `unit`th 16 bytes of a row in a tile of `rows` rows: in chunks of 128 bytes
/// of all rows, in which units trade places within eight rows, as TMA has it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn swizzled(rows: u32, row: u32, unit: u32) -> u32 {
    let (chunk, unit) = (unit / 8, (unit % 8) ^ (row % 8));
    (chunk * rows + row) * 128 + unit * 16
}

/// Shape of a block's work, and the shared-memory map that follows from it.
pub(super) trait Tile {
    /// Head size in the tile, a multiple of 16.
    const D: u32;
    /// Pairs of vectors of a row that turn together, at most, as a power of two.
    const PAIRS: u32 = (Self::D / 16).next_power_of_two();
    /// Rows that a warpgroup rotates at a time, and how often it does.
    const PASS_ROWS: u32 = WARPGROUP / Self::PAIRS;
    const PASSES: u32 = WARPGROUP_ROWS / Self::PASS_ROWS;
    /// Keys of a tile.
    const N: u32;
    /// Consumer warpgroups of 64 rows.
    const WARPGROUPS: u32;
    /// A work tile is one split of its keys.
    const SPLITS: bool;
    /// Bytes of a number that is multiplied; with one, V is transposed.
    const NUMBER_BYTES: u32;
    const IS_TRANSPOSED: bool = Self::NUMBER_BYTES == 1;
    const ROWS: u32 = Self::WARPGROUPS * WARPGROUP_ROWS;
    /// Of Q and K.
    const CHUNKS: u32 = (Self::D * Self::NUMBER_BYTES).div_ceil(128);
    /// Of one warpgroup.
    const Q_BYTES: u32 = WARPGROUP_ROWS * Self::CHUNKS * 128;
    const KV_BYTES: u32 = Self::N * Self::CHUNKS * 128;
    /// Of a tile of V.
    const VALUE_BYTES: u32 =
        if Self::IS_TRANSPOSED { TRANSPOSED_ROWS * TRANSPOSED_COLUMNS } else { Self::KV_BYTES };
    /// Of the larger of both.
    const TILE_BYTES: u32 =
        if Self::KV_BYTES > Self::VALUE_BYTES { Self::KV_BYTES } else { Self::VALUE_BYTES };
    /// Whether the tensor cores sum the weights, as products with eight columns of ones behind V:
    /// the sums are those of the rounded weights then.
    const SUM_COLUMNS: bool;
    /// Whether a consumer waits for P·V behind its first row's exponentials, and not before. Three
    /// warpgroups have others to run meanwhile, and are slower with it.
    const WAITS_LATE: bool = Self::WARPGROUPS == 2 && !Self::SUM_COLUMNS;
    /// Whether a consumer asks in the middle of a step if the next tiles have arrived, so that the
    /// next one need not wait for the answer. Without products of e4m3 it is not faster.
    const ASKS_AHEAD: bool = Self::IS_TRANSPOSED;
    /// Whether weights are packed before a finished work tile's output is written, and take fewer
    /// registers meanwhile. Shapes that have enough of them spill if they do.
    const PACKS_EARLY: bool = Self::IS_TRANSPOSED && Self::D > 128;
    /// As many rows of ones as one multiplication takes; where V is transposed, each stage of the
    /// ring ends with them.
    const ONES_BYTES: u32 = if Self::SUM_COLUMNS && !Self::IS_TRANSPOSED { 16 * 128 } else { 0 };
    const STAGE_BYTES: u32 =
        Self::TILE_BYTES + if Self::SUM_COLUMNS && Self::IS_TRANSPOSED { 8 * 128 } else { 0 };
    /// Tiles of a mask in flight; 0: there is none.
    const MASK_STAGES: u32;
    /// Tiles of K and V arrive as quantized values, of which a warpgroup of its own makes halves
    /// (`convert.rs`).
    const CONVERTS: bool;
    /// Of a tile of quantized values of 8 bits, which those of 4 bits take half of: the end of the
    /// tile of halves that they become.
    const CODE_CHUNKS: u32 = Self::D.div_ceil(128);
    const CODE_BYTES: u32 = Self::N * Self::CODE_CHUNKS * 128;
    /// A factor for each query row.
    const FACTOR_BYTES: u32 = if Self::CONVERTS { 4 * Self::ROWS } else { 0 };
    /// Threads of a block.
    const THREADS: u32 = (Self::WARPGROUPS + 1 + Self::CONVERTS as u32) * WARPGROUP;
    /// Q tiles of a warpgroup in flight: two where shared memory allows, so that the next one is
    /// there before it is needed.
    const Q_STAGES: u32 = {
        let small = Self::D * Self::NUMBER_BYTES <= 256 && Self::N <= 128;
        if small && Self::MASK_STAGES == 0 { 2 } else { 1 }
    };
    /// Of all warpgroups.
    const Q_TILES: u32 = Self::Q_STAGES * Self::WARPGROUPS;
    const MASK_BYTES: u32 = Self::ROWS * Self::N * 2;
    /// K and V tiles in flight together.
    const STAGES: u32 = {
        let rest = Self::Q_TILES * Self::Q_BYTES + Self::MASK_STAGES * Self::MASK_BYTES;
        let rest = rest + Self::ONES_BYTES + Self::FACTOR_BYTES + 1024;
        let fit = (SHARED - rest) / Self::STAGE_BYTES;
        if fit < MAX_STAGES { fit } else { MAX_STAGES }
    };
    const KV: u32 = Self::Q_TILES * Self::Q_BYTES;
    const MASK: u32 = Self::KV + Self::STAGES * Self::STAGE_BYTES;
    const ONES: u32 = Self::MASK + Self::MASK_STAGES * Self::MASK_BYTES;
    const FACTORS: u32 = Self::ONES + Self::ONES_BYTES;
    const Q_FULL: u32 = Self::FACTORS + Self::FACTOR_BYTES;
    const Q_EMPTY: u32 = Self::Q_FULL + 8 * Self::Q_TILES;
    const KV_FULL: u32 = Self::Q_EMPTY + 8 * Self::Q_TILES;
    const KV_EMPTY: u32 = Self::KV_FULL + 8 * Self::STAGES;
    const MASK_FULL: u32 = Self::KV_EMPTY + 8 * Self::STAGES;
    const MASK_EMPTY: u32 = Self::MASK_FULL + 8 * Self::MASK_STAGES;
    const CODE_FULL: u32 = Self::MASK_EMPTY + 8 * Self::MASK_STAGES;
    const WORK_FULL: u32 =
        Self::CODE_FULL + if Self::CONVERTS { 8 * Self::STAGES.next_multiple_of(2) } else { 0 };
    /// On a boundary of 16 bytes: before it are pairs of barriers.
    const WORK: u32 = Self::WORK_FULL + 8 * WORK_SLOTS;
    const BYTES: u32 = Self::WORK + WORK_SLOTS * WORK_BYTES;
    /// Behind what finds the sequences of row tiles over a paged KV cache, a word as far from
    /// another as descriptions are: whether keys of the work tile have no block.
    const GAPS: u32 = Self::BYTES + row_tiles::BYTES;
    /// Over a paged KV cache.
    const PAGED_BYTES: u32 = {
        let bytes = Self::GAPS + WORK_SLOTS * WORK_BYTES;
        assert!(bytes <= SHARED, "shared memory of a block");
        bytes
    };
    /// What TMA fills of a stage of the ring with K or V: the whole tile, or its end.
    const ARRIVAL: Arrival = if Self::CONVERTS {
        Arrival {
            offset: Self::KV_BYTES - Self::CODE_BYTES,
            chunks: Self::CODE_CHUNKS,
            full: Self::CODE_FULL,
        }
    } else {
        Arrival { offset: 0, chunks: Self::CHUNKS, full: Self::KV_FULL }
    };
}

/// How K and V arrive.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    /// From the start of the stage.
    pub(super) offset: u32,
    /// Chunks of columns.
    pub(super) chunks: u32,
    /// The first barrier.
    pub(super) full: u32,
}

/// A shape: `D` columns, `N` keys, `G` consumer warpgroups; `C` score, `W` packed weight (half as
/// many where operands are e4m3) and `O` output registers per thread, four more of these if the
/// tensor cores sum weights; `M` tiles of a mask in flight, or 0 and no mask; whole key ranges or
/// `SPLITS` of them; K and V of elements or, with `CODES`, of quantized values.
pub struct Hopper<
    const D: u32,
    const N: u32,
    const G: u32,
    const C: usize,
    const W: usize,
    const O: usize,
    const M: u32,
    const SPLITS: bool,
    const CODES: bool,
>;

/// Head sizes up to 64. The tensor cores sum the weights, because the loop is bound by its
/// instructions.
pub type D64 = Hopper<64, 128, 3, 64, 32, 36, 0, false, false>;
/// The same for short prompts, which fill tiles of fewer rows better.
pub type D64Short = Hopper<64, 128, 2, 64, 32, 36, 0, false, false>;
/// The same with sums of weights that are not rounded, which a log-sum-exp needs, and for splits,
/// whose way out needs more registers than three warpgroups have.
pub type D64Exact<const SPLITS: bool> = Hopper<64, 128, 2, 64, 32, 32, 0, SPLITS, false>;
/// Head sizes up to 80.
pub type D80 = Hopper<80, 96, 3, 48, 24, 40, 0, false, false>;
/// The same for short prompts.
pub type D80Short = Hopper<80, 128, 2, 64, 32, 40, 0, false, false>;
/// Head sizes up to 96.
pub type D96 = Hopper<96, 96, 3, 48, 24, 48, 0, false, false>;
/// The same for short prompts.
pub type D96Short = Hopper<96, 128, 2, 64, 32, 48, 0, false, false>;
/// Head sizes up to 128.
pub type D128<const SPLITS: bool> = Hopper<128, 128, 2, 64, 32, 64, 0, SPLITS, false>;
/// The same for many keys that all rows see: fewer, larger tiles.
pub type D128Long = Hopper<128, 176, 2, 88, 44, 64, 0, false, false>;
/// Head sizes up to 160.
pub type D160 = Hopper<160, 128, 2, 64, 32, 80, 0, false, false>;
/// Head sizes up to 192.
pub type D192<const SPLITS: bool> = Hopper<192, 128, 2, 64, 32, 96, 0, SPLITS, false>;
/// Head sizes up to 224.
pub type D224 = Hopper<224, 64, 2, 32, 16, 112, 0, false, false>;
/// Head sizes up to 256.
pub type D256<const SPLITS: bool> = Hopper<256, 64, 2, 32, 16, 128, 0, SPLITS, false>;
/// Head sizes up to 128, operands of e4m3. The tensor cores sum the weights, so that what rounds
/// all of a row's weights alike does no harm.
pub type Float8D128 = Hopper<128, 128, 2, 64, 16, 68, 0, false, false>;
/// The same for head sizes up to 256.
pub type Float8D256 = Hopper<256, 64, 2, 32, 8, 132, 0, false, false>;
/// Head sizes up to 64, over a quantized cache.
pub type QuantizedD64 = Hopper<64, 128, 2, 64, 32, 32, 0, false, true>;
/// Head sizes up to 128, over a quantized cache.
pub type QuantizedD128 = Hopper<128, 128, 2, 64, 32, 64, 0, false, true>;
/// Head sizes up to 64, with a mask.
pub type MaskedD64 = Hopper<64, 128, 2, 64, 32, 32, 2, false, false>;
/// Head sizes up to 128, with a mask.
pub type MaskedD128 = Hopper<128, 128, 2, 64, 32, 64, 2, false, false>;
/// Head sizes up to 256, with a mask.
pub type MaskedD256 = Hopper<256, 64, 2, 32, 16, 128, 2, false, false>;

impl<
    const D: u32,
    const N: u32,
    const G: u32,
    const C: usize,
    const W: usize,
    const O: usize,
    const M: u32,
    const SPLITS: bool,
    const CODES: bool,
> Tile for Hopper<D, N, G, C, W, O, M, SPLITS, CODES>
{
    const D: u32 = D;
    const N: u32 = N;
    const WARPGROUPS: u32 = G;
    const MASK_STAGES: u32 = M;
    const CONVERTS: bool = CODES;
    const SPLITS: bool = SPLITS;
    const NUMBER_BYTES: u32 = 8 * W as u32 / N;
    const SUM_COLUMNS: bool = O as u32 > D / 2;
}
