//! The producer warpgroup: one thread draws work, describes it and loads K and V, one loads Q, one warp clears what sees nothing. From a
//! cache of blocks two warps load K and V.

use super::output::{Destination, row_index};
use super::pages::Pages;
use super::ring::Ring;
use super::shape::{CHUNK, Tile, WARPGROUP_ROWS};
use super::work::{Draw, Place, Slot, Work, quotient};
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;

/// Starts copying a tile of `rows` rows: one box per chunk of columns.
#[inline(always)]
fn load_tile<S: Tile>(
    rows: u32,
    destination: u32,
    map: TensorMap,
    row: u32,
    head: u32,
    batch: u32,
    full: u32,
) {
    mbarrier_arrive_expect(full, rows * S::CHUNKS * 128);
    let mut chunk = 0;
    while chunk < S::CHUNKS {
        let at = [chunk * CHUNK, row, head, batch];
        tma_load(destination + chunk * rows * 128, map, at, full);
        chunk += 1;
    }
}

/// The ring of K and V tiles as its producer sees it.
struct KeyValueRing {
    base: u32,
    ring: Ring,
    pages: Option<Pages>,
    /// The V tile that comes after the next K tile.
    behind: Option<Part>,
}

/// Where a tile of K or V begins in its tensor, or this lane's box of it.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) row: u32,
    pub(super) head: u32,
    /// Batch entry, or block of the cache.
    pub(super) batch: u32,
}

impl KeyValueRing {
    #[inline(always)]
    fn new(base: u32, pages: Option<Pages>) -> Self {
        Self { base, ring: Ring::START, pages, behind: None }
    }

    /// Where tile number `tile` of a sequence with `total` keys is.
    #[inline(always)]
    fn find<S: Tile>(&self, tile: u32, head: u32, batch: u32, total: u32) -> Part {
        let part = Part { row: tile * S::N, head, batch };
        match self.pages {
            None => part,
            Some(pages) => pages.find_box::<S>(part, total),
        }
    }

    /// The next K tile, and the V tile before it.
    #[inline(always)]
    fn load_next<S: Tile>(&mut self, k: TensorMap, v: TensorMap, part: Part) {
        self.load::<S>(k, part);
        self.load_behind::<S>(v);
        self.behind = Some(part);
    }

    /// The V tile of the last K tile.
    #[inline(always)]
    fn load_behind<S: Tile>(&mut self, v: TensorMap) {
        if let Some(part) = self.behind {
            self.load::<S>(v, part);
        }
    }

    /// Waits until the stage is free, fills it and moves on.
    #[inline(always)]
    fn load<S: Tile>(&mut self, map: TensorMap, part: Part) {
        let barrier = self.base + self.ring.barrier();
        mbarrier_wait(barrier + S::KV_EMPTY, self.ring.parity ^ 1);
        let destination = self.base + S::KV + self.ring.stage * S::KV_BYTES;
        let full = barrier + S::KV_FULL;
        match self.pages {
            None => {
                load_tile::<S>(S::N, destination, map, part.row, part.head, part.batch, full);
            }
            Some(pages) => pages.load_tile::<S>(destination, map, part, full),
        }
        self.ring = self.ring.next(S::STAGES);
    }
}

/// One thread, or a warp where the cache consists of blocks: draws work and loads its keys and values. K runs one tile ahead of V, over the
/// borders of work tiles too, as the consumers need them; tiles from the right to the left.
#[inline(always)]
pub(super) fn load_keys_and_values<S: Tile>(
    base: u32,
    k: TensorMap,
    v: TensorMap,
    seqlens_k: Global<i32>,
    pages: Option<Pages>,
    counter: Global<u32>,
    columns: u32,
    p: &AttentionParams,
) {
    let draw = Draw::new::<S>(counter, p, pages);
    let mut ring = KeyValueRing::new(base, pages);
    let mut n = 0;
    let mut drawn = block_idx_x();
    while let Some(index) = draw.work(drawn) {
        let work = Work::new::<S>(index, p, seqlens_k, pages, columns);
        if work.keys.is_empty() {
            drawn = draw.next();
            continue;
        }
        if draw.leads() {
            Slot::announce::<S>(base, n, Some(&work));
        }
        n += 1;
        // Opaque, or the quotient would take a register for all the loop.
        let head = quotient(work.place.head, quotient(opaque(p.q_heads), p.kv_heads));
        let mut tile = work.keys.end;
        while tile > work.keys.first {
            tile -= 1;
            // The answer comes while the last tiles wait for room.
            if tile == work.keys.first {
                drawn = draw.next();
            }
            let part = ring.find::<S>(tile, head, work.place.batch, work.seqlen.total);
            ring.load_next::<S>(k, v, part);
        }
    }
    if draw.leads() {
        Slot::announce::<S>(base, n, None);
    }
    ring.load_behind::<S>(v);
}

/// A second warp where the cache consists of blocks: its share of the same keys and values. One warp starts a copy in about 100 cycles, in which
/// the copy engine is not even half busy, and blocks of 16 rows make many.
#[inline(always)]
pub(super) fn share_keys_and_values<S: Tile>(
    base: u32,
    k: TensorMap,
    v: TensorMap,
    pages: Pages,
    p: &AttentionParams,
) {
    let mut ring = KeyValueRing::new(base, Some(pages));
    let mut n = 0;
    loop {
        let slot = Slot::drawn::<S>(base, n);
        let keys = slot.keys();
        if keys.is_empty() {
            break;
        }
        n += 1;
        let (place, seqlen) = (slot.place::<S>(), slot.seqlen());
        // Opaque, or the comparisons with 0 would take predicates from all the kernel.
        let head = quotient(place.head, quotient(opaque(p.q_heads), opaque(p.kv_heads)));
        let mut tile = keys.end;
        while tile > keys.first {
            tile -= 1;
            let part = ring.find::<S>(tile, head, place.batch, seqlen.total);
            ring.load_next::<S>(k, v, part);
        }
    }
    ring.load_behind::<S>(v);
}

/// One thread: Q tiles of the work that the other has drawn, of each warpgroup when it has no more use for its last.
#[inline(always)]
pub(super) fn load_queries<S: Tile>(base: u32, q: TensorMap, in_pages: bool) {
    let mut ring = Ring::START;
    let mut n = 0;
    loop {
        let slot = Slot::drawn::<S>(base, n);
        let ends = slot.keys().is_empty();
        let Place { batch, head, row, token, .. } = slot.place::<S>();
        // Tokens of all sequences are those of one to the tensor map.
        let (batch, row) = if in_pages { (0, token + row) } else { (batch, row) };
        let mut warpgroup = 0;
        while warpgroup < S::WARPGROUPS {
            let tile = warpgroup * S::Q_STAGES + ring.stage;
            let barrier = base + 8 * tile;
            let full = barrier + S::Q_FULL;
            mbarrier_wait(barrier + S::Q_EMPTY, ring.parity ^ 1);
            if ends {
                mbarrier_arrive(full);
            } else {
                let destination = base + tile * S::Q_BYTES;
                let row = row + warpgroup * WARPGROUP_ROWS;
                load_tile::<S>(WARPGROUP_ROWS, destination, q, row, head, batch, full);
            }
            warpgroup += 1;
        }
        if ends {
            return;
        }
        n += 1;
        ring = ring.next(S::Q_STAGES);
    }
}

/// One warp: the rows of work tiles that see nothing, because all are padding, or none is in this part of the keys.
#[inline(always)]
pub(super) fn clear_unseeing<T: MmaElement, S: Tile>(
    seqlens_k: Global<i32>,
    to: Destination<T>,
    columns: u32,
    p: &AttentionParams,
) {
    let mut index = block_idx_x();
    while index < Work::count::<S>(p, None) {
        let work = Work::new::<S>(index, p, seqlens_k, None, columns);
        if work.keys.is_empty() {
            clear::<T, S>(work.place, to, p);
        }
        index += grid_dim_x();
    }
}

#[inline(always)]
fn clear<T: MmaElement, S: Tile>(place: Place, to: Destination<T>, p: &AttentionParams) {
    let Place { batch, head, row: first, .. } = place;
    let rows = (p.q_len - first).min(S::ROWS);
    // What a part has not seen is not read.
    if !S::PARTS {
        let vectors = p.head_size / T::PER_VEC;
        let mut i = lane();
        while i < rows * vectors {
            let row = quotient(i, vectors);
            let column = (i - row * vectors) * T::PER_VEC;
            to.out.store_vec(p.out.at(batch, head, first + row) + column as usize, [0; 4]);
            i += 32;
        }
    }
    if to.lse.is_null() {
        return;
    }
    let mut row = lane();
    while row < rows {
        to.lse.store(row_index(place, first + row, p), f32::NEG_INFINITY);
        row += 32;
    }
}
