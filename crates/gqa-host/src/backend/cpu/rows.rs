//! The outputs, cut into rows that can be written independently.

use crate::{Layout, Problem};

/// What one query row's result goes to: output of type `O`, scores of type `T`.
pub(super) struct OutputRow<'a, T, O> {
    pub(super) output: &'a mut [O],
    /// The row of output_qk.
    pub(super) scores: Option<&'a mut [T]>,
    pub(super) lse: Option<&'a mut f32>,
}

/// All rows, those of a KV head together: (batch, KV head, token, query head of the group).
pub(super) fn output_rows<'a, T, O>(
    p: &Problem,
    output: &'a mut [O],
    output_qk: Option<&'a mut [T]>,
    lse: Option<&'a mut [f32]>,
) -> Vec<OutputRow<'a, T, O>> {
    let output = grouped(p, p.layout, output.chunks_exact_mut(p.v_head_size));
    let scores =
        output_qk.map(|scores| grouped(p, Layout::Bnsh, scores.chunks_exact_mut(p.total_len)));
    let lse = lse.map(|lse| grouped(p, Layout::Bnsh, lse.iter_mut()));
    let (mut scores, mut lse) = (scores.into_iter().flatten(), lse.into_iter().flatten());
    let rows = output.into_iter();
    rows.map(|output| OutputRow { output, scores: scores.next(), lse: lse.next() }).collect()
}

/// Rows as they lie in memory, put into the order of [`output_rows`].
fn grouped<R>(p: &Problem, layout: Layout, rows: impl Iterator<Item = R>) -> Vec<R> {
    let (n, s, group) = (p.q_heads, p.q_len, p.group());
    let mut places: Vec<Option<R>> = (0..p.batch * n * s).map(|_| None).collect();
    for (i, row) in rows.enumerate() {
        let (b, head, token) = match layout {
            Layout::Bsnh => (i / (s * n), i % n, i / n % s),
            Layout::Bnsh => (i / (s * n), i / s % n, i % s),
        };
        places[((b * p.kv_heads + head / group) * s + token) * group + head % group] = Some(row);
    }
    places.into_iter().flatten().collect()
}
