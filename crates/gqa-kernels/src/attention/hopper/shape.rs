//! Tile shapes, and the shared-memory layouts that follow from them.

use crate::tile::warp::LANES;

/// Columns of a swizzled chunk: 128 bytes of 16-bit elements.
pub(super) const CHUNK: u32 = 64;
/// Columns of a tile of e4m3 Vᵀ. The keys of a tile are its columns. Where the head has more than
/// [`TRANSPOSED_ROWS`] columns, the same keys follow for the remaining columns of the head.
pub(super) const TRANSPOSED_COLUMNS: u32 = 128;
/// Most rows of such a tile; a row is a column of the head.
pub(super) const TRANSPOSED_ROWS: u32 = 128;
/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// Query rows of a warpgroup.
pub(super) const WARPGROUP_ROWS: u32 = 64;
/// Work tile descriptions that stay in shared memory: the one just drawn, one per two stages for
/// work tiles with K or V in the pipeline, two that consumers may still read, and one to spare.
pub(super) const WORK_SLOTS: u32 = MAX_STAGES;
/// Bytes of a description.
pub(super) const WORK_BYTES: u32 = 48;
/// Bytes of a sequence in the window of `row_tiles.rs`: its first token, new tokens, past length,
/// and the inclusive prefix sum of work tiles in the window.
pub(super) const SEQUENCE_BYTES: u32 = 16;
/// Bytes of the window: its sequences, their range, and the number of all work tiles.
pub(super) const WINDOW_BYTES: u32 = (LANES + 2) * SEQUENCE_BYTES;
/// Shared memory that one CTA can have, in bytes.
const SHARED: u32 = 227 * 1024;
/// More K and V tiles in flight hide no more latency.
const MAX_STAGES: u32 = 8;

/// Byte offset of 16-byte unit `unit` of row `row` in a tile of `rows` rows: the tile is stored as
/// chunks of 128 bytes of all rows, with TMA's 128-byte swizzle within each 8 rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn swizzled(rows: u32, row: u32, unit: u32) -> u32 {
    let (chunk, unit) = (unit / 8, (unit % 8) ^ (row % 8));
    (chunk * rows + row) * 128 + unit * 16
}

/// Shape of a CTA's work, and its shared-memory layout.
pub(super) trait Tile {
    /// Head size of queries and keys in the tile, a multiple of 16.
    const D: u32;
    /// Head size of values in the tile, a multiple of 16.
    const DV: u32;
    /// Most pairs of 16-byte vectors of a row that rotary embedding rotates together, rounded up to
    /// a power of two.
    const PAIRS: u32 = (Self::D / 16).next_power_of_two();
    /// Rows that a warpgroup rotates at a time, and the number of passes over its rows.
    const PASS_ROWS: u32 = WARPGROUP / Self::PAIRS;
    const PASSES: u32 = WARPGROUP_ROWS / Self::PASS_ROWS;
    /// Keys of a tile.
    const N: u32;
    /// Consumer warpgroups of 64 rows.
    const WARPGROUPS: u32;
    /// Whether a work tile is one split of its keys.
    const SPLITS: bool;
    /// Bytes of an operand element; with 1 (e4m3), V is transposed.
    const NUMBER_BYTES: u32;
    const IS_TRANSPOSED: bool = Self::NUMBER_BYTES == 1;
    const ROWS: u32 = Self::WARPGROUPS * WARPGROUP_ROWS;
    /// 128-byte chunks of a row of Q and K.
    const CHUNKS: u32 = (Self::D * Self::NUMBER_BYTES).div_ceil(128);
    /// 128-byte chunks of a row of V, unless it is transposed.
    const VALUE_CHUNKS: u32 = (Self::DV * Self::NUMBER_BYTES).div_ceil(128);
    /// Bytes of a warpgroup's Q tile.
    const Q_BYTES: u32 = WARPGROUP_ROWS * Self::CHUNKS * 128;
    const KV_BYTES: u32 = Self::N * Self::CHUNKS * 128;
    /// Bytes of a V tile.
    const VALUE_BYTES: u32 = if Self::IS_TRANSPOSED {
        TRANSPOSED_ROWS * TRANSPOSED_COLUMNS
    } else {
        Self::N * Self::VALUE_CHUNKS * 128
    };
    /// Whether V tiles are smaller than K tiles. Then they have stages of their own size, in turn:
    /// even stages are for K, odd ones for V. The first odd stage stays empty at first, because two
    /// K tiles come before the first V tile.
    const ALTERNATES: bool = Self::DV < Self::D;
    /// Bytes of the larger of a K and a V tile, or their mean.
    const TILE_BYTES: u32 = if Self::ALTERNATES {
        u32::midpoint(Self::KV_BYTES, Self::VALUE_BYTES)
    } else if Self::KV_BYTES > Self::VALUE_BYTES {
        Self::KV_BYTES
    } else {
        Self::VALUE_BYTES
    };
    /// Whether the tensor cores sum P, by a product with eight columns of ones after V: the row
    /// sums are then sums of rounded P.
    const SUM_COLUMNS: bool;
    /// Whether a consumer waits for P·V after the exponentials of its first row rather than before.
    /// With three warpgroups the others run meanwhile, and a late wait is slower.
    const WAITS_LATE: bool = Self::WARPGROUPS == 2 && !Self::SUM_COLUMNS;
    /// Whether a consumer tests in the middle of a step if the next tiles have arrived, so that the
    /// next step need not wait for the answer. It is not faster for 16-bit products.
    const ASKS_AHEAD: bool = Self::IS_TRANSPOSED;
    /// Whether a consumer packs P before it writes a finished work tile's output, so that P takes
    /// fewer registers meanwhile. Shapes with enough registers spill if they do.
    const PACKS_EARLY: bool = Self::IS_TRANSPOSED && Self::D > 128;
    /// The ones take as many rows as one wgmma reads; where V is transposed, each stage ends with
    /// them.
    const ONES_BYTES: u32 = if Self::SUM_COLUMNS && !Self::IS_TRANSPOSED { 16 * 128 } else { 0 };
    const STAGE_BYTES: u32 =
        Self::TILE_BYTES + if Self::SUM_COLUMNS && Self::IS_TRANSPOSED { 8 * 128 } else { 0 };
    /// Pipeline stages of mask tiles; 0 without a mask.
    const MASK_STAGES: u32;
    /// Whether K and V arrive as quantized values that one more warpgroup converts to float16
    /// (`convert.rs`).
    const CONVERTS: bool;
    /// Chunks and bytes of a tile of 8-bit quantized values; 4-bit values take half. TMA writes it
    /// to the end of the stage, and the conversion overwrites the stage with float16.
    const CODE_CHUNKS: u32 = Self::D.div_ceil(128);
    const CODE_BYTES: u32 = Self::N * Self::CODE_CHUNKS * 128;
    /// Bytes of the f32 factors, one per query row.
    const FACTOR_BYTES: u32 = if Self::CONVERTS { 4 * Self::ROWS } else { 0 };
    /// Threads of a CTA.
    const THREADS: u32 = (Self::WARPGROUPS + 1 + Self::CONVERTS as u32) * WARPGROUP;
    /// Stages of Q tiles per warpgroup: two where shared memory allows, so that the next Q tile
    /// arrives before it is needed.
    const Q_STAGES: u32 = {
        let small = Self::D * Self::NUMBER_BYTES <= 256 && Self::N <= 128;
        if small && Self::MASK_STAGES == 0 { 2 } else { 1 }
    };
    /// Q tiles of all warpgroups.
    const Q_TILES: u32 = Self::Q_STAGES * Self::WARPGROUPS;
    const MASK_BYTES: u32 = Self::ROWS * Self::N * 2;
    /// Pipeline stages, each of one K or V tile.
    const STAGES: u32 = {
        let rest = Self::Q_TILES * Self::Q_BYTES + Self::MASK_STAGES * Self::MASK_BYTES;
        let rest = rest + Self::ONES_BYTES + Self::FACTOR_BYTES + 1024;
        let fit = (SHARED - rest) / Self::STAGE_BYTES;
        assert!(!Self::ALTERNATES || fit.is_multiple_of(2));
        if fit < MAX_STAGES { fit } else { MAX_STAGES }
    };
    const KV: u32 = Self::Q_TILES * Self::Q_BYTES;
    /// Byte offset of a stage in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage(stage: u32) -> u32 {
        let behind_keys = if Self::ALTERNATES { Self::KV_BYTES - Self::TILE_BYTES } else { 0 };
        Self::KV + stage * Self::STAGE_BYTES + stage % 2 * behind_keys
    }
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
    /// Aligned to 16 bytes: pairs of 8-byte barriers precede it.
    const WORK: u32 = Self::WORK_FULL + 8 * WORK_SLOTS;
    const BYTES: u32 = Self::WORK + WORK_SLOTS * WORK_BYTES;
    /// Flags of the work tiles over a paged KV cache: whether keys have no block. They follow the
    /// row tile window (`row_tiles.rs`) and are as far apart as the descriptions.
    const GAPS: u32 = Self::BYTES + WINDOW_BYTES;
    /// Where the results of pieces of the work tiles go, between their flags.
    const PARTS: u32 = Self::GAPS + 4;
    /// Shared memory of a CTA over a paged KV cache, in bytes.
    const PAGED_BYTES: u32 = {
        let bytes = Self::GAPS + WORK_SLOTS * WORK_BYTES;
        assert!(bytes <= SHARED, "shared memory of a block");
        bytes
    };
    /// The part of a stage that TMA fills: the whole tile, or its end where a warpgroup converts
    /// it.
    const ARRIVAL: Arrival = if Self::CONVERTS {
        Arrival {
            offset: Self::KV_BYTES - Self::CODE_BYTES,
            chunks: [Self::CODE_CHUNKS; 2],
            full: Self::CODE_FULL,
        }
    } else {
        Arrival { offset: 0, chunks: [Self::CHUNKS, Self::VALUE_CHUNKS], full: Self::KV_FULL }
    };
}

/// Where TMA writes K and V in a stage.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    /// Byte offset from the start of the stage.
    pub(super) offset: u32,
    /// Chunks of columns of K and of V.
    pub(super) chunks: [u32; 2],
    /// Barrier of the first stage.
    pub(super) full: u32,
}

/// A tile shape: `D` columns of Q and K, `N` keys, `G` consumer warpgroups; per thread `C`
/// registers of scores, `W` of packed P and `O` of output; `M` stages of mask tiles, or 0 without a
/// mask; work tiles over all their keys or over `SPLITS`; K and V as elements or, with `CODES`, as
/// quantized values. The macro `shape!` derives the registers.
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

/// The kernel type of a shape: head size of keys, and of values if that differs; keys of a tile;
/// consumer warpgroups; bytes of an operand element; columns of ones behind V with which the tensor
/// cores sum P; pipeline stages of mask tiles; whether keys are split; whether a cache is
/// quantized.
macro_rules! shape {
    (head $head:literal, $($rest:tt)*) => { shape!(@ $head, $head, $($rest)*) };
    (heads $head:literal and $values:literal, $($rest:tt)*) => {
        shape!(@ $head, $values, $($rest)*)
    };
    (@ $head:literal, $values:literal, keys $keys:literal, warpgroups $groups:literal
     $(, operand_bytes $bytes:literal)? $(, sum_columns $sums:literal)?
     $(, mask_stages $mask:literal)? $(, splits $splits:ident)? $(, quantized $codes:literal)?) => {
        Hopper<
            $head,
            $keys,
            $groups,
            { $keys / 2 },
            { $keys * shape!(@or 2 $(, $bytes)?) / 8 },
            { ($values + shape!(@or 0 $(, $sums)?)) / 2 },
            { shape!(@or 0 $(, $mask)?) },
            { shape!(@or false $(, $splits)?) },
            { shape!(@or false $(, $codes)?) },
        >
    };
    (@or $default:literal) => { $default };
    (@or $default:literal, $given:tt) => { $given };
}

/// Head sizes up to 64. The tensor cores sum P because the mainloop is bound by instruction issue.
pub type D64 = shape!(head 64, keys 128, warpgroups 3, sum_columns 8);
/// Head sizes up to 64 for short prefills, which fill tiles of fewer rows better.
pub type D64Short = shape!(head 64, keys 128, warpgroups 2, sum_columns 8);
/// Head sizes up to 64 with sums of unrounded P: for calls that return a log-sum-exp, and for
/// splits, whose epilogue needs more registers than three warpgroups have.
pub type D64Exact<const SPLITS: bool> = shape!(head 64, keys 128, warpgroups 2, splits SPLITS);
/// Head sizes up to 80.
pub type D80 = shape!(head 80, keys 96, warpgroups 3);
/// Head sizes up to 80 for short prefills.
pub type D80Short = shape!(head 80, keys 128, warpgroups 2);
/// Head sizes up to 96.
pub type D96 = shape!(head 96, keys 96, warpgroups 3);
/// Head sizes up to 96 for short prefills.
pub type D96Short = shape!(head 96, keys 128, warpgroups 2);
/// Head sizes up to 128.
pub type D128<const SPLITS: bool> = shape!(head 128, keys 128, warpgroups 2, splits SPLITS);
/// Head sizes up to 128 for many keys that all rows see: fewer, larger tiles.
pub type D128Long = shape!(head 128, keys 176, warpgroups 2);
/// Head sizes up to 160.
pub type D160 = shape!(head 160, keys 128, warpgroups 2);
/// Head sizes up to 192.
pub type D192<const SPLITS: bool> = shape!(head 192, keys 128, warpgroups 2, splits SPLITS);
/// Keys of up to 192 and values of up to 128, as latent attention has them in prefill.
pub type D192V128 = shape!(heads 192 and 128, keys 128, warpgroups 2);
/// Head sizes up to 224.
pub type D224 = shape!(head 224, keys 64, warpgroups 2);
/// Head sizes up to 256.
pub type D256<const SPLITS: bool> = shape!(head 256, keys 64, warpgroups 2, splits SPLITS);
/// Head sizes up to 128, e4m3 operands. The tensor cores sum the rounded P, so that a rounding
/// error common to a row's P cancels in the quotient.
pub type Float8D128 = shape!(head 128, keys 128, warpgroups 2, operand_bytes 1, sum_columns 8);
/// Head sizes up to 256, e4m3 operands.
pub type Float8D256 = shape!(head 256, keys 64, warpgroups 2, operand_bytes 1, sum_columns 8);
/// Head sizes up to 64, over a quantized cache.
pub type QuantizedD64 = shape!(head 64, keys 128, warpgroups 2, quantized true);
/// Head sizes up to 128, over a quantized cache.
pub type QuantizedD128 = shape!(head 128, keys 128, warpgroups 2, quantized true);
/// Head sizes up to 64, with a mask.
pub type MaskedD64 = shape!(head 64, keys 128, warpgroups 2, mask_stages 2);
/// Head sizes up to 128, with a mask.
pub type MaskedD128 = shape!(head 128, keys 128, warpgroups 2, mask_stages 2);
/// Head sizes up to 256, with a mask.
pub type MaskedD256 = shape!(head 256, keys 64, warpgroups 2, mask_stages 2);

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
    const DV: u32 = O as u32 / 8 * 16;
    const N: u32 = N;
    const WARPGROUPS: u32 = G;
    const MASK_STAGES: u32 = M;
    const CONVERTS: bool = CODES;
    const SPLITS: bool = SPLITS;
    const NUMBER_BYTES: u32 = 8 * W as u32 / N;
    const SUM_COLUMNS: bool = O as u32 * 2 > Self::DV;
}
