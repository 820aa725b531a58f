//! Per-token scales of a quantized cache: the lanes that share a new row exchange its greatest
//! magnitude by shuffles, and the scale follows from that. See
//! [`Code::row_scale`](crate::num::Code::row_scale).

use super::rope::Rope;
use super::walk::Walk;
use crate::num::{Element, magnitude, unpack};
use crate::simt::{Global, Rolled, any_sync, shfl_xor_u32};

/// A new row of a KV head, and one of the lanes that share it.
pub struct NewRow<T> {
    /// The tensor, and the index of the row's first element.
    pub from: (Global<T>, usize),
    /// Position of a key, for the rotary embedding; `None` for a value.
    pub position: Option<i64>,
    /// Length of the row.
    pub head_size: u32,
    /// This lane's number among the lanes that share the row.
    pub lane: u32,
}

impl<T: Element> NewRow<T> {
    /// First elements of this lane's vectors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn elements(&self) -> Rolled {
        let step = lanes(self.head_size / T::PER_VEC) * T::PER_VEC;
        Rolled(self.lane * T::PER_VEC..self.head_size, step)
    }

    /// The vector from element `element` on, rotated if it is a key's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn vector(&self, rope: &Rope<T>, element: u32) -> [u32; 4] {
        let (x, head) = self.from;
        match self.position {
            Some(position) => rope.vector(x, head, element, position),
            None => x.load_vec(head + element as usize),
        }
    }

    /// Bits of the greatest magnitude of this lane's vectors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(&self, rope: &Rope<T>) -> u32 {
        self.elements().fold(0, |x, e| largest_of::<T>(x, self.vector(rope, e)))
    }
}

/// Walks an index space of size `size`, whose last index is the lane. `row` maps an index to the
/// lane's part of a new row and a place. Calls `write` with both, and with the bits of the row's
/// greatest magnitude.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn each_row<T: Element, R>(
    size: [u32; 4],
    rope: &Rope<T>,
    row: impl Fn([u32; 4]) -> Option<(NewRow<T>, R)>,
    write: impl Fn(NewRow<T>, R, u32),
) {
    let mut walk = Walk::over(size);
    loop {
        let index = walk.next();
        // Lanes without a row left still take part in the shuffles of others.
        if !any_sync(index.is_some()) {
            return;
        }
        let new = index.and_then(&row);
        let largest = new.as_ref().map_or(0, |(new, _)| new.largest(rope));
        let largest = largest_of_lanes(largest, size[3]);
        if let Some((new, rest)) = new {
            write(new, rest, largest);
        }
    }
}

/// Neighbouring lanes that share a row of `parts` vectors: a power of two.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn lanes(parts: u32) -> u32 {
    parts.next_power_of_two().min(32)
}

/// Bits of the greatest magnitude among a vector's elements and `largest`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn largest_of<T: Element>(largest: u32, vector: [u32; 4]) -> u32 {
    let (values, per_vec) = (unpack::<T>(vector), T::PER_VEC as usize);
    let mut largest = largest;
    for i in 0..per_vec {
        largest = largest.max(magnitude(values[i]));
    }
    largest
}

/// Maximum over each group of `lanes` neighbouring lanes. Whole warps take part.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn largest_of_lanes(mut largest: u32, lanes: u32) -> u32 {
    let mut mask = lanes / 2;
    while mask > 0 {
        largest = largest.max(shfl_xor_u32(largest, mask));
        mask /= 2;
    }
    largest
}
