//! `decode`: a decode step in one launch, by clusters of CTAs where the GPU has them: it rotates,
//! appends and attends, over contiguous and over paged KV caches. Also the code that
//! `decode_quantized` shares with it.

use super::LARGEST_DECODE_HEAD;
use super::decode_parts::in_parts;
use crate::plan::build::{element, launch, page_steps, pages_strides, tensor, u32_of};
use crate::plan::cost::decode::{Device, Halves, Shape, shape as fastest};
use crate::plan::decision::Rejection;
use crate::plan::device::{Capability, DeviceInfo};
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel, Task};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{
    arguments, format, params, position_stride, rotary_params, scale_tensors, scales,
};
use crate::plan::{requirements, select};
use crate::tensors::TensorId;
use crate::{CacheBinding, Pages, Problem, Result};
use bytemuck::Zeroable;
use gqa_kernels::attention::decode;
use gqa_kernels::concept::pages::LOG_CONTIGUOUS;
use gqa_kernels::num::Format;
use gqa_kernels::params::{
    AttentionParams, DecodeParams, PageSteps, PagedDecodeParams, RotaryParams, Strides, overlap,
};
use gqa_kernels::registry::{self, Entry, entries};
use std::cmp::Reverse;

pub(super) struct Decode {
    pub(super) paged: bool,
}

impl Family for Decode {
    fn module(&self) -> registry::Family {
        registry::Family::Decode
    }

    fn is_paged(&self) -> bool {
        self.paged
    }

    fn options(&self) -> &'static [PlanOption] {
        use PlanOption::{Cluster, DisableFlashAttention, DisableFlashDecode, Splits};
        match self.paged {
            true => OPTIONS,
            false => &[DisableFlashAttention, DisableFlashDecode, Splits, Cluster],
        }
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        choose(self.module(), call)
    }

    fn fuses(&self, problem: &Problem, entry: &Entry, fused: bool) -> FusedPrologue {
        FusedPrologue::of_new_rows(problem, entry, fused)
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        launches(kernel, job)
    }
}

/// Options of the families that always append in the same launch.
pub(super) const OPTIONS: &[PlanOption] = &[
    PlanOption::DisableFlashAttention,
    PlanOption::DisableFlashDecode,
    PlanOption::DisableFusedKv,
    PlanOption::Splits,
    PlanOption::Cluster,
];

/// Most packed query rows. Each row tile reads all keys. If all row tiles run at the same time,
/// keys come from device memory once, and the call is faster than with the larger tiles of other
/// kernels (`docs/perf-log.md`).
const MAX_ROWS: usize = 128;

/// The module's kernel for the call and its shape. Blocks consist of whole pieces, and several
/// tokens of a sequence there differ by their positions only, not by a mask.
pub(super) fn choose(module: registry::Family, call: &Call<'_>) -> Result<Kernel, Rejection> {
    requirements::output_of(call.forced, call.problem)?;
    if !call.problem.has_single_tokens() {
        requirements::flash(call.problem)?;
    }
    if call.problem.pages.is_some() {
        requirements::blocks_of(call.problem, decode::Layout::PIECE)?;
    }
    let entry = entry(module, call)?;
    reads_rows(call.problem)?;
    if call.forced.is_none() {
        has_few_row_tiles(call, entry)?;
    }
    let (p, max) = (call.problem, entry.keys);
    if p.cache == CacheBinding::Shared && p.new_len > max as usize {
        return Err(Rejection::NewRows { got: p.new_len, max });
    }
    let kernel = shape(call, entry)?;
    // Over blocks, kernels divide the sequences among themselves first (`mixed.rs`).
    let divided = if call.problem.pages.is_none() { in_parts(&kernel, call) } else { None };
    Ok(divided.unwrap_or(kernel))
}

/// The kernel for the call's type, head size and rows: one of a larger head size only where none
/// has theirs, as few row tiles as there can be, of 64 rows only where half of them are in use (and
/// without `wgmma` where more tiles would read the memory more often), and blocks of half the size
/// only where the device has no room for whole ones. Of kernels that differ in their instructions
/// alone it is the one for the newest target.
fn entry(module: registry::Family, call: &Call<'_>) -> Result<&'static Entry, Rejection> {
    let p = call.problem;
    let format = p.quantized.map(|how| how.format);
    let is_typed = |entry: &&Entry| {
        entry.family == module
            && entry.role == registry::Role::Attention
            && (entry.formats.is_empty() || entry.holds(format))
            && element(p.dtype) == Some(entry.dtype)
            && (!p.tree_mask || takes_trees(entry))
            && (p.pages.is_none() || takes_blocks(entry))
    };
    let typed = || entries().filter(is_typed);
    if typed().next().is_none() {
        return Err(Rejection::ElementType { got: p.dtype });
    }
    let written = || typed().filter(|entry| requirements::writes(entry, p));
    if written().next().is_none() {
        return Err(Rejection::OutputType { got: p.out_dtype });
    }
    let holding = || {
        let is_forced = |entry: &Entry| call.forced.is_none_or(|forced| entry.name == forced.name);
        written().filter(move |entry| holds(entry, p.head_size) && is_forced(entry))
    };
    let smallest = holding().min_by_key(|entry| (entry.head_size, entry.shared_bytes));
    let smallest = smallest.ok_or(Rejection::OtherHeadSize { got: p.head_size })?;
    let tiles = |entry: &Entry| p.packed_rows().div_ceil(entry.rows as usize);
    let suited = || holding().filter(|entry| runs_on(entry, call.device).is_ok());
    let order = |entry: &&Entry| {
        let padding = entry.head_size;
        let is_wide = entry.rows > 32;
        let mostly_empty = is_wide && p.packed_rows() <= 32;
        let is_slow = is_wide && !has_wgmma(entry) && row_tiles_share_keys(call, MOST_TILES);
        let newest = Reverse(newest_target(entry, call.device));
        let size = (entry.min_blocks, entry.rows, entry.pads);
        (padding, mostly_empty, is_slow, tiles(entry), size, newest, Reverse(entry.threads))
    };
    let Some(chosen) = suited().min_by_key(order) else {
        return runs_on(smallest, call.device).map(|()| smallest);
    };
    let is_half_of_32 = (chosen.rows, chosen.min_blocks) == (32, 2);
    let of_16 = suited().find(|entry| (entry.rows, entry.min_blocks) == (16, 1));
    let shares = |entry: &&Entry| {
        !call.device.has(Capability::Clusters) && row_tiles_share_keys(call, tiles(entry))
    };
    let whole = of_16.filter(|entry| is_half_of_32 && tiles(entry) > 1 && shares(entry));
    Ok(whole.unwrap_or(chosen))
}

/// Whether the kernel reads caches that consist of blocks.
fn takes_blocks(entry: &Entry) -> bool {
    decode::takes_blocks(entry.head_size / (8 * values_per_element(entry)))
}

/// Whether the kernel takes a tree mask. Tiles of 8 rows have no room for a word for each of the 16
/// rows of an MMA tile.
fn takes_trees(entry: &Entry) -> bool {
    entry.takes("tree_mask") && entry.rows >= 16
}

/// The newest target of the kernel that the device runs.
fn newest_target(entry: &Entry, device: &DeviceInfo) -> Option<(u32, bool)> {
    let suited = entry.targets().filter(|target| target.runs_on(device.sm));
    suited.map(|target| registry::number(target.arch)).max()
}

/// Whether a kernel takes a head size: its own, or with padding a smaller one whose cached rows are
/// whole vectors. A kernel that pads is as fast on heads of its own size as one that does not.
fn holds(entry: &Entry, head_size: usize) -> bool {
    let [most, per_vector] = [entry.head_size, 8 * values_per_element(entry)].map(|n| n as usize);
    most == head_size || entry.pads && most > head_size && head_size % per_vector == 0
}

/// Row tiles of 16 rows that replace one of 64.
const MOST_TILES: usize = 4;

/// Whether all row tiles run at a time and the KV cache fits the L2 cache, so that keys are read
/// from memory once. Then tiles of 16 rows are faster than half as many of 32 in half-SM CTAs, if
/// no cluster shares their keys (`docs/results/2026-11-26-h100-ampere`), and two or four of them
/// are faster than one of 64 rows without `wgmma` (`docs/results/2026-11-27-h100-wide-steps`).
fn row_tiles_share_keys(call: &Call<'_>, tiles: usize) -> bool {
    let (p, device) = (call.problem, call.device);
    let heads = p.kv_heads.saturating_mul(p.batch);
    let bytes = [p.most_keys() as usize, p.head_size, 2 * p.dtype.size()]
        .into_iter()
        .try_fold(heads, usize::checked_mul);
    let fits = bytes.is_some_and(|bytes| bytes as u64 <= device.l2_bytes);
    fits && tiles.saturating_mul(heads) <= device.multiprocessors as usize
}

/// Whether the kernel multiplies by `wgmma`, so that it runs on Hopper alone.
fn has_wgmma(entry: &Entry) -> bool {
    !entry.runs_on(u32::MAX)
}

/// Whether the device has the compute capability, the matrix instructions and the shared memory
/// that the kernel needs.
fn runs_on(entry: &Entry, device: &DeviceInfo) -> Result<(), Rejection> {
    if entry.min_sm > device.sm {
        return Err(Rejection::ComputeCapability { have: device.sm, need: entry.min_sm });
    }
    if !entry.runs_on(device.sm) {
        return Err(Rejection::Capability { need: Capability::Wgmma, sm: device.sm });
    }
    select::shared_memory(entry, device)
}

/// A head's keys and values must lie row after row.
fn reads_rows(p: &Problem) -> Result<(), Rejection> {
    match [p.keys_read(), p.values_read()].iter().any(|layout| layout.row != p.head_size) {
        true => Err(Rejection::Strided),
        false => Ok(()),
    }
}

fn has_few_row_tiles(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    let (p, sms) = (call.problem, call.device.multiprocessors);
    let rows = p.packed_rows();
    let tiles = rows.div_ceil(entry.rows as usize);
    let clusters = tiles.saturating_mul(p.kv_heads).saturating_mul(p.batch);
    let most = if p.head_size > LARGEST_DECODE_HEAD { entry.rows as usize } else { MAX_ROWS };
    if rows > most {
        return Err(Rejection::Rows { got: rows, max: most as u32 });
    }
    if tiles > 1 && clusters > sms as usize {
        return Err(Rejection::RowTiles { got: clusters, max: sms });
    }
    Ok(())
}

/// Quantized values in 16 bits.
fn values_per_element(entry: &Entry) -> u32 {
    match entry.formats {
        [] => 1,
        [Format::Int4, ..] => 4,
        _ => 2,
    }
}

/// The same kernel, or one for more rows or that also pads, in CTAs of half the size, if an SM
/// has room for two.
fn half_of(entry: &Entry, device: &DeviceInfo) -> Option<&'static Entry> {
    let is_half = |other: &&Entry| {
        other.family == entry.family
            && (other.dtype, other.formats) == (entry.dtype, entry.formats)
            && other.head_size == entry.head_size
            && other.pads >= entry.pads
            && other.rows >= entry.rows
            && other.arguments == entry.arguments
            && other.min_blocks == 2
    };
    let fits = |half: &&Entry| select::fits_twice(half, device);
    entries().filter(is_half).min_by_key(|half| (half.rows, half.pads)).filter(fits)
}

/// The same step by half-SM CTAs, without splits, if there is such a kernel.
pub(in crate::plan) fn in_halves(kernel: &Kernel, device: &DeviceInfo) -> Option<Kernel> {
    let is_half = kernel.entry.min_blocks > 1;
    let half = if is_half { kernel.entry } else { half_of(kernel.entry, device)? };
    Some(Kernel::whole(half))
}

/// How two half-SM CTAs stream, fitted to measurements (`docs/perf-log.md`). Over a quantized KV
/// cache they are slower, with fewer bytes in flight.
fn halves_like(half: &Entry) -> Halves {
    match half.formats {
        [] => Halves { slower: 1, tenths: 12, tenths_in_pairs: 36 },
        [Format::Int4, ..] => Halves { slower: 4, tenths: 34, tenths_in_pairs: 34 },
        _ => Halves { slower: 4, tenths: 28, tenths_in_pairs: 34 },
    }
}

/// [`Device::tenths_in_pairs`], measured on GPUs with clusters. With 4-bit values a CTA is bound by
/// arithmetic, not by memory.
fn tenths_in_pairs(entry: &Entry, device: &DeviceInfo) -> u32 {
    let tenths = tenths_of_block(entry);
    match entry.formats {
        _ if !device.has(Capability::Clusters) => tenths,
        [] => tenths.max(18),
        [Format::Int4, ..] => tenths,
        _ => tenths.max(17),
    }
}

/// Shortest time in which a CTA streams its keys. The unit is a tenth of the time that it takes
/// when CTAs on half of the SMs saturate the memory. Longer than 10 where arithmetic is the bound:
/// 4-bit values are converted, or a tile has 64 rows (`docs/perf-log.md`). The value for 64 rows
/// without `wgmma` is an estimate.
fn tenths_of_block(entry: &Entry) -> u32 {
    match (entry.rows, entry.formats) {
        (33.., _) if has_wgmma(entry) => 13,
        (33.., _) => 20,
        (_, [Format::Int4, ..]) => 12,
        _ => 10,
    }
}

/// The cluster size and splits that the options force, or else the fastest ones, and the kernel for
/// them: `entry`, or its half-SM variant unless `entry` is forced.
fn shape(call: &Call<'_>, entry: &'static Entry) -> Result<Kernel, Rejection> {
    let (p, device, options) = (call.problem, call.device, call.options);
    has_grid(p, &Kernel::whole(entry))?;
    if options.cluster.is_some_and(|blocks| blocks > 1) {
        select::capabilities(&[Capability::Clusters], device)?;
    }
    let mut params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::TooLarge)?;
    // The time of a key depends on its bytes.
    params.head_size /= values_per_element(entry);
    let kernel = match (options.cluster, options.splits) {
        (None, None) => {
            let half = if options.force.is_none() { half_of(entry, device) } else { None };
            let gpu = Device {
                multiprocessors: device.multiprocessors,
                has_clusters: device.has(Capability::Clusters),
                tenths: tenths_of_block(entry),
                tenths_in_pairs: tenths_in_pairs(entry, device),
                halves: half.map(halves_like),
            };
            let equal = fastest(&params, entry.rows, p.most_keys(), gpu);
            let Shape { ranks, splits, together } = match p.pages {
                Some(_) => equal.for_unequal(&params, entry.rows, p.most_keys(), gpu),
                None => equal,
            };
            let entry = half.filter(|_| together == 2).unwrap_or(entry);
            Kernel { cluster: ranks, ..Kernel::split(entry, splits) }
        }
        (cluster, splits) => {
            let split = Kernel::split(entry, splits.unwrap_or(1));
            Kernel { cluster: cluster.unwrap_or(1), ..split }
        }
    };
    has_grid(p, &kernel)?;
    has_counters(&params, &kernel)?;
    Ok(kernel)
}

/// Errs where the grid exceeds CUDA's limits.
fn has_grid(p: &Problem, kernel: &Kernel) -> Result<(), Rejection> {
    const MAX: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
    let row_tiles = p.packed_rows().div_ceil(kernel.entry.rows as usize);
    let blocks = kernel.cluster as usize * kernel.splits as usize;
    // One more row tile: a launch that overlaps the one before it has a layer of CTAs that wait for
    // that.
    let grid = [blocks, p.kv_heads, row_tiles.saturating_mul(p.batch).saturating_add(1)];
    let fits = grid.iter().zip(MAX).all(|(&blocks, max)| blocks <= max);
    let all = grid.iter().try_fold(1usize, |all, &blocks| all.checked_mul(blocks));
    (fits && all.is_some_and(|all| all <= u32::MAX as usize))
        .then_some(())
        .ok_or(Rejection::TooLarge)
}

/// Errs where splits would need too many counters: such a call has enough CTAs without splits.
fn has_counters(params: &AttentionParams, kernel: &Kernel) -> Result<(), Rejection> {
    const MAX: usize = 1 << 16;
    let clusters = decode::clusters(params, kernel.entry.rows);
    let need = if kernel.splits > 1 { clusters as usize * kernel.cluster as usize } else { 0 };
    if need > MAX { Err(Rejection::Counters { need, max: MAX }) } else { Ok(()) }
}

/// The launch.
pub(super) fn launches(kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
    let (p, device) = (job.problem, job.device);
    let attention = match p.pages {
        Some(pages) => paged_attention(&job, cache_of(p, pages))?,
        None => attention_params(kernel, &job)?,
    };
    let step = step_params(kernel, &job, attention)?;
    let params = match p.pages {
        Some(pages) => paged_params(step, cache_of(p, pages), pages, job.task.longest)?,
        None => contiguous_params(step),
    };
    let bound = bound(kernel, job, &step)?;
    let grid = decode::grid(&step, kernel.cluster);
    in_clusters(kernel, device, launch(kernel.entry, grid, &bound, &params)?)
}

/// The launch in clusters, as a programmatic dependent launch if the device supports that.
pub(super) fn in_clusters(
    kernel: &Kernel,
    device: &DeviceInfo,
    launch: Launch,
) -> Result<Vec<Launch>> {
    let programmatic = device.has(Capability::ProgrammaticLaunch);
    Ok(vec![Launch { cluster: kernel.cluster, programmatic, ..launch }])
}

/// The attention parameters; strides of a quantized cache count bytes.
pub(super) fn attention_params(kernel: &Kernel, job: &Job<'_>) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, 1)?;
    Ok(in_bytes(kernel, job.problem, params))
}

/// The same over blocks: the cache is (block, row, head), and the output's rows are tokens.
pub(super) fn paged_attention(job: &Job<'_>, cache: Strides) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, 1)?;
    let cache = Strides { batch: 0, ..cache };
    let out = Strides { batch: 0, ..params.out };
    Ok(AttentionParams { k: cache, v: cache, out, ..params })
}

/// Strides of blocks, in cells of the cache.
pub(super) fn cache_of(p: &Problem, pages: Pages) -> Strides {
    pages_strides(p, pages, p.key_cache_dtype().size())
}

/// What a decode step over blocks is told besides.
pub(super) fn paged_params(
    decode: DecodeParams,
    cache: Strides,
    pages: Pages,
    longest: usize,
) -> Result<PagedDecodeParams> {
    Ok(PagedDecodeParams {
        decode,
        steps: page_steps(cache),
        per_sequence: u32_of("blocks of a sequence", pages.columns())?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        tokens: u32_of("tokens", pages.tokens)?,
        longest: u32_of("query rows", longest)?,
        counts_new: pages.counts_new.into(),
    })
}

/// The same over a contiguous cache, in which a head's rows lie side by side.
fn contiguous_params(decode: DecodeParams) -> PagedDecodeParams {
    PagedDecodeParams {
        decode,
        steps: PageSteps { row: 1, unit: decode.attention.k.row as u32, ..PageSteps::default() },
        per_sequence: 0,
        log_block_size: LOG_CONTIGUOUS,
        blocks: 0,
        tokens: 0,
        longest: 0,
        counts_new: 0,
    }
}

fn in_bytes(kernel: &Kernel, p: &Problem, params: AttentionParams) -> AttentionParams {
    let Some(how) = p.quantized.filter(|_| !kernel.entry.formats.is_empty()) else {
        return params;
    };
    let per_byte = how.codes_per_element() as u64;
    let bytes = |values: Strides| Strides {
        batch: values.batch / per_byte,
        head: values.head / per_byte,
        row: values.row / per_byte,
    };
    AttentionParams { k: bytes(params.k), v: bytes(params.v), ..params }
}

/// The parameters of a decode step.
pub(super) fn step_params(
    kernel: &Kernel,
    job: &Job<'_>,
    attention: AttentionParams,
) -> Result<DecodeParams> {
    let (p, entry, task) = (job.problem, kernel.entry, job.task);
    let fused = FusedPrologue::of_new_rows(p, entry, task.fused).new_rows;
    let appends = fused && !task.appended;
    let rotary = match fused {
        true => rotary_params(p.rotary, position_stride(p)?)?,
        false => RotaryParams::zeroed(),
    };
    Ok(DecodeParams {
        new_k: job.rows.key.strides,
        new_v: job.rows.value.strides,
        rotary,
        new_len: if appends { u32_of("new keys", p.new_len)? } else { 0 },
        splits: kernel.splits,
        clusters: decode::clusters(&attention, entry.rows),
        rows: entry.rows,
        at_a_time: job.device.multiprocessors * entry.min_blocks,
        overlap: overlap(p, appends, job.task),
        ahead: u32::from(loads_early(p, kernel, appends && p.new_len > 0)),
        scales: scales(p),
        format: format(p),
        parts: kernel.parts,
        attention,
    })
}

/// What the step may do while the launch ahead of it still runs.
fn overlap(p: &Problem, appends: bool, task: Task) -> u32 {
    // The QK-norm launch before it starts after all earlier work has ended, and writes only scratch
    // memory.
    match appends && (p.prefetch_cache || p.qk_norm.is_some()) {
        _ if task.overlaps => overlap::ALL,
        true => overlap::CACHE,
        false => overlap::NONE,
    }
}

/// The arguments of a decode step.
fn bound(kernel: &Kernel, job: Job<'_>, params: &DecodeParams) -> Result<Vec<(&'static str, Arg)>> {
    let (p, rows) = (job.problem, job.rows);
    let fused = FusedPrologue::of_new_rows(p, kernel.entry, job.task.fused).new_rows;
    let given = |id| if fused { tensor(p, id, 0) } else { Arg::Null };
    let new = |arg: Arg| if fused && !job.task.appended { arg } else { Arg::Null };
    let of_pages = |id, is_used| if is_used { tensor(p, id, 0) } else { Arg::Null };
    let has_pages = p.pages.is_some();
    let has_starts = p.pages.is_some_and(|pages| !pages.one_each);
    let divides = has_pages && (1..=decode::MOST_SLOTS).contains(&kernel.parts);
    let mut bound = arguments(p, &rows);
    bound.extend([
        ("new_k", new(rows.key.arg)),
        ("new_v", new(rows.value.arg)),
        ("cos", given(TensorId::CosCache)),
        ("sin", given(TensorId::SinCache)),
        ("position_ids", given(TensorId::PositionIds)),
        ("starts", of_pages(TensorId::CumulativeSequenceLength, has_starts)),
        ("block_table", of_pages(TensorId::BlockTable, has_pages)),
        ("schedule", of_pages(TensorId::Schedule, divides)),
    ]);
    bound.extend(scale_tensors(p));
    let [out, states, arrivals] = partials(kernel, job, params)?;
    bound.extend([("partial_out", out), ("partial_states", states), ("arrivals", arrivals)]);
    Ok(bound)
}

/// Scratch memory for KV splits, if there are several: their output, their states, and counters of
/// arrivals.
fn partials(kernel: &Kernel, job: Job<'_>, params: &DecodeParams) -> Result<[Arg; 3]> {
    let Kernel { splits, cluster, parts, .. } = *kernel;
    if splits == 1 && parts == 0 {
        return Ok([Arg::Null; 3]);
    }
    let (out, states) = decode::partial_elements(params, cluster);
    let counters = decode::arrivals(params, cluster);
    Ok([
        job.scratch.take(out, size_of::<f32>())?,
        job.scratch.take(states, size_of::<[f32; 2]>())?,
        job.scratch.count(counters),
    ])
}

/// Whether teams load their first keys before they know the length. Rows that the call appends must
/// not be among them, unless a single cluster reads them. With several ranks and few keys the
/// cluster then appends later, which costs more than loading early gains (`docs/perf-log.md`).
/// Pages past the end are undefined: do not load them early.
fn loads_early(p: &Problem, kernel: &Kernel, appends: bool) -> bool {
    let Kernel { entry, splits, cluster, parts } = *kernel;
    let row_tiles = p.packed_rows().div_ceil(entry.rows as usize);
    let is_alone = splits == 1 && parts == 0 && row_tiles == 1;
    let most_ahead = (cluster * entry.threads / 32 * entry.keys) as usize;
    let has_more = cluster == 1 || p.total_len > 2 * most_ahead;
    p.window.is_none() && p.pages.is_none() && has_more && (!appends || is_alone)
}
