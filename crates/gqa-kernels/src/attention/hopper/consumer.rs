//! A consumer warpgroup: 64 rows of every work tile of the CTA.

mod again;
mod idle;
mod products;
mod steps;

pub(super) use steps::Steps;

use super::float8::Scales;
use super::mask::Mask;
use super::output::{Destination, Output};
use super::packing::Packing;
use super::pages::Pages;
use super::parts;
use super::queries::TileRows;
use super::rotate::Rotation;
use super::scales::CacheScales;
use super::shape::{Tile, WARPGROUP, WARPGROUP_ROWS};
use super::softmax::{Raised, RowPair, Softmax, exp2_bits, scale};
use super::work::{KeyTiles, Place, Slot};
use crate::attention::out::{OutElement, Quantized};
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::{MmaElement, e4m3};
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::ring::Ring;
use core::marker::PhantomData;

/// K and V tiles that no test has reported as arrived.
const UNKNOWN: [u32; 2] = [0; 2];
/// Named barrier: all consumers have cleared their share of a V tile. Barrier 1 + w is the ordered
/// barrier on which warpgroup w waits for the tensor cores.
const CLEARED: u32 = 8;

/// The parameters other than the tensor maps of Q, K and V.
#[derive(Clone, Copy)]
pub(super) struct Pointers<T> {
    pub(super) mask: Option<Mask<T>>,
    /// Rotary embedding of queries that are not rotated yet.
    pub(super) rotation: Option<Rotation<T>>,
    /// The paged KV cache.
    pub(super) pages: Option<Pages>,
    /// Scales of e4m3 operands.
    pub(super) scales: Option<Scales>,
    pub(super) head_sink: Global<T>,
    pub(super) to: Destination<T>,
}

impl<T> Pointers<T> {
    /// Of a call without mask, rotation, blocks and scales.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(head_sink: Global<T>, to: Destination<T>) -> Self {
        Self { mask: None, rotation: None, pages: None, scales: None, head_sink, to }
    }
}

/// A consumer warpgroup that multiplies operands of type `P`, over a cache with scales `K`: per
/// thread `C` registers of scores, `W` of packed P and `O` of output.
pub(super) struct Consumer<'a, T, P: Steps, S, K, const C: usize, const W: usize, const O: usize> {
    p: &'a AttentionParams,
    base: u32,
    warpgroup: u32,
    pointers: Pointers<T>,
    softmax: Softmax<'a>,
    scales: K,
    /// The Q tile in use; before the first, the position of the first.
    q: Ring,
    /// The next K or V tile.
    kv: Ring,
    /// Whether that tile and the one after it are known to have arrived, where consumers [test
    /// ahead](Tile::ASKS_AHEAD). Masked steps read it too: otherwise ptxas keeps the pipeline
    /// position in non-uniform registers.
    arrived: [u32; 2],
    /// The next tile of the mask.
    mask: Ring,
    /// Work tiles begun.
    works: u32,
    shape: PhantomData<(P, S)>,
}

/// Position of a consumer: the key tile whose P it holds, and the tiles still to come.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    slot: Slot,
    keys: KeyTiles,
    tile: u32,
    /// Steps down to this tile need no mask: all rows see all keys.
    bottom: u32,
}

/// Registers of a consumer thread that stay live from key tile to key tile.
pub(super) struct State<const W: usize, const O: usize> {
    o: [f32; O],
    weights: [u32; W],
    rows: RowPair,
    /// Whether `o` holds output of this work tile; if not, the next product overwrites it.
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
        // Broadcast, so that the compiler knows that it is warp-uniform and uses uniform registers.
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
                headroom: P::headroom(),
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

    /// Attends to all work tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn run(&mut self) {
        // Warpgroup 0 goes first.
        if self.warpgroup + 1 == S::WARPGROUPS {
            self.pass_turn();
        }
        let mut at = self.begin();
        if !self.may_idle() {
            if !at.keys.is_empty() {
                self.attend(&mut at);
            }
        } else {
            while !at.keys.is_empty() {
                if self.is_idle(&at) {
                    self.pass_over(&mut at);
                } else {
                    self.attend(&mut at);
                }
                self.agree();
                at = self.begun();
            }
        }
        // Consumes the outstanding barrier phase before exit.
        if self.warpgroup == 0 {
            self.take_turn();
        }
    }

    /// The mainloop over work tiles, up to the end or to one in which this warpgroup has no rows,
    /// whose first K tile it skips. Issues the next S = Q · Kᵀ before the current P · V, across
    /// work tiles too, so that the softmax of a work tile's first scores and the epilogue of its
    /// output also overlap with products.
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
        if S::ALTERNATES {
            // The stage that stays empty. Its phase must complete first: otherwise a copying warp
            // could arrive for V before the other one has skipped the stage.
            self.wait_tile(self.kv);
            self.release_tile(self.kv);
            self.kv = self.kv.next(S::STAGES);
        }
        if self.may_idle() && self.works > 1 {
            // The last V tile of the work tile that this warpgroup has skipped.
            self.pass_tile();
            self.agree();
        }
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
        if self.may_idle() && !self.begun().keys.is_empty() {
            self.pass_tile();
        }
        self.clear_values(at, self.kv);
        self.wait_tile(self.kv);
        self.take_last_turn();
        self.issue_output(&mut o, begun, &weights, self.kv);
        self.pass_turn();
        wgmma_wait::<0>();
        if self.may_idle() {
            self.release_tile(self.kv);
            self.kv = self.kv.next(S::STAGES);
        }
        self.finish(&mut o, rows.states(), at.slot);
    }

    /// A step that masks scores, or that starts the next work tile and writes the output of the
    /// finished one; all other steps are in `steps.rs`. Returns false at the end of the work, and
    /// before a work tile without rows of this warpgroup.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step_over_edge(&mut self, state: &mut State<W, O>, at: &mut Cursor) -> bool {
        let from = *at;
        // A vote, so that ptxas knows that the condition is warp-uniform.
        let ends = any_sync(at.tile == at.keys.first);
        if ends {
            *at = self.begin();
            if self.is_idle(at) {
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

    /// Issues the next S and the current P · V, and returns S once it is complete.
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

    /// Waits for the description and the Q tile of the next work tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn begin(&mut self) -> Cursor {
        if self.works > 0 {
            self.q = self.q.next(S::Q_STAGES);
        }
        mbarrier_wait(self.base + S::Q_FULL + 8 * self.q_tile(), self.q.parity);
        let slot = Slot::new::<S>(self.base, self.works);
        self.works += 1;
        let keys = self.keys_of(slot);
        let rotation = self.pointers.rotation.filter(|rotation| rotation.params.dim > 0);
        if let Some(rotation) = rotation.filter(|_| !keys.is_empty()) {
            let tile = self.base + self.q_tile() * S::Q_BYTES;
            let rows = self.rows(slot.seqlen());
            rotation.rotate::<S>(slot, self.packing(), rows, tile, self.warpgroup);
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
        self.cursor(slot, keys)
    }

    /// The key tiles of a work tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keys_of(&self, slot: Slot) -> KeyTiles {
        let mut keys = slot.keys();
        if self.pointers.pages.is_some() && slot.has_gaps::<S>() {
            // Masks every tile.
            (keys.full_end, keys.cached_end) = (0, 0);
        }
        keys.agreed()
    }

    /// At the beginning of a work tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn cursor(&self, slot: Slot, keys: KeyTiles) -> Cursor {
        // For 16-bit operands and values of more than 128 columns one loop is faster: the unmasked
        // loop keeps K until P is checked, and with few stages that delays the next tiles.
        let mixed = self.p.softcap > 0.0 || S::DV > 128 && !S::IS_TRANSPOSED;
        let bottom = if mixed { u32::MAX } else { keys.first.max(keys.full_first) };
        Cursor { slot, keys, tile: keys.end.wrapping_sub(1), bottom }
    }

    /// Ordered barrier: waits for this warpgroup's turn on the tensor cores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take_turn(&self) {
        // With a mask no register is left to hold the number.
        let masked = S::MASK_STAGES > 0;
        let turn = if masked { thread_idx() / WARPGROUP } else { 1 + self.warpgroup };
        named_barrier_sync(turn, 2 * WARPGROUP);
    }

    /// [`take_turn`](Self::take_turn) after the loop, where no register is left to hold the number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn take_last_turn(&self) {
        if S::MASK_STAGES > 0 {
            self.take_turn();
        } else {
            named_barrier_sync(opaque(thread_idx()) / WARPGROUP, 2 * WARPGROUP);
        }
    }

    /// Ordered barrier: passes the tensor cores to the next warpgroup.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pass_turn(&self) {
        let next = if self.warpgroup + 1 == S::WARPGROUPS { 0 } else { self.warpgroup + 1 };
        named_barrier_arrive(1 + next, 2 * WARPGROUP);
    }

    /// How the rows of tiles are packed.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn packing(&self) -> Packing {
        self.pointers.pages.map_or(Packing::OneHead, |pages| pages.packing)
    }

    /// Query rows of a sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(&self, seqlen: Seqlen) -> u32 {
        if self.pointers.pages.is_some() { seqlen.new_rows() } else { self.p.q_len }
    }

    /// Index of the Q tile in use.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn q_tile(&self) -> u32 {
        self.warpgroup * S::Q_STAGES + self.q.stage
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait_tile(&self, at: Ring) {
        mbarrier_wait(self.base + S::KV_FULL + at.barrier(), at.parity);
    }

    /// Waits for K (`tile` 0) or V (`tile` 1) unless it is known to have arrived.
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

    /// Releases the stage for this warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release_tile(&self, at: Ring) {
        if lane() == 0 {
            mbarrier_arrive(self.base + S::KV_EMPTY + at.barrier());
        }
    }

    /// Releases the Q tile for this warp after the work tile's last key tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release_queries(&self, at: &Cursor) {
        if at.tile == at.keys.first && lane() == 0 {
            mbarrier_arrive(self.base + S::Q_EMPTY + 8 * self.q_tile());
        }
    }

    /// Applies softcap, mask and bias, and hides invisible keys: only some calls and tiles need it.
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
                // opaque(): otherwise its comparison with 0 occupies a predicate across the loop.
                Some(_) => opaque(self.p.window),
            };
            let place = [row, at.tile * S::N];
            self.softmax.mask(s, at.slot.seen::<S>(), self.packing(), place, window);
            if let Some(pages) = self.pointers.pages
                && any_sync(at.slot.has_gaps::<S>())
            {
                let (batch, total) = (at.slot.place::<S>().batch, at.slot.seqlen().total);
                pages.hide_gaps(s, batch, at.tile * S::N, total);
            }
        }
    }

    /// Address of this warp's rows in the next mask tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn mask_rows(&self, mask: Mask<T>) -> u32 {
        let tile = self.base + S::MASK + self.mask.stage * S::MASK_BYTES;
        mask.rows(tile, self.warpgroup * WARPGROUP_ROWS + warp() % 4 * 16)
    }

    /// Online softmax of both rows except for the last step: subtracts the row maxima of both rows
    /// and exponentiates the first row. The first tile of a work tile sets the row maxima; with a
    /// bias any tile may reset them.
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
            // NaN also triggers a rescale.
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

    /// Clears rows of V past the end of the sequence: they may hold anything, NaN included, and 0 ·
    /// NaN is NaN. Transposed V holds zeros there already.
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
            while chunk < S::VALUE_CHUNKS {
                let at = S::stage(values.stage) + chunk * S::N * 128 + vector * 16;
                st_shared_vec(self.base + at, [0; 4]);
                chunk += 1;
            }
            vector += Self::BLOCK;
        }
        fence_proxy_async();
        named_barrier_sync(CLEARED, Self::BLOCK);
    }

    /// Epilogue of a finished work tile: normalises the output and writes it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish(&self, o: &mut [f32; O], mut rows: [SoftmaxState; 2], slot: Slot) {
        if S::SUM_COLUMNS {
            let with = |kept: f32, last: f32| if S::IS_TRANSPOSED { kept + last } else { last };
            rows[0].sum = with(rows[0].sum, o[O - 4]);
            rows[1].sum = with(rows[1].sum, o[O - 2]);
        }
        let (place, seqlen) = (slot.place::<S>(), slot.seqlen());
        // The output holds the packed tokens of all sequences as one batch entry.
        let (place, start) = match self.pointers.pages {
            None => (place, 0),
            Some(_) => (Place { batch: 0, ..place }, place.token),
        };
        let row = match self.pointers.pages {
            None => self.softmax.row,
            // opaque(): otherwise the row 8 rows on is hoisted out of the loop and spills.
            Some(_) => opaque(self.softmax.row),
        };
        let to = self.pointers.to;
        let output = Output {
            p: self.p,
            place,
            seqlen,
            start,
            rows: self.rows(seqlen),
            lse_rows: self.pointers.pages.map_or(self.p.q_len, |pages| pages.sequences.tokens),
            // opaque(): otherwise the comparison occupies a predicate across the loop.
            all_see: self.pointers.pages.is_some()
                && opaque(self.p.causal) == 0
                && seqlen.total > 0,
            row,
            columns: to.columns,
            packing: self.packing(),
        };
        if let Some(parts) = self.pointers.pages.and_then(|pages| pages.parts) {
            if !output.has_rows() {
                return;
            }
            // Broadcast, so that the compiler knows that it is warp-uniform.
            let part = shfl_idx_u32(slot.part::<S>(), 0);
            if part != parts::WHOLE {
                self.scales.widen(o, place.head, self.p);
                parts.leave::<S, O>(part, &output, o, &rows);
                return;
            }
        }
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

/// Moves the sums of P from the output registers to `rows` where products are e4m3: the tensor
/// cores' accumulator keeps too few bits to sum P over thousands of keys.
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
