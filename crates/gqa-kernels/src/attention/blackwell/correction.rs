//! The correction warpgroup: each thread has one row of each tile. It rescales the output where a
//! row maximum has risen, and writes it at the end.

use super::Pointers;
use super::layout::{CHUNK, KEYS, ROWS, THREADS, TILE, Tile, of_tile};
use super::work::Work;
use crate::num::{MmaElement, quotient};
use crate::params::AttentionParams;
use crate::simt::*;

/// Columns of the output at a time.
const PART: u32 = 32;

/// Clears rows of V, in the stage of the first key tile, past the end of the sequence: they may
/// hold anything, NaN included, and 0 · NaN is NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn clear_values<S: Tile>(base: u32, work: &Work) {
    const STAGE: u32 = 1;
    let key = (work.keys.end - 1) * KEYS;
    let valid = work.seqlen.total - key;
    if valid >= KEYS {
        return;
    }
    mbarrier_wait(base + S::FULL + 8 * STAGE, 0);
    let row = thread_idx() % TILE;
    if row >= valid {
        for unit in 0..S::VALUES / 8 {
            let at = unit / 8 * CHUNK + row * 128 + unit % 8 * 16;
            st_shared_vec(S::stage(base, STAGE) + at, [0; 4]);
        }
        fence_proxy_async();
    }
}

/// Multiplies the row by the factor.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rescale<S: Tile>(row: u32, factor: f32) {
    let mut part = 0;
    while part < S::VALUES / PART {
        let o = tcgen05_ld_32x32b::<{ PART as usize }>(row + PART * part);
        tcgen05_wait_ld();
        let mut o = o.registers();
        let mut i = 0;
        while i < PART as usize {
            o[i] = (f32::from_bits(o[i]) * factor).to_bits();
            i += 1;
        }
        tcgen05_st_32x32b(row + PART * part, o);
        part += 1;
    }
    tcgen05_wait_st();
}

/// Stores the row times the factor.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store<S: Tile, T: MmaElement>(
    row: u32,
    factor: f32,
    out: Global<T>,
    at: Option<usize>,
    columns: u32,
) {
    let mut part = 0;
    while part < S::VALUES / PART {
        let o = tcgen05_ld_32x32b::<{ PART as usize }>(row + PART * part);
        tcgen05_wait_ld();
        let o = o.registers();
        let mut vector = 0;
        while vector < PART / 8 {
            let column = PART * part + 8 * vector;
            let pair = |i: usize| {
                let at = 8 * vector as usize + 2 * i;
                T::pack(f32::from_bits(o[at]) * factor, f32::from_bits(o[at + 1]) * factor)
            };
            if let Some(at) = at
                && column < columns
            {
                out.store_vec(at + column as usize, [pair(0), pair(1), pair(2), pair(3)]);
            }
            vector += 1;
        }
        part += 1;
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Tile, T: MmaElement>(
    base: u32,
    memory: u32,
    work: &Work,
    to: Pointers<T>,
    p: &AttentionParams,
) {
    let row = thread_idx() % TILE;
    let at = |tile: u32| S::output(memory, tile) + ((warp() % 4) << 21);
    clear_values::<S>(base, work);
    for tile in 0..2 {
        mbarrier_arrive(of_tile(base, S::CORRECTED, tile));
    }
    let count = work.keys.end - work.keys.start;
    for i in Rolled(1..count, 1) {
        let before = (i - 1) % 2;
        for tile in Rolled(0..2, 1) {
            mbarrier_wait(of_tile(base, S::TOLD, tile), before);
            let factor = ld_shared::<f32>(S::factor(base, tile, row));
            // A vote, so that the condition is warp-uniform.
            if any_sync(factor != 1.0) {
                mbarrier_wait(of_tile(base, S::ADDED, tile), before);
                tcgen05_fence_after();
                rescale::<S>(at(tile), factor);
                tcgen05_fence_before();
            }
            mbarrier_arrive(of_tile(base, S::CORRECTED, tile));
        }
    }
    let work = &Work::load(base + S::WORK);
    let last = (count - 1) % 2;
    for tile in Rolled(0..2, 1) {
        mbarrier_wait(of_tile(base, S::TOLD, tile), last);
        let factor = ld_shared::<f32>(S::factor(base, tile, row));
        mbarrier_wait(of_tile(base, S::ADDED, tile), last);
        tcgen05_fence_after();
        let to_row = work.output(tile * TILE + row, p);
        store::<S, T>(at(tile), factor, to.out, to_row, to.columns);
    }
}

/// Clears the rows of a work tile that sees no key. By all threads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn clear<T: MmaElement>(work: &Work, to: Pointers<T>, p: &AttentionParams) {
    let vectors = to.columns / 8;
    for i in Rolled(thread_idx()..ROWS * vectors, THREADS) {
        let row = quotient(i, vectors);
        let column = (i - row * vectors) * 8;
        if let Some(at) = work.output(row, p) {
            to.out.store_vec(at + column as usize, [0; 4]);
        }
    }
    if !to.lse.is_null()
        && thread_idx() < ROWS
        && let Some(index) = work.lse(thread_idx(), p)
    {
        to.lse.store(index, f32::NEG_INFINITY);
    }
}
