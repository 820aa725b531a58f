//! Common parts of tile copies by cp.async: 16 bytes at a time, in groups.

use crate::num::MmaElement;
use crate::simt::cp_async_wait;

/// Elements in 16 bytes.
pub const UNIT: u32 = 8;

/// Rounds eight values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn to_unit<T: MmaElement>(x: [f32; 8]) -> [u32; 4] {
    [T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])]
}

/// Waits until at most the `newest` newest cp.async groups, a constant of at most 8, are
/// unfinished.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn wait_for_all_but(newest: u32) {
    match newest {
        1 => cp_async_wait::<1>(),
        2 => cp_async_wait::<2>(),
        3 => cp_async_wait::<3>(),
        4 => cp_async_wait::<4>(),
        5 => cp_async_wait::<5>(),
        6 => cp_async_wait::<6>(),
        7 => cp_async_wait::<7>(),
        _ => cp_async_wait::<8>(),
    }
}
