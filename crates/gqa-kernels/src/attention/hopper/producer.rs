//! The producer warpgroup: one thread draws work tiles, writes their descriptions and loads K and
//! V, one thread loads Q, and one warp clears output rows that see no key. Over a paged KV cache
//! two warps load K and V, and one looks for keys without a block (`pages.rs`).

use super::output::{Destination, row_index};
use super::pages::Pages;
use super::shape::{Arrival, CHUNK, TRANSPOSED_COLUMNS, TRANSPOSED_ROWS, Tile, WARPGROUP_ROWS};
use super::work::{Place, Slot, TileScheduler, Work};
use crate::num::{MmaElement, quotient};
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::ring::Ring;
use crate::tile::seqlens::Seqlens;

/// Starts copying `rows` rows from `place` on to a tile of `tile_rows` rows: one box per chunk of
/// columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load_tile(
    rows: u32,
    tile_rows: u32,
    chunks: u32,
    destination: u32,
    map: TensorMap,
    place: [u32; 3],
    full: u32,
) {
    mbarrier_arrive_expect(full, rows * chunks * 128);
    let [a, b, c] = place;
    let mut chunk = 0;
    while chunk < chunks {
        tma_load(destination + chunk * tile_rows * 128, map, [chunk * CHUNK, a, b, c], full);
        chunk += 1;
    }
}

/// Starts copying a tile of transposed V: one box.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load_transposed<S: Tile>(
    destination: u32,
    map: TensorMap,
    tile: u32,
    head: u32,
    batch: u32,
    full: u32,
) {
    const {
        let beside = S::D.div_ceil(TRANSPOSED_ROWS);
        let fits = S::N * beside <= TRANSPOSED_COLUMNS && S::D.is_multiple_of(TRANSPOSED_ROWS);
        assert!(!S::IS_TRANSPOSED || fits && S::N.is_multiple_of(32));
    }
    mbarrier_arrive_expect(full, S::VALUE_BYTES);
    // A column of the tensor map is two quantized values.
    let column = tile * (TRANSPOSED_COLUMNS / 2);
    tma_load(destination, map, [column, 0, head, batch], full);
}

/// The producer's position in the pipeline of K and V tiles.
struct KeyValueRing {
    base: u32,
    ring: Ring,
}

impl KeyValueRing {
    /// Waits until the stage is free, starts filling it and moves on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load<S: Tile>(&mut self, map: TensorMap, tile: u32, head: u32, batch: u32, is_value: bool) {
        let barrier = self.base + self.ring.barrier();
        let Arrival { offset, chunks, full } = S::ARRIVAL;
        mbarrier_wait(barrier + S::KV_EMPTY, self.ring.parity ^ 1);
        let destination = self.base + S::stage(self.ring.stage) + offset;
        let full = barrier + full;
        if is_value && S::IS_TRANSPOSED {
            load_transposed::<S>(destination, map, tile, head, batch, full);
        } else {
            let chunks = chunks[usize::from(is_value)];
            load_tile(S::N, S::N, chunks, destination, map, [tile * S::N, head, batch], full);
        }
        self.ring = self.ring.next(S::STAGES);
    }

    /// Leaves the stage empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn skip<S: Tile>(&mut self) {
        mbarrier_arrive(self.base + self.ring.barrier() + S::ARRIVAL.full);
        self.ring = self.ring.next(S::STAGES);
    }
}

/// Run by one thread: draws work tiles and loads their keys and values. K runs one tile ahead of V,
/// across work tiles too, as the consumers need them; key tiles go from last to first.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_keys_and_values<S: Tile>(
    base: u32,
    k: TensorMap,
    v: TensorMap,
    seqlens: Seqlens,
    counter: Global<u32>,
    columns: u32,
    p: &AttentionParams,
) {
    let scheduler = TileScheduler { counter, count: Work::count::<S>(p) };
    let mut ring = KeyValueRing { base, ring: Ring::START };
    // The V tile to load after the next K tile: tile, head, batch.
    let mut behind: Option<[u32; 3]> = None;
    let mut n = 0;
    let mut index = block_idx_x();
    while scheduler.is_work(index) {
        let work = Work::new::<S>(index, p, seqlens, columns);
        if work.keys.is_empty() {
            index = scheduler.next();
            continue;
        }
        Slot::announce::<S>(base, n, Some(&work));
        n += 1;
        // opaque(): otherwise the quotient occupies a register across the whole loop.
        let head = quotient(work.place.head, quotient(opaque(p.q_heads), p.kv_heads));
        let mut tile = work.keys.end;
        while tile > work.keys.first {
            tile -= 1;
            // Draws early: the answer arrives while the last tiles wait for free stages.
            if tile == work.keys.first {
                index = scheduler.next();
            }
            ring.load::<S>(k, tile, head, work.place.batch, false);
            if let Some([tile, head, batch]) = behind {
                ring.load::<S>(v, tile, head, batch, true);
            } else if S::ALTERNATES {
                ring.skip::<S>();
            }
            behind = Some([tile, head, work.place.batch]);
        }
    }
    Slot::announce::<S>(base, n, None);
    if let Some([tile, head, batch]) = behind {
        ring.load::<S>(v, tile, head, batch, true);
    }
}

/// Run by one thread: loads each warpgroup's Q tile of every work tile once the warpgroup has
/// released its previous one. `pages` says where those over a paged KV cache are.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn load_queries<S: Tile>(base: u32, q: TensorMap, pages: Option<Pages>) {
    let mut ring = Ring::START;
    let mut n = 0;
    loop {
        let slot = Slot::drawn::<S>(base, n);
        let ends = slot.keys().is_empty();
        let place = slot.place::<S>();
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
                let (rows, place) = match pages {
                    None => {
                        let Place { batch, head, row, .. } = place;
                        (WARPGROUP_ROWS, [row + warpgroup * WARPGROUP_ROWS, head, batch])
                    }
                    Some(pages) => (pages.packing.rows(), pages.queries(place, warpgroup)),
                };
                load_tile(rows, WARPGROUP_ROWS, S::CHUNKS, destination, q, place, full);
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

/// Run by one warp: clears the rows of work tiles without key tiles, because all rows are padding
/// or because the split's KV range is empty.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn clear_unseeing<T: MmaElement, S: Tile>(
    seqlens: Seqlens,
    to: Destination<T>,
    columns: u32,
    p: &AttentionParams,
) {
    let mut index = block_idx_x();
    while index < Work::count::<S>(p) {
        let work = Work::new::<S>(index, p, seqlens, columns);
        if work.keys.is_empty() {
            clear::<T, S>(work.place, to, p);
        }
        index += grid_dim_x();
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn clear<T: MmaElement, S: Tile>(place: Place, to: Destination<T>, p: &AttentionParams) {
    let Place { batch, head, row: first, .. } = place;
    let rows = (p.q_len - first).min(S::ROWS);
    // The merge skips the output of an empty split.
    if !S::SPLITS {
        let vectors = to.columns / T::PER_VEC;
        let mut i = lane();
        while i < rows * vectors {
            let row = quotient(i, vectors);
            let column = (i - row * vectors) * T::PER_VEC;
            let at = p.out.at(batch, head, first + row) + column as usize;
            match to.quantized {
                None => to.out.store_vec(at, [0; 4]),
                // The same number of elements in half of the bytes.
                Some(quantized) => quantized.out.store_vec8(at, [0; 2]),
            }
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
