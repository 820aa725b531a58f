//! FlashAttention on tensor cores: prefill, chunked prefill and short calls of any kind.
//!
//! **One CTA** computes a tile of `ROWS` packed query rows: the query heads that share a KV head,
//! query row by query row (row `r` of the group is head `r % G` at query row `r / G`), so that K
//! and V are read once for the whole group. It loops over the keys that any of its rows sees,
//! `KEYS` at a time, with the online softmax.
//!
//! **Grid**: `row tiles × KV heads × batch` in x. CTAs go through sections of heads whose K and V
//! share the L2 cache, and within a section from the last row tile to the first: under a causal
//! mask the last ones see most keys, so long CTAs start first and short ones fill the gaps.
//! **CTA**: `THREADS` threads; each warp owns `16 M` rows and all keys.
//!
//! **Tensors**: q and out (batch, query head, S, head size), k and v (batch, KV head, capacity,
//! head size), each with its strides, which are multiples of 8. The head size is any multiple of 8
//! up to `HEAD_SIZE`: the remaining columns are zero in the tiles and are not written. lse, which
//! may be null, is (batch, query head, S).
//!
//! **Over a paged KV cache** the query rows are the packed tokens of all sequences, as one batch
//! entry. K and V tiles are assembled from pieces of 16 rows, each in one block
//! (`tiled/layout.rs`). Block table entries outside of the cache are not read, and their keys are
//! masked. Queries are rotated in shared memory: a separate launch would write all of them and
//! attention would read them again.
//!
//! **Shared memory**: `queries [ROWS] | keys [KEYS] | values [KEYS]`, swizzled rows of `HEAD_SIZE`
//! elements ([`Swizzled`]), then for each row its query row, its head and the keys it sees. Where
//! registers suffice, warps hold their queries in them. In the epilogue the output passes through
//! each warp's query rows to become 16-byte stores.
//!
//! **With TMA** K and V use other barriers (`tiled/tma.rs`).
//!
//! **Pipeline**, for key tile `j`; a copy runs while the line between its two ends computes. The
//! first barrier also publishes the row descriptions; where registers hold queries, one more
//! barrier before it waits for them.
//!
//! ```text
//! wait for K_j ‖ barrier (K_j has arrived; all are done with V_{j-1})   start V_j
//!     S = Q K_jᵀ, mask
//! wait for V_j ‖ barrier (V_j has arrived; all are done with K_j)       start K_{j+1}
//!     softmax, O += P V_j
//! ```
//!
//! **Numerics**: scores, softmax and output accumulate in f32. A row's lagged maximum rises once an
//! element of P would exceed 2⁸ ([`SLACK`](crate::tile::softmax::SLACK)). P is rounded to the
//! element type before P · V; the row sums add unrounded P. Keys past the tile's last visible one
//! are zero in shared memory, whatever the cache holds. Only key tiles that some row does not see
//! whole are masked. Padding rows give 0 and -inf. Each thread reads the bias or mask of its own
//! scores from global memory ([`Bias`]).

mod layout;
mod tma;

use crate::concept::heads::Group;
use crate::concept::softmax::SoftmaxState;
use crate::num::{MmaElement, quotient};
use crate::params::{AttentionParams, MaskedParams, PagedTiledParams};
use crate::prologue::rope::Rope;
use crate::simt::{
    Global, Rolled, Shared, block_idx_x, cp_async_commit, cp_async_wait, lane, opaque,
    sync_threads, sync_warp, thread_idx, warp,
};
use crate::tile::bias::Bias;
use crate::tile::fragment::{accumulate, left_operands, row_of, scores, scores_at, store, zeros};
use crate::tile::pages;
use crate::tile::rows::{Row, Rows, close_all, row_tiles};
use crate::tile::seqlens::Seqlens;
use crate::tile::softmax::{
    ScoreScale, States, hide, mask, to_log2, weigh_plain, weigh_with_slack,
};
use crate::tile::swizzle::{RowCopy, Swizzled, WarpRead, swizzled_bytes};
use layout::{Blocks, Layout, SideBySide};

/// Fewest rows of a block of a paged KV cache.
pub const LEAST_BLOCK: u32 = Blocks::PIECE;

/// A tile shape: warps of `M` 16-row MMA tiles, `D8` 8-column MMA tiles, `N8` 8-key MMA tiles; with
/// or without a bias or a mask.
pub struct Tiled<
    const M: usize,
    const D8: usize,
    const N8: usize,
    const THREADS: u32,
    const MASKED: bool = false,
>;

// One shape per head size, and two for 128, each the fastest measured on an H100 that lets an SM
// hold two CTAs. Two 16-row MMA tiles per warp halve the reads of K and V from shared memory; from
// 192 columns on, their accumulators would not fit the registers.

/// The kernel type of a shape: head size, query rows of a warp, keys of a tile, threads of a CTA,
/// and whether there is a bias or a mask.
macro_rules! shape {
    (head $head:literal, warp_rows $rows:literal, keys $keys:literal, threads $threads:literal
     $(, masked $masked:literal)?) => {
        Tiled<{ $rows / 16 }, { $head / 8 }, { $keys / 8 }, $threads $(, $masked)?>
    };
}

/// Head sizes up to 32.
pub type D32 = shape!(head 32, warp_rows 32, keys 64, threads 128);
/// Head sizes up to 64.
pub type D64 = shape!(head 64, warp_rows 32, keys 64, threads 128);
/// Head sizes up to 80.
pub type D80 = shape!(head 80, warp_rows 32, keys 64, threads 128);
/// Head sizes up to 96.
pub type D96 = shape!(head 96, warp_rows 32, keys 64, threads 128);
/// Head sizes up to 128.
pub type D128 = shape!(head 128, warp_rows 32, keys 48, threads 128);
/// Head sizes up to 128, with longer key tiles.
pub type D128Long = shape!(head 128, warp_rows 32, keys 64, threads 128);
/// Head sizes up to 160.
pub type D160 = shape!(head 160, warp_rows 32, keys 32, threads 128);
/// Head sizes up to 192.
pub type D192 = shape!(head 192, warp_rows 16, keys 64, threads 128);
/// Head sizes up to 192, one CTA per SM.
pub type TallD192 = shape!(head 192, warp_rows 16, keys 64, threads 256);
/// Head sizes up to 224.
pub type D224 = shape!(head 224, warp_rows 16, keys 64, threads 128);
/// Head sizes up to 256.
pub type D256 = shape!(head 256, warp_rows 16, keys 64, threads 128);
/// Head sizes up to 256, one CTA per SM.
pub type TallD256 = shape!(head 256, warp_rows 16, keys 64, threads 256);

/// Head sizes up to 64, with a bias or a mask.
pub type MaskedD64 = shape!(head 64, warp_rows 32, keys 64, threads 128, masked true);
/// Head sizes up to 128, with a bias or a mask.
pub type MaskedD128 = shape!(head 128, warp_rows 32, keys 32, threads 128, masked true);
/// Head sizes up to 256, with a bias or a mask.
pub type MaskedD256 = shape!(head 256, warp_rows 16, keys 64, threads 128, masked true);

/// Grid of a call whose kernel has tiles of `rows` rows.
pub fn grid(p: &AttentionParams, rows: u32) -> [u32; 3] {
    [row_tiles(p, rows) * p.kv_heads * p.batch, 1, 1]
}

/// Grid of a call over a paged KV cache.
pub fn paged_grid(p: &PagedTiledParams, rows: u32) -> [u32; 3] {
    let a = &p.attention;
    let of_tokens = Group::new(a.q_heads, a.kv_heads).rows(p.tokens);
    [pages::row_tiles(of_tokens, a.batch, rows) * a.kv_heads, 1, 1]
}

impl<const M: usize, const D8: usize, const N8: usize, const THREADS: u32>
    Tiled<M, D8, N8, THREADS, false>
{
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
        p: AttentionParams,
    ) {
        let rows = Rows::of_block(&p, seqlens, block_idx_x(), Self::ROWS);
        Self::block(&p, &rows, SideBySide, || (), None, [q, k, v, head_sink, out], lse);
    }

    /// The kernel for a paged KV cache: k and v are (block, row, KV head, head size), and
    /// `block_table`, (batch, blocks of a sequence), lists the blocks of each sequence. q and out
    /// hold the tokens of all sequences; `starts` is cu_seqlens: the tokens of sequence `b` begin
    /// at row `starts[b]`. `past_seqlens[b]` keys precede them in the cache. lse, which may be
    /// null, is (query head, token).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_paged<T: MmaElement>(
        q: Global<T>,
        k: Global<T>,
        v: Global<T>,
        cos: Global<T>,
        sin: Global<T>,
        starts: Global<i32>,
        past_seqlens: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        out: Global<T>,
        lse: Global<f32>,
        p: PagedTiledParams,
    ) {
        let sequences = Blocks::sequences(starts, past_seqlens, &p);
        let (rows, batch) = Rows::of_sequences(&p.attention, sequences, block_idx_x(), Self::ROWS);
        if rows.count() == 0 {
            return;
        }
        let blocks = Blocks::new(block_table, batch, &p);
        let rope = Rope { cos, sin, position_ids: Global::null(), params: p.rotary, offset: 0 };
        let tokens = AttentionParams { q_len: p.tokens, ..p.attention };
        let rotate = || {
            if rope.params.dim > 0 {
                Self::rotate(&rope, &rows);
            }
        };
        Self::block(&tokens, &rows, blocks, rotate, None, [q, k, v, head_sink, out], lse);
    }
}

impl<const M: usize, const D8: usize, const N8: usize, const THREADS: u32>
    Tiled<M, D8, N8, THREADS, true>
{
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
        p: MaskedParams,
    ) {
        let rows = Rows::of_block(&p.attention, seqlens, block_idx_x(), Self::ROWS);
        let bias = Some(Bias::new(bias, mask, &p));
        let tensors = [q, k, v, head_sink, out];
        Self::block(&p.attention, &rows, SideBySide, || (), bias, tensors, lse);
    }
}

impl<const M: usize, const D8: usize, const N8: usize, const THREADS: u32, const MASKED: bool>
    Tiled<M, D8, N8, THREADS, MASKED>
{
    /// Lowest compute capability, times ten.
    pub const MIN_SM: u32 = 75;
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

    /// Pairs of units of a warp's queries that registers hold, which saves reads from shared
    /// memory: as many as fit beside output and scores. The match is over the registers of all
    /// three.
    const KEPT_PAIRS: usize = match M * (6 * D8 + 4 * N8) {
        _ if D8 < 8 || MASKED => 0,
        0..=200 => D8 / 2,
        _ if M == 1 => D8 / 4,
        _ => 0,
    };
    const WARP_ROWS: u32 = M as u32 * 16;
    const KEPT: u32 = swizzled_bytes(Self::ROWS + 2 * Self::KEYS, D8);

    /// The body of a CTA, with or without a bias; `rotate` rotates queries that are not rotated
    /// yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn block<T: MmaElement, L: Layout>(
        p: &AttentionParams,
        rows: &Rows,
        layout: L,
        rotate: impl FnOnce(),
        bias: Option<Bias<T>>,
        [q, k, v, head_sink, out]: [Global<T>; 5],
        lse: Global<f32>,
    ) {
        Self::load_queries(p, rows, layout, q, Swizzled::at(0));
        rotate();

        let mut acc = zeros::<M, D8>();
        let mut states = [[SoftmaxState::EMPTY; 2]; M];
        match bias {
            Some(bias) => Self::attend_masked(p, rows, bias, [k, v], &mut states, &mut acc),
            None => Self::attend(p, rows, layout, [k, v], &mut states, &mut acc),
        }

        let factors = close_all(p, rows, head_sink, lse, states, Self::row);
        store(&acc, factors, Self::queries::<T>());
        sync_warp();
        Self::write(p, rows, out, Self::queries());
    }

    /// A lane's addresses for A and B operands, recomputed in each step: no registers are left to
    /// hold them across the mainloop.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn reads() -> [WarpRead<D8>; 2] {
        let lane = opaque(lane());
        [WarpRead::by_columns(lane), WarpRead::of(lane)]
    }

    /// Query rows of the warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn queries<T: MmaElement>() -> Swizzled<T, D8> {
        Swizzled::at(0).from(Self::WARP_ROWS * warp())
    }

    /// Address of row `r`'s description.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kept(r: u32) -> Shared<u32> {
        Shared::at(Self::KEPT + 16 * r)
    }

    /// A lane's row in number `m` of the warp's 16-row MMA tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row(m: usize, half: usize) -> Row {
        Row::kept(Self::kept(Self::WARP_ROWS * warp() + 16 * m as u32 + row_of(half)))
    }

    /// Starts copying the queries, and stores the row descriptions. The addresses of the queries do
    /// not depend on the sequence's length, whose load is in flight meanwhile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load_queries<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        layout: impl Layout,
        q: Global<T>,
        tile: Swizzled<T, D8>,
    ) {
        let copy = RowCopy::<D8, THREADS>::of(thread_idx());
        copy.start(tile, Self::ROWS, p.head_size, |r| {
            let (s, head) = layout.query(rows, r);
            let exists = s < p.q_len;
            (q.offset(if exists { p.q.at(rows.batch, head, s) } else { 0 }), exists)
        });
        for r in (thread_idx()..Self::ROWS).step_by(THREADS as usize) {
            layout.row(rows, r).keep(Self::kept(r));
        }
    }

    /// Waits for the queries and rotates them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rotate<T: MmaElement>(rope: &Rope<T>, rows: &Rows) {
        cp_async_commit();
        cp_async_wait::<0>();
        sync_threads();
        let half = rope.params.dim / (2 * T::PER_VEC);
        let queries = Swizzled::<T, D8>::at(0);
        for pair in Rolled(thread_idx()..rows.count() * half, THREADS) {
            let r = quotient(pair, half);
            let unit = pair - r * half;
            let places = [queries.place(r, unit), queries.place(r, unit + half)];
            let position = rope.position(0, rows.query(r).0, rows.seqlen.past);
            let angles = rope.angles(unit * T::PER_VEC, position);
            let rotated = rope.rotate(places.map(|place| place.load_vec(0)), angles);
            places[0].store_vec(0, rotated[0]);
            places[1].store_vec(0, rotated[1]);
        }
    }

    /// The mainloop over key tiles.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend<T: MmaElement, L: Layout>(
        p: &AttentionParams,
        rows: &Rows,
        layout: L,
        [k, v]: [Global<T>; 2],
        states: &mut States<M>,
        acc: &mut [[[f32; 4]; D8]; M],
    ) {
        let keys = Swizzled::<T, D8>::at(swizzled_bytes(Self::ROWS, D8));
        let values = keys.from(Self::KEYS);
        let k = (k.offset(p.k.at(rows.batch, rows.kv_head, 0)), p.k.row);
        let v = (v.offset(p.v.at(rows.batch, rows.kv_head, 0)), p.v.row);
        let scale = ScoreScale::new(p.scale, p.softcap);
        let span = layout.span(rows);
        let copy = |tile, source, begin, spots| {
            // Recomputed too: no register is left to hold it.
            let copy = RowCopy::<D8, THREADS>::of(opaque(thread_idx()));
            let range = begin..span.some.end;
            layout.start(copy, tile, Self::KEYS, p.head_size, source, range, spots);
            cp_async_commit();
        };

        let mut begin = span.some.first / L::PIECE * L::PIECE;
        let mut spots = layout.find(begin, 0, span.some.end);
        copy(keys, k, begin, spots);
        let mut kept = [[[0; 4]; M]; D8];
        if Self::KEPT_PAIRS > 0 {
            cp_async_wait::<0>();
            sync_threads();
            let [read, _] = Self::reads();
            kept = left_operands(Self::KEPT_PAIRS, |m, pair| {
                read.address(Self::queries::<T>(), m, pair)
            });
        }
        while begin < span.some.end {
            cp_async_wait::<0>();
            sync_threads();
            copy(values, v, begin, spots);
            let lacks_keys = layout.lacks_keys(spots);
            spots = layout.find(begin, Self::KEYS, span.some.end);

            let ([left, right], queries) = (Self::reads(), Self::queries::<T>());
            let mut weights = scores_at::<T, M, D8, N8>(
                (&kept, Self::KEPT_PAIRS),
                |m, pair| left.address(queries, m, pair),
                |block, pair| right.address(keys, block, pair),
            );
            scale.adjust(&mut weights);
            if span.is_partial(begin, Self::KEYS) {
                mask(&mut weights, begin, |m, half| Self::row(m, half).visible);
            }
            if lacks_keys {
                hide(&mut weights, begin, |key| layout.is_nowhere(key.min(span.some.end - 1)));
            }

            cp_async_wait::<0>();
            sync_threads();
            let next = begin + Self::KEYS;
            if next < span.some.end {
                copy(keys, k, next, spots);
            }

            weigh_with_slack(states, &mut weights, acc, scale);
            accumulate(acc, &weights, values, &Self::reads()[0]);
            begin = next;
        }
        cp_async_wait::<0>();
        sync_threads();
    }

    /// [`attend`](Self::attend) with a bias or a mask. A loop of its own, because at head size 128
    /// one loop for both would not fit the registers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend_masked<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        bias: Bias<T>,
        [k, v]: [Global<T>; 2],
        states: &mut States<M>,
        acc: &mut [[[f32; 4]; D8]; M],
    ) {
        let copy = RowCopy::<D8, THREADS>::of(thread_idx());
        let keys = Swizzled::<T, D8>::at(swizzled_bytes(Self::ROWS, D8));
        let values = keys.from(Self::KEYS);
        let k = (k.offset(p.k.at(rows.batch, rows.kv_head, 0)), p.k.row);
        let v = (v.offset(p.v.at(rows.batch, rows.kv_head, 0)), p.v.row);
        let scale = ScoreScale::new(p.scale, p.softcap);
        let span = rows.span().below(bias.columns);
        let copy = |tile, source, begin| {
            copy.start_rows(tile, Self::KEYS, p.head_size, source, begin..span.some.end);
            cp_async_commit();
        };

        // Pairs of keys that are read together start at an even key.
        let mut begin = span.some.first / 8 * 8;
        copy(keys, k, begin);
        while begin < span.some.end {
            cp_async_wait::<0>();
            sync_threads();
            copy(values, v, begin);

            let row = |m, half| {
                let row = Self::row(m, half);
                bias.row(rows.batch, row.head, row.s.min(p.q_len - 1))
            };
            let words = bias.words::<M, N8>(begin, row);
            let mut weights = scores::<T, M, D8, N8>(Self::queries(), keys, &Self::reads());
            scale.adjust(&mut weights);
            match &words {
                Some(words) => bias.add_words(&mut weights, words, scale.plain_factor()),
                None => bias.add(&mut weights, begin, scale.plain_factor(), row),
            }
            if span.is_partial(begin, Self::KEYS) {
                mask(&mut weights, begin, |m, half| Self::row(m, half).below(bias.columns).visible);
            }

            cp_async_wait::<0>();
            sync_threads();
            let next = begin + Self::KEYS;
            if next < span.some.end {
                copy(keys, k, next);
            }

            weigh_plain(states, &mut weights, acc);
            accumulate(acc, &weights, values, &Self::reads()[0]);
            begin = next;
        }
        cp_async_wait::<0>();
        sync_threads();
        *states = to_log2(*states);
    }

    /// Writes the warp's output rows, which replaced its queries in the tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write<T: MmaElement>(
        p: &AttentionParams,
        rows: &Rows,
        out: Global<T>,
        mine: Swizzled<T, D8>,
    ) {
        /// Lanes per row.
        const ACROSS: u32 = 8;
        for r in (lane() / ACROSS..Self::WARP_ROWS).step_by((32 / ACROSS) as usize) {
            let row = Row::kept(Self::kept(Self::WARP_ROWS * warp() + r));
            if row.s < p.q_len {
                let start = p.out.at(rows.batch, row.head, row.s);
                for unit in (lane() % ACROSS..D8 as u32).step_by(ACROSS as usize) {
                    let column = unit * T::PER_VEC;
                    if column < p.head_size {
                        out.store_vec(start + column as usize, mine.place(r, unit).load_vec(0));
                    }
                }
            }
        }
    }
}
