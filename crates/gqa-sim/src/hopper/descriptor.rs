//! Matrix descriptors of `wgmma`: where each 16 bytes of an operand lie.
//!
//! | order | swizzle | 16 bytes hold | address from the start |
//! |---|---|---|---|
//! | K-major | rows of `s` bytes | row r, k from 8 h | `r % 8 · s + r / 8 · SBO + 16 h` |
//! | K-major | none | row r, k from 8 h | `r % 8 · 16 + r / 8 · SBO + h · LBO` |
//! | MN-major | rows of `s` bytes | k, columns from 8 c | `k % 8 · s + k / 8 · SBO + c % (s / 16) · 16 + c / (s / 16) · LBO` |
//! | MN-major | none | k, columns from 8 c | `k % 8 · 16 + k / 8 · LBO + c · SBO` |
//!
//! The swizzle then exchanges bits of that address, as the copy engine does.

use super::tensor::Swizzle;

/// Which index of the operand runs fastest in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Major {
    K,
    Mn,
}

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
            return Err(format!("descriptor {bits:#x} has bits that mean nothing"));
        }
        Ok(decoded)
    }

    fn starts_in_first_row(self) -> bool {
        let row = self.swizzle.row_bytes();
        self.swizzle == Swizzle::None || self.start % (8 * row) < row
    }

    /// Address of the 16 bytes whose place across K is `outer` (K-major: a row; MN-major: eight columns) and along K is `k`
    /// (K-major: which half; MN-major: which of 16).
    pub(super) fn unit(self, major: Major, outer: u32, k: u32) -> u32 {
        let row = self.swizzle.row_bytes();
        let units = row / 16;
        let offset = match (major, self.swizzle) {
            (Major::K, Swizzle::None) => {
                outer % 8 * 16 + outer / 8 * self.stride + k * self.leading
            }
            (Major::K, _) => outer % 8 * row + outer / 8 * self.stride + k * 16,
            (Major::Mn, Swizzle::None) => k % 8 * 16 + k / 8 * self.leading + outer * self.stride,
            (Major::Mn, _) => {
                let column = outer % units * 16 + outer / units * self.leading;
                k % 8 * row + k / 8 * self.stride + column
            }
        };
        self.swizzle.apply(self.start + offset)
    }
}
