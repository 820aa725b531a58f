//! Tiles of 16-bit elements in shared memory, and the way from and to tensors, 16 bytes at a time.
//!
//! Eight consecutive rows of a tile start in eight different groups of four banks, because the pitch is an odd number of 16-byte
//! units for every head size that is a multiple of 16. So `ldmatrix`, which reads 16 bytes of each of eight rows at once, has no
//! bank conflict, and addresses stay linear: no swizzle.

use crate::num::MmaElement;
use crate::simt::{Global, Shared, cp_async_16};

/// Elements in 16 bytes.
pub const UNIT: u32 = 8;

/// Rows of `D8` units each, in shared memory.
pub struct Tile<T, const D8: usize> {
    start: Shared<T>,
}

impl<T, const D8: usize> Clone for Tile<T, D8> {
    #[inline(always)]
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
    #[inline(always)]
    pub fn at(bytes: u32) -> Self {
        Self { start: Shared::at(bytes) }
    }

    /// The tile that starts at row `row` of this one.
    #[inline(always)]
    pub fn from_row(self, row: u32) -> Self {
        Self { start: self.place(row, 0) }
    }

    /// Element `column` of `row`.
    #[inline(always)]
    pub fn place(self, row: u32, column: u32) -> Shared<T> {
        self.start.offset(row * Self::PITCH + column)
    }
}

/// How a team of `TEAM` threads, a block or a warp, shares the moving of rows of `D8` units: `ACROSS` threads side by side on a
/// row, as many rows at once as that allows.
#[derive(Clone, Copy)]
pub struct Team<const D8: usize, const TEAM: u32> {
    /// This thread's row in the first pass.
    row: u32,
    /// Element of the row at which this thread's first unit starts.
    column: u32,
}

impl<const D8: usize, const TEAM: u32> Team<D8, TEAM> {
    /// Threads on a row: the largest power of two, 8 at most (128 bytes), that divides its units.
    const ACROSS: u32 = if D8 % 8 == 0 { 8 } else { 1 << D8.trailing_zeros() };
    /// Rows that the team moves at once.
    const DOWN: u32 = TEAM / Self::ACROSS;
    /// Units of a row that one thread moves.
    const UNITS: u32 = D8 as u32 / Self::ACROSS;

    /// The part of `thread` of the team.
    #[inline(always)]
    pub fn new(thread: u32) -> Self {
        Self { row: thread / Self::ACROSS, column: thread % Self::ACROSS * UNIT }
    }

    /// Calls `unit(row, column)` for each unit of `rows` rows, a compile-time constant, that this thread moves.
    #[inline(always)]
    fn each(self, rows: u32, mut unit: impl FnMut(u32, u32)) {
        for pass in 0..rows.div_ceil(Self::DOWN) {
            let row = self.row + pass * Self::DOWN;
            if rows % Self::DOWN == 0 || row < rows {
                for i in 0..Self::UNITS {
                    unit(row, self.column + i * Self::ACROSS * UNIT);
                }
            }
        }
    }

    /// Where this thread's first unit starts in rows that are `stride` elements apart.
    #[inline(always)]
    pub fn first<T: MmaElement>(self, rows: Global<T>, stride: u64) -> Global<T> {
        rows.offset((self.row as u64 * stride) as usize + self.column as usize)
    }

    /// Starts copying `rows` consecutive rows into a tile. `first` is the team's [`first`](Self::first) of those rows, the tensor
    /// holds `rows_left` of them, and `width` elements of each. The rest of the tile becomes zero.
    #[inline(always)]
    pub fn copy<T: MmaElement>(
        self,
        tile: Tile<T, D8>,
        rows: u32,
        first: Global<T>,
        stride: u64,
        rows_left: u32,
        width: u32,
    ) {
        self.each(rows, |row, column| {
            let source = first.offset(((row - self.row) as u64 * stride) as usize);
            let valid = row < rows_left && column < width;
            cp_async_16(tile.place(row, column).address(), source, (column - self.column) as usize, valid);
        });
    }

    /// Starts copying `rows` rows that lie anywhere: `source(row)` is the element at which one starts, or `None` for a row of
    /// zeros.
    #[inline(always)]
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
            cp_async_16(tile.place(row, column).address(), tensor, start.unwrap_or(0) + column as usize, valid);
        });
    }

    /// Writes `rows` rows of a tile to where `target(row)` says that they start, `None` for a row to leave out.
    #[inline(always)]
    pub fn scatter<T: MmaElement>(
        self,
        tile: Tile<T, D8>,
        rows: u32,
        tensor: Global<T>,
        width: u32,
        target: impl Fn(u32) -> Option<usize>,
    ) {
        self.each(rows, |row, column| {
            if column < width {
                if let Some(start) = target(row) {
                    tensor.store_vec(start + column as usize, tile.place(row, column).load_vec(0));
                }
            }
        });
    }
}
