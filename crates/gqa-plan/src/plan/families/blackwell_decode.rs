//! `blackwell_decode` and `blackwell_decode_paged`: decode steps with tensor memory, in clusters of
//! blocks that share the keys, behind a launch that rotates and appends.

use super::decode;
use super::decode::{cache_of, paged_attention, paged_params};
use super::hopper::tensor_map;
use super::hopper_paged::pages;
use crate::Result;
use crate::plan::build::{block_rows, launch, tensor};
use crate::plan::decision::Rejection;
use crate::plan::device::Capability;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{arguments, scale_tensors};
use crate::plan::{requirements, select};
use crate::problem::{CacheBinding, Problem};
use crate::tensors::TensorId;
use bytemuck::Zeroable;
use gqa_kernels::attention::blackwell_decode::{self as kernels, LEAST_BOX};
use gqa_kernels::params::{AttentionParams, DecodeParams, RotaryParams, Strides};
use gqa_kernels::registry::{self, Entry};

pub(super) struct BlackwellDecode {
    /// Over paged KV caches, or over contiguous ones.
    pub(super) paged: bool,
}

/// The largest cluster that the planner chooses: GPUs need not have room for larger ones.
const MOST_RANKS: u32 = 8;

impl Family for BlackwellDecode {
    fn module(&self) -> registry::Family {
        match self.paged {
            true => registry::Family::BlackwellDecodePaged,
            false => registry::Family::BlackwellDecode,
        }
    }

    fn is_paged(&self) -> bool {
        self.paged
    }

    fn follows_append(&self) -> bool {
        self.paged
    }

    fn options(&self) -> &'static [PlanOption] {
        use PlanOption::{Cluster, DisableFlashAttention, DisableFlashDecode, DisableFusedKv};
        match self.paged {
            true => &[DisableFlashAttention, DisableFlashDecode, DisableFusedKv, Cluster],
            false => &[DisableFlashAttention, DisableFlashDecode, Cluster],
        }
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let (p, device) = (call.problem, call.device);
        requirements::flash(p)?;
        if self.paged {
            requirements::blocks_of(p, LEAST_BOX)?;
            rotates_ahead(p)?;
        }
        let entry = select::smallest(self, call)?;
        reads_cache(p, entry)?;
        select::capabilities(&[Capability::Tma, Capability::Clusters], device)?;
        if !entry.runs_on(device.sm) {
            return Err(Rejection::Target { sm: device.sm });
        }
        if p.softcap_in_f32() > MAX_SOFTCAP {
            return Err(Rejection::Softcap { got: p.softcap_in_f32(), max: MAX_SOFTCAP });
        }
        let (rows, max) = (p.packed_rows(), entry.rows);
        if rows > max as usize {
            return Err(Rejection::Rows { got: rows, max });
        }
        let clusters = clusters(p, call)?;
        let ranks = call.options.cluster.unwrap_or_else(|| ranks(p, clusters, call));
        Ok(Kernel { cluster: ranks.min(kernels::MOST_RANKS), ..Kernel::whole(entry) })
    }

    fn fuses(&self, problem: &Problem, entry: &Entry, _fused: bool) -> FusedPrologue {
        let format = problem.quantized.map(|how| how.format);
        let reads_quantized = format.is_some() && entry.holds(format);
        FusedPrologue { reads_quantized, ..FusedPrologue::default() }
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let device = job.device;
        let launch = match self.paged {
            true => over_blocks(kernel, job)?,
            false => over_rows(kernel, job)?,
        };
        decode::in_clusters(kernel, device, launch)
    }
}

/// Of the kernel's tanh, as of `hopper`.
const MAX_SOFTCAP: f32 = 1000.0;

/// What appends new rows to blocks rotates queries too, for all sequences of the call; other
/// kernels that may take some of them rotate themselves.
fn rotates_ahead(p: &Problem) -> Result<(), Rejection> {
    match p.rotary.is_some() && (!p.has_single_tokens() || p.reads_pages_only()) {
        true => Err(Rejection::Argument { name: "cos_cache" }),
        false => Ok(()),
    }
}

/// A cache in the element type, or of float8 in rows of whole vectors, with the same scales for
/// many rows.
fn reads_cache(p: &Problem, entry: &Entry) -> Result<(), Rejection> {
    let Some(how) = p.quantized else { return Ok(()) };
    requirements::no_row_scales(p)?;
    let [.., width] = p.key_cache_shape(0);
    match p.cache {
        _ if !entry.holds(Some(how.format)) => Err(Rejection::Format { got: how.format }),
        _ if width * p.key_cache_dtype().size() % Problem::VECTOR_BYTES != 0 => {
            Err(Rejection::OtherHeadSize { got: p.head_size })
        }
        CacheBinding::Shared => Ok(()),
        _ if p.pages.is_some() => Ok(()),
        _ => Err(Rejection::NotShared),
    }
}

/// Clusters of the call, which the device must hold at a time: the kernels are made for few
/// sequences, and have an SM each. GQA_FORCE knows better.
fn clusters(p: &Problem, call: &Call<'_>) -> Result<u32, Rejection> {
    /// CUDA starts no more CTAs in y and z.
    const MOST: usize = 65_535;
    let max = call.device.multiprocessors;
    let got = p.kv_heads.saturating_mul(p.batch);
    match got {
        _ if p.kv_heads.max(p.batch) > MOST => Err(Rejection::TooLarge),
        _ if call.forced.is_some() || got <= max as usize => Ok(got as u32),
        _ => Err(Rejection::RowTiles { got, max }),
    }
}

/// CTAs of a cluster: the most for which all clusters run at a time and each CTA has keys. This is
/// a prediction, which was not measured.
fn ranks(p: &Problem, clusters: u32, call: &Call<'_>) -> u32 {
    let seen = |keys: u32| match p.window {
        Some(window) => keys.min((window.saturating_add(p.q_len)) as u32),
        None => keys,
    };
    let tiles = seen(p.most_keys()).div_ceil(kernels::KEYS);
    // Clusters cannot use all SMs of each GPC.
    let at_a_time = call.device.multiprocessors / 11 * 10;
    let mut ranks = 1;
    while ranks < MOST_RANKS && 2 * ranks <= tiles && 2 * ranks * clusters <= at_a_time {
        ranks *= 2;
    }
    ranks
}

/// The step's parameters: one row tile, and rows that others have appended and rotated.
fn step(kernel: &Kernel, job: &Job<'_>, attention: AttentionParams) -> Result<DecodeParams> {
    let params = decode::step_params(kernel, job, attention)?;
    Ok(DecodeParams { rotary: RotaryParams::zeroed(), new_len: 0, ahead: 0, ..params })
}

/// A map of keys or values, whose columns have 16 bits whatever the cache holds.
fn map(p: &Problem, arg: Arg, cache: Strides, size: [u32; 4], box_rows: u32) -> Arg {
    let [width, rows, heads, outer] = size;
    let halves = (p.dtype.size() / p.key_cache_dtype().size()) as u64;
    let strides =
        Strides { row: cache.row / halves, head: cache.head / halves, batch: cache.batch / halves };
    let size = [width / halves as u32, rows, heads, outer];
    tensor_map(p, arg, strides, size, box_rows)
}

/// Over a contiguous cache.
fn over_rows(kernel: &Kernel, job: Job<'_>) -> Result<Launch> {
    let p = job.problem;
    let params = step(kernel, &job, decode::attention_params(kernel, &job)?)?;
    let AttentionParams { k, v, head_size, capacity, kv_heads, batch, .. } = params.attention;
    let size = [head_size, capacity, kv_heads, batch];
    let [keys, values] = job.rows.attended;
    let mut bound = bound(&job);
    let map = |arg, cache| map(p, arg, cache, size, kernels::KEYS);
    bound.extend([("k", map(keys, k)), ("v", map(values, v))]);
    launch(kernel.entry, kernels::grid(&params, kernel.cluster), &bound, &params)
}

/// Over blocks.
fn over_blocks(kernel: &Kernel, job: Job<'_>) -> Result<Launch> {
    let (p, longest) = (job.problem, job.task.longest);
    let pages = pages(p)?;
    let cache = cache_of(p, pages);
    let params = step(kernel, &job, paged_attention(&job, cache)?)?;
    let AttentionParams { head_size, kv_heads, .. } = params.attention;
    let grid = kernels::grid(&params, kernel.cluster);
    let params = paged_params(params, cache, pages, longest)?;
    let size = [head_size, block_rows(pages)?, kv_heads, params.blocks];
    let [keys, values] = job.rows.attended;
    let starts = tensor(p, TensorId::CumulativeSequenceLength, 0);
    let mut bound = bound(&job);
    let map = |arg| map(p, arg, cache, size, size[1].min(kernels::KEYS));
    bound.extend([
        ("k", map(keys)),
        ("v", map(values)),
        ("starts", if pages.one_each { Arg::Null } else { starts }),
        ("past_seqlens", tensor(p, TensorId::SeqlensK, 0)),
        ("block_table", tensor(p, TensorId::BlockTable, 0)),
    ]);
    launch(kernel.entry, grid, &bound, &params)
}

/// All arguments but the cache.
fn bound(job: &Job<'_>) -> Vec<(&'static str, Arg)> {
    let of_cache = |(name, _): &(&str, Arg)| !matches!(*name, "k" | "v");
    let mut bound: Vec<_> =
        arguments(job.problem, &job.rows).into_iter().filter(of_cache).collect();
    bound.extend(scale_tensors(job.problem));
    bound
}
