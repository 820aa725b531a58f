//! The rows of this step: queries, and the keys and values that are not in the cache yet.
//!
//! They are copied to shared memory and rotated in place. Their copies are issued before those of
//! the cache: loads queue behind the many that an SM has in flight there.

use super::cached::{Block, Cached, ScaleStaging, Tiles};
use super::layout::{Heads, Layout};
use crate::params::{DecodeParams, Strides};
use crate::prologue::rope::Rope;
use crate::simt::{Global, Rolled, Shared, cp_async_16, thread_idx};
use crate::tile::copy::UNIT;
use crate::tile::rows::Rows;
use crate::tile::swizzle::Swizzled;

/// The rows of this step in global memory, and the cache that keys and values are appended to.
pub(super) struct NewTokens<C: Cached> {
    /// Queries, not rotated.
    pub q: Global<C::Element>,
    /// Keys, not rotated.
    pub k: Global<C::Element>,
    /// Values.
    pub v: Global<C::Element>,
    /// The key cache.
    pub present_k: Global<C::Cell>,
    /// The value cache.
    pub present_v: Global<C::Cell>,
    /// Rotary embedding of queries and keys.
    pub rope: Rope<C::Element>,
    /// Format and scales of the cache.
    pub coding: C::Coding,
}

/// Two vectors that are rotated together, with their angles.
struct Pair<T> {
    places: [Shared<T>; 2],
    angles: [[u32; 4]; 2],
}

/// The pairs that a thread rotates. The angles of the first one are loaded ahead.
pub(super) struct Rotations<T> {
    first: Option<Pair<T>>,
    /// Number of new keys to rotate.
    keys: u32,
}

impl<C: Cached> NewTokens<C> {
    /// Starts copying the queries into their tile of `height` rows; rows past the last become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn copy_queries<H: Heads, const D8: usize, const UNITS: usize>(
        &self,
        p: &DecodeParams,
        rows: &Rows,
        tiles: &Tiles<C, D8, UNITS>,
        height: u32,
        threads: u32,
    ) {
        for unit in Rolled(thread_idx()..height * D8 as u32, threads) {
            let (r, unit) = (unit / D8 as u32, unit % D8 as u32);
            let row = rows.row(r);
            let from = p.attention.q.at(rows.batch, row.head, rows.start + row.s);
            let from = from + (unit * UNIT) as usize;
            let exists = r < rows.count();
            let exists = exists && !H::is_padding(&p.attention, unit * UNIT);
            let from = if exists { from } else { 0 };
            cp_async_16(tiles.queries.place(r, unit).address(), self.q, from, exists);
        }
    }

    /// Starts copying the new keys and values into their tiles of `height` rows; rows past the last
    /// token become zero.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn copy_new<H: Heads, const D8: usize, const UNITS: usize>(
        &self,
        p: &DecodeParams,
        rows: &Rows,
        tiles: &Tiles<C, D8, UNITS>,
        height: u32,
        threads: u32,
    ) {
        let of_head = |rows_of: Strides| rows_of.at(rows.batch, rows.kv_head, rows.start);
        let (keys, values) = (of_head(p.new_k), of_head(p.new_v));
        for unit in Rolled(thread_idx()..height * D8 as u32, threads) {
            let (s, unit) = (unit / D8 as u32, unit % D8 as u32);
            let exists = s < new_rows(p, rows);
            let exists = exists && !H::is_padding(&p.attention, unit * UNIT);
            let row = if exists { u64::from(s) } else { 0 };
            let from = |head: usize, rows_of: Strides| {
                let start = head + (row * rows_of.row) as usize;
                if H::PAD && !exists { start } else { start + (unit * UNIT) as usize }
            };
            let (key, value) = (tiles.keys.place(s, unit), tiles.values.place(s, unit));
            cp_async_16(key.address(), self.k, from(keys, p.new_k), exists);
            cp_async_16(value.address(), self.v, from(values, p.new_v), exists);
        }
    }

    /// The thread's pairs of the queries and, in the rank that has them, of the new keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rotations<const D8: usize, const UNITS: usize>(
        &self,
        p: &DecodeParams,
        rows: &Rows,
        tiles: &Tiles<C, D8, UNITS>,
        has_new_tokens: bool,
    ) -> Rotations<C::Element> {
        let keys = if has_new_tokens { new_rows(p, rows) } else { 0 };
        Rotations { first: self.pair(rows, tiles, keys, thread_idx()), keys }
    }

    /// Rotates them in place.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rotate<const D8: usize, const UNITS: usize>(
        &self,
        rows: &Rows,
        tiles: &Tiles<C, D8, UNITS>,
        rotations: Rotations<C::Element>,
        threads: u32,
    ) {
        let (mut next, mut i) = (rotations.first, thread_idx());
        while let Some(Pair { places, angles }) = next {
            let rotated = self.rope.rotate(places.map(|place| place.load_vec(0)), angles);
            places[0].store_vec(0, rotated[0]);
            places[1].store_vec(0, rotated[1]);
            i += threads;
            next = self.pair(rows, tiles, rotations.keys, i);
        }
    }

    /// Pair `i` of all queries and of `keys` new keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pair<const D8: usize, const UNITS: usize>(
        &self,
        rows: &Rows,
        tiles: &Tiles<C, D8, UNITS>,
        keys: u32,
        i: u32,
    ) -> Option<Pair<C::Element>> {
        let half = self.rope.params.dim / (2 * UNIT);
        if i >= (rows.count() + keys) * half {
            return None;
        }
        let (row, unit) = (i / half, i % half);
        let (tile, r, s) = match row.checked_sub(rows.count()) {
            None => (tiles.queries, row, rows.row(row).s),
            Some(s) => (tiles.keys, s, s),
        };
        let position = self.rope.position(rows.batch, s, rows.seqlen.past);
        Some(Pair {
            places: [tile.place(r, unit), tile.place(r, unit + half)],
            angles: self.rope.angles(unit * UNIT, position),
        })
    }

    /// Appends the new keys and values, except for tokens without a row in the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn append<H: Heads, const D8: usize, const UNITS: usize>(
        &self,
        p: &DecodeParams,
        rows: &Rows,
        tiles: &Tiles<C, D8, UNITS>,
        layout: Layout,
        staging: ScaleStaging,
        block: Block,
    ) {
        let (a, past, threads) = (&p.attention, rows.seqlen.past, block.threads);
        if C::by_row(self.coding) {
            let (first, step) = layout.scales(a, rows);
            for s in Rolled(thread_idx()..new_rows(p, rows), threads) {
                let place = layout.place(past + s);
                if !layout.is_somewhere(place) {
                    continue;
                }
                let number = first + place as usize * step as usize;
                let of_row = [0, block.keys].map(|tile| staging.rows.load(tile + s));
                C::store_row_scales(self.coding, number, of_row);
            }
        }
        for unit in Rolled(thread_idx()..new_rows(p, rows) * UNITS as u32, threads) {
            let (s, unit) = (unit / UNITS as u32, unit % UNITS as u32);
            if H::is_padding(a, unit * (UNIT * D8 as u32 / UNITS as u32)) {
                continue;
            }
            let place = layout.place(past + s);
            if !layout.is_somewhere(place) {
                continue;
            }
            let to = |cache: Strides| {
                layout.element(cache, rows, place)
                    + (unit * Swizzled::<C::Cell, UNITS>::PER_UNIT) as usize
            };
            self.present_k.store_vec(to(a.k), tiles.cached_keys.place(s, unit).load_vec(0));
            self.present_v.store_vec(to(a.v), tiles.cached_values.place(s, unit).load_vec(0));
        }
    }
}

/// Number of new rows that are tokens and not padding.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn new_rows(p: &DecodeParams, rows: &Rows) -> u32 {
    p.new_len.min(rows.seqlen.new_rows())
}
