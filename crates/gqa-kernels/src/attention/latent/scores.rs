//! Scores of a half's tiles, and P.

use super::halves::{Half, OUTPUTS, place};
use super::values::{Weights, weights_place};
use super::{CHUNK_BYTES, DEPTHS, KEYS, LEAST_BOX, OWN_CHUNKS, QUERY_CHUNK, Shape, Work, row_of};
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::Descriptor;
use crate::tile::fragment::{Fragments, pack};
use crate::tile::softmax::{mask, weigh_and_rescale};

/// 8-key MMA tiles of a key tile.
const N8: usize = KEYS as usize / 8;
/// Scores of a thread.
pub(super) type Scores = [f32; 4 * N8];

/// Begins to add the product of a chunk of queries and keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_scores<T: MmaElement>(scores: &mut Scores, [q, k]: [Descriptor; 2], chunk: u32) {
    for within in [0, 32, 64, 96] {
        let [q, k] = [q.at(chunk * QUERY_CHUNK + within), k.at(chunk * CHUNK_BYTES + within)];
        T::wgmma_add(scores, q, k);
    }
}

impl Half {
    /// Begins to multiply the queries by the keys of the half's next tile, each chunk once it has
    /// arrived: the one whose queries are in registers, then half of the others.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn begin_scores<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>) -> Scores {
        let mut scores = [0.0; 4 * N8];
        let [_, k] = self.chunks(work, S::HELD);
        self.await_chunk(work, S::HELD);
        wgmma_fence();
        for depth in 0..4 {
            let operand = self.held[depth as usize];
            S::Operand::<T>::wgmma_k_major(&mut scores, depth > 0, operand, k.at(depth * 32));
        }
        let first = self.first_chunk::<S>(0);
        let chunks = self.chunks(work, first);
        for chunk in u32::from(S::APART)..OWN_CHUNKS {
            self.await_chunk(work, first + chunk);
            wgmma_fence();
            add_scores::<S::Operand<T>>(&mut scores, chunks, chunk);
        }
        wgmma_commit();
        scores
    }

    /// Issues the remaining products of the scores. Their chunks have mostly arrived. There is no
    /// wait between these products, so the hardware treats them as one wgmma group, and the
    /// previous group can be waited for alone.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn end_scores<S: Shape, T: MmaElement>(
        &self,
        work: &Work<'_, S, T>,
        scores: &mut Scores,
    ) {
        let first = self.first_chunk::<S>(1);
        let chunks = self.chunks(work, first);
        for chunk in 0..OWN_CHUNKS {
            self.await_chunk(work, first + chunk);
        }
        wgmma_fence();
        for chunk in 0..OWN_CHUNKS {
            add_scores::<S::Operand<T>>(scores, chunks, chunk);
        }
        wgmma_commit();
    }

    /// First chunk of part 0 or 1 of the scores. With a latent cache the half's own columns come
    /// first; otherwise chunk 0 does, because its place is refilled first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_chunk<S: Shape>(&self, part: u32) -> u32 {
        OWN_CHUNKS * if S::APART { part } else { self.half ^ part }
    }

    /// Waits for a chunk of the half's next tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn await_chunk<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, chunk: u32) {
        mbarrier_wait(work.full(self.half, chunk), self.parity);
    }

    /// Descriptors of the queries and of the half's keys, from chunk `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn chunks<S: Shape, T: MmaElement>(
        &self,
        work: &Work<'_, S, T>,
        first: u32,
    ) -> [Descriptor; 2] {
        let q = work.base + first * QUERY_CHUNK;
        let k = work.buffer(self.keys::<S>()) + first * CHUNK_BYTES;
        // Broadcast, so that the compiler knows that the addresses are warp-uniform and computes
        // descriptors in uniform registers. Otherwise computing them takes longer than the
        // products.
        [q, k].map(|address| Descriptor::new(shfl_idx_u32(address, 0), 16))
    }

    /// Turns the scores of a tile into P, rescales the output to the new row maxima, and passes
    /// both to the other half. Releases the chunks that only the scores need.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn weigh<S: Shape, T: MmaElement>(
        &mut self,
        work: &Work<'_, S, T>,
        scores: Scores,
        tile: u32,
    ) -> Weights {
        let mut scores: Fragments<1, N8> =
            [core::array::from_fn(|block| core::array::from_fn(|i| scores[4 * block + i]))];
        if S::CONVERTS {
            work.undo_division(&mut scores[0]);
        }
        self.scale.adjust(&mut scores);
        self.hide::<S>(&mut scores, tile * KEYS);
        self.release_keys(work, S::LAST_GROUP..S::GROUPS);
        let Self { states, out, scale, .. } = self;
        weigh_and_rescale::<1, 2, N8>(states, &mut scores, *scale, |_, row, factor| {
            for block in 0..OUTPUTS / 4 {
                for i in 2 * row..2 * row + 2 {
                    out[4 * block + i] *= factor;
                }
            }
        });
        let weights = core::array::from_fn(|depth| pack::<S::Operand<T>, N8>(&scores[0], depth));
        self.pass(work, &weights);
        weights
    }

    /// Hides keys from `begin` on that a row does not see, or that are outside of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hide<S: Shape>(&self, scores: &mut Fragments<1, N8>, begin: u32) {
        let visible = self.visible;
        if any_sync(begin + KEYS > visible[0].end.min(visible[1].end)) {
            mask(scores, begin, |_, half| visible[half]);
        }
        let gaps = Shared::<u32>::at(S::GAPS).load(self.keys::<S>());
        if any_sync(gaps != 0) {
            for block in 0..N8 {
                if gaps >> (8 * block as u32 / LEAST_BOX) & 1 != 0 {
                    scores[0][block] = [f32::NEG_INFINITY; 4];
                }
            }
        }
    }

    /// Stores P and the row maxima in shared memory for the same thread of the other half.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pass<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, weights: &Weights) {
        for depth in 0..DEPTHS {
            st_shared_vec(weights_place(work, self.half, depth), weights[depth]);
        }
        for row in 0..2 {
            if lane() % 4 == 0 {
                place(S::MAXIMA, self.half).store(row_of(row), self.states[0][row as usize].max);
            }
        }
        mbarrier_arrive(work.passed(self.half));
    }
}
