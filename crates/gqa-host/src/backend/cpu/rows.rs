//! The outputs, cut into rows that can be written independently.

use super::sequence::Sequence;
use crate::{Layout, Problem};

/// What one query row's result goes to: output of type `O`, scores of type `T`.
pub(super) struct OutputRow<'a, T, O> {
    pub(super) output: &'a mut [O],
    /// The row of output_qk.
    pub(super) scores: Option<&'a mut [T]>,
    pub(super) lse: Option<&'a mut f32>,
}

/// All rows, those of a KV head together: (sequence, KV head, token, query head of the group).
pub(super) fn output_rows<'a, T, O>(
    p: &Problem,
    sequences: &[Sequence],
    output: &'a mut [O],
    output_qk: Option<&'a mut [T]>,
    lse: Option<&'a mut [f32]>,
) -> Vec<OutputRow<'a, T, O>> {
    let output = grouped(p, sequences, p.layout, output.chunks_exact_mut(p.v_head_size));
    // A row without keys has no scores.
    let scores = output_qk
        .filter(|_| p.total_len > 0)
        .map(|scores| grouped(p, sequences, Layout::Bnsh, scores.chunks_exact_mut(p.total_len)));
    let lse = lse.map(|lse| grouped(p, sequences, Layout::Bnsh, lse.iter_mut()));
    let (mut scores, mut lse) = (scores.into_iter().flatten(), lse.into_iter().flatten());
    let rows = output.into_iter();
    rows.map(|output| OutputRow { output, scores: scores.next(), lse: lse.next() }).collect()
}

/// Rows as they lie in memory, put into the order of [`output_rows`].
fn grouped<R>(
    p: &Problem,
    sequences: &[Sequence],
    layout: Layout,
    rows: impl Iterator<Item = R>,
) -> Vec<R> {
    // Those of sequences that lie one behind the other are of one batch entry.
    let tokens = p.pages.map_or(p.q_len, |pages| pages.tokens);
    let mut rows: Vec<_> = rows.map(Some).collect();
    let mut grouped = Vec::with_capacity(rows.len());
    for &Sequence { first: [b, first], rows: count, .. } in sequences {
        for head in 0..p.kv_heads {
            for (token, head) in tokens_and_heads(first..first + count, head, p.group()) {
                let place = match layout {
                    Layout::Bsnh => (b * tokens + token) * p.q_heads + head,
                    Layout::Bnsh => (b * p.q_heads + head) * tokens + token,
                };
                grouped.extend(rows[place].take());
            }
        }
    }
    grouped
}

/// Each token with each query head of a KV head's group.
fn tokens_and_heads(
    tokens: std::ops::Range<usize>,
    kv_head: usize,
    group: usize,
) -> impl Iterator<Item = (usize, usize)> {
    tokens.flat_map(move |token| (0..group).map(move |g| (token, kv_head * group + g)))
}
