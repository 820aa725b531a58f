//! `decode_paged`: `decode` over a paged KV cache.

use super::decode;
use crate::plan::TensorId;
use crate::plan::build::{launch, page_steps, pages_strides, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::params;
use crate::plan::requirements;
use crate::{Error, Pages, Problem, Result};
use gqa_kernels::attention::decode::{self as kernels, Blocks, Layout as _};
use gqa_kernels::params::{AttentionParams, DecodeParams, PagedDecodeParams, Strides};
use gqa_kernels::registry::{self, Entry};

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

/// Blocks of whole pieces, and no mask that tells several tokens apart otherwise than their
/// positions do.
pub(super) fn choose(module: registry::Family, call: &Call<'_>) -> Result<Kernel, Rejection> {
    if !call.problem.has_single_tokens() {
        requirements::flash(call.problem)?;
    }
    requirements::blocks_of(call.problem, Blocks::PIECE)?;
    decode::choose(module, call)
}

pub(super) fn launches(kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
    let (p, device, longest) = (job.problem, job.device, job.task.longest);
    let pages = p.pages.ok_or_else(|| Error::NoKernel("the KV cache is not paged".to_owned()))?;
    let cache = pages_strides(p, pages, p.key_cache_dtype().size());
    let params = decode::step_params(kernel, &job, attention_params(&job, cache)?)?;
    let mut bound = decode::bound(kernel, job, &params)?;
    let starts = tensor(p, TensorId::CumulativeSequenceLength, 0);
    bound.extend([
        ("starts", if pages.one_each { Arg::Null } else { starts }),
        ("past_seqlens", tensor(p, TensorId::SeqlensK, 0)),
        ("block_table", tensor(p, TensorId::BlockTable, 0)),
    ]);
    let grid = kernels::grid(&params, kernel.cluster);
    let params = paged_params(params, cache, pages, longest)?;
    decode::in_clusters(kernel, device, launch(kernel.entry, grid, &bound, &params)?)
}

/// The cache is (block, row, head), and the output's rows are tokens.
fn attention_params(job: &Job<'_>, cache: Strides) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, 1)?;
    let cache = Strides { batch: 0, ..cache };
    let out = Strides { batch: 0, ..params.out };
    Ok(AttentionParams { k: cache, v: cache, out, ..params })
}

/// What a paged decode step is told besides.
fn paged_params(
    decode: DecodeParams,
    cache: Strides,
    pages: Pages,
    longest: usize,
) -> Result<PagedDecodeParams> {
    Ok(PagedDecodeParams {
        decode,
        steps: page_steps(cache),
        per_sequence: u32_of("blocks of a sequence", pages.per_sequence)?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        tokens: u32_of("tokens", pages.tokens)?,
        longest: u32_of("query rows", longest)?,
        counts_new: pages.counts_new.into(),
    })
}
