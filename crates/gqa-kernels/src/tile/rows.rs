//! Which query rows a tile holds, where they lie, and which keys they see.

use crate::concept::heads::Group;
use crate::concept::mask::{Mask, Visible};
use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::{Element, quotient};
use crate::params::{AttentionParams, sink};
use crate::simt::{Global, Shared, lane};
use crate::tile::pages::{self, Sequences};
use crate::tile::seqlens::Seqlens;
use crate::tile::softmax::{States, total};
use bytemuck::Pod;
use core::ops::Range;

/// Number of tiles of `height` rows for the packed query rows of one KV head.
pub fn row_tiles(p: &AttentionParams, height: u32) -> u32 {
    Group::new(p.q_heads, p.kv_heads).rows(p.q_len).div_ceil(height)
}

/// A tile's packed rows: the query heads that share a KV head, of one sequence.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Batch entry.
    pub batch: u32,
    /// KV head of the group.
    pub kv_head: u32,
    /// Lengths of the sequence.
    pub seqlen: Seqlen,
    /// The sequence's first row in tensors of new tokens: 0 unless the tokens of all sequences are
    /// packed.
    pub start: u32,
    /// First packed row of the tile.
    first: u32,
    /// One past the tile's last existing packed row.
    end: u32,
    group: Group,
    mask: Mask,
}

/// A packed row.
#[derive(Clone, Copy)]
pub struct Row {
    /// Query row of this call; `q_len` or more past the last row.
    pub s: u32,
    /// Query head.
    pub head: u32,
    /// The keys that the row sees.
    pub visible: Visible,
}

impl Row {
    /// Whether the row is a token: every token sees itself.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_token(&self) -> bool {
        self.visible.first < self.visible.end
    }

    /// The row with the keys from `columns` on hidden.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn below(self, columns: u32) -> Self {
        Self { visible: below(self.visible, columns), ..self }
    }

    /// Stores the row in 16 bytes of shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn keep<T: Pod>(self, place: Shared<T>) {
        place.store_vec(0, [self.s, self.head, self.visible.first, self.visible.end]);
    }

    /// Loads the row that [`keep`](Self::keep) stored.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn kept<T: Pod>(place: Shared<T>) -> Self {
        let [s, head, first, end] = place.load_vec(0);
        Self { s, head, visible: Visible { first, end } }
    }
}

/// The keys that matter to a tile.
#[derive(Clone, Copy)]
pub struct Span {
    /// Keys that at least one row sees.
    pub some: Visible,
    /// Keys that every token of the tile sees.
    pub all: Visible,
}

impl Span {
    /// The span with the keys from `columns` on hidden.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn below(self, columns: u32) -> Self {
        Self { some: below(self.some, columns), all: below(self.all, columns) }
    }

    /// Tiles of `keys` keys of one split: equal numbers, or one more for the first splits if the
    /// division has a remainder.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn share(&self, keys: u32, split: u32, splits: u32) -> Range<u32> {
        let tiles = self.some.end.saturating_sub(self.some.first).div_ceil(keys);
        let (each, rest) = (tiles / splits.max(1), tiles % splits.max(1));
        let start = split * each + split.min(rest);
        start..start + each + u32::from(split < rest)
    }

    /// Whether some row does not see all of the `count` keys from `begin` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_partial(&self, begin: u32, count: u32) -> bool {
        begin < self.all.first || begin + count > self.all.end
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn below(keys: Visible, columns: u32) -> Visible {
    Visible { first: keys.first, end: keys.end.min(columns) }
}

impl Rows {
    /// Tile `index` of (KV head, batch entry) number `head_and_batch`; the head varies fastest.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(
        p: &AttentionParams,
        seqlens: Seqlens,
        index: u32,
        head_and_batch: u32,
        height: u32,
    ) -> Self {
        // A call has KV heads: max(1) spares the division by zero check.
        let kv_heads = p.kv_heads.max(1);
        let batch = head_and_batch / kv_heads;
        let seqlen = seqlens.get(batch, p);
        Self { seqlen, ..Self::of(p, index, head_and_batch % kv_heads, batch, height) }
    }

    /// Tile `index` of a KV head of a batch entry. The caller sets the sequence lengths, which are
    /// 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(p: &AttentionParams, index: u32, kv_head: u32, batch: u32, height: u32) -> Self {
        let group = Group::new(p.q_heads, p.kv_heads);
        let first = index * height;
        Self {
            batch,
            kv_head,
            seqlen: Seqlen { total: 0, past: 0 },
            start: 0,
            first,
            end: group.rows(p.q_len).min(first + height),
            group,
            mask: Mask { causal: p.causal != 0, window: p.window },
        }
    }

    /// The same rows of a sequence whose first token is row `start` of the tensors of new tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_sequence(self, start: u32, seqlen: Seqlen) -> Self {
        Self { start, seqlen, ..self }
    }

    /// The rows among the first `tokens` tokens of a sequence whose first token is row `start` of
    /// the tensors of new tokens. The sequence has no cached keys yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn among(self, start: u32, tokens: u32) -> Self {
        let end = self.group.rows(tokens).min(self.end).max(self.first);
        Self { start, end, seqlen: Seqlen { total: tokens, past: 0 }, ..self }
    }

    /// The rows of a CTA. CTAs go through sections of heads whose K and V share the L2 cache, and
    /// within a section from the last row tile to the first: under a causal mask the last ones see
    /// most keys.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_block(p: &AttentionParams, seqlens: Seqlens, block: u32, height: u32) -> Self {
        let (heads, tiles) = (p.kv_heads * p.batch, row_tiles(p, height));
        let section = section(p, heads);
        let (tile, head_and_batch) = in_order(block, section, heads, tiles);
        Self::new(p, seqlens, tile, head_and_batch, height)
    }

    /// The rows of a CTA over a paged KV cache, as if the tokens of all sequences were one batch
    /// entry. Row tiles are numbered across all sequences, in the order of
    /// [`of_block`](Self::of_block). Also returns the sequence.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_sequences(
        p: &AttentionParams,
        sequences: Sequences,
        block: u32,
        height: u32,
    ) -> (Self, u32) {
        let group = Group::new(p.q_heads, p.kv_heads);
        let tiles = pages::row_tiles(group.rows(sequences.tokens), p.batch, height);
        let section = section(p, p.kv_heads);
        let (tile, kv_head) = in_order(block, section, p.kv_heads, tiles);
        let (batch, index) = sequences.find(tile, p.batch, group.size, height);
        let sequence = sequences.get(batch, p);
        let rows = Self::of(p, index, kv_head, 0, height).among(sequence.start, sequence.new);
        (Self { seqlen: sequence.seqlen(), ..rows }, batch)
    }

    /// Number of existing rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn count(&self) -> u32 {
        self.end - self.first
    }

    /// Query row and query head of the tile's row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn query(&self, r: u32) -> (u32, u32) {
        self.group.unpack(self.kv_head, self.first + r)
    }

    /// The tile's row `r`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn row(&self, r: u32) -> Row {
        let (s, head) = self.query(r);
        Row { s, head, visible: self.visible(s) }
    }

    /// The keys that query row `s` sees.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn visible(&self, s: u32) -> Visible {
        self.mask.visible(self.seqlen, s)
    }

    /// The keys that the tile sees; none if its first row is padding.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn span(&self) -> Span {
        let Span { some, all } = self.span_of_tokens();
        Span { some: Visible { end: if all.end > 0 { some.end } else { 0 }, ..some }, all }
    }

    /// The keys that the tile sees if none of its rows is padding. Both ends of a row's range grow
    /// with the row, so the first row and the last token decide.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn span_of_tokens(&self) -> Span {
        let tokens = self.seqlen.new_rows();
        let first = self.first / self.group.size;
        let last = ((self.end - 1) / self.group.size).min(tokens.saturating_sub(1));
        let [first, last] =
            [self.mask.visible(self.seqlen, first), self.mask.visible(self.seqlen, last)];
        Span {
            some: Visible { first: first.first, end: last.end },
            all: Visible { first: last.first, end: first.end },
        }
    }

    /// Index of a row in a tensor (batch, query head, row).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn index(&self, p: &AttentionParams, row: Row) -> usize {
        (self.batch as usize * p.q_heads as usize + row.head as usize) * p.q_len as usize
            + row.s as usize
    }
}

/// KV heads of a section, out of `heads`: their K and V share the L2 cache.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn section(p: &AttentionParams, heads: u32) -> u32 {
    let group = Group::new(p.q_heads, p.kv_heads).size;
    if p.l2_section == 0 { heads } else { quotient(p.l2_section, group) }
}

/// The row tile and the head index of CTA `block`, for `heads` heads of `tiles` row tiles each.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn in_order(block: u32, section: u32, heads: u32, tiles: u32) -> (u32, u32) {
    let nth = quotient(block, section * tiles);
    let within = block - nth * section * tiles;
    let here = section.min(heads - nth * section);
    let tile = quotient(within, here);
    (tiles - 1 - tile, nth * section + within - tile * here)
}

/// Finishes a row: adds the attention sink, and returns the factor that normalises the accumulated
/// output, and the log-sum-exp. Padding rows give 0 and -inf, without a sink.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn close<T: Element>(
    p: &AttentionParams,
    is_token: bool,
    head: u32,
    head_sink: Global<T>,
    mut state: SoftmaxState,
) -> (f32, f32) {
    if !is_token {
        return (0.0, f32::NEG_INFINITY);
    }
    let rescale = match p.sink {
        sink::NONE => 1.0,
        sink::ZERO => state.join_sink(0.0),
        _ => state.join_sink(head_sink.load(head as usize).to_f32() * LOG2_E),
    };
    (rescale * state.normaliser(), state.log_sum_exp())
}

/// Finishes the rows that a lane holds a part of: writes their log-sum-exps unless lse is null, and
/// returns the factors that normalise the output. `row(m, half)` is a lane's row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn close_all<T: Element, const M: usize>(
    p: &AttentionParams,
    rows: &Rows,
    head_sink: Global<T>,
    lse: Global<f32>,
    states: States<M>,
    row: impl Fn(usize, usize) -> Row,
) -> [[f32; 2]; M] {
    let states = states.map(|block| block.map(total));
    let mut factors = [[0.0; 2]; M];
    for m in 0..M {
        for half in 0..2 {
            let row = row(m, half);
            if row.s < p.q_len {
                let (factor, log_sum_exp) =
                    close(p, row.is_token(), row.head, head_sink, states[m][half]);
                factors[m][half] = factor;
                if lane() % 4 == 0 && !lse.is_null() {
                    lse.store(rows.index(p, row), log_sum_exp);
                }
            }
        }
    }
    factors
}
