//! A consumer warpgroup: 64 rows of every work tile of the block.

mod again;
mod products;
mod steps;

pub(super) use steps::Steps;

use super::float8::Scales;
use super::mask::Mask;
use super::output::{Destination, Output};
use super::pages::Pages;
use super::ring::Ring;
use super::rotate::Rotation;
use super::scales::{CacheScales, TileRows};
use super::shape::{Tile, WARPGROUP, WARPGROUP_ROWS};
use super::softmax::{Raised, RowPair, Softmax, exp2_bits, scale};
use super::work::{KeyTiles, Place, Slot};
use crate::attention::out::{OutElement, Quantized};
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::{MmaElement, e4m3};
use crate::params::AttentionParams;
use crate::simt::*;
use core::marker::PhantomData;

/// Of tiles of which nobody has asked whether they have arrived.
const UNKNOWN: [u32; 2] = [0; 2];
/// Named barrier: all consumers have cleared their share of a V tile. Barrier 1 + w is warpgroup
/// w's turn.
const CLEARED: u32 = 8;

/// What is not a tensor map.
#[derive(Clone, Copy)]
pub(super) struct Pointers<T> {
    pub(super) mask: Option<Mask<T>>,
    /// Of queries that are not rotated yet.
    pub(super) rotation: Option<Rotation<T>>,
    /// Of sequences in a paged KV cache.
    pub(super) pages: Option<Pages>,
    /// Of e4m3.
    pub(super) scales: Option<Scales>,
    pub(super) head_sink: Global<T>,
    pub(super) to: Destination<T>,
}

/// A consumer warpgroup, which multiplies operands of type `P`, over a cache with scales `K`: `C`
/// score, `W` packed weight and `O` output registers per thread.
pub(super) struct Consumer<'a, T, P: Steps, S, K, const C: usize, const W: usize, const O: usize> {
    p: &'a AttentionParams,
    base: u32,
    warpgroup: u32,
    pointers: Pointers<T>,
    softmax: Softmax<'a>,
    scales: K,
    /// The Q tile in use; before the first, the last of the ring.
    q: Ring,
    /// The next K or V tile.
    kv: Ring,
    /// Whether that tile and the one behind are known to have arrived, where consumers
    /// [ask ahead](Tile::ASKS_AHEAD). Steps over edges look at it, too: else the assembler keeps
    /// the ring's position in registers that are not uniform.
    arrived: [u32; 2],
    /// The next tile of the mask.
    mask: Ring,
    /// Work tiles begun.
    works: u32,
    shape: PhantomData<(P, S)>,
}

/// Where a consumer is: the key tile whose weights it holds, and those still to come.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    slot: Slot,
    keys: KeyTiles,
    tile: u32,
    /// Where the tiles end of which all rows see all keys.
    bottom: u32,
}

/// What a consumer thread carries from key tile to key tile.
pub(super) struct State<const W: usize, const O: usize> {
    o: [f32; O],
    weights: [u32; W],
    rows: RowPair,
    /// The output has begun: it is not what another work tile left.
    begun: bool,
}

impl<
    'a,
    T: MmaElement,
    P: Steps,
    S: Tile,
    K: CacheScales,
    const C: usize,
    const W: usize,
    const O: usize,
> Consumer<'a, T, P, S, K, C, W, O>
{
    const BLOCK: u32 = S::WARPGROUPS * WARPGROUP;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(base: u32, p: &'a AttentionParams, pointers: Pointers<T>, scales: K) -> Self {
        // Shuffled, so that the compiler sees that a warp's lanes agree, and keeps what follows in
        // uniform registers.
        let warpgroup = shfl_idx_u32(thread_idx() / WARPGROUP, 0) - 1;
        let biased = pointers.mask.is_some_and(|mask| mask.is_bias());
        let factor = if p.softcap > 0.0 || biased { LOG2_E } else { p.scale * LOG2_E };
        let row = warpgroup * WARPGROUP_ROWS + warp() % 4 * 16 + lane() / 4;
        Self {
            p,
            base,
            warpgroup,
            pointers,
            softmax: Softmax {
                p,
                factors: [factor; 2],
                row,
                headroom: P::HEADROOM,
                limit: P::LIMIT,
                limit_bits: exp2_bits(P::LIMIT as u32) as i32,
                adds: !S::SUM_COLUMNS,
                keeps: !S::SUM_COLUMNS || S::IS_TRANSPOSED,
            },
            scales,
            q: Ring::START,
            kv: Ring::START,
            arrived: UNKNOWN,
            mask: Ring::START,
            works: 0,
            shape: PhantomData,
        }
    }

    /// Everything, from the first work tile to the last.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn run(&mut self) {
        // The first turn is warpgroup 0's.
        if self.warpgroup + 1 == S::WARPGROUPS {
            self.pass_turn();
        }
        let mut at = self.begin();
        if !at.keys.is_empty() {
            self.attend(&mut at);
        }
        // The turn that went round comes to rest.
        if self.warpgroup == 0 {
            self.take_turn();
        }
    }

    /// The next S = Q · Kᵀ is issued before the P · V of the current one, over the borders of work
    /// tiles too: the softmax of a work tile's first scores and the way out of its output hide
    /// behind matrix products like all others.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend(&mut self, at: &mut Cursor) {
        let o = [0.0; O];
        self.wait_tile(self.kv);
        self.take_turn();
        let mut s = self.issue_scores();
        self.pass_turn();
        wgmma_wait::<0>();
        self.release_tile(self.kv);
        self.kv = self.kv.next(S::STAGES);
        self.release_queries(at);
        self.cap_and_mask(&mut s, at);
        let mut rows = RowPair::EMPTY;
        let mut raised = Raised::NONE;
        self.relate_and_weigh(&mut s, &mut rows, true, &mut raised);
        self.softmax.weigh(1, &mut s, &mut rows);
        let weights = P::pack_weights::<C, W>(&s);
        let mut state = State { o, weights, rows, begun: false };
        loop {
            if S::MASK_STAGES == 0 && at.tile < at.keys.cached_end && at.tile > at.bottom {
                P::step_to_bottom(self, &mut state, at);
                self.release_queries(at);
            }
            if !self.step_over_edge(&mut state, at) {
                break;
            }
        }
        let State { mut o, weights, rows, begun } = state;
        self.clear_values(at, self.kv);
        self.wait_tile(self.kv);
        self.take_last_turn();
        self.issue_output(&mut o, begun, &weights, self.kv);
        self.pass_turn();
        wgmma_wait::<0>();
        self.finish(&mut o, rows.states(), at.slot);
    }

    /// A step where something is masked, or where the output of a work tile is complete and the
    /// next one begins; the others are in `steps`. Returns whether there is a next one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step_over_edge(&mut self, state: &mut State<W, O>, at: &mut Cursor) -> bool {
        let from = *at;
        // A vote, so that the assembler sees that a warp's lanes agree.
        let ends = any_sync(at.tile == at.keys.first);
        if ends {
            *at = self.begin();
            if at.keys.is_empty() {
                *at = from;
                return false;
            }
        } else {
            at.tile -= 1;
        }
        let keys = self.kv;
        let values = keys.next(S::STAGES);
        self.clear_values(&from, values);
        let mut s = self.multiply(state);
        self.release_tile(keys);
        let State { o, weights, rows, begun } = state;
        *begun = !ends;
        self.release_queries(at);
        let done = rows.states();
        self.cap_and_mask(&mut s, at);
        let mut raised = Raised::NONE;
        self.relate_and_weigh(&mut s, rows, ends, &mut raised);
        wgmma_wait::<0>();
        self.release_tile(values);
        if !ends {
            raised.apply(o);
            collect_sums::<S, O>(o, rows);
        }
        self.softmax.weigh(1, &mut s, rows);
        if S::PACKS_EARLY {
            *weights = P::pack_weights::<C, W>(&s);
        }
        if ends {
            self.finish(o, done, from.slot);
        }
        if !S::PACKS_EARLY {
            *weights = P::pack_weights::<C, W>(&s);
        }
        true
    }

    /// Issues the next S and this O; returns S when it is there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn multiply(&mut self, state: &mut State<W, O>) -> [f32; C] {
        self.wait_known(0, self.kv);
        self.take_turn();
        let s = self.issue_scores();
        let values = self.kv.next(S::STAGES);
        self.wait_known(1, values);
        self.issue_output(&mut state.o, state.begun, &state.weights, values);
        self.pass_turn();
        wgmma_wait::<1>();
        self.kv = values.next(S::STAGES);
        self.arrived = UNKNOWN;
        s
    }

    /// Waits for the next work tile's description and Q.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn begin(&mut self) -> Cursor {
        if self.works > 0 {
            self.q = self.q.next(S::Q_STAGES);
        }
        mbarrier_wait(self.base + S::Q_FULL + 8 * self.q_tile(), self.q.parity);
        let slot = Slot::new::<S>(self.base, self.works);
        self.works += 1;
        let mut keys = slot.keys();
        if self.pointers.pages.is_some() && slot.has_gaps::<S>() {
            // No row sees all keys of any tile.
            (keys.full_end, keys.cached_end) = (0, 0);
        }
        let keys = keys.agreed();
        let rotation = self.pointers.rotation.filter(|rotation| rotation.params.dim > 0);
        if let Some(rotation) = rotation.filter(|_| !keys.is_empty()) {
            let tile = self.base + self.q_tile() * S::Q_BYTES;
            rotation.rotate::<S>(slot, self.rows(slot.seqlen()), tile, self.warpgroup);
        }
        if let Some(scales) = self.pointers.scales {
            self.softmax.factors = scales.factors(slot.place::<S>(), self.softmax.row, self.p);
        }
        let rows = || TileRows {
            base: self.base,
            slot,
            tile: self.base + self.q_tile() * S::Q_BYTES,
            warpgroup: self.warpgroup,
            row: self.softmax.row,
        };
        if let Some(factors) = self.scales.row_factors::<T, P, S>(rows, self.p) {
            self.softmax.factors = factors;
        }
        // Large heads of two bytes do better with one loop: the other one keeps K until weights are
        // seen, and with their few tiles under way that keeps the next ones out.
        let mixed = self.p.softcap > 0.0 || S::D > 128 && !S::IS_TRANSPOSED;
        let bottom = if mixed { u32::MAX } else { keys.first.max(keys.full_first) };
        Cursor { slot, keys, tile: keys.end.wrapping_sub(1), bottom }
    }

    /// Waits for the tensor cores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take_turn(&self) {
        // With a mask there is no register to keep the number in.
        let masked = S::MASK_STAGES > 0;
        let turn = if masked { thread_idx() / WARPGROUP } else { 1 + self.warpgroup };
        named_barrier_sync(turn, 2 * WARPGROUP);
    }

    /// The same behind the loop, in which there is no register to keep the number in.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take_last_turn(&self) {
        if S::MASK_STAGES > 0 {
            self.take_turn();
        } else {
            named_barrier_sync(opaque(thread_idx()) / WARPGROUP, 2 * WARPGROUP);
        }
    }

    /// Hands the tensor cores on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pass_turn(&self) {
        let next = if self.warpgroup + 1 == S::WARPGROUPS { 0 } else { self.warpgroup + 1 };
        named_barrier_arrive(1 + next, 2 * WARPGROUP);
    }

    /// Query rows of a sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(&self, seqlen: Seqlen) -> u32 {
        if self.pointers.pages.is_some() { seqlen.new_rows() } else { self.p.q_len }
    }

    /// Number of the Q tile in use.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn q_tile(&self) -> u32 {
        self.warpgroup * S::Q_STAGES + self.q.stage
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait_tile(&self, at: Ring) {
        mbarrier_wait(self.base + S::KV_FULL + at.barrier(), at.parity);
    }

    /// The same for K, number 0, or V, number 1, unless it is known to have arrived.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait_known(&self, tile: usize, at: Ring) {
        if S::ASKS_AHEAD {
            let full = self.base + S::KV_FULL + at.barrier();
            mbarrier_wait_unless(self.arrived[tile], full, at.parity);
        } else {
            self.wait_tile(at);
        }
    }

    /// Whether the tile has arrived, for [`Self::wait_known`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn test_tile(&self, at: Ring) -> u32 {
        mbarrier_test(self.base + S::KV_FULL + at.barrier(), at.parity)
    }

    /// This warp has read the K or V tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release_tile(&self, at: Ring) {
        if lane() == 0 {
            mbarrier_arrive(self.base + S::KV_EMPTY + at.barrier());
        }
    }

    /// This warp has read the Q tile for the last time, if the key tile is the last.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release_queries(&self, at: &Cursor) {
        if at.tile == at.keys.first && lane() == 0 {
            mbarrier_arrive(self.base + S::Q_EMPTY + 8 * self.q_tile());
        }
    }

    /// What few calls and few tiles need.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn cap_and_mask(&self, s: &mut [f32; C], at: &Cursor) {
        if self.p.softcap > 0.0 {
            self.softmax.cap(s);
        }
        if let Some(mask) = self.pointers.mask {
            mbarrier_wait(self.base + S::MASK_FULL + self.mask.barrier(), self.mask.parity);
            let factor = if self.p.softcap > 0.0 { 1.0 } else { self.p.scale };
            mask.apply::<S, C>(self.mask_rows(mask), s, factor);
        }
        if at.tile >= at.keys.full_end || at.tile < at.keys.full_first {
            let row = at.slot.place::<S>().row;
            let window = match self.pointers.pages {
                None => self.p.window,
                // Opaque, or its comparison with 0 would take a predicate from all the loop.
                Some(_) => opaque(self.p.window),
            };
            self.softmax.mask(s, at.slot.seen::<S>(), [row, at.tile * S::N], window);
            if let Some(pages) = self.pointers.pages
                && any_sync(at.slot.has_gaps::<S>())
            {
                let (batch, total) = (at.slot.place::<S>().batch, at.slot.seqlen().total);
                pages.hide_gaps(s, batch, at.tile * S::N, total);
            }
        }
    }

    /// This warp's rows of the next tile of the mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn mask_rows(&self, mask: Mask<T>) -> u32 {
        let tile = self.base + S::MASK + self.mask.stage * S::MASK_BYTES;
        mask.rows(tile, self.warpgroup * WARPGROUP_ROWS + warp() % 4 * 16)
    }

    /// Scores become exponents, those of the first row weights. Where a work tile begins, its rows
    /// start with these scores; with a bias they may start anew at any tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn relate_and_weigh(
        &mut self,
        s: &mut [f32; C],
        rows: &mut RowPair,
        begins: bool,
        raised: &mut Raised,
    ) {
        let softmax = &self.softmax;
        if begins {
            *rows = if S::MASK_STAGES > 0 { RowPair::EMPTY } else { softmax.start(s) };
        }
        if let Some(mask) = self.pointers.mask {
            *raised = softmax.settle(s, rows);
            softmax.relate_and_raise(0, s, rows, raised);
            softmax.relate_and_raise(1, s, rows, raised);
            // NaN raises rows too.
            if raised.any && mask.is_bias() {
                mask.hide_again::<S, C>(self.mask_rows(mask), s);
            }
            mask.release(self.base + S::MASK_EMPTY + self.mask.barrier());
            softmax.weigh(0, s, rows);
            self.mask = self.mask.next(S::MASK_STAGES);
        } else if begins {
            softmax.relate(0, s, rows.origin(0));
            softmax.weigh(0, s, rows);
            softmax.relate(1, s, rows.origin(1));
        } else {
            softmax.relate_and_raise(0, s, rows, raised);
            softmax.weigh(0, s, rows);
            softmax.relate_and_raise(1, s, rows, raised);
        }
    }

    /// Rows of V behind the sequence may hold anything, NaN included, and a weight of 0 does not
    /// silence NaN: they become 0. Transposed they are 0 already.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clear_values(&self, at: &Cursor, values: Ring) {
        if S::IS_TRANSPOSED || at.tile + 1 != at.keys.end || at.tile < at.keys.full_end {
            return;
        }
        let valid = at.slot.seen::<S>().total - at.tile * S::N;
        if valid >= S::N {
            return;
        }
        self.wait_tile(values);
        let thread = self.warpgroup * WARPGROUP + thread_idx() % WARPGROUP;
        let mut vector = valid * 8 + thread;
        while vector < S::N * 8 {
            let mut chunk = 0;
            while chunk < S::CHUNKS {
                let at = S::KV + values.stage * S::STAGE_BYTES + chunk * S::N * 128 + vector * 16;
                st_shared_vec(self.base + at, [0; 4]);
                chunk += 1;
            }
            vector += Self::BLOCK;
        }
        fence_proxy_async();
        named_barrier_sync(CLEARED, Self::BLOCK);
    }

    /// Normalises the output of a finished work tile and writes it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish(&self, o: &mut [f32; O], mut rows: [SoftmaxState; 2], slot: Slot) {
        if S::SUM_COLUMNS {
            let with = |kept: f32, last: f32| if S::IS_TRANSPOSED { kept + last } else { last };
            rows[0].sum = with(rows[0].sum, o[O - 4]);
            rows[1].sum = with(rows[1].sum, o[O - 2]);
        }
        let (place, seqlen) = (slot.place::<S>(), slot.seqlen());
        // In the output tokens of all sequences are those of one.
        let (place, start) = match self.pointers.pages {
            None => (place, 0),
            Some(_) => (Place { batch: 0, ..place }, place.token),
        };
        let to = self.pointers.to;
        let output = Output {
            p: self.p,
            place,
            seqlen,
            start,
            rows: self.rows(seqlen),
            row: self.softmax.row,
        };
        let factors = output.normalise::<T, S>(rows, self.pointers.head_sink, to.lse);
        let factors = match to.quantized {
            Some(Quantized { scale, .. }) => factors.map(|factor| e4m3::scaled(factor, scale)),
            None => factors,
        };
        scale(o, factors);
        if let Some(scales) = self.pointers.scales {
            scales.widen(o, place.head, self.p);
        }
        self.scales.widen(o, place.head, self.p);
        if S::SPLITS {
            output.store_part(o, to.partial_out);
        } else if let Some(quantized) = to.quantized {
            output.store_quantized::<S, O>(o, quantized);
        } else {
            output.store::<T, S, O>(o, to.out);
        }
    }
}

/// Takes the sums of some tiles' weights out of the output where products are of e4m3: tensor cores
/// keep so few bits of their sums that thousands of keys' weights cannot be added up there.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn collect_sums<S: Tile, const O: usize>(o: &mut [f32; O], rows: &mut RowPair) {
    if S::SUM_COLUMNS && S::IS_TRANSPOSED {
        rows.sum[0] += o[O - 4];
        rows.sum[1] += o[O - 2];
        let mut i = O - 4;
        while i < O {
            o[i] = 0.0;
            i += 1;
        }
    }
}
