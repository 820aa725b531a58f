//! A warpgroup that computes scores and P of all rows.

use super::{
    CHUNK_BYTES, CHUNKS, FACTORS, FULL, GAPS, KEYS, LEAST_BOX, MULTIPLYING, QUERIES, QUERY_CHUNK,
    STAGES, WARPGROUP, WEIGHED, WEIGHTS, Work, descriptor, rescales, row_of,
};
use crate::concept::mask::Visible;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::simt::*;
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
    let p = &work.p.attention;
    let scale = ScoreScale::new(p.scale, p.softcap);
    let visible = [0, 1].map(|half| work.row(row_of(half)).visible);
    // Keys that all rows of the warp see.
    let seen = visible[0].end.min(visible[1].end);
    let mut states: States<1> = [[SoftmaxState::EMPTY; 2]];
    let mut ring = Ring::START;
    named_barrier_sync(QUERIES, MULTIPLYING);
    for tile in Rolled(work.tiles.clone(), 1) {
        mbarrier_wait(work.barrier(FULL, ring), ring.parity);
        let mut scores = multiply(work, ring);
        scale.adjust(&mut scores);
        hide(&mut scores, tile * KEYS, visible, seen, ring);
        let mut factors = [1.0; 2];
        weigh_and_rescale::<1, 2, N8>(&mut states, &mut scores, scale, |_, half, factor| {
            factors[half] *= factor;
        });
        leave::<T>(work.stage(ring), &scores, factors, ring);
        mbarrier_arrive(work.barrier(WEIGHED, ring));
        ring = ring.next(STAGES);
    }
    let [states] = states.map(|rows| rows.map(total));
    let factors = [0, 1].map(|half| work.close(half, states[half as usize]));
    pass(rescales(STAGES), factors);
    named_barrier_arrive(FACTORS, MULTIPLYING);
}

/// Queries times the stage's keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply<T: MmaElement>(work: &Work<'_, T>, ring: Ring) -> Fragments<1, N8> {
    let (q, k) = (work.base, work.stage(ring));
    wgmma_fence();
    let mut scores: [f32; SCORES] = T::wgmma(descriptor(q, 16), descriptor(k, 16));
    for depth in 1..CHUNKS * 4 {
        let (chunk, within) = (depth / 4, depth % 4 * 32);
        let q = descriptor(q + chunk * QUERY_CHUNK + within, 16);
        let k = descriptor(k + chunk * CHUNK_BYTES + within, 16);
        T::wgmma_add(&mut scores, q, k);
    }
    wgmma_commit();
    wgmma_wait::<0>();
    [core::array::from_fn(|block| core::array::from_fn(|i| scores[4 * block + i]))]
}

/// Hides keys from `begin` on that a row does not see, or that are outside of the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn hide(scores: &mut Fragments<1, N8>, begin: u32, visible: [Visible; 2], seen: u32, ring: Ring) {
    if any_sync(begin + KEYS > seen) {
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
fn leave<T: MmaElement>(
    stage: u32,
    weights: &Fragments<1, N8>,
    factors: [f32; 2],
    ring: Ring,
) {
    let place = stage + WEIGHTS + thread_idx() % WARPGROUP * 16;
    for depth in 0..DEPTHS {
        let operand = pack::<T, N8>(&weights[0], depth as usize);
        st_shared_vec(place + depth * WARPGROUP * 16, operand);
    }
    pass(rescales(ring.stage), factors);
    // P lies where TMA will write next.
    fence_proxy_async();
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
        let is_token = row.s < self.sequence.new && row.is_token();
        let (factor, log_sum_exp) =
            close::<T>(&self.p.attention, is_token, row.head, Global::null(), state);
        let lse = if self.is_split() { self.to.partial_lse } else { self.to.lse };
        if self.exists(r) && lane() % 4 == 0 && !lse.is_null() {
            lse.store(self.index(row), log_sum_exp);
        }
        factor
    }
}
