//! `hopper_quantized`: `hopper` over a quantized KV cache, converted to float16 in shared memory.

use super::hopper::{self, tensor_map};
use crate::plan::build::launch;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{l2_swizzled_params, params, rotary_params, scale_tensors, scales};
use crate::plan::{requirements, select};
use crate::{Error, Problem, QuantFormat, Result};
use bytemuck::Zeroable;
use gqa_kernels::attention::hopper as kernels;
use gqa_kernels::params::{AttentionParams, QuantizedHopperParams, Strides};
use gqa_kernels::registry::{self, Entry, Role};

pub(super) struct HopperQuantized;

impl Family for HopperQuantized {
    fn module(&self) -> registry::Family {
        registry::Family::HopperQuantized
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        requirements::shared_and_quantized(p)?;
        requirements::quantized_vectors(p)?;
        requirements::no_row_scales(p)?;
        let entry = select::smallest(self, call)?;
        converting_pays(call, entry)?;
        hopper::suits(call, entry)?;
        whole_keys(call, entry)?;
        requirements::narrow_output(p)?;
        Ok(Kernel::whole(entry))
    }

    fn fuses(&self, problem: &Problem, _entry: &Entry, fused: bool) -> FusedPrologue {
        let query_rotation = fused && problem.rotary.is_some_and(hopper::knows);
        FusedPrologue { query_rotation, reads_quantized: true, ..FusedPrologue::default() }
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, entry) = (job.problem, kernel.entry);
        let how =
            p.quantized.ok_or_else(|| Error::NoKernel("the KV cache is not quantized".into()))?;
        let turns = self.fuses(p, entry, job.task.fused).query_rotation;
        let attention = l2_swizzled_params(&job, 1)?;
        let counter = job.scratch.count(1);
        let keys = key_maps(&job, &attention, entry, how.format);
        let mut arguments = hopper::arguments(p, &attention, &job.rows, counter, keys);
        arguments.extend(hopper::tables(p, turns));
        arguments.extend(scale_tensors(p));
        let rotary = rotary_params(p.rotary.filter(|_| turns), 0)?;
        let params = QuantizedHopperParams {
            hopper: hopper::hopper_params(p, attention, rotary)?,
            format: how.format as u32,
            scales: scales(p),
        };
        let grid = kernels::grid(&attention, entry.rows, job.device.multiprocessors);
        Ok(vec![launch(entry, grid, &arguments, &params)?])
    }
}

/// Errs where one launch that dequantizes all keys is faster than converting them again for each
/// row tile, or where tiles would be padded (`docs/perf-log.md`). GQA_FORCE overrides the
/// heuristic.
pub(super) fn converting_pays(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    let p = call.problem;
    // Most packed query rows. Fewer if keys are converted as well as values; more over a paged
    // cache, which takes one more launch to dequantize.
    let of_contiguous: u16 = if entry.formats.is_empty() { 512 } else { 1024 };
    let max = if p.pages.is_some() { 2 * of_contiguous } else { of_contiguous };
    // If the work is divided, the other plan dequantizes the keys of all sequences.
    let is_divided = entry.role == Role::SplitAttention && !entry.formats.is_empty();
    let max = if is_divided { 2 * max } else { max };
    if call.options.force.is_some() {
        return Ok(());
    }
    if p.head_size != entry.head_size as usize {
        return Err(Rejection::OtherHeadSize { got: p.head_size });
    }
    match p.packed_rows() {
        got if got > usize::from(max) => Err(Rejection::Rows { got, max: max.into() }),
        _ => Ok(()),
    }
}

/// Errs where the call needs KV splits to occupy all SMs: these kernels do not split keys.
/// GQA_SPLITS and GQA_FORCE override the heuristic.
fn whole_keys(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    let p = call.problem;
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::TooLarge)?;
    let sms = call.device.multiprocessors;
    let best = match call.options.force {
        Some(_) => 1,
        None => kernels::splits(&params, entry.rows, entry.keys, p.most_keys(), sms),
    };
    match call.options.splits.unwrap_or(best) {
        0 | 1 => Ok(()),
        splits => Err(Rejection::Splits { splits }),
    }
}

/// Tensor maps of K and V, which have 16 bits of quantized values to a column.
fn key_maps(
    job: &Job<'_>,
    params: &AttentionParams,
    entry: &Entry,
    format: QuantFormat,
) -> [Arg; 2] {
    let AttentionParams { head_size, capacity, kv_heads, batch, .. } = *params;
    let per_column = 16 / format.bits();
    let map = |arg, Strides { row, head, batch: entry_stride }: Strides| {
        let strides = Strides {
            row: row / u64::from(per_column),
            head: head / u64::from(per_column),
            batch: entry_stride / u64::from(per_column),
        };
        let size = [head_size / per_column, capacity, kv_heads, batch];
        tensor_map(job.problem, arg, strides, size, entry.keys)
    };
    let [k, v] = job.rows.attended;
    [map(k, params.k), map(v, params.v)]
}
