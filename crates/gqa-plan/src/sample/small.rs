//! A call like another one, with less to compute.

use crate::problem::{Alignment, Bias, CacheBinding, Pages, Phase, Problem, ProblemFields, Rotary};
use gqa_tensor::Result;

/// Sequences.
const SEQUENCES: usize = 3;
/// Rows of a sequence; no multiple of a tile.
const ROWS: usize = 150;
/// Keys before them.
const PAST: usize = 500;

/// A call of the same layer in the same phase, on contiguous tensors, with few sequences, rows and
/// keys.
///
/// # Errors
/// Where no smaller call of that kind is known.
pub fn small(p: &Problem) -> Result<Problem> {
    p.contiguous().derive(|call| {
        let call =
            ProblemFields { batch: call.batch.min(SEQUENCES), prefetch_cache: false, ..call };
        match call.pages {
            Some(pages) => of_pages(call, pages),
            None => of_sequences(call),
        }
    })
}

fn of_pages(call: ProblemFields, pages: Pages) -> ProblemFields {
    let q_len = call.q_len.min(ROWS);
    // Where not all sequences have as many tokens, all but one have one.
    let alike = pages.tokens >= call.q_len * call.batch;
    let tokens = if alike { q_len * call.batch } else { q_len + call.batch - 1 };
    let past = call.total_len.saturating_sub(call.q_len).min(PAST);
    let total_len = past + q_len;
    let per_sequence = total_len.div_ceil(pages.block_size.max(1));
    let blocks = per_sequence * call.batch;
    ProblemFields {
        q_len,
        new_len: if call.new_len == 0 { 0 } else { q_len },
        total_len,
        past_capacity: total_len,
        capacity: total_len,
        pages: Some(Pages { tokens, blocks, per_sequence, scheduled: false, ..pages }),
        rotary: call.rotary.map(|rotary| rotated(rotary, q_len, total_len)),
        ..call
    }
}

fn of_sequences(call: ProblemFields) -> ProblemFields {
    let q_len = call.q_len.min(ROWS);
    let new_len = if call.new_len == call.q_len { q_len } else { call.new_len.min(PAST) };
    let first = call.phase == Phase::FirstPrompt;
    let past = if first { 0 } else { call.total_len.saturating_sub(call.q_len).min(PAST) };
    let (alignment, past) = match call.alignment {
        Alignment::Past(position) => (Alignment::Past(position.min(PAST)), position.min(PAST)),
        other => (other, past),
    };
    let mut total_len = if first { q_len } else { past + q_len };
    let (mut past_capacity, mut capacity) = (call.past_capacity, call.capacity);
    match call.cache {
        CacheBinding::External => {
            (past_capacity, capacity) = (0, new_len);
            total_len = total_len.min(new_len);
        }
        CacheBinding::Separate if capacity == past_capacity + call.new_len => {
            past_capacity = past_capacity.min(PAST);
            total_len = total_len.min(past_capacity + new_len);
            capacity = past_capacity + new_len;
        }
        _ if call.slides => {
            capacity = capacity.min(PAST.max(call.window.unwrap_or(0)));
            past_capacity = capacity;
        }
        _ => {
            let most = total_len + ROWS;
            past_capacity = past_capacity.min(most);
            capacity = capacity.min(most);
        }
    }
    let bias = call.bias.map(|bias| {
        let columns = if bias.columns >= call.total_len { total_len } else { bias.columns };
        Bias { columns, ..bias }
    });
    let rotary = call.rotary.map(|rotary| rotated(rotary, q_len, total_len));
    ProblemFields {
        q_len,
        new_len,
        total_len,
        past_capacity,
        capacity,
        alignment,
        bias,
        rotary,
        ..call
    }
}

/// The rotary embedding with tables for these positions only.
fn rotated(rotary: Rotary, rows: usize, positions: usize) -> Rotary {
    let max_positions = rotary.max_positions.min(positions + ROWS);
    Rotary { max_positions, explicit: rotary.explicit.map(|_| rows), ..rotary }
}
