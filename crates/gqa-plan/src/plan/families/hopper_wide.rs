//! `hopper_wide`: attention with heads of 512 by warpgroups and TMA, over contiguous and paged KV
//! caches, over splits of the keys where rows are few.

use super::hopper::key_maps;
use super::latent::{MOST_SEQUENCES, latent_params, launches, paged_map, scores_alone, splits};
use crate::Result;
use crate::plan::build::u32_of;
use crate::plan::decision::Rejection;
use crate::plan::device::Capability;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::params;
use crate::plan::{requirements, select};
use crate::problem::Problem;
use gqa_kernels::attention::latent as kernels;
use gqa_kernels::params::{LatentParams, Strides};
use gqa_kernels::registry;

pub(in crate::plan) struct HopperWide {
    /// Over paged KV caches, or over contiguous ones.
    pub(in crate::plan) paged: bool,
}

impl Family for HopperWide {
    fn module(&self) -> registry::Family {
        registry::Family::HopperWide
    }

    fn is_paged(&self) -> bool {
        self.paged
    }

    fn follows_append(&self) -> bool {
        self.paged
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::Splits, PlanOption::Cluster]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        if p.head_size != kernels::VALUE_SIZE as usize {
            return Err(Rejection::OtherHeadSize { got: p.head_size });
        }
        scores_alone(p)?;
        if p.batch > MOST_SEQUENCES {
            return Err(Rejection::TooLarge);
        }
        requirements::blocks_of(p, kernels::LEAST_BOX)?;
        requirements::narrow_output(p)?;
        let entry = select::smallest(self, call)?;
        let needs = [Capability::Wgmma, Capability::Tma, Capability::RegisterHandover];
        select::capabilities(&needs, call.device)?;
        let params = wide_params(p, Strides::default(), 1).map_err(|_| Rejection::TooLarge)?;
        let best = if kernels::has_neighbours(&params) { kernels::MAX_CLUSTER } else { 1 };
        let cluster = call.options.cluster.unwrap_or(best).min(kernels::MAX_CLUSTER);
        let splits = splits(call, &params, 2 * p.head_size, cluster);
        Ok(Kernel { cluster, ..Kernel::split(entry, splits) })
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = wide_params(job.problem, job.rows.query.strides, kernel.splits)?;
        let [k, v] = maps(&job, kernel, &params)?;
        let grid = kernels::grid(&params, kernel.cluster);
        launches(job, kernel, vec![("k", k), ("v", v)], &params, grid)
    }
}

/// A contiguous cache has a block for each batch entry.
pub(super) fn wide_params(p: &Problem, queries: Strides, splits: u32) -> Result<LatentParams> {
    if p.pages.is_some() {
        return latent_params(p, queries, splits);
    }
    let attention = params(p, queries, splits)?;
    Ok(LatentParams {
        attention,
        tokens: attention.q_len,
        per_sequence: 1,
        log_block_size: kernels::CONTIGUOUS,
        blocks: attention.batch,
        counts_new: 0,
        entries: u32_of("batch", p.batch)?,
        ctas: 0,
        beginning: 0,
    })
}

/// Tensor maps of K and V.
fn maps(job: &Job<'_>, kernel: &Kernel, params: &LatentParams) -> Result<[Arg; 2]> {
    let [k, v] = job.rows.attended;
    match job.problem.pages {
        Some(_) => Ok([paged_map(job, k, params)?, paged_map(job, v, params)?]),
        None => key_maps(job.problem, &params.attention, &job.rows, kernel.entry),
    }
}
