//! Tensors as TMA sees them: strides, boxes and swizzles.

/// The swizzle: which address bits of a box in shared memory are XORed, so that a column spreads
/// over many banks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// None.
    #[default]
    None,
    /// Rows of 32 bytes: bit 4 ^= bit 7.
    Bytes32,
    /// Rows of 64 bytes: bits 4 and 5 ^= bits 7 and 8.
    Bytes64,
    /// Rows of 128 bytes: bits 4 to 6 ^= bits 7 to 9.
    Bytes128,
}

impl Swizzle {
    /// Where the byte at that address lies.
    #[inline]
    pub(crate) fn apply(self, address: u32) -> u32 {
        let mask = match self {
            Self::None => 0,
            Self::Bytes32 => 0x10,
            Self::Bytes64 => 0x30,
            Self::Bytes128 => 0x70,
        };
        address ^ (address >> 3 & mask)
    }

    /// Bytes of a row of the swizzle pattern; 16 without a swizzle.
    pub(crate) fn row_bytes(self) -> u32 {
        match self {
            Self::None => 16,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }

    /// Alignment of a box's place in shared memory.
    pub(super) fn alignment(self) -> u32 {
        match self {
            Self::None => 128,
            _ => self.row_bytes() * 8,
        }
    }
}

/// A tensor of 16-bit elements in memory, and the box of a copy. Dimensions from the fastest to the
/// slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Elements in each dimension.
    pub size: [u32; 4],
    /// Strides of dimensions 1, 2 and 3 in bytes; dimension 0 is contiguous.
    pub stride: [u64; 3],
    /// Elements of a box in each dimension.
    pub tile: [u32; 4],
    /// How a box lies in shared memory.
    pub swizzle: Swizzle,
}

impl TensorLayout {
    /// Why the hardware has no such tensor map.
    pub(crate) fn refusal(&self, pointer: usize) -> Option<String> {
        let row = self.tile[0] * 2;
        if !pointer.is_multiple_of(16) {
            return Some("its memory does not start at a multiple of 16 bytes".to_owned());
        }
        if self.size.contains(&0) {
            return Some(format!("sizes {:?}; each is at least 1", self.size));
        }
        if self.stride.iter().any(|bytes| !bytes.is_multiple_of(16) || *bytes >= 1 << 40) {
            return Some(format!("strides {:?}; multiples of 16 below 2^40", self.stride));
        }
        if self.tile.iter().any(|extent| !(1..=256).contains(extent)) || !row.is_multiple_of(16) {
            return Some(format!("box {:?}; 1 to 256 each, rows of whole 16 bytes", self.tile));
        }
        if self.swizzle != Swizzle::None && row > self.swizzle.row_bytes() {
            return Some(format!("rows of {row} bytes do not fit {:?}", self.swizzle));
        }
        None
    }

    /// Bytes of a box.
    pub(super) fn tile_bytes(&self) -> u32 {
        2 * self.tile.iter().product::<u32>()
    }

    /// Every 16 bytes of the box at `start`: offset in the box, coordinates of the first of the
    /// eight elements.
    pub(super) fn units(&self, start: [u32; 4]) -> impl Iterator<Item = (u32, [i32; 4])> {
        let [columns, rows, planes, _] = self.tile;
        let start = start.map(|coordinate| coordinate as i32);
        (0..self.tile_bytes() / 16).map(move |unit| {
            let (row, column) = (unit / (columns / 8), unit % (columns / 8) * 8);
            let within = [column, row % rows, row / rows % planes, row / rows / planes];
            let place = std::array::from_fn(|i| start[i].wrapping_add(within[i] as i32));
            (unit * 16, place)
        })
    }

    /// Byte offset of the element at `place`, and how many of the eight elements from there are
    /// inside the tensor; `None` if none is.
    pub(super) fn inside(&self, place: [i32; 4]) -> Option<(i64, std::ops::Range<usize>)> {
        let outside = |i: usize| place[i] < 0 || place[i] as u32 >= self.size[i];
        if (1..4).any(outside) {
            return None;
        }
        let from = (-(place[0] as i64)).clamp(0, 8);
        let to = (self.size[0] as i64 - place[0] as i64).clamp(0, 8);
        let rows =
            place[1..].iter().zip(self.stride).map(|(at, stride)| *at as i64 * stride as i64);
        let offset = place[0] as i64 * 2 + rows.sum::<i64>();
        (from < to).then_some((offset, from as usize..to as usize))
    }
}
