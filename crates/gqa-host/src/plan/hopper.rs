//! The Hopper family: which calls it suits, with which tiles, in how many parts of the keys, and its launches.

use super::attention::{Crew, Task};
use super::decision::Rejection;
use super::launch::{launch, tensor, u32_of};
use super::params::{bias_or_mask, masked_params, output, params};
use super::prologue::{Rows, rotary_params};
use super::switches::Switches;
use super::{Arg, DeviceInfo, Launch, TensorId, TensorMap};
use crate::{Error, Problem, Result, Rotary};
use bytemuck::Zeroable;
use gqa_kernels::attention::hopper;
use gqa_kernels::params::{
    AttentionParams, HopperParams, MaskedParams, PagedHopperParams, Strides, vectors,
};
use gqa_kernels::registry::{Entry, Family, entries};

/// The compute capability that the family is made for, times ten.
const SM: u32 = 90;

/// Keys of a tile at most, but for those of head size 128 for many keys.
pub(super) const SHORT_TILE: u32 = 128;

/// Query rows from which a tile of 64 rows or more per query head pays, however many sequences there are.
const LEAST_ROWS: usize = 64;

/// Whether the call has rows, and the device instructions, for the family.
pub(super) fn may_take(p: &Problem, device: &DeviceInfo) -> bool {
    device.sm == SM && p.q_len >= LEAST_ROWS
}

/// Whether larger tiles pay: a border between work tiles costs more with them, a key that all rows see less (measured, too).
pub(super) fn sees_many_keys(p: &Problem) -> bool {
    const MANY: usize = 8192;
    !p.causal && p.window.is_none() && p.softcap.is_none() && p.total_len >= MANY
}

/// Whether a kernel can rotate queries: those of two warpgroups have registers for it.
pub(super) fn rotates(entry: &Entry) -> bool {
    entry.family == Family::Hopper && entry.arguments.contains(&"cos")
}

/// Whether it is a rotation that these kernels know: by positions that are not given, and tables whose elements they can count in 32 bits.
pub(super) fn knows(rotary: Rotary) -> bool {
    let elements = rotary.max_positions.saturating_mul(rotary.dim / 2);
    rotary.explicit.is_none() && u32::try_from(elements).is_ok()
}

/// Whether a kernel takes parts of the keys.
pub(super) fn is_split(entry: &Entry) -> bool {
    entry.kernel().starts_with("hopper_split")
}

/// Why `tiled` does better, or must do.
pub(super) fn suits(
    p: &Problem,
    entry: &Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<(), Rejection> {
    can_do(p, device)?;
    let forced = switches.force.is_some();
    if p.q_len < LEAST_ROWS && !forced && !mostly_empty_tiles_pay(p, entry, device) {
        return Err(Rejection::FewRows { got: p.q_len, min: LEAST_ROWS });
    }
    Ok(())
}

/// Why rows must be gathered from their blocks, or why attention over gathered ones does better.
pub(super) fn suits_pages(
    p: &Problem,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<(), Rejection> {
    can_do(p, device)?;
    if !p.rotary.is_none_or(knows) {
        return Err(Rejection::TooLarge);
    }
    let forced = switches.force.is_some();
    if p.q_len < LEAST_ROWS && !forced && !reading_often_pays(p, device) {
        return Err(Rejection::FewRows { got: p.q_len, min: LEAST_ROWS });
    }
    Ok(())
}

/// Whether each query head reads its keys sooner for itself than they are gathered and read once by their group.
fn reading_often_pays(p: &Problem, device: &DeviceInfo) -> bool {
    /// Time of all multiprocessors to gather a KV head's key and to read it then, in that of one of them for a key of `hopper`.
    const GATHER_TIME: usize = 6;
    let multiprocessors = (device.multiprocessors as usize).max(1);
    let waves = p.q_heads.saturating_mul(p.batch).div_ceil(multiprocessors);
    waves * multiprocessors < GATHER_TIME.saturating_mul(p.kv_heads * p.batch)
}

/// Whether it is a device and a call of the family's.
fn can_do(p: &Problem, device: &DeviceInfo) -> Result<(), Rejection> {
    if device.sm != SM {
        return Err(Rejection::Architecture { have: device.sm, need: SM });
    }
    if p.scale <= 0.0 {
        return Err(Rejection::Scale { got: p.scale });
    }
    // It takes tanh(x) as 1 - 2 / (1 + e^2x), which is off by 2.4e-7 near 0, and scores by as much of the softcap.
    const MAX_SOFTCAP: f32 = 1000.0;
    if p.softcap_in_f32() > MAX_SOFTCAP {
        return Err(Rejection::Softcap { got: p.softcap_in_f32(), max: MAX_SOFTCAP });
    }
    Ok(())
}

/// Whether tiles of few rows of one query head each are done before the fuller tiles of `tiled`, which hold a KV head's rows together: where
/// multiprocessors would be idle otherwise. `docs/perf-log.md` has the figures.
fn mostly_empty_tiles_pay(p: &Problem, entry: &Entry, device: &DeviceInfo) -> bool {
    /// Time of a block of `tiled` for a key, in that of a block of `hopper`.
    const TILED_TIME: usize = 3;
    /// Rows of a tile of `tiled`, and tiles on a multiprocessor at a time.
    const TILED: (usize, usize) = (64, 2);
    let multiprocessors = (device.multiprocessors as usize).max(1);
    let waves = |heads: usize, rows: usize, tile: usize, at_a_time: usize| {
        let tiles = heads.saturating_mul(p.batch).saturating_mul(rows.div_ceil(tile));
        tiles.div_ceil(at_a_time * multiprocessors)
    };
    let rows = p.packed_rows();
    let tiled = waves(p.kv_heads, rows, TILED.0, TILED.1);
    waves(p.q_heads, p.q_len, entry.rows as usize, 1) < TILED_TIME.saturating_mul(tiled)
}

/// The kernel for parts of the keys, and how many, where they pay instead of `entry` for the whole, or where their f32 is wanted, if only of one.
/// GQA_SPLITS and GQA_FORCE know better than the heuristic.
pub(super) fn parts(
    p: &Problem,
    entry: &'static Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Option<(&'static Entry, u32)> {
    let fits = |parts: &&Entry| {
        let holds = parts.head_size as usize >= p.head_size;
        is_split(parts) && parts.dtype == entry.dtype && holds
    };
    let parts = entries().filter(fits).min_by_key(|parts| parts.head_size);
    let splits = |parts: &Entry| {
        let params = params(p, Strides::zeroed(), 1).ok()?;
        let keys = p.most_keys();
        let best = hopper::splits(&params, parts.rows, parts.keys, keys, device.multiprocessors);
        // Forced, it takes parts however few pay.
        let least = if switches.force == Some(parts.name) { 2 } else { 1 };
        Some(switches.splits.unwrap_or(best).max(least))
    };
    let parts = parts.filter(|parts| switches.force.is_none_or(|forced| forced == parts.name));
    let chosen = parts.and_then(|entry| Some((entry, splits(entry)?)));
    chosen.filter(|(_, splits)| *splits > 1 || p.widens_output())
}

/// `hopper` with the whole keys, which rotates queries or finds them rotated.
pub(super) fn whole_launch(
    p: &Problem,
    device: &DeviceInfo,
    entry: &'static Entry,
    rows: &Rows,
    turns: bool,
    counter: Arg,
) -> Result<Launch> {
    let mut attention = params(p, rows.query.strides, 1)?;
    attention.section = hopper::section(&attention, device.l2_bytes);
    let grid = hopper::grid(&attention, entry.rows, device.multiprocessors);
    let mut arguments = arguments(p, &attention, rows, counter, entry);
    if !rotates(entry) {
        return launch(entry, grid, &arguments, &attention);
    }
    let table = |id| if turns { tensor(p, id, 0) } else { Arg::Null };
    arguments.extend([("cos", table(TensorId::CosCache)), ("sin", table(TensorId::SinCache))]);
    let rotary = rotary_params(p.rotary.filter(|_| turns), 0)?;
    launch(entry, grid, &arguments, &HopperParams { attention, rotary })
}

/// `hopper_paged`, which rotates queries if anything does: to it the tokens of all sequences are one batch entry. It leaves out sequences with fewer
/// tokens than are the task's.
pub(super) fn paged_launch(
    p: &Problem,
    device: &DeviceInfo,
    entry: &'static Entry,
    rows: &Rows,
    task: Task,
    counter: Arg,
) -> Result<Launch> {
    let pages = p.pages.ok_or_else(|| Error::NoKernel("the cache has no blocks".to_owned()))?;
    let attention = params(p, rows.query.strides, 1)?;
    let row = u64::from(attention.kv_heads) * u64::from(attention.head_size);
    let cache =
        Strides { row, head: attention.head_size.into(), batch: row * pages.block_size as u64 };
    let out = Strides { batch: 0, ..attention.out };
    let mut attention = AttentionParams { k: cache, v: cache, out, ..attention };
    attention.section =
        hopper::section(&AttentionParams { batch: 1, ..attention }, device.l2_bytes);
    let params = PagedHopperParams {
        hopper: HopperParams { attention, rotary: rotary_params(p.rotary, 0)? },
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.per_sequence)?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        least: u32_of("tokens", task.least)?,
        leaders: 0,
        helpers: 0,
        helps: 0,
    };
    let grid = hopper::paged_grid(&params, entry.rows, device.multiprocessors);
    let all = Crew { leaders: grid[0], helpers: 0, helps: false };
    let Crew { leaders, helpers, helps } = task.crew.unwrap_or(all);
    // Who leads begins with a work tile.
    let leaders = leaders.min(grid[0]);
    let params = PagedHopperParams { leaders, helpers, helps: helps.into(), ..params };
    let blocks = if helps { helpers } else { leaders };
    let AttentionParams { head_size, q_heads, kv_heads, .. } = attention;
    let block_size = u32_of("rows of a block", pages.block_size)?;
    let queries = [head_size, params.tokens, q_heads, 1];
    let keys = [head_size, block_size, kv_heads, params.blocks];
    let box_rows = hopper::box_rows(block_size, entry.keys);
    let [k, v] = rows.attended.map(|arg| tensor_map(p, arg, cache, keys, box_rows));
    let tensor = |id| tensor(p, id, 0);
    let arguments = [
        ("q", tensor_map(p, rows.query.arg, attention.q, queries, hopper::QUERY_BOX)),
        ("k", k),
        ("v", v),
        ("cos", tensor(TensorId::CosCache)),
        ("sin", tensor(TensorId::SinCache)),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("head_sink", tensor(TensorId::HeadSink)),
        output(p)[0],
        ("counter", counter),
    ];
    let aside = task.crew.is_some() && !helps;
    Ok(Launch { aside, ..launch(entry, [blocks, 1, 1], &arguments, &params)? })
}

/// `hopper_masked`.
pub(super) fn masked_launch(
    p: &Problem,
    device: &DeviceInfo,
    entry: &'static Entry,
    rows: &Rows,
    counter: Arg,
) -> Result<Launch> {
    let mut params = masked_params(p, rows.query.strides)?;
    params.attention.section = hopper::section(&params.attention, device.l2_bytes);
    let grid = hopper::grid(&params.attention, entry.rows, device.multiprocessors);
    let mut arguments = arguments(p, &params.attention, rows, counter, entry);
    arguments.extend(bias_or_mask(p));
    arguments.push(("tiles", mask_map(p, &params, entry).unwrap_or(arguments[0].1)));
    launch(entry, grid, &arguments, &params)
}

/// Everything `hopper` asks for: tensor maps of what it reads by tiles.
pub(super) fn arguments(
    p: &Problem,
    params: &AttentionParams,
    rows: &Rows,
    counter: Arg,
    entry: &Entry,
) -> Vec<(&'static str, Arg)> {
    let AttentionParams { q_len, q_heads, kv_heads, capacity, .. } = *params;
    let map = |arg, strides, rows, heads, tile_rows| {
        tensor_map(p, arg, strides, [params.head_size, rows, heads, params.batch], tile_rows)
    };
    let tensor = |id| tensor(p, id, 0);
    let [k, v] = rows.attended;
    let [out, out_f32] = output(p);
    vec![
        ("q", map(rows.query.arg, params.q, q_len, q_heads, hopper::QUERY_BOX)),
        ("k", map(k, params.k, capacity, kv_heads, entry.keys)),
        ("v", map(v, params.v, capacity, kv_heads, entry.keys)),
        ("seqlens_k", tensor(TensorId::SeqlensK)),
        ("head_sink", tensor(TensorId::HeadSink)),
        out,
        out_f32,
        ("lse", tensor(TensorId::Lse)),
        ("counter", counter),
    ]
}

/// The map of a bias or mask in words of 16 bits, if its rows are vectors. What is the same for all has one entry, whatever its stride.
fn mask_map(p: &Problem, params: &MaskedParams, entry: &Entry) -> Option<Arg> {
    let (bias, shape) = p.bias.zip(p.bias_shape())?;
    if params.vectors & vectors::MASK == 0 {
        return None;
    }
    let columns = if bias.boolean { shape[3] / 2 } else { shape[3] };
    let [batch, heads, rows, columns] =
        [shape[0], shape[1], shape[2], columns].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let row = u64::from(columns);
    let head = row * u64::from(rows);
    let strides = Strides { row, head, batch: head * u64::from(heads) };
    let arg = tensor(p, TensorId::AttentionBias, 0);
    Some(tensor_map(p, arg, strides, [columns, rows, heads, batch], entry.rows))
}

/// The map of a (batch, head, row) tensor.
pub(super) fn tensor_map(
    p: &Problem,
    arg: Arg,
    strides: Strides,
    size: [u32; 4],
    tile_rows: u32,
) -> Arg {
    let element = p.dtype.size();
    let (id, offset) = match arg {
        Arg::Tensor { id, offset } => (Some(id), offset),
        Arg::Workspace { offset, .. } => (None, offset),
        Arg::Null | Arg::Counters { .. } | Arg::Map(_) => return arg,
    };
    let stride = [strides.row, strides.head, strides.batch];
    let last: u64 = (1..4).map(|i| u64::from(size[i] - 1) * stride[i - 1]).sum();
    let bytes = (last as usize + size[0] as usize) * element;
    let stride = stride.map(|elements| elements * element as u64);
    Arg::Map(TensorMap { id, offset, bytes, size, stride, tile_rows })
}
