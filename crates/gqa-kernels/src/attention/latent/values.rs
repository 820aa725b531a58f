//! A warpgroup that multiplies P by half of the columns of V, and before that loads queries.

use super::{
    CHUNK_BYTES, CLEARED, FACTORS, FULL, KEY_SIZE, KEYS, MULTIPLYING, QUERIES, QUERY_CHUNK, ROWS,
    STAGES, VALUE_CHUNKS, VALUE_SIZE, WARPGROUP, WEIGHED, WEIGHTS, Work, rescales, row_of,
};
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::Descriptor;
use crate::tile::quad::transpose;
use crate::tile::ring::Ring;

/// Columns of a warpgroup.
const COLUMNS: u32 = VALUE_SIZE / 2;
/// Its chunks.
const OWN_CHUNKS: u32 = VALUE_CHUNKS / 2;
/// Output of a thread: of two rows, pairs of columns 8 apart.
const OUTPUTS: usize = COLUMNS as usize / 2;
/// Steps of 16 keys.
const DEPTHS: u32 = KEYS / 16;
/// 16-byte vectors of a query.
const VECTORS: u32 = KEY_SIZE / 8;

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<T: MmaElement>(work: &Work<'_, T>, half: u32) {
    work.load_queries(half);
    named_barrier_arrive(QUERIES, MULTIPLYING);
    let mut out = [0.0; OUTPUTS];
    let mut ring = Ring::START;
    for tile in Rolled(work.tiles.clone(), 1) {
        mbarrier_wait(work.barrier(FULL, ring), ring.parity);
        mbarrier_wait(work.barrier(WEIGHED, ring), ring.parity);
        rescale(&mut out, rescales(ring.stage));
        let weights = take_weights(work.stage(ring));
        work.clear(tile, half, ring);
        multiply::<T>(&mut out, weights, work.stage(ring) + half * OWN_CHUNKS * CHUNK_BYTES);
        work.release(ring);
        ring = ring.next(STAGES);
    }
    named_barrier_sync(FACTORS, MULTIPLYING);
    rescale(&mut out, rescales(STAGES));
    if work.is_split() {
        work.store_part(&out, half);
    } else {
        work.store(&out, half);
    }
}

/// `out += weights · values`, in two products for each 16 keys: for one with all columns ptxas
/// wants more registers than a thread of 512 has.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply<T: MmaElement>(
    out: &mut [f32; OUTPUTS],
    weights: [[u32; 4]; DEPTHS as usize],
    values: u32,
) {
    let [left, right] = halves(out);
    // Broadcast, as of the keys.
    let values = Descriptor::new(shfl_idx_u32(values, 0), CHUNK_BYTES);
    wgmma_fence();
    for depth in 0..DEPTHS {
        let of = |chunk| values.at(depth * 16 * 128 + chunk * CHUNK_BYTES);
        T::wgmma_registers(left, true, weights[depth as usize], of(0));
        T::wgmma_registers(right, true, weights[depth as usize], of(OWN_CHUNKS / 2));
    }
    wgmma_commit();
    wgmma_wait::<0>();
}

/// The left and the right columns of the output.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn halves(out: &mut [f32; OUTPUTS]) -> [&mut [f32; OUTPUTS / 2]; 2] {
    let (left, right) = out.split_at_mut(OUTPUTS / 2);
    match (left.first_chunk_mut(), right.first_chunk_mut()) {
        (Some(left), Some(right)) => [left, right],
        _ => trap(),
    }
}

/// The thread's operands of P.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn take_weights(stage: u32) -> [[u32; 4]; DEPTHS as usize] {
    let place = stage + WEIGHTS + thread_idx() % WARPGROUP * 16;
    core::array::from_fn(|depth| ld_shared_vec(place + depth as u32 * WARPGROUP * 16))
}

/// Multiplies the thread's rows by the factors that were left for them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rescale(out: &mut [f32; OUTPUTS], place: u32) {
    let place = Shared::<f32>::at(place);
    let factors = [place.load(0), place.load(1)];
    if any_sync(factors[0] != 1.0 || factors[1] != 1.0) {
        for i in 0..OUTPUTS {
            out[i] *= factors[i / 2 % 2];
        }
    }
}

impl<T: MmaElement> Work<'_, T> {
    /// Loads this warpgroup's half of the queries. Rows without a token become zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_queries(&self, half: u32) {
        let thread = half * WARPGROUP + thread_idx() % WARPGROUP;
        for vector in Rolled(thread..ROWS * VECTORS, 2 * WARPGROUP) {
            let (r, unit) = (vector / VECTORS, vector % VECTORS);
            let row = self.row(r);
            let from = self.p.attention.q.at(0, row.head, self.rows.start + row.s);
            let words = match self.is_token(r, row) {
                true => self.to.q.load_vec(from + unit as usize * 8),
                false => [0; 4],
            };
            let (chunk, within) = (unit / 8, (unit % 8) ^ (r % 8));
            st_shared_vec(self.base + chunk * QUERY_CHUNK + r * 128 + within * 16, words);
        }
        fence_proxy_async();
    }

    /// Clears rows of the last tile that no query row sees: they may hold anything, NaN included,
    /// and 0 · NaN is NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clear(&self, tile: u32, half: u32, ring: Ring) {
        let valid = self.end - tile * KEYS;
        if any_sync(valid < KEYS) {
            let first = self.stage(ring) + half * OWN_CHUNKS * CHUNK_BYTES;
            let thread = thread_idx() % WARPGROUP;
            for vector in Rolled(valid * 8 + thread..KEYS * 8, WARPGROUP) {
                for chunk in 0..OWN_CHUNKS {
                    st_shared_vec(first + chunk * CHUNK_BYTES + vector * 16, [0; 4]);
                }
            }
            fence_proxy_async();
            named_barrier_sync(CLEARED + half, WARPGROUP);
        }
    }

    /// Writes the output of rows that are tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store(&self, out: &[f32; OUTPUTS], half: u32) {
        let column = half * COLUMNS + lane() % 4 * 8;
        for side in 0..2 {
            let r = row_of(side as u32);
            let row = self.row(r);
            let at = self.p.attention.out.at(0, row.head, self.rows.start + row.s);
            let is_token = self.is_token(r, row);
            for group in 0..OUTPUTS / 16 {
                let words = core::array::from_fn(|i| {
                    let pair = 16 * group + 4 * i + 2 * side;
                    T::pack(out[pair], out[pair + 1])
                });
                let words = transpose(words, lane());
                if is_token {
                    self.to.out.store_vec(at + (column + group as u32 * 32) as usize, words);
                }
            }
        }
    }

    /// Writes the output of a split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_part(&self, out: &[f32; OUTPUTS], half: u32) {
        let column = half * COLUMNS + lane() % 4 * 2;
        for side in 0..2 {
            let r = row_of(side as u32);
            let row = self.row(r);
            let at = self.index(row) * VALUE_SIZE as usize;
            if self.is_token(r, row) && !self.tiles.is_empty() {
                for block in 0..OUTPUTS / 4 {
                    let pair = [0, 1].map(|i| out[4 * block + 2 * side + i].to_bits());
                    let at = at + (column + block as u32 * 8) as usize;
                    self.to.partial_out.store_vec8(at, pair);
                }
            }
        }
    }
}
