//! `hopper`: flash attention with warpgroups and TMA, for prefill on Hopper, over splits of the
//! keys where work tiles would leave SMs idle. Also the code that the other `hopper_*` families
//! share with it.

use crate::plan::build::{launch, seqlens, tensor};
use crate::plan::decision::Rejection;
use crate::plan::device::{Capability, DeviceInfo};
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch, TensorMap};
use crate::plan::options::PlanOption;
use crate::plan::params::{l2_swizzled_params, output, params, rotary_params, value_size};
use crate::plan::rows::Rows;
use crate::plan::seen::Seen;
use crate::plan::{merge, requirements, select};
use crate::tensors::TensorId;
use crate::{Problem, Result, Rotary};
use bytemuck::Zeroable;
use gqa_kernels::attention::hopper;
use gqa_kernels::params::{AttentionParams, HopperParams, RotaryParams, Strides};
use gqa_kernels::registry::{self, Entry, Output, Role, entries};

pub(super) struct Hopper;

impl Family for Hopper {
    fn module(&self) -> registry::Family {
        registry::Family::Hopper
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::Splits]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        if p.quantizes_output() && p.lse {
            return Err(Rejection::Argument { name: "lse" });
        }
        let written = if p.quantizes_output() { Output::E4M3 } else { Output::Element };
        let is_written = |entry: &Entry| entry.outputs.contains(&written);
        let entry = select::among(self, call, is_written, |entry| order(entry, p))?;
        if !is_told_values(entry) && p.v_head_size != p.head_size {
            return Err(Rejection::Values { dtype: p.v_dtype, size: p.v_head_size });
        }
        suits(call, entry)?;
        match split(call, entry) {
            Some(split) if written == Output::Element => Ok(split),
            None if requirements::writes(entry, p) => Ok(Kernel::whole(entry)),
            _ => Err(Rejection::OutputType { got: p.out_dtype }),
        }
    }

    fn fuses(&self, problem: &Problem, entry: &Entry, fused: bool) -> FusedPrologue {
        let knows = problem.rotary.is_some_and(knows);
        let query_rotation = fused && rotates(entry) && knows;
        FusedPrologue { query_rotation, ..FusedPrologue::default() }
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let Kernel { entry, splits, .. } = *kernel;
        if entry.role == Role::Attention {
            let fused = self.fuses(job.problem, entry, job.task.fused);
            return whole_launch(job, entry, fused.query_rotation).map(|launch| vec![launch]);
        }
        let params = l2_swizzled_params(&job, splits)?;
        let counter = job.scratch.count(1);
        let keys = key_maps(job.problem, &params, &job.rows, entry)?;
        let arguments = arguments(job.problem, &params, &job.rows, counter, keys);
        let grid = hopper::grid(&params, entry.rows, job.device.multiprocessors);
        merge::launches(job, entry, grid, arguments, &params, true)
    }
}

/// GPU features that the kernels use.
const NEEDS: [Capability; 3] = [Capability::Wgmma, Capability::Tma, Capability::RegisterHandover];

/// Query rows from which a tile of 64 rows or more per query head pays, however many sequences
/// there are.
pub(super) const LEAST_ROWS: usize = 64;

/// Whether the call has enough query rows for the family, and the device has its features.
pub(super) fn may_take(p: &Problem, device: &DeviceInfo) -> bool {
    p.q_len >= LEAST_ROWS && NEEDS.iter().all(|need| device.has(*need))
}

/// Whether larger key tiles pay. They cost more at the boundary between work tiles, and less for
/// each key that all rows see (measured).
fn sees_many_keys(p: &Problem) -> bool {
    const MANY: usize = 8192;
    !p.causal && p.window.is_none() && p.softcap.is_none() && p.total_len >= MANY
}

/// Whether a kernel can rotate queries: kernels of two warpgroups have the registers.
fn rotates(entry: &Entry) -> bool {
    entry.takes("cos")
}

/// Whether a kernel takes a head size of values that differs from the keys': it gets
/// [`HopperParams`].
fn is_told_values(entry: &Entry) -> bool {
    entry.role == Role::Attention && rotates(entry)
}

/// Whether these kernels implement the rotation: implicit positions, and tables with 32-bit
/// indices.
pub(super) fn knows(rotary: Rotary) -> bool {
    let elements = rotary.max_positions.saturating_mul(rotary.dim / 2);
    rotary.explicit.is_none() && u32::try_from(elements).is_ok()
}

/// The order of kernels for a call: first by whether its sums are as exact as the call needs, then
/// by the smallest tile that holds the heads, then by estimated time.
fn order(entry: &Entry, p: &Problem) -> select::Order {
    /// Kernels with more keys per tile than this are for many keys (head size 128).
    const SHORT_TILE: u32 = 128;
    /// Cost of rotating a query in a launch of its own, in scores (measured).
    const ROTATION: usize = 60;
    // At head size 64 the fastest kernel sums rounded P, which is too coarse for a log-sum-exp; a
    // slower kernel sums P before rounding.
    let like = p.v_head_size == p.head_size || is_told_values(entry);
    let other = !like || entry.exact_sums != p.lse;
    let wrong_length = (entry.keys > SHORT_TILE) != sees_many_keys(p);
    let launch_rotates = p.rotary.is_some_and(knows) && !rotates(entry);
    let rotation = if launch_rotates { p.q_len * ROTATION } else { 0 };
    [other.into(), select::columns(entry), wrong_length.into(), work(entry, p) + rotation]
}

/// The scores that a kernel computes for one sequence, in whole tiles, and what else a tile costs:
/// the time of about 60 more rows of 128 keys (measured: `docs/perf-log.md`).
fn work(entry: &Entry, p: &Problem) -> usize {
    const OVERHEAD: usize = 60 * 128;
    let (rows, keys) = (entry.rows as usize, entry.keys as usize);
    let scores = Seen::of(p).tiles(rows, keys) * (keys * rows + OVERHEAD) as u128;
    usize::try_from(scores).unwrap_or(usize::MAX)
}

/// Errs where `tiled` is faster, or the call is not for this family.
pub(super) fn suits(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    let (p, device) = (call.problem, call.device);
    can_do(p, device)?;
    let forced = call.options.force.is_some();
    // `tiled` has no kernel for values of another head size than keys.
    let is_sole = forced || p.v_head_size != p.head_size;
    if p.q_len < LEAST_ROWS && !is_sole && !mostly_empty_tiles_pay(p, entry, device) {
        return Err(Rejection::FewRows { got: p.q_len, min: LEAST_ROWS });
    }
    Ok(())
}

/// Errs unless the device and the call fit the family.
pub(super) fn can_do(p: &Problem, device: &DeviceInfo) -> Result<(), Rejection> {
    select::capabilities(&NEEDS, device)?;
    scores(p)
}

/// Whether the kernels compute scores at this scale and softcap.
pub(super) fn scores(p: &Problem) -> Result<(), Rejection> {
    if p.scale <= 0.0 {
        return Err(Rejection::Scale { got: p.scale });
    }
    // They take tanh(x) as 1 - 2 / (1 + e^2x), which is off by 2.4e-7 near 0, and scores by as much
    // of the softcap.
    const MAX_SOFTCAP: f32 = 1000.0;
    if p.softcap_in_f32() > MAX_SOFTCAP {
        return Err(Rejection::Softcap { got: p.softcap_in_f32(), max: MAX_SOFTCAP });
    }
    Ok(())
}

/// Whether `hopper`, whose tiles hold a few rows of one query head, is faster than `tiled`, which
/// packs the query heads of a KV head into fuller but fewer tiles and so leaves SMs idle
/// (`docs/perf-log.md`).
fn mostly_empty_tiles_pay(p: &Problem, entry: &Entry, device: &DeviceInfo) -> bool {
    /// Time per key of a CTA of `tiled`, relative to a CTA of `hopper`.
    const TILED_TIME: usize = 3;
    /// Rows of a tile of `tiled`, and tiles on an SM at a time.
    const TILED: (usize, usize) = (64, 2);
    let sms = (device.multiprocessors as usize).max(1);
    let waves = |heads: usize, rows: usize, tile: usize, at_a_time: usize| {
        let tiles = heads.saturating_mul(p.batch).saturating_mul(rows.div_ceil(tile));
        tiles.div_ceil(at_a_time * sms)
    };
    let rows = p.packed_rows();
    let tiled = waves(p.kv_heads, rows, TILED.0, TILED.1);
    waves(p.q_heads, p.q_len, entry.rows as usize, 1) < TILED_TIME.saturating_mul(tiled)
}

/// The kernel that splits the keys, if splits are faster than `entry` over all keys, or if the
/// output is f32, which only that kernel writes. GQA_SPLITS and GQA_FORCE override the heuristic.
fn split(call: &Call<'_>, entry: &'static Entry) -> Option<Kernel> {
    let (p, force) = (call.problem, call.options.force);
    let fits = |split: &&Entry| {
        split.family == entry.family
            && split.role == Role::SplitAttention
            && split.dtype == entry.dtype
            && split.head_size as usize >= p.head_size
    };
    let smallest = entries().filter(fits).min_by_key(|split| split.head_size);
    let entry = smallest.filter(|split| force.is_none_or(|forced| forced == split.name))?;
    if p.v_head_size != p.head_size {
        return None;
    }
    let params = params(p, Strides::zeroed(), 1).ok()?;
    let sms = call.device.multiprocessors;
    let best = hopper::splits(&params, entry.rows, entry.keys, p.most_keys(), sms);
    // If this kernel is forced, it splits the keys in any case.
    let least = if force == Some(entry.name) { 2 } else { 1 };
    let splits = call.options.splits.unwrap_or(best).max(least);
    (splits > 1 || p.widens_output()).then_some(Kernel::split(entry, splits))
}

/// The launch over all keys. With `turns` the kernel rotates the queries; otherwise they are
/// rotated already.
fn whole_launch(job: Job<'_>, entry: &'static Entry, turns: bool) -> Result<Launch> {
    let (p, sms) = (job.problem, job.device.multiprocessors);
    let attention = l2_swizzled_params(&job, 1)?;
    let grid = hopper::grid(&attention, entry.rows, sms);
    let counter = job.scratch.count(1);
    let keys = key_maps(p, &attention, &job.rows, entry)?;
    let mut arguments = arguments(p, &attention, &job.rows, counter, keys);
    if !rotates(entry) {
        return launch(entry, grid, &arguments, &attention);
    }
    arguments.extend(tables(p, turns));
    let rotary = rotary_params(p.rotary.filter(|_| turns), 0)?;
    launch(entry, grid, &arguments, &hopper_params(p, attention, rotary)?)
}

/// Scalars of a kernel that rotates queries.
pub(super) fn hopper_params(
    p: &Problem,
    attention: AttentionParams,
    rotary: RotaryParams,
) -> Result<HopperParams> {
    Ok(HopperParams { attention, rotary, v_head_size: value_size(p)?, reserved: 0 })
}

/// The tables of cosines and sines, if the kernel rotates queries.
pub(super) fn tables(p: &Problem, turns: bool) -> [(&'static str, Arg); 2] {
    let table = |id| if turns { tensor(p, id, 0) } else { Arg::Null };
    [("cos", table(TensorId::CosCache)), ("sin", table(TensorId::SinCache))]
}

/// Tensor maps of K and V.
pub(super) fn key_maps(
    p: &Problem,
    params: &AttentionParams,
    rows: &Rows,
    entry: &Entry,
) -> Result<[Arg; 2]> {
    let AttentionParams { head_size, capacity, kv_heads, batch, .. } = *params;
    let map = |arg, strides, size| {
        tensor_map(p, arg, strides, [size, capacity, kv_heads, batch], entry.keys)
    };
    let [k, v] = rows.attended;
    Ok([map(k, params.k, head_size), map(v, params.v, value_size(p)?)])
}

/// All arguments of `hopper`, with the tensor maps of K and V.
pub(super) fn arguments(
    p: &Problem,
    params: &AttentionParams,
    rows: &Rows,
    counter: Arg,
    [k, v]: [Arg; 2],
) -> Vec<(&'static str, Arg)> {
    let AttentionParams { head_size, q_len, q_heads, batch, .. } = *params;
    let queries = [head_size, q_len, q_heads, batch];
    let tensor = |id| tensor(p, id, 0);
    let mut arguments = vec![
        ("q", tensor_map(p, rows.query.arg, params.q, queries, hopper::QUERY_BOX)),
        ("k", k),
        ("v", v),
        ("head_sink", tensor(TensorId::HeadSink)),
        ("lse", tensor(TensorId::Lse)),
        ("counter", counter),
    ];
    arguments.extend(seqlens(p));
    arguments.extend(output(p));
    arguments
}

/// The tensor map of a (batch, head, row) tensor; a box has rows of one head.
pub(super) fn tensor_map(
    p: &Problem,
    arg: Arg,
    strides: Strides,
    size: [u32; 4],
    tile_rows: u32,
) -> Arg {
    let stride = [strides.row, strides.head, strides.batch];
    boxes(p, arg, stride, size, [tile_rows, 1])
}

/// The tensor map of a tensor with these strides in elements.
pub(super) fn boxes(
    p: &Problem,
    arg: Arg,
    stride: [u64; 3],
    size: [u32; 4],
    tile: [u32; 2],
) -> Arg {
    let element = p.dtype.size();
    let (id, offset) = match arg {
        Arg::Tensor { id, offset } => (Some(id), offset),
        Arg::Workspace { offset, .. } => (None, offset),
        Arg::Null | Arg::Counters { .. } | Arg::Map(_) => return arg,
    };
    let last: u64 = (1..4).map(|i| u64::from(size[i] - 1) * stride[i - 1]).sum();
    let bytes = (last as usize + size[0] as usize) * element;
    let stride = stride.map(|elements| elements * element as u64);
    Arg::Map(TensorMap { id, offset, bytes, size, stride, tile })
}
