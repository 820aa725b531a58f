//! Matrix descriptors of `tcgen05.mma`: where each 16 bytes of an operand lie in shared memory.
//!
//! From the text of the PTX ISA, version 9.2, sections 9.7.16.3 (strides and canonical layouts),
//! 9.7.16.4.1 (the fields) and 9.7.16.10.6 (swizzle atoms).
//!
//! | bits | field |
//! |---|---|
//! | 0–13 | address of the matrix, in units of 16 bytes |
//! | 16–29 | leading dimension byte offset (LBO), in units of 16 bytes |
//! | 32–45 | stride dimension byte offset (SBO), in units of 16 bytes |
//! | 46–48 | 0b001 |
//! | 49–51 | base offset |
//! | 52 | whether the leading dimension is an address |
//! | 61–63 | swizzle: 0 none, 1 of 128 bytes in atoms of 32, 2 of 128, 4 of 64, 6 of 32 bytes |
//!
//! An instruction multiplies 32 bytes of each row of K-major operands, the *depth*: 16 elements of
//! 16 bits or 32 of 8 bits. With `s` bytes of a row of the swizzle pattern, and MN for the rows of
//! A or the columns of B:
//!
//! | order | swizzle | 16 bytes hold | address from the start |
//! |---|---|---|---|
//! | K-major | none | one of MN, half h of the depth | `mn % 8 · 16 + mn / 8 · SBO + h · LBO` |
//! | K-major | rows of s | the same | `mn % 8 · s + mn / 8 · SBO + 16 h` |
//! | MN-major | none | one k, part c of MN | `k % 8 · 16 + k / 8 · LBO + c · SBO` |
//! | MN-major | rows of s | the same | `k % 8 · s + k / 8 · SBO + c % (s / 16) · 16 + c / (s / 16) · LBO` |
//!
//! The swizzle then exchanges bits of that address, as TMA does.
//!
//! Where documents disagree:
//! - The ISA calls bits 46–48 a constant of 0b001; CUTLASS (`cute/arch/mma_sm100_desc.hpp`) calls
//!   bits 46 and 47 the version, which is 1. The value is the same. Another value is refused here.
//! - The ISA prints the constant of the eight bits 53–60 as `0xb00000000`. Taken as zero, as
//!   CUTLASS has it.
//! - The ISA's table of valid combinations has all swizzles for K-major operands; CUTLASS has no
//!   K-major layout with atoms of 32 bytes. They are refused here, and so are addresses as leading
//!   dimensions, which only depths of 48 bytes need, and base offsets.

use crate::hopper::Swizzle;

/// Bits between the fields, and those that are zero.
const ZERO: u64 = 0x1fe0_0000_c000_c000;

/// What follows its neighbour in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Major {
    K,
    Mn,
}

/// The part of an operand that one instruction multiplies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) major: Major,
    /// Rows of A or columns of B.
    pub(super) extent: u32,
    /// Bytes of an element: 1 or 2.
    pub(super) element_bytes: u32,
}

/// A decoded descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    start: u32,
    leading: u32,
    stride: u32,
    swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes a descriptor, or says what is wrong with it.
    pub(super) fn new(bits: u64) -> Result<Self, String> {
        let field = |at: u32| (bits >> at & 0x3fff) as u32 * 16;
        let refuse = |what: &str| Err(format!("descriptor {bits:#018x} {what}"));
        if bits >> 46 & 7 != 1 {
            return refuse("does not have 0b001 in bits 46 to 48");
        }
        if bits & ZERO != 0 {
            return refuse("sets bits that must be zero");
        }
        if bits >> 52 & 1 != 0 {
            return refuse("has an address as leading dimension, which is not simulated");
        }
        if bits >> 49 & 7 != 0 {
            return refuse("has a base offset, which is not simulated");
        }
        let swizzle = match bits >> 61 {
            0 => Swizzle::None,
            2 => Swizzle::Bytes128,
            4 => Swizzle::Bytes64,
            6 => Swizzle::Bytes32,
            1 => return refuse("has atoms of 32 bytes, which are not simulated"),
            _ => return refuse("has no valid swizzle"),
        };
        let decoded = Self { start: field(0), leading: field(16), stride: field(32), swizzle };
        if swizzle != Swizzle::None && decoded.start % decoded.pattern() >= swizzle.row_bytes() {
            return refuse("does not start in the first row of a swizzle pattern");
        }
        Ok(decoded)
    }

    /// Bytes after which the swizzle repeats.
    fn pattern(self) -> u32 {
        8 * self.swizzle.row_bytes()
    }

    /// Addresses of the tile in units of 16 bytes, or why the descriptor does not describe it:
    /// K-major two units for each of MN, MN-major for each k the units of all MN.
    pub(super) fn units(self, tile: Tile) -> Result<Vec<u32>, String> {
        let units = match tile.major {
            Major::K => self.k_major(tile.extent)?,
            Major::Mn => self.mn_major(tile)?,
        };
        let mut sorted = units.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("{self:?} puts two parts of the operand at {}", twice[0]));
        }
        Ok(units)
    }

    fn k_major(self, extent: u32) -> Result<Vec<u32>, String> {
        let (row, swizzled) = (self.swizzle.row_bytes(), self.swizzle != Swizzle::None);
        if swizzled && self.start % row + 32 > row {
            return Err(format!("{self:?} reaches over the end of a swizzled row"));
        }
        self.check_repeats(&[(self.stride, extent > 8)])?;
        let half = if swizzled { 16 } else { self.leading };
        let place = move |mn: u32, h: u32| mn % 8 * row + mn / 8 * self.stride + h * half;
        let places = (0..extent).flat_map(|mn| [place(mn, 0), place(mn, 1)]);
        Ok(places.map(|offset| self.swizzle.apply(self.start + offset)).collect())
    }

    fn mn_major(self, tile: Tile) -> Result<Vec<u32>, String> {
        let (depth, parts) = (32 / tile.element_bytes, tile.extent * tile.element_bytes / 16);
        let row = self.swizzle.row_bytes();
        let in_row = row / 16;
        let (eight_k, next_row) = match self.swizzle {
            Swizzle::None => (self.leading, self.stride),
            _ => (self.stride, self.leading),
        };
        self.check_repeats(&[(eight_k, depth > 8), (next_row, parts > in_row)])?;
        let place = |k: u32, c: u32| {
            k % 8 * row + k / 8 * eight_k + c % in_row * 16 + c / in_row * next_row
        };
        let places = (0..depth).flat_map(|k| (0..parts).map(move |c| place(k, c)));
        Ok(places.map(|offset| self.swizzle.apply(self.start + offset)).collect())
    }

    /// Faults where a stride that the tile uses moves the start of a swizzle pattern: the pattern
    /// there would need a base offset.
    fn check_repeats(self, strides: &[(u32, bool)]) -> Result<(), String> {
        let moves = |&&(stride, used): &&(u32, bool)| used && stride % self.pattern() != 0;
        match strides.iter().find(moves) {
            Some((stride, _)) if self.swizzle != Swizzle::None => {
                Err(format!("{self:?}: {stride} bytes are not whole swizzle patterns"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ISA's fields, put together by hand.
    fn bits(start: u64, leading: u64, stride: u64, swizzle: u64) -> u64 {
        start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | swizzle << 61
    }

    fn units(bits: u64, major: Major, extent: u32, element_bytes: u32) -> Vec<u32> {
        Descriptor::new(bits).unwrap().units(Tile { major, extent, element_bytes }).unwrap()
    }

    /// Core matrices of 8 rows of 16 bytes: the second half of the depth 512 bytes on, the next
    /// eight rows 128.
    #[test]
    fn k_major_without_swizzle() {
        let units = units(bits(2048, 512, 128, 0), Major::K, 24, 2);
        assert_eq!(units[..6], [2048, 2560, 2064, 2576, 2080, 2592]);
        assert_eq!(units[2 * 8..][..2], [2176, 2688]);
        assert_eq!(units[2 * 23..], [2048 + 256 + 7 * 16, 2560 + 256 + 7 * 16]);
    }

    /// Rows of 128 bytes; unit `u` of row `r` lies at unit `u ^ r % 8`.
    #[test]
    fn k_major_rows_of_128_bytes() {
        let start = 4096 + 64;
        let units = units(bits(start, 0, 1024, 2), Major::K, 16, 2);
        for (row, pair) in units.chunks_exact(2).enumerate() {
            let base = 4096 + row as u32 / 8 * 1024 + row as u32 % 8 * 128;
            let unit = |u: u32| base + 16 * (u ^ (row as u32 % 8));
            assert_eq!(pair, [unit(4), unit(5)], "row {row}");
        }
    }

    /// Rows of 64 bytes: of the four units two rows have the same order. Rows of 32: four rows.
    #[test]
    fn k_major_shorter_rows() {
        let of_64 = units(bits(512, 0, 512, 4), Major::K, 8, 1);
        let expected = |row: u32, unit: u32| 512 + row * 64 + 16 * (unit ^ (row / 2));
        assert_eq!(of_64[2 * 5..][..2], [expected(5, 0), expected(5, 1)]);
        let of_32 = units(bits(256, 0, 256, 6), Major::K, 16, 1);
        assert_eq!(of_32[2 * 3..][..2], [256 + 96, 256 + 96 + 16]);
        assert_eq!(of_32[2 * 4..][..2], [256 + 128 + 16, 256 + 128]);
        assert_eq!(of_32[2 * 12..][..2], [512 + 128 + 16, 512 + 128]);
    }

    /// 64 columns of 16 bits are a row of 128 bytes; the next 64 begin at LBO, the next eight k at
    /// SBO.
    #[test]
    fn mn_major_rows_of_128_bytes() {
        let units = units(bits(8192, 2048, 1024, 2), Major::Mn, 128, 2);
        assert_eq!(units.len(), 16 * 16);
        for (i, unit) in units.iter().enumerate() {
            let (k, c) = (i as u32 / 16, i as u32 % 16);
            let row = 8192 + c / 8 * 2048 + k / 8 * 1024 + k % 8 * 128;
            assert_eq!(*unit, row + 16 * ((c % 8) ^ (k % 8)), "k {k}, part {c}");
        }
    }

    /// 16 columns of 8 bits are 16 bytes; 32 k are four times eight.
    #[test]
    fn mn_major_without_swizzle() {
        let units = units(bits(1024, 128, 512, 0), Major::Mn, 32, 1);
        assert_eq!(units.len(), 32 * 2);
        for (i, unit) in units.iter().enumerate() {
            let (k, c) = (i as u32 / 2, i as u32 % 2);
            assert_eq!(*unit, 1024 + k % 8 * 16 + k / 8 * 128 + c * 512, "k {k}, part {c}");
        }
    }

    #[test]
    fn descriptors_that_are_none() {
        let right = bits(4096, 0, 1024, 2);
        Descriptor::new(right).unwrap();
        let wrong = [
            (right & !(1 << 46), "0b001"),
            (right | 1 << 47, "0b001"),
            (right | 1 << 14, "must be zero"),
            (right | 1 << 31, "must be zero"),
            (right | 1 << 53, "must be zero"),
            (right | 1 << 60, "must be zero"),
            (right | 1 << 52, "leading dimension"),
            (right | 2 << 49, "base offset"),
            (bits(4096, 0, 1024, 1), "atoms of 32 bytes"),
            (bits(4096, 0, 1024, 3), "no valid swizzle"),
            (bits(4096, 0, 1024, 5), "no valid swizzle"),
            (bits(4096, 0, 1024, 7), "no valid swizzle"),
            (bits(4096 + 128, 0, 1024, 2), "first row"),
            (bits(4096 + 64, 0, 512, 4), "first row"),
        ];
        for (bits, what) in wrong {
            let refusal = Descriptor::new(bits).unwrap_err();
            assert!(refusal.contains(what), "{bits:#x}: {refusal}");
        }
    }

    #[test]
    fn descriptors_that_do_not_describe_the_tile() {
        let refusal = |bits, major, extent| {
            let tile = Tile { major, extent, element_bytes: 2 };
            Descriptor::new(bits).unwrap().units(tile).unwrap_err()
        };
        let wrong = [
            (refusal(bits(4096 + 112, 0, 1024, 2), Major::K, 64), "end of a swizzled row"),
            (refusal(bits(512 + 48, 0, 512, 4), Major::K, 64), "end of a swizzled row"),
            (refusal(bits(4096, 0, 512, 2), Major::K, 64), "whole swizzle patterns"),
            (refusal(bits(4096, 64, 1024, 2), Major::Mn, 128), "whole swizzle patterns"),
            (refusal(bits(4096, 0, 128, 0), Major::K, 64), "two parts"),
            (refusal(bits(4096, 128, 128, 0), Major::K, 64), "two parts"),
            (refusal(bits(4096, 2048, 0, 2), Major::Mn, 64), "two parts"),
        ];
        for (refusal, what) in wrong {
            assert!(refusal.contains(what), "{what}: {refusal}");
        }
    }
}
