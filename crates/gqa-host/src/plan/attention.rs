//! The cascade: flash attention over parts of the keys, flash attention, memory-efficient attention, attention with all scores in
//! memory.

use super::decision::{Candidate, Decision, Rejection};
use super::decode::{self, Clusters};
use super::launch::{Operand, Scratch, element, launch, strides, tensor, u32_of};
use super::prologue::rotary_params;
use super::switches::Switches;
use super::{Arg, DeviceInfo, Launch, TensorId, TensorMap};
use crate::{Alignment, Bias, Error, Phase, Problem, QkOutput, Result, Rotary, Sink};
use bytemuck::Zeroable;
use gqa_kernels::attention::{combine, general, hopper, split_kv, tiled, tiled_wide, unfused};
use gqa_kernels::params::{
    AttentionParams, HopperParams, MaskedParams, Strides, alignment, qk_output, sink, vectors,
};
use gqa_kernels::registry::{Entry, Family, entries, find};

/// Attention's kernel, and how many parts the keys are cut into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    candidate: Candidate,
    entry: &'static Entry,
    parts: Parts,
}

/// How a kernel shares the keys of a row tile among blocks.
#[derive(Clone, Copy, Debug)]
enum Parts {
    Splits(u32),
    Clusters(Clusters),
}

impl Choice {
    /// Whether the kernel needs no launches before it.
    pub(super) fn takes_new_rows(&self, p: &Problem, fused: bool) -> bool {
        matches!(self.parts, Parts::Clusters(_)) && decode::is_fused(p, fused)
    }

    /// Whether the kernel rotates queries that it finds as they are given.
    pub(super) fn rotates_queries(&self, p: &Problem, fused: bool) -> bool {
        fused && rotates(self.entry) && p.rotary.is_some_and(is_simple)
    }
}

/// Asks every candidate in turn and takes the first that can do the call.
pub(super) fn choose(
    p: &Problem,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<(Choice, Vec<Decision>)> {
    let mut chosen: Option<Choice> = None;
    let mut decisions = Vec::new();
    for candidate in Candidate::ALL {
        let outcome = match chosen {
            Some(_) => Err(Rejection::Outranked),
            None => consider(candidate, p, device, switches),
        };
        if let Ok(choice) = outcome {
            chosen = Some(choice);
        }
        decisions.push(Decision { candidate, outcome: outcome.map(|choice| choice.entry) });
    }
    match chosen {
        Some(choice) => Ok((choice, decisions)),
        None => Err(Error::NoKernel(refusals(&decisions))),
    }
}

fn refusals(decisions: &[Decision]) -> String {
    let refusal = |decision: &Decision| {
        let reason = decision.outcome.as_ref().err().map(ToString::to_string).unwrap_or_default();
        format!("{} {reason}", decision.candidate.name())
    };
    decisions.iter().map(refusal).collect::<Vec<_>>().join("; ")
}

/// The candidate's kernel for the call, or the first reason against it.
fn consider(
    candidate: Candidate,
    p: &Problem,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<Choice, Rejection> {
    if let Some(switch) = candidate.disabled_by(switches) {
        return Err(Rejection::Disabled { switch });
    }
    let forced = forced(switches);
    if let Some(forced) = forced.filter(|forced| forced.family != candidate.family()) {
        return Err(Rejection::NotForced { forced: forced.name });
    }
    takes_values(p)?;
    match candidate {
        Candidate::Unfused => {}
        Candidate::General => takes_scores(p)?,
        Candidate::HopperMasked | Candidate::TiledMasked => suits_masked_flash(p)?,
        Candidate::Decode
        | Candidate::SplitKv
        | Candidate::Hopper
        | Candidate::Tiled
        | Candidate::TiledF32
        | Candidate::TiledWide => suits_flash(p)?,
    }
    if candidate == Candidate::Decode {
        let entry = decode::entry(p, device, forced)?;
        let (entry, clusters) = decode::clusters(p, entry, device, switches)?;
        return Ok(Choice { candidate, entry, parts: Parts::Clusters(clusters) });
    }
    let entry = kernel(candidate, p, device, forced)?;
    let splits = match candidate {
        Candidate::SplitKv => splits(p, entry, device, switches)?,
        Candidate::TiledWide => wide_splits(p, entry, device, switches)?,
        Candidate::Hopper | Candidate::HopperMasked => {
            suits_hopper(p, entry, device, switches)?;
            if candidate == Candidate::Hopper {
                return Ok(hopper_choice(p, entry, device, switches));
            }
            1
        }
        Candidate::Decode
        | Candidate::Tiled
        | Candidate::TiledMasked
        | Candidate::TiledF32
        | Candidate::General
        | Candidate::Unfused => 1,
    };
    Ok(Choice { candidate, entry, parts: Parts::Splits(splits) })
}

impl Candidate {
    const fn family(self) -> Family {
        match self {
            Self::Decode => Family::Decode,
            Self::SplitKv => Family::SplitKv,
            Self::Hopper => Family::Hopper,
            Self::HopperMasked => Family::HopperMasked,
            Self::Tiled => Family::Tiled,
            Self::TiledMasked => Family::TiledMasked,
            Self::TiledF32 => Family::TiledF32,
            Self::TiledWide => Family::TiledWide,
            Self::General => Family::General,
            Self::Unfused => Family::Unfused,
        }
    }

    fn disabled_by(self, switches: &Switches) -> Option<&'static str> {
        let by = |on: bool, name| on.then_some(name);
        match self {
            Self::Unfused => None,
            Self::General => by(
                switches.disable_memory_efficient_attention,
                "GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION",
            ),
            Self::Hopper
            | Self::HopperMasked
            | Self::Tiled
            | Self::TiledMasked
            | Self::TiledF32
            | Self::TiledWide => {
                by(switches.disable_flash_attention, "GQA_DISABLE_FLASH_ATTENTION")
            }
            Self::Decode | Self::SplitKv => {
                by(switches.disable_flash_attention, "GQA_DISABLE_FLASH_ATTENTION")
                    .or(by(switches.disable_flash_decode, "GQA_DISABLE_FLASH_DECODE"))
            }
        }
    }
}

/// The attention kernel that GQA_FORCE names.
fn forced(switches: &Switches) -> Option<&'static Entry> {
    switches.force.and_then(find).filter(|entry| entry.family != Family::Prologue)
}

/// No kernel mixes element types.
fn takes_values(p: &Problem) -> Result<(), Rejection> {
    match p.v_dtype == p.dtype {
        true => Ok(()),
        false => Err(Rejection::Values { dtype: p.v_dtype, size: p.v_head_size }),
    }
}

/// Memory-efficient attention has scores after the mask only.
fn takes_scores(p: &Problem) -> Result<(), Rejection> {
    match p.output_qk {
        QkOutput::None | QkOutput::BeforeSoftmax | QkOutput::AfterSoftmax => Ok(()),
        QkOutput::Scaled | QkOutput::Capped | QkOutput::Biased => {
            Err(Rejection::Argument { name: "qk_matmul_output in modes 0 to 2" })
        }
    }
}

/// What has no place for a bias, or is for nothing else.
fn suits_flash(p: &Problem) -> Result<(), Rejection> {
    match p.bias {
        None => suits_any_flash(p),
        Some(_) => Err(Rejection::Argument { name: "attention_bias" }),
    }
}

fn suits_masked_flash(p: &Problem) -> Result<(), Rejection> {
    /// Columns of a mask whose tiles are counted in 32 bits.
    const COLUMNS: usize = 1 << 24;
    match p.bias {
        Some(bias) if bias.columns > COLUMNS => Err(Rejection::TooLarge),
        Some(_) => suits_any_flash(p),
        None => Err(Rejection::NoMask),
    }
}

/// Flash attention knows no score outputs, and only GroupQueryAttention's positions, windows and head sizes.
fn suits_any_flash(p: &Problem) -> Result<(), Rejection> {
    if p.output_qk != QkOutput::None {
        return Err(Rejection::Argument { name: "output_qk" });
    }
    if p.v_head_size != p.head_size {
        return Err(Rejection::Values { dtype: p.v_dtype, size: p.v_head_size });
    }
    if p.head_size % 8 != 0 {
        return Err(Rejection::Vectors { got: p.head_size });
    }
    if p.right_window.is_some() || p.window.is_some() && !p.causal {
        return Err(Rejection::Window);
    }
    match p.alignment {
        Alignment::Phase => Ok(()),
        got => Err(Rejection::Alignment { got }),
    }
}

/// The candidate's entry with the smallest tile that holds the call's heads, and among those the one whose rows suit it.
fn kernel(
    candidate: Candidate,
    p: &Problem,
    device: &DeviceInfo,
    forced: Option<&'static Entry>,
) -> Result<&'static Entry, Rejection> {
    let mine = entries().filter(|entry| entry.family == candidate.family() && leads(entry));
    let mine = mine
        .filter(|entry| forced.is_none_or(|forced| forced.name == entry.name || !leads(forced)));
    let typed: Vec<_> = mine.filter(|entry| element(p.dtype) == Some(entry.dtype)).collect();
    let max = typed
        .iter()
        .map(|entry| entry.head_size)
        .max()
        .ok_or(Rejection::ElementType { got: p.dtype })?;
    let large_enough = typed
        .into_iter()
        .filter(|entry| entry.head_size as usize >= p.head_size.max(p.v_head_size));
    let smallest = large_enough.min_by(|a, b| {
        let suited = || unsuited(a, p, device).cmp(&unsuited(b, p, device));
        a.head_size.cmp(&b.head_size).then_with(suited)
    });
    let entry = smallest.ok_or(Rejection::HeadSize { got: p.head_size, max })?;
    if entry.min_sm > device.sm {
        return Err(Rejection::ComputeCapability { have: device.sm, need: entry.min_sm });
    }
    if entry.shared_bytes > device.shared_bytes {
        return Err(Rejection::SharedMemory {
            have: device.shared_bytes,
            need: entry.shared_bytes,
        });
    }
    Ok(entry)
}

/// What tells two shapes for one head size apart: the smaller, the better the entry suits the call.
fn unsuited(entry: &Entry, p: &Problem, device: &DeviceInfo) -> [usize; 4] {
    if entry.family == Family::TiledWide {
        // One that fits, with as few tiles of the rows as there can be, as few rows to a tile, and as many keys.
        let (rows, keys) = (entry.rows as usize, entry.keys as usize);
        let fits = entry.shared_bytes <= device.shared_bytes;
        let tiles = p.q_len.saturating_mul(p.group()).div_ceil(rows);
        return [(!fits).into(), tiles, rows, usize::MAX - keys];
    }
    // At head size 64 `hopper` sums rounded weights, which is too coarse for a log-sum-exp, and has a slower kernel that does not.
    let other = entry.name.ends_with("_lse") != p.lse;
    let wrong_length = (entry.keys > SHORT_TILE) != sees_many_keys(p);
    // Queries that a launch before must rotate cost as much as some more scores each (measured, too).
    const ROTATION: usize = 60;
    let launch_rotates = p.rotary.is_some_and(is_simple) && !rotates(entry);
    let rotation = if launch_rotates { p.q_len * ROTATION } else { 0 };
    [other.into(), wrong_length.into(), work(entry, p) + rotation, 0]
}

/// Keys of `hopper`'s tiles at most, but for those of head size 128 for many keys.
const SHORT_TILE: u32 = 128;

/// Whether larger tiles pay: a border between work tiles costs more with them, a key that all rows see less (measured, too).
fn sees_many_keys(p: &Problem) -> bool {
    const MANY: usize = 8192;
    !p.causal && p.window.is_none() && p.softcap.is_none() && p.total_len >= MANY
}

/// The scores that an entry computes for one sequence, in whole tiles. A tile costs as much as one of about 60 rows more (measured: `docs/perf-log.md`).
fn work(entry: &Entry, p: &Problem) -> usize {
    const OVERHEAD: usize = 60;
    let (rows, keys) = (entry.rows.max(1) as usize, entry.keys.max(1) as usize);
    let past = p.total_len.saturating_sub(p.q_len);
    let tiles = |tile: usize| {
        let first = past + tile * rows;
        let end = if p.causal { (first + rows).min(p.total_len) } else { p.total_len };
        let begin = p.window.map_or(0, |window| (first + 1).saturating_sub(window));
        end.div_ceil(keys).saturating_sub(begin / keys)
    };
    (0..p.q_len.div_ceil(rows)).map(|tile| tiles(tile) * keys * (rows + OVERHEAD)).sum()
}

/// The merge belongs to the family of `split_kv` and is never launched alone.
fn is_combine(entry: &Entry) -> bool {
    entry.kernel().starts_with("combine")
}

/// Whether a kernel of `hopper` can rotate queries: those of two warpgroups have registers for it.
fn rotates(entry: &Entry) -> bool {
    entry.family == Family::Hopper && entry.arguments.contains(&"cos")
}

/// The rotation that `hopper` knows: half-split, by positions that are not given, and tables whose elements it can count in 32 bits.
fn is_simple(rotary: Rotary) -> bool {
    let elements = rotary.max_positions.saturating_mul(rotary.dim / 2);
    !rotary.interleaved && rotary.explicit.is_none() && u32::try_from(elements).is_ok()
}

fn is_hopper_split(entry: &Entry) -> bool {
    entry.kernel().starts_with("hopper_split")
}

/// Whether a kernel is its family's first: the merge of parts and the later unfused ones are never launched alone, and whether `hopper` takes
/// parts is decided after `hopper`.
fn leads(entry: &Entry) -> bool {
    !is_combine(entry)
        && !is_hopper_split(entry)
        && !matches!(entry.kernel(), "unfused_softmax" | "unfused_values")
}

/// Packed query rows up to which reading K and V once per 16 rows costs less than filling a tile of [`tiled`] with few rows.
const FEW_ROWS: u32 = 64;

/// Query rows from which a tile of 64 rows or more per query head pays, however many sequences there are.
const HOPPER_ROWS: usize = 64;

/// Why [`tiled`] does better, or must do.
fn suits_hopper(
    p: &Problem,
    entry: &Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<(), Rejection> {
    const SM: u32 = 90;
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
    let forced = switches.force.is_some();
    if p.q_len < HOPPER_ROWS && !forced && !mostly_empty_tiles_pay(p, entry, device) {
        return Err(Rejection::FewRows { got: p.q_len, min: HOPPER_ROWS });
    }
    Ok(())
}

/// Whether tiles of few rows of one query head each are done before the fuller tiles of [`tiled`], which hold a KV head's rows together: where
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
    let rows = p.q_len.saturating_mul(p.group());
    let tiled = waves(p.kv_heads, rows, TILED.0, TILED.1);
    waves(p.q_heads, p.q_len, entry.rows as usize, 1) < TILED_TIME.saturating_mul(tiled)
}

/// `hopper` with the whole keys, or its kernel for parts of them. GQA_SPLITS and GQA_FORCE know better than the heuristic.
fn hopper_choice(
    p: &Problem,
    entry: &'static Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Choice {
    let fits = |parts: &&Entry| {
        let holds = parts.head_size as usize >= p.head_size;
        is_hopper_split(parts) && parts.dtype == entry.dtype && holds
    };
    let parts = entries().filter(fits).min_by_key(|parts| parts.head_size);
    let splits = |parts: &Entry| {
        let params = params(p, Strides::zeroed(), 1).ok()?;
        let keys = u32::try_from(p.total_len).unwrap_or(u32::MAX);
        let best = hopper::splits(&params, parts.rows, parts.keys, keys, device.multiprocessors);
        // Forced, it takes parts however few pay.
        let least = if switches.force == Some(parts.name) { 2 } else { 1 };
        Some(switches.splits.unwrap_or(best).max(least))
    };
    let whole = Choice { candidate: Candidate::Hopper, entry, parts: Parts::Splits(1) };
    let parts = parts.filter(|parts| switches.force.is_none_or(|forced| forced == parts.name));
    match parts.and_then(|entry| Some((entry, splits(entry)?))) {
        Some((entry, splits)) if splits > 1 => {
            Choice { entry, parts: Parts::Splits(splits), ..whole }
        }
        _ => whole,
    }
}

/// Parts of the keys for `split_kv`, or why [`tiled`] does better. GQA_SPLITS and GQA_FORCE know better than this.
fn splits(
    p: &Problem,
    entry: &Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<u32, Rejection> {
    if let Some(splits) = switches.splits {
        return Ok(splits);
    }
    let rows = p.q_len.saturating_mul(p.group());
    let forced = switches.force.is_some();
    if rows > FEW_ROWS as usize && !forced {
        return Err(Rejection::Rows { got: rows, max: FEW_ROWS });
    }
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::OneSplit)?;
    let keys = u32::try_from(p.total_len).unwrap_or(u32::MAX);
    let splits = split_kv::splits(&params, keys, device.multiprocessors);
    // Two row tiles that read the keys each for itself still do.
    if splits == 1 && rows > 2 * entry.rows as usize && !forced {
        return Err(Rejection::OneSplit);
    }
    Ok(splits)
}

/// Parts of the keys for `tiled_wide`. GQA_SPLITS knows better than this.
fn wide_splits(
    p: &Problem,
    entry: &Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<u32, Rejection> {
    if let Some(splits) = switches.splits {
        return Ok(splits);
    }
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::TooLarge)?;
    let keys = u32::try_from(p.total_len).unwrap_or(u32::MAX);
    Ok(tiled_wide::splits(&params, entry.rows, entry.keys, keys, device.multiprocessors))
}

/// Blocks of the merge per multiprocessor: more only wait.
const WAVES: u32 = 16;

/// The launches of the choice; K and V are in the present cache.
pub(super) fn launches(
    p: &Problem,
    device: &DeviceInfo,
    choice: &Choice,
    query: Operand,
    fused: bool,
    scratch: &mut Scratch,
) -> Result<Vec<Launch>> {
    let Choice { candidate, entry, parts } = *choice;
    let splits = match parts {
        Parts::Splits(splits) => splits,
        Parts::Clusters(clusters) => {
            return decode::launches(p, device, entry, clusters, query, fused, scratch);
        }
    };
    match candidate {
        Candidate::General => return general_launch(p, entry, query).map(|launch| vec![launch]),
        Candidate::Unfused => return unfused_launches(p, entry, query, scratch),
        Candidate::HopperMasked => {
            return hopper_masked_launch(p, device, entry, query, scratch.count(1))
                .map(|launch| vec![launch]);
        }
        Candidate::TiledMasked => {
            let params = masked_params(p, query.strides)?;
            let grid = tiled::grid(&params.attention, entry.rows);
            return Ok(vec![launch(entry, grid, &arguments(p, query.arg), &params)?]);
        }
        Candidate::Hopper if splits == 1 => {
            let turns = choice.rotates_queries(p, fused);
            return hopper_launch(p, device, entry, query, turns, scratch.count(1))
                .map(|launch| vec![launch]);
        }
        Candidate::Decode
        | Candidate::SplitKv
        | Candidate::Hopper
        | Candidate::Tiled
        | Candidate::TiledF32
        | Candidate::TiledWide => {}
    }
    let mut params = params(p, query.strides, splits)?;
    params.section = hopper::section(&params, device.l2_bytes);
    let mut arguments = if candidate == Candidate::Hopper {
        let counter = scratch.count(1);
        hopper_arguments(p, &params, query.arg, counter, entry)
    } else {
        arguments(p, query.arg)
    };
    let grid = match candidate {
        Candidate::SplitKv => split_kv::grid(&params),
        Candidate::Hopper => hopper::grid(&params, entry.rows, device.multiprocessors),
        Candidate::TiledWide => tiled_wide::grid(&params, entry.rows),
        _ => tiled::grid(&params, entry.rows),
    };
    if splits > 1 {
        let (out, lse) = split_kv::partial_elements(&params);
        arguments.push(("partial_out", scratch.take(out, size_of::<f32>())?));
        arguments.push(("partial_lse", scratch.take(lse, size_of::<f32>())?));
    } else {
        arguments.extend([("partial_out", Arg::Null), ("partial_lse", Arg::Null)]);
    }
    let mut launches = vec![launch(entry, grid, &arguments, &params)?];
    if splits > 1 {
        let combine = later("combine", p, |other| is_combine(other) && other.dtype == entry.dtype)?;
        let grid = combine::grid(&params, device.multiprocessors * WAVES);
        launches.push(launch(combine, grid, &arguments, &params)?);
    }
    Ok(launches)
}

/// A kernel that is not the first of its family.
fn later(name: &str, p: &Problem, is_it: impl Fn(&Entry) -> bool) -> Result<&'static Entry> {
    let found = entries().find(|entry| is_it(entry));
    found.ok_or_else(|| Error::NoKernel(format!("{name} has no kernel for {}", p.dtype)))
}

fn general_launch(p: &Problem, entry: &'static Entry, query: Operand) -> Result<Launch> {
    let params = masked_params(p, query.strides)?;
    launch(entry, general::grid(&params.attention), &arguments(p, query.arg), &params)
}

/// `hopper` with the whole keys, which rotates queries or finds them rotated.
fn hopper_launch(
    p: &Problem,
    device: &DeviceInfo,
    entry: &'static Entry,
    query: Operand,
    turns: bool,
    counter: Arg,
) -> Result<Launch> {
    let mut attention = params(p, query.strides, 1)?;
    attention.section = hopper::section(&attention, device.l2_bytes);
    let grid = hopper::grid(&attention, entry.rows, device.multiprocessors);
    let mut arguments = hopper_arguments(p, &attention, query.arg, counter, entry);
    if !rotates(entry) {
        return launch(entry, grid, &arguments, &attention);
    }
    let table = |id| if turns { tensor(p, id, 0) } else { Arg::Null };
    arguments.extend([("cos", table(TensorId::CosCache)), ("sin", table(TensorId::SinCache))]);
    let rotary = rotary_params(p.rotary.filter(|_| turns), 0)?;
    launch(entry, grid, &arguments, &HopperParams { attention, rotary })
}

fn hopper_masked_launch(
    p: &Problem,
    device: &DeviceInfo,
    entry: &'static Entry,
    query: Operand,
    counter: Arg,
) -> Result<Launch> {
    let mut params = masked_params(p, query.strides)?;
    params.attention.section = hopper::section(&params.attention, device.l2_bytes);
    let grid = hopper::grid(&params.attention, entry.rows, device.multiprocessors);
    let mut arguments = hopper_arguments(p, &params.attention, query.arg, counter, entry);
    arguments.extend(bias_or_mask(p));
    arguments.push(("tiles", mask_map(p, &params, entry).unwrap_or(arguments[0].1)));
    launch(entry, grid, &arguments, &params)
}

/// Scores, softmax, and the weighted values.
fn unfused_launches(
    p: &Problem,
    entry: &'static Entry,
    query: Operand,
    scratch: &mut Scratch,
) -> Result<Vec<Launch>> {
    let mut params = masked_params(p, query.strides)?;
    params.columns = params.columns.min(params.attention.qk_columns);
    let elements = p.scores_shape().iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    let mut arguments = arguments(p, query.arg);
    arguments.push(("scores", scratch.take(elements.unwrap_or(usize::MAX), size_of::<f32>())?));
    let then = |kernel: &str| later(kernel, p, |e| e.kernel() == kernel && e.dtype == entry.dtype);
    let kernels = [
        (entry, unfused::scores_grid(&params)),
        (then("unfused_softmax")?, unfused::softmax_grid(&params)),
        (then("unfused_values")?, unfused::values_grid(&params)),
    ];
    kernels.into_iter().map(|(entry, grid)| launch(entry, grid, &arguments, &params)).collect()
}

/// Where attention finds K and V.
fn keys_and_values(p: &Problem) -> [Arg; 2] {
    let [key, value] = match p.has_present() {
        true => [TensorId::PresentKey, TensorId::PresentValue],
        false => [TensorId::Key, TensorId::Value],
    };
    [tensor(p, key, 0), tensor(p, value, 0)]
}

/// attention_bias as numbers or as booleans.
fn bias_or_mask(p: &Problem) -> [(&'static str, Arg); 2] {
    let bias = tensor(p, TensorId::AttentionBias, 0);
    match p.bias {
        Some(Bias { boolean: true, .. }) => [("bias", Arg::Null), ("mask", bias)],
        _ => [("bias", bias), ("mask", Arg::Null)],
    }
}

/// Everything an attention kernel may ask for.
pub(super) fn arguments(p: &Problem, query: Arg) -> Vec<(&'static str, Arg)> {
    let [k, v] = keys_and_values(p);
    let [bias, mask] = bias_or_mask(p);
    vec![
        ("q", query),
        ("k", k),
        ("v", v),
        ("seqlens_k", tensor(p, TensorId::SeqlensK, 0)),
        bias,
        mask,
        ("head_sink", tensor(p, TensorId::HeadSink, 0)),
        ("out", tensor(p, TensorId::Output, 0)),
        ("lse", tensor(p, TensorId::Lse, 0)),
        ("output_qk", tensor(p, TensorId::OutputQk, 0)),
    ]
}

/// Everything `hopper` asks for: tensor maps of what it reads by tiles.
fn hopper_arguments(
    p: &Problem,
    params: &AttentionParams,
    query: Arg,
    counter: Arg,
    entry: &Entry,
) -> Vec<(&'static str, Arg)> {
    let AttentionParams { q_len, q_heads, kv_heads, capacity, .. } = *params;
    let map = |arg, strides, rows, heads, tile_rows| {
        tensor_map(p, arg, strides, [params.head_size, rows, heads, params.batch], tile_rows)
    };
    let tensor = |id| tensor(p, id, 0);
    let [k, v] = keys_and_values(p);
    vec![
        ("q", map(query, params.q, q_len, q_heads, hopper::QUERY_BOX)),
        ("k", map(k, params.k, capacity, kv_heads, entry.keys)),
        ("v", map(v, params.v, capacity, kv_heads, entry.keys)),
        ("seqlens_k", tensor(TensorId::SeqlensK)),
        ("head_sink", tensor(TensorId::HeadSink)),
        ("out", tensor(TensorId::Output)),
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
fn tensor_map(p: &Problem, arg: Arg, strides: Strides, size: [u32; 4], tile_rows: u32) -> Arg {
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

pub(super) fn params(p: &Problem, q: Strides, splits: u32) -> Result<AttentionParams> {
    Ok(AttentionParams {
        q,
        k: strides(p.keys_read()),
        v: strides(p.values_read()),
        out: strides(p.output_layout()),
        bias: p.bias_layout().map_or_else(Strides::zeroed, strides),
        batch: u32_of("batch", p.batch)?,
        q_heads: u32_of("query heads", p.q_heads)?,
        kv_heads: u32_of("KV heads", p.kv_heads)?,
        head_size: u32_of("head size", p.head_size)?,
        q_len: u32_of("query rows", p.q_len)?,
        capacity: u32_of("present rows", p.capacity)?,
        first_prompt: (p.phase == Phase::FirstPrompt).into(),
        causal: p.causal.into(),
        window: u32_of("window", p.window.unwrap_or(0).min(p.capacity))?,
        sink: match p.sink {
            Sink::None => sink::NONE,
            Sink::Zero => sink::ZERO,
            Sink::PerHead => sink::PER_HEAD,
        },
        qk_output: match p.output_qk {
            QkOutput::None => qk_output::NONE,
            QkOutput::BeforeSoftmax => qk_output::BEFORE_SOFTMAX,
            QkOutput::AfterSoftmax => qk_output::AFTER_SOFTMAX,
            QkOutput::Scaled => qk_output::SCALED,
            QkOutput::Capped => qk_output::CAPPED,
            QkOutput::Biased => qk_output::BIASED,
        },
        qk_columns: u32_of("total_sequence_length", p.total_len)?,
        splits,
        // Kernels that show scores do not scale hidden ones.
        scale: if p.output_qk == QkOutput::None { p.least_scale() } else { p.scale },
        softcap: p.softcap_in_f32(),
        section: 0,
    })
}

fn masked_params(p: &Problem, q: Strides) -> Result<MaskedParams> {
    let bound = |bound: Option<usize>| {
        bound.map_or(u32::MAX, |bound| u32::try_from(bound).unwrap_or(u32::MAX))
    };
    let (alignment, position) = match p.alignment {
        Alignment::Phase => (alignment::PHASE, 0),
        Alignment::Past(past) => (alignment::POSITION, past),
        Alignment::End => (alignment::END, 0),
    };
    let whole_bias = |bias: Bias| {
        let size = if bias.boolean { 1 } else { p.dtype.size() };
        bias.columns * size % 16 == 0
    };
    let whole = |size: usize, flag| if size * p.dtype.size() % 16 == 0 { flag } else { 0 };
    Ok(MaskedParams {
        attention: params(p, q, 1)?,
        v_head_size: u32_of("value head size", p.v_head_size)?,
        alignment,
        position: u32_of("past rows", position)?,
        left: bound(p.window.map(|window| window.saturating_sub(1))),
        right: if p.causal { 0 } else { bound(p.right_window) },
        columns: bound(p.bias.map(|bias| bias.columns)),
        vectors: whole(p.head_size, vectors::KEYS)
            | whole(p.v_head_size, vectors::VALUES)
            | if p.bias.is_some_and(whole_bias) { vectors::MASK } else { 0 },
        reserved: 0,
    })
}
