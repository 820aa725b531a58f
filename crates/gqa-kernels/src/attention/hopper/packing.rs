//! Which token and query head each row of a row tile is. Over a paged KV cache the query heads that
//! share a KV head can share row tiles, so that a few tokens fill one.

use super::shape::WARPGROUP_ROWS;
use crate::num::quotient;

/// Rows of a warpgroup: the heads of its first token, then those of the next, as many whole tokens
/// as fit. Rows behind them are empty.
#[derive(Clone, Copy)]
pub(super) struct Packing {
    /// Query heads of a row tile.
    pub(super) heads: u32,
}

/// A row of a row tile, from the tile's first token and its first query head on.
#[derive(Clone, Copy)]
pub(super) struct PackedRow {
    pub(super) token: u32,
    pub(super) head: u32,
}

impl Packing {
    /// The rows of a tile are tokens of one query head.
    pub(super) const ONE_HEAD: Self = Self { heads: 1 };

    /// Tokens of a warpgroup.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tokens(self) -> u32 {
        quotient(WARPGROUP_ROWS, self.heads)
    }

    /// Rows of a warpgroup that are not empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rows(self) -> u32 {
        self.tokens() * self.heads
    }

    /// Row `row` of the tile, unless it is empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find(self, row: u32) -> Option<PackedRow> {
        let (warpgroup, row) = (row / WARPGROUP_ROWS, row % WARPGROUP_ROWS);
        let within = quotient(row, self.heads);
        let token = warpgroup * self.tokens() + within;
        (within < self.tokens()).then_some(PackedRow { token, head: row - within * self.heads })
    }

    /// The token of row `row` of the tile, of an empty row any token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn token(self, row: u32) -> u32 {
        row / WARPGROUP_ROWS * self.tokens() + quotient(row % WARPGROUP_ROWS, self.heads)
    }
}
