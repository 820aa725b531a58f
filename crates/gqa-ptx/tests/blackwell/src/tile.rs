//! The first user of tensor memory: one tile of attention without softmax, `O = (Q·Kᵀ / 64)·V`.
//!
//! **One CTA** of 128 threads and 128 queries, 128 keys and heads of 128. Thread 0 issues the
//! products. Each thread has one query: a lane of tensor memory.
//!
//! **Tensors**: q, k and v of 128 rows of 128 elements, out the same in f32.
//!
//! **Shared memory**: Q, K and V, each as two chunks of 64 columns of 128-byte rows with the
//! 128-byte swizzle; three barriers; the address of tensor memory. **Tensor memory**: 128 columns
//! of scores, whose first 64 the weights replace, and 128 of the output.
//!
//! **Barriers**: `scored` and `done` take the commits of the two products, `weighed` an arrival of
//! each thread that has stored its weights.

use gqa_kernels::num::MmaElement;
use gqa_kernels::simt::*;
use gqa_kernels::tile::descriptor::{TensorDescriptor, tensor_instruction};

/// Queries, keys and elements of a head.
const SIZE: u32 = 128;
pub const THREADS: u32 = SIZE;
const CHUNK: u32 = SIZE * 128;
const TILE: u32 = 2 * CHUNK;
const SCORED: u32 = 3 * TILE;
const WEIGHED: u32 = SCORED + 8;
const DONE: u32 = WEIGHED + 8;
const SLOT: u32 = DONE + 8;
pub const SHARED_BYTES: u32 = SLOT + 8;
/// Columns of tensor memory.
const COLUMNS: u32 = 256;
const OUTPUT: u32 = 128;

pub fn tile<T: MmaElement>(q: Global<T>, k: Global<T>, v: Global<T>, out: Global<f32>) {
    let base = shared_base();
    let [scored, weighed, done] = [base + SCORED, base + WEIGHED, base + DONE];
    if thread_idx() == 0 {
        mbarrier_init(scored, 1);
        mbarrier_init(weighed, THREADS);
        mbarrier_init(done, 1);
        fence_mbarrier_init();
    }
    if warp() == 0 {
        tcgen05_alloc(base + SLOT, COLUMNS);
        tcgen05_relinquish();
    }
    copy(q, base);
    copy(k, base + TILE);
    copy(v, base + 2 * TILE);
    fence_proxy_async();
    tcgen05_fence_before();
    sync_threads();
    tcgen05_fence_after();
    let memory = ld_shared::<u32>(base + SLOT);
    if thread_idx() == 0 {
        let (q, k) = (TensorDescriptor::new(base, 0), TensorDescriptor::new(base + TILE, 0));
        for step in 0..SIZE / 16 {
            let at = step / 4 * CHUNK + step % 4 * 32;
            let instruction = tensor_instruction::<T>(SIZE, SIZE, false);
            tcgen05_mma_f16(memory, q.at(at), k.at(at), instruction, step > 0);
        }
        tcgen05_commit(scored);
    }
    mbarrier_wait(scored, 0);
    tcgen05_fence_after();
    weigh::<T>(memory + (warp() << 21));
    tcgen05_fence_before();
    mbarrier_arrive(weighed);
    if thread_idx() == 0 {
        mbarrier_wait(weighed, 0);
        tcgen05_fence_after();
        let v = TensorDescriptor::new(base + 2 * TILE, CHUNK);
        for step in 0..SIZE / 16 {
            let (p, v) = (memory + 8 * step, v.at(step * 16 * 128));
            let instruction = tensor_instruction::<T>(SIZE, SIZE, true);
            tcgen05_mma_tensor_f16(memory + OUTPUT, p, v, instruction, step > 0);
        }
        tcgen05_commit(done);
    }
    mbarrier_wait(done, 0);
    tcgen05_fence_after();
    store(memory + OUTPUT + (warp() << 21), out);
    tcgen05_fence_before();
    sync_threads();
    if warp() == 0 {
        tcgen05_dealloc(memory, COLUMNS);
    }
}

/// Copies a tile to its swizzled place.
fn copy<T: MmaElement>(from: Global<T>, to: u32) {
    for i in 0..SIZE * 16 / THREADS {
        let unit = i * THREADS + thread_idx();
        let (row, part) = (unit / 16, unit % 16);
        let place = to + part / 8 * CHUNK + row * 128 + 16 * ((part % 8) ^ (row % 8));
        st_shared_vec(place, from.load_vec((unit * 8) as usize));
    }
}

/// The scores of a row become weights.
fn weigh<T: MmaElement>(row: u32) {
    for part in 0..4 {
        let scores = tcgen05_ld_32x32b::<32>(row + 32 * part);
        tcgen05_wait_ld();
        let scores = scores.registers().map(|score| f32::from_bits(score) / 64.0);
        let mut weights = [0; 16];
        for (i, pair) in weights.iter_mut().enumerate() {
            *pair = T::pack(scores[2 * i], scores[2 * i + 1]);
        }
        tcgen05_st_32x32b(row + 16 * part, weights);
    }
    tcgen05_wait_st();
}

fn store(row: u32, out: Global<f32>) {
    for part in 0..4 {
        let output = tcgen05_ld_32x32b::<32>(row + 32 * part);
        tcgen05_wait_ld();
        let output = output.registers();
        for i in 0..8 {
            let at = thread_idx() * SIZE + 32 * part + 4 * i;
            let four = core::array::from_fn(|j| output[4 * i as usize + j]);
            out.store_vec(at as usize, four);
        }
    }
}
