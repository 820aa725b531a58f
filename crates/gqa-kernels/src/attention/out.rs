//! The type of results: rounded to the element type, or, for callers that merge them or go on in that, f32.

use crate::num::{Element, MmaElement};
use crate::simt::Global;
use crate::tile::copy::to_unit;

/// A type that results of tensor-core kernels may have.
pub trait OutElement: Element {
    /// Writes eight elements, the first of which lies on a 16-byte boundary.
    fn store_unit(out: Global<Self>, i: usize, values: [f32; 8]);
}

impl<T: MmaElement> OutElement for T {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_unit(out: Global<T>, i: usize, values: [f32; 8]) {
        out.store_vec(i, to_unit::<T>(values));
    }
}

impl OutElement for f32 {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_unit(out: Global<f32>, i: usize, values: [f32; 8]) {
        let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
        out.store_vec(i, [a, b, c, d]);
        out.store_vec(i + 4, [e, f, g, h]);
    }
}
