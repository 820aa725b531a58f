//! FlashAttention on tensor cores in float32: `tiled` with three TF32 products for each float32
//! product ("3xTF32"), nearly as exact as float32.
//!
//! **One CTA** computes a tile of `ROWS` packed query rows over the keys that any of them sees,
//! `KEYS` at a time; **grid**, **tensors** and the **pipeline** are the same as in
//! [`tiled`](super::tiled). Strides are multiples of 4; the head size is any multiple of 4 up to
//! `HEAD_SIZE`.
//!
//! **Shared memory**: `queries [ROWS] | keys [KEYS] | values [KEYS]`, swizzled rows of `HEAD_SIZE`
//! elements, then for each row its query row, its head and the keys it sees.
//!
//! **Numerics**: [`tf32`](crate::tile::tf32). Scores, softmax, P and output are float32; P · V of a
//! key tile accumulates separately before it is added to the output. Keys past the tile's last
//! visible one are zero in shared memory, whatever the cache holds. Only key tiles that some row
//! does not see whole are masked. Padding rows give 0 and -inf.

use crate::concept::softmax::SoftmaxState;
use crate::params::AttentionParams;
use crate::simt::{
    Global, Shared, block_idx_x, cp_async_commit, cp_async_wait, sync_threads, thread_idx, warp,
};
use crate::tile::fragment::{Fragments, row_of, zeros};
use crate::tile::rows::{Row, Rows, close_all};
use crate::tile::seqlens::Seqlens;
use crate::tile::softmax::{ScoreScale, States, mask, weigh_row};
use crate::tile::swizzle::{RowCopy, Swizzled, WarpRead, swizzled_bytes};
use crate::tile::tf32::{ValueRead, accumulate, output, scores};

/// A tile shape: warps of `M` 16-row MMA tiles, `D8` 8-column MMA tiles, which are `UNITS` units of
/// 16 bytes, `N8` 8-key MMA tiles.
pub struct TiledF32<
    const M: usize,
    const D8: usize,
    const UNITS: usize,
    const N8: usize,
    const THREADS: u32,
>;

// Every warp has one 16-row MMA tile: two would read K and V half as often, but these kernels are
// bound by products, not by reads.

/// The kernel type of a shape: head size, keys of a tile, threads of a CTA. A warp has 16 rows.
macro_rules! shape {
    (head $head:literal, keys $keys:literal, threads $threads:literal) => {
        TiledF32<1, { $head / 8 }, { $head / 4 }, { $keys / 8 }, $threads>
    };
}

/// Head sizes up to 32.
pub type D32 = shape!(head 32, keys 64, threads 128);
/// Head sizes up to 64.
pub type D64 = shape!(head 64, keys 48, threads 128);
/// Head sizes up to 80.
pub type D80 = shape!(head 80, keys 64, threads 128);
/// Head sizes up to 96.
pub type D96 = shape!(head 96, keys 64, threads 128);
/// Head sizes up to 128.
pub type D128 = shape!(head 128, keys 48, threads 128);
/// Head sizes up to 192.
pub type D192 = shape!(head 192, keys 16, threads 128);

impl<const M: usize, const D8: usize, const UNITS: usize, const N8: usize, const THREADS: u32>
    TiledF32<M, D8, UNITS, N8, THREADS>
{
    /// Lowest compute capability, times ten.
    pub const MIN_SM: u32 = 80;
    /// Largest head size.
    pub const HEAD_SIZE: u32 = D8 as u32 * 8;
    /// Packed query rows of a CTA.
    pub const ROWS: u32 = THREADS / 32 * Self::WARP_ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = N8 as u32 * 8;
    /// Threads of a CTA.
    pub const THREADS: u32 = THREADS;
    /// Shared memory of a CTA, in bytes.
    pub const SHARED_BYTES: u32 = Self::KEPT + 16 * Self::ROWS;

    const WARP_ROWS: u32 = M as u32 * 16;
    /// Offset of the row descriptions.
    const KEPT: u32 = swizzled_bytes(Self::ROWS + 2 * Self::KEYS, UNITS);

    /// The kernel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run(
        q: Global<f32>,
        k: Global<f32>,
        v: Global<f32>,
        seqlens: Seqlens,
        head_sink: Global<f32>,
        out: Global<f32>,
        lse: Global<f32>,
        p: AttentionParams,
    ) {
        let rows = Rows::of_block(&p, seqlens, block_idx_x(), Self::ROWS);
        Self::load_queries(&p, &rows, q);

        let mut acc = zeros::<M, D8>();
        let mut states = [[SoftmaxState::EMPTY; 2]; M];
        Self::attend(&p, &rows, k, v, &mut states, &mut acc);

        let factors = close_all(&p, &rows, head_sink, lse, states, Self::row);
        Self::write(&p, &rows, &acc, factors, out);
    }

    /// Address of row `r`'s description.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept(r: u32) -> Shared<u32> {
        Shared::at(Self::KEPT + 16 * r)
    }

    /// A lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(m: usize, half: usize) -> Row {
        Row::kept(Self::kept(warp() * Self::WARP_ROWS + 16 * m as u32 + row_of(half)))
    }

    /// Stores the row descriptions, then starts copying the queries.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_queries(p: &AttentionParams, rows: &Rows, q: Global<f32>) {
        for r in (thread_idx()..Self::ROWS).step_by(THREADS as usize) {
            rows.row(r).keep(Self::kept(r));
        }
        sync_threads();
        let copy = RowCopy::<UNITS, THREADS>::of(thread_idx());
        copy.start(Swizzled::at(0), Self::ROWS, p.head_size, |r| {
            let row = Row::kept(Self::kept(r));
            let exists = row.s < p.q_len;
            let start = if exists { p.q.at(rows.batch, row.head, row.s) } else { 0 };
            (q.offset(start), exists)
        });
    }

    /// The mainloop over key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend(
        p: &AttentionParams,
        rows: &Rows,
        k: Global<f32>,
        v: Global<f32>,
        states: &mut States<M>,
        acc: &mut Fragments<M, D8>,
    ) {
        let copy = RowCopy::<UNITS, THREADS>::of(thread_idx());
        let queries = Swizzled::<f32, UNITS>::at(0).from(warp() * Self::WARP_ROWS);
        let keys = Swizzled::<f32, UNITS>::at(swizzled_bytes(Self::ROWS, UNITS));
        let values = keys.from(Self::KEYS);
        let (read, read_values) = (WarpRead::of_this_lane(), ValueRead::of_this_lane());
        let k = (k.offset(p.k.at(rows.batch, rows.kv_head, 0)), p.k.row);
        let v = (v.offset(p.v.at(rows.batch, rows.kv_head, 0)), p.v.row);
        let scale = ScoreScale::new(p.scale, p.softcap);
        let span = rows.span();
        let copy = |tile, source, begin| {
            copy.start_rows(tile, Self::KEYS, p.head_size, source, begin..span.some.end);
            cp_async_commit();
        };

        let mut begin = span.some.first;
        copy(keys, k, begin);
        while begin < span.some.end {
            cp_async_wait::<0>();
            sync_threads();
            copy(values, v, begin);

            let mut weights = scores::<M, UNITS, N8>(queries, keys, &read);
            scale.adjust(&mut weights);
            if span.is_partial(begin, Self::KEYS) {
                mask(&mut weights, begin, |m, half| Self::row(m, half).visible);
            }
            let rescale = weigh(states, &mut weights, scale);

            cp_async_wait::<0>();
            sync_threads();
            let next = begin + Self::KEYS;
            if next < span.some.end {
                copy(keys, k, next);
            }

            accumulate(acc, &rescale, &weights, values, &read_values);
            begin = next;
        }
        cp_async_wait::<0>();
    }

    /// Writes the warp's rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write(
        p: &AttentionParams,
        rows: &Rows,
        acc: &Fragments<M, D8>,
        factors: [[f32; 2]; M],
        out: Global<f32>,
    ) {
        for m in 0..M {
            for half in 0..2 {
                let (row, factor) = (Self::row(m, half), factors[m][half]);
                if row.s < p.q_len {
                    let start = p.out.at(rows.batch, row.head, row.s);
                    let scaled = |x: f32| if factor == 0.0 { 0.0 } else { x * factor };
                    for part in 0..D8 / 2 {
                        let (column, vector) = output::<D8, UNITS>(&acc[m], half, part);
                        if column < p.head_size {
                            let bits = vector.map(|x| scaled(x).to_bits());
                            out.store_vec(start + column as usize, bits);
                        }
                    }
                }
            }
        }
    }
}

/// Turns scores into P with the rows' new maxima; returns the rescale factors of the accumulators.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weigh<const M: usize, const N8: usize>(
    states: &mut States<M>,
    scores: &mut Fragments<M, N8>,
    scale: ScoreScale,
) -> [[f32; 2]; M] {
    core::array::from_fn(|m| {
        core::array::from_fn(|half| weigh_row(&mut states[m][half], &mut scores[m], half, scale))
    })
}
