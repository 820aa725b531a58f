//! Division of counts.

/// Division without the panic for divisor 0, which must not occur.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn quotient(a: u32, b: u32) -> u32 {
    a.checked_div(b).unwrap_or(0)
}
