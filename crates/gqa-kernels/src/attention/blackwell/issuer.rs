//! One thread issues all products: S = Q·Kᵀ from shared memory, O += P·V with P in tensor memory.

use super::layout::{CHUNK, KEYS, TILE, Tile, of_tile, scores};
use super::work::Work;
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::{TensorDescriptor, tensor_instruction};
use crate::tile::ring::Ring;

/// Issues S = Q·Kᵀ of a tile. S overwrites P of the previous key tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn score<S: Tile, T: MmaElement>(base: u32, memory: u32, tile: u32, ring: Ring) {
    // opaque(): otherwise descriptors stay live across the loop over key tiles and spill.
    let base = opaque(base);
    let instruction = tensor_instruction::<T>(TILE, KEYS, false);
    let q = TensorDescriptor::new(S::queries(base, tile), 0);
    let k = TensorDescriptor::new(S::stage(base, ring.stage), 0);
    for step in 0..S::HEAD / 16 {
        let at = step / 4 * CHUNK + step % 4 * 32;
        tcgen05_mma_f16(scores(memory, tile), q.at(at), k.at(at), instruction, step > 0);
    }
    tcgen05_commit(of_tile(base, S::SCORED, tile));
}

/// Issues O += P·V of a tile, or O = P·V for the first key tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add<S: Tile, T: MmaElement>(base: u32, memory: u32, tile: u32, ring: Ring, is_first: bool) {
    // opaque(): as above.
    let (base, memory) = (opaque(base), opaque(memory));
    let instruction = tensor_instruction::<T>(TILE, S::VALUES, true);
    let v = TensorDescriptor::new(S::stage(base, ring.stage), CHUNK);
    for step in 0..KEYS / 16 {
        let (p, v) = (scores(memory, tile) + 8 * step, v.at(step * 16 * 128));
        let keep = step > 0 || !is_first;
        tcgen05_mma_tensor_f16(S::output(memory, tile), p, v, instruction, keep);
    }
    tcgen05_commit(of_tile(base, S::ADDED, tile));
}

/// Waits for the stage.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn full<S: Tile>(base: u32, ring: Ring) {
    mbarrier_wait(base + S::FULL + ring.barrier(), ring.parity);
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Tile, T: MmaElement>(base: u32, memory: u32, work: &Work) {
    let count = work.keys.end - work.keys.start;
    let mut keys = Ring::START;
    let mut values = keys.next(S::STAGES);
    full::<S>(base, keys);
    for tile in Rolled(0..2, 1) {
        mbarrier_wait(of_tile(base, S::Q_FULL, tile), 0);
        tcgen05_fence_after();
        score::<S, T>(base, memory, tile, keys);
    }
    // K and V tiles to load. `release` takes the number of the tile that the stage holds.
    let tiles = 2 * count;
    let release = |ring: Ring, tile: u32| {
        // Nobody waits for stages that are not filled again.
        if tile + S::STAGES < tiles {
            tcgen05_commit(base + S::EMPTY + ring.barrier());
        }
    };
    release(keys, 0);
    for i in Rolled(0..count, 1) {
        let (parity, is_last) = (i % 2, i + 1 == count);
        keys = values.next(S::STAGES);
        full::<S>(base, values);
        for tile in Rolled(0..2, 1) {
            mbarrier_wait(of_tile(base, S::CORRECTED, tile), parity);
            mbarrier_wait(of_tile(base, S::WEIGHED, tile), parity);
            tcgen05_fence_after();
            add::<S, T>(base, memory, tile, values, i == 0);
            if !is_last {
                if tile == 0 {
                    full::<S>(base, keys);
                }
                // The next scores lie over the weights of this product.
                mbarrier_wait(of_tile(base, S::ADDED, tile), parity);
                tcgen05_fence_after();
                score::<S, T>(base, memory, tile, keys);
            }
        }
        release(values, 2 * i + 1);
        release(keys, 2 * i + 2);
        values = keys.next(S::STAGES);
    }
}
