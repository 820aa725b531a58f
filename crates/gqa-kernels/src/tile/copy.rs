//! Tiles of 16-bit elements in shared memory, and the way from and to tensors, 16 bytes at a time.
//!
//! Eight consecutive rows of a tile start in eight different groups of four banks, because the
//! pitch is an odd number of 16-byte units for every head size that is a multiple of 16. So
//! `ldmatrix`, which reads 16 bytes of each of eight rows at once, has no bank conflict, and
//! addresses stay linear: no swizzle.

use crate::num::MmaElement;
use crate::simt::{Global, Shared, cp_async_16, cp_async_wait};

/// Elements in 16 bytes.
pub const UNIT: u32 = 8;

/// Rows of `D8` units each, in shared memory.
pub struct Tile<T, const D8: usize> {
    start: Shared<T>,
}

impl<T, const D8: usize> Clone for Tile<T, D8> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const D8: usize> Copy for Tile<T, D8> {}

/// Bytes of a tile of 16-bit elements.
pub const fn tile_bytes(rows: u32, d8: usize) -> u32 {
    rows * (d8 as u32 + 1) * 16
}

impl<T: MmaElement, const D8: usize> Tile<T, D8> {
    /// Elements from one row to the next.
    const PITCH: u32 = (D8 as u32 + 1) * UNIT;

    /// The tile that starts `bytes` bytes into the block's shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(bytes: u32) -> Self {
        Self { start: Shared::at(bytes) }
    }

    /// What starts at element `column` of `row`, seen as a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn from(self, row: u32, column: u32) -> Self {
        Self { start: self.place(row, column) }
    }

    /// Element `column` of `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn place(self, row: u32, column: u32) -> Shared<T> {
        self.start.offset(row * Self::PITCH + column)
    }

    /// The 16 bytes behind `row`, which belong to no column.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn padding(self, row: u32) -> Shared<T> {
        self.place(row, D8 as u32 * UNIT)
    }
}

/// Eight rounded values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn to_unit<T: MmaElement>(x: [f32; 8]) -> [u32; 4] {
    [T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])]
}

/// How a team of `TEAM` threads, a block or a warp, shares the moving of rows of `D8` units: eight
/// threads side by side, which read whole cache lines and write all banks once, or four where of
/// eight more than an eighth would be idle.
#[derive(Clone, Copy)]
pub struct Team<const D8: usize, const TEAM: u32> {
    /// This thread's row in the first pass.
    row: u32,
    /// Element of the row at which this thread's first unit starts.
    column: u32,
}

impl<const D8: usize, const TEAM: u32> Team<D8, TEAM> {
    /// Threads on a row.
    const ACROSS: u32 = if D8.next_multiple_of(8) * 7 <= D8 * 8 { 8 } else { 4 };
    /// Rows that the team moves at once.
    const DOWN: u32 = TEAM / Self::ACROSS;

    /// The part of `thread` of the team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(thread: u32) -> Self {
        Self { row: thread / Self::ACROSS, column: thread % Self::ACROSS * UNIT }
    }

    /// Calls `unit(row, column)` for each unit of `rows` rows, a compile-time constant, that this
    /// thread moves.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn each(self, rows: u32, mut unit: impl FnMut(u32, u32)) {
        for pass in 0..rows.div_ceil(Self::DOWN) {
            let row = self.row + pass * Self::DOWN;
            if rows % Self::DOWN == 0 || row < rows {
                for first in (0..D8 as u32).step_by(Self::ACROSS as usize) {
                    let column = self.column + first * UNIT;
                    if first + Self::ACROSS <= D8 as u32 || column < D8 as u32 * UNIT {
                        unit(row, column);
                    }
                }
            }
        }
    }

    /// Starts copying rows `begin..begin + rows` of `source`, which lie `stride` elements apart and
    /// are `width` long, into a tile. Rows from `end` on, and columns from `width` on, become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn copy<T: MmaElement>(
        self,
        tile: Tile<T, D8>,
        rows: u32,
        source: Global<T>,
        stride: u64,
        begin: u32,
        end: u32,
        width: u32,
    ) {
        // What is common to the team stays apart from what is the thread's own: it then takes
        // uniform registers.
        let first = source.offset((u64::from(begin + self.row) * stride) as usize);
        self.each(rows, |row, column| {
            let from = first.offset((u64::from(row - self.row) * stride) as usize);
            let valid = begin + row < end && column < width;
            cp_async_16(tile.place(row, column).address(), from, column as usize, valid);
        });
    }

    /// Starts copying `rows` rows that lie anywhere: `source(row)` is the element at which one
    /// starts, or `None` for a row of zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn gather<T: MmaElement>(
        self,
        tile: Tile<T, D8>,
        rows: u32,
        tensor: Global<T>,
        width: u32,
        source: impl Fn(u32) -> Option<usize>,
    ) {
        self.each(rows, |row, column| {
            let start = source(row);
            let valid = start.is_some() && column < width;
            cp_async_16(
                tile.place(row, column).address(),
                tensor,
                start.unwrap_or(0) + column as usize,
                valid,
            );
        });
    }

    /// Writes `rows` rows of a tile to where `target(row)` says that they start, `None` for a row
    /// to leave out.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn scatter<T: MmaElement>(
        self,
        tile: Tile<T, D8>,
        rows: u32,
        tensor: Global<T>,
        width: u32,
        target: impl Fn(u32) -> Option<usize>,
    ) {
        self.each(rows, |row, column| {
            if column < width
                && let Some(start) = target(row)
            {
                tensor.store_vec(start + column as usize, tile.place(row, column).load_vec(0));
            }
        });
    }
}

/// Waits until at most the `newest` newest groups of copies, a constant of 8 at most, are
/// unfinished.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn wait_for_all_but(newest: u32) {
    match newest {
        1 => cp_async_wait::<1>(),
        2 => cp_async_wait::<2>(),
        3 => cp_async_wait::<3>(),
        4 => cp_async_wait::<4>(),
        5 => cp_async_wait::<5>(),
        6 => cp_async_wait::<6>(),
        7 => cp_async_wait::<7>(),
        _ => cp_async_wait::<8>(),
    }
}
