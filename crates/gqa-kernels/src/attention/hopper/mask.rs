//! A bias or a mask: tiles of it in shared memory, in the order of the K tiles, added to scores by
//! the consumers.
//!
//! A tile is what lies in memory, numbers or bytes, in chunks of 128-byte rows with the 128-byte
//! swizzle. The TMA brings it, so rows are whole 16-byte vectors.

use super::ring::Ring;
use super::shape::{Tile, WARPGROUP, swizzled};
use super::work::{KeyTiles, Place, Slot};
use crate::num::{MmaElement, unpack};
use crate::params::{AttentionParams, MaskedParams};
use crate::simt::*;

/// Warps that load tiles, of each the first lane: the last of the first warpgroup.
pub(super) const WARPS: u32 = 2;
const FIRST_LOADER: u32 = WARPGROUP - 32 * WARPS;

/// Bytes of a row's part in a chunk of a tile.
const CHUNK_BYTES: u32 = 128;

/// attention_bias or attn_mask.
#[derive(Clone, Copy)]
pub(super) struct Mask<T> {
    /// What TMA knows of either, in words of 16 bits.
    map: TensorMap,
    /// Numbers to be added, or null where the tiles are bytes, of which 0 hides the key.
    bias: Global<T>,
    /// Row length.
    pub(super) columns: u32,
    /// One row is all rows.
    repeats: bool,
}

impl<T: MmaElement> Mask<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(map: TensorMap, bias: Global<T>, p: &MaskedParams) -> Self {
        Self { map, bias, columns: p.columns, repeats: p.attention.bias.row == 0 }
    }

    /// Whether it is numbers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_bias(self) -> bool {
        !self.bias.is_null()
    }

    /// This warp has read a tile for the last time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn release(self, empty: u32) {
        sync_warp();
        if lane() == 0 {
            mbarrier_arrive(empty);
        }
    }

    /// Two warps: all tiles of the work that the block has drawn.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load<S: Tile>(self, base: u32, p: &AttentionParams) {
        if lane() == 0 {
            Self::for_each_tile::<S>(base, |to, full, place, key| {
                self.load_chunk::<S>(to, full, place, key, p);
            });
        }
    }

    /// Calls `f` with the place of each tile in shared memory, its barrier, whose it is and its
    /// first key, once the place is free.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn for_each_tile<S: Tile>(base: u32, f: impl Fn(u32, u32, Place, u32)) {
        let mut ring = Ring::START;
        let mut n = 0;
        loop {
            let slot = Slot::drawn::<S>(base, n);
            let KeyTiles { first, end, .. } = slot.keys();
            if first >= end {
                return;
            }
            let mut tile = end;
            while tile > first {
                tile -= 1;
                let barrier = base + ring.barrier();
                mbarrier_wait(barrier + S::MASK_EMPTY, ring.parity ^ 1);
                let to = base + S::MASK + ring.stage * S::MASK_BYTES;
                f(to, barrier + S::MASK_FULL, slot.place::<S>(), tile * S::N);
                ring = ring.next(S::MASK_STAGES);
            }
            n += 1;
        }
    }

    /// One thread of each warp: TMA brings a chunk, if there is one for the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_chunk<S: Tile>(self, to: u32, full: u32, place: Place, key: u32, p: &AttentionParams) {
        let chunk = warp() - FIRST_LOADER / 32;
        let (words, chunks) = if !self.is_bias() { (key / 2, 1) } else { (key, S::N / 64) };
        if chunk >= chunks {
            mbarrier_arrive(full);
            return;
        }
        // What is the same for all has one entry.
        let at = |stride: u64, place: u32| if stride == 0 { 0 } else { place };
        let strides = p.bias;
        let place = [
            words + chunk * 64,
            at(strides.row, place.row),
            at(strides.head, place.head),
            at(strides.batch, place.batch),
        ];
        mbarrier_arrive_expect(full, S::ROWS * CHUNK_BYTES);
        tma_load(to + chunk * S::ROWS * CHUNK_BYTES, self.map, place, full);
    }

    /// The place in shared memory of a warp's 16 rows of a tile, `first` the first of them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rows(self, tile: u32, first: u32) -> u32 {
        if self.repeats { tile } else { tile + first * CHUNK_BYTES }
    }

    /// Scores times `factor` plus numbers; or scores where bytes let them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn apply<S: Tile, const C: usize>(self, rows: u32, s: &mut [f32; C], factor: f32) {
        if !self.is_bias() {
            self.hide::<S, C>(rows, s);
        } else {
            self.for_each::<S, C>(rows, |i, number| s[i] = fma(s[i], factor, number));
        }
    }

    /// Calls `f` with the place of each score of this thread and its number.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn for_each<S: Tile, const C: usize>(self, rows: u32, mut f: impl FnMut(usize, f32)) {
        let row = if self.repeats { 0 } else { lane() % 16 };
        let mut unit = 0;
        while unit < C / 4 {
            // Two units of eight keys, each of them eight upper and eight lower rows.
            let at = swizzled(S::ROWS, row, unit as u32 + lane() / 16);
            let numbers = unpack::<T>(ldmatrix_x4(rows + at));
            let mut i = 0;
            while i < 8 {
                f(4 * unit + i, numbers[i]);
                i += 1;
            }
            unit += 2;
        }
    }

    /// Scores whose byte is 0 become -inf.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn hide<S: Tile, const C: usize>(self, rows: u32, s: &mut [f32; C]) {
        let (row, lower) = if self.repeats { (0, 0) } else { (lane() / 4, 8 * CHUNK_BYTES) };
        let rows = rows + lane() % 4 * 2;
        let mut i = 0;
        while i < C {
            let (unit, half) = (i as u32 / 8, i as u32 / 2 % 2);
            let at = half * lower + swizzled(S::ROWS, row, unit) + i as u32 / 4 % 2 * 8;
            let bytes: u16 = ld_shared(rows + at);
            if bytes & 0xff == 0 {
                s[i] = f32::NEG_INFINITY;
            }
            if bytes >> 8 == 0 {
                s[i + 1] = f32::NEG_INFINITY;
            }
            i += 2;
        }
    }

    /// -inf hides a key even where its score is NaN; the numbers are in the scores already.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn hide_again<S: Tile, const C: usize>(self, rows: u32, s: &mut [f32; C]) {
        self.for_each::<S, C>(rows, |i, number| {
            if number == f32::NEG_INFINITY {
                s[i] = number;
            }
        });
    }
}

/// Scores below are folded: as exponents the lowest numbers would be infinite, and no exponent that
/// counts from there would be small.
const LOW: f32 = -67_108_864.0;

/// Whether a row's greatest score asks for it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn is_foldable(top: f32) -> bool {
    top < LOW && top > f32::NEG_INFINITY
}

/// The lowest scores move up, keep their order, and stay so far apart, 64, that only the greatest
/// count, as it is with the numbers themselves, which are 8 apart at least. Such as agree in 8 bits
/// become one.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn fold(score: f32) -> f32 {
    let steps = score.abs().to_bits().saturating_sub(LOW.abs().to_bits()) >> 16;
    if is_foldable(score) { fma(steps as f32, -64.0, LOW) } else { score }
}

/// Undoes [`fold`] to 8 bits.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn unfold(score: f32) -> f32 {
    let steps = ((LOW - score) * (1.0 / 64.0)) as u32;
    if is_foldable(score) { -f32::from_bits(LOW.abs().to_bits() + (steps << 16)) } else { score }
}
