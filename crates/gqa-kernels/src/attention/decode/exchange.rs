//! Merges the results of a cluster's CTAs through distributed shared memory, and the results of KV
//! splits through global memory.

use super::layout::Heads;
use super::products::Products;
use super::{Decode, MAX_RANKS, Place};
use crate::attention::out::Results;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::{AttentionParams, DecodeParams};
use crate::simt::{
    Global, Rolled, Shared, cluster_arrive, cluster_arrive_relaxed, cluster_wait,
    fence_mbarrier_init, fma, max, mbarrier_arrive_expect, mbarrier_init, mbarrier_wait_cluster,
    peer_address, st_async_vec, st_async_vec2, sync_threads, thread_idx,
};
use crate::tile::copy::UNIT;
use crate::tile::rows::{Row, Rows, close};

/// Bytes of a row's maximum and sum, and of a unit: eight f32 columns of a row.
const STATE_BYTES: u32 = 8;
const UNIT_BYTES: u32 = 32;

/// A CTA's DSMEM reduction buffer: `barrier | states (rank, row) | columns (rank, own unit)`. Unit
/// `u` is column group `u % D8` of row `u / D8`. Each rank owns a range of units and
/// receives the partial results of these units from all ranks.
#[derive(Clone, Copy)]
pub(super) struct ReductionBuffer<const D8: usize> {
    place: Place,
    /// Rows of the tile.
    rows: u32,
    /// Most units that a rank owns.
    each: u32,
    /// 2^32 / `each`, rounded down.
    inverse: u32,
}

impl<const D8: usize> ReductionBuffer<D8> {
    const STATES: u32 = 16;

    /// Bytes for up to `rows` rows.
    pub const fn bytes(rows: u32) -> u32 {
        Self::STATES + MAX_RANKS * rows * STATE_BYTES + (rows * D8 as u32 + MAX_RANKS) * UNIT_BYTES
    }

    /// The buffer of this CTA, rank `place.rank`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(rows: &Rows, place: Place) -> Self {
        let units = rows.count() * D8 as u32;
        let each = units.div_ceil(place.ranks.max(1)).max(1);
        Self { place, rows: rows.count(), each, inverse: u32::MAX / each }
    }

    /// Initialises the buffer's barrier; peers may send only after
    /// [`wait_for_all`](Self::wait_for_all).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn open(self) {
        if thread_idx() == 0 {
            let of_each = self.rows * STATE_BYTES + self.owned() * UNIT_BYTES;
            mbarrier_init(Self::barrier(), 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect(Self::barrier(), self.place.ranks * of_each);
        }
        cluster_arrive_relaxed();
    }

    /// Releases shared memory that this CTA has read until now, so that peers may write into it
    /// after [`wait_for_all`](Self::wait_for_all).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn empty(self) {
        cluster_wait();
        cluster_arrive();
    }

    /// Waits until every buffer of the cluster may be written.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn wait_for_all(self) {
        cluster_wait();
    }

    /// Waits until the partial results of all ranks have arrived.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn wait(self) {
        mbarrier_wait_cluster(Self::barrier(), 0);
    }

    /// Units that this rank owns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn owned(self) -> u32 {
        let units = self.rows * D8 as u32;
        units.saturating_sub(self.place.rank * self.each).min(self.each)
    }

    /// Whether each of `threads` threads has at most one column to sum.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn has_few_units(self, threads: u32) -> bool {
        self.each * UNIT <= threads
    }

    /// Ranks that own units.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn owners(self) -> u32 {
        (self.rows * D8 as u32).div_ceil(self.each)
    }

    /// Row and column of number `i` of the columns that this rank owns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn column(self, i: u32) -> (u32, u32) {
        let unit = self.place.rank * self.each + i / UNIT;
        (unit / D8 as u32, unit % D8 as u32 * UNIT + i % UNIT)
    }

    /// Where the CTA's first thread broadcasts how many splits arrived before this one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn flag() -> Shared<u32> {
        Shared::at(8)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn barrier() -> u32 {
        Shared::<u64>::at(0).address()
    }

    /// Where the state of row `r` from rank `from` arrives.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn state(self, from: u32, r: u32) -> Shared<[f32; 2]> {
        Shared::at(Self::STATES).offset(from * self.rows + r)
    }

    /// Where number `i` of the owner's units arrives from rank `from`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn unit(self, from: u32, i: u32) -> Shared<f32> {
        let units = Self::STATES + self.place.ranks * self.rows.next_multiple_of(2) * STATE_BYTES;
        Shared::at(units).offset((from * self.each + i) * UNIT)
    }

    /// Sends a state to rank `to`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn send_state(self, to: u32, r: u32, state: SoftmaxState) {
        let values = [state.max.to_bits(), state.sum.to_bits()];
        let place = peer_address(self.state(self.place.rank, r).address(), to);
        st_async_vec2(place, values, peer_address(Self::barrier(), to));
    }

    /// Sends half a unit to its owner.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn send_half(self, half: u32, columns: [f32; 4]) {
        let unit = half / 2;
        // Division by `each`; exact for so few units, and cheaper than a division.
        let to = (((u64::from(unit) + 1) * u64::from(self.inverse)) >> 32) as u32;
        let place = self.unit(self.place.rank, unit - to * self.each).offset(half % 2 * UNIT / 2);
        let barrier = peer_address(Self::barrier(), to);
        st_async_vec(peer_address(place.address(), to), columns.map(f32::to_bits), barrier);
    }
}

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    /// Threads that merge a row of the CTA's partial results.
    const ACROSS: u32 = Self::THREADS / Self::ROWS;
    pub(super) const REDUCTION_BYTES: u32 = ReductionBuffer::<D8>::bytes(Self::ROWS)
        .next_multiple_of(if P::IN_CHUNKS { 1024 } else { 128 });

    /// Sends this CTA's partial results to their owners.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn send(rows: &Rows, buffer: ReductionBuffer<D8>) {
        if Self::REDUCES_OVER_QUERIES {
            buffer.empty();
        }
        buffer.wait_for_all();
        let (owners, halves) = (buffer.owners(), 2 * D8 as u32);
        let (r, first) = (thread_idx() / Self::ACROSS, thread_idx() % Self::ACROSS);
        if r < rows.count() {
            let (state, weights) = Self::merge_states(r);
            for to in Rolled(first..owners, Self::ACROSS) {
                buffer.send_state(to, r, state);
            }
            for half in Rolled(first..halves, Self::ACROSS) {
                let columns = Self::merge_columns(r, half * UNIT / 2, &weights);
                buffer.send_half(r * halves + half, columns);
            }
        }
    }

    /// Writes the result of a CTA that has no peers, or stores it for the last split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn finish_alone<T: MmaElement>(
        p: &DecodeParams,
        rows: &Rows,
        place: Place,
        output: Output<T>,
        splits: Splits,
    ) {
        let (r, first) = (thread_idx() / Self::ACROSS, thread_idx() % Self::ACROSS);
        if r < rows.count() {
            let (state, weights) = Self::merge_states(r);
            let row = rows.row(r);
            for unit in Rolled(first..D8 as u32, Self::ACROSS) {
                let column = unit * UNIT;
                if H::is_padding(&p.attention, column) {
                    break;
                }
                let [low, high] =
                    [0, UNIT / 2].map(|half| Self::merge_columns(r, column + half, &weights));
                let [a, b, c, d] = low;
                let [e, f, g, h] = high;
                let sums = [a, b, c, d, e, f, g, h];
                if place.splits <= 1 {
                    output.write(&p.attention, rows, row, column, state, sums);
                } else {
                    splits.leave(p, place, r, column, sums);
                    if column == 0 {
                        splits.leave_state(p, place, r, state);
                    }
                }
            }
        }
    }

    /// Finishes where the CTA has peers or splits: sums `N` columns at a time and writes them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn finish<T: MmaElement, const N: usize>(
        p: &DecodeParams,
        rows: &Rows,
        buffer: ReductionBuffer<D8>,
        output: Output<T>,
        splits: Splits,
    ) {
        if buffer.place.ranks > 1 {
            Self::finish_received::<T, N>(p, rows, buffer, output, splits);
        }
        if buffer.place.splits > 1 {
            Self::finish_splits::<T, N>(p, rows, buffer, output, splits);
        }
    }

    /// Waits for the peers' partial results, sums them, and writes the owned columns or stores them
    /// for the last split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish_received<T: MmaElement, const N: usize>(
        p: &DecodeParams,
        rows: &Rows,
        buffer: ReductionBuffer<D8>,
        output: Output<T>,
        splits: Splits,
    ) {
        let place = buffer.place;
        for i in Self::owned::<N>(buffer) {
            let (r, column) = buffer.column(i);
            let row = rows.row(r);
            buffer.wait();
            if H::is_padding(&p.attention, column) {
                continue;
            }
            let (state, sums) = buffer.sum::<N>(r, i);
            if place.splits <= 1 {
                output.write(&p.attention, rows, row, column, state, sums);
            } else {
                splits.leave(p, place, r, column, sums);
                if i == 0 || column == 0 {
                    splits.leave_state(p, place, r, state);
                }
            }
        }
    }

    /// In the CTA that arrives last, sums what all splits stored and writes the owned columns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish_splits<T: MmaElement, const N: usize>(
        p: &DecodeParams,
        rows: &Rows,
        buffer: ReductionBuffer<D8>,
        output: Output<T>,
        splits: Splits,
    ) {
        if buffer.owned() > 0 && splits.arrive_last(buffer.place, ReductionBuffer::<D8>::flag()) {
            for i in Self::owned::<N>(buffer) {
                let (r, column) = buffer.column(i);
                let row = rows.row(r);
                if H::is_padding(&p.attention, column) {
                    continue;
                }
                let (state, sums) = splits.sum::<N>(p, buffer.place, r, column);
                output.write(&p.attention, rows, row, column, state, sums);
            }
        }
    }

    /// First columns of this thread's groups of `N` among the owned columns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn owned<const N: usize>(buffer: ReductionBuffer<D8>) -> Rolled {
        Rolled(thread_idx() * N as u32..buffer.owned() * UNIT, Self::THREADS * N as u32)
    }
}

/// Output tensors.
#[derive(Clone, Copy)]
pub(super) struct Output<T> {
    pub head_sink: Global<T>,
    pub results: Results<T>,
    pub lse: Global<f32>,
    /// Number of packed tokens where lse is (query head, token); 0 where it is (batch, query head,
    /// S).
    pub tokens: u32,
}

impl<T: MmaElement> Output<T> {
    /// Normalises and writes one or eight columns of a row; with the first columns also the
    /// log-sum-exp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write<const N: usize>(
        self,
        a: &AttentionParams,
        rows: &Rows,
        row: Row,
        column: u32,
        state: SoftmaxState,
        sums: [f32; N],
    ) {
        let (factor, log_sum_exp) = close(a, row.is_token(), row.head, self.head_sink, state);
        let scaled = self.results.scaled(factor);
        let sums = sums.map(|sum| if factor == 0.0 { 0.0 } else { sum * scaled });
        let to = a.out.at(rows.batch, row.head, rows.start + row.s) + column as usize;
        self.results.store(to, sums);
        if column == 0 && !self.lse.is_null() {
            self.lse.store(self.index_of_lse(a, rows, row), log_sum_exp);
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn index_of_lse(self, a: &AttentionParams, rows: &Rows, row: Row) -> usize {
        match self.tokens {
            0 => rows.index(a, row),
            tokens => row.head as usize * tokens as usize + (rows.start + row.s) as usize,
        }
    }
}

/// Scratch memory of the KV splits: partial columns (split, cluster, row, head size), partial
/// states (split, cluster, rank, row), arrival counters (cluster, rank). Where lengths divide the
/// keys a part stands in place of split and cluster, and the counter is that of a sequence's first
/// part.
#[derive(Clone, Copy)]
pub(super) struct Splits {
    pub columns: Global<f32>,
    pub states: Global<[f32; 2]>,
    pub arrivals: Global<u32>,
}

impl Splits {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn column_of(p: &DecodeParams, place: Place, split: u32, r: u32, column: u32) -> usize {
        let row = place.number(split) as usize * p.rows as usize + r as usize;
        row * p.attention.head_size as usize + column as usize
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn state_of(p: &DecodeParams, place: Place, split: u32, r: u32) -> usize {
        let owner = place.number(split) * place.ranks + place.rank;
        owner as usize * p.rows as usize + r as usize
    }

    /// Stores one or eight columns of this split.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave<const N: usize>(
        self,
        p: &DecodeParams,
        place: Place,
        r: u32,
        column: u32,
        sums: [f32; N],
    ) {
        let to = Self::column_of(p, place, place.split, r, column);
        if let Some([a, b, c, d, e, f, g, h]) = sums.map(f32::to_bits).first_chunk() {
            self.columns.store_vec(to, [*a, *b, *c, *d]);
            self.columns.store_vec(to + UNIT as usize / 2, [*e, *f, *g, *h]);
        } else {
            self.columns.store(to, sums[0]);
        }
    }

    /// Stores the state of a row of this split; the thread with the rank's first column of the row
    /// calls it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn leave_state(self, p: &DecodeParams, place: Place, r: u32, state: SoftmaxState) {
        self.states.store(Self::state_of(p, place, place.split, r), [state.max, state.sum]);
    }

    /// Counts this CTA's arrival among the splits that own the same columns. Returns true in the
    /// last CTA, which then sees what all splits stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn arrive_last(self, place: Place, flag: Shared<u32>) -> bool {
        sync_threads();
        if thread_idx() == 0 {
            let owner = (place.index * place.ranks + place.rank) as usize;
            flag.store(0, self.arrivals.atomic_inc_acq_rel(owner, place.splits - 1));
        }
        sync_threads();
        flag.load(0) == place.splits - 1
    }

    /// The row's state over all splits, and the sums of the columns from `column` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum<const N: usize>(
        self,
        p: &DecodeParams,
        place: Place,
        r: u32,
        column: u32,
    ) -> (SoftmaxState, [f32; N]) {
        sum_of(place.splits, |split| {
            let state = self.states.load(Self::state_of(p, place, split, r));
            let from = Self::column_of(p, place, split, r, column);
            let vector = |i| self.columns.load_vec(from + i as usize);
            (state, side_by_side(|i| self.columns.load(from + i as usize), vector))
        })
    }
}

impl<const D8: usize> ReductionBuffer<D8> {
    /// The row's state over all ranks, and the sums of the owned columns from `i` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum<const N: usize>(self, r: u32, i: u32) -> (SoftmaxState, [f32; N]) {
        sum_of(self.place.ranks, |from| {
            let columns = self.unit(from, i / UNIT).offset(i % UNIT);
            (
                self.state(from, r).load(0),
                side_by_side(|i| columns.load(i), |i| columns.load_vec(i)),
            )
        })
    }
}

/// One value, or eight as two vectors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn side_by_side<const N: usize>(
    value: impl Fn(u32) -> f32,
    vector: impl Fn(u32) -> [u32; 4],
) -> [f32; N] {
    let mut values = [0.0; N];
    if N == 1 {
        values[0] = value(0);
    } else {
        for half in 0..N / 4 {
            let words = vector(4 * half as u32);
            for i in 0..4 {
                values[4 * half + i] = f32::from_bits(words[i]);
            }
        }
    }
    values
}

/// The merged state of a row over `count` partial results, and the sums of `N` columns. Eight
/// results are loaded before the first is used.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum_of<const N: usize>(
    count: u32,
    result: impl Fn(u32) -> ([f32; 2], [f32; N]),
) -> (SoftmaxState, [f32; N]) {
    const AT_A_TIME: usize = 8;
    let (mut state, mut sums) = (SoftmaxState::EMPTY, [0.0; N]);
    for first in Rolled(0..count, AT_A_TIME as u32) {
        let results: [_; AT_A_TIME] = core::array::from_fn(|i| {
            let index = first + i as u32;
            if index < count { result(index) } else { ([f32::NEG_INFINITY, 0.0], [0.0; N]) }
        });
        let mut largest = f32::NEG_INFINITY;
        for i in 0..AT_A_TIME {
            largest = max(largest, results[i].0[0]);
        }
        let rescale = state.raise(largest);
        sums = sums.map(|sum| sum * rescale);
        for i in 0..AT_A_TIME {
            let ([largest, part], columns) = results[i];
            let weight = state.weight(largest);
            state.sum = fma(weight, part, state.sum);
            for j in 0..N {
                sums[j] = fma(weight, columns[j], sums[j]);
            }
        }
    }
    (state, sums)
}
