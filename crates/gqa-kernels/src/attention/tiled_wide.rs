//! FlashAttention on tensor cores for heads larger than 256, whose output does not fit the
//! registers of a warp: prefill, chunked prefill and decode.
//!
//! **One CTA** computes a tile of `ROWS` packed query rows, packed as in [`tiled`](super::tiled),
//! against one split of the keys that they see. A *group* of warps shares each 16 `M` rows: each
//! warp computes the scores of some of a tile's keys, and accumulates some of the output's columns.
//!
//! **Grid**: `row tiles × KV heads × batch` in x, last rows first; splits of the keys in y.
//! **CTA**: `THREADS` threads.
//!
//! **Tensors**: q, k, v, out and lse as in [`tiled`](super::tiled). With more than one split the
//! CTA writes partial_out and partial_lse, as [`split_kv`](super::split_kv) does, and
//! [`combine`](super::combine) merges them into out and lse; partial_out is written in pairs of
//! f32.
//!
//! **Shared memory**: `queries [ROWS] | keys [KEYS] | values [KEYS]`, swizzled rows of `HEAD_SIZE`
//! elements; P as `weights [ROWS]`, swizzled rows of `KEYS` elements; the description of each row;
//! for each row one f32 per warp of its group, for reductions. In the epilogue the output passes
//! through each warp's columns of the query rows to become 16-byte stores.
//!
//! **Pipeline**: a barrier publishes the row descriptions. Then, for key tile `j`:
//!
//! ```text
//! wait for K_j ‖ barrier (K_j has arrived; all are done with V_{j-1} and P)       start V_j
//!     S = Q K_jᵀ of some keys, mask, maxima to shared memory
//!     barrier of the group (maxima are stored)
//!     softmax, P to shared memory
//! wait for V_j ‖ barrier (V_j has arrived, P is stored; all have read K_j)    start K_{j+1}
//!     O += P V_j of some columns
//! ```
//!
//! Two CTA barriers lie between two writes of a maximum. After the loop the warps' sums take the
//! place of the maxima, between barriers of the group.
//!
//! **Numerics**: as in [`tiled`](super::tiled).

#[cfg(not(target_arch = "nvptx64"))]
use super::split_kv::MAX_SPLITS;
use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::{
    Global, Shared, any_sync, block_idx_x, block_idx_y, cp_async_commit, cp_async_wait, lane, max,
    named_barrier_sync, sync_threads, sync_warp, thread_idx, warp,
};
use crate::tile::fragment::{Fragments, column_of, row_of, scores, store, zeros};
use crate::tile::rows::{Row, Rows, close, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::softmax::{ScoreScale, States, mask, row_max, total, weigh_against};
use crate::tile::swizzle::{RowCopy, Swizzled, WarpRead, swizzled_bytes};
use crate::tile::wide::{accumulate, store_weights};

/// A tile shape. A warp has `M` 16-row MMA tiles; it computes the scores of `N8` of the `K8` 8-key
/// MMA tiles, and accumulates `D8` of the `UNITS` 8-column MMA tiles.
pub struct TiledWide<
    const THREADS: u32,
    const M: usize,
    const N8: usize,
    const K8: usize,
    const D8: usize,
    const UNITS: usize,
>;

// One shape per number of rows and size of shared memory. Every warp has one 16-row MMA tile: two
// would halve the reads of V from shared memory, but are slower.

/// Decode with 99 KiB of shared memory per CTA: 16 rows, 32 keys.
pub type Rows16Keys32 = TiledWide<128, 1, 1, 4, 16, 64>;
/// Decode with 163 KiB of shared memory per CTA.
pub type Rows16Keys64 = TiledWide<256, 1, 1, 8, 8, 64>;
/// Short chunks, and prefill with 99 KiB of shared memory per CTA.
pub type Rows32Keys32 = TiledWide<256, 1, 1, 4, 16, 64>;
/// Short chunks with 227 KiB of shared memory per CTA.
pub type Rows32Keys64 = TiledWide<256, 1, 2, 8, 16, 64>;
/// Prefill with 163 KiB of shared memory per CTA.
pub type Rows64Keys32 = TiledWide<256, 1, 2, 4, 32, 64>;
/// Prefill with 227 KiB of shared memory per CTA.
pub type Rows64Keys64 = TiledWide<256, 1, 4, 8, 32, 64>;

/// Grid of a call whose kernel has tiles of `rows` rows.
pub fn grid(p: &AttentionParams, rows: u32) -> [u32; 3] {
    [row_tiles(p, rows) * p.kv_heads * p.batch, p.splits, 1]
}

/// Number of KV splits for tiles of `rows` rows and `keys` keys that minimises the estimated time
/// on `multiprocessors` SMs, if the longest sequence has `max_keys` keys.
///
/// An SM takes as long as its CTAs would take one after the other, however many of them it holds.
/// Times are in microseconds on an H200, where a CTA processes 16 keys per microsecond; then
/// [`combine`](super::combine) merges the splits.
#[cfg(not(target_arch = "nvptx64"))]
pub fn splits(
    p: &AttentionParams,
    rows: u32,
    keys: u32,
    max_keys: u32,
    multiprocessors: u32,
) -> u32 {
    /// Keys that a CTA processes in a microsecond.
    const RATE: u64 = 16;
    /// Cost of starting and ending a CTA; cost of starting the merge; splits of a row that the
    /// merge reads in a microsecond.
    const BLOCK: u64 = 3;
    const MERGE: u64 = 3;
    const MERGED: u64 = 10;
    /// Bytes of split results that are written and read in a microsecond.
    const BYTES: u64 = 2 << 20;
    let visible =
        if p.window > 0 { max_keys.min(p.window.saturating_add(p.q_len - 1)) } else { max_keys };
    let tiles = visible.div_ceil(keys).max(1);
    let units = u64::from(row_tiles(p, rows)) * u64::from(p.kv_heads) * u64::from(p.batch);
    let results =
        4 * u64::from(p.batch) * u64::from(p.q_heads) * u64::from(p.q_len) * u64::from(p.head_size);
    let time = |splits: u32| {
        let blocks = (units * u64::from(splits)).div_ceil(u64::from(multiprocessors.max(1)));
        let parts = u64::from(splits);
        let merge = if splits == 1 { 0 } else { MERGE + parts / MERGED + parts * results / BYTES };
        let block = u64::from(tiles.div_ceil(splits)) * u64::from(keys) / RATE + BLOCK;
        blocks * block + merge
    };
    (1..=tiles.min(MAX_SPLITS)).min_by_key(|&splits| time(splits)).unwrap_or(1)
}

impl<
    const THREADS: u32,
    const M: usize,
    const N8: usize,
    const K8: usize,
    const D8: usize,
    const UNITS: usize,
> TiledWide<THREADS, M, N8, K8, D8, UNITS>
{
    /// Lowest compute capability, times ten.
    pub const MIN_SM: u32 = 80;
    /// Largest head size.
    pub const HEAD_SIZE: u32 = UNITS as u32 * 8;
    /// Packed query rows of a CTA.
    pub const ROWS: u32 = THREADS / Self::GROUP * Self::GROUP_ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = K8 as u32 * 8;
    /// Threads of a CTA.
    pub const THREADS: u32 = THREADS;
    /// Shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = Self::NUMBERS + Self::ROWS * Self::WARPS * 4;

    /// Warps of a group.
    const WARPS: u32 = (K8 / N8) as u32;
    /// Threads of a group.
    const GROUP: u32 = 32 * Self::WARPS;
    /// Query rows of a group.
    const GROUP_ROWS: u32 = 16 * M as u32;
    const WEIGHTS: u32 = swizzled_bytes(Self::ROWS + 2 * Self::KEYS, UNITS);
    const KEPT: u32 = Self::WEIGHTS + swizzled_bytes(Self::ROWS, K8);
    const NUMBERS: u32 = Self::KEPT + 16 * Self::ROWS;

    /// The kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: Global<T>,
        k: Global<T>,
        v: Global<T>,
        seqlens: Seqlens,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        partial_out: Global<[f32; 2]>,
        partial_lse: Global<f32>,
        p: AttentionParams,
    ) {
        const { assert!(K8 / N8 == UNITS / D8 && K8 % N8 == 0 && UNITS % D8 == 0) };
        let rows = Rows::of_block(&p, seqlens, block_idx_x(), Self::ROWS);
        Self::load_queries(&p, &rows, q);

        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]; M], zeros::<M, D8>());
        Self::attend(&p, &rows, k, v, &mut states, &mut acc);

        let states = Self::over_group(states);
        if p.splits == 1 {
            let factors = Self::close(&p, &rows, states, head_sink, lse);
            Self::write(&p, &rows, &acc, factors, out);
        } else {
            Self::write_partial(&p, &rows, &acc, states, partial_out, partial_lse);
        }
    }

    /// This warp's group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn group() -> u32 {
        warp() / Self::WARPS
    }

    /// This warp's number in its group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn member() -> u32 {
        warp() % Self::WARPS
    }

    /// Waits for the warps of the group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sync_group() {
        if THREADS == Self::GROUP {
            sync_threads();
        } else {
            named_barrier_sync(1 + Self::group(), Self::GROUP);
        }
    }

    /// Query rows of the group.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement>() -> Swizzled<T, UNITS> {
        Swizzled::at(0).from(Self::GROUP_ROWS * Self::group())
    }

    /// Address of row `r`'s description.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept(r: u32) -> Shared<u32> {
        Shared::at(Self::KEPT + 16 * r)
    }

    /// A lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(m: usize, half: usize) -> Row {
        Row::kept(Self::kept(Self::row_of(m, half)))
    }

    /// Number of a lane's row in the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_of(m: usize, half: usize) -> u32 {
        Self::GROUP_ROWS * Self::group() + 16 * m as u32 + row_of(half)
    }

    /// Where the group's warps exchange their values of a lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn numbers(m: usize, half: usize) -> Shared<f32> {
        Shared::at(Self::NUMBERS).offset(Self::row_of(m, half) * Self::WARPS)
    }

    /// Stores the row descriptions, then starts copying the queries.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_queries<T: MmaElement>(p: &AttentionParams, rows: &Rows, q: Global<T>) {
        if thread_idx() < Self::ROWS {
            rows.row(thread_idx()).keep(Self::kept(thread_idx()));
        }
        sync_threads();
        let copy = RowCopy::<UNITS, THREADS>::of(thread_idx());
        copy.start(Swizzled::<T, UNITS>::at(0), Self::ROWS, p.head_size, |r| {
            let row = Row::kept(Self::kept(r));
            let exists = row.s < p.q_len;
            let start = if exists { p.q.at(rows.batch, row.head, row.s) } else { 0 };
            (q.offset(start), exists)
        });
    }

    /// The mainloop over key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        k: Global<T>,
        v: Global<T>,
        states: &mut States<M>,
        acc: &mut Fragments<M, D8>,
    ) {
        let copy = RowCopy::<UNITS, THREADS>::of(thread_idx());
        let read @ [left, _] = [WarpRead::by_columns(lane()), WarpRead::of(lane())];
        let read_weights = WarpRead::by_columns(lane());
        let keys = Swizzled::<T, UNITS>::at(swizzled_bytes(Self::ROWS, UNITS));
        let values = keys.from(Self::KEYS);
        let my_keys = 8 * N8 as u32 * Self::member();
        let my_values = values.from_unit(D8 as u32 * Self::member());
        let group_weights =
            Swizzled::<T, K8>::at(Self::WEIGHTS).from(Self::GROUP_ROWS * Self::group());
        let k = (k.offset(p.k.at(rows.batch, rows.kv_head, 0)), p.k.row);
        let v = (v.offset(p.v.at(rows.batch, rows.kv_head, 0)), p.v.row);
        let scale = ScoreScale::new(p.scale, p.softcap);
        let span = rows.span();
        let tiles = span.share(Self::KEYS, block_idx_y(), p.splits);
        let copy = |tile, source, begin| {
            copy.start_rows(tile, Self::KEYS, p.head_size, source, begin..span.some.end);
            cp_async_commit();
        };

        let mut begin = span.some.first + tiles.start * Self::KEYS;
        let end = span.some.end.min(span.some.first + tiles.end * Self::KEYS);
        copy(keys, k, begin);
        while begin < end {
            cp_async_wait::<0>();
            sync_threads();
            copy(values, v, begin);

            let mut weights = scores::<T, M, UNITS, N8>(Self::queries(), keys.from(my_keys), &read);
            scale.adjust(&mut weights);
            if span.is_partial(begin + my_keys, 8 * N8 as u32) {
                mask(&mut weights, begin + my_keys, |m, half| Self::row(m, half).visible);
            }
            let rescale = Self::weigh(states, &mut weights, scale);
            store_weights(&weights, group_weights, N8 as u32 * Self::member());

            cp_async_wait::<0>();
            sync_threads();
            let next = begin + Self::KEYS;
            if next < end {
                copy(keys, k, next);
            }

            multiply(acc, rescale);
            accumulate(acc, group_weights, my_values, &read_weights, &left);
            begin = next;
        }
        cp_async_wait::<0>();
        sync_threads();
    }

    /// Turns the warp's scores into P with the group's new row maxima; returns the rescale factors
    /// of the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn weigh(
        states: &mut States<M>,
        weights: &mut Fragments<M, N8>,
        scale: ScoreScale,
    ) -> [[f32; 2]; M] {
        Self::publish(|m, half| row_max(&weights[m], half));
        let mut rescale = [[1.0; 2]; M];
        for m in 0..M {
            for half in 0..2 {
                let largest = Self::join(m, half, max) * scale.factor();
                rescale[m][half] = states[m][half].raise(largest);
                weigh_against(&mut states[m][half], &mut weights[m], half, scale);
            }
        }
        rescale
    }

    /// The states of a lane's rows over all keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn over_group(states: States<M>) -> States<M> {
        let mut states = states.map(|block| block.map(total));
        Self::publish(|m, half| states[m][half].sum);
        for m in 0..M {
            for half in 0..2 {
                states[m][half].sum = Self::join(m, half, |a, b| a + b);
            }
        }
        states
    }

    /// Shares with the group a value that the four lanes of each row hold.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn publish(number: impl Fn(usize, usize) -> f32) {
        for m in 0..M {
            for half in 0..2 {
                let number = number(m, half);
                if lane() % 4 == 0 {
                    Self::numbers(m, half).store(Self::member(), number);
                }
            }
        }
        Self::sync_group();
    }

    /// Reduces the values that the group's warps hold of a lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn join(m: usize, half: usize, join: impl Fn(f32, f32) -> f32) -> f32 {
        let numbers = Self::numbers(m, half);
        (1..Self::WARPS).fold(numbers.load(0), |joined, warp| join(joined, numbers.load(warp)))
    }

    /// Finishes a lane's rows: adds attention sinks, and the group's first warp writes
    /// log-sum-exps. Returns the factors that normalise the output.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn close<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        states: States<M>,
        head_sink: Global<T>,
        lse: Global<f32>,
    ) -> [[f32; 2]; M] {
        let mut factors = [[0.0; 2]; M];
        for m in 0..M {
            for half in 0..2 {
                let row = Self::row(m, half);
                if row.s < p.q_len {
                    let (factor, log_sum_exp) =
                        close(p, row.is_token(), row.head, head_sink, states[m][half]);
                    factors[m][half] = factor;
                    if Self::member() == 0 && lane() % 4 == 0 && !lse.is_null() {
                        lse.store(rows.index(p, row), log_sum_exp);
                    }
                }
            }
        }
        factors
    }

    /// Writes the warp's columns of the group's rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        acc: &Fragments<M, D8>,
        factors: [[f32; 2]; M],
        out: Global<T>,
    ) {
        /// Lanes per row.
        const ACROSS: u32 = 8;
        let first = D8 as u32 * Self::member();
        let mine = Self::queries::<T>().from_unit(first);
        store(acc, factors, mine);
        sync_warp();
        for r in (lane() / ACROSS..Self::GROUP_ROWS).step_by((32 / ACROSS) as usize) {
            let row = Row::kept(Self::kept(Self::GROUP_ROWS * Self::group() + r));
            if row.s < p.q_len {
                let start = p.out.at(rows.batch, row.head, row.s);
                for unit in (lane() % ACROSS..D8 as u32).step_by(ACROSS as usize) {
                    let column = (first + unit) * T::PER_VEC;
                    if column < p.head_size {
                        out.store_vec(start + column as usize, mine.place(r, unit).load_vec(0));
                    }
                }
            }
        }
    }

    /// Writes the warp's columns of this split's result, unless it saw no key; the group's first
    /// warp writes its log-sum-exp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write_partial(
        p: &AttentionParams,
        rows: &Rows,
        acc: &Fragments<M, D8>,
        states: States<M>,
        partial_out: Global<[f32; 2]>,
        partial_lse: Global<f32>,
    ) {
        let rows_of_part = p.batch as usize * p.q_heads as usize * p.q_len as usize;
        for m in 0..M {
            for half in 0..2 {
                let (row, state) = (Self::row(m, half), states[m][half]);
                if row.s < p.q_len {
                    let index = block_idx_y() as usize * rows_of_part + rows.index(p, row);
                    let seen = row.is_token() && state.sum != 0.0;
                    if Self::member() == 0 && lane() % 4 == 0 {
                        let nothing = f32::NEG_INFINITY;
                        partial_lse.store(index, if seen { state.log_sum_exp() } else { nothing });
                    }
                    if seen {
                        Self::write_row(p, &acc[m], half, state.normaliser(), index, partial_out);
                    }
                }
            }
        }
    }

    /// Writes a lane's columns of row `index` of partial_out.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write_row(
        p: &AttentionParams,
        acc: &[[f32; 4]; D8],
        half: usize,
        factor: f32,
        index: usize,
        partial_out: Global<[f32; 2]>,
    ) {
        for block in 0..D8 {
            let column = 8 * (D8 as u32 * Self::member() + block as u32);
            if column < p.head_size {
                let at = index * p.head_size as usize + (column + column_of()) as usize;
                let pair = [acc[block][2 * half], acc[block][2 * half + 1]];
                partial_out.store(at / 2, pair.map(|x| x * factor));
            }
        }
    }
}

/// Rescales the accumulators; skipped in the many steps in which no row of the warp has a new
/// maximum.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply<const M: usize, const D8: usize>(acc: &mut Fragments<M, D8>, rescale: [[f32; 2]; M]) {
    if any_sync(rescale.as_flattened().iter().any(|&factor| factor != 1.0)) {
        for m in 0..M {
            for block in 0..D8 {
                for i in 0..4 {
                    acc[m][block][i] *= rescale[m][i / 2];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    fn call(batch: u32, q_heads: u32, kv_heads: u32, q_len: u32) -> AttentionParams {
        AttentionParams {
            batch,
            q_heads,
            kv_heads,
            q_len,
            head_size: 512,
            splits: 1,
            ..AttentionParams::zeroed()
        }
    }

    #[test]
    fn few_blocks_are_cut_until_every_multiprocessor_has_one() {
        assert_eq!(splits(&call(1, 32, 8, 1), 16, 64, 8192, 132), 16);
        assert_eq!(splits(&call(8, 32, 8, 1), 16, 64, 8192, 132), 2);
        assert_eq!(splits(&call(1, 32, 8, 128), 64, 64, 8192, 132), 2);
    }

    #[test]
    fn more_parts_than_the_merge_can_take_are_not_made() {
        assert_eq!(splits(&call(1, 8, 1, 1), 16, 64, 8192, 132), 64);
    }

    #[test]
    fn prompts_and_few_keys_are_not_cut() {
        assert_eq!(splits(&call(1, 16, 4, 1024), 64, 64, 1024, 132), 1);
        assert_eq!(splits(&call(1, 32, 8, 1), 16, 64, 64, 132), 1);
        let window = AttentionParams { window: 100, ..call(64, 32, 8, 1) };
        assert_eq!(splits(&window, 16, 64, 8192, 132), 1);
    }

    #[test]
    fn each_shape_fits_the_multiprocessors_it_is_for() {
        const {
            assert!(
                Rows16Keys32::SHARED_BYTES <= 99 << 10 && Rows32Keys32::SHARED_BYTES <= 99 << 10
            );
            assert!(
                Rows16Keys64::SHARED_BYTES <= 163 << 10 && Rows64Keys32::SHARED_BYTES <= 163 << 10
            );
            assert!(
                Rows32Keys64::SHARED_BYTES <= 227 << 10 && Rows64Keys64::SHARED_BYTES <= 227 << 10
            );
        }
    }
}
