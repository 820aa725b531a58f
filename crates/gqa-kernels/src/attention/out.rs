//! Output types of attention: the element type; f32, for callers that merge results or continue in
//! f32; or e4m3 times a scale.

use crate::num::{Code, Float8, MmaElement, e4m3};
use crate::simt::Global;
use crate::tile::copy::to_unit;
use bytemuck::Pod;

/// A type that results of tensor-core kernels may have.
pub trait OutElement: Pod {
    /// Whether results are divided by a scale, of one element, before they are rounded.
    const IS_SCALED: bool = false;

    /// What a row's results are multiplied by, by `factor` where nothing scales them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scaled(factor: f32, scale: Global<f32>) -> f32 {
        if Self::IS_SCALED { factor / scale.load(0) } else { factor }
    }

    /// Writes an element.
    fn store_one(out: Global<Self>, i: usize, value: f32);

    /// Writes eight elements, the first of which lies on a 16-byte boundary.
    fn store_unit(out: Global<Self>, i: usize, values: [f32; 8]);
}

impl<T: MmaElement> OutElement for T {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_one(out: Global<T>, i: usize, value: f32) {
        out.store(i, T::from_f32(value));
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_unit(out: Global<T>, i: usize, values: [f32; 8]) {
        out.store_vec(i, to_unit::<T>(values));
    }
}

impl OutElement for f32 {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_one(out: Global<f32>, i: usize, value: f32) {
        out.store(i, value);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_unit(out: Global<f32>, i: usize, values: [f32; 8]) {
        let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
        out.store_vec(i, [a, b, c, d]);
        out.store_vec(i + 4, [e, f, g, h]);
    }
}

/// SM 90.
impl OutElement for e4m3 {
    const IS_SCALED: bool = true;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_one(out: Global<e4m3>, i: usize, value: f32) {
        out.store(i, e4m3::from_f32(value));
    }

    /// On an 8-byte boundary.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_unit(out: Global<e4m3>, i: usize, [a, b, c, d, e, f, g, h]: [f32; 8]) {
        out.store_vec8(i, [join([pair(a, b), pair(c, d)]), join([pair(e, f), pair(g, h)])]);
    }
}

/// Two results of e4m3, the first in the lowest byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pair(lo: f32, hi: f32) -> u32 {
    Float8.encode_two([lo, hi])
}

/// Four results of e4m3, the first in the lowest byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn join([low, high]: [u32; 2]) -> u32 {
    low | high << 16
}

/// Results of e4m3, and their scale.
#[derive(Clone, Copy)]
pub struct Quantized {
    pub out: Global<e4m3>,
    pub scale: Global<f32>,
}

/// Output tensors of a kernel, one of which is used: the first non-null of `out_f32`, `out_f8` and
/// `out`. When a plan is loaded, the choice becomes a constant of the kernel's PTX.
#[derive(Clone, Copy)]
pub struct Results<T> {
    /// In the element type; used if the other two are null.
    pub out: Global<T>,
    /// In f32, or null.
    pub out_f32: Global<f32>,
    /// In e4m3 times `scale`, or null.
    pub out_f8: Global<e4m3>,
    /// One element.
    pub scale: Global<f32>,
}

impl<T: MmaElement> Results<T> {
    /// In the element type, or in f32 if `out_f32` is not null.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn unscaled(out: Global<T>, out_f32: Global<f32>) -> Self {
        Self { out, out_f32, out_f8: Global::null(), scale: Global::null() }
    }

    /// What a row's results are multiplied by, by `factor` where nothing scales them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn scaled(self, factor: f32) -> f32 {
        if self.out_f8.is_null() { factor } else { e4m3::scaled(factor, self.scale) }
    }

    /// Writes one element, or eight of which the first lies on a 16-byte boundary (of e4m3, on one
    /// of 8 bytes).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn store<const N: usize>(self, i: usize, values: [f32; N]) {
        if !self.out_f32.is_null() {
            store(self.out_f32, i, values);
        } else if !self.out_f8.is_null() {
            store(self.out_f8, i, values);
        } else {
            store(self.out, i, values);
        }
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store<O: OutElement, const N: usize>(out: Global<O>, i: usize, values: [f32; N]) {
    match values.first_chunk() {
        Some(unit) => O::store_unit(out, i, *unit),
        None => O::store_one(out, i, values[0]),
    }
}
