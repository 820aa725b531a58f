//! A warpgroup that computes scores and P of all rows.

use super::{
    CHUNK_BYTES, CHUNKS, FACTORS, FULL, GAPS, KEYS, LEAST_BOX, MULTIPLYING, QUERIES, QUERY_CHUNK,
    SCORED, STAGES, WARPGROUP, WEIGHED, WEIGHTS, Work, rescales, row_of,
};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::Descriptor;
use crate::tile::fragment::{Fragments, pack};
use crate::tile::ring::Ring;
use crate::tile::rows::close;
use crate::tile::softmax::{ScoreScale, States, mask, total, weigh_and_rescale};

/// 8-key MMA tiles of a key tile.
const N8: usize = KEYS as usize / 8;
/// Scores of a thread.
const SCORES: usize = 4 * N8;
/// Steps of 16 keys of the product with V.
const DEPTHS: u32 = KEYS / 16;

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<T: MmaElement>(work: &Work<'_, T>) {
    let mut rows = Scores::new(work);
    named_barrier_sync(QUERIES, MULTIPLYING);
    if !work.tiles.is_empty() {
        let last = work.tiles.end - 1;
        let mut ring = Ring::START;
        let mut scores = multiply(work, ring);
        wgmma_wait::<0>();
        for tile in Rolled(work.tiles.start..last, 1) {
            // The tensor cores go on while this tile's scores become weights.
            let next = multiply(work, ring.next(STAGES));
            rows.weigh(work, scores, tile, ring);
            wgmma_wait::<0>();
            // P was written where TMA writes next. Before the wait this would wait for products.
            fence_proxy_async();
            work.release(ring);
            scores = next;
            ring = ring.next(STAGES);
        }
        rows.weigh(work, scores, last, ring);
    }
    let [states] = rows.states.map(|rows| rows.map(total));
    let factors = [0, 1].map(|half| work.close(half, states[half as usize]));
    pass(rescales(STAGES), factors);
    named_barrier_arrive(FACTORS, MULTIPLYING);
}

/// The rows of a thread.
struct Scores {
    scale: ScoreScale,
    /// The keys that each sees.
    visible: [Visible; 2],
    states: States<1>,
}

impl Scores {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new<T: MmaElement>(work: &Work<'_, T>) -> Self {
        let p = &work.p.attention;
        Self {
            scale: ScoreScale::new(p.scale, p.softcap),
            visible: [0, 1].map(|half| work.row(row_of(half)).visible),
            states: [[SoftmaxState::EMPTY; 2]],
        }
    }

    /// Turns the scores of a tile into P, and leaves it for the other warpgroups.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh<T: MmaElement>(
        &mut self,
        work: &Work<'_, T>,
        scores: [f32; SCORES],
        tile: u32,
        ring: Ring,
    ) {
        let mut scores: Fragments<1, N8> =
            [core::array::from_fn(|block| core::array::from_fn(|i| scores[4 * block + i]))];
        self.scale.adjust(&mut scores);
        hide(&mut scores, tile * KEYS, self.visible, ring);
        let mut factors = [1.0; 2];
        weigh_and_rescale::<1, 2, N8>(
            &mut self.states,
            &mut scores,
            self.scale,
            |_, half, factor| factors[half] *= factor,
        );
        leave::<T>(work.stage(ring), &scores, factors, ring);
        mbarrier_arrive(work.barrier(WEIGHED, ring));
    }
}

/// Begins to multiply the queries by the stage's keys, once these have arrived.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply<T: MmaElement>(work: &Work<'_, T>, ring: Ring) -> [f32; SCORES] {
    mbarrier_wait(work.barrier(FULL, ring), ring.parity);
    // Broadcast, so that the compiler knows that it is warp-uniform: descriptors are made in
    // uniform registers, or else take longer to make than the products.
    let k = Descriptor::new(shfl_idx_u32(work.stage(ring), 0), 16);
    let q = Descriptor::new(opaque(work.base), 16);
    wgmma_fence();
    let mut scores = T::wgmma(q.at(0), k.at(0));
    for depth in 1..CHUNKS * 4 {
        let (chunk, within) = (depth / 4, depth % 4 * 32);
        let (q, k) = (q.at(chunk * QUERY_CHUNK + within), k.at(chunk * CHUNK_BYTES + within));
        T::wgmma_add(&mut scores, q, k);
    }
    wgmma_commit();
    scores
}

/// Hides keys from `begin` on that a row does not see, or that are outside of the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn hide(scores: &mut Fragments<1, N8>, begin: u32, visible: [Visible; 2], ring: Ring) {
    if any_sync(begin + KEYS > visible[0].end.min(visible[1].end)) {
        mask(scores, begin, |_, half| visible[half]);
    }
    let gaps = Shared::<u32>::at(GAPS).load(ring.stage);
    if any_sync(gaps != 0) {
        for block in 0..N8 {
            if gaps >> (8 * block as u32 / LEAST_BOX) & 1 != 0 {
                scores[0][block] = [f32::NEG_INFINITY; 4];
            }
        }
    }
}

/// Leaves P and the rescale factors for the same threads of the other warpgroups.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn leave<T: MmaElement>(stage: u32, weights: &Fragments<1, N8>, factors: [f32; 2], ring: Ring) {
    // P is written where other warps may still read keys.
    named_barrier_sync(SCORED, WARPGROUP);
    let place = stage + WEIGHTS + thread_idx() % WARPGROUP * 16;
    for depth in 0..DEPTHS {
        let operand = pack::<T, N8>(&weights[0], depth as usize);
        st_shared_vec(place + depth * WARPGROUP * 16, operand);
    }
    pass(rescales(ring.stage), factors);
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn pass(place: u32, factors: [f32; 2]) {
    let place = Shared::<f32>::at(place);
    place.store(0, factors[0]);
    place.store(1, factors[1]);
}

impl<T: MmaElement> Work<'_, T> {
    /// Finishes a row: writes its log-sum-exp, and returns the factor that normalises its output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn close(&self, half: u32, state: SoftmaxState) -> f32 {
        let r = row_of(half);
        let row = self.row(r);
        let (factor, log_sum_exp) =
            close::<T>(&self.p.attention, row.is_token(), row.head, Global::null(), state);
        let lse = if self.is_split() { self.to.partial_lse } else { self.to.lse };
        if self.is_token(r, row) && lane() % 4 == 0 && !lse.is_null() {
            lse.store(self.index(row), log_sum_exp);
        }
        factor
    }
}
