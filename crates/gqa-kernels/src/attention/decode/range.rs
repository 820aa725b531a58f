//! The keys that a CTA attends to, and where their rows are.

use super::Place;
use super::cached::Cached;
use super::layout::Layout;
use super::tree::Tree;
use crate::params::{AttentionParams, DecodeParams};
use crate::simt::Global;
use crate::tile::rows::{Rows, Span};
use crate::tile::swizzle::WarpCopy;

/// The KV range of a rank: every `ranks`-th key tile, and the new tokens in one rank.
pub(super) struct KvRange {
    /// The keys that the row tile sees. Over a paged KV cache the first one is rounded down to the
    /// start of a piece.
    pub span: Span,
    /// One past the last cached key that the rank may read.
    pub old_end: u32,
    /// Tiles of cached keys of all ranks, counted from the first visible key.
    pub tiles: u32,
    /// Position of the first new token.
    pub past: u32,
    /// Whether this rank attends to the new tokens.
    pub has_new_tokens: bool,
    /// Number of ranks that share the tiles.
    ranks: u32,
    /// The rank's number among them.
    index: u32,
    /// Keys of a tile.
    keys: u32,
}

impl KvRange {
    /// Tiles go to the ranks in turn, so that all ranks read neighbouring rows at a time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(
        p: &DecodeParams,
        rows: &Rows,
        place: Place,
        keys: u32,
        layout: Layout,
        tree: Tree,
    ) -> Self {
        let mut span = tree.span(rows, layout);
        if layout.is_paged() {
            span.some.first = span.some.first / Layout::PIECE * Layout::PIECE;
        }
        let cached = if p.new_len > 0 { rows.seqlen.past } else { rows.seqlen.total };
        let old_end = span.some.end.min(cached);
        let (ranks, index) = place.among();
        Self {
            span,
            old_end,
            tiles: old_end.saturating_sub(span.some.first).div_ceil(keys),
            past: rows.seqlen.past,
            has_new_tokens: place.has_new_tokens(p),
            ranks,
            index,
            keys,
        }
    }

    /// First tile of a team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start(&self, team: u32) -> u32 {
        team * self.ranks + self.index
    }

    /// Position of the first key of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn begin(&self, tile: u32) -> u32 {
        self.span.some.first + tile * self.keys
    }

    /// Distance between two tiles of the same team, of `teams` teams.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn step(&self, teams: u32) -> u32 {
        teams * self.ranks
    }

    /// One past the team's last tile. The last team has the tile of new tokens, after its others.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn end(&self, team: u32, teams: u32) -> u32 {
        let is_last = self.has_new_tokens && team + 1 == teams;
        self.tiles + if is_last { self.step(teams) } else { 0 }
    }
}

/// The cached rows of one KV head.
#[derive(Clone, Copy)]
pub(super) struct Cache<C: Cached, const UNITS: usize> {
    pub k: Global<C::Cell>,
    pub v: Global<C::Cell>,
    pub lanes: WarpCopy<UNITS>,
    pub layout: Layout,
}

impl<C: Cached, const UNITS: usize> Cache<C, UNITS> {
    /// The rows of a row tile's KV head. `lanes` is set later.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(
        a: &AttentionParams,
        rows: &Rows,
        k: Global<C::Cell>,
        v: Global<C::Cell>,
        layout: Layout,
    ) -> Self {
        Self {
            k: k.offset(a.k.at(rows.batch, rows.kv_head, 0)),
            v: v.offset(a.v.at(rows.batch, rows.kv_head, 0)),
            lanes: WarpCopy::default(),
            layout: layout.of_sequence(rows.batch),
        }
    }
}
