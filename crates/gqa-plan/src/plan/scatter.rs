//! In-place cache updates: one launch, `scatter_rows`, for one tensor or for keys and values.

use super::build::{find, launch, strides, tensor, u32_of};
use super::contiguous::Composed;
use super::device::DeviceInfo;
use crate::problem::{Problem, RowLayout, WriteMode};
use crate::tensors::TensorId;
use gqa_kernels::params::{ScatterParams, Strides};
use gqa_kernels::registry::Role;
use gqa_kernels::registry::prologue_grid::scatter_rows_grid;
use gqa_tensor::Result;

/// The launch of an update.
pub(super) fn compose(p: &Problem, mode: WriteMode, device: &DeviceInfo) -> Result<Composed> {
    let in_bytes = |rows: RowLayout| {
        let Strides { batch, head, row } = strides(rows);
        let size = p.dtype.size() as u64;
        Strides { batch: batch * size, head: head * size, row: row * size }
    };
    let params = ScatterParams {
        new: in_bytes(p.key_layout()),
        cache: in_bytes(p.cache_layout(p.capacity)),
        batch: u32_of("batch", p.batch)?,
        heads: u32_of("heads", p.kv_heads)?,
        rows: u32_of("new rows", p.new_len)?,
        capacity: u32_of("rows of the cache", p.capacity)?,
        row_bytes: u32_of("bytes of a row", p.head_size * p.dtype.size())?,
        circular: (mode == WriteMode::Circular).into(),
    };
    let arguments = [
        ("k", tensor(p, TensorId::Key, 0)),
        ("v", tensor(p, TensorId::Value, 0)),
        ("first", tensor(p, TensorId::WriteIndices, 0)),
        ("present_k", tensor(p, TensorId::PresentKey, 0)),
        ("present_v", tensor(p, TensorId::PresentValue, 0)),
    ];
    let tensors = if p.v_head_size == 0 { 1 } else { 2 };
    let grid = scatter_rows_grid(&params, tensors, device.multiprocessors);
    let launch = launch(find(Role::ScatterRows, None)?, grid, &arguments, &params)?;
    Ok(Composed { launches: vec![launch], ..Composed::default() })
}
