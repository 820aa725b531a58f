//! Recomputes P of a key tile: where some of it has become infinite, its scores are already
//! overwritten.

use super::{Consumer, Ring, Steps};
use crate::attention::hopper::operand::Operand;
use crate::attention::hopper::scales::CacheScales;
use crate::attention::hopper::shape::{Tile, WARPGROUP_ROWS};
use crate::attention::hopper::softmax::{RowPair, greatest};
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
    /// Recomputes P of a tile where some of it is infinite: rescales, and recomputes the scores
    /// with warp-level `mma`, because the other warps do not take part. Returns the rescale factors
    /// of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn weigh_again(
        &self,
        keys: Ring,
        rows: &mut RowPair,
        weights: &mut [u32; W],
    ) -> [f32; 2] {
        let factors = self.softmax.raise_to(self.greatest_again(keys), rows);
        let mut block = 0;
        while block < W / 4 {
            let s = self.weights_of_block(keys, block as u32, rows);
            let packed: [u32; 4] = P::Element::pack_weights::<8, 4>(&s);
            let mut i = 0;
            while i < 4 {
                weights[4 * block + i] = packed[i];
                i += 1;
            }
            block += 1;
        }
        sync_warp();
        factors
    }

    /// [`weigh_again`](Self::weigh_again) for P that is not packed yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn weigh_again_wide(
        &self,
        keys: Ring,
        rows: &mut RowPair,
        s: &mut [f32; C],
    ) -> [f32; 2] {
        let factors = self.softmax.raise_to(self.greatest_again(keys), rows);
        let mut block = 0;
        while block < C / 8 {
            let weights = self.weights_of_block(keys, block as u32, rows);
            let mut i = 0;
            while i < 8 {
                s[8 * block + i] = weights[i];
                i += 1;
            }
            block += 1;
        }
        sync_warp();
        factors
    }

    /// This warp's P of 16 keys of a tile, from recomputed scores.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weights_of_block(&self, keys: Ring, block: u32, rows: &mut RowPair) -> [f32; 8] {
        let mut s = self.scores_of_block(keys, block);
        let mut half = 0;
        while half < 2 {
            self.softmax.relate(half, &mut s, rows.origin(half));
            self.softmax.weigh(half, &mut s, rows);
            half += 1;
        }
        s
    }

    /// Greatest scores of a tile for each of the thread's two rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn greatest_again(&self, keys: Ring) -> [f32; 2] {
        let mut tops = [f32::NEG_INFINITY; 2];
        for block in Rolled(0..S::N / 16, 1) {
            let s = self.scores_of_block(keys, block);
            tops = [max(tops[0], greatest(0, &s)), max(tops[1], greatest(1, &s))];
        }
        tops
    }

    /// This warp's scores of 16 keys of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores_of_block(&self, keys: Ring, block: u32) -> [f32; 8] {
        // 16 keys at a time: registers do not suffice for more.
        sync_warp();
        // opaque(): otherwise addresses occupy registers across the loop over key tiles.
        let thread = opaque(thread_idx());
        let (warp, lane) = (thread / 32, thread % 32);
        let (query, key) = (lane % 16, lane / 16 * 8 + lane % 8);
        let q = self.base + self.q_tile() * S::Q_BYTES + (warp % 4 * 16 + query) * 128;
        let k = self.keys_at(keys) + (16 * block + key) * 128;
        let (mut low, mut high) = ([0.0; 4], [0.0; 4]);
        // The 128-byte swizzle permutes 16-byte units within 8 rows.
        let place = |step: u32, rows: u32, row: u32, unit: u32| {
            step / 4 * 128 * rows + 16 * ((step % 4 * 2 + unit) ^ (row % 8))
        };
        // A run-time bound: with `D`, ptxas would unroll the loop.
        let steps = self.p.head_size.div_ceil(32 * P::QUERY_PARTS / S::NUMBER_BYTES);
        for step in Rolled(0..P::QUERY_PARTS * steps, 1) {
            // Each part of the queries multiplies the same columns of the keys.
            let (of_keys, part) = (step / P::QUERY_PARTS, step % P::QUERY_PARTS);
            let of_queries = part * Self::KEY_STEPS + of_keys;
            let a = ldmatrix_x4(q + place(of_queries, WARPGROUP_ROWS, query, lane / 16));
            let b = ldmatrix_x4(k + place(of_keys, S::N, key, lane / 8 % 2));
            P::multiply_rows(&mut low, a, [b[0], b[1]]);
            P::multiply_rows(&mut high, a, [b[2], b[3]]);
        }
        let ([a, b, c, d], [e, f, g, h]) = (low, high);
        [a, b, c, d, e, f, g, h]
    }
}
