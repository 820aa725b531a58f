//! One thread loads Q, K and V.

use super::layout::{
    CHUNK, EMPTY, FULL, HEAD, KEYS, Q_FULL, STAGES, TILE, TILE_BYTES, of_tile, queries, stage,
};
use super::work::Work;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::ring::Ring;

/// Starts copying 128 rows from `place` on, a box for each chunk of columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load(destination: u32, map: TensorMap, [row, head, batch]: [u32; 3], full: u32) {
    mbarrier_arrive_expect(full, TILE_BYTES);
    for chunk in 0..HEAD / 64 {
        tma_load(destination + chunk * CHUNK, map, [chunk * 64, row, head, batch], full);
    }
}

/// Loads everything, K and V once their stages are free.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run(base: u32, [q, k, v]: [TensorMap; 3], work: &Work, p: &AttentionParams) {
    let Work { batch, head, row, .. } = *work;
    let kv_head = work.kv_head(p);
    let mut ring = Ring::START;
    let mut next = |map, tile: u32| {
        mbarrier_wait(base + EMPTY + ring.barrier(), ring.parity ^ 1);
        let full = base + FULL + ring.barrier();
        load(stage(base, ring.stage), map, [tile * KEYS, kv_head, batch], full);
        ring = ring.next(STAGES);
    };
    load(queries(base, 0), q, [row, head, batch], of_tile(base, Q_FULL, 0));
    for i in Rolled(0..work.keys.end - work.keys.start, 1) {
        let tile = work.keys.end - 1 - i;
        next(k, tile);
        if i == 0 {
            load(queries(base, 1), q, [row + TILE, head, batch], of_tile(base, Q_FULL, 1));
        }
        next(v, tile);
    }
}
