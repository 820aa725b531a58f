//! What a cache stores: elements as they are, or [quantized values](super::Codes).

use crate::num::MmaElement;
use crate::params::DecodeParams;
use crate::simt::Shared;
use crate::tile::columns::{self, Columns};
use crate::tile::fragment::Fragments;
use crate::tile::swizzle::{Swizzled, WarpRead};
use bytemuck::Pod;

/// How a cache stores rows. Elements implement it for caches that are not quantized.
pub trait Cached: Copy {
    /// Type of queries and new rows.
    type Element: MmaElement;
    /// Operand type of the tensor cores.
    type Operand: MmaElement;
    /// Element type of pointers to the cache.
    type Cell: Pod;
    /// Format and scales of the call's quantized values.
    type Coding: Copy;
    /// The scales that a thread loads.
    type Scale;

    /// Channels per 16 bits of the cache. The products put so many adjacent channels into different
    /// column blocks (`first_channel`).
    const GROUP: u32;

    /// Whether S of eight query rows is transposed, as in [`flipped`](crate::tile::flipped).
    const FLIPS: bool;

    /// Whether the call has per-token scales.
    fn by_row(coding: Self::Coding) -> bool;

    /// Starts loading this thread's part of a KV head's scales, out of `threads` threads. Columns
    /// past `head_size` get `other`.
    fn load_scales(
        coding: Self::Coding,
        p: &DecodeParams,
        kv_head: u32,
        head_size: u32,
        other: f32,
        threads: u32,
    ) -> Self::Scale;

    /// Stores the loaded scales in shared memory.
    fn stage_scales(scale: Self::Scale, staging: ScaleStaging, threads: u32);

    /// Encodes `tokens` rotated new tokens as the cache stores them. Other threads may read them
    /// after [`prepare`](Self::prepare).
    fn encode<const D8: usize, const UNITS: usize>(
        coding: Self::Coding,
        tiles: &Tiles<Self, D8, UNITS>,
        staging: ScaleStaging,
        tokens: u32,
        block: Block,
    );

    /// Converts the rotated queries to operands, and synchronises the CTA. Returns the factor of
    /// products with them.
    fn prepare<const D8: usize, const UNITS: usize>(
        coding: Self::Coding,
        tiles: &Tiles<Self, D8, UNITS>,
        staging: ScaleStaging,
        block: Block,
    ) -> f32;

    /// Score bias of the offset integer encoding, subtracted from S.
    fn zero_scores<const M: usize, const HALVES: usize, const D8: usize>(
        coding: Self::Coding,
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    ) -> [[f32; 2]; M];

    /// As [`columns::scores`], or transposed.
    fn scores<const M: usize, const HALVES: usize, const UNITS: usize, const N8: usize>(
        coding: Self::Coding,
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
        zero_scores: &[[f32; 2]; M],
        keys: Swizzled<Self::Cell, UNITS>,
        read: &WarpRead<UNITS>,
    ) -> Fragments<M, N8>;

    /// As [`columns::accumulate`].
    fn accumulate<
        const M: usize,
        const HALVES: usize,
        const D8: usize,
        const UNITS: usize,
        const N8: usize,
    >(
        coding: Self::Coding,
        out: &mut Columns<M, D8>,
        weights: &Fragments<M, N8>,
        values: Swizzled<Self::Cell, UNITS>,
        read: &WarpRead<UNITS>,
    );

    /// Per-token scales of key and value number `number`.
    fn row_scales(coding: Self::Coding, number: usize) -> [f32; 2];

    /// Writes the per-token scales of a new key and value.
    fn store_row_scales(coding: Self::Coding, number: usize, of_row: [f32; 2]);

    /// Multiplies the lane's accumulators by the scales of its channels, or by `unit` with
    /// per-token scales.
    fn scale<const M: usize, const D8: usize>(
        coding: Self::Coding,
        out: &mut Columns<M, D8>,
        staging: ScaleStaging,
        unit: f32,
    );
}

/// The channel of the first column of column block `block`. The channels of its 8 columns are
/// `group` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn first_channel(block: u32, group: u32) -> u32 {
    8 * (block / group) * group + block % group
}

/// Tiles in shared memory: the rows of this step, and the new rows as the cache stores them; both
/// are the same tiles in a cache of elements.
pub struct Tiles<C: Cached, const D8: usize, const UNITS: usize> {
    pub(super) queries: Swizzled<C::Element, D8>,
    /// The prepared queries, which overwrite the queries.
    pub(super) operands: Swizzled<C::Operand, D8>,
    pub(super) keys: Swizzled<C::Element, D8>,
    pub(super) values: Swizzled<C::Element, D8>,
    pub(super) cached_keys: Swizzled<C::Cell, UNITS>,
    pub(super) cached_values: Swizzled<C::Cell, UNITS>,
}

/// Sizes of a CTA.
#[derive(Clone, Copy)]
pub struct Block {
    /// Query rows.
    pub rows: u32,
    /// Most new keys.
    pub keys: u32,
    /// Threads.
    pub threads: u32,
}

/// Shared memory for scales: those of the head's keys and values, per-token scales of new tokens,
/// and a word from each warp.
#[derive(Clone, Copy)]
pub struct ScaleStaging {
    /// Scales of the head's keys, one for each channel.
    pub keys: Shared<f32>,
    /// Scales of the head's values.
    pub values: Shared<f32>,
    /// Number of scales of each.
    pub channels: u32,
    /// One for each warp.
    pub words: Shared<u32>,
    /// Scales of a tile of new keys, then of new values.
    pub rows: Shared<f32>,
}

impl ScaleStaging {
    const WORDS: u32 = 32;

    /// Bytes for heads of `head_size` elements and tiles of `keys` keys.
    pub(super) const fn bytes(head_size: u32, keys: u32) -> u32 {
        4 * (2 * head_size + Self::WORDS + 2 * keys)
    }

    /// At byte offset `bytes` of the CTA's shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn at(bytes: u32, head_size: u32) -> Self {
        let keys = Shared::at(bytes);
        Self {
            keys,
            values: keys.offset(head_size),
            channels: head_size,
            words: Shared::at(bytes + 8 * head_size),
            rows: Shared::at(bytes + 8 * head_size + 4 * Self::WORDS),
        }
    }
}

impl<T: MmaElement> Cached for T {
    type Element = T;
    type Operand = T;
    type Cell = T;
    type Coding = ();
    type Scale = ();
    const GROUP: u32 = 1;
    const FLIPS: bool = false;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn by_row((): ()) -> bool {
        false
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_scales((): (), _: &DecodeParams, _: u32, _: u32, _: f32, _: u32) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage_scales((): (), _: ScaleStaging, _: u32) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn encode<const D8: usize, const UNITS: usize>(
        (): (),
        _: &Tiles<T, D8, UNITS>,
        _: ScaleStaging,
        _: u32,
        _: Block,
    ) {
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn prepare<const D8: usize, const UNITS: usize>(
        (): (),
        _: &Tiles<T, D8, UNITS>,
        _: ScaleStaging,
        _: Block,
    ) -> f32 {
        1.0
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn zero_scores<const M: usize, const HALVES: usize, const D8: usize>(
        (): (),
        _: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    ) -> [[f32; 2]; M] {
        [[0.0; 2]; M]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores<const M: usize, const HALVES: usize, const UNITS: usize, const N8: usize>(
        (): (),
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
        _: &[[f32; 2]; M],
        keys: Swizzled<T, UNITS>,
        read: &WarpRead<UNITS>,
    ) -> Fragments<M, N8> {
        columns::scores(queries, keys, read)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn accumulate<
        const M: usize,
        const HALVES: usize,
        const D8: usize,
        const UNITS: usize,
        const N8: usize,
    >(
        (): (),
        out: &mut Columns<M, D8>,
        weights: &Fragments<M, N8>,
        values: Swizzled<T, UNITS>,
        read: &WarpRead<UNITS>,
    ) {
        columns::accumulate::<T, M, HALVES, D8, UNITS, N8>(out, weights, values, read);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_scales((): (), _: usize) -> [f32; 2] {
        [1.0; 2]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_row_scales((): (), _: usize, _: [f32; 2]) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scale<const M: usize, const D8: usize>(
        (): (),
        _: &mut Columns<M, D8>,
        _: ScaleStaging,
        _: f32,
    ) {
    }
}
