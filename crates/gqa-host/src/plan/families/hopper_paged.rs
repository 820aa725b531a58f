//! `hopper_paged`: `hopper` over a paged KV cache: prefill, long chunks, and decode steps among them.

use super::hopper::{self, LEAST_ROWS, tensor_map};
use crate::plan::build::{launch, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
use crate::plan::family::{Call, Family, Job, Kernel, TileQueue};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{output, params, rotary_params};
use crate::plan::tensors::TensorId;
use crate::plan::{requirements, select};
use crate::{Error, Problem, Result};
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

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFusedKv]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        if p.lse {
            return Err(Rejection::Argument { name: "lse" });
        }
        requirements::flash(p)?;
        // Boxes of TMA fit the blocks.
        requirements::blocks_of(p, kernels::LEAST_BOX)?;
        let entry = select::smallest(self, call)?;
        suits(call)?;
        requirements::narrow_output(p)?;
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        paged_launch(job, kernel.entry).map(|launch| vec![launch])
    }
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

/// It rotates queries if anything does: to it the tokens of all sequences are one batch entry. It
/// leaves out sequences with fewer tokens than are the task's.
fn paged_launch(job: Job<'_>, entry: &'static Entry) -> Result<Launch> {
    let (p, device, task) = (job.problem, job.device, job.task);
    let counter = job.scratch.count(1);
    let pages = p.pages.ok_or_else(|| Error::NoKernel("the cache has no blocks".to_owned()))?;
    let attention = params(p, job.rows.query.strides, 1)?;
    let row = u64::from(attention.kv_heads) * u64::from(attention.head_size);
    let cache =
        Strides { row, head: attention.head_size.into(), batch: row * pages.block_size as u64 };
    let out = Strides { batch: 0, ..attention.out };
    let mut attention = AttentionParams { k: cache, v: cache, out, ..attention };
    attention.section =
        kernels::section(&AttentionParams { batch: 1, ..attention }, device.l2_bytes);
    let params = PagedHopperParams {
        hopper: HopperParams { attention, rotary: rotary_params(p.rotary, 0)? },
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.per_sequence)?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        least: u32_of("tokens", task.least)?,
        leaders: 0,
        helpers: 0,
        helps: 0,
    };
    let grid = kernels::paged_grid(&params, entry.rows, device.multiprocessors);
    let all = TileQueue { primary: grid[0], secondary: 0, is_secondary: false };
    let TileQueue { primary, secondary, is_secondary } = task.queue.unwrap_or(all);
    // Every block of the primary launch begins with a work tile.
    let primary = primary.min(grid[0]);
    let params = PagedHopperParams {
        leaders: primary,
        helpers: secondary,
        helps: is_secondary.into(),
        ..params
    };
    let blocks = if is_secondary { secondary } else { primary };
    let AttentionParams { head_size, q_heads, kv_heads, .. } = attention;
    let block_size = u32_of("rows of a block", pages.block_size)?;
    let queries = [head_size, params.tokens, q_heads, 1];
    let keys = [head_size, block_size, kv_heads, params.blocks];
    let box_rows = kernels::box_rows(block_size, entry.keys);
    let [k, v] = job.rows.attended.map(|arg| tensor_map(p, arg, cache, keys, box_rows));
    let tensor = |id| tensor(p, id, 0);
    let arguments = [
        ("q", tensor_map(p, job.rows.query.arg, attention.q, queries, kernels::QUERY_BOX)),
        ("k", k),
        ("v", v),
        ("cos", tensor(TensorId::CosCache)),
        ("sin", tensor(TensorId::SinCache)),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("head_sink", tensor(TensorId::HeadSink)),
        output(p)[0],
        ("counter", counter),
    ];
    let aside = task.queue.is_some() && !is_secondary;
    Ok(Launch { aside, ..launch(entry, [blocks, 1, 1], &arguments, &params)? })
}
