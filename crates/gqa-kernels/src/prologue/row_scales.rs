//! Rows of a quantized cache that have a scale each: lanes of a warp that share a new row tell each
//! other its largest number, of which the scale follows. See
//! [`Code::row_scale`](crate::num::Code::row_scale).

use super::rope::Rope;
use super::walk::Walk;
use crate::num::{Element, magnitude, unpack};
use crate::simt::{Global, Rolled, any_sync, shfl_xor_u32};

/// A new row of a KV head, and which of the lanes that share it this is.
pub struct NewRow<T> {
    /// Where it starts.
    pub from: (Global<T>, usize),
    /// Of a key.
    pub position: Option<i64>,
    /// Its size.
    pub head_size: u32,
    /// This one.
    pub lane: u32,
}

impl<T: Element> NewRow<T> {
    /// First elements of this lane's vectors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn elements(&self) -> Rolled {
        let step = lanes(self.head_size / T::PER_VEC) * T::PER_VEC;
        Rolled(self.lane * T::PER_VEC..self.head_size, step)
    }

    /// The vector from an element on, rotated if it is a key's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn vector(&self, rope: &Rope<T>, element: u32) -> [u32; 4] {
        let (x, head) = self.from;
        match self.position {
            Some(position) => rope.vector(x, head, element, position),
            None => x.load_vec(head + element as usize),
        }
    }

    /// The largest magnitude of this lane's vectors.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn largest(&self, rope: &Rope<T>) -> u32 {
        self.elements().fold(0, |x, e| largest_of::<T>(x, self.vector(rope, e)))
    }
}

/// Gives `write` this lane's part of each new row, what goes with it, and the row's largest
/// magnitude. `row` tells which row an index of the space of that size is, of which lanes are the
/// last.
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
        // Lanes whose rows are done still take part in the shuffles of others.
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
