//! `blackwell_paged`: `blackwell` over a paged KV cache, or over packed keys and values. A launch
//! ahead appends; nothing rotates.

use super::blackwell::{can_do, fills_tiles};
use super::hopper::boxes;
use super::hopper_paged::{attention_params, key_maps, pages};
use crate::plan::build::{block_rows, launch, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, value_size};
use crate::plan::{requirements, select};
use crate::tensors::TensorId;
use crate::{Pages, Result};
use gqa_kernels::attention::blackwell as kernels;
use gqa_kernels::params::{AttentionParams, PagedPrefillParams, PrefillParams};
use gqa_kernels::registry;

pub(in crate::plan) struct BlackwellPaged;

impl Family for BlackwellPaged {
    fn module(&self) -> registry::Family {
        registry::Family::BlackwellPaged
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn computes_all_rows(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFusedKv]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        // Boxes of TMA fit the blocks. Where rows are consecutive, a sequence is a block.
        let is_packed = p.pages.is_some_and(|pages| pages.consecutive && pages.blocks > 0);
        if !is_packed {
            requirements::blocks_of(p, kernels::LEAST_BOX)?;
        }
        // TMA loads queries as they are.
        if p.rotary.is_some() {
            return Err(Rejection::Argument { name: "cos_cache" });
        }
        let entry = select::smallest(self, call)?;
        can_do(call, entry)?;
        requirements::narrow_output(p)?;
        // Rows of few tokens are gathered instead, but not packed ones.
        if call.options.force.is_none() && !is_packed {
            fills_tiles(p)?;
        }
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let pages = pages(job.problem)?;
        let params = params(&job, pages)?;
        let arguments = arguments(&job, &params, pages)?;
        Ok(vec![launch(kernel.entry, kernels::paged_grid(&params), &arguments, &params)?])
    }
}

/// The call. It leaves out sequences with fewer tokens than are the task's.
fn params(job: &Job<'_>, pages: Pages) -> Result<PagedPrefillParams> {
    let p = job.problem;
    let attention = attention_params(job, pages, 1)?;
    Ok(PagedPrefillParams {
        prefill: PrefillParams { attention, v_head_size: value_size(p)?, reserved: 0 },
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.columns())?,
        log_block_size: block_rows(pages)?.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        least: u32_of("tokens", job.task.least)?,
        counts_new: pages.counts_new.into(),
    })
}

fn arguments(
    job: &Job<'_>,
    params: &PagedPrefillParams,
    pages: Pages,
) -> Result<Vec<(&'static str, Arg)>> {
    let p = job.problem;
    let attention = &params.prefill.attention;
    let AttentionParams { head_size, q_heads, q, .. } = *attention;
    let queries = [head_size, params.tokens, q_heads, 1];
    let q = boxes(p, job.rows.query.arg, [q.row, q.head, 0], queries, [kernels::QUERY_BOX, 1]);
    let box_rows = kernels::box_rows(block_rows(pages)?);
    let [k, v] = key_maps(job, attention, params.blocks, box_rows)?;
    let tensor = |id| tensor(p, id, 0);
    Ok(vec![
        ("q", q),
        ("k", k),
        ("v", v),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("head_sink", tensor(TensorId::HeadSink)),
        ("lse", tensor(TensorId::Lse)),
        output(p)[0],
    ])
}
