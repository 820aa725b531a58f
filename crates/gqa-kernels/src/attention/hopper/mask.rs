//! Bias or mask: the producer loads its tiles into shared memory in the order of the K tiles, and
//! the consumers apply them to the scores.
//!
//! A tile holds the tensor's data, bias elements or mask bytes, in chunks of 128-byte rows with the
//! 128-byte swizzle. TMA loads it, so rows must be whole 16-byte vectors.

use super::shape::{Tile, WARPGROUP, swizzled};
use super::work::{KeyTiles, Place, Slot};
use crate::num::{MmaElement, unpack};
use crate::params::{AttentionParams, MaskedParams};
use crate::simt::*;
use crate::tile::ring::Ring;

/// Warps that load tiles, with one lane each: the last warps of the producer warpgroup.
pub(super) const WARPS: u32 = 2;
const FIRST_LOADER: u32 = WARPGROUP - 32 * WARPS;

/// Bytes of a row's part in a chunk of a tile.
const CHUNK_BYTES: u32 = 128;

/// attention_bias or attn_mask.
#[derive(Clone, Copy)]
pub(super) struct Mask<T> {
    /// Tensor map of either, in 16-bit words.
    map: TensorMap,
    /// The bias, or null for a mask, whose bytes hide the key where they are 0.
    bias: Global<T>,
    /// Row length.
    pub(super) columns: u32,
    /// Whether all query rows share one row of the mask.
    repeats: bool,
}

impl<T: MmaElement> Mask<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(map: TensorMap, bias: Global<T>, p: &MaskedParams) -> Self {
        Self { map, bias, columns: p.columns, repeats: p.attention.bias.row == 0 }
    }

    /// Whether it is a bias rather than a mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn is_bias(self) -> bool {
        !self.bias.is_null()
    }

    /// Releases the stage of the mask tile for this warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn release(self, empty: u32) {
        sync_warp();
        if lane() == 0 {
            mbarrier_arrive(empty);
        }
    }

    /// Run by two warps: loads all mask tiles of the CTA's work tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load<S: Tile>(self, base: u32, p: &AttentionParams) {
        if lane() == 0 {
            Self::for_each_tile::<S>(base, |to, full, place, key| {
                self.load_chunk::<S>(to, full, place, key, p);
            });
        }
    }

    /// For each tile, waits until its stage is free and calls `f` with its shared-memory address,
    /// its full barrier, its work tile's position and its first key.
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

    /// Run by one thread of each warp: loads the warp's chunk by TMA, if there is one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_chunk<S: Tile>(self, to: u32, full: u32, place: Place, key: u32, p: &AttentionParams) {
        let chunk = warp() - FIRST_LOADER / 32;
        let (words, chunks) = if !self.is_bias() { (key / 2, 1) } else { (key, S::N / 64) };
        if chunk >= chunks {
            mbarrier_arrive(full);
            return;
        }
        // A broadcast dimension has one entry.
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

    /// Shared-memory address of a warp's 16 rows of a tile, from row `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn rows(self, tile: u32, first: u32) -> u32 {
        if self.repeats { tile } else { tile + first * CHUNK_BYTES }
    }

    /// Bias: scores become score times `factor` plus bias. Mask: hidden scores become -inf.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn apply<S: Tile, const C: usize>(self, rows: u32, s: &mut [f32; C], factor: f32) {
        if !self.is_bias() {
            self.hide::<S, C>(rows, s);
        } else {
            self.for_each::<S, C>(rows, |i, number| s[i] = fma(s[i], factor, number));
        }
    }

    /// Calls `f` with the index of each score of this thread and its bias.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn for_each<S: Tile, const C: usize>(self, rows: u32, mut f: impl FnMut(usize, f32)) {
        let row = if self.repeats { 0 } else { lane() % 16 };
        let mut unit = 0;
        while unit < C / 4 {
            // Two 16-byte units of eight keys; each unit gives the upper and the lower 8 rows.
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

    /// Sets scores whose mask byte is 0 to -inf.
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

    /// Sets scores with a bias of -inf to -inf even if they are NaN; the scores include the bias
    /// already.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn hide_again<S: Tile, const C: usize>(self, rows: u32, s: &mut [f32; C]) {
        self.for_each::<S, C>(rows, |i, number| {
            if number == f32::NEG_INFINITY {
                s[i] = number;
            }
        });
    }
}

/// Scores below this are folded: the exponents of the lowest f32 would be infinite, and differences
/// from a row maximum down there are too coarse.
const LOW: f32 = -67_108_864.0;

/// Whether a row's greatest score is so low that the row must be folded.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn is_foldable(top: f32) -> bool {
    top < LOW && top > f32::NEG_INFINITY
}

/// Moves the lowest scores up: they keep their order and stay so far apart, 64, that only the
/// greatest contribute. That is true of the unfolded scores as well, which are at least 8 apart
/// here. Scores that agree in their first 8 significant bits become equal.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn fold(score: f32) -> f32 {
    let steps = score.abs().to_bits().saturating_sub(LOW.abs().to_bits()) >> 16;
    if is_foldable(score) { fma(steps as f32, -64.0, LOW) } else { score }
}

/// Undoes [`fold`] to 8 significant bits.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn unfold(score: f32) -> f32 {
    let steps = ((LOW - score) * (1.0 / 64.0)) as u32;
    if is_foldable(score) { -f32::from_bits(LOW.abs().to_bits() + (steps << 16)) } else { score }
}
