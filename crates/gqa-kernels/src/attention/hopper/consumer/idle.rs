//! Work tiles in which a warpgroup has no rows: the few rows of a decode step all belong to the
//! first warpgroup. The other one skips the key tiles of such a work tile, so that the first one
//! has the SM to itself.
//!
//! The skipping warpgroup still takes its turn at the ordered barrier, one turn for each K tile and
//! the V tile after it. It waits until a tile is full before it releases the stage: otherwise its
//! arrival would count for the previous use of the stage. In the pipeline, the last V tile of a
//! work tile comes after the first K tile of the next one. So a warpgroup that skips a work tile
//! skips its last V tile only after it has begun the next one.

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
    /// Whether this kernel has work tiles in which a warpgroup has no rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn may_idle(&self) -> bool {
        self.pointers.pages.is_some_and(|pages| pages.parts.is_some())
    }

    /// Whether this warpgroup has no rows in the work tile, or the work ends here.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_idle(&self, at: &Cursor) -> bool {
        if !self.may_idle() {
            return at.keys.is_empty();
        }
        // The description that ends the work is all zeros.
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

    /// Broadcasts the pipeline positions from lane 0: after skipped tiles the compiler no longer
    /// knows that they are warp-uniform, and would copy every wgmma descriptor to uniform
    /// registers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn agree(&mut self) {
        let agreed = |word| shfl_idx_u32(word, 0);
        let of = |at: Ring| Ring { stage: agreed(at.stage), parity: agreed(at.parity) };
        (self.q, self.kv, self.works) = (of(self.q), of(self.kv), agreed(self.works));
    }

    /// Skips work tiles without rows, up to the next one with rows or the end. After a work tile
    /// with rows, the first K tile has been skipped already.
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

    /// Skips the next K or V tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn pass_tile(&mut self) {
        self.wait_tile(self.kv);
        self.release_tile(self.kv);
        self.kv = self.kv.next(S::STAGES);
    }
}
