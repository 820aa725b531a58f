//! A quantized KV cache.
//!
//! Operands are float16, which represents every quantized value exactly. 4-bit integers are
//! converted with an offset of 8: its contribution to S is subtracted before the mainloop, and its
//! contribution to P·V after each tile.
//!
//! Queries are multiplied by the per-channel scales of the keys, divided by a power of two and
//! rounded to float16; S is multiplied by that power. It is the largest power of two that is not
//! above any query element of the tile, so elements down to 2^-14 of the largest keep all bits of
//! float16, and elements below 2^-25 of it become zero, which changes S less than rounding the
//! largest does. P is float16, too. The scales of the values multiply the accumulators, in f32.
//!
//! New tokens are rotated and rounded to the element type, like queries. Then they are divided by
//! the scales and quantized; attention reads the quantized values, as they are appended.
//!
//! Per-token scales (`row_scales.rs`) multiply S and P instead.

use super::cached::{Block, Cached, ScaleStaging, Tiles, first_channel};
use crate::concept::scales::{ScalesPer, are_of_rows};
use crate::num::{MmaCode, MmaElement, f16, unpack};
use crate::params::DecodeParams;
use crate::prologue::row_scales::{largest_of, largest_of_lanes};
use crate::simt::{
    Global, Rolled, Shared, lane, shfl_xor_u32, st_shared, sync_threads, thread_idx, warp,
};
use crate::tile::columns::Columns;
use crate::tile::copy::UNIT;
use crate::tile::flipped;
use crate::tile::fragment::Fragments;
use crate::tile::quantized::{self, Order};
use crate::tile::swizzle::{Swizzled, WarpRead};
use core::marker::PhantomData;

/// A cache of quantized values in one of the formats of `F`; queries have element type `T`.
pub struct Codes<T, F>(PhantomData<(T, F)>);

impl<T, F> Clone for Codes<T, F> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, F> Copy for Codes<T, F> {}

/// Format and scales of a call's quantized values. Keys and values have one scale each, or (KV
/// head), (KV head, head size), or per-token scales.
#[derive(Clone, Copy)]
pub struct Coding<F> {
    /// Scales of keys.
    k: Global<f32>,
    /// Scales of values.
    v: Global<f32>,
    /// The format.
    code: F,
    /// Whether scales are per token. This and the format become constants of the kernel's text when
    /// a plan is loaded, so the mainloop tests neither.
    by_row: bool,
}

impl<F: MmaCode> Coding<F> {
    /// The coding of a call with these scales.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(k: Global<f32>, v: Global<f32>, p: &DecodeParams) -> Self {
        Self { k, v, code: F::of(p.format), by_row: are_of_rows(p.scales) }
    }
}

impl<T: MmaElement, F: MmaCode> Cached for Codes<T, F> {
    type Element = T;
    type Operand = f16;
    type Cell = u8;
    type Coding = Coding<F>;
    type Scale = [[f32; 2]; CHANNELS];
    const GROUP: u32 = 16 / F::BITS;
    const FLIPS: bool = true;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn by_row(coding: Coding<F>) -> bool {
        coding.by_row
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_scales(
        coding: Coding<F>,
        p: &DecodeParams,
        kv_head: u32,
        head_size: u32,
        other: f32,
        threads: u32,
    ) -> [[f32; 2]; CHANNELS] {
        let per = ScalesPer::new(p.scales);
        core::array::from_fn(|pass| {
            let channel = thread_idx() + pass as u32 * threads;
            if coding.by_row {
                return [1.0; 2];
            }
            if channel >= head_size {
                return [other; 2];
            }
            let number = per.number(kv_head, head_size, channel);
            [coding.k, coding.v].map(|scale| scale.load(number))
        })
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage_scales(scales: [[f32; 2]; CHANNELS], staging: ScaleStaging, threads: u32) {
        for (pass, [key, value]) in scales.into_iter().enumerate() {
            let channel = thread_idx() + pass as u32 * threads;
            if channel < staging.channels {
                staging.keys.store(channel, key);
                staging.values.store(channel, value);
            }
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode<const D8: usize, const UNITS: usize>(
        coding: Coding<F>,
        tiles: &Tiles<Self, D8, UNITS>,
        staging: ScaleStaging,
        tokens: u32,
        block: Block,
    ) {
        let units = UNITS as u32;
        // Rows past the last token: P is 0 there, and NaN times 0 would be NaN.
        for unit in Rolled(thread_idx() + tokens * units..block.keys * units, block.threads) {
            let (row, unit) = (unit / units, unit % units);
            tiles.cached_keys.place(row, unit).store_vec(0, [0; 4]);
            tiles.cached_values.place(row, unit).store_vec(0, [0; 4]);
        }
        if coding.by_row {
            find_row_scales(coding.code, tiles, staging, tokens, block);
            sync_threads();
        }
        let bytes = 16 * units;
        for byte in Rolled(thread_idx()..2 * tokens * bytes, block.threads) {
            let (row_number, byte) = (byte / bytes, byte % bytes);
            let (row, given, scales, cached) = match row_number.checked_sub(tokens) {
                None => (row_number, tiles.keys, staging.keys, tiles.cached_keys),
                Some(row) => (row, tiles.values, staging.values, tiles.cached_values),
            };
            let channel = byte * F::PER_WORD / 4;
            let given = given.place(row, channel / UNIT).offset(channel % UNIT);
            let place = cached.place(row, byte / 16).offset(byte % 16);
            let code = if coding.by_row {
                let which = if row_number < tokens { 0 } else { block.keys };
                let scale = staging.rows.load(which + row);
                encode_byte(coding.code, given, |_| scale)
            } else {
                encode_byte(coding.code, given, |i| scales.load(channel + i))
            };
            place.store(0, code);
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn prepare<const D8: usize, const UNITS: usize>(
        coding: Coding<F>,
        tiles: &Tiles<Self, D8, UNITS>,
        staging: ScaleStaging,
        block: Block,
    ) -> f32 {
        let scaled = Scaled::of(tiles, staging, block);
        let unit = scaled.unit(staging, block);
        scaled.store::<F, D8>(coding.code, tiles.operands, block, 1.0 / unit);
        sync_threads();
        unit / F::PRODUCT
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zero_scores<const M: usize, const HALVES: usize, const D8: usize>(
        coding: Coding<F>,
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    ) -> [[f32; 2]; M] {
        quantized::zero_scores::<F, M, HALVES, D8>(coding.code, queries)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores<const M: usize, const HALVES: usize, const UNITS: usize, const N8: usize>(
        coding: Coding<F>,
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
        zero_scores: &[[f32; 2]; M],
        keys: Swizzled<u8, UNITS>,
        read: &WarpRead<UNITS>,
    ) -> Fragments<M, N8> {
        if flipped::fits(M, HALVES) {
            let code = coding.code;
            quantized::flipped_scores::<F, M, UNITS, N8>(code, queries, zero_scores, keys, read)
        } else {
            quantized::scores::<F, M, UNITS, N8>(coding.code, queries, zero_scores, keys, read)
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn accumulate<
        const M: usize,
        const HALVES: usize,
        const D8: usize,
        const UNITS: usize,
        const N8: usize,
    >(
        coding: Coding<F>,
        out: &mut Columns<M, D8>,
        weights: &Fragments<M, N8>,
        values: Swizzled<u8, UNITS>,
        read: &WarpRead<UNITS>,
    ) {
        quantized::accumulate::<F, M, HALVES, D8, UNITS, N8>(
            coding.code,
            out,
            weights,
            values,
            read,
        );
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_scales(coding: Coding<F>, number: usize) -> [f32; 2] {
        [coding.k, coding.v].map(|scale| scale.load(number))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_row_scales(coding: Coding<F>, number: usize, [key, value]: [f32; 2]) {
        coding.k.store(number, key);
        coding.v.store(number, value);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scale<const M: usize, const D8: usize>(
        coding: Coding<F>,
        out: &mut Columns<M, D8>,
        staging: ScaleStaging,
        unit: f32,
    ) {
        let units = coding.code.units();
        for block in 0..D8 {
            let start = first_channel(block as u32, Self::GROUP);
            let of_channel = staging.values.load(start + lane() / 4 * Self::GROUP);
            let scale = if coding.by_row { unit } else { of_channel };
            let per_unit = 1.0 / units[block % F::PER_HALF_WORD];
            for m in 0..M {
                out[block][m] = out[block][m].map(|half| half.map(|sum| sum * per_unit * scale));
            }
        }
    }
}

/// Computes the per-token scales of the new tokens' tiles, padding rows included, and stores them
/// in shared memory, to be read after a barrier. Each warp reduces whole rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn find_row_scales<T: MmaElement, F: MmaCode, const D8: usize, const UNITS: usize>(
    code: F,
    tiles: &Tiles<Codes<T, F>, D8, UNITS>,
    staging: ScaleStaging,
    tokens: u32,
    block: Block,
) {
    for number in Rolled(warp()..2 * block.keys, block.threads / 32) {
        let (row, tile) = match number.checked_sub(block.keys) {
            None => (number, tiles.keys),
            Some(row) => (row, tiles.values),
        };
        let mut largest = 0;
        if row < tokens {
            for unit in Rolled(lane()..D8 as u32, 32) {
                largest = largest_of::<T>(largest, tile.place(row, unit).load_vec(0));
            }
        }
        let largest = largest_of_lanes(largest, 32);
        if lane() == 0 {
            staging.rows.store(number, code.row_scale(largest));
        }
    }
}

/// Encodes the quantized values of a byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn encode_byte<T: MmaElement, F: MmaCode>(
    code: F,
    given: Shared<T>,
    scale: impl Fn(u32) -> f32,
) -> u8 {
    let of = |i| code.encode(given.load(i).to_f32() / scale(i)) << (i * F::BITS);
    (0..8 / F::BITS).fold(0, |byte, i| byte | of(i)) as u8
}

/// Most channels whose scales a thread loads.
pub(super) const CHANNELS: usize = 2;

/// Most 16-byte units of queries that a thread converts.
pub(super) const PASSES: usize = 4;

/// The thread's units of queries, times the scales of keys.
struct Scaled([[f32; 8]; PASSES]);

impl Scaled {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of<T: MmaElement, F: MmaCode, const D8: usize, const UNITS: usize>(
        tiles: &Tiles<Codes<T, F>, D8, UNITS>,
        staging: ScaleStaging,
        block: Block,
    ) -> Self {
        Self(core::array::from_fn(|pass| {
            let Some((row, unit)) = place_of::<D8>(pass, block) else { return [0.0; 8] };
            let query = unpack::<T>(tiles.queries.place(row, unit).load_vec(0));
            let scales = [0, 4].map(|i| staging.keys.load_vec(unit * UNIT + i).map(f32::from_bits));
            core::array::from_fn(|i| query[i] * scales[i / 4][i % 4])
        }))
    }

    /// The largest power of two that is not above the largest finite magnitude of all threads,
    /// clamped to `LEAST..=MOST`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn unit(&self, staging: ScaleStaging, block: Block) -> f32 {
        const INFINITY: u32 = 0x7f80_0000;
        /// 2^-64: smaller queries do not distinguish keys. 2^126: its inverse is a normal number.
        const LEAST: u32 = (127 - 64) << 23;
        const MOST: u32 = (127 + 126) << 23;
        let exponents = self.0.as_flattened().iter().map(|x| x.to_bits() & INFINITY);
        let mut largest =
            exponents.fold(0, |most, x| if x == INFINITY { most } else { most.max(x) });
        for distance in [16, 8, 4, 2, 1] {
            largest = largest.max(shfl_xor_u32(largest, distance));
        }
        if lane() == 0 {
            staging.words.store(warp(), largest);
        }
        sync_threads();
        for warp in 0..block.threads / 32 {
            largest = largest.max(staging.words.load(warp));
        }
        f32::from_bits(largest.clamp(LEAST, MOST))
    }

    /// Writes them as operands, divided by the unit.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store<F: MmaCode, const D8: usize>(
        self,
        code: F,
        tile: Swizzled<f16, D8>,
        block: Block,
        factor: f32,
    ) {
        let units = code.units();
        for pass in 0..PASSES {
            let Some((row, unit)) = place_of::<D8>(pass, block) else { return };
            let (order, values) = (Order::of::<F>(unit * UNIT), self.0[pass]);
            for word in 0..4 {
                let factor = factor * (F::PRODUCT / units[word % F::PER_HALF_WORD]);
                let [low, high] = order.columns[word].map(|column| values[column] * factor);
                let column = order.places[word];
                let place = tile.place(row, column / UNIT).offset(column % UNIT);
                st_shared(place.address(), f16::pack(low, high));
            }
        }
    }
}

/// Row and unit that the thread converts in a pass.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn place_of<const D8: usize>(pass: usize, block: Block) -> Option<(u32, u32)> {
    let unit = thread_idx() + pass as u32 * block.threads;
    (unit < block.rows * D8 as u32).then_some((unit / D8 as u32, unit % D8 as u32))
}
