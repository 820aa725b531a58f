//! `tiled_paged`: `tiled` over a paged KV cache: prefill and long chunks on GPUs without the
//! instructions of `hopper_paged`.

use super::hopper_paged::{attention_params, pages};
use super::{hopper, split_kv};
use crate::Result;
use crate::plan::build::{launch, page_steps, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::Capability;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, rotary_params};
use crate::plan::{requirements, select};
use crate::tensors::TensorId;
use gqa_kernels::attention::tiled as kernels;
use gqa_kernels::params::PagedTiledParams;
use gqa_kernels::registry;

pub(in crate::plan) struct TiledPaged;

impl Family for TiledPaged {
    fn module(&self) -> registry::Family {
        registry::Family::TiledPaged
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFusedKv]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::flash(call.problem)?;
        requirements::blocks_of(call.problem, kernels::LEAST_BLOCK)?;
        let entry = select::smallest(self, call)?;
        requirements::narrow_output(call.problem)?;
        if call.options.force.is_none() && !call.problem.batch_invariant {
            suits(call)?;
        }
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = params(&job)?;
        let grid = kernels::paged_grid(&params, kernel.entry.rows);
        Ok(vec![launch(kernel.entry, grid, &arguments(&job), &params)?])
    }
}

/// Errs where gathering the rows and attending to the copy is faster.
fn suits(call: &Call<'_>) -> Result<(), Rejection> {
    let (p, device) = (call.problem, call.device);
    if hopper::can_do(p, device).is_ok() {
        return Err(Rejection::FasterTiles { by: Capability::Wgmma });
    }
    match split_kv::splits_of_few_rows(p, device) {
        Some(splits) if splits > 1 => Err(Rejection::Splits { splits }),
        _ => Ok(()),
    }
}

/// The parameters of the call. The launch rotates the queries if the call has RoPE, and skips
/// sequences with fewer tokens than `Task::least`.
fn params(job: &Job<'_>) -> Result<PagedTiledParams> {
    let p = job.problem;
    let pages = pages(p)?;
    // Kernels number the rows of all tokens in 32 bits.
    u32_of("query rows", pages.tokens.saturating_mul(p.q_heads))?;
    let attention = attention_params(job, pages, 1)?;
    Ok(PagedTiledParams {
        attention,
        rotary: rotary_params(p.rotary, 0)?,
        steps: page_steps(attention.k),
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.columns())?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        least: u32_of("tokens", job.task.least)?,
        counts_new: pages.counts_new.into(),
    })
}

fn arguments(job: &Job<'_>) -> Vec<(&'static str, Arg)> {
    let [k, v] = job.rows.attended;
    let tensor = |id| tensor(job.problem, id, 0);
    vec![
        ("q", job.rows.query.arg),
        ("k", k),
        ("v", v),
        ("cos", tensor(TensorId::CosCache)),
        ("sin", tensor(TensorId::SinCache)),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("head_sink", tensor(TensorId::HeadSink)),
        ("lse", tensor(TensorId::Lse)),
        output(job.problem)[0],
    ]
}
