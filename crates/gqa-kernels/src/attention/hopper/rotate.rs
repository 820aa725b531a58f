//! Rotary embedding of queries in their tile in shared memory, before its first product. A separate
//! launch would write all queries and attention would read them again.

use super::packing::Packing;
use super::shape::{CHUNK, Tile, WARPGROUP, WARPGROUP_ROWS, swizzled};
use super::work::Slot;
use crate::num::MmaElement;
use crate::params::RotaryParams;
use crate::prologue::rope::{turn_halves, turn_pairs};
use crate::simt::*;

/// Named barrier 4 + w: the threads of warpgroup w have rotated their shares.
const ROTATED: u32 = 4;
/// Rows whose angles a thread keeps in flight.
const TOGETHER: u32 = 4;
/// Bytes of a row of a chunk.
const ROW: u32 = 2 * CHUNK;

/// Rotary embedding of queries, half-split or interleaved; row `s` is at position `past + s`. A
/// position outside the tables gives NaN. The tables have at least one row and fewer than 2^32
/// elements.
#[derive(Clone, Copy)]
pub(super) struct Rotation<T> {
    /// (max_positions, dim / 2)
    pub(super) cos: Global<T>,
    /// (max_positions, dim / 2)
    pub(super) sin: Global<T>,
    pub(super) params: RotaryParams,
}

impl<T: MmaElement> Rotation<T> {
    /// Rotates the rows of warpgroup `warpgroup` in the tile at `tile`, and fences them for wgmma.
    /// The sequence has `rows` query rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rotate<S: Tile>(
        &self,
        slot: Slot,
        packing: Packing,
        rows: u32,
        tile: u32,
        warpgroup: u32,
    ) {
        if self.params.interleaved == 0 {
            self.rotate_tile::<S, false>(slot, packing, rows, tile, warpgroup);
        } else {
            self.rotate_tile::<S, true>(slot, packing, rows, tile, warpgroup);
        }
        fence_proxy_async();
        named_barrier_sync(ROTATED + warpgroup, WARPGROUP);
    }

    /// Rotates the rows of this thread's warpgroup for one pairing: a loop for each, because a
    /// branch inside would cost in every iteration.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotate_tile<S: Tile, const INTERLEAVED: bool>(
        &self,
        slot: Slot,
        packing: Packing,
        rows: u32,
        tile: u32,
        warpgroup: u32,
    ) {
        let (row, pair) = share::<S, INTERLEAVED>();
        let pairs = self.params.dim / (2 * T::PER_VEC);
        if pair >= pairs {
            return;
        }
        let first = slot.place::<S>().row;
        let past = slot.seqlen().past;
        // Rows past the last one stay zero: NaN would trigger the slow path for overflowing P.
        let outside = past.wrapping_add(rows).saturating_sub(self.params.max_positions);
        let vectors = if INTERLEAVED { [2 * pair, 2 * pair + 1] } else { [pair, pair + pairs] };
        let vectors = vectors.map(|vector| tile + swizzled(WARPGROUP_ROWS, row, vector));
        for ahead in Rolled(0..WARPGROUP_ROWS, TOGETHER * S::PASS_ROWS) {
            let vectors = vectors.map(|vector| vector + ahead * ROW);
            let position = |below: u32| {
                let row = warpgroup * WARPGROUP_ROWS + row;
                packing.find(past.wrapping_add(first), row, ahead + below).token
            };
            self.rotate_rows::<S, INTERLEAVED>(position, outside, pair, vectors);
        }
    }

    /// Rotates the two vectors of a row, which is at `position(0)`, and the same vectors of later
    /// rows; `outside` positions are missing from the tables. All angles are loaded before the
    /// first is used.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotate_rows<S: Tile, const INTERLEAVED: bool>(
        &self,
        position: impl Fn(u32) -> u32,
        outside: u32,
        pair: u32,
        vectors: [u32; 2],
    ) {
        let mut angles = [[[0; 4]; 2]; TOGETHER as usize];
        let mut n = 0;
        while n < TOGETHER && n < S::PASSES {
            angles[n as usize] = self.angles(position(n * S::PASS_ROWS), pair);
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
            if position(ahead).wrapping_sub(self.params.max_positions) < outside {
                st_shared_vec(low, [T::pack(f32::NAN, f32::NAN); 4]);
                st_shared_vec(high, [T::pack(f32::NAN, f32::NAN); 4]);
            }
            n += 1;
        }
    }

    /// Cosines and sines of a pair of vectors at `position`, clamped to the last one instead of a
    /// branch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn angles(&self, position: u32, pair: u32) -> [[u32; 4]; 2] {
        let RotaryParams { dim, max_positions, .. } = self.params;
        let row = position.min(max_positions - 1) * (dim / 2);
        [self.cos, self.sin].map(|table| table.load_vec((row + pair * T::PER_VEC) as usize))
    }
}

/// Row and pair of vectors that this thread rotates first. To avoid bank conflicts, eight
/// neighbouring threads must cover all eight 16-byte units of 128 bytes: half-split pairs cover
/// them within one row, interleaved pairs cover every other unit of two rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn share<S: Tile, const INTERLEAVED: bool>() -> (u32, u32) {
    // opaque(): otherwise derived values are hoisted out of the loop over work tiles and spill.
    let thread = opaque(thread_idx()) % WARPGROUP;
    if !INTERLEAVED {
        return (thread / S::PAIRS, thread % S::PAIRS);
    }
    let beside = if S::PAIRS < 4 { S::PAIRS } else { 4 };
    let row = thread / beside % 2 + 2 * (thread / (2 * S::PAIRS));
    (row, thread % beside + beside * (thread / (2 * beside) % (S::PAIRS / beside)))
}
