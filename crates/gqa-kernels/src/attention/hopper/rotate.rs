//! Rotary embedding of queries in their tile in shared memory, before its first product: a launch
//! of its own would write all queries for attention to read them again.

use super::shape::{CHUNK, Tile, WARPGROUP, WARPGROUP_ROWS, swizzled};
use super::work::Slot;
use crate::num::MmaElement;
use crate::params::RotaryParams;
use crate::prologue::rope::{turn_halves, turn_pairs};
use crate::simt::*;

/// Named barriers: the threads of warpgroup w have rotated their shares, 4 + w.
const ROTATED: u32 = 4;
/// Rows whose angles a thread has under way together.
const TOGETHER: u32 = 4;
/// Bytes of a row of a chunk.
const ROW: u32 = 2 * CHUNK;

/// The rotary embedding of queries, half-split or interleaved, whose row `s` stands at `past + s`.
/// A position outside the tables, which have a row at least and fewer than 2^32 elements, gives
/// NaN.
#[derive(Clone, Copy)]
pub(super) struct Rotation<T> {
    /// (max_positions, dim / 2)
    pub(super) cos: Global<T>,
    /// As `cos`.
    pub(super) sin: Global<T>,
    pub(super) params: RotaryParams,
}

impl<T: MmaElement> Rotation<T> {
    /// Rotates the rows of warpgroup number `warpgroup`, which are in the tile at `tile`, and shows
    /// them to the tensor cores. A sequence has `rows` rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rotate<S: Tile>(&self, slot: Slot, rows: u32, tile: u32, warpgroup: u32) {
        if self.params.interleaved == 0 {
            self.rotate_tile::<S, false>(slot, rows, tile, warpgroup);
        } else {
            self.rotate_tile::<S, true>(slot, rows, tile, warpgroup);
        }
        fence_proxy_async();
        named_barrier_sync(ROTATED + warpgroup, WARPGROUP);
    }

    /// The rows of this thread's warpgroup, with pairs of one kind: a loop for each, because
    /// neither should ask in every step.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotate_tile<S: Tile, const INTERLEAVED: bool>(
        &self,
        slot: Slot,
        rows: u32,
        tile: u32,
        warpgroup: u32,
    ) {
        let (row, pair) = share::<S, INTERLEAVED>();
        let pairs = self.params.dim / (2 * T::PER_VEC);
        if pair >= pairs {
            return;
        }
        let first = slot.place::<S>().row + warpgroup * WARPGROUP_ROWS + row;
        let past = slot.seqlen().past;
        // Rows of the tile behind the last one stay zeros: NaN would take the way of weights that
        // overflow.
        let outside = past.wrapping_add(rows).saturating_sub(self.params.max_positions);
        let vectors = if INTERLEAVED { [2 * pair, 2 * pair + 1] } else { [pair, pair + pairs] };
        let vectors = vectors.map(|vector| tile + swizzled(WARPGROUP_ROWS, row, vector));
        for ahead in Rolled(0..WARPGROUP_ROWS, TOGETHER * S::PASS_ROWS) {
            let vectors = vectors.map(|vector| vector + ahead * ROW);
            let position = past.wrapping_add(first).wrapping_add(ahead);
            self.rotate_rows::<S, INTERLEAVED>(position, outside, pair, vectors);
        }
    }

    /// Rotates the two vectors of the row at `position`, and those that lie alike in later rows;
    /// the tables lack `outside` positions. All angles are under way before the first is used.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotate_rows<S: Tile, const INTERLEAVED: bool>(
        &self,
        position: u32,
        outside: u32,
        pair: u32,
        vectors: [u32; 2],
    ) {
        let mut angles = [[[0; 4]; 2]; TOGETHER as usize];
        let mut n = 0;
        while n < TOGETHER && n < S::PASSES {
            angles[n as usize] = self.angles(position.wrapping_add(n * S::PASS_ROWS), pair);
            n += 1;
        }
        n = 0;
        while n < TOGETHER && n < S::PASSES {
            let ahead = n * S::PASS_ROWS;
            let [low, high] = vectors.map(|vector| vector + ahead * ROW);
            let (given, angles) = ([low, high].map(ld_shared_vec), angles[n as usize]);
            let rotated = if INTERLEAVED {
                turn_pairs::<T>(given, angles)
            } else {
                turn_halves::<T>(given, angles)
            };
            st_shared_vec(low, rotated[0]);
            st_shared_vec(high, rotated[1]);
            if position.wrapping_add(ahead).wrapping_sub(self.params.max_positions) < outside {
                st_shared_vec(low, [T::pack(f32::NAN, f32::NAN); 4]);
                st_shared_vec(high, [T::pack(f32::NAN, f32::NAN); 4]);
            }
            n += 1;
        }
    }

    /// Cosines and sines of a pair of vectors at `position`, or, without a branch, at the last one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn angles(&self, position: u32, pair: u32) -> [[u32; 4]; 2] {
        let RotaryParams { dim, max_positions, .. } = self.params;
        let row = position.min(max_positions - 1) * (dim / 2);
        [self.cos, self.sin].map(|table| table.load_vec((row + pair * T::PER_VEC) as usize))
    }
}

/// Row and pair of vectors that this thread rotates first. Eight neighbouring threads must find
/// their vectors in all eight units of 128 bytes: where halves turn together these lie in one row,
/// where neighbours do, every other one in each of two rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn share<S: Tile, const INTERLEAVED: bool>() -> (u32, u32) {
    // Opaque, or what follows from it would be hoisted out of the loop over work and spilled.
    let thread = opaque(thread_idx()) % WARPGROUP;
    if !INTERLEAVED {
        return (thread / S::PAIRS, thread % S::PAIRS);
    }
    let beside = if S::PAIRS < 4 { S::PAIRS } else { 4 };
    let row = thread / beside % 2 + 2 * (thread / (2 * S::PAIRS));
    (row, thread % beside + beside * (thread / (2 * beside) % (S::PAIRS / beside)))
}
