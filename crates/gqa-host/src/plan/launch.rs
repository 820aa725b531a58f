//! Launches built from named arguments.

use super::{Arg, Launch, TensorId};
use crate::{DType, Error, Problem, Result, RowLayout};
use bytemuck::Pod;
use gqa_kernels::params::Strides;
use gqa_kernels::registry::{Entry, entries};

/// Where a (batch, head, row) tensor of a launch is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) arg: Arg,
    pub(super) strides: Strides,
}

impl Operand {
    /// A tensor of the call, or the part of it where `layout` begins.
    pub(super) fn tensor(problem: &Problem, id: TensorId, layout: RowLayout) -> Self {
        let offset = layout.offset * problem.dtype.size();
        Self { arg: tensor(problem, id, offset), strides: strides(layout) }
    }
}

/// Scratch memory handed out piece by piece.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) bytes: usize,
    /// Counters taken.
    pub(super) counters: usize,
}

impl Scratch {
    /// Pieces start at multiples of this.
    const ALIGNMENT: usize = 256;

    /// `elements` values of `size` bytes.
    pub(super) fn take(&mut self, elements: usize, size: usize) -> Result<Arg> {
        let offset = self.bytes.next_multiple_of(Self::ALIGNMENT);
        let end =
            elements.checked_mul(size).and_then(|bytes| Some((bytes, offset.checked_add(bytes)?)));
        let (bytes, end) = end
            .ok_or_else(|| Error::NoKernel("its workspace exceeds the address space".to_owned()))?;
        self.bytes = end;
        Ok(Arg::Workspace { offset, bytes })
    }

    /// `count` counters, which are zero before and after every call. One launch of a call has them.
    pub(super) fn count(&mut self, count: usize) -> Arg {
        self.counters = self.counters.max(count);
        Arg::Counters { count }
    }
}

/// The tensor from byte `offset` on; null where the call does not have it, or it has no elements.
pub(super) fn tensor(problem: &Problem, id: TensorId, offset: usize) -> Arg {
    match id.spec(problem) {
        Some(spec) if !spec.is_empty() => Arg::Tensor { id, offset },
        _ => Arg::Null,
    }
}

pub(super) fn strides(layout: RowLayout) -> Strides {
    Strides { batch: layout.batch as u64, head: layout.head as u64, row: layout.row as u64 }
}

/// A launch whose pointer arguments are found by name.
pub(super) fn launch(
    entry: &'static Entry,
    grid: [u32; 3],
    arguments: &[(&'static str, Arg)],
    params: &impl Pod,
) -> Result<Launch> {
    let find = |name: &&'static str| {
        let found = arguments.iter().find_map(|(known, arg)| (known == name).then_some(*arg));
        found.ok_or_else(|| {
            Error::NoKernel(format!(
                "{} has an argument {name} that the planner does not know",
                entry.name
            ))
        })
    };
    let [x, y, z] = grid;
    if x > i32::MAX as u32 || y.max(z) > 65535 {
        return Err(Error::NoKernel(format!(
            "{} would need {x}x{y}x{z} blocks, more than CUDA starts",
            entry.name
        )));
    }
    let args = entry.arguments.iter().map(find).collect::<Result<_>>()?;
    let params = bytemuck::bytes_of(params).to_vec();
    Ok(Launch { entry, grid, cluster: 1, programmatic: false, aside: false, args, params })
}

/// The kernel of that name, for an element type where it knows any.
pub(super) fn find(kernel: &str, dtype: Option<gqa_kernels::num::DType>) -> Result<&'static Entry> {
    entries()
        .find(|entry| entry.kernel() == kernel && dtype.is_none_or(|dtype| entry.dtype == dtype))
        .ok_or_else(|| Error::NoKernel(format!("{kernel} has no kernel for the call's type")))
}

/// A number that the device takes as 32 bits.
pub(super) fn u32_of(what: &'static str, value: usize) -> Result<u32> {
    u32::try_from(value)
        .map_err(|_| Error::NoKernel(format!("{what} is {value}; kernels count in 32 bits")))
}

/// The kernels' name for an element type.
pub(super) fn element(dtype: DType) -> Option<gqa_kernels::num::DType> {
    match dtype {
        DType::F32 => Some(gqa_kernels::num::DType::F32),
        DType::F16 => Some(gqa_kernels::num::DType::F16),
        DType::BF16 => Some(gqa_kernels::num::DType::BF16),
        DType::I32
        | DType::I64
        | DType::F64
        | DType::Bool
        | DType::I8
        | DType::U8
        | DType::F8E4M3 => None,
    }
}
