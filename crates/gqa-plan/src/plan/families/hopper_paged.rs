//! `hopper_paged`: `hopper` over a paged KV cache: prefill, long chunks, and decode steps among
//! them.

use super::hopper::{self, LEAST_ROWS, tensor_map};
use crate::plan::TensorId;
use crate::plan::build::{launch, pages_strides, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
use crate::plan::family::{Call, Family, Job, Kernel, TileQueue};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, params, rotary_params};
use crate::plan::{requirements, select};
use crate::{Error, Pages, Problem, Result};
use bytemuck::Pod;
use gqa_kernels::attention::hopper as kernels;
use gqa_kernels::params::{AttentionParams, HopperParams, PagedHopperParams, Strides};
use gqa_kernels::registry::{self, Entry};

pub(in crate::plan) struct HopperPaged;

impl Family for HopperPaged {
    fn module(&self) -> registry::Family {
        registry::Family::HopperPaged
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn draws_tiles(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFusedKv]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        choose(self, call)
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let paged = PagedCall::new(job, kernel.entry)?;
        Ok(vec![paged.launch(&paged.params)?])
    }
}

/// The kernel of this family, or of that for quantized caches.
pub(super) fn choose(family: &dyn Family, call: &Call<'_>) -> Result<Kernel, Rejection> {
    let p = call.problem;
    if p.lse {
        return Err(Rejection::Argument { name: "lse" });
    }
    requirements::flash(p)?;
    // Boxes of TMA fit the blocks.
    requirements::blocks_of(p, kernels::LEAST_BOX)?;
    let entry = select::smallest(family, call)?;
    suits(call)?;
    requirements::narrow_output(p)?;
    Ok(Kernel::whole(entry))
}

/// Why rows must be gathered from their blocks, or why attention over gathered ones does better.
fn suits(call: &Call<'_>) -> Result<(), Rejection> {
    let (p, device) = (call.problem, call.device);
    hopper::can_do(p, device)?;
    if !p.rotary.is_none_or(hopper::knows) {
        return Err(Rejection::TooLarge);
    }
    let forced = call.options.force.is_some();
    if p.q_len < LEAST_ROWS && !forced && !reading_often_pays(p, device) {
        return Err(Rejection::FewRows { got: p.q_len, min: LEAST_ROWS });
    }
    Ok(())
}

/// Whether each query head reads its keys sooner for itself than they are gathered and read once by
/// their group.
fn reading_often_pays(p: &Problem, device: &DeviceInfo) -> bool {
    /// Time of all SMs to gather a KV head's key and to read it then, in that of one of them for a
    /// key of `hopper`.
    const GATHER_TIME: usize = 6;
    let sms = (device.multiprocessors as usize).max(1);
    let waves = p.q_heads.saturating_mul(p.batch).div_ceil(sms);
    waves * sms < GATHER_TIME.saturating_mul(p.kv_heads * p.batch)
}

/// What a launch takes, over a cache of elements or of quantized values. It rotates queries if
/// anything does: to it the tokens of all sequences are one batch entry. It leaves out sequences
/// with fewer tokens than are the task's.
pub(super) struct PagedCall {
    entry: &'static Entry,
    pub(super) params: PagedHopperParams,
    arguments: Vec<(&'static str, Arg)>,
    blocks: u32,
}

impl PagedCall {
    pub(super) fn new(job: Job<'_>, entry: &'static Entry) -> Result<Self> {
        let counter = job.scratch.count(1);
        let params = paged_params(&job, entry)?;
        Ok(Self {
            entry,
            params,
            arguments: arguments(&job, &params, entry, counter)?,
            blocks: if params.is_secondary == 1 { params.secondary } else { params.primary },
        })
    }

    /// The launch, with the scalars that its kernel takes.
    pub(super) fn launch(&self, params: &impl Pod) -> Result<Launch> {
        let launch = launch(self.entry, [self.blocks, 1, 1], &self.arguments, params)?;
        // Behind a launch that appends an early start costs a short call half a microsecond.
        Ok(Launch { programmatic: self.params.is_secondary == 1, ..launch })
    }
}

/// The call, and which blocks take its work tiles.
fn paged_params(job: &Job<'_>, entry: &Entry) -> Result<PagedHopperParams> {
    let (p, device, task) = (job.problem, job.device, job.task);
    let pages = pages(p)?;
    let params = PagedHopperParams {
        hopper: HopperParams {
            attention: attention_params(job, pages)?,
            rotary: rotary_params(p.rotary, 0)?,
        },
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.per_sequence)?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        least: u32_of("tokens", task.least)?,
        primary: 0,
        secondary: 0,
        is_secondary: 0,
        counts_new: pages.counts_new.into(),
        reserved: 0,
    };
    let [most, ..] = kernels::paged_grid(&params, entry.rows, device.multiprocessors);
    let all = TileQueue { primary: most, secondary: 0, is_secondary: false };
    let queue = task.queue.unwrap_or(all);
    Ok(PagedHopperParams {
        // Every block of the primary launch begins with a work tile.
        primary: queue.primary.min(most),
        secondary: queue.secondary,
        is_secondary: queue.is_secondary.into(),
        ..params
    })
}

/// The cache is (block, row, head), and the output's rows are tokens. Strides of the cache count
/// [`columns`].
pub(super) fn attention_params(job: &Job<'_>, pages: Pages) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, 1)?;
    let columns = columns(job.problem)?;
    let cache = pages_strides(job.problem, pages, job.problem.dtype.size());
    let out = Strides { batch: 0, ..params.out };
    let params = AttentionParams { k: cache, v: cache, out, ..params };
    let read = AttentionParams { batch: 1, head_size: columns, ..params };
    let l2_section = kernels::l2_section(&read, job.device.l2_bytes);
    Ok(AttentionParams { l2_section, ..params })
}

/// Columns of a row of the cache, as TMA has it: of 16 bits, whatever these are.
fn columns(p: &Problem) -> Result<u32> {
    let [.., width] = p.key_cache_shape(0);
    u32_of("bytes of a row", width * p.key_cache_dtype().size() / p.dtype.size())
}

fn arguments(
    job: &Job<'_>,
    params: &PagedHopperParams,
    entry: &Entry,
    counter: Arg,
) -> Result<Vec<(&'static str, Arg)>> {
    let p = job.problem;
    let AttentionParams { head_size, q_heads, kv_heads, q, k: cache, .. } = params.hopper.attention;
    let block_size = u32_of("rows of a block", pages(p)?.block_size)?;
    let queries = [head_size, params.tokens, q_heads, 1];
    let keys = [columns(p)?, block_size, kv_heads, params.blocks];
    let box_rows = kernels::box_rows(block_size, entry.keys);
    let [k, v] = job.rows.attended.map(|arg| tensor_map(p, arg, cache, keys, box_rows));
    let tensor = |id| tensor(p, id, 0);
    Ok(vec![
        ("q", tensor_map(p, job.rows.query.arg, q, queries, kernels::QUERY_BOX)),
        ("k", k),
        ("v", v),
        ("cos", tensor(TensorId::CosCache)),
        ("sin", tensor(TensorId::SinCache)),
        ("k_scale", tensor(TensorId::KScale)),
        ("v_scale", tensor(TensorId::VScale)),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("head_sink", tensor(TensorId::HeadSink)),
        output(p)[0],
        ("counter", counter),
    ])
}

pub(super) fn pages(p: &Problem) -> Result<Pages> {
    p.pages.ok_or_else(|| Error::NoKernel("the KV cache is not paged".to_owned()))
}
