//! `paged_gaps`: recomputes the output of sequences whose block tables point outside of the cache.
//! It runs after attention kernels that read a copy of the cache.
//!
//! In a copy, blocks outside of the cache are zeros, which attention would treat as keys. This
//! kernel reads the cache itself, elements or quantized values, in blocks of any size, and skips
//! such keys. It rewrites only sequences that see such a block; for all others it just reads the
//! table.
//!
//! It also rewrites sequences with fewer keys than tokens in calls without a causal mask. Their
//! tokens see all keys, but attention treats tokens before the first key as padding.
//!
//! A warp computes one row: a token of one query head. A lane takes one key at a time for S, and
//! every 32nd column for the output. The rotated query is in shared memory, `COLUMNS` columns at a
//! time, so any head size works. The kernel is simple and slow. CTAs share the rows of a sequence,
//! and each reads the table itself.
//!
//! Tensors: q of tokens with its strides, not rotated; k_cache, v_cache (block, row, KV head, head
//! size), or where they are null k_codes, v_codes, quantized values; k_scale, v_scale as in
//! [`paged`](super::paged); tree_mask (tokens) or null; head_sink (query head); out (tokens, query
//! head, v_head_size); lse (query head, tokens) or null.

use super::paged::{Blocks, Place, sequence_of};
use super::rope::{Rope, pairs};
use super::walk::Walk;
use crate::attention::general::{warp_max, warp_sum};
use crate::concept::mask::Visible;
use crate::concept::pages::Sequence;
use crate::concept::scales::{ScalesPer, are_of_rows};
use crate::concept::softmax::PlainState;
use crate::num::{Bits4, Bits8, Code, Element, Format, tanh, unpack};
use crate::params::{PagedGapsParams, PagedParams, sink};
use crate::simt::{
    Global, Rolled, Shared, any_sync, fma, lane, shfl_idx_f32, shfl_idx_u32, sync_warp, warp,
};

const WARPS: u32 = 4;
/// Threads of a CTA.
pub const THREADS: u32 = 32 * WARPS;
/// Columns of a head that a warp processes at a time.
const COLUMNS: u32 = 512;
const LANE_COLUMNS: usize = (COLUMNS / 32) as usize;
/// Shared memory of a CTA: a query for each warp, as f32.
pub const SHARED_BYTES: u32 = WARPS * COLUMNS * 4;
/// Stands for a row without a block.
const NOWHERE: u32 = u32::MAX;

/// Grid of [`paged_gaps`]: (batch, CTAs that share a sequence's rows), about two CTAs per SM.
pub fn paged_gaps_size(p: &PagedGapsParams, multiprocessors: u32) -> [u32; 4] {
    let (batch, rows) =
        (p.paged.batch.max(1), u64::from(p.paged.q_len) * u64::from(p.paged.q_heads));
    let most = rows.div_ceil(u64::from(WARPS)).clamp(1, 1 << 16) as u32;
    [p.paged.batch, (2 * multiprocessors.clamp(1, 1024)).div_ceil(batch).min(most), 1, 1]
}

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn paged_gaps<T: Element>(
    q: Global<T>,
    cos: Global<T>,
    sin: Global<T>,
    starts: Global<i32>,
    past_seqlens: Global<i32>,
    block_table: Global<i32>,
    k_cache: Global<T>,
    v_cache: Global<T>,
    k_codes: Global<u8>,
    v_codes: Global<u8>,
    k_scale: Global<f32>,
    v_scale: Global<f32>,
    tree_mask: Global<i64>,
    head_sink: Global<T>,
    out: Global<T>,
    lse: Global<f32>,
    p: PagedGapsParams,
) {
    let call = Call {
        q,
        rope: Rope {
            cos,
            sin,
            position_ids: Global::null(),
            params: p.paged.rotary,
            offset: p.paged.rope_offset,
        },
        blocks: Blocks { table: block_table, slot_mapping: Global::null() },
        keys: Cache { elements: k_cache, codes: k_codes, scales: k_scale },
        values: Cache { elements: v_cache, codes: v_codes, scales: v_scale },
        tree_mask,
        head_sink,
        out,
        lse,
        p: &p,
    };
    for [b, part, ..] in Walk::of_blocks([p.paged.batch, p.parts, 1, 1]) {
        let sequence = sequence_of(&p.paged, starts, past_seqlens, b).of_at_least(p.paged.least);
        if sequence.new > 0 && (call.lacks_rows(sequence) || call.has_gaps(b, sequence)) {
            let rows = sequence.new * p.paged.q_heads;
            for row in Rolled(part * WARPS + warp()..rows, p.parts * WARPS) {
                let (token, head) = (row / p.paged.q_heads, row % p.paged.q_heads);
                call.attend(&Row { b, sequence, token, head });
            }
        }
    }
}

/// A query row of one head.
struct Row {
    b: u32,
    sequence: Sequence,
    /// Index of the token in the sequence.
    token: u32,
    head: u32,
}

impl Row {
    /// The row's position; negative for a token before the first key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn position(&self) -> i32 {
        self.sequence.past.wrapping_add(self.token) as i32
    }
}

/// The tensors and the scalars.
struct Call<'a, T> {
    q: Global<T>,
    rope: Rope<T>,
    blocks: Blocks,
    keys: Cache<T>,
    values: Cache<T>,
    tree_mask: Global<i64>,
    head_sink: Global<T>,
    out: Global<T>,
    lse: Global<f32>,
    p: &'a PagedGapsParams,
}

impl<T: Element> Call<'_, T> {
    /// Whether attention treated tokens of the sequence as padding although they see keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn lacks_rows(&self, sequence: Sequence) -> bool {
        self.p.lack_rows != 0 && sequence.without_row() > 0 && sequence.seqlen().total > 0
    }

    /// Whether a block that the sequence's tokens see is outside of the cache. Each lane keeps
    /// several loads in flight, because this is bound by latency.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_gaps(&self, b: u32, sequence: Sequence) -> bool {
        const TOGETHER: u32 = 4;
        let (p, total) = (&self.p.paged, sequence.seqlen().total);
        if total == 0 {
            return false;
        }
        let first = sequence.first_seen(p.window) / p.block_size;
        let last = (total - 1) / p.block_size;
        let mut highest = 0;
        for nth in Rolled(first + lane()..last + 1, 32 * TOGETHER) {
            let mut further = 0;
            while further < TOGETHER {
                let nth = (nth + 32 * further).min(last);
                highest = self.blocks.entry(p, b, nth).max(highest);
                further += 1;
            }
        }
        any_sync(highest >= p.blocks)
    }

    /// Computes a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend(&self, row: &Row) {
        let size = self.p.paged.v_head_size;
        let visible = self.visible(row);
        for column in Rolled(0..size, COLUMNS) {
            let (mut state, mut sums) = (PlainState::EMPTY, [0.0; LANE_COLUMNS]);
            for begin in Rolled(visible.first..visible.end, 32) {
                self.add_keys(row, visible, begin, column, &mut state, &mut sums);
            }
            self.finish(row, visible, column, &mut state, &sums);
        }
    }

    /// The keys that the row sees, before the tree mask and gaps of the block table hide some.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn visible(&self, row: &Row) -> Visible {
        let (total, next) = (row.sequence.seqlen().total, (row.position() + 1).max(0) as u32);
        let is_tree = !self.tree_mask.is_null();
        let end = match self.p.causal {
            0 if !is_tree || next > 0 => total,
            _ => next.min(total),
        };
        let window = self.p.paged.window;
        Visible { first: if window > 0 { next.saturating_sub(window) } else { 0 }, end }
    }

    /// The place in the cache of a key, if the row sees it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(&self, row: &Row, visible: Visible, key: u32) -> u32 {
        if key >= visible.end {
            return NOWHERE;
        }
        if !self.tree_mask.is_null() {
            let new = key.wrapping_sub(row.sequence.past);
            let word = self.tree_mask.load((row.sequence.start + row.token) as usize) as u64;
            let is_new = (key as i32) >= row.sequence.past as i32;
            if is_new && (new >= u64::BITS || word >> new & 1 == 0) {
                return NOWHERE;
            }
        }
        let place = self.blocks.row(&self.p.paged, row.b, key);
        place.map_or(NOWHERE, |Place(place)| place)
    }

    /// Adds 32 keys from `begin` on to the row's softmax, and the columns of their values from
    /// `column` on to its sums.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn add_keys(
        &self,
        row: &Row,
        visible: Visible,
        begin: u32,
        column: u32,
        state: &mut PlainState,
        sums: &mut [f32; LANE_COLUMNS],
    ) {
        let place = self.place(row, visible, begin + lane());
        let dot = self.dot(row, place);
        let score = if place == NOWHERE { f32::NEG_INFINITY } else { self.score(dot) };
        let factor = state.raise(warp_max(score));
        let weight = state.weight(score);
        state.sum += weight;
        sums.iter_mut().for_each(|sum| *sum *= factor);
        for key in Rolled(0..32, 1) {
            let (weight, place) = (shfl_idx_f32(weight, key), shfl_idx_u32(place, key));
            if place != NOWHERE {
                for (c, sum) in sums.iter_mut().enumerate() {
                    let e = column + 32 * c as u32 + lane();
                    if e < self.p.paged.v_head_size {
                        *sum = fma(weight, self.values.load(self.p, place, self.kv(row), e), *sum);
                    }
                }
            }
        }
    }

    /// q·k of this lane's key.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn dot(&self, row: &Row, place: u32) -> f32 {
        let (size, query) = (self.p.paged.head_size, Self::query());
        let mut dot = 0.0;
        for column in Rolled(0..size, COLUMNS) {
            self.stage_query(row, column);
            sync_warp();
            if place != NOWHERE {
                for e in Rolled(column..size.min(column + COLUMNS), 1) {
                    let key = self.keys.load(self.p, place, self.kv(row), e);
                    dot = fma(query.load(e - column), key, dot);
                }
            }
            sync_warp();
        }
        dot
    }

    /// Shared-memory address of the warp's query.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn query() -> Shared<f32> {
        Shared::at(0).offset(warp() * COLUMNS)
    }

    /// Stores the rotated query columns from `column` on in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn stage_query(&self, row: &Row, column: u32) {
        let (p, query) = (&self.p.paged, Self::query());
        let from = (self.q, p.q.at(0, row.head, row.sequence.start + row.token));
        for pair in Rolled(lane()..pairs(p.head_size, T::PER_VEC), 32) {
            let position = row.position() as i64;
            self.rope.rotate_pair(from, (pair, p.head_size), position, |e, vector| {
                let elements = unpack::<T>(vector);
                for i in 0..T::PER_VEC {
                    let at = (e as u32 + i).wrapping_sub(column);
                    if at < COLUMNS {
                        query.store(at, elements[i as usize]);
                    }
                }
            });
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn score(&self, dot: f32) -> f32 {
        let score = dot * self.p.scale;
        if self.p.softcap > 0.0 {
            return self.p.softcap * tanh(score / self.p.softcap);
        }
        score
    }

    /// The KV head of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn kv(&self, row: &Row) -> u32 {
        row.head / (self.p.paged.q_heads / self.p.paged.kv_heads.max(1)).max(1)
    }

    /// Adds the attention sink and writes the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn finish(
        &self,
        row: &Row,
        visible: Visible,
        column: u32,
        state: &mut PlainState,
        sums: &[f32; LANE_COLUMNS],
    ) {
        let p = &self.p.paged;
        state.sum = warp_sum(state.sum);
        let mut factor = 1.0;
        if self.p.sink == sink::PER_HEAD && visible.first < visible.end {
            factor = state.join_sink(self.head_sink.load(row.head as usize).to_f32());
        }
        factor *= state.normaliser();
        let token = row.sequence.start + row.token;
        let at = (token as usize * p.q_heads as usize + row.head as usize) * p.v_head_size as usize;
        for (c, sum) in sums.iter().enumerate() {
            let e = column + 32 * c as u32 + lane();
            if e < p.v_head_size {
                self.out.store(at + e as usize, T::from_f32(sum * factor));
            }
        }
        if column == 0 && lane() == 0 && !self.lse.is_null() {
            let at = row.head as usize * p.tokens as usize + token as usize;
            self.lse.store(at, state.log_sum_exp());
        }
    }
}

/// Keys or values.
struct Cache<T> {
    /// Null where there are quantized values.
    elements: Global<T>,
    codes: Global<u8>,
    scales: Global<f32>,
}

impl<T: Element> Cache<T> {
    /// Element `e` of a KV head's row at a place of the cache.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn load(&self, p: &PagedGapsParams, place: u32, head: u32, e: u32) -> f32 {
        let PagedParams { head_size, scales, .. } = p.paged;
        let place = Place(place);
        let start = place.byte(&p.paged, head);
        if self.codes.is_null() {
            return self.elements.load(start / size_of::<T>() + e as usize).to_f32();
        }
        let scale = match are_of_rows(scales) {
            true => place.scale(&p.paged, head),
            false => ScalesPer::new(scales).number(head, head_size, e),
        };
        self.decode(p.format, start, e) * self.scales.load(scale)
    }

    /// The quantized value of element `e` of a row that starts at byte `start`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn decode(&self, format: u32, start: usize, e: u32) -> f32 {
        if Format::has_four_bits(format) {
            let byte = self.codes.load(start + e as usize / 2);
            return Bits4::of(format).decode(u32::from(byte) >> (4 * (e % 2)));
        }
        let code = u32::from(self.codes.load(start + e as usize));
        Bits8::of(format).decode(code)
    }
}
