//! `latent`: decode steps over a paged latent KV cache.

use super::hopper::boxes;
use super::hopper_paged::{beside, pages};
use crate::Result;
use crate::plan::TensorId;
use crate::plan::build::{launch, pages_strides, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::{Capability, DeviceInfo};
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, params};
use crate::plan::{requirements, select};
use crate::problem::{Pages, Problem, Sink};
use gqa_kernels::attention::latent as kernels;
use gqa_kernels::params::{AttentionParams, LatentParams, Strides};
use gqa_kernels::registry::{self, Role};

pub(in crate::plan) struct Latent;

/// Most CTAs in z of a grid.
const MOST_SEQUENCES: usize = 65_535;

impl Family for Latent {
    fn module(&self) -> registry::Family {
        registry::Family::Latent
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn takes_latent(&self) -> bool {
        true
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        use PlanOption::{DisableFlashAttention, DisableFusedKv, Splits};
        &[DisableFlashAttention, DisableFusedKv, Splits]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        let size = [kernels::KEY_SIZE, kernels::VALUE_SIZE].map(|size| size as usize);
        if !p.latent || [p.head_size, p.v_head_size] != size {
            return Err(Rejection::OtherHeadSize { got: p.head_size });
        }
        scores_alone(p)?;
        if p.batch > MOST_SEQUENCES {
            return Err(Rejection::TooLarge);
        }
        requirements::blocks_of(p, kernels::LEAST_BOX)?;
        requirements::narrow_output(p)?;
        let entry = select::smallest(self, call)?;
        select::capabilities(&[Capability::Wgmma], call.device)?;
        let splits = match call.options.splits {
            Some(splits) => splits,
            None => splits(p, call.device).map_err(|_| Rejection::TooLarge)?,
        };
        Ok(Kernel::split(entry, splits))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, entry) = (job.problem, kernel.entry);
        let params = latent_params(p, job.rows.query.strides, kernel.splits)?;
        let mut arguments = arguments(&job, &params)?;
        let merges = kernel.splits > 1;
        let (out, lse) = kernels::partial_elements(&params);
        let mut take = |elements: usize| match merges {
            true => job.scratch.take(elements, size_of::<f32>()),
            false => Ok(Arg::Null),
        };
        arguments.extend([("partial_out", take(out)?), ("partial_lse", take(lse)?)]);
        let programmatic = job.device.has(Capability::ProgrammaticLaunch);
        let launch =
            |entry, grid| Ok(Launch { programmatic, ..launch(entry, grid, &arguments, &params)? });
        let mut launches = vec![launch(entry, kernels::grid(&params))?];
        if merges {
            launches.push(launch(beside(entry, Role::Merge)?, kernels::merge_grid(&params))?);
        }
        Ok(launches)
    }
}

/// Nothing but q·k, lengths and a softcap decides scores.
fn scores_alone(p: &Problem) -> Result<(), Rejection> {
    let refuse = |name| Err(Rejection::Argument { name });
    // What appends new rows rotates queries too, and leaves them in the places of as many tokens of
    // each sequence.
    let is_even = p.pages.is_some_and(|pages| pages.tokens == p.batch * p.q_len);
    let turned_ahead = is_even && !p.reads_pages_only();
    match () {
        () if p.rotary.is_some() && !turned_ahead => refuse("cos_cache"),
        () if p.tree_mask => refuse("tree_mask"),
        () if p.sink != Sink::None => refuse("head_sink"),
        () if p.window.is_some() || p.right_window.is_some() => Err(Rejection::Window),
        () if p.total_len == 0 => Err(Rejection::NoKeys),
        () => Ok(()),
    }
}

fn splits(p: &Problem, device: &DeviceInfo) -> Result<u32> {
    let params = latent_params(p, Strides::default(), 1)?;
    Ok(kernels::splits(&params, p.most_keys(), device.multiprocessors))
}

fn latent_params(p: &Problem, queries: Strides, splits: u32) -> Result<LatentParams> {
    let pages = pages(p)?;
    let params = params(p, queries, splits)?;
    let out = Strides { batch: 0, ..params.out };
    Ok(LatentParams {
        attention: AttentionParams { out, ..params },
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.per_sequence)?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        counts_new: pages.counts_new.into(),
        reserved: 0,
    })
}

fn arguments(job: &Job<'_>, params: &LatentParams) -> Result<Vec<(&'static str, Arg)>> {
    let p = job.problem;
    let tensor = |id| tensor(p, id, 0);
    Ok(vec![
        ("k", keys(job, pages(p)?, params)),
        ("q", job.rows.query.arg),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("lse", tensor(TensorId::Lse)),
        output(p)[0],
    ])
}

/// The cache by chunks of channels, which are the third dimension: a box has a chunk of a tile's
/// rows, or where blocks are smaller of a block's.
fn keys(job: &Job<'_>, pages: Pages, params: &LatentParams) -> Arg {
    let p = job.problem;
    let [key] = [job.rows.attended[0]];
    let cache = pages_strides(p, pages, p.dtype.size());
    let rows = 1 << params.log_block_size;
    let size = [kernels::CHUNK, rows, kernels::CHUNKS, params.blocks];
    let tile = [kernels::KEYS.min(rows), 1];
    boxes(p, key, [cache.row, u64::from(kernels::CHUNK), cache.batch], size, tile)
}
