//! The merge: each rank sends the output of every row to the rank that merges it, through
//! distributed shared memory, and merges its own rows.

use super::cache::Operands;
use super::layout::{KEYS, Layout, Memory, PART};
use super::softmax::{leave_sums, meet, output, state};
use super::work::Work;
use crate::attention::out::Results;
use crate::concept::scales::ScalesPer;
use crate::concept::softmax::SoftmaxState;
use crate::num::{MmaElement, quotient};
use crate::params::DecodeParams;
use crate::simt::*;
use crate::tile::copy::UNIT;
use crate::tile::rows::close;

/// What a CTA writes, and reads for that.
#[derive(Clone, Copy)]
pub(super) struct Output<T> {
    pub(super) head_sink: Global<T>,
    pub(super) v_scale: Global<f32>,
    pub(super) results: Results<T>,
    /// (batch, query head, row), or over a paged KV cache (query head, token); or null.
    pub(super) lse: Global<f32>,
    /// Tokens of all sequences, where they are packed.
    pub(super) tokens: u32,
}

/// Expects what the ranks with keys will send. By one thread.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn expect<const HEAD: u32>(layout: Layout, work: &Work) {
    let own = work.own_rows();
    mbarrier_arrive_expect(layout.arrived(), work.active * (own.end - own.start) * (HEAD * 4 + 8));
}

/// Sends the results of this rank, once its last product is complete. By all softmax threads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn send<C: Operands, const HEAD: u32>(
    layout: Layout,
    memory: Memory,
    reference: f32,
    work: &Work,
) {
    let (thread, count) = (thread_idx(), work.rows.count());
    mbarrier_wait(layout.added(), (work.tiles - 1) % 2);
    tcgen05_fence_after();
    leave_sums(layout, memory);
    meet();
    if thread < count {
        let SoftmaxState { max, sum } = state(layout, thread, reference);
        let to = quotient(thread, work.merged);
        let row = thread - to * work.merged;
        let at = layout.states() + 8 * (work.rank * work.merged + row);
        let values = [max.to_bits(), sum.to_bits()];
        st_async_vec2(peer_address(at, to), values, peer_address(layout.arrived(), to));
    }
    let (column, sends) = match HEAD {
        KEYS => (thread, true),
        _ => (thread / 32 * 16 + thread % 16, thread % 32 < 16),
    };
    let own = layout.received + 4 * (work.rank * work.merged * HEAD + column);
    // The rank that merges the row, and the row's number there.
    let (mut to, mut nth) = (0, 0);
    for part in Rolled(0..layout.rows / PART, 1) {
        let values = output::<C, HEAD>(memory, part);
        let mut i = 0;
        while i < PART as usize {
            if PART * part + (i as u32) < count {
                if sends {
                    let at = peer_address(own + 4 * nth * HEAD, to);
                    st_async(at, values[i].to_bits(), peer_address(layout.arrived(), to));
                }
                nth += 1;
                if nth == work.merged {
                    (to, nth) = (to + 1, 0);
                }
            }
            i += 1;
        }
    }
}

/// Merges the rows of this rank, once all have arrived. A thread has eight columns of a row at a
/// time. By all softmax threads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn run<T: MmaElement, const HEAD: u32>(
    layout: Layout,
    to: Output<T>,
    work: &Work,
    p: &DecodeParams,
) {
    let own = work.own_rows();
    if own.is_empty() {
        return;
    }
    if work.active > 0 {
        mbarrier_wait_cluster(layout.arrived(), 0);
    }
    for i in Rolled(thread_idx()..(own.end - own.start) * (HEAD / UNIT), KEYS) {
        let (nth, column) = (i / (HEAD / UNIT), i % (HEAD / UNIT) * UNIT);
        merge::<T, HEAD>(layout, to, work, p, [own.start + nth, nth, column]);
    }
}

/// Merges eight columns of a row, which has number `nth` here.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn merge<T: MmaElement, const HEAD: u32>(
    layout: Layout,
    to: Output<T>,
    work: &Work,
    p: &DecodeParams,
    [row, nth, column]: [u32; 3],
) {
    let a = &p.attention;
    let of = |rank: u32| {
        let [max, sum] = ld_shared(layout.states() + 8 * (rank * work.merged + nth));
        SoftmaxState { max, sum }
    };
    let mut state = SoftmaxState::EMPTY;
    for rank in Rolled(0..work.active, 1) {
        state.max = max(state.max, of(rank).max);
    }
    let mut values = [0.0; UNIT as usize];
    for rank in Rolled(0..work.active, 1) {
        let part = of(rank);
        let factor = state.weight(part.max);
        state.sum = fma(part.sum, factor, state.sum);
        let at = layout.received + 4 * ((rank * work.merged + nth) * HEAD + column);
        let mut half = 0;
        while half < 2 {
            let four = ld_shared_vec(at + 16 * half as u32);
            let mut i = 0;
            while i < 4 {
                let value = &mut values[4 * half + i];
                *value = fma(f32::from_bits(four[i]), factor, *value);
                i += 1;
            }
            half += 1;
        }
    }
    let place = work.rows.row(row);
    let (factor, lse) = close(a, place.is_token(), place.head, to.head_sink, state);
    let factor = to.results.scaled(factor);
    if !to.lse.is_null() && column == 0 {
        let index = match to.tokens {
            0 => work.rows.index(a, place),
            tokens => (place.head * tokens + work.rows.start + place.s) as usize,
        };
        to.lse.store(index, lse);
    }
    if column >= a.head_size {
        return;
    }
    let per = ScalesPer::new(p.scales);
    let mut i = 0;
    while i < values.len() {
        let scale = match to.v_scale.is_null() {
            true => 1.0,
            false => {
                let channel = column + i as u32;
                to.v_scale.load(per.number(work.rows.kv_head, a.head_size, channel))
            }
        };
        values[i] *= factor * scale;
        i += 1;
    }
    let token = work.rows.start + place.s;
    let at = a.out.at(work.rows.batch, place.head, token);
    to.results.store(at + column as usize, values);
}
