//! The CPU: attention by tiles with online softmax, in `f32`, on all cores and with the widest vectors there are.
//!
//! A task is up to 256 query rows of one KV head: the query heads of a group count as rows, so that keys and values are read
//! once for all of them. Where a task has few rows its keys are cut into parts that run in parallel. A task's memory is its
//! rows and one tile of keys and values; no score matrix exists. How the work is cut depends on the problem only, so results
//! do not depend on the number of cores.

mod append;
mod attend;
mod element;
mod lanes;
mod panel;
mod rope;
mod rows;
mod sequence;
mod task;

use super::{Backend, Io};
use crate::{DType, Problem, Result, Tensor};
use append::Append;
use element::{Element, elements, elements_mut, foreign};
use half::{bf16, f16};
use rayon::prelude::*;
use rope::Rope;
use rows::{OutputRow, output_rows};
use sequence::Sequence;
use task::{Call, TASK_ROWS, Task};

/// Computes on the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    arch: pulp::Arch,
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        match problem.dtype {
            DType::F16 => self.run_as::<f16>(problem, io),
            DType::BF16 => self.run_as::<bf16>(problem, io),
            _ => self.run_as::<f32>(problem, io),
        }
    }
}

impl Cpu {
    fn run_as<T: Element>(&self, p: &Problem, io: &mut Io<'_>) -> Result<()> {
        let Tensor::I32(last) = io.seqlens_k else {
            return Err(foreign("seqlens_k", io.seqlens_k));
        };
        let sequences: Vec<_> = last.iter().map(|&last| Sequence::new(p, last)).collect();
        let rope = rope::<T>(p, io)?;
        append(p, &sequences, rope.as_ref(), io)?;
        let lse = io.lse.as_deref_mut().map(|lse| elements_mut("lse", lse)).transpose()?;
        let output_qk =
            io.output_qk.as_deref_mut().map(|qk| elements_mut("output_qk", qk)).transpose()?;
        let call = Call {
            problem: p,
            sequences: &sequences,
            query: elements::<T>("query", io.query)?,
            rope: rope.as_ref(),
            keys: elements("present_key", io.present_key)?,
            values: elements("present_value", io.present_value)?,
            bias: io.attention_bias.map(|bias| elements("attention_bias", bias)).transpose()?,
            head_sink: io.head_sink.map(|sink| elements("head_sink", sink)).transpose()?,
        };
        let mut rows = output_rows(p, elements_mut("output", io.output)?, output_qk, lse);
        tasks(&call, &mut rows).into_par_iter().for_each(|(task, rows)| task.run(self.arch, rows));
        Ok(())
    }
}

/// The rotary embedding, where the call has one.
fn rope<'a, T: Element>(p: &Problem, io: &Io<'a>) -> Result<Option<Rope<'a, T>>> {
    let (Some(rotary), Some(cos), Some(sin)) = (p.rotary, io.cos_cache, io.sin_cache) else {
        return Ok(None);
    };
    let position_ids = match io.position_ids {
        Some(Tensor::I64(ids)) => ids.as_slice().unwrap_or_default(),
        _ => &[],
    };
    Ok(Some(Rope {
        rotary,
        cos: elements("cos_cache", cos)?,
        sin: elements("sin_cache", sin)?,
        position_ids,
    }))
}

/// Updates both caches.
fn append<T: Element>(
    p: &Problem,
    sequences: &[Sequence],
    rope: Option<&Rope<'_, T>>,
    io: &mut Io<'_>,
) -> Result<()> {
    let rows = |name, past: Option<_>, new: Option<_>, layout, rope| -> Result<_> {
        let elements =
            |tensor: Option<_>| tensor.map_or(Ok(&[][..]), |tensor| elements(name, tensor));
        let (past, new) = (elements(past)?, elements(if p.packed { Some(io.query) } else { new })?);
        Ok(Append { problem: p, sequences, past, new, layout, rope })
    };
    let key = rows("key", io.past_key, io.key, p.key_layout(), rope)?;
    let value = rows("value", io.past_value, io.value, p.value_layout(), None)?;
    let present_key = elements_mut("present_key", io.present_key)?;
    let present_value = elements_mut("present_value", io.present_value)?;
    rayon::join(|| key.run(present_key), || value.run(present_value));
    Ok(())
}

/// The rows in tasks of up to [`TASK_ROWS`].
fn tasks<'a, 'r, T>(
    call: &'a Call<'a, T>,
    rows: &'r mut [OutputRow<'r, T>],
) -> Vec<(Task<'a, T>, &'r mut [OutputRow<'r, T>])> {
    let (p, mut tasks) = (call.problem, Vec::new());
    for (head, rows) in rows.chunks_mut(p.q_len * p.group()).enumerate() {
        for (i, rows) in rows.chunks_mut(TASK_ROWS).enumerate() {
            let (b, head) = (head / p.kv_heads, head % p.kv_heads);
            tasks.push((Task { call, b, head, first: i * TASK_ROWS, count: rows.len() }, rows));
        }
    }
    tasks
}
