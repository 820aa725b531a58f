//! Rows of a quantized cache that have a scale each: what lanes of a warp that share a row tell
//! each other. See [`Code::row_scale`](crate::num::Code::row_scale).

use crate::num::{Element, magnitude, unpack};
use crate::simt::shfl_xor_u32;

/// Neighbouring lanes that share a row of so many parts: a power of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn lanes(parts: u32) -> u32 {
    parts.next_power_of_two().min(32)
}

/// The largest magnitude of a vector's numbers and of `largest`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn largest_of<T: Element>(largest: u32, vector: [u32; 4]) -> u32 {
    let (values, per_vec) = (unpack::<T>(vector), T::PER_VEC as usize);
    let mut largest = largest;
    for i in 0..per_vec {
        largest = largest.max(magnitude(values[i]));
    }
    largest
}

/// The largest of so many neighbouring lanes. Whole warps take part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn largest_of_lanes(mut largest: u32, lanes: u32) -> u32 {
    let mut mask = lanes / 2;
    while mask > 0 {
        largest = largest.max(shfl_xor_u32(largest, mask));
        mask /= 2;
    }
    largest
}
