//! Cache updates: copies rows as bytes, to start rows that differ among sequences.

use super::element::foreign;
use super::executor::{Executor, each, threads_for};
use crate::backend::IoViews;
use gqa_plan::plan::TensorId;
use gqa_plan::{Problem, WriteMode};
use gqa_tensor::{Result, TensorView};

/// Updates one tensor, or keys and values.
pub(super) fn run(
    p: &Problem,
    mode: WriteMode,
    io: &mut IoViews<'_>,
    executor: &dyn Executor,
) -> Result<()> {
    let inputs = io.inputs;
    let first = inputs.need(TensorId::WriteIndices)?;
    let TensorView::I32(first) = first else { return Err(foreign("write_indices", first)) };
    let write = |new, cache| write(p, mode, first, new, cache, executor);
    let new = inputs.need(TensorId::Key)?.bytes();
    write(new, io.present_key.appended("present_key")?.into_bytes()?);
    if p.v_head_size > 0 {
        let new = inputs.need(TensorId::Value)?.bytes();
        write(new, io.present_value.appended("present_value")?.into_bytes()?);
    }
    Ok(())
}

/// Heads in parallel.
fn write(
    p: &Problem,
    mode: WriteMode,
    first: &[i32],
    new: &[u8],
    cache: &mut [u8],
    executor: &dyn Executor,
) {
    let (layout, size) = (p.key_layout(), p.dtype.size());
    let row = p.head_size * size;
    let heads = cache.chunks_exact_mut(p.capacity * row).enumerate();
    each(threads_for(new.len(), executor), heads, |(i, cache)| {
        let (b, head) = (i / p.kv_heads, i % p.kv_heads);
        for s in 0..p.new_len {
            let at = first[b] as usize + s;
            let at = if mode == WriteMode::Circular { at % p.capacity } else { at };
            let from = layout.at(b, head, s) * size;
            cache[at * row..][..row].copy_from_slice(&new[from..][..row]);
        }
    });
}
