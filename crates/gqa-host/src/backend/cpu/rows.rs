//! Query rows and their outputs, which several threads write concurrently.

use super::sequence::Sequence;
use gqa_plan::{Layout, Problem};
use std::marker::PhantomData;
use std::slice;

/// Consecutive query rows of a KV head: its tokens, each with all query heads of the group.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryRows {
    /// The KV head.
    pub(super) head: usize,
    /// Query heads of a KV head.
    pub(super) group: usize,
    /// The first row, relative to the sequence's first token.
    pub(super) first: usize,
    pub(super) count: usize,
}

impl QueryRows {
    /// Token and query head of row `row`.
    pub(super) fn place(&self, row: usize) -> (usize, usize) {
        let row = self.first + row;
        (row / self.group, self.head * self.group + row % self.group)
    }
}

/// The outputs of a call: output of type `O`, scores of type `T`.
pub(super) struct Outputs<'a, T, O> {
    layout: Layout,
    heads: usize,
    /// Tokens of a batch entry.
    tokens: usize,
    output: TensorRows<'a, O>,
    output_qk: Option<TensorRows<'a, T>>,
    lse: Option<TensorRows<'a, f32>>,
}

impl<'a, T, O> Outputs<'a, T, O> {
    pub(super) fn new(
        p: &Problem,
        output: &'a mut [O],
        output_qk: Option<&'a mut [T]>,
        lse: Option<&'a mut [f32]>,
    ) -> Self {
        // A row without keys has no scores.
        let output_qk = output_qk.filter(|_| p.total_len > 0);
        Self {
            layout: p.layout,
            heads: p.q_heads,
            tokens: p.pages.map_or(p.q_len, |pages| pages.tokens),
            output: TensorRows::new(output, p.v_head_size),
            output_qk: output_qk.map(|scores| TensorRows::new(scores, p.total_len)),
            lse: lse.map(|lse| TensorRows::new(lse, 1)),
        }
    }

    /// The outputs of some rows of a sequence.
    ///
    /// # Safety
    ///
    /// No other value in use has any of these rows.
    pub(super) unsafe fn of(&self, sequence: &Sequence, rows: QueryRows) -> OutputRows<'_, T, O> {
        OutputRows { outputs: self, first: sequence.first, rows }
    }
}

/// The outputs of some rows, which only this value may write.
pub(super) struct OutputRows<'o, T, O> {
    outputs: &'o Outputs<'o, T, O>,
    /// The start of the sequence: a batch entry, and a token of it.
    first: [usize; 2],
    rows: QueryRows,
}

/// The outputs of one query row.
pub(super) struct OutputRow<'a, T, O> {
    pub(super) output: &'a mut [O],
    /// The row of output_qk.
    pub(super) scores: Option<&'a mut [T]>,
    pub(super) lse: Option<&'a mut f32>,
}

impl<T, O> OutputRows<'_, T, O> {
    /// Row number `row` of these rows.
    pub(super) fn row(&mut self, row: usize) -> OutputRow<'_, T, O> {
        assert!(row < self.rows.count, "a row of the task");
        let ([b, first], (token, head), outputs) = (self.first, self.rows.place(row), self.outputs);
        let token = first + token;
        assert!(token < outputs.tokens, "a token of the batch entry");
        let by_head = (b * outputs.heads + head) * outputs.tokens + token;
        let place = match outputs.layout {
            Layout::Bsnh => (b * outputs.tokens + token) * outputs.heads + head,
            Layout::Bnsh => by_head,
        };
        // SAFETY: no other value has these rows, and this one lends them one by one
        unsafe {
            OutputRow {
                output: outputs.output.row(place),
                scores: outputs.output_qk.as_ref().map(|scores| scores.row(by_head)),
                lse: outputs.lse.as_ref().and_then(|lse| lse.row(by_head).first_mut()),
            }
        }
    }
}

/// Rows of a tensor that different threads write.
struct TensorRows<'a, T> {
    first: *mut T,
    count: usize,
    /// Elements of a row.
    size: usize,
    tensor: PhantomData<&'a mut [T]>,
}

// SAFETY: the tensor is mutably borrowed, and its elements are `Send`
unsafe impl<T: Send> Send for TensorRows<'_, T> {}
// SAFETY: `row` requires that each row is lent to one thread at a time
unsafe impl<T: Send> Sync for TensorRows<'_, T> {}

impl<'a, T> TensorRows<'a, T> {
    fn new(tensor: &'a mut [T], size: usize) -> Self {
        let count = tensor.len().checked_div(size).unwrap_or(0);
        Self { first: tensor.as_mut_ptr(), count, size, tensor: PhantomData }
    }

    /// # Safety
    ///
    /// No other borrow of the row exists.
    #[expect(clippy::mut_from_ref, reason = "of another row each time, as the caller says")]
    unsafe fn row(&self, row: usize) -> &mut [T] {
        assert!(row < self.count, "a row of the tensor");
        // SAFETY: the assertion bounds the row, and the caller has it exclusively
        unsafe { slice::from_raw_parts_mut(self.first.add(row * self.size), self.size) }
    }
}
