//! Scales of a quantized cache whose values become halves without them: those of the keys are the
//! queries', before their product, or the products'; those of the values the output's.

use super::float8::{self, kv_head};
use super::operand::Operand;
use super::queries;
use super::shape::Tile;
use super::work::Slot;
use crate::concept::scales::ScalesPer;
use crate::concept::softmax::LOG2_E;
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;

/// What the cache's scales make of a consumer's queries and output.
pub(super) trait CacheScales: Copy {
    /// What makes exponents of 2 of the products of a thread's rows, if it is not the same for all.
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

/// Of elements.
impl CacheScales for () {}

/// A thread's rows `row` and `row + 8` of a work tile, those of its warpgroup in the Q tile at
/// `tile`.
pub(super) struct TileRows {
    pub(super) base: u32,
    pub(super) slot: Slot,
    pub(super) tile: u32,
    pub(super) warpgroup: u32,
    pub(super) row: u32,
}

/// Of quantized values.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    /// (KV head, head size) or (KV head); or one, which is part of [`AttentionParams::scale`] then.
    keys: Global<f32>,
    values: float8::Scales,
}

impl Scales {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn new(keys: Global<f32>, values: Global<f32>, per: ScalesPer) -> Self {
        let (row_factors, v_scale) = (Global::null(), values);
        Self { keys, values: float8::Scales { row_factors, v_scale, per } }
    }

    /// The same call where the scale of all keys, if there is one, is part of its own, which may be
    /// negative then.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn join(&self, p: &AttentionParams) -> AttentionParams {
        let of_all = if self.values.per.is_one() { self.keys.load(0) } else { 1.0 };
        AttentionParams { scale: p.scale * of_all, ..*p }
    }
}

impl CacheScales for Scales {
    /// Queries become halves for it.
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
        // Maxima are taken before the factor, so the sign is the queries'.
        let factor = p.scale.abs() * LOG2_E;
        Some(queries::factors::<S>(rows.base, rows.row).map(|row| row * factor))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn widen<const O: usize>(&self, o: &mut [f32; O], head: u32, p: &AttentionParams) {
        self.values.widen(o, head, p);
    }
}

/// Scales of a KV head's channels.
#[derive(Clone, Copy)]
pub(super) struct HeadScales {
    scales: Global<f32>,
    per: ScalesPer,
    kv_head: u32,
}

impl HeadScales {
    /// Scales of `N` channels from `column` on; those behind the head's last columns are any.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load<const N: usize>(self, column: u32, p: &AttentionParams) -> [f32; N] {
        let column = column.min(p.head_size - N as u32);
        let number = |i| self.per.number(self.kv_head, p.head_size, column + i as u32);
        core::array::from_fn(|i| self.scales.load(number(i)))
    }
}
