//! The rows of this step: queries, and keys and values that the cache does not hold yet.

use super::Place;
use crate::num::MmaElement;
use crate::params::DecodeParams;
use crate::prologue::rope::Rope;
use crate::simt::{Global, thread_idx};
use crate::tile::copy::UNIT;
use crate::tile::rows::Rows;
use crate::tile::swizzle::Swizzled;

/// Where the rows of this step come from, and where keys and values go besides shared memory.
pub(super) struct Fresh<T> {
    /// Queries, not rotated.
    pub q: Global<T>,
    /// Keys, not rotated.
    pub k: Global<T>,
    /// Values.
    pub v: Global<T>,
    /// The key cache.
    pub present_k: Global<T>,
    /// The value cache.
    pub present_v: Global<T>,
    /// For queries and keys.
    pub rope: Rope<T>,
}

/// Tiles in shared memory.
pub(super) struct Tiles<T, const D8: usize> {
    pub queries: Swizzled<T, D8>,
    pub keys: Swizzled<T, D8>,
    pub values: Swizzled<T, D8>,
}

impl<T: MmaElement> Fresh<T> {
    /// Fills the tile of queries, of `height` rows, and, where the rank has the new rows, those of keys and values, and appends them.
    /// A thread moves 16 bytes at a time, and all loads of a block are under way together.
    #[inline(always)]
    pub fn load<const D8: usize>(
        &self,
        p: &DecodeParams,
        rows: &Rows,
        place: Place,
        tiles: &Tiles<T, D8>,
        height: u32,
        has_fresh: bool,
        threads: u32,
    ) {
        let queries = height * D8 as u32;
        let new = if has_fresh { p.new_len * D8 as u32 } else { 0 };
        for unit in (thread_idx()..queries + 2 * new).step_by(threads as usize) {
            let of = |first: u32| ((unit - first) / D8 as u32, (unit - first) % D8 as u32);
            if unit < queries {
                let (r, unit) = of(0);
                tiles.queries.place(r, unit).store_vec(0, self.query(p, rows, r, unit * UNIT));
            } else if unit < queries + new {
                let (s, unit) = of(queries);
                tiles.keys.place(s, unit).store_vec(0, self.key(p, rows, place, s, unit * UNIT));
            } else {
                let (s, unit) = of(queries + new);
                tiles
                    .values
                    .place(s, unit)
                    .store_vec(0, self.value(p, rows, place, s, unit * UNIT));
            }
        }
    }

    /// Elements `e ..` of the row tile's row `r`, rotated; zeros where there is no such row.
    #[inline(always)]
    fn query(&self, p: &DecodeParams, rows: &Rows, r: u32, e: u32) -> [u32; 4] {
        if r >= rows.count() {
            return [0; 4];
        }
        let row = rows.row(r);
        let position = self.rope.position(rows.batch, row.s, rows.seqlen.past);
        self.rope.vector(self.q, p.attention.q.at(rows.batch, row.head, row.s), e, position)
    }

    /// Elements `e ..` of the new key `s`, rotated, and appended; zeros where that is no token.
    #[inline(always)]
    fn key(&self, p: &DecodeParams, rows: &Rows, place: Place, s: u32, e: u32) -> [u32; 4] {
        if !rows.seqlen.is_token(s) {
            return [0; 4];
        }
        let (a, past) = (&p.attention, rows.seqlen.past);
        let position = self.rope.position(rows.batch, s, past);
        let key = self.rope.vector(self.k, p.new_k.at(rows.batch, rows.kv_head, s), e, position);
        if place.is_first_row_tile {
            self.present_k.store_vec(a.k.at(rows.batch, rows.kv_head, past + s) + e as usize, key);
        }
        key
    }

    /// Elements `e ..` of the new value `s`, appended; zeros where that is no token.
    #[inline(always)]
    fn value(&self, p: &DecodeParams, rows: &Rows, place: Place, s: u32, e: u32) -> [u32; 4] {
        if !rows.seqlen.is_token(s) {
            return [0; 4];
        }
        let (a, past) = (&p.attention, rows.seqlen.past);
        let value = self.v.load_vec(p.new_v.at(rows.batch, rows.kv_head, s) + e as usize);
        if place.is_first_row_tile {
            self.present_v
                .store_vec(a.v.at(rows.batch, rows.kv_head, past + s) + e as usize, value);
        }
        value
    }

    /// Makes what is behind the new rows, up to `height` rows, zero.
    #[inline(always)]
    pub fn clear<const D8: usize>(
        p: &DecodeParams,
        tiles: &Tiles<T, D8>,
        height: u32,
        threads: u32,
    ) {
        let behind = p.new_len * D8 as u32 + thread_idx()..height * D8 as u32;
        for unit in behind.step_by(threads as usize) {
            let (s, unit) = (unit / D8 as u32, unit % D8 as u32);
            tiles.keys.place(s, unit).store_vec(0, [0; 4]);
            tiles.values.place(s, unit).store_vec(0, [0; 4]);
        }
    }
}
