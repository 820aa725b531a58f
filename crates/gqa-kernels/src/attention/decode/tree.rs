//! A mask over the new tokens: the drafts that speculative decoding verifies in one call form a
//! tree, and a token sees only its ancestors.

use super::Decode;
use super::layout::{Heads, Layout};
use super::products::Products;
use crate::concept::mask::Visible;
use crate::params::AttentionParams;
use crate::simt::{Global, Shared, lane, opaque, thread_idx, warp};
use crate::tile::fragment::{Fragments, column_of};
use crate::tile::rows::{Rows, Span};

/// Visibility among new tokens: bit `j` of a token's word says whether it sees new token `j` of its
/// sequence. Every token sees all cached keys.
#[derive(Clone, Copy)]
pub(super) struct Tree {
    /// A word for each new token; null without such a mask.
    pub words: Global<i64>,
}

impl Tree {
    /// No mask: positions decide what a row sees.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn none() -> Self {
        Self { words: Global::null() }
    }

    /// The keys that a tile sees. With a tree mask there is neither a window nor a causal mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn span(self, rows: &Rows, layout: Layout) -> Span {
        if self.is_none() {
            // Packed tokens have no padding, but may have rows without a key.
            return if layout.is_paged() { rows.span_of_tokens() } else { rows.span() };
        }
        let of_keys = |end| Visible { first: 0, end };
        let past = (rows.seqlen.past as i32).max(0) as u32;
        Span { some: of_keys(rows.seqlen.total), all: of_keys(past) }
    }

    /// Whether there is no such mask.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_none(self) -> bool {
        self.words.is_null()
    }

    /// Hides keys of `begin..end` that a row does not see, and all keys from `end` on. New tokens
    /// start at key `past`; `word(m, half)` is the word of a lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn mask<const M: usize, const N8: usize>(
        self,
        scores: &mut Fragments<M, N8>,
        [begin, past, end]: [u32; 3],
        word: impl Fn(usize, usize) -> u64,
    ) {
        for m in 0..M {
            for half in 0..2 {
                let seen = keys_seen(word(m, half), [begin, past, end]) >> column_of();
                for block in 0..N8 {
                    for i in 0..2 {
                        if seen >> (8 * block + i) & 1 == 0 {
                            scores[m][block][2 * half + i] = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }
}

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    /// Rows whose words a warp loads.
    const WORDS: u32 = Self::ROWS / Self::TEAM;

    /// Prefetches the word of one of the warp's rows; 0 if there is none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn load_word(a: &AttentionParams, rows: &Rows, layout: Layout, tree: Tree) -> u64 {
        const { assert!(Self::WORDS <= 32, "a lane has one word") }
        if tree.is_none() || lane() >= Self::WORDS {
            return 0;
        }
        let row = layout.new_row(a, rows, Self::first_word() + lane());
        row.map_or(0, |row| tree.words.load(row) as u64)
    }

    /// Stages the word in shared memory, where it stays until the warp overwrites it with its rows'
    /// softmax states.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn keep_word(tree: Tree, word: u64) {
        if !tree.is_none() && lane() < Self::WORDS {
            Self::word_of(Self::first_word() + lane()).store(0, word);
        }
    }

    /// The word of a row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn word(r: u32) -> u64 {
        Self::word_of(r).load(0)
    }

    /// Address of the word, recomputed each time: no register is left to hold it across the
    /// mainloop.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn word_of(r: u32) -> Shared<u64> {
        let team = opaque(thread_idx()) / (32 * Self::TEAM);
        Shared::at(Self::STATES).offset(team * Self::ROWS + r)
    }

    /// The warp's first row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_word() -> u32 {
        warp() % Self::TEAM * Self::WORDS
    }
}

/// Which of the 64 keys from `begin` on and before `end` a token with this word sees, as a bit
/// mask.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn keys_seen(word: u64, [begin, past, end]: [u32; 3]) -> u64 {
    let seen = if begin as i32 >= past as i32 {
        word.wrapping_shr(begin.wrapping_sub(past))
    } else {
        let before = past - begin;
        word.wrapping_shl(before) | below(before)
    };
    let keys = end.saturating_sub(begin);
    if keys < u64::BITS { seen & below(keys) } else { seen }
}

/// A mask of the lowest `bits` bits, at most 63.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn below(bits: u32) -> u64 {
    1u64.wrapping_shl(bits).wrapping_sub(1)
}
