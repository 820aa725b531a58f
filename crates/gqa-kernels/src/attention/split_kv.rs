//! Attention of a few query rows over many keys (flash decoding): the keys are split over CTAs, and
//! over the warps of a CTA.
//!
//! **One CTA** computes up to 16 packed query rows (the query heads of one KV head, query row by
//! query row, as in [`tiled`](super::tiled)) against one split of the keys that they see. Its four
//! warps take tiles of 16 keys in turn, each with its own pipeline stages, so that no warp waits
//! for another in the mainloop; they merge once, at the end.
//!
//! **Grid**: `row tiles × KV heads × batch` in x, splits in y. **CTA**: 128 threads.
//!
//! **Tensors**: q, k, v, out and lse as in [`tiled`](super::tiled). With one split the CTA writes
//! out and lse. With more it writes partial_out (split, batch, query head, S, head size),
//! normalised, f32, and partial_lse (split, batch, query head, S), and [`combine`](super::combine)
//! merges them into out and lse. Where a row sees no key of a split, partial_lse is -inf and
//! partial_out is not written.
//!
//! **Shared memory**: `queries [16] | per warp: STAGES × (keys [16], values [16]) | per warp: 16 ×
//! (maximum, sum)`, padded rows of `HEAD_SIZE` elements ([`Tile`]). After the loop a warp's first
//! stage holds its accumulators as f32, which fit exactly.
//!
//! **Pipeline**: one barrier publishes the queries. From then on a warp's cp.async groups are K_j,
//! V_j, K_{j+1}, … and it waits only for the oldest:
//!
//! ```text
//! wait for K_j    S = Q K_jᵀ            then start K_{j+STAGES} in its place
//! wait for V_j    softmax, O += P V_j   then start V_{j+STAGES} in its place
//! ```
//!
//! Each step has two `sync_warp` between the lanes' copies and their use, and two between their use
//! and the next copy. One barrier after the loop separates the warps' results from the merge.
//!
//! **Numerics**: as in [`tiled`](super::tiled). The warps' results are merged in f32, each rescaled
//! by `exp2(max_w - max)`.
//!
//! **A bias or a mask**: each thread reads the elements of its own scores from global memory
//! ([`Bias`]) one step ahead of their use, so that no other load stalls the mainloop.

use crate::concept::softmax::SoftmaxState;
use crate::num::MmaElement;
use crate::params::{AttentionParams, MaskedParams};
use crate::simt::{
    Global, Shared, block_idx_x, block_idx_y, cp_async_commit, cp_async_wait, fma, lane, st_shared,
    sync_threads, sync_warp, thread_idx, warp,
};
use crate::tile::bias::{Bias, add_ahead};
use crate::tile::copy::{UNIT, to_unit, wait_for_all_but};
use crate::tile::fragment::{Fragments, column_of, row_of, zeros};
use crate::tile::padded::{Team, Tile, accumulate, scores, tile_bytes};
use crate::tile::rows::{Row, Rows, close, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::softmax::{ScoreScale, States, mask, to_log2, total, weigh, weigh_plain};

/// Packed query rows of a CTA.
pub const ROWS: u32 = 16;
/// Keys of a tile.
pub const KEYS: u32 = 16;
/// Threads of a CTA.
pub const THREADS: u32 = WARPS * 32;
/// Most splits of a call.
pub const MAX_SPLITS: u32 = 128;

const WARPS: u32 = 4;
/// 8-key MMA tiles in a tile.
const N8: usize = KEYS as usize / 8;

/// A kernel for head sizes up to `8 D8` whose warps have `STAGES` pipeline stages; with or without
/// a bias or a mask.
pub struct SplitKv<const D8: usize, const STAGES: u32, const MASKED: bool = false>;

// One shape per head size, with as many stages as let an SM with 227 KB of shared memory hold about
// three CTAs, and an SM with 99 KB hold one. Heads of 80, 160 and 224 have none: the keys' bytes
// bound these kernels, and those of padding are not loaded.

/// The kernel type of a shape: head size, pipeline stages, and whether there is a bias or a mask.
macro_rules! shape {
    (head $head:literal, stages $stages:literal $(, masked $masked:literal)?) => {
        SplitKv<{ $head / 8 }, $stages $(, $masked)?>
    };
}

/// Head sizes up to 32.
pub type D32 = shape!(head 32, stages 4);
/// Head sizes up to 64.
pub type D64 = shape!(head 64, stages 2);
/// Head sizes up to 96.
pub type D96 = shape!(head 96, stages 2);
/// Head sizes up to 128.
pub type D128 = shape!(head 128, stages 2);
/// Head sizes up to 192.
pub type D192 = shape!(head 192, stages 1);
/// Head sizes up to 256.
pub type D256 = shape!(head 256, stages 1);

/// Head sizes up to 64, with a bias or a mask.
pub type MaskedD64 = shape!(head 64, stages 2, masked true);
/// Head sizes up to 128, with a bias or a mask.
pub type MaskedD128 = shape!(head 128, stages 2, masked true);
/// Head sizes up to 256, with a bias or a mask.
pub type MaskedD256 = shape!(head 256, stages 1, masked true);

/// Grid of a call.
pub fn grid(p: &AttentionParams) -> [u32; 3] {
    [row_tiles(p, ROWS) * p.kv_heads * p.batch, p.splits, 1]
}

/// Elements of (partial_out, partial_lse) of a call.
pub fn partial_elements(p: &AttentionParams) -> (usize, usize) {
    let rows = p.splits as usize * p.batch as usize * p.q_heads as usize * p.q_len as usize;
    (rows * p.head_size as usize, rows)
}

/// Number of KV splits that minimises the estimated time on `multiprocessors` SMs, if the longest
/// sequence has `max_keys` keys.
///
/// One CTA keeps enough loads in flight for an SM's share of the memory's bandwidth, so an SM takes
/// as long as its CTAs would take one after the other, however many of them it holds; then
/// [`combine`](super::combine) merges their results. Times are in rounds of a CTA, 64 keys, which
/// take about a microsecond.
pub fn splits(p: &AttentionParams, max_keys: u32, multiprocessors: u32) -> u32 {
    /// Cost of starting and ending a CTA.
    const BLOCK: u64 = 1;
    /// Cost of starting the merge; splits of a row that the merge reads in a round.
    const MERGE: u64 = 3;
    const MERGED: u64 = 32;
    let [units, ..] = grid(p);
    let visible =
        if p.window > 0 { max_keys.min(p.window.saturating_add(p.q_len - 1)) } else { max_keys };
    let rounds = visible.div_ceil(KEYS * WARPS).max(1);
    let time = |splits: u32| {
        let blocks =
            (u64::from(units) * u64::from(splits)).div_ceil(u64::from(multiprocessors.max(1)));
        let merge = if splits == 1 { 0 } else { MERGE + u64::from(splits) / MERGED };
        blocks * (u64::from(rounds.div_ceil(splits)) + BLOCK) + merge
    };
    (1..=rounds.min(MAX_SPLITS)).min_by_key(|&splits| time(splits)).unwrap_or(1)
}

impl<const D8: usize, const STAGES: u32> SplitKv<D8, STAGES, false> {
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
        partial_out: Global<f32>,
        partial_lse: Global<f32>,
        p: AttentionParams,
    ) {
        let tensors = [q, k, v, head_sink, out];
        Self::block(&p, seqlens, None, tensors, [lse, partial_out, partial_lse]);
    }
}

impl<const D8: usize, const STAGES: u32> SplitKv<D8, STAGES, true> {
    /// The kernel with a bias or a mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: Global<T>,
        k: Global<T>,
        v: Global<T>,
        seqlens: Seqlens,
        bias: Global<T>,
        mask: Global<u8>,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        partial_out: Global<f32>,
        partial_lse: Global<f32>,
        p: MaskedParams,
    ) {
        let bias = Some(Bias::new(bias, mask, &p));
        let tensors = [q, k, v, head_sink, out];
        Self::block(&p.attention, seqlens, bias, tensors, [lse, partial_out, partial_lse]);
    }
}

impl<const D8: usize, const STAGES: u32, const MASKED: bool> SplitKv<D8, STAGES, MASKED> {
    /// Lowest compute capability, times ten.
    pub const MIN_SM: u32 = 75;
    /// Largest head size.
    pub const HEAD_SIZE: u32 = D8 as u32 * 8;
    /// Packed query rows of a CTA.
    pub const ROWS: u32 = ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = KEYS;
    /// Threads of a CTA.
    pub const THREADS: u32 = THREADS;
    /// Shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = Self::STATES + WARPS * ROWS * size_of::<[f32; 2]>() as u32;

    const STAGE_BYTES: u32 = 2 * tile_bytes(KEYS, D8);
    const RINGS: u32 = tile_bytes(ROWS, D8);
    const STATES: u32 = Self::RINGS + WARPS * Self::RING_BYTES;
    const RING_BYTES: u32 = STAGES * Self::STAGE_BYTES;
    /// f32 elements from one row of accumulators to the next: a stage has room for 16 such rows.
    const ACC_PITCH: u32 = Self::HEAD_SIZE + UNIT;

    /// The body of a CTA, with or without a bias.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block<T: MmaElement>(
        p: &AttentionParams,
        seqlens: Seqlens,
        bias: Option<Bias<T>>,
        [q, k, v, head_sink, out]: [Global<T>; 5],
        [lse, partial_out, partial_lse]: [Global<f32>; 3],
    ) {
        let heads = (p.kv_heads * p.batch).max(1);
        let rows = Rows::new(p, seqlens, block_idx_x() / heads, block_idx_x() % heads, ROWS);
        let queries = Tile::<T, D8>::at(0);
        Team::<D8, THREADS>::new(thread_idx()).gather(queries, ROWS, q, p.head_size, |r| {
            let row = rows.row(r);
            (row.s < p.q_len).then(|| p.q.at(rows.batch, row.head, row.s))
        });
        cp_async_commit();

        let (states, acc) = Self::attend(p, &rows, bias, [k, v], queries);
        Self::publish(states, &acc);
        sync_threads();

        // A thread merges eight columns of a row at a time.
        for unit in (thread_idx()..rows.count() * D8 as u32).step_by(THREADS as usize) {
            let (r, column) = (unit / D8 as u32, unit % D8 as u32 * UNIT);
            if column < p.head_size {
                let (row, (state, sums)) = (rows.row(r), Self::merge(r, column));
                if p.splits == 1 {
                    let (factor, log_sum_exp) =
                        close(p, row.is_token(), row.head, head_sink, state);
                    write_row(p, &rows, row, column, factor, sums, out);
                    if column == 0 && !lse.is_null() {
                        lse.store(rows.index(p, row), log_sum_exp);
                    }
                } else {
                    write_partial(p, &rows, row, column, state, sums, partial_out, partial_lse);
                }
            }
        }
    }

    /// The mainloop over the warp's share of the split's keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        bias: Option<Bias<T>>,
        [k, v]: [Global<T>; 2],
        queries: Tile<T, D8>,
    ) -> (States<1>, Fragments<1, D8>) {
        let team = Team::<D8, 32>::new(lane());
        let k = k.offset(p.k.at(rows.batch, rows.kv_head, 0));
        let v = v.offset(p.v.at(rows.batch, rows.kv_head, 0));
        let scale = ScoreScale::new(p.scale, p.softcap);
        let columns = bias.map_or(u32::MAX, |bias| bias.columns);
        let span = rows.span().below(columns);
        let mine = [0, 1].map(|half| rows.row(row_of(half)).below(columns));
        let tiles = span.share(KEYS, block_idx_y(), p.splits);
        let added = |tile| {
            let begin = span.some.first + tile * KEYS;
            let index = |bias: Bias<T>, Row { s, head, .. }| {
                (s < p.q_len).then(|| bias.row(rows.batch, head, s))
            };
            bias.map(|bias| bias.ahead::<1, N8>(begin, |_, half| index(bias, mine[half])))
        };
        let copy = |place, source, stride, tile| {
            if tile < tiles.end {
                let begin = span.some.first + tile * KEYS;
                team.copy(place, KEYS, source, stride, begin, span.some.end, p.head_size);
            }
            cp_async_commit();
        };

        let (mut states, mut acc) = ([[SoftmaxState::EMPTY; 2]; 1], zeros());
        let mut tile = tiles.start + warp();
        for slot in 0..STAGES {
            copy(Self::keys(slot), k, p.k.row, tile + slot * WARPS);
            copy(Self::values(slot), v, p.v.row, tile + slot * WARPS);
        }
        let mut ahead = added(tile);
        wait_for_all_but(2 * STAGES);
        sync_threads();

        let mut slot = 0;
        while tile < tiles.end {
            let begin = span.some.first + tile * KEYS;
            let after = tile + STAGES * WARPS;

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            let mut weights = scores::<T, 1, D8, N8>(queries, Self::keys(slot));
            sync_warp();
            copy(Self::keys(slot), k, p.k.row, after);

            scale.adjust(&mut weights);
            if let Some(numbers) = &ahead {
                add_ahead(&mut weights, numbers, scale.plain_factor());
            }
            ahead = added(tile + WARPS);
            if span.is_partial(begin, KEYS) {
                mask(&mut weights, begin, |_, half| mine[half].visible);
            }
            if MASKED {
                weigh_plain(&mut states, &mut weights, &mut acc);
            } else {
                weigh(&mut states, &mut weights, &mut acc, scale);
            }

            wait_for_all_but(2 * STAGES - 1);
            sync_warp();
            accumulate(&mut acc, &weights, Self::values::<T>(slot));
            sync_warp();
            copy(Self::values(slot), v, p.v.row, after);

            tile += WARPS;
            slot = if slot + 1 == STAGES { 0 } else { slot + 1 };
        }
        cp_async_wait::<0>();
        sync_warp();
        (if MASKED { to_log2(states) } else { states }, acc)
    }

    /// The keys of one of the warp's stages.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keys<T: MmaElement>(slot: u32) -> Tile<T, D8> {
        Tile::at(Self::ring_of(warp()) + slot * Self::STAGE_BYTES)
    }

    /// The values of one of the warp's stages.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values<T: MmaElement>(slot: u32) -> Tile<T, D8> {
        Tile::at(Self::ring_of(warp()) + slot * Self::STAGE_BYTES + Self::STAGE_BYTES / 2)
    }

    /// Start of a warp's stages, which hold its accumulators after the loop.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn ring_of(warp: u32) -> u32 {
        Self::RINGS + warp * Self::RING_BYTES
    }

    /// Address of a warp's state of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn state_of(warp: u32, r: u32) -> Shared<[f32; 2]> {
        Shared::at(Self::STATES).offset(warp * ROWS + r)
    }

    /// Stores the warp's result in shared memory for the merge.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn publish(states: States<1>, acc: &Fragments<1, D8>) {
        let acc_rows = Shared::<f32>::at(Self::ring_of(warp()));
        for half in 0..2 {
            let SoftmaxState { max, sum } = total(states[0][half]);
            if lane() % 4 == 0 {
                Self::state_of(warp(), row_of(half)).store(0, [max, sum]);
            }
            for block in 0..D8 {
                let place = acc_rows
                    .offset(row_of(half) * Self::ACC_PITCH + 8 * block as u32 + column_of());
                st_shared(place.address(), [acc[0][block][2 * half], acc[0][block][2 * half + 1]]);
            }
        }
    }

    /// Merges the warps' states of row `r` and their accumulators of eight columns.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn merge(r: u32, column: u32) -> (SoftmaxState, [f32; 8]) {
        let parts: [[f32; 2]; WARPS as usize] =
            core::array::from_fn(|w| Self::state_of(w as u32, r).load(0));
        let mut state = SoftmaxState::EMPTY;
        for w in 0..WARPS as usize {
            state.raise(parts[w][0]);
        }
        let mut sums = [0.0; 8];
        for w in 0..WARPS as usize {
            let [max, sum] = parts[w];
            let weight = state.weight(max);
            state.sum += weight * sum;
            let acc =
                Shared::<f32>::at(Self::ring_of(w as u32)).offset(r * Self::ACC_PITCH + column);
            let halves = [acc.load_vec(0), acc.load_vec(4)];
            for i in 0..8 {
                sums[i] = fma(weight, f32::from_bits(halves[i / 4][i % 4]), sums[i]);
            }
        }
        (state, sums)
    }
}

/// Writes eight columns of the output.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn write_row<T: MmaElement>(
    p: &AttentionParams,
    rows: &Rows,
    row: Row,
    column: u32,
    factor: f32,
    sums: [f32; 8],
    out: Global<T>,
) {
    let x = sums.map(|sum| if factor == 0.0 { 0.0 } else { sum * factor });
    let start = p.out.at(rows.batch, row.head, row.s) + column as usize;
    out.store_vec(start, to_unit::<T>(x));
}

/// Writes eight columns of this split's result, unless the row saw no key, and with the first
/// columns the log-sum-exp.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn write_partial(
    p: &AttentionParams,
    rows: &Rows,
    row: Row,
    column: u32,
    state: SoftmaxState,
    sums: [f32; 8],
    partial_out: Global<f32>,
    partial_lse: Global<f32>,
) {
    let rows_of_split = p.batch as usize * p.q_heads as usize * p.q_len as usize;
    let index = block_idx_y() as usize * rows_of_split + rows.index(p, row);
    let seen = row.is_token() && state.sum != 0.0;
    if column == 0 {
        partial_lse.store(index, if seen { state.log_sum_exp() } else { f32::NEG_INFINITY });
    }
    if seen {
        let x = sums.map(|sum| (sum * state.normaliser()).to_bits());
        let start = index * p.head_size as usize + column as usize;
        partial_out.store_vec(start, [x[0], x[1], x[2], x[3]]);
        partial_out.store_vec(start + 4, [x[4], x[5], x[6], x[7]]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytemuck::Zeroable;

    fn decode(batch: u32, group: u32, kv_heads: u32) -> AttentionParams {
        let q_heads = group * kv_heads;
        AttentionParams {
            batch,
            q_heads,
            kv_heads,
            q_len: 1,
            head_size: 128,
            splits: 1,
            ..AttentionParams::zeroed()
        }
    }

    #[test]
    fn one_block_holds_sixteen_rows_of_a_group() {
        assert_eq!(grid(&decode(3, 8, 2)), [6, 1, 1]);
        assert_eq!(grid(&AttentionParams { q_len: 3, splits: 5, ..decode(3, 8, 2) }), [12, 5, 1]);
    }

    #[test]
    fn few_heads_are_split_until_every_multiprocessor_has_a_block() {
        assert_eq!(splits(&decode(1, 8, 8), 8192, 132), 16);
        assert_eq!(splits(&decode(4, 8, 8), 8192, 132), 4);
        assert!(splits(&decode(1, 8, 1), 131_072, 132) > 100);
    }

    #[test]
    fn what_fills_the_device_is_not_split() {
        assert_eq!(splits(&decode(32, 8, 8), 8192, 132), 1);
        assert_eq!(splits(&decode(128, 8, 8), 2048, 132), 1);
    }

    #[test]
    fn few_keys_are_not_worth_a_merge() {
        assert_eq!(splits(&decode(1, 4, 8), 1, 132), 1);
        assert_eq!(splits(&decode(1, 4, 8), 200, 132), 1);
        assert_eq!(splits(&AttentionParams { window: 128, ..decode(1, 4, 8) }, 100_000, 132), 1);
    }

    #[test]
    fn a_block_fits_small_multiprocessors() {
        const { assert!(D192::SHARED_BYTES <= 99 * 1024 && D256::SHARED_BYTES <= 99 * 1024) };
    }

    #[test]
    fn partial_results_have_a_row_per_split() {
        let p = AttentionParams { splits: 3, ..decode(2, 4, 2) };
        assert_eq!(partial_elements(&p), (3 * 2 * 8 * 128, 3 * 2 * 8));
    }
}
