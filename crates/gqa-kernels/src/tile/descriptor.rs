//! Descriptors of `wgmma`'s operands in shared memory.

/// wgmma descriptor of a tile with the 128-byte swizzle: 8-row groups 1024 bytes apart, column
/// chunks `chunk_bytes` apart.
#[derive(Clone, Copy)]
pub struct Descriptor(u32);

impl Descriptor {
    /// Of a tile in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(address: u32, chunk_bytes: u32) -> Self {
        Self(address >> 4 | (chunk_bytes >> 4) << 16)
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
