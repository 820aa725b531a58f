//! Division of counts.

/// Division that compiles to no panic; divisors are never 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quotient(a: u32, b: u32) -> u32 {
    a.checked_div(b).unwrap_or(0)
}
