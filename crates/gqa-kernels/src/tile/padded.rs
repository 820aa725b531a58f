//! Padded tiles in shared memory, for `split_kv`, and their products.
//!
//! Eight consecutive rows of a tile start in eight different groups of four banks, because the
//! pitch is an odd number of 16-byte units for every head size that is a multiple of 16. So
//! `ldmatrix`, which reads 16 bytes of each of eight rows at once, has no bank conflicts, and
//! addresses stay linear. The cost: copies write most 128-byte lines of shared memory twice, which
//! [`swizzle`](super::swizzle) avoids.

use super::copy::UNIT;
use super::fragment::{Fragments, pack, zeros};
use crate::num::MmaElement;
use crate::simt::{Global, Shared, cp_async_16, lane, ldmatrix_x4, ldmatrix_x4_trans};

/// A tile in shared memory, with rows of `D8` 16-byte units.
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

    /// The tile at byte offset `bytes` in the CTA's shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(bytes: u32) -> Self {
        Self { start: Shared::at(bytes) }
    }

    /// The part of the tile that starts at element `column` of `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn from(self, row: u32, column: u32) -> Self {
        Self { start: self.place(row, column) }
    }

    /// Address of element `column` of `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn place(self, row: u32, column: u32) -> Shared<T> {
        self.start.offset(row * Self::PITCH + column)
    }
}

/// How `TEAM` threads, a CTA or a warp, share copying rows of `D8` units: eight threads per row,
/// which read whole cache lines and write all banks once, or four where more than an eighth of
/// eight would be idle.
#[derive(Clone, Copy)]
pub struct Team<const D8: usize, const TEAM: u32> {
    /// This thread's row in the first pass.
    row: u32,
    /// Element of the row at which this thread's first unit starts.
    column: u32,
}

impl<const D8: usize, const TEAM: u32> Team<D8, TEAM> {
    /// Threads per row.
    const ACROSS: u32 = if D8.next_multiple_of(8) * 7 <= D8 * 8 { 8 } else { 4 };
    /// Rows that the team copies at a time.
    const DOWN: u32 = TEAM / Self::ACROSS;

    /// The share of thread `thread` of the team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(thread: u32) -> Self {
        Self { row: thread / Self::ACROSS, column: thread % Self::ACROSS * UNIT }
    }

    /// Calls `unit(row, column)` for each unit that this thread copies, of `rows` rows, a
    /// compile-time constant.
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
        // The address is a team-uniform base plus a per-thread part, so that the base takes uniform
        // registers.
        let first = source.offset((u64::from(begin + self.row) * stride) as usize);
        self.each(rows, |row, column| {
            let from = first.offset((u64::from(row - self.row) * stride) as usize);
            let valid = begin + row < end && column < width;
            cp_async_16(tile.place(row, column).address(), from, column as usize, valid);
        });
    }

    /// Starts copying `rows` scattered rows: `source(row)` is the index of a row's first element,
    /// or `None` for a row of zeros.
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
}

/// `scores = queries · keysᵀ` over `N8` 8-key MMA tiles. `queries` starts at the warp's first row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn scores<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    queries: Tile<T, D8>,
    keys: Tile<T, D8>,
) -> Fragments<M, N8> {
    let (query, key) =
        (lanes_part(queries), keys.from(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * UNIT));
    let mut scores = zeros::<M, N8>();
    for depth in 0..D8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| {
            ldmatrix_x4(query.place(16 * m as u32, 16 * depth as u32).address())
        });
        for pair in 0..N8 / 2 {
            let b = ldmatrix_x4(key.place(16 * pair as u32, 16 * depth as u32).address());
            for m in 0..M {
                T::mma(&mut scores[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut scores[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
    scores
}

/// `out += weights · values` over `N8` 8-key MMA tiles.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn accumulate<T: MmaElement, const M: usize, const D8: usize, const N8: usize>(
    out: &mut Fragments<M, D8>,
    weights: &Fragments<M, N8>,
    values: Tile<T, D8>,
) {
    let value = lanes_part(values);
    for depth in 0..N8 / 2 {
        let a: [_; M] = core::array::from_fn(|m| pack::<T, N8>(&weights[m], depth));
        for pair in 0..D8 / 2 {
            let b = ldmatrix_x4_trans(value.place(16 * depth as u32, 16 * pair as u32).address());
            for m in 0..M {
                T::mma(&mut out[m][2 * pair], a[m], [b[0], b[1]]);
                T::mma(&mut out[m][2 * pair + 1], a[m], [b[2], b[3]]);
            }
        }
    }
}

/// A lane's `ldmatrix` address for the first 16×16 elements of a tile, whose four 8×8 matrices it
/// loads in the order upper left, lower left, upper right, lower right.
///
/// In this order they form an A operand. With keys as rows they are the B operands of keys 0..8
/// (first and third matrix) and 8..16. With values as rows, transposed, they are the B operands of
/// columns 0..8 (first and second matrix) and 8..16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lanes_part<T: MmaElement, const D8: usize>(tile: Tile<T, D8>) -> Tile<T, D8> {
    tile.from(lane() % 16, lane() / 16 * UNIT)
}
