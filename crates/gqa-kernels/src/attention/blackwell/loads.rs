//! One warp loads Q, K and V.

use super::cache::Cache;
use super::layout::{CHUNK, KEYS, TILE, Tile, of_tile};
use super::work::Work;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::ring::Ring;

/// Starts copying a tile of queries, a box for each chunk of columns. By one thread.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load_queries<S: Tile>(base: u32, q: TensorMap, tile: u32, work: &Work) {
    let full = of_tile(base, S::Q_FULL, tile);
    mbarrier_arrive_expect(full, S::KEY_BYTES);
    let row = work.query_row(tile * TILE);
    for chunk in 0..S::HEAD / 64 {
        let to = S::queries(base, tile) + chunk * CHUNK;
        tma_load(to, q, [chunk * 64, row, work.head, work.entry], full);
    }
}

/// Loads everything, K and V once their stages are free.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Tile, C: Cache>(
    base: u32,
    [q, k, v]: [TensorMap; 3],
    cache: C,
    work: &Work,
    p: &AttentionParams,
) {
    let leads = lane() == 0;
    let mut ring = Ring::START;
    let mut next = |map, chunks: u32, spot| {
        mbarrier_wait(base + S::EMPTY + ring.barrier(), ring.parity ^ 1);
        let full = base + S::FULL + ring.barrier();
        if leads {
            mbarrier_arrive_expect(full, chunks * CHUNK);
        }
        // The bytes are expected before any arrive.
        sync_warp();
        let to = S::stage(base, ring.stage);
        for chunk in 0..chunks {
            cache.load(to + chunk * CHUNK, map, chunk * 64, spot, full);
        }
        ring = ring.next(S::STAGES);
    };
    if leads {
        load_queries::<S>(base, q, 0, work);
    }
    for i in Rolled(0..work.keys.end - work.keys.start, 1) {
        let spot = cache.find((work.keys.end - 1 - i) * KEYS, work, p);
        next(k, S::HEAD / 64, spot);
        if i == 0 && leads {
            load_queries::<S>(base, q, 1, work);
        }
        next(v, S::VALUES / 64, spot);
    }
}
