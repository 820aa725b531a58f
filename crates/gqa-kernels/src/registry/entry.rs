//! What the host knows of an entry point.

use crate::num::{DType, Format};

/// Kernels that are compiled into one PTX module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Unpack, rotate, append.
    Prologue,
    /// Memory-efficient attention, for almost everything legal.
    General,
    /// Attention with all scores in memory.
    Unfused,
    /// Tensor-core flash attention for prompts and chunks.
    Tiled,
    /// The same with a bias or a mask.
    TiledMasked,
    /// The same in float32.
    TiledF32,
    /// The same for heads larger than 256.
    TiledWide,
    /// Flash attention with warpgroups and the copy engine.
    Hopper,
    /// The same with a bias or a mask.
    HopperMasked,
    /// The same with a cache of blocks.
    HopperPaged,
    /// The same with operands of e4m3.
    HopperFloat8,
    /// Tensor-core flash attention over a split of the keys, and the merge.
    SplitKv,
    /// A whole token step: rotation, append, attention by clusters of blocks, merge.
    Decode,
    /// The same with a cache of codes.
    DecodeCodes,
    /// The same with a cache of blocks.
    DecodePaged,
    /// The same with a cache of blocks of codes.
    DecodePagedCodes,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 16] = [
        Self::Prologue,
        Self::General,
        Self::Unfused,
        Self::Tiled,
        Self::TiledMasked,
        Self::TiledF32,
        Self::TiledWide,
        Self::Hopper,
        Self::HopperMasked,
        Self::HopperPaged,
        Self::HopperFloat8,
        Self::SplitKv,
        Self::Decode,
        Self::DecodeCodes,
        Self::DecodePaged,
        Self::DecodePagedCodes,
    ];

    /// Cargo feature of this crate that compiles the family's entries.
    pub const fn feature(self) -> &'static str {
        match self {
            Self::Prologue => "family-prologue",
            Self::General => "family-general",
            Self::Unfused => "family-unfused",
            Self::Tiled => "family-tiled",
            Self::TiledMasked => "family-tiled-masked",
            Self::TiledF32 => "family-tiled-f32",
            Self::TiledWide => "family-tiled-wide",
            Self::Hopper => "family-hopper",
            Self::HopperMasked => "family-hopper-masked",
            Self::HopperPaged => "family-hopper-paged",
            Self::HopperFloat8 => "family-hopper-float8",
            Self::SplitKv => "family-split-kv",
            Self::Decode => "family-decode",
            Self::DecodeCodes => "family-decode-codes",
            Self::DecodePaged => "family-decode-paged",
            Self::DecodePagedCodes => "family-decode-paged-codes",
        }
    }

    /// PTX version, times ten, where the target's first one does not know all that the family uses.
    pub const fn ptx(self) -> Option<u32> {
        match self {
            // `st.async` came after the target.
            Self::Decode | Self::DecodeCodes | Self::DecodePaged | Self::DecodePagedCodes => {
                Some(81)
            }
            _ => None,
        }
    }

    /// Targets the family is shipped for, oldest first.
    pub const fn archs(self) -> &'static [&'static str] {
        match self {
            Self::General | Self::Unfused => &["sm_70"],
            // SM 80 has an instruction that rounds to bfloat16.
            Self::Prologue => &["sm_70", "sm_80"],
            Self::TiledMasked => &["sm_80"],
            Self::Tiled | Self::SplitKv => &["sm_80", "sm_90a"],
            Self::TiledF32 | Self::TiledWide => &["sm_80"],
            Self::Hopper
            | Self::HopperMasked
            | Self::HopperPaged
            | Self::HopperFloat8
            | Self::Decode
            | Self::DecodeCodes
            | Self::DecodePaged
            | Self::DecodePagedCodes => &["sm_90a"],
        }
    }
}

/// One kernel entry point.
pub struct Entry {
    /// Literal name of the PTX symbol.
    pub name: &'static str,
    /// Module it is compiled into.
    pub family: Family,
    /// Element type; `F32` where a kernel has integers only.
    pub dtype: DType,
    /// What the cache holds instead of elements.
    pub codes: Option<Format>,
    /// Largest head size; 0: any.
    pub head_size: u32,
    /// Query rows of a block's tile; 0: not tiled.
    pub rows: u32,
    /// Keys of a tile; 0: not tiled.
    pub keys: u32,
    /// Threads of a block, also the compiler's bound.
    pub threads: u32,
    /// Blocks that must fit on an SM together, as a bound for the compiler; 0: none.
    pub min_blocks: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Spills and stack frames are build errors.
    pub hot: bool,
    /// Oldest compute capability, times ten.
    pub min_sm: u32,
    /// Most blocks of a cluster; 1: it has none.
    pub max_cluster: u32,
    /// Blocks pass data to each other through global memory.
    pub communicates: bool,
    /// Names of the tensor maps and then of the pointer arguments, in order; the parameter struct follows them.
    pub arguments: &'static [&'static str],
    /// How many of the arguments are tensor maps.
    pub tensor_maps: usize,
    /// Size of the parameter struct.
    pub params_bytes: usize,
    /// Runs one thread of the kernel on the simulator. Unit tests run none, and would compile all of them once more.
    #[cfg(all(feature = "sim", not(test)))]
    pub simulate: fn(&gqa_sim::Arguments),
}

impl core::fmt::Debug for Entry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name)
    }
}

impl Entry {
    /// Name of the kernel without prefix and, where it ends the name, element type. `_out32`: of those with output in f32; `_i8`, `_i4`, `_f8`: of those whose cache
    /// holds codes. What follows an element type is the shape, where one head size or
    /// more has several: `_d` head size, `_r` query rows, `_k` keys of a tile, `_w` warps, `_lse` for sums that a log-sum-exp needs.
    pub fn kernel(&self) -> &'static str {
        let name = self.name.strip_prefix("gqa_").unwrap_or(self.name);
        let suffixes = ["_f32", "_f16", "_bf16"];
        suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
    }
}

/// All entry points.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    super::TABLES.iter().copied().flatten().copied().flatten()
}

/// The entry of that name.
pub fn find(name: &str) -> Option<&'static Entry> {
    entries().find(|entry| entry.name == name)
}
