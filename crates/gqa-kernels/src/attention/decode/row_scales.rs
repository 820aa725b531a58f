//! Per-token scales of a quantized KV cache.
//!
//! One tile ahead of its use, lane `l` loads the scales of keys `l` and `l + 32` of a tile.
//! Shuffles then broadcast them to the lanes that hold the scores of these keys. The scales of the
//! keys multiply S. The scales of the values multiply P, which is float16: they are divided by a
//! power of two, the *unit*, that grows with the largest scale so far. When it grows, the
//! accumulators are divided by the growth.

use super::Decode;
use super::cached::{Cached, ScaleStaging};
use super::layout::{Heads, Layout};
use super::products::Products;
use super::range::{Cache, KvRange};
use crate::num::magnitude;
use crate::params::DecodeParams;
use crate::prologue::row_scales::largest_of_lanes;
use crate::simt::{lane, shfl_idx_f32};
use crate::tile::columns::Columns;
use crate::tile::flipped;
use crate::tile::fragment::{Fragments, column_of};
use crate::tile::rows::Rows;

/// Format of the cache, and where new tokens' scales are staged.
#[derive(Clone, Copy)]
pub(super) struct RowScales<C: Cached> {
    pub coding: C::Coding,
    pub staging: ScaleStaging,
}

/// The scales of a tile that a lane has loaded: of keys and of values, two each.
pub(super) type OfTile = [[f32; 2]; 2];

/// Index of the scales of keys in [`OfTile`].
pub(super) const KEYS: usize = 0;
/// Index of the scales of values in [`OfTile`].
pub(super) const VALUES: usize = 1;

/// The unit before the first tile.
pub(super) const LEAST_UNIT: f32 = f32::MIN_POSITIVE;

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    /// Loads the scales of a tile; 0 for rows past the end or without a block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load_row_scales<C: Cached>(
        p: &DecodeParams,
        rows: &Rows,
        range: &KvRange,
        cache: &Cache<C, UNITS>,
        coding: C::Coding,
        tile: u32,
    ) -> OfTile {
        if tile >= range.tiles {
            return [[0.0; 2]; 2];
        }
        let (begin, layout) = (range.begin(tile), cache.layout);
        let offsets = Self::find_tile(layout, range, tile);
        let (first, step) = layout.scales(&p.attention, rows);
        let height = Layout::PIECE.min(Self::KEYS);
        core::array::from_fn(|pass| {
            let key = lane() + 32 * pass as u32;
            if key >= Self::KEYS || begin + key >= range.old_end {
                return [0.0; 2];
            }
            let mut place = layout.place_of(offsets, 0, begin, 0) + key;
            for piece in 1..Self::KEYS / height {
                if key >= piece * height {
                    let start = layout.place_of(offsets, piece, begin, piece * height);
                    place = start + key - piece * height;
                }
            }
            if !layout.is_somewhere(place) {
                return [0.0; 2];
            }
            C::row_scales(coding, first + place as usize * step as usize)
        })
    }

    /// The scales of the tile of new tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new_row_scales(staging: ScaleStaging) -> OfTile {
        core::array::from_fn(|pass| {
            let key = lane() + 32 * pass as u32;
            let load = |tile: u32| staging.rows.load(tile + key);
            if key < Self::KEYS { [load(0), load(Self::KEYS)] } else { [0.0; 2] }
        })
    }

    /// Multiplies S or P by the scales of the keys or values, and by a factor.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn times_row_scales<C: Cached>(
        scores: &mut Fragments<M, N8>,
        of_tile: &OfTile,
        which: usize,
        factor: f32,
    ) {
        for block in 0..N8 {
            let first = (8 * block) as u32 % 32;
            if Self::flips::<C>() {
                let key = first + flipped::key_of();
                let scale = shfl_idx_f32(of_tile[block / 4][which], key) * factor;
                for i in 0..2 {
                    scores[0][block][i] *= scale;
                }
                continue;
            }
            for i in 0..2 {
                let key = first + column_of() + i as u32;
                let scale = shfl_idx_f32(of_tile[block / 4][which], key) * factor;
                for m in 0..M {
                    for half in 0..2 {
                        scores[m][block][2 * half + i] *= scale;
                    }
                }
            }
        }
    }

    /// Returns the unit that also covers the scales of this tile, and rescales the accumulators
    /// from `unit` to it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn raise_unit(acc: &mut Columns<M, D8>, of_tile: &OfTile, unit: f32) -> f32 {
        const INFINITY: u32 = 0x7f80_0000;
        /// 2^126: its inverse is still a normal number.
        const MOST: u32 = (127 + 126) << 23;
        let exponent = |x: f32| magnitude(x) & INFINITY;
        let of_lane = exponent(of_tile[0][VALUES]).max(exponent(of_tile[1][VALUES]));
        let raised = f32::from_bits(largest_of_lanes(of_lane, 32).min(MOST));
        if raised <= unit {
            return unit;
        }
        let factor = unit / raised;
        for block in 0..D8 {
            for m in 0..M {
                acc[block][m] = acc[block][m].map(|half| half.map(|sum| sum * factor));
            }
        }
        raised
    }
}
