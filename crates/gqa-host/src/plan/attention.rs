//! The cascade: flash attention over parts of the keys, flash attention, memory-efficient attention, attention with all scores in
//! memory.

use super::decision::{Candidate, Decision, Rejection};
use super::decode::{self, Clusters};
use super::float8;
use super::hopper;
use super::launch::{Scratch, element, launch};
use super::params::{arguments, masked_params, params};
use super::prologue::Rows;
use super::switches::Switches;
use super::{Arg, DeviceInfo, Launch};
use crate::{Alignment, CacheBinding, Error, Pages, Problem, QkOutput, Result};
use bytemuck::Zeroable;
use gqa_kernels::attention::decode::{Blocks, Layout as _};
use gqa_kernels::attention::{
    self as kernels, combine, general, split_kv, tiled, tiled_wide, unfused,
};
use gqa_kernels::params::Strides;
use gqa_kernels::registry::{Entry, Family, entries, find};

/// Attention's kernel, and how many parts the keys are cut into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    candidate: Candidate,
    pub(super) entry: &'static Entry,
    parts: Parts,
}

/// How a kernel shares the keys of a row tile among blocks.
#[derive(Clone, Copy, Debug)]
enum Parts {
    Splits(u32),
    Clusters(Clusters),
}

impl Choice {
    /// Whether the kernel, or the launch that it has before it, rotates and appends.
    pub(super) fn takes_new_rows(&self, p: &Problem, fused: bool) -> bool {
        let takes =
            matches!(self.parts, Parts::Clusters(_)) || self.candidate == Candidate::HopperFloat8;
        takes && decode::is_fused(p, self.entry, fused)
    }

    /// Whether several clusters share the keys of a row tile, and count arrivals.
    pub(super) fn has_parts(&self) -> bool {
        matches!(self.parts, Parts::Clusters(clusters) if clusters.parts > 1)
    }

    /// Whether the kernel rotates queries that it finds as they are given.
    pub(super) fn rotates_queries(&self, p: &Problem, fused: bool) -> bool {
        fused && hopper::rotates(self.entry) && p.rotary.is_some_and(hopper::knows)
    }
}

/// What attention's launches are to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    /// Rotate and append, where kernels do.
    pub(super) fused: bool,
    /// New rows are in the cache already.
    pub(super) appended: bool,
    /// Fewest tokens of a sequence over blocks that is theirs.
    pub(super) least: usize,
    /// Most tokens of any sequence.
    pub(super) longest: usize,
    /// Over blocks: which of the blocks that share the work this launch has, where they are of two.
    pub(super) crew: Option<Crew>,
}

/// Blocks of two launches of `hopper_paged` that draw from the same work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crew {
    /// Of the first, which runs beside what follows.
    pub(super) leaders: u32,
    /// Of the other.
    pub(super) helpers: u32,
    /// Whether this is that one.
    pub(super) helps: bool,
}

impl Task {
    /// All of a call.
    pub(super) fn whole(p: &Problem, fused: bool) -> Self {
        Self { fused, appended: false, least: 0, longest: p.q_len, crew: None }
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
pub(super) fn consider(
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
    if let (Some(forced), Candidate::DecodeCodes | Candidate::Decode | Candidate::General) =
        (forced, candidate)
        && !writes(forced, p)
    {
        return Err(Rejection::OutputType { got: p.out_dtype });
    }
    match candidate {
        Candidate::Unfused => {}
        Candidate::General => takes_scores(p)?,
        Candidate::HopperMasked | Candidate::TiledMasked => suits_masked_flash(p)?,
        Candidate::DecodeCodes => {
            suits_flash(p)?;
            suits_codes(p)?;
        }
        Candidate::HopperFloat8 => {
            suits_flash(p)?;
            float8::suits(p, switches)?;
        }
        Candidate::DecodePaged | Candidate::DecodePagedCodes => suits_steps_over_blocks(p)?,
        Candidate::HopperPaged => suits_blocks(p)?,
        Candidate::Decode
        | Candidate::SplitKv
        | Candidate::Hopper
        | Candidate::Tiled
        | Candidate::TiledF32
        | Candidate::TiledWide => suits_flash(p)?,
    }
    if let Candidate::Decode
    | Candidate::DecodeCodes
    | Candidate::DecodePaged
    | Candidate::DecodePagedCodes = candidate
    {
        let entry = decode::entry(p, candidate.family(), device, forced)?;
        let (entry, clusters) = decode::clusters(p, entry, device, switches)?;
        return Ok(Choice { candidate, entry, parts: Parts::Clusters(clusters) });
    }
    let entry = kernel(candidate, p, device, forced)?;
    let splits = match candidate {
        Candidate::SplitKv => splits(p, entry, device, switches)?,
        Candidate::TiledWide => wide_splits(p, entry, device, switches)?,
        Candidate::Hopper | Candidate::HopperMasked => {
            hopper::suits(p, entry, device, switches)?;
            let whole = candidate == Candidate::HopperMasked;
            let parts = if whole { None } else { hopper::parts(p, entry, device, switches) };
            if let Some((entry, splits)) = parts {
                return Ok(Choice { candidate, entry, parts: Parts::Splits(splits) });
            }
            rounds_output(p)?
        }
        Candidate::HopperPaged => {
            hopper::suits_pages(p, device, switches)?;
            rounds_output(p)?
        }
        Candidate::HopperFloat8 => {
            hopper::suits(p, entry, device, switches)?;
            rounds_output(p)?
        }
        Candidate::Tiled | Candidate::TiledMasked => rounds_output(p)?,
        Candidate::DecodeCodes
        | Candidate::DecodePaged
        | Candidate::DecodePagedCodes
        | Candidate::Decode
        | Candidate::TiledF32
        | Candidate::General
        | Candidate::Unfused => 1,
    };
    Ok(Choice { candidate, entry, parts: Parts::Splits(splits) })
}

impl Candidate {
    const fn family(self) -> Family {
        match self {
            Self::DecodeCodes => Family::DecodeCodes,
            Self::DecodePaged => Family::DecodePaged,
            Self::DecodePagedCodes => Family::DecodePagedCodes,
            Self::HopperPaged => Family::HopperPaged,
            Self::HopperFloat8 => Family::HopperFloat8,
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
            | Self::HopperFloat8
            | Self::HopperMasked
            | Self::Tiled
            | Self::TiledMasked
            | Self::TiledF32
            | Self::TiledWide => {
                by(switches.disable_flash_attention, "GQA_DISABLE_FLASH_ATTENTION")
            }
            Self::HopperPaged => {
                by(switches.disable_flash_attention, "GQA_DISABLE_FLASH_ATTENTION")
                    .or(by(switches.disable_fused_kv, "GQA_DISABLE_FUSED_KV"))
            }
            Self::DecodeCodes
            | Self::DecodePaged
            | Self::DecodePagedCodes
            | Self::Decode
            | Self::SplitKv => {
                let appends = !matches!(self, Self::Decode | Self::SplitKv);
                let fused = appends && switches.disable_fused_kv;
                by(switches.disable_flash_attention, "GQA_DISABLE_FLASH_ATTENTION")
                    .or(by(switches.disable_flash_decode, "GQA_DISABLE_FLASH_DECODE"))
                    .or(by(fused, "GQA_DISABLE_FUSED_KV"))
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

/// One part of the keys, in kernels that have their output in the element type only.
fn rounds_output(p: &Problem) -> Result<u32, Rejection> {
    match p.widens_output() {
        false => Ok(1),
        true => Err(Rejection::OutputType { got: p.out_dtype }),
    }
}

/// Fewest parts of the keys in kernels that have one part's output in the element type only: the merge knows both types.
fn least_parts(p: &Problem) -> u32 {
    if p.widens_output() { 2 } else { 1 }
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

/// Blocks of whole pieces, and no mask that tells several tokens apart otherwise than their positions do.
fn suits_steps_over_blocks(p: &Problem) -> Result<(), Rejection> {
    if !p.has_single_tokens() {
        suits_flash(p)?;
    }
    holds_pieces(p, Blocks::PIECE)
}

/// Elements in blocks that boxes of the copy engine fit.
fn suits_blocks(p: &Problem) -> Result<(), Rejection> {
    if p.lse {
        return Err(Rejection::Argument { name: "lse" });
    }
    suits_flash(p)?;
    holds_pieces(p, kernels::hopper::LEAST_BOX)
}

/// Blocks of whole pieces of so many rows.
fn holds_pieces(p: &Problem, need: u32) -> Result<(), Rejection> {
    match p.pages {
        Some(Pages { block_size: got, .. }) if !got.is_power_of_two() || got < need as usize => {
            Err(Rejection::BlockSize { got, need })
        }
        _ => Ok(()),
    }
}

/// What reads codes, and appends to them where it reads.
fn suits_codes(p: &Problem) -> Result<(), Rejection> {
    match (p.quantised, p.cache) {
        (None, _) => Err(Rejection::NotQuantised),
        (Some(_), CacheBinding::Shared) => Ok(()),
        (Some(_), _) => Err(Rejection::NotShared),
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
    let mine = mine.filter(|entry| candidate != Candidate::General || writes(entry, p));
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
        let tiles = p.packed_rows().div_ceil(rows);
        return [(!fits).into(), tiles, rows, usize::MAX - keys];
    }
    // At head size 64 `hopper` sums rounded weights, which is too coarse for a log-sum-exp, and has a slower kernel that does not.
    let other = entry.name.ends_with("_lse") != p.lse;
    let wrong_length = (entry.keys > hopper::SHORT_TILE) != hopper::sees_many_keys(p);
    // Queries that a launch before must rotate cost as much as some more scores each (measured, too).
    const ROTATION: usize = 60;
    let launch_rotates = p.rotary.is_some_and(hopper::knows) && !hopper::rotates(entry);
    let rotation = if launch_rotates { p.q_len * ROTATION } else { 0 };
    [other.into(), wrong_length.into(), work(entry, p) + rotation, 0]
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

/// Whether a kernel is its family's first: the merge of parts and the later unfused ones are never launched alone, and whether `hopper` takes
/// parts is decided after `hopper`.
fn leads(entry: &Entry) -> bool {
    !is_combine(entry)
        && entry.kernel() != float8::OPERANDS
        && !hopper::is_split(entry)
        && entry.kernel() != "unfused_softmax"
        && !entry.kernel().starts_with("unfused_values")
}

/// Whether a kernel that ends with the output has it in the call's type.
pub(super) fn writes(entry: &Entry, p: &Problem) -> bool {
    entry.arguments.contains(&"out_f32") == p.widens_output()
}

/// Packed query rows up to which reading K and V once per 16 rows costs less than filling a tile of [`tiled`] with few rows.
const FEW_ROWS: u32 = 64;

/// Parts of the keys for `split_kv`, or why [`tiled`] does better. GQA_SPLITS and GQA_FORCE know better than this.
fn splits(
    p: &Problem,
    entry: &Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<u32, Rejection> {
    let least = least_parts(p);
    if let Some(splits) = switches.splits {
        return Ok(splits.max(least));
    }
    let rows = p.packed_rows();
    // Of those with larger tiles only `hopper` has output in another type.
    let has_no_rival = p.widens_output() && !hopper::may_take(p, device);
    let takes_all = switches.force.is_some() || has_no_rival;
    if rows > FEW_ROWS as usize && !takes_all {
        return Err(Rejection::Rows { got: rows, max: FEW_ROWS });
    }
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::OneSplit)?;
    let keys = p.most_keys();
    let splits = split_kv::splits(&params, keys, device.multiprocessors);
    // Two row tiles that read the keys each for itself still do.
    if splits == 1 && rows > 2 * entry.rows as usize && !takes_all {
        return Err(Rejection::OneSplit);
    }
    Ok(splits.max(least))
}

/// Parts of the keys for `tiled_wide`. GQA_SPLITS knows better than this.
fn wide_splits(
    p: &Problem,
    entry: &Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<u32, Rejection> {
    let least = least_parts(p);
    if let Some(splits) = switches.splits {
        return Ok(splits.max(least));
    }
    let params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::TooLarge)?;
    let keys = p.most_keys();
    let splits = tiled_wide::splits(&params, entry.rows, entry.keys, keys, device.multiprocessors);
    Ok(splits.max(least))
}

/// Blocks of the merge per multiprocessor: more only wait.
const WAVES: u32 = 16;

/// The launches of the choice; K and V are in the present cache.
pub(super) fn launches(
    p: &Problem,
    device: &DeviceInfo,
    choice: &Choice,
    rows: Rows,
    task: Task,
    scratch: &mut Scratch,
) -> Result<Vec<Launch>> {
    let Choice { candidate, entry, parts } = *choice;
    let query = rows.query;
    let splits = match parts {
        Parts::Splits(splits) => splits,
        Parts::Clusters(clusters) => {
            return decode::launches(p, device, entry, clusters, rows, task, scratch);
        }
    };
    match candidate {
        Candidate::General => return general_launch(p, entry, rows).map(|launch| vec![launch]),
        Candidate::Unfused => return unfused_launches(p, entry, rows, scratch),
        Candidate::HopperMasked => {
            return hopper::masked_launch(p, device, entry, &rows, scratch.count(1))
                .map(|launch| vec![launch]);
        }
        Candidate::HopperPaged => {
            return hopper::paged_launch(p, device, entry, &rows, task, scratch.count(1))
                .map(|launch| vec![launch]);
        }
        Candidate::HopperFloat8 => {
            return float8::launches(p, device, entry, rows, task.fused, scratch);
        }
        Candidate::TiledMasked => {
            let params = masked_params(p, query.strides)?;
            let grid = tiled::grid(&params.attention, entry.rows);
            return Ok(vec![launch(entry, grid, &arguments(p, &rows), &params)?]);
        }
        Candidate::Hopper if !hopper::is_split(entry) => {
            let turns = choice.rotates_queries(p, task.fused);
            return hopper::whole_launch(p, device, entry, &rows, turns, scratch.count(1))
                .map(|launch| vec![launch]);
        }
        Candidate::DecodeCodes
        | Candidate::DecodePaged
        | Candidate::DecodePagedCodes
        | Candidate::Decode
        | Candidate::SplitKv
        | Candidate::Hopper
        | Candidate::Tiled
        | Candidate::TiledF32
        | Candidate::TiledWide => {}
    }
    let mut params = params(p, query.strides, splits)?;
    params.section = kernels::hopper::section(&params, device.l2_bytes);
    let mut arguments = if candidate == Candidate::Hopper {
        let counter = scratch.count(1);
        hopper::arguments(p, &params, &rows, counter, entry)
    } else {
        arguments(p, &rows)
    };
    let grid = match candidate {
        Candidate::SplitKv => split_kv::grid(&params),
        Candidate::Hopper => kernels::hopper::grid(&params, entry.rows, device.multiprocessors),
        Candidate::TiledWide => tiled_wide::grid(&params, entry.rows),
        _ => tiled::grid(&params, entry.rows),
    };
    let merges = splits > 1 || hopper::is_split(entry);
    if merges {
        let (out, lse) = split_kv::partial_elements(&params);
        arguments.push(("partial_out", scratch.take(out, size_of::<f32>())?));
        arguments.push(("partial_lse", scratch.take(lse, size_of::<f32>())?));
    } else {
        arguments.extend([("partial_out", Arg::Null), ("partial_lse", Arg::Null)]);
    }
    let mut launches = vec![launch(entry, grid, &arguments, &params)?];
    if merges {
        let same = |other: &Entry| is_combine(other) && other.dtype == entry.dtype;
        let combine = later("combine", p, |other| same(other) && writes(other, p))?;
        let grid = combine::grid(&params, device.multiprocessors * WAVES);
        launches.push(launch(combine, grid, &arguments, &params)?);
    }
    Ok(launches)
}

/// A kernel that is not the first of its family.
pub(super) fn later(
    name: &str,
    p: &Problem,
    is_it: impl Fn(&Entry) -> bool,
) -> Result<&'static Entry> {
    let found = entries().find(|entry| is_it(entry));
    found.ok_or_else(|| Error::NoKernel(format!("{name} has no kernel for {}", p.dtype)))
}

fn general_launch(p: &Problem, entry: &'static Entry, rows: Rows) -> Result<Launch> {
    let params = masked_params(p, rows.query.strides)?;
    launch(entry, general::grid(&params.attention), &arguments(p, &rows), &params)
}

/// Scores, softmax, and the weighted values.
fn unfused_launches(
    p: &Problem,
    entry: &'static Entry,
    rows: Rows,
    scratch: &mut Scratch,
) -> Result<Vec<Launch>> {
    let mut params = masked_params(p, rows.query.strides)?;
    params.columns = params.columns.min(params.attention.qk_columns);
    let elements = p.scores_shape().iter().try_fold(1usize, |all, &n| all.checked_mul(n));
    let mut arguments = arguments(p, &rows);
    arguments.push(("scores", scratch.take(elements.unwrap_or(usize::MAX), size_of::<f32>())?));
    let then = |kernel: &str| later(kernel, p, |e| e.kernel() == kernel && e.dtype == entry.dtype);
    let values = if p.widens_output() { "unfused_values_out32" } else { "unfused_values" };
    let kernels = [
        (entry, unfused::scores_grid(&params)),
        (then("unfused_softmax")?, unfused::softmax_grid(&params)),
        (then(values)?, unfused::values_grid(&params)),
    ];
    kernels.into_iter().map(|(entry, grid)| launch(entry, grid, &arguments, &params)).collect()
}
