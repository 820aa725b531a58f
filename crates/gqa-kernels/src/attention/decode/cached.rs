//! What a cache holds of keys and values: elements as they are, or [quantized
//! values](super::Quantized values).

use crate::num::MmaElement;
use crate::params::DecodeParams;
use crate::simt::Shared;
use crate::tile::columns::{self, Columns};
use crate::tile::fragment::Fragments;
use crate::tile::swizzle::{Swizzled, WarpRead};
use bytemuck::Pod;

/// A way to hold rows; elements hold themselves.
pub trait Cached: Copy {
    /// Type of queries and new rows.
    type Element: MmaElement;
    /// What the tensor cores multiply.
    type Operand: MmaElement;
    /// What pointers to the cache count.
    type Cell: Pod;
    /// How a call's cache holds numbers: format and scales of quantized values.
    type Coding: Copy;
    /// A thread's part of the scales.
    type Scale;

    /// Channels in 16 bits: of so many, side by side, the products make as many columns in as many
    /// blocks.
    const GROUP: u32;

    /// Whether scores of eight query rows have keys as rows, as in [`flipped`](crate::tile::flipped).
    const FLIPS: bool;

    /// Whether each row of the cache has scales of its own.
    fn by_row(coding: Self::Coding) -> bool;

    /// Asks for the part of one of `threads` threads of the scales of a KV head; of columns that
    /// heads of that size have not they are `other`.
    fn load_scales(
        coding: Self::Coding,
        p: &DecodeParams,
        kv_head: u32,
        head_size: u32,
        other: f32,
        threads: u32,
    ) -> Self::Scale;

    /// Leaves it where the block can read it.
    fn stage_scales(scale: Self::Scale, staging: ScaleStaging, threads: u32);

    /// Makes of `tokens` new rows, rotated, what the cache holds; others may read it behind
    /// [`prepare`](Self::prepare).
    fn encode<const D8: usize, const UNITS: usize>(
        coding: Self::Coding,
        tiles: &Tiles<Self, D8, UNITS>,
        staging: ScaleStaging,
        tokens: u32,
        block: Block,
    );

    /// Makes operands of the queries, rotated, and lets the block read what anyone has encoded.
    /// Returns what products with them are to be multiplied by.
    fn prepare<const D8: usize, const UNITS: usize>(
        coding: Self::Coding,
        tiles: &Tiles<Self, D8, UNITS>,
        staging: ScaleStaging,
        block: Block,
    ) -> f32;

    /// Scores of a lane's rows that products have too much.
    fn zero_scores<const M: usize, const HALVES: usize, const D8: usize>(
        coding: Self::Coding,
        queries: impl Fn(usize) -> [[[u32; 2]; M]; 2],
    ) -> [[f32; 2]; M];

    /// As [`columns::scores`], or flipped.
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

    /// Those of the key and the value of that number.
    fn row_scales(coding: Self::Coding, number: usize) -> [f32; 2];

    /// Writes those of a new key and value.
    fn store_row_scales(coding: Self::Coding, number: usize, of_row: [f32; 2]);

    /// Multiplies what the lane has accumulated by the scales of its channels, or by `unit` where
    /// rows have scales.
    fn scale<const M: usize, const D8: usize>(
        coding: Self::Coding,
        out: &mut Columns<M, D8>,
        staging: ScaleStaging,
        unit: f32,
    );
}

/// The channel that the first column of a block of 8 is; from one to the next they are `group`
/// apart.
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

/// Sizes of a block.
#[derive(Clone, Copy)]
pub struct Block {
    /// Query rows.
    pub rows: u32,
    /// Most new keys.
    pub keys: u32,
    /// Threads.
    pub threads: u32,
}

/// Where the threads of a block that reads quantized values tell each other: scales of the head's
/// keys and values, of new rows where each has its own, and a word from each warp.
#[derive(Clone, Copy)]
pub struct ScaleStaging {
    /// Scales of the head's keys, one for each channel.
    pub keys: Shared<f32>,
    /// Scales of its values.
    pub values: Shared<f32>,
    /// How many of each.
    pub channels: u32,
    /// One for each warp.
    pub words: Shared<u32>,
    /// Scales of new keys, and behind those of a tile those of new values.
    pub rows: Shared<f32>,
}

impl ScaleStaging {
    const WORDS: u32 = 32;

    /// Bytes for heads of `head_size` elements and tiles of `keys` keys.
    pub(super) const fn bytes(head_size: u32, keys: u32) -> u32 {
        4 * (2 * head_size + Self::WORDS + 2 * keys)
    }

    /// The one that starts `bytes` bytes into the block's shared memory.
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
