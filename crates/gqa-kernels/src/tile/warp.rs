//! Sums over the lanes of a warp.

use crate::simt::{Rolled, shfl_idx_u32, shfl_xor_u32};

/// Lanes of a warp.
pub const LANES: u32 = 32;

/// Sum over the first `lanes` lanes; the others must hold 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sum(mut value: u32, lanes: u32) -> u32 {
    let mut mask = 1;
    while mask < lanes {
        value += shfl_xor_u32(value, mask);
        mask *= 2;
    }
    shfl_idx_u32(value, 0)
}

/// Inclusive prefix sum over the lanes.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sum_up_to(lane: u32, mut value: u32) -> u32 {
    for log in Rolled(0..LANES.ilog2(), 1) {
        let other = shfl_idx_u32(value, lane.wrapping_sub(1 << log) % LANES);
        value += if lane >> log > 0 { other } else { 0 };
    }
    value
}
