//! Work tiles without a row of a warpgroup: a decode step fills a few rows of the first one alone.
//! The warpgroup passes over their key tiles, so that the other one has the SM to itself.
//!
//! It still takes its turns, in step with the other one: a turn for each pair of a K tile and the V
//! tile behind it. It waits for a tile before it releases it, as an arrival must not count for an
//! earlier use of the stage. The V tile of a work tile's last key tile comes behind the first K
//! tile of the next work tile; whoever attends to that one passes over it.

use super::{Consumer, Cursor, Ring, Steps};
use crate::attention::hopper::scales::CacheScales;
use crate::attention::hopper::shape::Tile;
use crate::attention::hopper::work::Slot;
use crate::num::MmaElement;
use crate::simt::*;

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
    /// Whether work tiles may have no row of a warpgroup, in this kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn may_idle(&self) -> bool {
        self.pointers.pages.is_some_and(|pages| pages.parts.is_some())
    }

    /// Whether the work tile has no row of this warpgroup, in kernels where that may be, or is the
    /// end of the work.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_idle(&self, at: &Cursor) -> bool {
        if !self.may_idle() {
            return at.keys.is_empty();
        }
        // At the end there are zeros.
        let first = at.slot.place::<S>().row + self.warpgroup * self.packing().tokens();
        // A vote, so that ptxas knows that the condition is warp-uniform.
        any_sync(first >= at.slot.seqlen().new_rows())
    }

    /// The work tile that was begun last.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn begun(&self) -> Cursor {
        let slot = Slot::new::<S>(self.base, self.works - 1);
        self.cursor(slot, self.keys_of(slot))
    }

    /// Broadcasts the pipeline positions from lane 0: after tiles are passed over the compiler no
    /// longer knows that they are warp-uniform, and would copy every descriptor of a product to
    /// uniform registers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn agree(&mut self) {
        let agreed = |word| shfl_idx_u32(word, 0);
        let of = |at: Ring| Ring { stage: agreed(at.stage), parity: agreed(at.parity) };
        (self.q, self.kv, self.works) = (of(self.q), of(self.kv), agreed(self.works));
    }

    /// Passes over work tiles without rows, up to the next one with rows, or the end. Behind other
    /// work tiles the first K tile was passed over.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn pass_over(&mut self, at: &mut Cursor) {
        if self.works == 1 {
            self.pass_tile();
            self.take_turn();
            self.pass_turn();
        }
        loop {
            let from = *at;
            // The Q tile is not read.
            self.release_queries(at);
            let ends = any_sync(at.tile == at.keys.first);
            if ends {
                *at = self.begin();
            } else {
                at.tile -= 1;
            }
            let is_last = ends && at.keys.is_empty();
            let values = if is_last { self.kv } else { self.kv.next(S::STAGES) };
            self.clear_values(&from, values);
            if ends && !is_last && !self.is_idle(at) {
                return;
            }
            self.take_turn();
            self.pass_turn();
            if is_last {
                return;
            }
            self.pass_tile();
            self.pass_tile();
        }
    }

    /// Passes over the next K or V tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn pass_tile(&mut self) {
        self.wait_tile(self.kv);
        self.release_tile(self.kv);
        self.kv = self.kv.next(S::STAGES);
    }
}
