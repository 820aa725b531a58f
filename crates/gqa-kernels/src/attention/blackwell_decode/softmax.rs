//! Softmax over keys: a thread for each key of a tile, with the scores of all query rows. The first
//! threads also own a query row each: its reference, which is subtracted from its scores.

use super::cache::{Operands, Part};
use super::layout::{CHUNK, KEYS, Layout, Memory, PART, WARPS};
use super::loads::Pages;
use super::work::Work;
use crate::concept::mask::Visible;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::ring::Ring;

/// Weights are at most 2 to this power: a reference rises where one would exceed it.
const MOST: f32 = 8.0;
/// A reference that rises is this much below the greatest score.
const BELOW: f32 = 4.0;
/// Named barrier of the softmax warps.
const BARRIER: u32 = 1;
const NOTHING: Visible = Visible { first: 0, end: 0 };
const COUNT: usize = PART as usize;

/// Waits for all softmax threads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn meet() {
    named_barrier_sync(BARRIER, KEYS);
}

/// What the products of a row are multiplied by, so that scores are in powers of two; with a
/// softcap what its tanh takes, twice.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn scale(p: &AttentionParams) -> f32 {
    if p.softcap > 0.0 { 2.0 * LOG2_E * p.scale / p.softcap } else { p.scale * LOG2_E }
}

/// The values of a part's rows, which lie in shared memory one behind the other.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn of_rows(address: u32) -> Part {
    let mut values = [0.0; COUNT];
    let mut i = 0;
    while i < COUNT {
        let four = ld_shared_vec(address + 4 * i as u32);
        let mut j = 0;
        while j < 4 {
            values[i + j] = f32::from_bits(four[j]);
            j += 1;
        }
        i += 4;
    }
    values
}

/// A part of a row of tensor memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn load(address: u32) -> Part {
    let loaded = tcgen05_ld_32x32b::<COUNT>(address);
    tcgen05_wait_ld();
    loaded.registers().map(f32::from_bits)
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store(address: u32, values: Part) {
    tcgen05_st_32x32b(address, values.map(f32::to_bits));
}

/// For each of 16 rows the result over the 32 lanes, in lanes `2 row` and `2 row + 1`: lanes
/// exchange half of the rows that they still have.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_lanes(mut values: Part, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = COUNT / 2;
    while width > 0 {
        let is_upper = lane() & (2 * width as u32) != 0;
        let mut i = 0;
        while i < width {
            let (low, high) = (values[i], values[i + width]);
            let (kept, given) = if is_upper { (high, low) } else { (low, high) };
            values[i] = join(kept, shfl_xor_f32(given, 2 * width as u32));
            i += 1;
        }
        width /= 2;
    }
    join(values[0], shfl_xor_f32(values[0], 1))
}

/// Leaves a warp's result for each row of a part in shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn leave(layout: Layout, part: u32, value: f32) {
    if lane().is_multiple_of(2) {
        st_shared(layout.top(warp(), PART * part + lane() / 2), value);
    }
}

/// What the four warps left for a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn left(layout: Layout, row: u32) -> [f32; WARPS as usize] {
    core::array::from_fn(|warp| ld_shared(layout.top(warp as u32, row)))
}

/// A tile's scores, key by key.
#[derive(Clone, Copy)]
struct Tile {
    /// The scores in tensor memory.
    scores: u32,
    /// The thread's key.
    key: u32,
    /// Whether no row sees it.
    is_hidden: bool,
    /// Whether some row does not see all keys of the tile.
    is_partial: bool,
}

impl Tile {
    /// The key's scores of a part.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores(self, layout: Layout, part: u32, p: &AttentionParams) -> Part {
        let row = PART * part;
        let mut s = load(self.scores + row);
        let scales = of_rows(layout.scale(row));
        let mut i = 0;
        while i < COUNT {
            s[i] *= scales[i];
            if p.softcap > 0.0 {
                // tanh(x) = 1 - 2 / (1 + e^(2x))
                let cap = p.softcap * LOG2_E;
                s[i] = fma(-2.0 * cap, rcp(1.0 + exp2(s[i])), cap);
            }
            i += 1;
        }
        if self.is_partial {
            let mut i = 0;
            while i < COUNT {
                let [first, end] = ld_shared::<[u32; 2]>(layout.bounds(row + i as u32));
                if self.is_hidden || self.key < first || self.key >= end {
                    s[i] = f32::NEG_INFINITY;
                }
                i += 1;
            }
        }
        s
    }
}

/// The reference that scores are relative to; without one 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn finite(reference: f32) -> f32 {
    if reference == f32::NEG_INFINITY { 0.0 } else { reference }
}

/// Raises the row's reference where its greatest score in the tile asks for it, and leaves it and
/// the factor of what was added before. Returns whether it has risen behind a finite one.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn raise(layout: Layout, row: u32, reference: &mut f32) -> bool {
    let [a, b, c, d] = left(layout, row);
    let (top, old) = (max(max(a, b), max(c, d)), *reference);
    if top > old + MOST {
        *reference = top - BELOW;
    }
    // Without a score so far, all weights were 0.
    let rises = *reference > old && old > f32::NEG_INFINITY;
    st_shared(layout.reference(row), finite(*reference));
    st_shared(layout.factor(row), if rises { exp2(old - *reference) } else { 1.0 });
    rises
}

/// Multiplies sums and output by the rows' factors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn rescale<C: Operands>(layout: Layout, memory: Memory) {
    for part in Rolled(0..layout.rows / PART, 1) {
        let factors = of_rows(layout.factor(PART * part));
        let scaled = |address: u32| {
            let mut values = load(address + PART * part);
            let mut i = 0;
            while i < COUNT {
                values[i] *= factors[i];
                i += 1;
            }
            store(address + PART * part, values);
        };
        scaled(memory.sums());
        for term in 0..C::TERMS {
            scaled(memory.output(term));
        }
    }
    tcgen05_wait_st();
}

/// Clears the thread's row of the values, which may hold anything, NaN included: 0 · NaN is NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn clear(values: u32, bytes: u32) {
    for unit in 0..bytes / 16 {
        st_shared_vec(values + unit / 8 * CHUNK + thread_idx() * 128 + unit % 8 * 16, [0; 4]);
    }
}

/// Leaves the keys that each row sees; past the last row none.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn leave_bounds(layout: Layout, work: &Work) {
    let row = thread_idx();
    if row < layout.rows {
        let seen = if row < work.rows.count() { work.rows.row(row).visible } else { NOTHING };
        st_shared(layout.bounds(row), [seen.first, seen.end]);
    }
}

/// Goes through the CTA's tiles. Returns the reference of the row that the thread owns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<C: Operands, T: MmaElement, const HEAD: u32, const PAGED: bool>(
    layout: Layout,
    memory: Memory,
    pages: Pages,
    work: &Work,
    p: &AttentionParams,
) -> f32 {
    let thread = thread_idx();
    let parts = layout.rows / PART;
    let mut reference = f32::NEG_INFINITY;
    let mut ring = Ring::START;
    for i in Rolled(0..work.tiles, 1) {
        let begin = work.begin + i * KEYS;
        let key = begin + thread;
        let is_unseen = key < work.span.some.first || key >= work.span.some.end;
        let is_hidden = is_unseen || pages.lacks::<PAGED>(key, work);
        let is_partial = any_sync(is_hidden) || work.span.is_partial(begin, KEYS);
        let tile = Tile { scores: memory.scores(i % 2), key, is_hidden, is_partial };
        mbarrier_wait(layout.scored(i % 2), i / 2 % 2);
        tcgen05_fence_after();
        for part in Rolled(0..parts, 1) {
            leave(layout, part, over_lanes(tile.scores(layout, part, p), max));
        }
        meet();
        let rises = thread < layout.rows && raise(layout, thread, &mut reference);
        let has_risen = any_sync(rises);
        if lane() == 0 {
            st_shared(layout.risen() + 4 * warp(), has_risen as u32);
        }
        meet();
        // The product before this one reads P, and adds to the output.
        if i > 0 {
            mbarrier_wait(layout.added(), (i - 1) % 2);
            tcgen05_fence_after();
            let [a, b, c, d] = ld_shared_vec(layout.risen());
            if a | b | c | d != 0 {
                rescale::<C>(layout, memory);
            }
        }
        for part in Rolled(0..parts, 1) {
            let references = of_rows(layout.reference(PART * part));
            let mut weights = tile.scores(layout, part, p);
            let mut j = 0;
            while j < COUNT {
                weights[j] = exp2(weights[j] - references[j]);
                j += 1;
            }
            C::weigh::<T>(&weights, thread, part, layout);
            let at = memory.sums() + PART * part;
            if i > 0 {
                let sums = load(at);
                let mut j = 0;
                while j < COUNT {
                    weights[j] += sums[j];
                    j += 1;
                }
            }
            store(at, weights);
        }
        if any_sync(is_unseen) {
            mbarrier_wait(layout.values_full(ring.stage), ring.parity);
            if is_unseen {
                clear(layout.values(ring.stage), HEAD * C::BYTES);
            }
        }
        ring = ring.next(layout.stages);
        tcgen05_wait_st();
        fence_proxy_async();
        tcgen05_fence_before();
        mbarrier_arrive(layout.weighed());
    }
    reference
}

/// Leaves the sums of all rows in shared memory; [`sum`] gives them.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn leave_sums(layout: Layout, memory: Memory) {
    for part in Rolled(0..layout.rows / PART, 1) {
        leave(layout, part, over_lanes(load(memory.sums() + PART * part), |a, b| a + b));
    }
}

/// Reference and sum of a row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn state(layout: Layout, row: u32, reference: f32) -> SoftmaxState {
    let [a, b, c, d] = left(layout, row);
    SoftmaxState { max: reference, sum: (a + b) + (c + d) }
}

/// The thread's column of the output for a part's rows, the terms of P together. Of heads of 64
/// each half of the lanes has the output of half of the keys.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn output<C: Operands, const HEAD: u32>(memory: Memory, part: u32) -> Part {
    let mut output = load(memory.output(0) + PART * part);
    let mut factor = 1.0;
    for term in 1..C::TERMS {
        factor /= 16.0;
        let more = load(memory.output(term) + PART * part);
        let mut i = 0;
        while i < COUNT {
            output[i] = fma(more[i], factor, output[i]);
            i += 1;
        }
    }
    if HEAD < KEYS {
        let mut i = 0;
        while i < COUNT {
            output[i] += shfl_xor_f32(output[i], 16);
            i += 1;
        }
    }
    output
}
