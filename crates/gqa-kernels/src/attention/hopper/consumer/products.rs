//! The two products of a consumer warpgroup, by `wgmma`.

use super::{Consumer, Ring, Steps};
use crate::attention::hopper::scales::CacheScales;
use crate::attention::hopper::shape::{Tile, WARPGROUP_ROWS};
use crate::num::MmaElement;
use crate::simt::*;
use crate::tile::descriptor::Descriptor;

/// Output registers of the widest wgmma.
const WIDEST_PRODUCT: usize = 128;

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
    /// wgmma steps over all columns of the keys; a step is 32 bytes of each row.
    pub(super) const KEY_STEPS: u32 = S::D * S::NUMBER_BYTES / 32 / P::QUERY_PARTS;

    /// Address of a K tile: where TMA wrote it if keys stay e4m3, else the start of the stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keys_at(&self, at: Ring) -> u32 {
        let stage = self.base + S::stage(at.stage);
        if P::KEEPS_KEYS { stage + S::ARRIVAL.offset } else { stage }
    }

    /// Issues S = Q · Kᵀ.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn issue_scores(&self) -> [f32; C] {
        let q = self.base + self.q_tile() * S::Q_BYTES;
        // opaque(): otherwise the compiler keeps descriptors of Q in non-uniform registers where
        // two warpgroups leave some to spare. A shuffle instead where Q has two parts, and so twice
        // as many descriptors as K, and where the warpgroup passes over work tiles.
        let q = if P::KEEPS_KEYS || self.may_idle() {
            shfl_idx_u32(q, 0)
        } else if S::WARPGROUPS == 2 {
            opaque(q)
        } else {
            q
        };
        let q = Descriptor::new(q, 16);
        let k = Descriptor::new(self.keys_at(self.kv), 16);
        let place = |step: u32, rows: u32| step / 4 * 128 * rows + step % 4 * 32;
        wgmma_fence();
        let mut s = P::multiply(q.at(0), k.at(0));
        let mut step = 1;
        while step < S::D * S::NUMBER_BYTES / 32 {
            // Each part of the queries multiplies all columns of the keys.
            let of_keys = step % Self::KEY_STEPS;
            P::multiply_add(&mut s, q.at(place(step, WARPGROUP_ROWS)), k.at(place(of_keys, S::N)));
            step += 1;
        }
        wgmma_commit();
        s
    }

    /// Issues O += P · V.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn issue_output(&self, o: &mut [f32; O], begun: bool, weights: &[u32; W], at: Ring) {
        let v = self.base + S::stage(at.stage);
        // The ones form the second column chunk of the operand, at a separate address; transposed,
        // they form the rows after V.
        let apart = S::SUM_COLUMNS && !S::IS_TRANSPOSED;
        let behind = if apart { self.base + S::ONES - v } else { S::N * 128 };
        let v = Descriptor::new(v, behind);
        wgmma_fence();
        let mut step = 0;
        while step < W / 4 {
            let a = [
                weights[4 * step],
                weights[4 * step + 1],
                weights[4 * step + 2],
                weights[4 * step + 3],
            ];
            // 16 keys, which are rows of V, or 32, which are columns of Vᵀ.
            let keys = step as u32 * if S::IS_TRANSPOSED { 32 } else { 16 * 128 };
            if O <= WIDEST_PRODUCT {
                let v = if apart { v.towards(keys) } else { v.at(keys) };
                P::multiply_weights(o, begun || step > 0, a, v);
            } else {
                // Two products, each for half of the head's columns; their keys lie side by side in
                // a row. The second product includes the ones.
                let (low, high) = halves(o);
                P::multiply_weights::<64>(low, begun || step > 0, a, v.at(keys));
                P::multiply_weights::<68>(high, begun || step > 0, a, v.at(keys + S::N));
            }
            step += 1;
        }
        wgmma_commit();
    }
}

/// Output registers of the first 128 columns, and of the remaining ones with the sums of P.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn halves<const O: usize>(o: &mut [f32; O]) -> (&mut [f32; 64], &mut [f32; 68]) {
    let (low, high) = o.split_at_mut(64);
    match (low.try_into(), high.try_into()) {
        (Ok(low), Ok(high)) => (low, high),
        _ => trap(),
    }
}
