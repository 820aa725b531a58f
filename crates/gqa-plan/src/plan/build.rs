//! Launches built from named arguments.

use super::launch::{Arg, Launch};
use crate::problem::{Pages, Problem, RowLayout, RowStrides, greatest_unit};
use crate::tensors::TensorId;
use bytemuck::Pod;
use gqa_kernels::concept::pages::CONSECUTIVE;
use gqa_kernels::params::{PageSteps, Strides};
use gqa_kernels::registry::{Entry, Role, entries};
use gqa_tensor::{DType, Error, Result};

/// The tensor from byte `offset` on; null if the call lacks it, or if it has no elements.
pub(super) fn tensor(problem: &Problem, id: TensorId, offset: usize) -> Arg {
    match id.spec(problem) {
        Some(spec) if !spec.is_empty() => Arg::Tensor { id, offset },
        _ => Arg::Null,
    }
}

/// The tensors that say how long sequences with caches of their own are, under the kernels' names.
pub(super) fn seqlens(problem: &Problem) -> [(&'static str, Arg); 2] {
    let ids = [TensorId::SeqlensK, TensorId::QuerySeqlens];
    ids.map(|id| (id.name(), tensor(problem, id, 0)))
}

pub(super) fn strides(layout: RowLayout) -> Strides {
    Strides { batch: layout.batch as u64, head: layout.head as u64, row: layout.row as u64 }
}

/// Strides of the keys of a paged KV cache in units of `bytes` bytes; the batch dimension is the
/// block.
pub(super) fn pages_strides(problem: &Problem, pages: Pages, unit: usize) -> Strides {
    in_units(problem, problem.pages_strides(pages), unit)
}

/// The same of the values.
pub(super) fn page_values_strides(problem: &Problem, pages: Pages, unit: usize) -> Strides {
    in_units(problem, problem.page_values_strides(pages), unit)
}

fn in_units(problem: &Problem, strides: RowStrides, unit: usize) -> Strides {
    let RowStrides { batch, head, row } = strides;
    let size = problem.key_cache_dtype().size();
    let [batch, head, row] = [batch, head, row].map(|stride| (stride * size / unit) as u64);
    Strides { batch, head, row }
}

/// Rows of a block for kernels. In a cache of consecutive rows a sequence is one block.
pub(super) fn block_rows(pages: Pages) -> Result<u32> {
    match pages.consecutive {
        true => Ok(CONSECUTIVE),
        false => u32_of("rows of a block", pages.block_size),
    }
}

/// The rows of a cache with these strides.
pub(super) fn page_steps(cache: Strides) -> PageSteps {
    let unit = greatest_unit([cache.batch, cache.row]);
    let [block, row] = [cache.batch, cache.row].map(|stride| (stride / unit) as u32);
    PageSteps { block, row, unit: unit as u32, reserved: 0 }
}

/// A launch; pointer arguments are matched by name.
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
            "{} would need a grid of {x}x{y}x{z} CTAs, more than CUDA allows",
            entry.name
        )));
    }
    let args = entry.arguments.iter().map(find).collect::<Result<_>>()?;
    let params = bytemuck::bytes_of(params).to_vec();
    Ok(Launch {
        entry,
        grid,
        cluster: 1,
        programmatic: false,
        concurrent: false,
        overlaps: false,
        args,
        params,
    })
}

/// The kernel in that role for an element type, where it knows any.
pub(super) fn find(role: Role, dtype: Option<gqa_kernels::num::DType>) -> Result<&'static Entry> {
    let is_it =
        |entry: &&Entry| entry.role == role && dtype.is_none_or(|dtype| entry.dtype == dtype);
    entries().find(is_it).ok_or_else(|| {
        Error::NoKernel(format!("{} has no kernel for the call's type", role.name()))
    })
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
