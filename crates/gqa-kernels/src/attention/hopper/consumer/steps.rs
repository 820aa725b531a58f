//! The mainloop over key tiles of which all rows see all keys: the scores of the next tile, and the
//! P · V of the current one.

use super::{Consumer, Cursor, State, collect_sums};
use crate::attention::hopper::operand::{Float8Keys, Operand};
use crate::attention::hopper::scales::CacheScales;
use crate::attention::hopper::shape::Tile;
use crate::attention::hopper::softmax::{RowPair, Turns, exceed, scale};
use crate::num::{Float8, MmaElement};
use crate::simt::*;

/// How a consumer with these operands steps over unmasked key tiles. A trait, because a branch that
/// is never taken would cost the other kernels registers.
pub(in crate::attention::hopper) trait Steps: Operand {
    /// Steps down to the cursor's `bottom`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step_to_bottom<T, S, K, const C: usize, const W: usize, const O: usize>(
        consumer: &mut Consumer<'_, T, Self, S, K, C, W, O>,
        state: &mut State<W, O>,
        at: &mut Cursor,
    ) where
        Self: Sized,
        T: MmaElement,
        S: Tile,
        K: CacheScales,
    {
        consumer.step_to(at.bottom, state, at);
    }
}

impl<P: MmaElement> Steps for P {}

impl Steps for Float8Keys {}

impl Steps for Float8 {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step_to_bottom<T, S, K, const C: usize, const W: usize, const O: usize>(
        consumer: &mut Consumer<'_, T, Self, S, K, C, W, O>,
        state: &mut State<W, O>,
        at: &mut Cursor,
    ) where
        T: MmaElement,
        S: Tile,
        K: CacheScales,
    {
        let bottom = at.bottom;
        while at.tile > bottom {
            at.tile -= 1;
            consumer.arrived = consumer.step_and_lower(state);
            state.begun = true;
        }
    }
}

impl<
    T: MmaElement,
    P: Steps,
    S: Tile,
    K: CacheScales,
    const C: usize,
    const W: usize,
    const O: usize,
> Consumer<'_, T, P, S, K, C, W, O>
{
    /// Steps down to tile `bottom`, with P packed to 16 bits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step_to(&mut self, bottom: u32, state: &mut State<W, O>, at: &mut Cursor) {
        while at.tile > bottom {
            at.tile -= 1;
            self.step(state);
            state.begun = true;
        }
    }

    /// Computes the scores of the next key tile, which needs no mask, and P · V of the current one.
    /// The packed P shows whether an exponent exceeds the lazy-rescale threshold, which costs less
    /// than a maximum of the exponents. K stays in shared memory until that is known, for
    /// [`weigh_again`](Self::weigh_again).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step(&mut self, state: &mut State<W, O>) {
        let keys = self.kv;
        let mut s = self.multiply(state);
        let State { o, weights, rows, .. } = state;
        let before = rows.sum;
        self.softmax.relate(0, &mut s, rows.reference[0]);
        self.softmax.weigh(0, &mut s, rows);
        self.softmax.relate(1, &mut s, rows.reference[1]);
        if S::WAITS_LATE {
            self.hold_wait(rows);
        }
        wgmma_wait::<0>();
        self.release_tile(keys.next(S::STAGES));
        // The second row's exponentials hide the latency of packing.
        self.softmax.weigh(1, &mut s, rows);
        *weights = P::pack_weights::<C, W>(&s);
        if exceed(weights) {
            rows.sum = before;
            let factors = match self.softmax.lower::<P::Element, W>(weights, rows) {
                Some(factors) => factors,
                None => self.weigh_again(keys, rows, weights),
            };
            scale(o, factors);
        }
        self.release_tile(keys);
    }

    /// Keeps ptxas from hoisting the wait for P·V above the first row's exponentials: ptxas moves
    /// no wait across an mbarrier test. The test depends on the exponentials through the sign of
    /// their sum, which selects the tested stage (0, or 1 for a NaN with the sign bit set). Its
    /// result is unused.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hold_wait(&self, rows: &RowPair) {
        let stage = rows.sum[0].to_bits() >> 31;
        mbarrier_test(self.base + S::KV_FULL + 8 * stage, 0);
    }

    /// [`step`](Self::step) for P packed to bytes, which saturates: the check against the threshold
    /// precedes the packing. Returns whether the next two tiles have arrived, tested long before
    /// the answer is needed.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn step_and_lower(&mut self, state: &mut State<W, O>) -> [u32; 2] {
        let keys = self.kv;
        let mut s = self.multiply(state);
        let State { o, weights, rows, .. } = state;
        let mut turns = Turns::new(rows);
        self.softmax.weigh_in_turns(0..C / 8, &mut s, &mut turns);
        wgmma_wait::<0>();
        self.release_tile(keys.next(S::STAGES));
        collect_sums::<S, O>(o, rows);
        let next = [self.test_tile(self.kv), self.test_tile(self.kv.next(S::STAGES))];
        self.softmax.weigh_in_turns(C / 8..C / 4, &mut s, &mut turns);
        let tops = turns.tops();
        if self.softmax.exceed_limit(tops) {
            let factors = match self.softmax.lower_wide(tops, &mut s, rows) {
                Some(factors) => factors,
                None => self.weigh_again_wide(keys, rows, &mut s),
            };
            scale(o, factors);
        }
        self.release_tile(keys);
        *weights = P::pack_weights::<C, W>(&s);
        next
    }
}
