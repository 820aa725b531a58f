//! Sixteen bytes as elements.

use super::Element;
use bytemuck::cast;

/// The elements of a 16-byte vector: the first [`Element::PER_VEC`] of the eight values; the others
/// are 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unpack<T: Element>(words: [u32; 4]) -> [f32; 8] {
    let mut values = [0.0; 8];
    for i in 0..words.len() {
        match const { size_of::<T>() } {
            2 => [values[2 * i], values[2 * i + 1]] = T::halves(words[i]),
            _ => values[i] = cast::<u32, T>(words[i]).to_f32(),
        }
    }
    values
}

/// [`pack`] that rounds pairs by [`Element::pair`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pack_pairs<T: Element>(values: [f32; 8]) -> [u32; 4] {
    match const { size_of::<T>() } {
        2 => core::array::from_fn(|i| T::pair(values[2 * i], values[2 * i + 1])),
        _ => pack::<T>(values),
    }
}

/// The 16-byte vector of the first [`Element::PER_VEC`] values, each rounded once.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pack<T: Element>(values: [f32; 8]) -> [u32; 4] {
    let mut words = [0; 4];
    for i in 0..T::PER_VEC as usize {
        let element = T::from_f32(values[i]);
        match const { size_of::<T>() } {
            2 => words[i / 2] |= (cast::<T, u16>(element) as u32) << (i % 2 * 16),
            _ => words[i] = cast::<T, u32>(element),
        }
    }
    words
}
