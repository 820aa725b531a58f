//! Rows of packed tokens that belong to no sequence.

use crate::concept::pages::Sequence;
use crate::num::MmaElement;
use crate::params::AttentionParams;
use crate::simt::*;
use crate::tile::pages::Sequences;
use crate::tile::warp::LANES;

/// Clears a CTA's share of the output rows that belong to no sequence, or to tokens that are cut
/// off. Their log-sum-exps become -inf. Rows have `columns` elements. By one warp of each CTA.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(super) fn clear<T: MmaElement>(
    sequences: Sequences,
    out: Global<T>,
    columns: u32,
    lse: Global<f32>,
    p: &AttentionParams,
) {
    let tokens = sequences.tokens;
    for first in Rolled(0..p.batch + 1, LANES) {
        let b = first + lane();
        let [begin, end] = if b <= p.batch { before(sequences, b, p) } else { [0; 2] };
        if !any_sync(begin < end) {
            continue;
        }
        for lane in Rolled(0..LANES, 1) {
            let (begin, end) = (shfl_idx_u32(begin, lane), shfl_idx_u32(end, lane));
            for row in Rolled(begin + block_idx_x()..end, grid_dim_x()) {
                clear_row(row, tokens, (out, columns), lse, p);
            }
        }
    }
}

/// The rows between sequence `b` and the one before, or at either end. Over a contiguous cache the
/// padding of batch entry `b`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn before(sequences: Sequences, b: u32, p: &AttentionParams) -> [u32; 2] {
    if sequences.apart.is_some() {
        if b == p.batch {
            return [0; 2];
        }
        let Sequence { start, new, .. } = sequences.get(b, p);
        return [start + new, start + p.q_len];
    }
    let Sequences { starts, tokens, .. } = sequences;
    let start = |b: u32| starts.load(b as usize);
    let (mut begin, mut end) = (0, tokens);
    if b > 0 {
        let most = p.q_len.min(p.capacity);
        let [from, new, _] = Sequence::tokens([start(b - 1), start(b)], tokens, most);
        begin = from + new;
    }
    if b < p.batch {
        end = (start(b).max(0) as u32).min(tokens);
    }
    [begin, end]
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn clear_row<T: MmaElement>(
    row: u32,
    tokens: u32,
    (out, columns): (Global<T>, u32),
    lse: Global<f32>,
    p: &AttentionParams,
) {
    for head in Rolled(0..p.q_heads, 1) {
        let at = p.out.at(0, head, row);
        for vector in Rolled(lane()..columns / T::PER_VEC, LANES) {
            out.store_vec(at + (vector * T::PER_VEC) as usize, [0; 4]);
        }
        if !lse.is_null() && lane() == 0 {
            lse.store(head as usize * tokens as usize + row as usize, f32::NEG_INFINITY);
        }
    }
}
