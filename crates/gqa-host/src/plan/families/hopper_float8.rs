//! `hopper_float8`: `hopper` where the cache holds float8e4m3fn and the products may be of such:
//! queries and weights are rounded to it, too.

use super::hopper::{self, tensor_map};
use crate::plan::build::{find, launch, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::{PlanOption, PlanOptions};
use crate::plan::params::{output, params, position_stride, rotary_params, scales};
use crate::plan::rows::Rows;
use crate::plan::scratch::Scratch;
use crate::plan::tensors::TensorId;
use crate::plan::{requirements, select};
use crate::{CacheBinding, Problem, QuantFormat, Result};
use gqa_kernels::attention::hopper as kernels;
use gqa_kernels::params::{
    AttentionParams, Float8OperandsParams, HopperParams, QuantizedHopperParams, Strides,
};
use gqa_kernels::registry::{self, Entry, Role};

pub(super) struct HopperFloat8;

impl Family for HopperFloat8 {
    fn module(&self) -> registry::Family {
        registry::Family::HopperFloat8
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::flash(call.problem)?;
        suits(call.problem, call.options)?;
        requirements::no_row_scales(call.problem)?;
        let entry = select::smallest(self, call)?;
        hopper::suits(call, entry)?;
        requirements::narrow_output(call.problem)?;
        Ok(Kernel::whole(entry))
    }

    /// Its launches append and rotate, but for queries at positions of their own.
    fn fuses(&self, problem: &Problem, entry: &Entry, fused: bool) -> FusedPrologue {
        let all = FusedPrologue::of_new_rows(problem, entry, fused);
        let knows = problem.rotary.is_none_or(hopper::knows);
        let reads_quantized = problem.cache == CacheBinding::Shared;
        let query_rotation = fused && knows && problem.rotary.is_some();
        FusedPrologue { new_rows: all.new_rows && knows, query_rotation, reads_quantized, ..all }
    }

    /// `float8_operands`, which takes new rows as they are given where it may, and the attention.
    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, device, entry) = (job.problem, job.device, kernel.entry);
        let attention = params(p, job.rows.query.strides, 1)?;
        let operands = Operands::take(p, &attention, entry, job.scratch)?;
        let fuses = self.fuses(p, entry, job.task.fused);
        let counter = job.scratch.count(1);
        Ok(vec![
            operands.launch(p, device, entry, job.rows, fuses.new_rows)?,
            operands.attention(
                p,
                device,
                entry,
                job.rows.query.arg,
                fuses.query_rotation,
                counter,
            )?,
        ])
    }
}

/// A cache that the tensor cores multiply, where that is allowed and pays: where rows are short the
/// launch before attention costs more than the products gain. GQA_FORCE knows better.
fn suits(p: &Problem, options: &PlanOptions) -> Result<(), Rejection> {
    match p.quantized.map(|how| how.format) {
        None => return Err(Rejection::NotQuantized),
        Some(QuantFormat::Float8) => {}
        Some(got) => return Err(Rejection::Format { got }),
    }
    if !p.float8_products {
        return Err(Rejection::Float8Products);
    }
    if p.lse {
        return Err(Rejection::Argument { name: "lse" });
    }
    if p.softcap.is_some() {
        return Err(Rejection::Argument { name: "softcap" });
    }
    if p.head_size % 16 != 0 || !pays_for_heads_of(p.head_size) {
        return Err(Rejection::OtherHeadSize { got: p.head_size });
    }
    if p.total_len < LEAST_KEYS && options.force.is_none() {
        return Err(Rejection::FewKeys { got: p.total_len, min: LEAST_KEYS });
    }
    let rows = p.batch.saturating_mul(p.q_heads + p.kv_heads).saturating_mul(p.q_len);
    if rows > i32::MAX as usize { Err(Rejection::TooLarge) } else { Ok(()) }
}

/// Keys from which on whole calls are no slower than in products of the element type
/// (`docs/results/2026-11-28-h200-quantized`).
const LEAST_KEYS: usize = 4096;

/// Heads of up to 64 are bound by their exponentials, and those between would be padded too far.
fn pays_for_heads_of(size: usize) -> bool {
    matches!(size, 65..=128 | 193..=256)
}

/// What lies in scratch, and how.
struct Operands<'a> {
    params: &'a AttentionParams,
    scales: u32,
    v_codes: Arg,
    v: Strides,
    /// Of `v_codes`.
    columns: u32,
    /// Of a tile of the attention.
    tile_keys: u32,
}

impl<'a> Operands<'a> {
    fn take(
        p: &Problem,
        params: &'a AttentionParams,
        entry: &Entry,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        let AttentionParams { head_size, kv_heads, .. } = *params;
        let columns = kernels::transposed_columns(params.capacity, entry.keys);
        let head = u64::from(head_size) * u64::from(columns);
        let v = Strides { row: columns.into(), head, batch: head * u64::from(kv_heads) };
        Ok(Self {
            params,
            scales: scales(p),
            v_codes: scratch.take(p.batch * v.batch as usize, 1)?,
            v,
            columns,
            tile_keys: entry.keys,
        })
    }

    fn launch(
        &self,
        p: &Problem,
        device: &DeviceInfo,
        attention: &Entry,
        rows: Rows,
        fused: bool,
    ) -> Result<Launch> {
        let entry = find(Role::Operands, Some(attention.dtype), None)?;
        let stride = position_stride(p)?;
        let params = Float8OperandsParams {
            attention: *self.params,
            new_k: rows.key.strides,
            new_v: rows.value.strides,
            rotary: rotary_params(p.rotary.filter(|_| fused), stride)?,
            new_len: if fused { u32_of("new keys", p.new_len)? } else { 0 },
            scales: self.scales,
            tile_keys: self.tile_keys,
            reserved: 0,
        };
        let given = |arg: Arg| if fused { arg } else { Arg::Null };
        let tensor = |id| tensor(p, id, 0);
        let arguments = [
            ("k", given(rows.key.arg)),
            ("v", given(rows.value.arg)),
            ("cos", given(tensor(TensorId::CosCache))),
            ("sin", given(tensor(TensorId::SinCache))),
            ("position_ids", given(tensor(TensorId::PositionIds))),
            ("k_scale", tensor(TensorId::KScale)),
            ("v_scale", tensor(TensorId::VScale)),
            ("seqlens_k", tensor(TensorId::SeqlensK)),
            ("k_cache", tensor(TensorId::PresentKey)),
            ("v_cache", tensor(TensorId::PresentValue)),
            ("v_codes", self.v_codes),
        ];
        let grid = kernels::operands_grid(&params, entry.threads, device.multiprocessors);
        launch(entry, grid, &arguments, &params)
    }

    /// The attention, which rotates queries if `turns`. What TMA takes for an element are two of
    /// float8 in keys and values.
    fn attention(
        &self,
        p: &Problem,
        device: &DeviceInfo,
        entry: &'static Entry,
        query: Arg,
        turns: bool,
        counter: Arg,
    ) -> Result<Launch> {
        let AttentionParams { head_size, q_len, q_heads, kv_heads, capacity, batch, q, k, .. } =
            *self.params;
        let map = |arg, strides: Strides, [width, rows]: [u32; 2], tile_rows| {
            let Strides { row, head, batch: entry } = strides;
            let strides = Strides { row: row / 2, head: head / 2, batch: entry / 2 };
            tensor_map(p, arg, strides, [width / 2, rows, kv_heads, batch], tile_rows)
        };
        let queries = [head_size, q_len, q_heads, batch];
        let tensor = |id| tensor(p, id, 0);
        let [cos, sin] = hopper::tables(p, turns);
        let arguments = [
            ("q", tensor_map(p, query, q, queries, kernels::QUERY_BOX)),
            ("k", map(tensor(TensorId::PresentKey), k, [head_size, capacity], entry.keys)),
            ("v", map(self.v_codes, self.v, [self.columns, head_size], entry.head_size)),
            cos,
            sin,
            ("k_scale", tensor(TensorId::KScale)),
            ("v_scale", tensor(TensorId::VScale)),
            ("seqlens_k", tensor(TensorId::SeqlensK)),
            ("head_sink", tensor(TensorId::HeadSink)),
            output(p)[0],
            ("counter", counter),
        ];
        // A float8 is half of an element.
        let halves = AttentionParams { head_size: head_size / 2, ..*self.params };
        let l2_section = kernels::l2_section(&halves, device.l2_bytes);
        let attention = AttentionParams { l2_section, ..*self.params };
        let rotary = rotary_params(p.rotary.filter(|_| turns), 0)?;
        let params = QuantizedHopperParams {
            hopper: HopperParams { attention, rotary },
            format: QuantFormat::Float8 as u32,
            scales: self.scales,
        };
        let grid = kernels::grid(self.params, entry.rows, device.multiprocessors);
        launch(entry, grid, &arguments, &params)
    }
}
