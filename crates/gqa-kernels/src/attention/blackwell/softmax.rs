//! A softmax warpgroup: each thread turns the scores of one row of the tile into P.

use super::Pointers;
use super::cache::Cache;
use super::layout::{KEYS, TILE, Tile, of_tile, scores};
use super::work::Work;
use crate::concept::mask::Visible;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::{AttentionParams, sink};
use crate::simt::*;

/// Lazy-rescale threshold: P may reach 2 to this power before the row maximum is raised.
pub(super) const LIMIT: f32 = 8.0;

/// Scores of a row.
type Scores = [f32; KEYS as usize];

/// Loads the row's scores.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load(row: u32) -> Scores {
    let (low, high) = (tcgen05_ld_32x32b::<64>(row), tcgen05_ld_32x32b::<64>(row + 64));
    tcgen05_wait_ld();
    let (low, high) = (low.registers(), high.registers());
    let mut s = [0.0; KEYS as usize];
    let mut i = 0;
    while i < 64 {
        s[i] = f32::from_bits(low[i]);
        s[64 + i] = f32::from_bits(high[i]);
        i += 1;
    }
    s
}

/// Soft-capping: scores become `softcap · tanh(score · scale / softcap)`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn cap(s: &mut Scores, p: &AttentionParams) {
    let inner = 2.0 * LOG2_E * p.scale / p.softcap;
    let mut i = 0;
    while i < s.len() {
        // tanh(x) = 1 - 2 / (1 + e^(2x))
        s[i] = fma(-2.0 * p.softcap, rcp(1.0 + exp2(s[i] * inner)), p.softcap);
        i += 1;
    }
}

/// Sets the scores of keys that the row does not see to -inf. The first score is that of key `key`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn hide(s: &mut Scores, seen: Visible, key: u32) {
    let (first, end) = (seen.first as i32 - key as i32, seen.end as i32 - key as i32);
    let mut i = 0;
    while i < s.len() {
        if (i as i32) < first || i as i32 >= end {
            s[i] = f32::NEG_INFINITY;
        }
        i += 1;
    }
}

/// The greatest score.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn greatest(s: &Scores) -> f32 {
    // Four independent chains.
    let mut tops = [f32::NEG_INFINITY; 4];
    let mut i = 0;
    while i < s.len() {
        tops[i % 4] = max(tops[i % 4], s[i]);
        i += 1;
    }
    max(max(tops[0], tops[1]), max(tops[2], tops[3]))
}

/// Raises the row maximum to `top` if P would exceed the threshold; returns the rescale factor of
/// the output so far.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn raise(state: &mut SoftmaxState, top: f32) -> f32 {
    let old = state.max;
    if top - old <= LIMIT {
        return 1.0;
    }
    let factor = state.raise(top);
    // Before the first visible key P is 0: nothing to rescale.
    if old == f32::NEG_INFINITY { 1.0 } else { factor }
}

/// Stores P of the row; returns its sum.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weigh<T: MmaElement>(s: &Scores, state: &SoftmaxState, scale: f32, row: u32) -> f32 {
    let mut sums = [0.0; 4];
    let mut part = 0;
    while part < 4 {
        let mut weights = [0; 16];
        let mut i = 0;
        while i < 16 {
            let at = 32 * part + 2 * i;
            let low = state.scaled_weight(s[at], scale);
            let high = state.scaled_weight(s[at + 1], scale);
            sums[i % 2] += low;
            sums[2 + i % 2] += high;
            weights[i] = T::pack(low, high);
            i += 1;
        }
        tcgen05_st_32x32b(row + 16 * part as u32, weights);
        part += 1;
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// The natural logarithm of the denominator, and the factor that normalises the output. The sink is
/// joined by rows that see keys, even where all of them lie outside of the cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn finish<T: MmaElement>(
    mut state: SoftmaxState,
    sees: bool,
    head: u32,
    to: Pointers<T>,
    p: &AttentionParams,
) -> [f32; 2] {
    let mut factor = 1.0;
    if p.sink != sink::NONE && sees {
        let logit =
            if p.sink == sink::PER_HEAD { to.head_sink.load(head as usize).to_f32() } else { 0.0 };
        factor = state.join_sink(logit * LOG2_E);
    }
    [state.log_sum_exp(), factor * state.normaliser()]
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<S: Tile, C: Cache, T: MmaElement>(
    base: u32,
    memory: u32,
    tile: u32,
    cache: C,
    work: &Work,
    to: Pointers<T>,
    p: &AttentionParams,
) {
    let row = thread_idx() % TILE;
    let at = scores(memory, tile) + ((warp() % 4) << 21);
    let seen = work.visible(tile * TILE + row, p);
    let scale = if p.softcap > 0.0 { LOG2_E } else { p.scale * LOG2_E };
    let has_gaps = cache.has_gaps(work, p);
    let mut state = SoftmaxState::EMPTY;
    let count = work.keys.end - work.keys.start;
    for i in Rolled(0..count, 1) {
        let parity = i % 2;
        mbarrier_wait(of_tile(base, S::SCORED, tile), parity);
        tcgen05_fence_after();
        let mut s = load(at);
        if p.softcap > 0.0 {
            cap(&mut s, p);
        }
        let key = (work.keys.end - 1 - i) * KEYS;
        // A vote, so that the condition is warp-uniform.
        if any_sync(key < seen.first || key + KEYS > seen.end) {
            hide(&mut s, seen, key);
        }
        if has_gaps {
            cache.hide_gaps(&mut s, key, work);
        }
        let old = raise(&mut state, greatest(&s) * scale);
        if i > 0 {
            // Correction has read the factor before.
            mbarrier_wait(of_tile(base, S::CORRECTED, tile), parity ^ 1);
            st_shared(S::factor(base, tile, row), old);
            mbarrier_arrive(of_tile(base, S::TOLD, tile));
        }
        state.sum += weigh::<T>(&s, &state, scale, at);
        tcgen05_wait_st();
        tcgen05_fence_before();
        mbarrier_arrive(of_tile(base, S::WEIGHED, tile));
    }
    let work = &Work::load(base + S::WORK);
    let [lse, normaliser] = finish(state, seen.first < seen.end, work.head, to, p);
    mbarrier_wait(of_tile(base, S::CORRECTED, tile), (count - 1) % 2);
    st_shared(S::factor(base, tile, row), normaliser);
    mbarrier_arrive(of_tile(base, S::TOLD, tile));
    if !to.lse.is_null()
        && let Some(index) = work.lse(tile * TILE + row, p)
    {
        to.lse.store(index, lse);
    }
}
