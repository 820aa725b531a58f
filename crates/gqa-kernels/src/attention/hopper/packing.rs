//! Which token and query head each row of a row tile is. Over a paged KV cache the query heads that
//! share a KV head can share row tiles, so that a few tokens fill one.

use super::shape::WARPGROUP_ROWS;
use crate::num::quotient;
use crate::simt::opaque;

/// The rows of a row tile. The case is a constant of each kernel, so that kernels of one head do
/// not pay for the other.
#[derive(Clone, Copy)]
pub(super) enum Packing {
    /// Rows are tokens of one query head.
    OneHead,
    /// Rows of a warpgroup are that number of heads of its first token, then of the next token, and
    /// so on, for as many whole tokens as fit. The remaining rows are empty.
    Heads(u32),
}

/// A row of a row tile, from the tile's first query head on.
#[derive(Clone, Copy)]
pub(super) struct PackedRow {
    /// Token of the sequence.
    pub(super) token: u32,
    pub(super) head: u32,
    pub(super) is_empty: bool,
}

impl Packing {
    /// Query heads of a row tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn heads(self) -> u32 {
        match self {
            Self::OneHead => 1,
            Self::Heads(heads) => heads,
        }
    }

    /// Tokens of a warpgroup.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn tokens(self) -> u32 {
        quotient(WARPGROUP_ROWS, self.heads())
    }

    /// Rows of a warpgroup that are not empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rows(self) -> u32 {
        self.tokens() * self.heads()
    }

    /// Row `row + below` of a tile that begins with token `first` of the sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn find(self, first: u32, row: u32, below: u32) -> PackedRow {
        match self {
            Self::OneHead => {
                let token = first.wrapping_add(row).wrapping_add(below);
                PackedRow { token, head: 0, is_empty: false }
            }
            Self::Heads(heads) => {
                // opaque(): otherwise quotients are hoisted out of the loop over work tiles and
                // spill.
                let row = opaque(row + below);
                let (warpgroup, row) = (row / WARPGROUP_ROWS, row % WARPGROUP_ROWS);
                let within = quotient(row, heads);
                PackedRow {
                    token: first.wrapping_add(warpgroup * self.tokens() + within),
                    head: row - within * heads,
                    is_empty: within >= self.tokens(),
                }
            }
        }
    }
}
