//! One thread issues all products: Sᵀ = K·Qᵀ, Oᵀ += Vᵀ·P.

use super::cache::Cache;
use super::layout::{CHUNK, KEYS, Layout, Memory};
use super::work::Work;
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::{TensorDescriptor, tensor_rows};
use crate::tile::ring::Ring;

/// The scores of a tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn score<C: Cache, T: MmaElement, const HEAD: u32>(
    layout: Layout,
    memory: Memory,
    stage: u32,
    buffer: u32,
) {
    let instruction = C::instruction::<T>(KEYS, layout.rows, false);
    let keys = TensorDescriptor::new(layout.keys(stage), 0);
    let queries = TensorDescriptor::new(layout.queries, 0);
    let chunk = layout.rows * 128;
    for term in 0..C::TERMS {
        for step in 0..HEAD * C::BYTES / 32 {
            let (nth, within) = (step / 4, step % 4 * 32);
            let of_term = term * (HEAD * C::BYTES / 128) + nth;
            let (a, b) = (keys.at(nth * CHUNK + within), queries.at(of_term * chunk + within));
            C::multiply(memory.scores(buffer), a, b, instruction, term + step > 0);
        }
    }
    tcgen05_commit(layout.scored(buffer));
}

/// The output gains a tile's Vᵀ·P; of the first tile it is that. Heads of 64 fill half of the
/// lanes: the other half has the output of the second half of each tile.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add<C: Cache, T: MmaElement, const HEAD: u32>(
    layout: Layout,
    memory: Memory,
    stage: u32,
    is_first: bool,
) {
    let instruction = C::instruction::<T>(HEAD, C::TERMS * layout.rows, true);
    let values = TensorDescriptor::new(layout.values(stage), CHUNK);
    // Keys of a product.
    let depth = 32 / C::BYTES;
    let steps = KEYS / depth;
    let halves = KEYS / HEAD;
    for step in 0..steps {
        let half = step * halves / steps;
        let begins = step * halves % steps == 0;
        let a = values.at(step * depth * 128);
        let b = tensor_rows(layout.weights + step * depth * 16, KEYS * 16);
        let d = memory.output(0) + (half << 20);
        C::multiply(d, a, b, instruction, !(is_first && begins));
    }
    tcgen05_commit(layout.added());
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<C: Cache, T: MmaElement, const HEAD: u32>(
    layout: Layout,
    memory: Memory,
    work: &Work,
) {
    let release = |tile: u32, empty: u32| {
        // Nobody waits for stages that are not filled again.
        if tile + layout.stages < work.tiles {
            tcgen05_commit(empty);
        }
    };
    let (mut keys, mut values) = (Ring::START, Ring::START);
    for tile in Rolled(0..work.tiles + 1, 1) {
        // The scores of a tile are computed while the weights of the one before it are.
        if tile < work.tiles {
            mbarrier_wait(layout.keys_full(keys.stage), keys.parity);
            tcgen05_fence_after();
            score::<C, T, HEAD>(layout, memory, keys.stage, tile % 2);
            release(tile, layout.keys_empty(keys.stage));
            keys = keys.next(layout.stages);
        }
        if tile > 0 {
            mbarrier_wait(layout.values_full(values.stage), values.parity);
            mbarrier_wait(layout.weighed(), (tile - 1) % 2);
            tcgen05_fence_after();
            add::<C, T, HEAD>(layout, memory, values.stage, tile == 1);
            release(tile - 1, layout.values_empty(values.stage));
            values = values.next(layout.stages);
        }
    }
}
