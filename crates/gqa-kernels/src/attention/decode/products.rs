//! How the four warps of a team multiply its 64 rows by a tile: as a warpgroup, or 16 rows per
//! warp.

use crate::num::MmaElement;
use crate::simt::{fence_proxy_async, lane, opaque, warp, wgmma_commit, wgmma_fence, wgmma_wait};
use crate::tile::columns::{self, load_depth, load_queries};
use crate::tile::fragment::{Fragments, accumulate, pack};
use crate::tile::swizzle::{Swizzled, WarpRead};

/// Warps of a team, which share 64 rows.
pub(super) const TEAM: u32 = 4;

/// Scores per thread where a warpgroup multiplies 64 rows by 64 keys.
const SCORES: usize = 32;

/// Whether queries and accumulators of `rows` rows per warp take so many registers that the queries
/// must stay in shared memory.
pub(super) const fn is_tight(rows: u32, d8: usize) -> bool {
    rows * d8 as u32 > 384
}

/// The first of the team's rows that belongs to this warp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn first_row() -> u32 {
    warp() % TEAM * 16
}

/// How a team multiplies. All its warps make the same calls in the same order; each gets the
/// results of its 16 rows, laid out as in [`fragment`](crate::tile::fragment).
pub trait Products {
    /// Whether operands lie in column chunks of 128 bytes.
    const IN_CHUNKS: bool;

    /// Registers that a lane holds across the mainloop.
    type Lane<const D8: usize, const UNITS: usize>;

    /// Loads them from the team's queries.
    fn lane<T: MmaElement, const D8: usize, const UNITS: usize>(
        queries: Swizzled<T, D8>,
    ) -> Self::Lane<D8, UNITS>;

    /// Queries times a tile of keys.
    fn scores<T: MmaElement, const D8: usize, const UNITS: usize, const N8: usize>(
        lane: &Self::Lane<D8, UNITS>,
        queries: Swizzled<T, D8>,
        keys: Swizzled<T, UNITS>,
    ) -> Fragments<1, N8>;

    /// Adds P times a tile of values.
    fn add_values<T: MmaElement, const D8: usize, const UNITS: usize, const N8: usize>(
        lane: &Self::Lane<D8, UNITS>,
        acc: &mut Fragments<1, D8>,
        weights: &Fragments<1, N8>,
        values: Swizzled<T, UNITS>,
    );

    /// Makes this thread's writes and copies to shared memory visible to the products that follow
    /// the next barrier.
    fn fence();
}

/// Warpgroup products (wgmma) with operands in shared memory: an SM reads keys from shared memory
/// once for all rows. Only SM 90a has these instructions.
pub struct Wgmma;

impl Products for Wgmma {
    const IN_CHUNKS: bool = true;
    type Lane<const D8: usize, const UNITS: usize> = ();

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lane<T: MmaElement, const D8: usize, const UNITS: usize>(_: Swizzled<T, D8>) {}

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores<T: MmaElement, const D8: usize, const UNITS: usize, const N8: usize>(
        (): &(),
        queries: Swizzled<T, D8>,
        keys: Swizzled<T, UNITS>,
    ) -> Fragments<1, N8> {
        const { assert!(4 * N8 == SCORES) }
        let (q, k) = (queries.address(), keys.address());
        wgmma_fence();
        let mut scores: [f32; SCORES] = T::wgmma(descriptor(q, 16), descriptor(k, 16));
        for depth in 1..D8 as u32 / 2 {
            let (chunk, within) = (depth / 4 * 128, depth % 4 * 32);
            let at = |start, rows| descriptor(start + chunk * rows + within, 16);
            T::wgmma_add(&mut scores, at(q, 16 * TEAM), at(k, 8 * N8 as u32));
        }
        wgmma_commit();
        wgmma_wait::<0>();
        [core::array::from_fn(|block| core::array::from_fn(|i| scores[4 * block + i]))]
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add_values<T: MmaElement, const D8: usize, const UNITS: usize, const N8: usize>(
        (): &(),
        acc: &mut Fragments<1, D8>,
        weights: &Fragments<1, N8>,
        values: Swizzled<T, UNITS>,
    ) {
        let (acc, weights) = (acc[0].as_flattened_mut(), &weights[0]);
        match D8 {
            8 => add_to::<T, 32, N8>(acc, weights, values.address()),
            10 => add_to::<T, 40, N8>(acc, weights, values.address()),
            12 => add_to::<T, 48, N8>(acc, weights, values.address()),
            _ => add_to::<T, 64, N8>(acc, weights, values.address()),
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn fence() {
        fence_proxy_async();
    }
}

/// `acc += weights · values`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_to<T: MmaElement, const O: usize, const N8: usize>(
    acc: &mut [f32],
    weights: &[[f32; 4]; N8],
    values: u32,
) {
    let Some(acc) = acc.first_chunk_mut::<O>() else { return };
    let chunk_bytes = 8 * N8 as u32 * 128;
    let weights: [_; SCORES / 8] = core::array::from_fn(|depth| pack::<T, N8>(weights, depth));
    wgmma_fence();
    for depth in 0..SCORES / 8 {
        let values = descriptor(values + depth as u32 * 16 * 128, chunk_bytes);
        T::wgmma_registers(acc, true, weights[depth], values);
    }
    wgmma_commit();
    wgmma_wait::<0>();
}

/// wgmma descriptor of an operand in chunks with the 128-byte swizzle: 8-row groups 1024 bytes
/// apart, chunks `chunk_bytes` apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn descriptor(address: u32, chunk_bytes: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    const GROUP: u64 = (1024 >> 4) << 32;
    SWIZZLE_128 | GROUP | u64::from(chunk_bytes >> 4) << 16 | u64::from(address >> 4 & 0x3fff)
}

/// Warp products (mma): each warp loads the tile into its registers.
pub struct Mma;

/// Registers of a lane across the mainloop.
pub struct MmaLane<const D8: usize, const UNITS: usize> {
    /// The warp's queries; unused where registers are short.
    queries: columns::Queries<1, D8>,
    keys: WarpRead<UNITS>,
    values: WarpRead<UNITS>,
}

impl Products for Mma {
    const IN_CHUNKS: bool = false;
    type Lane<const D8: usize, const UNITS: usize> = MmaLane<D8, UNITS>;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lane<T: MmaElement, const D8: usize, const UNITS: usize>(
        queries: Swizzled<T, D8>,
    ) -> MmaLane<D8, UNITS> {
        let queries = match is_tight(16, D8) {
            true => [[[0; 2]; 1]; D8],
            false => load_queries::<T, 1, 2, D8>(queries.from(first_row())),
        };
        MmaLane { queries, keys: WarpRead::of(lane()), values: WarpRead::by_columns(lane()) }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn scores<T: MmaElement, const D8: usize, const UNITS: usize, const N8: usize>(
        lane: &MmaLane<D8, UNITS>,
        queries: Swizzled<T, D8>,
        keys: Swizzled<T, UNITS>,
    ) -> Fragments<1, N8> {
        if is_tight(16, D8) {
            let rows = queries.from(opaque(first_row()));
            let load = |depth| load_depth::<T, 1, 2, D8>(rows, depth);
            columns::scores::<T, 1, UNITS, N8>(load, keys, &lane.keys)
        } else {
            let kept = |depth: usize| [lane.queries[2 * depth], lane.queries[2 * depth + 1]];
            columns::scores::<T, 1, UNITS, N8>(kept, keys, &lane.keys)
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add_values<T: MmaElement, const D8: usize, const UNITS: usize, const N8: usize>(
        lane: &MmaLane<D8, UNITS>,
        acc: &mut Fragments<1, D8>,
        weights: &Fragments<1, N8>,
        values: Swizzled<T, UNITS>,
    ) {
        accumulate(acc, weights, values, &lane.values);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn fence() {}
}
