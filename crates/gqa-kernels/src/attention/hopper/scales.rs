//! A quantized cache: its values are converted to float16 unscaled; scales of keys multiply the
//! queries before their product, or S after it; scales of values multiply the output.

use super::convert;
use super::float8::{self, kv_head};
use super::operand::Operand;
use super::queries::{self, HeadScales, TileRows};
use super::shape::Tile;
use crate::concept::scales::ScalesPer;
use crate::concept::softmax::LOG2_E;
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;

/// How a cache becomes operands, and how its scales apply to a consumer's queries and output.
pub(super) trait CacheScales: Copy {
    /// The loop of the warpgroup that converts tiles; there is none for a cache of elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn convert_tiles<S: Tile, P: Operand>(&self, _base: u32) {}

    /// Converts the queries if they need it, and returns a thread's factors from S to exponents of
    /// 2 where they differ between rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_factors<T: MmaElement, P: Operand, S: Tile>(
        &self,
        _rows: impl FnOnce() -> TileRows,
        _p: &AttentionParams,
    ) -> Option<[f32; 2]> {
        None
    }

    /// Multiplies a thread's output by the scales of the values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn widen<const O: usize>(&self, _o: &mut [f32; O], _head: u32, _p: &AttentionParams) {}
}

/// A cache of elements has no scales.
impl CacheScales for () {}

/// Scales of a quantized cache.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    /// (KV head, head size), (KV head), or one scale, which [`AttentionParams::scale`] then
    /// includes.
    keys: Global<f32>,
    values: float8::Scales,
    /// [`Format`](crate::num::code::Format), by its number.
    format: u32,
}

impl Scales {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(keys: Global<f32>, values: Global<f32>, per: ScalesPer, format: u32) -> Self {
        let (row_factors, v_scale) = (Global::null(), values);
        Self { keys, values: float8::Scales { row_factors, v_scale, per }, format }
    }

    /// Multiplies the scale of the scores by the single scale of the keys, if there is one. The
    /// product may be negative.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn join(&self, p: &AttentionParams) -> AttentionParams {
        let of_all = if self.values.per.is_one() { self.keys.load(0) } else { 1.0 };
        AttentionParams { scale: p.scale * of_all, ..*p }
    }
}

impl CacheScales for Scales {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn convert_tiles<S: Tile, P: Operand>(&self, base: u32) {
        convert::run::<S, P>(base, self.format);
    }

    /// Converts the queries to float16 and returns their factors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_factors<T: MmaElement, P: Operand, S: Tile>(
        &self,
        rows: impl FnOnce() -> TileRows,
        p: &AttentionParams,
    ) -> Option<[f32; 2]> {
        let rows = rows();
        if rows.slot.keys().is_empty() {
            return Some([0.0; 2]);
        }
        let head = rows.slot.place::<S>().head;
        let per = self.values.per;
        let k_scale = || HeadScales { scales: self.keys, per, kv_head: kv_head(head, p) };
        queries::convert::<T, P, S>(&rows, (!per.is_one()).then(k_scale), p);
        // Row maxima need a positive factor: the queries take the sign.
        let factor = p.scale.abs() * LOG2_E;
        Some(queries::factors::<S>(rows.base, rows.row).map(|row| row * factor))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn widen<const O: usize>(&self, o: &mut [f32; O], head: u32, p: &AttentionParams) {
        self.values.widen(o, head, p);
    }
}
