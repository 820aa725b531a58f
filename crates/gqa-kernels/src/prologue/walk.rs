//! Grid-stride loops over a four-dimensional index space of any size.

use crate::simt::{block_dim, block_idx_x, grid_dim_x, thread_idx};

/// Iterates over the indices `[a, b, c, d]` of a space, the last varying fastest, with the stride
/// of the one-dimensional grid. Position and stride are kept as four mixed-radix digits, and a step
/// is an addition with carries: the loop needs no division, and only single indices must fit 32
/// bits.
pub struct Walk {
    size: [u32; 4],
    at: [u32; 4],
    step: [u32; 4],
}

impl Walk {
    /// This thread's share of the space of size `size`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn over(size: [u32; 4]) -> Self {
        // A capped grid has fewer than 2^32 threads.
        Self::from(size, block_idx_x() * block_dim() + thread_idx(), grid_dim_x() * block_dim())
    }

    /// This CTA's share, for loops in which all threads of a CTA take the same index.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_blocks(size: [u32; 4]) -> Self {
        Self::from(size, block_idx_x(), grid_dim_x())
    }

    /// Every `step`-th index from number `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn from(mut size: [u32; 4], first: u32, step: u32) -> Self {
        if size[1] == 0 || size[2] == 0 || size[3] == 0 {
            size = [0, 1, 1, 1];
        }
        Self { size, at: digits(first, size), step: digits(step, size) }
    }
}

impl Iterator for Walk {
    type Item = [u32; 4];

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn next(&mut self) -> Option<[u32; 4]> {
        if self.at[0] >= self.size[0] {
            return None;
        }
        let here = self.at;
        let mut carry = false;
        for i in [3, 2, 1] {
            let digit = self.at[i] + self.step[i] + carry as u32;
            carry = digit >= self.size[i];
            self.at[i] = if carry { digit - self.size[i] } else { digit };
        }
        self.at[0] += self.step[0] + carry as u32;
        Some(here)
    }
}

/// `number` in the mixed radix `size`; the first digit is unbounded.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn digits(number: u32, [_, b, c, d]: [u32; 4]) -> [u32; 4] {
    let (rest, last) = (number / d, number % d);
    [rest / c / b, rest / c % b, rest % c, last]
}
