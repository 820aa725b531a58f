//! Where the rows of a call are.

use super::build::{strides, tensor};
use super::launch::Arg;
use crate::problem::{Problem, RowLayout};
use crate::tensors::TensorId;
use gqa_kernels::params::Strides;

/// The address and strides of a (batch, head, row) tensor of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) arg: Arg,
    pub(super) strides: Strides,
}

impl Operand {
    /// A tensor of the call, at the offset of `layout`.
    pub(super) fn tensor(problem: &Problem, id: TensorId, layout: RowLayout) -> Self {
        let offset = layout.offset * problem.dtype.size();
        Self { arg: tensor(problem, id, offset), strides: strides(layout) }
    }
}

/// Where a call's rows are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) query: Operand,
    /// New rows.
    pub(super) key: Operand,
    /// New rows.
    pub(super) value: Operand,
    /// Where attention finds K and V.
    pub(super) attended: [Arg; 2],
}

impl Rows {
    /// The rows in the caller's tensors.
    pub(super) fn given(p: &Problem) -> Self {
        let (key, value) = if p.packed {
            (TensorId::Query, TensorId::Query)
        } else {
            (TensorId::Key, TensorId::Value)
        };
        Self {
            query: Operand::tensor(p, TensorId::Query, p.query_layout()),
            key: Operand::tensor(p, key, p.key_layout()),
            value: Operand::tensor(p, value, p.value_layout()),
            attended: keys_and_values(p),
        }
    }

    /// Views the tokens of one sequence as those of several, concatenated.
    pub(super) fn of_all_sequences(self) -> Self {
        let together = |rows: Operand| {
            let strides = Strides { batch: 0, ..rows.strides };
            Operand { strides, ..rows }
        };
        Self {
            query: together(self.query),
            key: together(self.key),
            value: together(self.value),
            attended: self.attended,
        }
    }
}

/// The K and V that attention reads, unless a launch writes them elsewhere.
fn keys_and_values(p: &Problem) -> [Arg; 2] {
    let [key, value] = match p.has_present() {
        true => [TensorId::PresentKey, TensorId::PresentValue],
        false => [TensorId::Key, TensorId::Value],
    };
    let value = if p.latent { key } else { value };
    [tensor(p, key, 0), tensor(p, value, 0)]
}
