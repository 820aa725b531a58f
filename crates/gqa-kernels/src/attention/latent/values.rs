//! Products of P and a half's columns of values.

use super::halves::{Half, OUTPUTS, place};
use super::{
    CHUNK_BYTES, CLEARED, DEPTHS, KEYS, OWN_CHUNKS, Shape, VALUES, WARPGROUP, WEIGHT_BYTES, Work,
    row_of,
};
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::Descriptor;

/// P of a thread, as A operands.
pub(super) type Weights = [[u32; 4]; DEPTHS];

impl Half {
    /// Takes P of the other half's tile, and rescales the output to the row maxima of that tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn take<S: Shape, T: MmaElement>(&mut self, work: &Work<'_, S, T>) -> Weights {
        let other = self.other();
        // The other half passes its tile in the same phase as this half's tile if this is half 1,
        // and one phase earlier if this is half 0.
        mbarrier_wait(work.passed(other), self.parity ^ other);
        let weights = core::array::from_fn(|i| ld_shared_vec(weights_place(work, other, i)));
        let maxima = [0, 1].map(|row| place(S::MAXIMA, other).load(row_of(row)));
        let [states] = &mut self.states;
        if any_sync(maxima[0] != states[0].max || maxima[1] != states[1].max) {
            let factors = [0, 1].map(|row| states[row].raise(maxima[row]));
            self.rescale(factors);
        }
        weights
    }

    /// Issues O += P · V for a tile of half `owner`, in two wgmma groups: the left and the right
    /// columns of this half, so that the left ones can be released first.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn begin_product<S: Shape, T: MmaElement>(
        &mut self,
        work: &Work<'_, S, T>,
        owner: u32,
        weights: &Weights,
    ) {
        let values = Descriptor::new(shfl_idx_u32(self.columns(work, owner), 0), CHUNK_BYTES);
        self.await_values(work, owner);
        let [left, right] = halves(&mut self.out);
        begin_product::<S::Operand<T>>(left, weights, values, 0);
        begin_product::<S::Operand<T>>(right, weights, values, OWN_CHUNKS / 2);
    }

    /// Waits for this half's value columns of a tile of half `owner`. Where values are part of the
    /// keys, they have arrived before the scores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn await_values<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, owner: u32) {
        if S::APART {
            for chunk in 0..OWN_CHUNKS {
                let chunk = self.half * OWN_CHUNKS + chunk;
                mbarrier_wait(work.full(VALUES, chunk), owner);
            }
        }
    }

    /// Clears rows of the last tile that no query row sees: they may hold anything, NaN included,
    /// and 0 · NaN is NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn clear<S: Shape, T: MmaElement>(
        &self,
        work: &Work<'_, S, T>,
        tile: u32,
        owner: u32,
    ) {
        let valid = work.end() - tile * KEYS;
        if any_sync(valid < KEYS) {
            self.await_values(work, owner);
            // Other warps may still read keys.
            named_barrier_sync(CLEARED + self.half, WARPGROUP);
            let first = self.columns(work, owner);
            let thread = thread_idx() % WARPGROUP;
            for vector in Rolled(valid * 8 + thread..KEYS * 8, WARPGROUP) {
                for chunk in 0..OWN_CHUNKS {
                    st_shared_vec(first + chunk * CHUNK_BYTES + vector * 16, [0; 4]);
                }
            }
            fence_proxy_async();
            named_barrier_sync(CLEARED + self.half, WARPGROUP);
        }
    }

    /// Address of this half's value columns in a tile of half `owner`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn columns<S: Shape, T: MmaElement>(&self, work: &Work<'_, S, T>, owner: u32) -> u32 {
        work.buffer(Self::values::<S>(owner)) + self.half * OWN_CHUNKS * CHUNK_BYTES
    }
}

/// Issues O += P · V for the columns from chunk `chunk` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn begin_product<T: MmaElement>(
    out: &mut [f32; OUTPUTS / 2],
    weights: &Weights,
    values: Descriptor,
    chunk: u32,
) {
    wgmma_fence();
    for depth in 0..DEPTHS {
        let values = values.at(chunk * CHUNK_BYTES + depth as u32 * 16 * 128);
        T::wgmma_registers(out, true, weights[depth], values);
    }
    wgmma_commit();
}

/// The left and the right columns of the output.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn halves(out: &mut [f32; OUTPUTS]) -> [&mut [f32; OUTPUTS / 2]; 2] {
    let (left, right) = out.split_at_mut(OUTPUTS / 2);
    match (left.first_chunk_mut(), right.first_chunk_mut()) {
        (Some(left), Some(right)) => [left, right],
        _ => trap(),
    }
}

/// Shared-memory address of an A operand of P that a half passes to the same thread of the other
/// half.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn weights_place<S: Shape, T: MmaElement>(
    work: &Work<'_, S, T>,
    half: u32,
    depth: usize,
) -> u32 {
    let operand = depth as u32 * WARPGROUP + thread_idx() % WARPGROUP;
    work.base + S::WEIGHTS + half * WEIGHT_BYTES + operand * 16
}
