//! A cache of blocks, of which a table gives some to each sequence: (block, row, KV head, head size).
//!
//! Blocks have a power of two of rows, as many as a tile or more, and tiles begin at multiples of their height, so that a tile lies in one block. Where that is, is looked up
//! for each tile anew: the table is small, and what the second-level cache answers comes long before the keys do.

use super::cached::{Block, Cached, Desk};
use super::fresh::Tiles;
use crate::num::MmaElement;
use crate::params::{PagedDecodeParams, Strides};
use crate::simt::Global;
use crate::tile::columns::Columns;
use crate::tile::fragment::Fragments;
use crate::tile::rows::Rows;
use crate::tile::swizzle::{Swizzled, WarpCopy, WarpRead};
use core::marker::PhantomData;

/// Blocks of elements of type `T`.
pub struct Blocks<T>(PhantomData<T>);

impl<T> Clone for Blocks<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Blocks<T> {}

/// Whose the blocks are.
#[derive(Clone, Copy)]
pub struct Table {
    /// (batch, blocks of a sequence)
    entries: Global<i32>,
    /// Blocks of a sequence.
    per_sequence: u32,
    /// Logarithm of a block's rows.
    log_rows: u32,
    /// The cache's last block.
    last: u32,
}

impl Table {
    /// The table, with the numbers that say how it is read.
    #[inline(always)]
    pub(super) fn new(entries: Global<i32>, p: &PagedDecodeParams) -> Self {
        Self {
            entries,
            per_sequence: p.per_sequence,
            log_rows: p.log_block_size,
            last: p.blocks - 1,
        }
    }

    /// The row of the cache that has row `row` of the sequence; within the cache whatever the table says.
    #[inline(always)]
    fn place(self, row: u32) -> u32 {
        let block = self.entries.load((row >> self.log_rows) as usize) as u32;
        (block.min(self.last) << self.log_rows) + (row & ((1 << self.log_rows) - 1))
    }
}

impl<T: MmaElement> Cached for Blocks<T> {
    type Element = T;
    type Operand = T;
    type Cell = T;
    type Scales = Table;
    type Scale = ();
    type Places = (Table, u64);
    const GROUP: u32 = 1;
    const IN_BLOCKS: bool = true;

    #[inline(always)]
    fn places(table: Table, k: Strides, rows: &Rows) -> (Table, u64) {
        let first = (rows.batch * table.per_sequence) as usize;
        (Table { entries: table.entries.offset(first), ..table }, k.row)
    }

    #[inline(always)]
    fn element((table, stride): (Table, u64), k: Strides, rows: &Rows, row: u32) -> usize {
        (u64::from(table.place(row)) * stride) as usize + k.at(0, rows.kv_head, 0)
    }

    #[inline(always)]
    fn row<const UNITS: usize>(
        (table, stride): (Table, u64),
        source: Global<T>,
        row: u32,
    ) -> Global<T> {
        source.offset((u64::from(table.place(row)) * stride) as usize)
    }

    #[inline(always)]
    fn start<const UNITS: usize>(
        (_, stride): (Table, u64),
        lanes: &WarpCopy<UNITS>,
        tile: Swizzled<T, UNITS>,
        rows: u32,
        source: Global<T>,
        valid: u32,
    ) {
        lanes.start_apart(tile, rows, source, stride as u32, valid);
    }

    #[inline(always)]
    fn ask(_: Table, _: &crate::params::DecodeParams, _: u32, _: u32) {}

    #[inline(always)]
    fn keep((): (), _: Desk) {}

    #[inline(always)]
    fn encode<const D8: usize, const UNITS: usize>(
        _: &Tiles<Self, D8, UNITS>,
        _: Desk,
        _: u32,
        _: Block,
    ) {
    }

    #[inline(always)]
    fn prepare<const D8: usize, const UNITS: usize>(
        _: &Tiles<Self, D8, UNITS>,
        _: Desk,
        _: Block,
    ) -> f32 {
        1.0
    }

    #[inline(always)]
    fn scores<const M: usize, const UNITS: usize, const N8: usize>(
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
        keys: Swizzled<T, UNITS>,
        read: &WarpRead<UNITS>,
    ) -> Fragments<M, N8> {
        T::scores::<M, UNITS, N8>(queries, keys, read)
    }

    #[inline(always)]
    fn accumulate<
        const M: usize,
        const HALVES: usize,
        const D8: usize,
        const UNITS: usize,
        const N8: usize,
    >(
        out: &mut Columns<M, D8>,
        weights: &Fragments<M, N8>,
        values: Swizzled<T, UNITS>,
        read: &WarpRead<UNITS>,
    ) {
        T::accumulate::<M, HALVES, D8, UNITS, N8>(out, weights, values, read);
    }

    #[inline(always)]
    fn scale<const M: usize, const D8: usize>(_: &mut Columns<M, D8>, _: Desk) {}
}
