//! `hopper_float8`: `hopper` over a float8e4m3fn cache, if the call allows float8 products: queries
//! and P are rounded to float8, too.

use super::hopper::{self, tensor_map};
use crate::plan::build::{find, launch, seqlens, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, params, position_stride, rotary_params, scales};
use crate::plan::rows::Rows;
use crate::plan::scratch::Scratch;
use crate::plan::{requirements, select};
use crate::tensors::TensorId;
use crate::{Problem, QuantFormat, Result};
use gqa_kernels::attention::hopper as kernels;
use gqa_kernels::params::{AttentionParams, Float8OperandsParams, Float8Params, Strides};
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
        suits(call.problem)?;
        requirements::no_row_scales(call.problem)?;
        let entry = select::smallest(self, call)?;
        pays(call, entry)?;
        hopper::suits(call, entry)?;
        requirements::narrow_output(call.problem)?;
        Ok(Kernel::whole(entry))
    }

    fn fuses(&self, problem: &Problem, entry: &Entry, fused: bool) -> FusedPrologue {
        FusedPrologue::of_new_rows(problem, entry, fused)
    }

    /// Two launches: `float8_operands`, which also rotates and appends the new rows if `fused`, and
    /// the attention.
    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, device, entry) = (job.problem, job.device, kernel.entry);
        let attention = params(p, job.rows.query.strides, 1)?;
        let operands = Operands::take(p, &attention, entry, job.scratch)?;
        let fused = self.fuses(p, entry, job.task.fused).new_rows;
        Ok(vec![
            operands.launch(p, device, entry, job.rows, fused)?,
            operands.attention(p, device, entry, job.scratch.count(1))?,
        ])
    }
}

/// Errs unless the cache is float8, the call allows float8 products, and the kernels take its other
/// features.
fn suits(p: &Problem) -> Result<(), Rejection> {
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
    let rows = p.batch.saturating_mul(p.q_heads + p.kv_heads).saturating_mul(p.q_len);
    if rows > i32::MAX as usize { Err(Rejection::TooLarge) } else { Ok(()) }
}

/// Errs unless the faster products save more than the launch before attention costs (whole calls,
/// `docs/results/2026-11-28-h200-float8-keys`). GQA_FORCE overrides the heuristic.
fn pays(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    /// Fewest packed query rows. With fewer bfloat16 rows `hopper_quantized_f8` reads the cache in
    /// place and is faster; float16 and head sizes below 128 were not measured.
    const LEAST_ROWS: usize = 1025;
    let p = call.problem;
    if call.options.force.is_some() {
        return Ok(());
    }
    let is_large = entry.head_size > 128;
    let min = if is_large { 4096 } else { 8192 };
    if p.total_len < min {
        return Err(Rejection::FewKeys { got: p.total_len, min });
    }
    if !is_large && p.packed_rows() < LEAST_ROWS {
        return Err(Rejection::FewRows { got: p.packed_rows(), min: LEAST_ROWS });
    }
    // If half of the SMs would be idle, other kernels split the keys.
    let tiles = p.q_len.div_ceil(entry.rows as usize) * p.q_heads * p.batch;
    match call.device.multiprocessors as usize / tiles.max(1) {
        0 | 1 => Ok(()),
        splits => Err(Rejection::Splits { splits: u32::try_from(splits).unwrap_or(u32::MAX) }),
    }
}

/// Heads of up to 64 are bound by their exponentials, and those between would be padded too far.
fn pays_for_heads_of(size: usize) -> bool {
    matches!(size, 65..=128 | 193..=256)
}

/// The float8 operands in scratch memory.
struct Operands<'a> {
    params: &'a AttentionParams,
    scales: u32,
    q_codes: Arg,
    q: Strides,
    row_factors: Arg,
    v_codes: Arg,
    v: Strides,
    /// Columns of `v_codes`.
    columns: u32,
    /// Keys of a tile of the attention.
    tile_keys: u32,
}

impl<'a> Operands<'a> {
    fn take(
        p: &Problem,
        params: &'a AttentionParams,
        entry: &Entry,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        let AttentionParams { head_size, q_len, q_heads, kv_heads, .. } = *params;
        let columns = kernels::transposed_columns(params.capacity, entry.keys);
        let dense = |heads: u32, rows: u32, row: u32| {
            let head = u64::from(rows) * u64::from(row);
            Strides { row: row.into(), head, batch: head * u64::from(heads) }
        };
        let mut take =
            |strides: Strides, size| scratch.take(p.batch * strides.batch as usize, size);
        let value_rows = kernels::transposed_rows(head_size);
        let (q, v) = (dense(q_heads, q_len, head_size), dense(kv_heads, value_rows, columns));
        Ok(Self {
            params,
            scales: scales(p),
            q_codes: take(q, 1)?,
            q,
            row_factors: take(dense(q_heads, q_len, 1), size_of::<f32>())?,
            v_codes: take(v, 1)?,
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
        let entry = find(Role::Operands, Some(attention.dtype))?;
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
            ("q", rows.query.arg),
            ("k", given(rows.key.arg)),
            ("v", given(rows.value.arg)),
            ("cos", given(tensor(TensorId::CosCache))),
            ("sin", given(tensor(TensorId::SinCache))),
            ("position_ids", given(tensor(TensorId::PositionIds))),
            ("k_scale", tensor(TensorId::KScale)),
            ("v_scale", tensor(TensorId::VScale)),
            ("k_cache", tensor(TensorId::PresentKey)),
            ("v_cache", tensor(TensorId::PresentValue)),
            ("q_codes", self.q_codes),
            ("row_factors", self.row_factors),
            ("v_codes", self.v_codes),
        ];
        let arguments = [&arguments[..], &seqlens(p)].concat();
        let grid = kernels::operands_grid(&params, entry.threads, device.multiprocessors);
        launch(entry, grid, &arguments, &params)
    }

    /// The attention launch. TMA copies elements of 16 bits, two float8 values each.
    fn attention(
        &self,
        p: &Problem,
        device: &DeviceInfo,
        entry: &'static Entry,
        counter: Arg,
    ) -> Result<Launch> {
        let AttentionParams { head_size, q_len, q_heads, kv_heads, capacity, batch, k, .. } =
            *self.params;
        let map = |arg, strides: Strides, [width, rows, heads]: [u32; 3], tile_rows| {
            let Strides { row, head, batch: entry } = strides;
            let strides = Strides { row: row / 2, head: head / 2, batch: entry / 2 };
            tensor_map(p, arg, strides, [width / 2, rows, heads, batch], tile_rows)
        };
        let tensor = |id| tensor(p, id, 0);
        let keys = [head_size, capacity, kv_heads];
        let values = [self.columns, kernels::transposed_rows(head_size), kv_heads];
        let arguments = [
            ("q", map(self.q_codes, self.q, [head_size, q_len, q_heads], kernels::QUERY_BOX)),
            ("k", map(tensor(TensorId::PresentKey), k, keys, entry.keys)),
            ("v", map(self.v_codes, self.v, values, kernels::transposed_rows(entry.head_size))),
            ("row_factors", self.row_factors),
            ("v_scale", tensor(TensorId::VScale)),
            ("head_sink", tensor(TensorId::HeadSink)),
            output(p)[0],
            ("counter", counter),
        ];
        // A float8 value has half the bytes of an element.
        let halves = AttentionParams { head_size: head_size / 2, ..*self.params };
        let l2_section = kernels::l2_section(&halves, device.l2_bytes, device.multiprocessors);
        let params = Float8Params {
            attention: AttentionParams { l2_section, ..*self.params },
            scales: self.scales,
            reserved: 0,
        };
        let arguments = [&arguments[..], &seqlens(p)].concat();
        let grid = kernels::grid(self.params, entry.rows, device.multiprocessors);
        launch(entry, grid, &arguments, &params)
    }
}
