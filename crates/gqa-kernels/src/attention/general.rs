//! Memory-efficient attention: any head sizes up to 512, any group, any element type, windows,
//! bias, mask, sinks, score output. What a faster kernel refuses runs here; only scores before the
//! mask do not exist here ([`unfused`](super::unfused)).
//!
//! ```text
//! q          (batch, query head, row, head_size)   rotated
//! k          (batch, KV head, capacity, head_size) rows from a sequence's `total` on are not used
//! v          (batch, KV head, capacity, v_head_size)
//! bias       (batch, query head, row, key)         added; null: none
//! mask       (batch, query head, row, key)         bytes, 0 hides the key; the bias's strides
//! head_sink  (query head)                          null unless sink::PER_HEAD
//! out        (batch, query head, row, v_head_size) of the element type or f32
//! lse        (batch, query head, row)              f32, contiguous; null: not wanted
//! output_qk  (batch, query head, row, qk_columns)  contiguous; null unless wanted
//! ```
//!
//! **Blocks.** The query heads of a group are packed as rows ([`Group`]), because they share K and
//! V. A block of four warps takes [`ROWS`] packed rows of one KV head, four rows per warp, and
//! walks the keys that any of them sees in tiles of [`KEYS`]. The grid is one-dimensional and
//! strides, so its size is a matter of speed only ([`grid`]).
//!
//! **A tile of keys.** K, and then V, passes through one buffer in shared memory, `CHUNK` columns
//! at a time, as f32. For scores a lane is a key: it sums q·k for its warp's four rows, so one load
//! of K serves four products. The weights go to shared memory, and for the output a lane is a
//! column, `lane + 32c`: accumulators stay in registers because every loop over `c` has a constant
//! count. The online softmax ([`PlainState`]) keeps the row's maximum in all lanes and the lane's
//! own share of the sum.
//!
//! **Barriers.** Each staged chunk lies between two block barriers: one after it is written, one
//! after it is read. The first of them also orders the staged queries, which only their own warp
//! reads. The weights are a warp's own, ordered by a warp barrier.
//!
//! **Numerics.** Everything in f32, one rounding at the end. A weight meets a value only where the
//! row sees the key: behind a row's range there may be NaN, and 0·NaN is not 0. Weights come from
//! differences of scores ([`PlainState`]), so that a bias of any size, the lowest number included,
//! costs no precision; -inf hides a key. Nothing of a mask or bias is ever materialised.
//!
//! **Alignment.** None is needed: rows that are not whole 16-byte vectors are staged element by
//! element.

use crate::concept::band::Band;
use crate::concept::heads::Group;
use crate::concept::mask::Visible;
use crate::concept::softmax::PlainState;
use crate::num::{Element, tanh, unpack};
use crate::params::{AttentionParams, MaskedParams, qk_output, sink, vectors};
use crate::simt::{
    Global, Shared, block_idx_x, fma, grid_dim_x, lane, max, opaque, shfl_xor_f32, sync_threads,
    sync_warp, thread_idx, warp,
};
use crate::tile::seqlens::Seqlens;

const WARPS: u32 = 4;
/// Packed rows of a warp.
const WARP_ROWS: usize = 4;
/// Columns of a lane.
const LANE_COLUMNS: usize = (MAX_HEAD_SIZE / 32) as usize;
/// Columns of K or V staged at a time.
const CHUNK: u32 = 64;
/// Elements from one staged key to the next: 16-byte accesses of eight lanes, a key each, then
/// touch all banks once.
const PITCH: u32 = CHUNK + 4;

/// Threads of a block.
pub const THREADS: u32 = 32 * WARPS;
/// Packed rows of a block.
pub const ROWS: u32 = WARPS * WARP_ROWS as u32;
/// Keys of a tile: one per lane.
pub const KEYS: u32 = 32;
/// Largest head size.
pub const MAX_HEAD_SIZE: u32 = 512;

// Shared memory: queries (ROWS, MAX_HEAD_SIZE), a chunk of K or V (KEYS, PITCH), weights (ROWS,
// KEYS), all f32; and the first and last key that each row sees, u32.
const CHUNK_AT: u32 = ROWS * MAX_HEAD_SIZE * 4;
const WEIGHTS_AT: u32 = CHUNK_AT + KEYS * PITCH * 4;
const VISIBLE_AT: u32 = WEIGHTS_AT + ROWS * KEYS * 4;
/// Shared memory of a block.
pub const SHARED_BYTES: u32 = VISIBLE_AT + ROWS * 8;

/// Blocks for a call: one per tile of rows.
pub fn grid(p: &AttentionParams) -> [u32; 3] {
    [tiles(p).clamp(1, i32::MAX as u64) as u32, 1, 1]
}

/// Tiles of [`ROWS`] packed rows, over all batch entries and KV heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tiles(p: &AttentionParams) -> u64 {
    p.batch as u64 * p.kv_heads as u64 * tiles_per_head(p) as u64
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn tiles_per_head(p: &AttentionParams) -> u32 {
    Group::new(p.q_heads, p.kv_heads).rows(p.q_len).div_ceil(ROWS)
}

/// The kernel. Output is in the element type, or in f32 where `out_f32` is not null.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn general<T: Element>(
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    seqlens: Seqlens,
    bias: Global<T>,
    mask: Global<u8>,
    head_sink: Global<T>,
    out: Global<T>,
    out_f32: Global<f32>,
    lse: Global<f32>,
    output_qk: Global<T>,
    p: MaskedParams,
) {
    let masked = &p;
    let p = &masked.attention;
    let call = Call { q, k, v, bias, mask, head_sink, out, out_f32, lse, output_qk, masked, p };
    let tiles = tiles(p);
    let mut tile = block_idx_x() as u64;
    while tile < tiles {
        call.attend(&Tile::new(tile, seqlens, masked));
        tile += grid_dim_x() as u64;
    }
}

/// What a block works on.
struct Tile {
    batch: u32,
    kv_head: u32,
    /// First packed row.
    first_row: u32,
    group: Group,
    band: Band,
    q_len: u32,
}

/// One packed row of a warp.
#[derive(Clone, Copy)]
struct Row {
    /// Place in the block's tile.
    place: u32,
}

impl Tile {
    /// Tile number `tile`. Late rows come first: with a causal mask they take longest.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn new(tile: u64, seqlens: Seqlens, masked: &MaskedParams) -> Self {
        let p = &masked.attention;
        let (per_head, kv_heads) = (tiles_per_head(p).max(1), p.kv_heads.max(1));
        let head = tile / per_head as u64;
        let batch = (head / kv_heads as u64) as u32;
        Self {
            batch,
            kv_head: (head % kv_heads as u64) as u32,
            first_row: (per_head - 1 - (tile % per_head as u64) as u32) * ROWS,
            group: Group::new(p.q_heads, p.kv_heads),
            band: Band::new(seqlens.load(batch, p.q_len), masked),
            q_len: p.q_len,
        }
    }

    /// This warp's rows: every [`WARPS`]th, so that a decoding group, which fills no tile, still
    /// occupies all warps.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rows(&self) -> [Row; WARP_ROWS] {
        core::array::from_fn(|i| {
            let place = i as u32 * WARPS + warp();
            Row { place }
        })
    }

    /// Stores the visible key ranges of this warp's rows in shared memory: no registers are left
    /// for them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage_visible(&self, rows: &[Row; WARP_ROWS]) {
        sync_warp();
        for row in rows {
            let (s, _) = self.group.unpack(self.kv_head, self.first_row + row.place);
            let visible =
                if s < self.q_len { self.band.visible(s) } else { Visible { first: 0, end: 0 } };
            if lane() == 0 {
                Shared::at(VISIBLE_AT).store(2 * row.place, visible.first);
                Shared::at(VISIBLE_AT).store(2 * row.place + 1, visible.end);
            }
        }
        sync_warp();
    }

    /// (query row, query head) of a row, recomputed each time to save registers. `None` past the
    /// last row: the last tile of a head is rarely full.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn find(&self, row: &Row) -> Option<(u32, u32)> {
        let (s, head) = self.group.unpack(self.kv_head, self.first_row + opaque(row.place));
        if s < self.q_len { Some((s, head)) } else { None }
    }

    /// The keys that some row of the tile sees, or that lie between such keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn keys(&self) -> Visible {
        let last = (self.first_row + ROWS - 1) / self.group.size;
        self.band.visible_to(self.first_row / self.group.size, last.min(self.q_len - 1))
    }
}

impl Row {
    /// Bit mask of the tile's keys, from `begin` on, that the row sees.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sees(&self, begin: u32) -> u32 {
        let below = |key: u32| match key.saturating_sub(begin) {
            n @ 0..KEYS => (1 << n) - 1,
            _ => u32::MAX,
        };
        let Visible { first, end } = self.visible();
        below(end) & !below(first)
    }

    /// The keys that the row sees.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn visible(&self) -> Visible {
        let at = |i| Shared::at(VISIBLE_AT).load(2 * self.place + i);
        Visible { first: at(0), end: at(1) }
    }
}

/// The tensors and the scalars.
struct Call<'a, T> {
    q: Global<T>,
    k: Global<T>,
    v: Global<T>,
    bias: Global<T>,
    mask: Global<u8>,
    head_sink: Global<T>,
    out: Global<T>,
    out_f32: Global<f32>,
    lse: Global<f32>,
    output_qk: Global<T>,
    masked: &'a MaskedParams,
    p: &'a AttentionParams,
}

/// One head of K or V.
struct Head<T> {
    rows: Global<T>,
    /// Elements from one row to the next.
    stride: u64,
    /// Elements of a row.
    size: u32,
    /// Whether rows are whole vectors.
    aligned: bool,
}

type Accumulators = [[f32; LANE_COLUMNS]; WARP_ROWS];

impl<T: Element> Call<'_, T> {
    /// Computes one tile of rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend(&self, tile: &Tile) {
        let (rows, keys) = (tile.rows(), tile.keys());
        tile.stage_visible(&rows);
        let mut states = [PlainState::EMPTY; WARP_ROWS];
        let mut accumulators = [[0.0; LANE_COLUMNS]; WARP_ROWS];
        self.stage_queries(tile, &rows);
        let mut begin = keys.first;
        while begin < keys.end {
            let sees = rows.map(|row| row.sees(begin));
            let dots = self.dots(tile, &rows, sees, begin, keys.end);
            for r in 0..WARP_ROWS {
                if sees[r] != 0 {
                    let score = self.masked_score(tile, &rows[r], sees[r], begin, dots[r]);
                    weigh(&mut states[r], &mut accumulators[r], rows[r].place, score);
                }
            }
            sync_warp();
            self.add_values(tile, &rows, sees, begin, keys.end, &mut accumulators);
            begin += KEYS;
        }
        for r in 0..WARP_ROWS {
            if let Some(place) = tile.find(&rows[r]) {
                self.finish(tile, &rows[r], place, &mut states[r], &accumulators[r]);
            }
        }
        if self.p.qk_output != qk_output::NONE {
            self.write_scores(tile, &rows, keys, &states);
        }
    }

    /// Copies this warp's query rows to shared memory, as f32, up to a multiple of 4 elements
    /// with 0. Rows that see nothing are never read.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage_queries(&self, tile: &Tile, rows: &[Row; WARP_ROWS]) {
        let (size, aligned) = (self.p.head_size, self.masked.vectors & vectors::KEYS != 0);
        for row in rows {
            let Some((s, head)) = tile.find(row) else { continue };
            let from = self.p.q.at(tile.batch, head, s);
            let to = Shared::<f32>::at(0).offset(row.place * MAX_HEAD_SIZE);
            let mut e = if aligned { lane() * T::PER_VEC } else { lane() };
            while aligned && e < size {
                store_f32::<T>(to.offset(e), self.q.load_vec(from + e as usize));
                e += 32 * T::PER_VEC;
            }
            while !aligned && e < size.next_multiple_of(4) {
                let value = if e < size { self.q.load(from + e as usize).to_f32() } else { 0.0 };
                to.store(e, value);
                e += opaque(32);
            }
        }
    }

    /// Copies columns `column ..` of keys `begin ..` of a head's K or V to shared memory, as f32.
    /// Keys from `end` on, and columns behind the head's, are 0 there: they are not read, whatever
    /// they hold.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage(&self, head: &Head<T>, column: u32, begin: u32, end: u32) {
        if head.aligned {
            stage_vectors(head, column, begin, end);
        } else {
            stage_elements(head, column, begin, end);
        }
    }

    /// q·k of this lane's key with each of the warp's rows; for a row that sees none of the tile's
    /// keys, 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn dots(
        &self,
        tile: &Tile,
        rows: &[Row; WARP_ROWS],
        sees: [u32; WARP_ROWS],
        begin: u32,
        end: u32,
    ) -> [f32; WARP_ROWS] {
        let keys = Head {
            rows: self.k.offset(self.p.k.at(tile.batch, tile.kv_head, 0)),
            stride: self.p.k.row,
            size: self.p.head_size,
            aligned: self.masked.vectors & vectors::KEYS != 0,
        };
        let mut dots = [0.0; WARP_ROWS];
        let mut column = 0;
        while column < self.p.head_size {
            self.stage(&keys, column, begin, end);
            sync_threads();
            let width = CHUNK.min(self.p.head_size - column);
            add_dots(&mut dots, rows, sees, column, width);
            sync_threads();
            column += CHUNK;
        }
        dots
    }

    /// Score of this lane's key, from q·k; only where the row sees it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn score(&self, tile: &Tile, row: &Row, key: u32, dot: f32) -> f32 {
        let mut score = dot * self.p.scale;
        if self.p.softcap > 0.0 {
            score = self.p.softcap * tanh(score / self.p.softcap);
        }
        let (bias, mask) = (!self.bias.is_null(), !self.mask.is_null());
        if let (true, Some((s, head))) = (bias || mask, tile.find(row)) {
            let at = self.p.bias.at(tile.batch, head, s) + key as usize;
            if bias {
                score = add_bias(score, self.bias.load(at).to_f32());
            }
            if mask && self.mask.load(at) == 0 {
                score = f32::NEG_INFINITY;
            }
        }
        score
    }

    /// As above, but -inf where the row does not see the key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn masked_score(&self, tile: &Tile, row: &Row, sees: u32, begin: u32, dot: f32) -> f32 {
        if sees >> lane() & 1 == 0 {
            return f32::NEG_INFINITY;
        }
        self.score(tile, row, begin + lane(), dot)
    }

    /// Adds the tile's values, times their weights, to the accumulators.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add_values(
        &self,
        tile: &Tile,
        rows: &[Row; WARP_ROWS],
        sees: [u32; WARP_ROWS],
        begin: u32,
        end: u32,
        accumulators: &mut Accumulators,
    ) {
        let values = Head {
            rows: self.v.offset(self.p.v.at(tile.batch, tile.kv_head, 0)),
            stride: self.p.v.row,
            size: self.masked.v_head_size,
            aligned: self.masked.vectors & vectors::VALUES != 0,
        };
        let keys = KEYS.min(end - begin);
        for chunk in 0..(MAX_HEAD_SIZE / CHUNK) as usize {
            let column = chunk as u32 * CHUNK;
            if column < values.size {
                self.stage(&values, column, begin, end);
                sync_threads();
                add_chunk(accumulators, chunk, rows, sees, keys);
                sync_threads();
            }
        }
    }

    /// Adds the attention sink, divides the accumulators by the sum and writes the row. Padding
    /// rows have no sink.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish(
        &self,
        tile: &Tile,
        row: &Row,
        (s, head): (u32, u32),
        state: &mut PlainState,
        accumulators: &[f32; LANE_COLUMNS],
    ) {
        state.sum = warp_sum(state.sum);
        let mut factor = 1.0;
        let Visible { first, end } = row.visible();
        if self.p.sink != sink::NONE && first < end {
            factor = state.join_sink(self.sink(head));
        }
        factor *= state.normaliser();
        let at = self.p.out.at(tile.batch, head, s);
        // A loop for each type: a branch at each store would stay in the folded text.
        if self.out_f32.is_null() {
            self.store_columns(self.out, at, accumulators, factor);
        } else {
            self.store_columns(self.out_f32, at, accumulators, factor);
        }
        if !self.lse.is_null() && lane() == 0 {
            self.lse.store(self.row_index(tile, (s, head)), state.log_sum_exp());
        }
    }

    /// Writes the lane's columns of a row that starts at element `at`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn store_columns<O: Element>(
        &self,
        out: Global<O>,
        at: usize,
        accumulators: &[f32; LANE_COLUMNS],
        factor: f32,
    ) {
        for (c, accumulator) in accumulators.iter().enumerate() {
            let column = 32 * c as u32 + lane();
            if column < self.masked.v_head_size {
                out.store(at + column as usize, O::from_f32(accumulator * factor));
            }
        }
    }

    /// Sink logit of a query head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sink(&self, head: u32) -> f32 {
        match self.p.sink {
            sink::PER_HEAD => self.head_sink.load(head as usize).to_f32(),
            _ => 0.0,
        }
    }

    /// Index of a row among all (batch, query head, row).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn row_index(&self, tile: &Tile, (s, head): (u32, u32)) -> usize {
        let head = tile.batch as usize * self.p.q_heads as usize + head as usize;
        head * self.p.q_len as usize + s as usize
    }

    /// Computes the scores once more, now that the sums are known, and writes every column of
    /// output_qk.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write_scores(
        &self,
        tile: &Tile,
        rows: &[Row; WARP_ROWS],
        keys: Visible,
        states: &[PlainState; WARP_ROWS],
    ) {
        let mut begin = 0;
        while begin < self.p.qk_columns {
            let sees = rows.map(|row| row.sees(begin));
            let mut dots = [0.0; WARP_ROWS];
            if begin < keys.end && begin + KEYS > keys.first {
                dots = self.dots(tile, rows, sees, begin, keys.end);
            }
            for r in 0..WARP_ROWS {
                if begin + lane() < self.p.qk_columns {
                    self.write_score(tile, &rows[r], sees[r], begin, dots[r], &states[r]);
                }
            }
            begin += KEYS;
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn write_score(
        &self,
        tile: &Tile,
        row: &Row,
        sees: u32,
        begin: u32,
        dot: f32,
        state: &PlainState,
    ) {
        let Some(place) = tile.find(row) else { return };
        let key = begin + lane();
        let mut value = 0.0;
        if sees >> lane() & 1 != 0 {
            let score = self.score(tile, row, key, dot);
            value = match self.p.qk_output {
                qk_output::AFTER_SOFTMAX => state.weight(score) * state.normaliser(),
                _ => score,
            };
        }
        let at = self.row_index(tile, place) * self.p.qk_columns as usize + key as usize;
        self.output_qk.store(at, T::from_f32(value));
    }
}

/// Stages 16-byte vectors; a thread keeps two loads in flight.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn stage_vectors<T: Element>(head: &Head<T>, column: u32, begin: u32, end: u32) {
    let (across, down) = (CHUNK / T::PER_VEC, THREADS * T::PER_VEC / CHUNK);
    let (first_key, e) = (thread_idx() / across, thread_idx() % across * T::PER_VEC);
    let pairs = KEYS / down / 2;
    // One pair after the other: there are no registers for both.
    let pairs = if pairs > 1 { opaque(pairs) } else { pairs };
    for pair in 0..pairs {
        let keys = [2 * pair, 2 * pair + 1].map(|i| first_key + i * down);
        let words = keys.map(|key| {
            let key = begin + key;
            if key < end && column + e < head.size {
                head.rows.load_vec(key as usize * head.stride as usize + (column + e) as usize)
            } else {
                [0; 4]
            }
        });
        for i in 0..2 {
            store_f32::<T>(Shared::at(CHUNK_AT).offset(keys[i] * PITCH + e), words[i]);
        }
    }
}

/// The same, element by element, for rows that are not whole vectors. A thread copies one column of
/// every second key, one load at a time: more loads in flight would need more registers.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn stage_elements<T: Element>(head: &Head<T>, column: u32, begin: u32, end: u32) {
    let e = thread_idx() % CHUNK;
    let mut key = thread_idx() / CHUNK;
    while key < KEYS {
        let valid = begin + key < end && column + e < head.size;
        let at = || (begin + key) as usize * head.stride as usize + (column + e) as usize;
        let value = if valid { head.rows.load(at()).to_f32() } else { 0.0 };
        Shared::<f32>::at(CHUNK_AT).store(key * PITCH + e, value);
        key += opaque(THREADS / CHUNK);
    }
}

/// A score with its bias. -inf hides a key, whatever its score.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn add_bias(score: f32, bias: f32) -> f32 {
    if bias == f32::NEG_INFINITY { bias } else { score + bias }
}

/// Online softmax of a tile's scores in one row: rescales the accumulators and stores P in shared
/// memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn weigh(state: &mut PlainState, accumulators: &mut [f32; LANE_COLUMNS], place: u32, score: f32) {
    let factor = state.raise(warp_max(score));
    let weight = state.weight(score);
    state.sum += weight;
    Shared::<f32>::at(WEIGHTS_AT).store(place * KEYS + lane(), weight);
    for accumulator in accumulators {
        *accumulator *= factor;
    }
}

/// Adds the products of `width` staged columns, which are the queries' columns `column ..`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_dots(
    dots: &mut [f32; WARP_ROWS],
    rows: &[Row; WARP_ROWS],
    sees: [u32; WARP_ROWS],
    column: u32,
    width: u32,
) {
    let (queries, key) = (Shared::<f32>::at(0), Shared::<f32>::at(CHUNK_AT).offset(lane() * PITCH));
    let mut e = 0;
    while e < width {
        let k = key.load_vec(e).map(f32::from_bits);
        for r in 0..WARP_ROWS {
            if sees[r] != 0 {
                let q = queries
                    .load_vec(rows[r].place * MAX_HEAD_SIZE + column + e)
                    .map(f32::from_bits);
                for i in 0..4 {
                    dots[r] = fma(q[i], k[i], dots[r]);
                }
            }
        }
        e += 4;
    }
}

/// Adds the staged values of `keys` keys, four at a time; chunk number `chunk` holds two of each
/// lane's columns.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_chunk(
    accumulators: &mut Accumulators,
    chunk: usize,
    rows: &[Row; WARP_ROWS],
    sees: [u32; WARP_ROWS],
    keys: u32,
) {
    let (values, weights) =
        (Shared::<f32>::at(CHUNK_AT).offset(lane()), Shared::<f32>::at(WEIGHTS_AT));
    let mut key = 0;
    while key < keys {
        let v: [[f32; 2]; 4] = core::array::from_fn(|i| {
            let row = values.offset((key + i as u32) * PITCH);
            [row.load(0), row.load(32)]
        });
        for r in 0..WARP_ROWS {
            let seen = sees[r] >> key;
            if seen & 0xf != 0 {
                let w = weights.load_vec(rows[r].place * KEYS + key).map(f32::from_bits);
                for i in 0..4 {
                    if seen >> i & 1 != 0 {
                        for c in 0..2 {
                            let accumulator = &mut accumulators[r][2 * chunk + c];
                            *accumulator = fma(w[i], v[i][c], *accumulator);
                        }
                    }
                }
            }
        }
        key += 4;
    }
}

/// Stores the elements of a 16-byte vector as f32.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn store_f32<T: Element>(to: Shared<f32>, words: [u32; 4]) {
    let [a, b, c, d, e, f, g, h] = unpack::<T>(words).map(f32::to_bits);
    to.store_vec(0, [a, b, c, d]);
    if T::PER_VEC == 8 {
        to.store_vec(4, [e, f, g, h]);
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn warp_max(x: f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, distance| max(x, shfl_xor_f32(x, distance)))
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn warp_sum(x: f32) -> f32 {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, distance| x + shfl_xor_f32(x, distance))
}
