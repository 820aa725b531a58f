//! Descriptors of the operands of `wgmma` and `tcgen05.mma` in shared memory.

use crate::num::MmaElement;

/// wgmma descriptor of a tile with the 128-byte swizzle: 8-row groups 1024 bytes apart, column
/// chunks `chunk_bytes` apart.
#[derive(Clone, Copy)]
pub struct Descriptor(u32);

impl Descriptor {
    /// Of a tile in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(address: u32, chunk_bytes: u32) -> Self {
        Self(address_and_chunk(address, chunk_bytes))
    }

    /// The descriptor moved by `bytes` in the first chunk; the second chunk stays where it is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn towards(self, bytes: u32) -> u64 {
        Self(self.0.wrapping_sub((bytes >> 4) << 16)).at(bytes)
    }

    /// The descriptor moved by `bytes`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(self, bytes: u32) -> u64 {
        const SWIZZLE_128: u32 = 1 << 30;
        const GROUP: u32 = 1024 >> 4;
        ((SWIZZLE_128 | GROUP) as u64) << 32 | (self.0 + (bytes >> 4)) as u64
    }
}

/// The same for `tcgen05.mma`.
#[derive(Clone, Copy)]
pub struct TensorDescriptor(u32);

impl TensorDescriptor {
    /// Of a tile in shared memory, whose chunks of 64 columns are `chunk_bytes` apart.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(address: u32, chunk_bytes: u32) -> Self {
        Self(address_and_chunk(address, chunk_bytes))
    }

    /// The descriptor moved by `bytes`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(self, bytes: u32) -> u64 {
        const SWIZZLE_128: u32 = 2 << 29;
        const VERSION: u32 = 1 << 14;
        const GROUP: u32 = 1024 >> 4;
        ((SWIZZLE_128 | VERSION | GROUP) as u64) << 32 | (self.0 + (bytes >> 4)) as u64
    }
}

/// The lower half of a descriptor: the address, without the CTA's rank in its cluster that it has
/// from bit 24 on, and the distance between chunks.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn address_and_chunk(address: u32, chunk_bytes: u32) -> u32 {
    const ADDRESS: u32 = (1 << 18) - 1;
    (address & ADDRESS) >> 4 | (chunk_bytes >> 4) << 16
}

/// Descriptor of an MN-major operand of `tcgen05.mma` without swizzle: 16 bytes of each k lie one
/// behind the other, the next 16 bytes `part_bytes` further on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tensor_rows(address: u32, part_bytes: u32) -> u64 {
    const VERSION: u32 = 1 << 14;
    /// From eight k to the next.
    const GROUP_BYTES: u32 = 128;
    let low = address_and_chunk(address, GROUP_BYTES);
    ((VERSION | part_bytes >> 4) as u64) << 32 | low as u64
}

/// Instruction descriptor of `tcgen05.mma` without the types of its operands: so many rows and
/// columns, sums in f32; both operands MN-major if `transposed`, else K-major.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tensor_shape(rows: u32, columns: u32, transposed: bool) -> u32 {
    const D_F32: u32 = 1 << 4;
    const A_AND_B: u32 = 1 << 15 | 1 << 16;
    D_F32 | if transposed { A_AND_B } else { 0 } | (columns >> 3) << 17 | (rows >> 4) << 24
}

/// Instruction descriptor of `tcgen05.mma`: A of that many rows and 16 columns, K-major, times B of
/// as many rows and `columns` columns, MN-major if `transposed`, else K-major; sums in f32.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tensor_instruction<T: MmaElement>(rows: u32, columns: u32, transposed: bool) -> u32 {
    const D_F32: u32 = 1 << 4;
    const A_AND_B_BF16: u32 = 1 << 7 | 1 << 10;
    let shape = (columns >> 3) << 17 | (rows >> 4) << 24;
    D_F32 | (transposed as u32) << 16 | shape | T::constant::<A_AND_B_BF16, 0>()
}
