//! The shapes of the kernels: width of keys, and whether values are part of the keys.

use super::queries::Held;
use super::{
    BUFFERS, CHUNK, CHUNK_BYTES, QUERY_CHUNK, ROWS, VALUE_CHUNKS, VALUE_SIZE, WEIGHT_BYTES, Work,
};
use crate::num::{MmaElement, f16};

/// A shape: the channels of a key, and offsets in shared memory.
pub trait Shape {
    /// Channels of a key.
    const KEY_SIZE: u32;
    /// Whether values have tiles of their own. Otherwise they are the keys' first channels.
    const APART: bool;
    /// The chunk of the queries that stays in registers. It is multiplied first.
    const HELD: u32;
    /// Operand type of the tensor cores if queries are `T`.
    type Operand<T: MmaElement>: MmaElement;
    /// Whether CTAs may divide the keys of all sequences among them (`division.rs`).
    const DIVIDES: bool = false;
    /// Whether the cache holds float8, which three warps convert to operands (`convert.rs`).
    const CONVERTS: bool = false;
    /// Converts the loaded queries, and those that a thread holds, to operands. A function of the
    /// shape, because a branch, even one never taken, makes other shapes spill.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[expect(private_interfaces, reason = "only this module calls it")]
    fn prepare<T: MmaElement>(_: &Work<'_, Self, T>, held: Held) -> Held
    where
        Self: Sized,
    {
        held
    }

    /// Chunks of a buffer.
    const CHUNKS: u32 = Self::KEY_SIZE / CHUNK;
    /// Groups of chunks that are released together: pairs of chunks, and the rotated channels.
    const GROUPS: u32 = Self::CHUNKS.div_ceil(2);
    /// The group of a key tile that its owner releases last, after masking.
    const LAST_GROUP: u32 = Self::GROUPS - 1;
    /// Sets of `FULL` barriers: one for the keys of each half, and one for values if these are
    /// apart. A half waits for every phase of the barriers that it reads.
    const SETS: u32 = if Self::APART { 3 } else { 2 };
    /// Bytes of a buffer.
    const BUFFER_BYTES: u32 = Self::CHUNKS * CHUNK_BYTES;

    /// Offset of the buffers, after the queries.
    const KV: u32 = VALUE_CHUNKS * QUERY_CHUNK;
    /// Offset of P of the last tile of each half.
    const WEIGHTS: u32 = Self::KV + BUFFERS * Self::BUFFER_BYTES;
    /// Offset of the rows, as [`Row::keep`](crate::tile::rows::Row::keep) stores them.
    const ROW_PLACES: u32 = Self::WEIGHTS + BUFFERS * WEIGHT_BYTES;
    /// Offset of the row maxima after the last tile of each half.
    const MAXIMA: u32 = Self::ROW_PLACES + ROWS * 16;
    /// Offset of the rows' sums of each half.
    const ROW_SUMS: u32 = Self::MAXIMA + BUFFERS * ROWS * 4;
    /// Offset of a bit mask per buffer: a bit says that 16 rows lie outside of the cache.
    const GAPS: u32 = Self::ROW_SUMS + BUFFERS * ROWS * 4;
    /// Offset of two numbers that do not fit registers: keys that some row sees, and tiles.
    const COUNTS: u32 = Self::GAPS + 4 * BUFFERS;
    /// Offset of the barriers `FULL`.
    const FULL: u32 = Self::COUNTS + if Self::APART { 8 } else { 0 };
    /// Offset of the barriers `EMPTY`.
    const EMPTY: u32 = Self::FULL + 8 * Self::SETS * Self::CHUNKS;
    /// Offset of the barriers `PASSED`.
    const PASSED: u32 = Self::EMPTY + 8 * BUFFERS * Self::GROUPS;
    /// Offset of the barriers `CODES`.
    const CODES: u32 = Self::PASSED + 8 * BUFFERS;
    /// Offset of the divisors of the query rows.
    const DIVISORS: u32 = Self::CODES + if Self::CONVERTS { 8 * BUFFERS * Self::GROUPS } else { 0 };
    /// Dynamic shared memory of a CTA, in bytes.
    const SHARED_BYTES: u32 = Self::RANGE_END + if Self::DIVIDES { 16 + 2 * 16 } else { 0 };
    /// Offset of where the CTA's range ends, a vector.
    const RANGE_END: u32 = {
        let end = Self::DIVISORS + if Self::CONVERTS { 4 * ROWS } else { 0 };
        if Self::DIVIDES { end.next_multiple_of(16) } else { end }
    };
    /// Offset of what each half keeps of its piece, a vector.
    const PIECES: u32 = Self::RANGE_END + 16;
}

/// A latent cache: 576 channels, the first 512 of which are the value.
pub struct Latent;

impl Shape for Latent {
    const KEY_SIZE: u32 = 576;
    const APART: bool = false;
    const HELD: u32 = VALUE_CHUNKS;
    type Operand<T: MmaElement> = T;
}

/// The same, where CTAs divide the keys of all sequences.
pub struct LatentDivided;

impl Shape for LatentDivided {
    const KEY_SIZE: u32 = Latent::KEY_SIZE;
    const APART: bool = false;
    const HELD: u32 = Latent::HELD;
    type Operand<T: MmaElement> = T;
    const DIVIDES: bool = true;
}

/// The same in float8e4m3fn.
pub struct LatentFloat8;

impl Shape for LatentFloat8 {
    const KEY_SIZE: u32 = Latent::KEY_SIZE;
    const APART: bool = false;
    const HELD: u32 = Latent::HELD;
    type Operand<T: MmaElement> = f16;
    const CONVERTS: bool = true;
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[expect(private_interfaces, reason = "as above")]
    fn prepare<T: MmaElement>(work: &Work<'_, Self, T>, held: Held) -> Held {
        work.convert_queries(held)
    }
}

/// Heads of 512.
pub struct Wide;

impl Shape for Wide {
    const KEY_SIZE: u32 = VALUE_SIZE;
    const APART: bool = true;
    const HELD: u32 = 0;
    type Operand<T: MmaElement> = T;
}

const _: () = {
    const MOST: u32 = 227 << 10;
    assert!(Latent::SHARED_BYTES <= MOST && Wide::SHARED_BYTES <= MOST);
    assert!(LatentFloat8::SHARED_BYTES <= MOST && LatentDivided::SHARED_BYTES <= MOST);
};
