//! Cache updates: `cache[b, head, index(b) + s] = update[b, head, s]`, with the index modulo the
//! cache's rows if it is circular.

use super::rows::place;
use crate::backend::Io;
use gqa_plan::plan::TensorId;
use gqa_plan::{Layout, Problem, WriteMode};
use gqa_tensor::{Result, Tensor};

/// Writes every element of the update, one after the other.
pub(super) fn update(p: &Problem, mode: WriteMode, io: &mut Io<'_>) -> Result<()> {
    let first = io.need(TensorId::WriteIndices)?.to_f64();
    let row = |b: usize, s: usize| match mode {
        WriteMode::Linear => first[b] as usize + s,
        WriteMode::Circular => (first[b] as usize + s) % p.capacity,
    };
    let write = |new: &Tensor, cache: &mut Tensor| -> Result<()> {
        let size = p.head_size * p.dtype.size();
        for b in 0..p.batch {
            for head in 0..p.kv_heads {
                for s in 0..p.new_len {
                    let from = place(p.layout, p.kv_heads, p.new_len, [b, head, s]) * size;
                    let to = [b, head, row(b, s)];
                    let to = place(Layout::Bnsh, p.kv_heads, p.capacity, to) * size;
                    cache.bytes_mut()?[to..to + size]
                        .copy_from_slice(&new.bytes()[from..from + size]);
                }
            }
        }
        Ok(())
    };
    write(io.need(TensorId::Key)?, io.present_key)?;
    if p.v_head_size > 0 {
        write(io.need(TensorId::Value)?, io.present_value)?;
    }
    Ok(())
}
