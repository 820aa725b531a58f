//! FlashAttention with TMA loads of K and V: prefill on Hopper and later GPUs, mainly those that
//! have TMA but no `wgmma`. One thread starts the copy of a tile, and the copy takes no registers,
//! so that the warps do little but multiply.
//!
//! **One CTA** computes the same as in [`tiled`](super), on the same grid. For heads over 128 it
//! has eight warps and an SM to itself, so that each K and V tile serves 128 rows.
//!
//! **Tensors**: as in `tiled`; K and V through tensor maps of (batch, KV head, row, head size),
//! with boxes of `KEYS` rows by 64 columns.
//!
//! **Shared memory**: `queries | stages | barriers | KV head and sequence`. There are two stages of
//! `keys | values | rows`; the first stage's rows hold the description of each query row. Queries,
//! keys and values are cut into chunks of 64 columns with the 128-byte swizzle.
//!
//! **Pipeline**, for key tile `j` in stage `j % 2`. Keys and values of a stage each have two
//! mbarriers: *full* once the bytes have landed, and *empty* once each warp has read them. One
//! thread starts a copy; the warps take turns.
//!
//! ```text
//! wait for K_j   S = Q K_jᵀ            release K_j   start V_{j+1} when V_{j-1} is empty
//! wait for V_j   softmax, O += P V_j   release V_j   start K_{j+2} when K_j is empty
//! ```
//!
//! A CTA barrier before the loop publishes queries, row descriptions and the initialised mbarriers.
//! Another one follows the clearing of values past the end of the sequence, which only the last
//! tile can hold.

use super::Tiled;
use super::layout::SideBySide;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::{
    Global, Rolled, Shared, TensorMap, block_idx_x, cp_async_commit, cp_async_wait,
    fence_mbarrier_init, lane, mbarrier_arrive, mbarrier_arrive_expect, mbarrier_init,
    mbarrier_wait, opaque, prefetch_tensor_map, shared_base, st_shared_vec, sync_threads,
    sync_warp, thread_idx, tma_load, warp,
};
use crate::tile::fragment::{Fragments, accumulate_at, left_operands, scores_at, store, zeros};
use crate::tile::rows::{Rows, close_all};
use crate::tile::seqlens::Seqlens;
use crate::tile::softmax::{ScoreScale, States, mask, weigh_with_slack};
use crate::tile::swizzle::{Swizzled, swizzled_bytes};

/// 16-byte units of a row of a chunk.
const UNITS: usize = 8;
/// Columns of a chunk.
const COLUMNS: u32 = 64;
const STAGES: u32 = 2;

/// Byte offsets of a stage's barriers.
const K_FULL: u32 = 0;
const V_FULL: u32 = 8;
const K_EMPTY: u32 = 16;
const V_EMPTY: u32 = 24;
const BARRIERS: u32 = 32;

/// A lane's share in reading 16 rows of two units by `ldmatrix`, from a tile in chunks: its address
/// for the first pair of units. Chunks are aligned to 1024 bytes, so that an exclusive or gives the
/// addresses of the other pairs.
#[derive(Clone, Copy)]
struct Read {
    first: u32,
}

impl Read {
    /// As [`WarpRead::of`](crate::tile::swizzle::WarpRead::of).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of<T: MmaElement>(lane: u32, tile: Swizzled<T, UNITS>) -> Self {
        let row = lane / 16 * 8 + lane % 8;
        Self { first: tile.address() + row * 128 + 16 * ((lane / 8 % 2) ^ (lane % 8)) }
    }

    /// As [`WarpRead::by_columns`](crate::tile::swizzle::WarpRead::by_columns).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn by_columns<T: MmaElement>(lane: u32, tile: Swizzled<T, UNITS>) -> Self {
        Self { first: tile.address() + lane % 16 * 128 + 16 * ((lane / 16) ^ (lane % 8)) }
    }

    /// The lane's `ldmatrix` address for rows `16 block ..` and units `2 pair ..` of a tile of
    /// `rows` rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn address(self, rows: u32, block: usize, pair: usize) -> u32 {
        let further = 128 * (16 * block as u32 + rows * (pair / 4) as u32);
        (self.first ^ (32 * (pair % 4) as u32)) + further
    }
}

/// Position in the pipeline.
#[derive(Clone, Copy)]
struct Stage {
    number: u32,
    /// Parity of the phase in which the stage is filled.
    parity: u32,
}

impl Stage {
    /// The position of the next tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn next(self) -> Self {
        const { assert!(STAGES == 2) }
        Self { number: self.number ^ 1, parity: self.parity ^ self.number }
    }

    /// Whether this thread starts the copies: the warps take turns. `of_keys` is 1 for keys, 0 for
    /// values.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_turn(self, of_keys: u32) -> bool {
        thread_idx() == 32 * (self.number + 2 * (self.parity ^ of_keys))
    }
}

impl<const M: usize, const D8: usize, const N8: usize, const THREADS: u32>
    Tiled<M, D8, N8, THREADS, false>
{
    /// Shared memory of a CTA, in bytes.
    pub const TMA_SHARED_BYTES: u32 = Self::AT_HEAD + 16;

    const CHUNKS: u32 = D8 as u32 / 8;
    const TILE_BYTES: u32 = swizzled_bytes(Self::KEYS, D8);
    const AT_STAGES: u32 = swizzled_bytes(Self::ROWS, D8);
    const STAGE_BYTES: u32 = 2 * Self::TILE_BYTES + 16 * Self::ROWS;
    const AT_BARRIERS: u32 = Self::AT_STAGES + STAGES * Self::STAGE_BYTES;
    const AT_HEAD: u32 = Self::AT_BARRIERS + STAGES * BARRIERS;

    /// The kernel with TMA loads of K and V.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_tma<T: MmaElement>(
        k: TensorMap,
        v: TensorMap,
        q: Global<T>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        p: AttentionParams,
    ) {
        const { assert!(D8 % 8 == 0 && Self::STAGE_BYTES % 1024 == 0) }
        if thread_idx() == 0 {
            prefetch_tensor_map(k);
            prefetch_tensor_map(v);
            for stage in 0..STAGES {
                let barriers = Self::barriers(stage);
                mbarrier_init(barriers + K_FULL, 1);
                mbarrier_init(barriers + V_FULL, 1);
                mbarrier_init(barriers + K_EMPTY, THREADS / 32);
                mbarrier_init(barriers + V_EMPTY, THREADS / 32);
            }
            fence_mbarrier_init();
        }
        let rows = Rows::of_block(&p, seqlens, block_idx_x(), Self::ROWS);
        Self::load_queries(&p, &rows, SideBySide, q, Swizzled::in_chunks_at(0, Self::ROWS));
        cp_async_commit();

        let mut acc = zeros::<M, D8>();
        let mut states = [[SoftmaxState::EMPTY; 2]; M];
        Self::attend_tma::<T>(&p, &rows, [k, v], &mut states, &mut acc);

        let factors = close_all(&p, &rows, head_sink, lse, states, Self::row);
        sync_warp();
        let mine = Swizzled::<T, D8>::in_chunks_at(0, Self::ROWS).from(Self::WARP_ROWS * warp());
        store(&acc, factors, mine);
        sync_warp();
        Self::write(&p, &rows, out, mine);
    }

    /// Address of a stage's barriers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn barriers(stage: u32) -> u32 {
        shared_base() + Self::AT_BARRIERS + stage * BARRIERS
    }

    /// Where shared memory holds the KV head and the batch entry: no registers are left for them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn head_and_batch() -> Shared<u32> {
        Shared::at(Self::AT_HEAD)
    }

    /// Starts copying the keys from `begin` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_keys(map: TensorMap, begin: u32, stage: Stage) {
        Self::load(map, begin, stage, 0, K_FULL);
    }

    /// Starts copying the values from `begin` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_values(map: TensorMap, begin: u32, stage: Stage) {
        Self::load(map, begin, stage, Self::TILE_BYTES, V_FULL);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(map: TensorMap, begin: u32, stage: Stage, offset: u32, full: u32) {
        let barrier = Self::barriers(stage.number) + full;
        let place = shared_base() + Self::AT_STAGES + stage.number * Self::STAGE_BYTES + offset;
        mbarrier_arrive_expect(barrier, Self::TILE_BYTES);
        let [kv_head, batch, ..] = Self::head_and_batch().load_vec(0);
        for chunk in 0..Self::CHUNKS {
            let at = [chunk * COLUMNS, begin, kv_head, batch];
            tma_load(place + chunk * Self::KEYS * 128, map, at, barrier);
        }
    }

    /// Arrives at an empty barrier on behalf of this warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn release(empty: u32) {
        sync_warp();
        if lane() == 0 {
            mbarrier_arrive(empty);
        }
    }

    /// The mainloop over key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_tma<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        [k, v]: [TensorMap; 2],
        states: &mut States<M>,
        acc: &mut Fragments<M, D8>,
    ) {
        let scale = ScoreScale::new(p.scale, p.softcap);
        let span = rows.span();
        let end = span.some.end;
        let mut begin = span.some.first;
        let mut stage = Stage { number: 0, parity: 0 };
        if thread_idx() == 0 && begin < end {
            Self::head_and_batch().store_vec(0, [rows.kv_head, rows.batch, 0, 0]);
            Self::load_keys(k, begin, stage);
            Self::load_values(v, begin, stage);
            if begin + Self::KEYS < end {
                Self::load_keys(k, begin + Self::KEYS, stage.next());
            }
        }
        cp_async_wait::<0>();
        sync_threads();
        let queries = Self::read_queries::<T>(lane());
        let kept = left_operands(Self::KEPT_PAIRS, |m, pair| queries.address(Self::ROWS, m, pair));

        while begin < end {
            let barriers = Self::barriers(stage.number);
            let keys = Swizzled::<T, UNITS>::at(Self::AT_STAGES + stage.number * Self::STAGE_BYTES);
            let values = keys.from(Self::KEYS * Self::CHUNKS);
            let next = begin + Self::KEYS;

            mbarrier_wait(barriers + K_FULL, stage.parity);
            if next > end && end < p.capacity {
                mbarrier_wait(barriers + V_FULL, stage.parity);
                Self::clear_values(values, end - begin);
            }
            // Recomputed in each step, as in `reads` of the parent module.
            let this = opaque(lane());
            let (left, right) = (Self::read_queries::<T>(this), Read::of(this, keys));
            let mut weights = scores_at::<T, M, D8, N8>(
                (&kept, Self::KEPT_PAIRS),
                |m, pair| left.address(Self::ROWS, m, pair),
                |block, pair| right.address(Self::KEYS, block, pair),
            );
            Self::release(barriers + K_EMPTY);
            if stage.is_turn(0) && next < end {
                let stage = stage.next();
                mbarrier_wait(Self::barriers(stage.number) + V_EMPTY, stage.parity ^ 1);
                Self::load_values(v, next, stage);
            }

            scale.adjust(&mut weights);
            if span.is_partial(begin, Self::KEYS) {
                mask(&mut weights, begin, |m, half| Self::row(m, half).visible);
            }
            weigh_with_slack(states, &mut weights, acc, scale);

            mbarrier_wait(barriers + V_FULL, stage.parity);
            let read = Read::by_columns(opaque(lane()), values);
            accumulate_at::<T, M, D8, N8>(acc, &weights, |block, pair| {
                read.address(Self::KEYS, block, pair)
            });
            Self::release(barriers + V_EMPTY);
            if stage.is_turn(1) && next + Self::KEYS < end {
                mbarrier_wait(barriers + K_EMPTY, stage.parity);
                let stage = Stage { parity: stage.parity ^ 1, ..stage };
                Self::load_keys(k, next + Self::KEYS, stage);
            }
            begin = next;
            stage = stage.next();
        }
    }

    /// A lane's addresses for the warp's query rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn read_queries<T: MmaElement>(lane: u32) -> Read {
        Read::by_columns(lane, Swizzled::<T, UNITS>::at(0).from(Self::WARP_ROWS * warp()))
    }

    /// Clears values from row `valid` on: rows past the end of the sequence may hold anything, NaN
    /// included, and 0 · NaN is NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clear_values<T: MmaElement>(values: Swizzled<T, UNITS>, valid: u32) {
        for chunk in 0..Self::CHUNKS {
            let chunk = values.from(Self::KEYS * chunk).address();
            for unit in Rolled(8 * valid + opaque(thread_idx())..8 * Self::KEYS, THREADS) {
                st_shared_vec(chunk + 16 * unit, [0; 4]);
            }
        }
        sync_threads();
    }
}
