//! `decode_paged`: `decode` over a paged KV cache.

use super::decode;
use crate::plan::build::{launch, page_steps, pages_strides, tensor, u32_of};
use crate::plan::cost::decode::{Lengths, Shape};
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::params;
use crate::plan::requirements;
use crate::tensors::TensorId;
use crate::{Error, Pages, Problem, Result};
use gqa_kernels::attention::decode::{self as kernels, Blocks, Layout as _};
use gqa_kernels::params::{
    AttentionParams, DecodeParams, DecodeScheduleParams, PagedDecodeParams, Strides,
};
use gqa_kernels::registry::{self, Entry, Role};

pub(in crate::plan) struct DecodePaged;

impl Family for DecodePaged {
    fn module(&self) -> registry::Family {
        registry::Family::DecodePaged
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        decode::OPTIONS
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

/// Blocks consist of whole pieces, and several tokens of a sequence differ by their positions only,
/// not by a mask.
pub(super) fn choose(module: registry::Family, call: &Call<'_>) -> Result<Kernel, Rejection> {
    if !call.problem.has_single_tokens() {
        requirements::flash(call.problem)?;
    }
    requirements::blocks_of(call.problem, Blocks::PIECE)?;
    decode::choose(module, call)
}

/// The families whose kernels divide the keys of all sequences.
const DIVIDING: [registry::Family; 2] =
    [registry::Family::DecodePaged, registry::Family::DecodePagedQuantized];

/// The same decode step with the keys of all sequences divided by the lengths on the device, if
/// that is estimated to be faster than equal splits of each sequence.
pub(in crate::plan) fn in_parts(kernel: &Kernel, call: &Call<'_>) -> Option<Kernel> {
    /// Most CTAs in y and z of a grid.
    const MOST: usize = 65_535;
    let (p, device, options) = (call.problem, call.device, call.options);
    if !DIVIDING.contains(&kernel.entry.family) {
        return None;
    }
    let is_forced = options.splits.is_some() || options.cluster.is_some() || call.forced.is_some();
    if is_forced || p.batch_invariant || !(2..=kernels::MOST_DIVIDED as usize).contains(&p.batch) {
        return None;
    }
    let entry = decode::in_halves(kernel, device).unwrap_or(*kernel).entry;
    if !kernels::divides(entry.head_size, p.quantized.is_some()) {
        return None;
    }
    let columns = p.kv_heads.checked_mul(p.packed_rows().div_ceil(entry.rows as usize))?;
    let blocks = device.multiprocessors * entry.min_blocks;
    let parts = blocks as usize / columns;
    let tiles = p.batch.checked_mul(p.total_len.div_ceil(entry.keys as usize))?;
    let fits = (1..=MOST).contains(&parts) && columns <= MOST && tiles <= i32::MAX as usize;
    let Kernel { splits, cluster: ranks, .. } = *kernel;
    let equal = Shape { ranks, splits, together: kernel.entry.min_blocks };
    let pays = || Lengths::of(p, columns)?.favor_parts(equal, blocks, device).then_some(());
    if fits { pays().map(|()| Kernel::in_parts(entry, parts as u32)) } else { None }
}

impl Lengths {
    /// Lengths of a call with `columns` row tiles per sequence, over all KV heads. The mean follows
    /// from the size of the cache, which has a row for every key.
    fn of(p: &Problem, columns: usize) -> Option<Self> {
        let pages = p.pages?;
        let rows = pages.blocks.saturating_mul(pages.block_size);
        let seen =
            p.window.map_or(p.total_len, |window| p.total_len.min(window.saturating_add(p.q_len)));
        let [.., width] = p.key_cache_shape(0);
        Some(Self {
            row_tiles: p.batch.saturating_mul(columns) as f64,
            longest: seen as f64,
            mean: (rows as f64 / p.batch as f64).min(seen as f64),
            key_bytes: (2 * width * p.key_cache_dtype().size()) as f64,
        })
    }
}

pub(super) fn launches(kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
    let (p, device, longest) = (job.problem, job.device, job.task.longest);
    let pages = p.pages.ok_or_else(|| Error::NoKernel("the KV cache is not paged".to_owned()))?;
    let cache = pages_strides(p, pages, p.key_cache_dtype().size());
    let params = decode::step_params(kernel, &job, attention_params(&job, cache)?)?;
    let mut bound = decode::bound(kernel, job, &params)?;
    let starts = tensor(p, TensorId::CumulativeSequenceLength, 0);
    let divides = (1..=kernels::MOST_SLOTS).contains(&kernel.parts);
    bound.extend([
        ("starts", if pages.one_each { Arg::Null } else { starts }),
        ("past_seqlens", tensor(p, TensorId::SeqlensK, 0)),
        ("block_table", tensor(p, TensorId::BlockTable, 0)),
        ("schedule", if divides { tensor(p, TensorId::Schedule, 0) } else { Arg::Null }),
    ]);
    let grid = kernels::grid(&params, kernel.cluster);
    let params = paged_params(params, cache, pages, longest)?;
    decode::in_clusters(kernel, device, launch(kernel.entry, grid, &bound, &params)?)
}

/// How `step` divides keys by lengths, if it does.
pub(in crate::plan) fn division(step: &Launch) -> Option<DecodeScheduleParams> {
    let is_step = DIVIDING.contains(&step.entry.family) && step.entry.role == Role::Attention;
    let params = step.params.get(..size_of::<PagedDecodeParams>()).filter(|_| is_step)?;
    let params: PagedDecodeParams = bytemuck::try_pod_read_unaligned(params).ok()?;
    let divides = (1..=kernels::MOST_SLOTS).contains(&params.decode.parts);
    divides.then_some(DecodeScheduleParams {
        step: params,
        keys: step.entry.keys,
        shortest: kernels::shortest_part(step.entry.rows, step.entry.threads),
    })
}

/// The launch that writes the schedule of `step`, if `step` reads one.
pub(in crate::plan) fn schedule(step: &Launch) -> Option<Result<Launch>> {
    let written = step.argument("schedule").filter(|arg| *arg != Arg::Null)?;
    let is_schedule = |entry: &&Entry| {
        entry.family == registry::Family::DecodePaged && entry.role == Role::Schedule
    };
    let entry = registry::entries().find(is_schedule)?;
    let params = division(step)?;
    let arguments = [
        ("starts", step.argument("starts")?),
        ("past_seqlens", step.argument("past_seqlens")?),
        ("schedule", written),
    ];
    Some(launch(entry, [1, 1, 1], &arguments, &params))
}

/// The cache is (block, row, head), and the output's rows are tokens.
pub(super) fn attention_params(job: &Job<'_>, cache: Strides) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, 1)?;
    let cache = Strides { batch: 0, ..cache };
    let out = Strides { batch: 0, ..params.out };
    Ok(AttentionParams { k: cache, v: cache, out, ..params })
}

/// What a paged decode step is told besides.
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
