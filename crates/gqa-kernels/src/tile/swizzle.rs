//! Swizzled tiles in shared memory, 16 bytes at a time.
//!
//! `ldmatrix` reads 16 bytes of each of eight rows at once, which must lie in different banks.
//! [`padded::Tile`](super::padded::Tile) pads its rows for that, but then a row may start anywhere
//! in a 128-byte line of shared memory, and copies from global memory, which come in whole lines,
//! write two lines each: streaming K and V is 10 to 25 % slower (`docs/perf-log.md`). Here rows are
//! not padded and the 16-byte units of a row are permuted: unit `u` of row `r` lies at `u ^ x(r)`.
//! `x` takes all values below the largest power of two, at most 8, that divides the number of units
//! of a row, and advances whenever rows return to the same banks.
//!
//! `wgmma` reads rows of 128 bytes: for it, wider rows are cut into chunks of eight units, and each
//! chunk is a tile of its own.

use crate::num::{Element, f16};
use crate::simt::{Global, Shared, cp_async_16, lane};
use bytemuck::Pod;
use core::ops::Range;

/// A tile with rows of `D8` units each, `D8` even.
pub struct Swizzled<T, const D8: usize> {
    start: Shared<T>,
    /// Rows of each chunk; 0 if rows are whole.
    chunk: u32,
}

impl<T, const D8: usize> Clone for Swizzled<T, D8> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const D8: usize> Copy for Swizzled<T, D8> {}

/// Bytes of a tile of rows of `d8` units.
pub const fn swizzled_bytes(rows: u32, d8: usize) -> u32 {
    rows * d8 as u32 * 16
}

/// Bytes of a tile of `rows` rows, a multiple of 8, in chunks.
pub const fn chunked_bytes(rows: u32, d8: usize) -> u32 {
    swizzled_bytes(rows, d8.next_multiple_of(8))
}

impl<T: Pod, const D8: usize> Swizzled<T, D8> {
    /// Elements of a unit.
    pub const PER_UNIT: u32 = 16 / size_of::<T>() as u32;
    /// Number of units that the swizzle permutes among each other.
    const GROUP: u32 = 1 << (D8 as u32 | 8).trailing_zeros();

    /// The tile at byte offset `bytes`, a multiple of 128, in the CTA's shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(bytes: u32) -> Self {
        Self { start: Shared::at(bytes), chunk: 0 }
    }

    /// The tile of `rows` rows, a multiple of 8, in chunks, at byte offset `bytes`, a multiple of
    /// 1024, in the CTA's shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn in_chunks_at(bytes: u32, rows: u32) -> Self {
        Self { start: Shared::at(bytes), chunk: rows }
    }

    /// Byte address of the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn address(self) -> u32 {
        self.start.address()
    }

    /// Address of unit `unit` of row `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn place(self, row: u32, unit: u32) -> Shared<T> {
        self.start.offset(self.number(row, unit) * Self::PER_UNIT)
    }

    /// Index, in units of 16 bytes, of unit `unit` of row `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn number(self, row: u32, unit: u32) -> u32 {
        if self.chunk == 0 {
            Swizzled::<f16, D8>::index(row, unit)
        } else {
            Swizzled::<f16, 8>::index(unit / 8 * self.chunk + row, unit % 8)
        }
    }

    /// Units from one row to the next.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pitch(self) -> u32 {
        if self.chunk == 0 { D8 as u32 } else { 8 }
    }

    /// The part of the tile that starts at unit `unit`, a multiple of 8, of each row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn from_unit(self, unit: u32) -> Self {
        Self { start: self.place(0, unit), ..self }
    }

    /// The part of the tile that starts at row `row`, a multiple of 8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn from(self, row: u32) -> Self {
        Self { start: self.start.offset(row * self.pitch() * Self::PER_UNIT), ..self }
    }
}

impl<const D8: usize> Swizzled<f16, D8> {
    /// Index, in units of 16 bytes, of unit `unit` of row `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) const fn index(row: u32, unit: u32) -> u32 {
        row * D8 as u32 + (unit ^ (row * Self::GROUP / 8 % Self::GROUP))
    }
}

/// How the `THREADS` threads of a CTA share copying rows: eight threads per row, which read whole
/// cache lines, or four where rows are no multiple of eight units.
#[derive(Clone, Copy)]
pub struct RowCopy<const UNITS: usize, const THREADS: u32> {
    /// This thread's first row.
    row: u32,
    /// This thread's first unit of a row.
    unit: u32,
}

impl<const UNITS: usize, const THREADS: u32> RowCopy<UNITS, THREADS> {
    /// Threads per row.
    const ACROSS: u32 = if UNITS % 8 == 0 { 8 } else { 4 };
    /// Rows that the CTA copies at a time.
    const DOWN: u32 = THREADS / Self::ACROSS;

    /// The share of `thread`, the calling thread.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(thread: u32) -> Self {
        Self { row: thread / Self::ACROSS, unit: thread % Self::ACROSS }
    }

    /// Starts copying `rows` rows, a constant: `source(row)` is a row's address and whether the row
    /// exists. Missing rows, and columns from `width` on, become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start<T: Element>(
        self,
        tile: Swizzled<T, UNITS>,
        rows: u32,
        width: u32,
        source: impl Fn(u32) -> (Global<T>, bool),
    ) {
        for first in (0..rows).step_by(Self::DOWN as usize) {
            let row = self.row + first;
            if first + Self::DOWN <= rows || row < rows {
                let (from, valid) = source(row);
                self.row(tile, row, from, valid, width);
            }
        }
    }

    /// Starts copying `rows` rows, a constant, from row `keys.start` of `source` on, which lie
    /// `stride` elements apart. Rows from `keys.end` on, and columns from `width` on, become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start_rows<T: Element>(
        self,
        tile: Swizzled<T, UNITS>,
        rows: u32,
        width: u32,
        (source, stride): (Global<T>, u64),
        keys: Range<u32>,
    ) {
        // The address is a CTA-uniform base plus a per-thread part, so that the base takes uniform
        // registers.
        let row = keys.start + self.row;
        let mine = source.offset((u64::from(row) * stride) as usize);
        self.start(tile, rows, width, |r| {
            let further = r - self.row;
            let from = mine.offset((u64::from(further) * stride) as usize);
            (from, row + further < keys.end)
        });
    }

    /// Starts copying this thread's units of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row<T: Element>(
        self,
        tile: Swizzled<T, UNITS>,
        row: u32,
        from: Global<T>,
        valid: bool,
        width: u32,
    ) {
        let place = tile.place(row, self.unit);
        for further in (0..UNITS as u32).step_by(Self::ACROSS as usize) {
            let unit = self.unit + further;
            if further + Self::ACROSS <= UNITS as u32 || unit < UNITS as u32 {
                // Units are permuted only within groups of `ACROSS`; chunks lie apart.
                let place = if tile.chunk == 0 {
                    place.offset(further * T::PER_VEC).address()
                } else {
                    tile.place(row, unit).address()
                };
                let valid = valid && unit * T::PER_VEC < width;
                cp_async_16(place, from, (unit * T::PER_VEC) as usize, valid);
            }
        }
    }
}

/// A lane's share in copying rows that are contiguous in global memory: units `lane`, `lane + 32`,
/// … of the tile. The pattern of destinations repeats every `PERIOD` units of a lane, some rows
/// below.
#[derive(Clone, Copy, Default)]
pub struct WarpCopy<const D8: usize> {
    /// Byte offsets in the tile; the first `PERIOD` are in use.
    places: [u32; 8],
    /// Bytes from a destination to the one `PERIOD` units later.
    further: u32,
}

impl<const D8: usize> WarpCopy<D8> {
    /// Passes of a warp over a row that is wider than a warp copies at once.
    const OF_ROW: usize = D8.div_ceil(32);
    const PERIOD: usize = match D8 {
        64.. => 8,
        _ if D8 % 4 == 0 => D8 / 4,
        _ => D8 / 2,
    };

    /// The share of `lane`, the calling lane, for tiles like this one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of<T: Pod>(lane: u32, tile: Swizzled<T, D8>) -> Self {
        let place = |i| {
            let unit = lane + (32 * Self::OF_ROW * i) as u32;
            let place = tile.number(unit / D8 as u32, unit % D8 as u32);
            if i < Self::PERIOD { 16 * place } else { 0 }
        };
        let rows = (Self::PERIOD * Self::OF_ROW * 32 / D8) as u32;
        Self { places: core::array::from_fn(place), further: rows * tile.pitch() * 16 }
    }

    /// Starts copying `rows` rows, a constant, from `source` on; rows from `valid` on become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start<T: Pod>(&self, tile: Swizzled<T, D8>, rows: u32, source: Global<T>, valid: u32) {
        let per_unit = Swizzled::<T, D8>::PER_UNIT;
        self.copy(tile, rows, source, valid, |pass| {
            (lane() * per_unit) as usize + (32 * per_unit) as usize * pass
        });
    }
}

impl<const D8: usize> WarpCopy<D8> {
    /// [`start`](Self::start) for rows that are `stride` elements apart in global memory. Only rows
    /// of a power of two of units may be; others must be side by side.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start_apart<T: Pod>(
        &self,
        tile: Swizzled<T, D8>,
        rows: u32,
        source: Global<T>,
        stride: u32,
        valid: u32,
    ) {
        if !D8.is_power_of_two() {
            return self.start(tile, rows, source, valid);
        }
        let per_unit = Swizzled::<T, D8>::PER_UNIT;
        let at_once = 32 * Self::OF_ROW / D8;
        let (row, unit) = (lane() / D8 as u32, lane() % D8 as u32);
        let first = row as usize * stride as usize + (unit * per_unit) as usize;
        self.copy(tile, rows, source, valid, |pass| {
            let part = (32 * per_unit) as usize * (pass % Self::OF_ROW);
            first + pass / Self::OF_ROW * at_once * stride as usize + part
        });
    }

    /// Starts copying `rows` rows; a lane's unit of pass `pass` begins with element `element(pass)`
    /// of `source`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn copy<T: Pod>(
        &self,
        tile: Swizzled<T, D8>,
        rows: u32,
        source: Global<T>,
        valid: u32,
        element: impl Fn(usize) -> usize,
    ) {
        let units = (valid.min(rows) * D8 as u32).saturating_sub(lane());
        let tile = tile.start.address();
        for pass in 0..rows as usize * D8 / 32 {
            let (turn, part) = (pass / Self::OF_ROW, (pass % Self::OF_ROW) as u32);
            // Only the lowest bits of a unit's number are swizzled.
            let further = (turn / Self::PERIOD) as u32 * self.further + 16 * 32 * part;
            let place = tile + self.places[turn % Self::PERIOD] + further;
            cp_async_16(place, source, element(pass), units > 32 * pass as u32);
        }
    }
}

/// A lane's share in reading 16 rows of two units by `ldmatrix`: its row, and its unit of each
/// pair. The pattern repeats after the pairs of one swizzle group.
#[derive(Clone, Copy)]
pub struct WarpRead<const D8: usize> {
    /// Byte offsets in the tile; the first `PERIOD` are in use.
    places: [u32; 4],
}

impl<const D8: usize> WarpRead<D8> {
    const PERIOD: usize = Swizzled::<f16, D8>::GROUP as usize / 2;

    /// The calling lane's share.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_this_lane() -> Self {
        Self::of(lane())
    }

    /// The share of `lane`, the calling lane, with the four 8×8 matrices in the order upper left,
    /// upper right, lower left, lower right. For keys these are two B operands one after the other.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(lane: u32) -> Self {
        // Not written as a call of `at`: that would reorder the decode kernels' instructions, which
        // are measured as they are.
        let (row, unit) = (lane / 16 * 8 + lane % 8, lane / 8 % 2);
        let place = |pair| 16 * Swizzled::<f16, D8>::index(row, 2 * pair as u32 + unit);
        let places = core::array::from_fn(|pair| if pair < Self::PERIOD { place(pair) } else { 0 });
        Self { places }
    }

    /// [`of`](Self::of) in the order upper left, lower left, upper right, lower right: an A operand
    /// or, for values, transposed, two B operands. Each operand then lies in adjacent registers;
    /// the other order would cost moves.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn by_columns(lane: u32) -> Self {
        Self::at(lane % 16, lane / 16)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn at(row: u32, unit: u32) -> Self {
        let place = |pair| 16 * Swizzled::<f16, D8>::index(row, 2 * pair as u32 + unit);
        let places = core::array::from_fn(|pair| if pair < Self::PERIOD { place(pair) } else { 0 });
        Self { places }
    }

    /// The lane's `ldmatrix` address for rows `16 block ..` and units `2 pair ..`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn address<T: Pod>(&self, tile: Swizzled<T, D8>, block: usize, pair: usize) -> u32 {
        let further = (pair / Self::PERIOD * Self::PERIOD * 32) as u32;
        let block = swizzled_bytes(16 * block as u32, D8);
        tile.start.address() + self.places[pair % Self::PERIOD] + further + block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Banks, in groups of four, of the same unit of eight rows from `row` on.
    fn banks<const D8: usize>(row: u32, unit: u32) -> Vec<u32> {
        (row..row + 8).map(|r| Swizzled::<f16, D8>::index(r, unit) % 8).collect()
    }

    fn check<const D8: usize>() {
        for row in (0..64).step_by(8) {
            for unit in 0..D8 as u32 {
                let mut banks = banks::<D8>(row, unit);
                banks.sort_unstable();
                assert_eq!(
                    banks,
                    (0..8).collect::<Vec<_>>(),
                    "{D8} units, rows from {row}, unit {unit}"
                );
            }
        }
    }

    #[test]
    fn eight_rows_are_in_eight_groups_of_banks() {
        check::<2>();
        check::<4>();
        check::<8>();
        check::<10>();
        check::<12>();
        check::<16>();
        check::<20>();
        check::<24>();
        check::<28>();
        check::<32>();
    }
}
