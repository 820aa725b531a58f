//! Four neighbouring lanes exchange words, so that each holds a whole vector.

use crate::simt::shfl_xor_u32;

/// Word `i` of lane `t` among four neighbours becomes word `t` of lane `i`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn transpose([a, b, c, d]: [u32; 4], lane: u32) -> [u32; 4] {
    let [a, b] = exchange([a, b], lane, 1);
    let [c, d] = exchange([c, d], lane, 1);
    let [a, c] = exchange([a, c], lane, 2);
    let [b, d] = exchange([b, d], lane, 2);
    [a, b, c, d]
}

/// Swaps the upper word of the lower lane with the lower word of the upper lane; the lanes are
/// `distance` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn exchange([low, high]: [u32; 2], lane: u32, distance: u32) -> [u32; 2] {
    let upper = lane & distance != 0;
    let got = shfl_xor_u32(if upper { low } else { high }, distance);
    if upper { [got, high] } else { [low, got] }
}
