//! Which cache rows the new tokens of a call are written to, and whether each is written once.

use crate::problem::Pages;
use gqa_tensor::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// Where a call's rows lie in the cache.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    pub pages: Pages,
    pub block_table: &'a [i32],
    pub slot_mapping: Option<&'a [i32]>,
}

impl Places<'_> {
    /// What says where new rows go.
    fn argument(self) -> &'static str {
        if self.slot_mapping.is_some() { "slot_mapping" } else { "block_table" }
    }

    /// The cache row, counted through all blocks, of a position, by `block_table`.
    fn row(self, at: Position) -> Option<usize> {
        let size = self.pages.block_size;
        let first = self.first_row(at.sequence, at.position / size)?;
        Some(first + at.position % size)
    }

    /// The first row of a sequence's block; `None` outside of the cache.
    fn first_row(self, sequence: usize, block: usize) -> Option<usize> {
        let columns = self.pages.columns();
        let row = &self.block_table[sequence * columns..][..columns];
        Some(self.pages.block(row, block)? * self.pages.block_size)
    }

    /// The cache row of new token `token` of the call; `None` for slot -1 and for blocks outside of
    /// the cache.
    fn written(self, token: usize, at: Position) -> Option<usize> {
        match self.slot_mapping {
            Some(slots) => usize::try_from(slots[token]).ok(),
            None => self.row(at),
        }
    }
}

/// A token of a batch entry.
#[derive(Clone, Copy, PartialEq)]
struct Position {
    sequence: usize,
    position: usize,
}

/// The token that each written row takes.
pub(super) struct Written<'a> {
    places: Places<'a>,
    tokens: BTreeMap<usize, Position>,
}

impl<'a> Written<'a> {
    /// Collects the written rows. Errs where two tokens would be written to one row.
    pub(super) fn of(places: Places<'a>, sequences: &[[usize; 2]]) -> Result<Self> {
        let mut tokens = BTreeMap::new();
        let positions = sequences.iter().enumerate().flat_map(|(sequence, &[past, new])| {
            (past..past + new).map(move |position| Position { sequence, position })
        });
        for (token, at) in positions.enumerate() {
            let Some(row) = places.written(token, at) else { continue };
            if let Some(other) = tokens.insert(row, at) {
                return Err(shared(places, row, other, at));
            }
        }
        Ok(Self { places, tokens })
    }

    /// Errs where a row that a sequence reads, at one of these positions, is written for another
    /// token.
    pub(super) fn check_reader(&self, sequence: usize, read: Range<usize>) -> Result<()> {
        let size = self.places.pages.block_size;
        for block in read.start / size..read.end.div_ceil(size) {
            let Some(first) = self.places.first_row(sequence, block) else { continue };
            for (&row, &writer) in self.tokens.range(first..first + size) {
                let at = Position { sequence, position: block * size + row - first };
                if read.contains(&at.position) && at != writer {
                    return Err(shared(self.places, row, writer, at));
                }
            }
        }
        Ok(())
    }
}

/// One row for two tokens.
fn shared(places: Places<'_>, row: usize, writer: Position, other: Position) -> Error {
    let [writer, other] =
        [writer, other].map(|at| format!("token {} of batch entry {}", at.position, at.sequence));
    let got = format!("row {row} of the cache for new {writer} and for {other}");
    Error::invalid(places.argument(), got, "a cache row of its own for each new token")
}
