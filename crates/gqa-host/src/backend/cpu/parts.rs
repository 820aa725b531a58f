//! Splits a call's rows into tasks, and their keys into parts that any thread computes.

use super::element::Element;
use super::executor::{Executor, threads_for};
use super::instructions::Instructions;
use super::rows::{OutputRows, Outputs, QueryRows};
use super::task::{Call, Partial, Task};
use gqa_cpu::Rows;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The maximum rows of a task, which reads and converts its keys and values once. Halved until the
/// call has [`MANY_TASKS`] tasks.
const TASK_ROWS: usize = 512;

/// A number of tasks that threads can share evenly.
const MANY_TASKS: usize = 64;

/// Computes all rows.
pub(super) fn run<T: Element, O: Element>(
    call: &Call<'_, T>,
    outputs: &mut Outputs<'_, T, O>,
    instructions: Instructions,
    executor: &dyn Executor,
) {
    let tasks = tasks(call, outputs);
    let parts: Vec<_> = tasks
        .iter()
        .flat_map(|task| task.parts.iter().enumerate().map(move |(part, _)| (task, part)))
        .collect();
    let executor = threads_for(work(&tasks), executor);
    executor.for_each(parts.len(), &|i| {
        if let Some((task, part)) = parts.get(i) {
            task.run_part(instructions, *part);
        }
    });
}

/// A task that is split into parts, which may run concurrently; the last part to end merges the
/// results.
struct Parts<'a, 'r, T, O> {
    task: Task<'a, T>,
    /// The keys of each part.
    parts: Vec<Range<usize>>,
    state: Mutex<Unjoined<'r, T, O>>,
}

/// The results of the parts so far, and the outputs.
struct Unjoined<'r, T, O> {
    partials: Vec<Option<Partial>>,
    rows: Option<OutputRows<'r, T, O>>,
}

impl<'r, T: Element, O: Element> Parts<'_, 'r, T, O> {
    fn run_part(&self, instructions: Instructions, part: usize) {
        let keys = self.parts[part].clone();
        if self.parts.len() == 1 {
            let rows = self.state().rows.take();
            if let Some(rows) = rows {
                self.task.run(instructions, keys, rows);
            }
            return;
        }
        let partial = self.task.attend(instructions, keys);
        let mut state = self.state();
        state.partials[part] = Some(partial);
        if state.partials.iter().all(Option::is_some) {
            let partials: Vec<_> = state.partials.iter_mut().filter_map(Option::take).collect();
            if let Some(rows) = state.rows.take() {
                drop(state);
                self.task.join(instructions, &partials, rows);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, Unjoined<'r, T, O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tasks in reverse row order: the last rows attend to the most keys, and short tasks at the end
/// keep threads balanced.
fn tasks<'a, 'r, T: Element, O>(
    call: &'a Call<'a, T>,
    outputs: &'r mut Outputs<'_, T, O>,
) -> Vec<Parts<'a, 'r, T, O>> {
    let (p, mut tasks) = (call.problem, Vec::new());
    let are_apart = call.sequences.is_sorted_by(|one, next| one.end() <= next.first);
    assert!(are_apart, "sequences that have a row in common");
    let rows: usize = call.sequences.iter().map(|sequence| sequence.rows * p.q_heads).sum();
    let most = if rows >= MANY_TASKS * TASK_ROWS { TASK_ROWS } else { TASK_ROWS / 2 };
    for (b, sequence) in call.sequences.iter().enumerate() {
        let all = sequence.rows * p.group();
        for head in 0..p.kv_heads {
            for first in (0..all).step_by(most).rev() {
                let count = most.min(all - first);
                let rows = QueryRows { head, group: p.group(), first, count };
                let task = Task { call, b, rows };
                let parts = task.parts();
                let partials = parts.iter().map(|_| None).collect();
                // SAFETY: each task has different rows, since sequences share none, and the outputs
                // belong to these tasks only
                let rows = unsafe { outputs.of(sequence, rows) };
                let state = Mutex::new(Unjoined { partials, rows: Some(rows) });
                tasks.push(Parts { task, parts, state });
            }
        }
    }
    tasks
}

/// Approximate number of multiplications of all tasks.
fn work<T: Element, O>(tasks: &[Parts<'_, '_, T, O>]) -> usize {
    let of_task = |Parts { task, parts, .. }: &Parts<'_, '_, T, O>| {
        let keys: usize = parts.iter().map(Range::len).sum();
        task.count() * keys * task.sizes().iter().sum::<usize>()
    };
    tasks.iter().map(of_task).sum()
}
