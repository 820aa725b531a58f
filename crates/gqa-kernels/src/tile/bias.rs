//! A bias or a mask on score fragments, read from global memory: any strides, no alignment. Where
//! rows are aligned to 4 bytes, a lane reads two keys at a time, before the scores are computed.

use super::fragment::{Fragments, column_of, zeros};
use crate::num::{Element, MmaElement};
use crate::params::{MaskedParams, Strides, vectors};
use crate::simt::Global;
use bytemuck::Pod;

/// A lane's loaded words for `M` 16-row MMA tiles and `N8` 8-key MMA tiles, not unpacked yet.
pub type Words<const M: usize, const N8: usize> = [[[u32; N8]; 2]; M];

/// attention_bias or attn_mask, (batch, query head, row, key).
#[derive(Clone, Copy)]
pub struct Bias<T> {
    /// The bias, or null.
    numbers: Global<T>,
    /// The mask, whose byte 0 hides a key, or null.
    bytes: Global<u8>,
    strides: Strides,
    /// Row length; the caller hides keys from there on.
    pub columns: u32,
    /// Whether rows consist of aligned 4-byte words.
    whole: bool,
}

impl<T: Element> Bias<T> {
    /// The bias or mask of a call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(numbers: Global<T>, bytes: Global<u8>, p: &MaskedParams) -> Self {
        let whole = p.vectors & vectors::MASK_WORDS != 0;
        Self { numbers, bytes, strides: p.attention.bias, columns: p.columns, whole }
    }

    /// Index of a row's first element.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn row(self, batch: u32, head: u32, row: u32) -> usize {
        self.strides.at(batch, head, row)
    }

    /// Scores of the keys from `begin` on become `score · factor + bias`, or -inf where the mask is
    /// 0; `row(m, half)` is the index of a lane's row. A bias of -inf hides a key even if its score
    /// is NaN.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn add<const M: usize, const N8: usize>(
        self,
        scores: &mut Fragments<M, N8>,
        begin: u32,
        factor: f32,
        row: impl Fn(usize, usize) -> usize,
    ) {
        for m in 0..M {
            for half in 0..2 {
                let row = row(m, half);
                for block in 0..N8 {
                    for i in 0..2 {
                        let score = &mut scores[m][block][2 * half + i];
                        *score = self.apply(*score * factor, self.place(row, begin, block, i));
                    }
                }
            }
        }
    }

    /// Loads the bias that [`add_ahead`] adds to these scores; a mask becomes -inf where its byte
    /// is 0, else 0. Rows that are `None` are not read.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn ahead<const M: usize, const N8: usize>(
        self,
        begin: u32,
        row: impl Fn(usize, usize) -> Option<usize>,
    ) -> Fragments<M, N8> {
        let mut numbers = zeros();
        for m in 0..M {
            for half in 0..2 {
                let Some(row) = row(m, half) else { continue };
                for block in 0..N8 {
                    for i in 0..2 {
                        let at = self.place(row, begin, block, i);
                        numbers[m][block][2 * half + i] = self.number(at);
                    }
                }
            }
        }
        numbers
    }

    /// Index of an element of a lane's row, clamped to the last one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(self, row: usize, begin: u32, block: usize, i: usize) -> usize {
        let key = begin + 8 * block as u32 + column_of() + i as u32;
        row + key.min(self.columns - 1) as usize
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn number(self, at: usize) -> f32 {
        if self.numbers.is_null() {
            return if self.bytes.load(at) == 0 { f32::NEG_INFINITY } else { 0.0 };
        }
        self.numbers.load(at).to_f32()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn apply(self, score: f32, at: usize) -> f32 {
        if self.numbers.is_null() {
            return if self.bytes.load(at) == 0 { f32::NEG_INFINITY } else { score };
        }
        sum(score, self.numbers.load(at).to_f32())
    }
}

impl<T: MmaElement> Bias<T> {
    /// Loads the words of the keys from `begin` on, a multiple of 8, if two keys can be read at a
    /// time; `row(m, half)` is the index of a lane's row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn words<const M: usize, const N8: usize>(
        self,
        begin: u32,
        row: impl Fn(usize, usize) -> usize,
    ) -> Option<Words<M, N8>> {
        let is_whole = self.whole && begin + 8 * N8 as u32 <= self.columns;
        is_whole.then(|| {
            if self.numbers.is_null() {
                let first = self.bytes.offset((begin + column_of() / 4 * 4) as usize);
                words(|m, half| first.offset(row(m, half)))
            } else {
                let first = self.numbers.offset((begin + column_of()) as usize);
                words(|m, half| first.offset(row(m, half)))
            }
        })
    }

    /// [`add`](Self::add) with words loaded before.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn add_words<const M: usize, const N8: usize>(
        self,
        scores: &mut Fragments<M, N8>,
        words: &Words<M, N8>,
        factor: f32,
    ) {
        if self.numbers.is_null() {
            let shift = column_of() % 4 * 8;
            let number = |byte: u32| if byte == 0 { f32::NEG_INFINITY } else { 0.0 };
            let pair =
                |word: u32| [number(word >> shift & 0xff), number(word >> (shift + 8) & 0xff)];
            add_pairs(scores, words, factor, pair);
        } else {
            add_pairs(scores, words, factor, T::halves);
        }
    }
}

/// Loads a word for each 8 keys; the lane's first word of a row is at `first(m, half)`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn words<U: Pod, const M: usize, const N8: usize>(
    first: impl Fn(usize, usize) -> Global<U>,
) -> Words<M, N8> {
    core::array::from_fn(|m| {
        core::array::from_fn(|half| {
            let first = first(m, half);
            core::array::from_fn(|block| first.load_word(8 * block))
        })
    })
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_pairs<const M: usize, const N8: usize>(
    scores: &mut Fragments<M, N8>,
    words: &Words<M, N8>,
    factor: f32,
    pair: impl Fn(u32) -> [f32; 2],
) {
    for m in 0..M {
        for half in 0..2 {
            for block in 0..N8 {
                let numbers = pair(words[m][half][block]);
                for i in 0..2 {
                    let score = &mut scores[m][block][2 * half + i];
                    *score = sum(*score * factor, numbers[i]);
                }
            }
        }
    }
}

/// -inf hides a key even if its score is NaN.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum(score: f32, number: f32) -> f32 {
    if number == f32::NEG_INFINITY { number } else { score + number }
}

/// [`Bias::add`] with a bias loaded before.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn add_ahead<const M: usize, const N8: usize>(
    scores: &mut Fragments<M, N8>,
    numbers: &Fragments<M, N8>,
    factor: f32,
) {
    for m in 0..M {
        for block in 0..N8 {
            for i in 0..4 {
                scores[m][block][i] = sum(scores[m][block][i] * factor, numbers[m][block][i]);
            }
        }
    }
}
