//! Matrix descriptors of `wgmma`: where each 16 bytes of an operand lie. Counts are of 16-bit
//! elements; 8-bit operands are K-major and have twice as many.
//!
//! | order | swizzle | 16 bytes hold | address from the start |
//! |---|---|---|---|
//! | K-major | rows of `s` bytes | row r, k from 8 h | `r % 8 · s + r / 8 · SBO + 16 h` |
//! | K-major | none | row r, k from 8 h | `r % 8 · 16 + r / 8 · SBO + h · LBO` |
//! | MN-major | rows of `s` bytes | k, columns from 8 c | `k % 8 · s + k / 8 · SBO + c % (s / 16) · 16 + c / (s / 16) · LBO` |
//! | MN-major | none | k, columns from 8 c | `k % 8 · 16 + k / 8 · LBO + c · SBO` |
//!
//! The swizzle then exchanges bits of that address, as TMA does.

use super::tensor::Swizzle;
use crate::shared::SharedMemory;
use std::ops::Range;

/// Bits between the fields.
const MEANINGLESS: u64 = 0x3ff1_c000_c000_c000;

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
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            _ => Swizzle::Bytes32,
        };
        let decoded = Self { start: field(0), leading: field(16), stride: field(32), swizzle };
        if bits >> 49 & 7 != 0 || !decoded.starts_in_first_row() {
            return Err(format!(
                "descriptor {bits:#x} does not start in the first row of a swizzle pattern"
            ));
        }
        if bits & MEANINGLESS != 0 {
            return Err(format!("descriptor {bits:#x} sets reserved bits"));
        }
        Ok(decoded)
    }

    /// Of an operand in that memory.
    pub(super) fn of(self, memory: &SharedMemory) -> Self {
        Self { start: memory.described(self.start), ..self }
    }

    fn starts_in_first_row(self) -> bool {
        let row = self.swizzle.row_bytes();
        self.swizzle == Swizzle::None || self.start % (8 * row) < row
    }

    /// Addresses of a K-major operand in units of 16 bytes: two for each row of `rows`.
    pub(super) fn k_major(self, rows: Range<u32>) -> impl Iterator<Item = u32> {
        let row_bytes = self.swizzle.row_bytes();
        let next = if self.swizzle == Swizzle::None { self.leading } else { 16 };
        rows.flat_map(move |row| [0, next].map(|k| row % 8 * row_bytes + row / 8 * self.stride + k))
            .map(move |offset| self.swizzle.apply(self.start + offset))
    }

    /// Addresses of an MN-major operand in units of 16 bytes: for each of 16 rows, eight of
    /// `columns` at a time.
    pub(super) fn mn_major(self, columns: u32) -> impl Iterator<Item = u32> {
        let row_bytes = self.swizzle.row_bytes();
        let units = row_bytes / 16;
        let (eight_rows, chunk) = match self.swizzle {
            Swizzle::None => (self.leading, self.stride),
            _ => (self.stride, self.leading),
        };
        (0..16).flat_map(move |k| {
            (0..columns / 8).map(move |unit| {
                let column = unit % units * 16 + unit / units * chunk;
                let offset = k % 8 * row_bytes + k / 8 * eight_rows + column;
                self.swizzle.apply(self.start + offset)
            })
        })
    }
}
