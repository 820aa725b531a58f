//! A quantized cache: one more warpgroup converts tiles of quantized values to float16, exactly,
//! for the tensor cores. Scales apply before and after the products (`scales.rs`), so nothing is
//! rounded here. Keys of e4m3 may stay e4m3 (`operand.rs`).
//!
//! TMA writes the quantized values of a tile to the end of its stage, of which they fill half, or
//! all for the smallest heads. The converted tile fills the whole stage. So columns that do not
//! overlap the quantized values are written first, the others after all threads have read theirs.
//!
//! A thread converts 16 columns of a row at a time, which lie in one 64-column chunk; four threads
//! share a chunk's row. Eight neighbouring threads take rows `r` and `r ^ 5`, so that their vectors
//! fall into all eight 16-byte units of 128 bytes, both for loads and stores.

use super::operand::Operand;
use super::shape::{Tile, WARPGROUP, swizzled};
use super::work::Slot;
use crate::num::{Float4, Float8, Format, Int4, Int8, MmaCode};
use crate::simt::*;
use crate::tile::ring::Ring;

/// Columns that a thread converts at a time.
const COLUMNS: u32 = 16;
/// Loads that a thread keeps in flight.
const TOGETHER: usize = 4;
/// Named barrier: the warpgroup has read all of a tile.
const READ: u32 = 9;
/// Warps that convert.
const WARPS: u32 = WARPGROUP / 32;

/// The loop of the converting warpgroup over all tiles, or over V tiles only if keys stay e4m3.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Tile, P: Operand>(base: u32, format: u32) {
    // A loop for each format, so that none branches in every step.
    if P::KEEPS_KEYS {
        run_over_values::<S>(base);
    } else if format == Format::Int8 as u32 {
        run_in::<S, _>(Int8, base);
    } else if format == Format::Int4 as u32 {
        run_in::<S, _>(Int4, base);
    } else if format == Format::Float4 as u32 {
        run_in::<S, _>(Float4, base);
    } else {
        run_in::<S, _>(Float8, base);
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn run_in<S: Tile, C: MmaCode>(code: C, base: u32) {
    let mut ring = Ring::START;
    let mut n = 0;
    loop {
        // opaque(): otherwise the address is computed before the warpgroups branch, and spills in
        // the others.
        let keys = Slot::drawn::<S>(opaque(base), n).keys();
        if keys.is_empty() {
            return;
        }
        n += 1;
        for _ in Rolled(0..2 * (keys.end - keys.first), 1) {
            ring = convert_next::<S, C>(code, base, ring);
        }
    }
}

/// The loop over V tiles, of e4m3. Tiles arrive in the order K₀ K₁ V₀ K₂ V₁ …
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn run_over_values<S: Tile>(base: u32) {
    let mut ring = Ring::START;
    let mut n = 0;
    loop {
        let keys = Slot::drawn::<S>(opaque(base), n).keys();
        // The first K tile of a work tile comes before the last V tile of the previous work tile.
        if !keys.is_empty() {
            ring = pass_next::<S>(base, ring);
        }
        if n > 0 {
            ring = convert_next::<S, _>(Float8, base, ring);
        }
        if keys.is_empty() {
            return;
        }
        n += 1;
        for _ in Rolled(keys.first + 1..keys.end, 1) {
            ring = pass_next::<S>(base, ring);
            ring = convert_next::<S, _>(Float8, base, ring);
        }
    }
}

/// Converts a tile and passes it to the consumers.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn convert_next<S: Tile, C: MmaCode>(code: C, base: u32, ring: Ring) -> Ring {
    mbarrier_wait(base + S::CODE_FULL + ring.barrier(), ring.parity);
    convert_tile::<S, C>(code, base + S::stage(ring.stage));
    fence_proxy_async();
    mbarrier_arrive(base + S::KV_FULL + ring.barrier());
    ring.next(S::STAGES)
}

/// Passes a tile to the consumers unconverted.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn pass_next<S: Tile>(base: u32, ring: Ring) -> Ring {
    mbarrier_wait(base + S::CODE_FULL + ring.barrier(), ring.parity);
    mbarrier_arrive(base + S::KV_FULL + ring.barrier());
    ring.next(S::STAGES)
}

/// This thread's share of a tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn convert_tile<S: Tile, C: MmaCode>(code: C, tile: u32) {
    const { assert!(S::N / 8 * S::CHUNKS.div_ceil(2) == WARPS * TOGETHER as u32) }
    let codes = tile + S::KV_BYTES - S::CODE_BYTES;
    let free = S::CHUNKS / 2;
    if free > 0 {
        store::<S, C>(code, tile, 0, load::<S, C>(codes, 0));
    }
    let last = load::<S, C>(codes, free);
    named_barrier_sync(READ, WARPGROUP);
    store::<S, C>(code, tile, free, last);
}

/// Loads this thread's quantized values from one half of the chunks, which starts at chunk `first`:
/// 16 columns of each of its rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load<S: Tile, C: MmaCode>(codes: u32, first: u32) -> [[u32; 4]; TOGETHER] {
    let (row, chunk) = place::<S>();
    let byte = (4 * (first + chunk) + lane() % 4) * COLUMNS * C::BITS / 8;
    let at = codes + swizzled(S::N, row, byte / 16) + byte % 16;
    let mut words = [[0; 4]; TOGETHER];
    let mut i = 0;
    while i < TOGETHER {
        let at = at + i as u32 * apart::<S>();
        if C::BITS == 8 {
            words[i] = ld_shared_vec(at);
        } else {
            let pair: u64 = ld_shared(at);
            words[i] = [pair as u32, (pair >> 32) as u32, 0, 0];
        }
        i += 1;
    }
    words
}

/// Converts them to float16 and stores them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store<S: Tile, C: MmaCode>(code: C, tile: u32, first: u32, codes: [[u32; 4]; TOGETHER]) {
    let (row, chunk) = place::<S>();
    let at = swizzled(S::N, row, 8 * (first + chunk) + 2 * (lane() % 4));
    // The swizzle keeps the two units of a pair side by side: the odd one is at `at ^ 16`.
    let (low, high) = (tile + at, tile + (at ^ 16));
    let mut i = 0;
    while i < TOGETHER {
        let halves = halves(code, codes[i]);
        st_shared_vec(low + i as u32 * apart::<S>(), halves[0]);
        st_shared_vec(high + i as u32 * apart::<S>(), halves[1]);
        i += 1;
    }
}

/// First row of this thread, and its chunk; a warp takes eight rows of a chunk at a time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn place<S: Tile>() -> (u32, u32) {
    let chunks = S::CHUNKS.div_ceil(2);
    let nth = warp() % WARPS;
    let row = (lane() / 8) ^ (lane() / 4 % 2 * 5);
    (nth / chunks * 8 + row, nth % chunks)
}

/// Bytes from one row of this thread to its next row, in the same chunk.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
const fn apart<S: Tile>() -> u32 {
    let chunks = S::CHUNKS.div_ceil(2);
    assert!(WARPS.is_multiple_of(chunks));
    WARPS / chunks * 8 * 128
}

/// 16 quantized values as float16, in two vectors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn halves<C: MmaCode>(code: C, [a, b, c, d]: [u32; 4]) -> [[u32; 4]; 2] {
    if C::BITS == 4 {
        return [code.in_order(a), code.in_order(b)];
    }
    let joined = |low, high| {
        let ([a, b, ..], [c, d, ..]) = (code.in_order(low), code.in_order(high));
        [a, b, c, d]
    };
    [joined(a, b), joined(c, d)]
}
