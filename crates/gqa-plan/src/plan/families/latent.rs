//! `latent`: decode steps over a paged latent KV cache; and what `hopper_wide` shares with it.

use super::hopper::tensor_map;
use super::hopper_paged::pages;
use crate::plan::build::{launch, pages_strides, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::{Capability, DeviceInfo};
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, params, scale_tensors};
use crate::plan::{requirements, select};
use crate::problem::{Problem, Quantization, Scales, Sink};
use crate::tensors::TensorId;
use crate::{DType, Error, Result};
use gqa_kernels::attention::latent::{self as kernels, Shape};
use gqa_kernels::params::{AttentionParams, LatentParams, Strides};
use gqa_kernels::registry::{self, Entry, Role, entries};

pub(in crate::plan) struct Latent;

/// Elements of a 16-bit row whose load takes as long as converting a float8 row.
const CONVERTED_ELEMENTS: usize = 670;

/// Most CTAs in z of a grid.
pub(super) const MOST_SEQUENCES: usize = 65_535;

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

    fn follows_append(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        use PlanOption::{DisableFlashAttention, DisableFusedKv, Splits};
        &[DisableFlashAttention, DisableFusedKv, Splits]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        let size = [kernels::Latent::KEY_SIZE, kernels::VALUE_SIZE].map(|size| size as usize);
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
        holds(entry, p)?;
        select::capabilities(&[Capability::Wgmma], call.device)?;
        let params = latent_params(p, Strides::default(), 1).map_err(|_| Rejection::TooLarge)?;
        let elements = if p.quantized.is_some() { CONVERTED_ELEMENTS } else { p.head_size };
        if let Some(kernel) = divided(call, entry, &params) {
            return Ok(kernel);
        }
        Ok(Kernel::split(entry, splits(call, &params, elements, 1)))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = latent_params(job.problem, job.rows.query.strides, kernel.splits)?;
        let beginning = if kernel.parts > 0 { kernels::BEGINNING } else { 0 };
        let params = LatentParams { ctas: kernel.parts, beginning, ..params };
        let keys = paged_map(&job, job.rows.attended[0], &params)?;
        let grid = kernels::grid(&params, kernel.cluster);
        launches(job, kernel, vec![("k", keys)], &params, grid)
    }
}

/// Errs unless the cache's format is the kernel's, with one scale.
pub(super) fn holds(entry: &Entry, p: &Problem) -> Result<(), Rejection> {
    let Some(Quantization { format, scales }) = p.quantized else { return Ok(()) };
    requirements::no_row_scales(p)?;
    match scales {
        _ if !entry.holds(Some(format)) => Err(Rejection::Format { got: format }),
        Scales::PerChannel => Err(Rejection::Argument { name: "k_scale" }),
        _ => Ok(()),
    }
}

/// The attention launch, and the merge if keys are split.
pub(super) fn launches(
    job: Job<'_>,
    kernel: &Kernel,
    maps: Vec<(&'static str, Arg)>,
    params: &LatentParams,
    grid: [u32; 3],
) -> Result<Vec<Launch>> {
    let Kernel { entry, cluster, .. } = *kernel;
    let merges = params.attention.splits > 1 || params.ctas > 0;
    let (out, lse) = kernels::partial_elements(params);
    let mut take = |elements: usize| match merges {
        true => job.scratch.take(elements, size_of::<f32>()),
        false => Ok(Arg::Null),
    };
    let starts = if params.ctas > 0 { kernels::start_words(params) } else { 0 };
    let partial = [
        ("partial_out", take(out)?),
        ("partial_lse", take(lse)?),
        ("range_starts", if starts > 0 { take(starts)? } else { Arg::Null }),
    ];
    let arguments = [&maps[..], &arguments(&job), &partial].concat();
    let programmatic = job.device.has(Capability::ProgrammaticLaunch);
    let launch =
        |entry, grid| Ok(Launch { programmatic, ..launch(entry, grid, &arguments, params)? });
    let attention = launch(entry, grid)?;
    let mut launches = vec![Launch { cluster, ..attention }];
    if merges {
        let grid = match params.ctas {
            0 => kernels::merge_grid(params),
            _ => kernels::merge_parts_grid(params),
        };
        launches.push(launch(merge_of(entry, params.ctas > 0)?, grid)?);
    }
    Ok(launches)
}

/// The merge for the element type of such a kernel: of splits, or of keys that CTAs divide.
fn merge_of(entry: &Entry, divides: bool) -> Result<&'static Entry> {
    let family = if divides { registry::Family::Latent } else { registry::Family::LatentMma };
    let is_it = |other: &&Entry| {
        (other.family, other.role, other.dtype) == (family, Role::Merge, entry.dtype)
    };
    let missing = || Error::NoKernel(format!("{} has no merge", entry.name));
    entries().find(is_it).ok_or_else(missing)
}

/// Errs unless scores depend on q·k, lengths and a softcap only.
pub(super) fn scores_alone(p: &Problem) -> Result<(), Rejection> {
    let refuse = |name| Err(Rejection::Argument { name });
    // The launch that appends also rotates the queries, if every sequence has the same number of
    // tokens.
    let is_even = p.pages.is_none_or(|pages| pages.tokens == p.batch * p.q_len);
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

/// The kernel whose CTAs divide the keys of all sequences by the lengths on the device, if that is
/// estimated to be faster than equal splits of each sequence.
fn divided(call: &Call<'_>, entry: &Entry, params: &LatentParams) -> Option<Kernel> {
    let Call { problem: p, device, options, forced } = *call;
    let is_sister = |other: &&Entry| {
        other.role == Role::SplitAttention
            && (other.family, other.dtype, other.formats)
                == (entry.family, entry.dtype, entry.formats)
    };
    let sister = entries().find(is_sister)?;
    let [row_tiles, ..] = kernels::grid(params, 1);
    let ctas = device.multiprocessors / row_tiles.max(1);
    let fits = ctas > 0 && p.batch <= kernels::MOST_SEQUENCES as usize;
    if options.splits.is_some() || p.batch_invariant || !fits {
        return None;
    }
    let kernel = Kernel::in_parts(sister, ctas);
    if let Some(forced) = forced {
        let is_merge = (forced.family, forced.role) == (sister.family, Role::Merge);
        return (is_merge || forced.name == sister.name).then_some(kernel);
    }
    pays(p, params, ctas, device).then_some(kernel)
}

/// Whether dividing all keys among that many CTAs of each row tile is estimated to pay.
fn pays(p: &Problem, params: &LatentParams, ctas: u32, device: &DeviceInfo) -> bool {
    /// Least gain: lengths may be more equal than the size of the cache says.
    const GAIN: f64 = 1.1;
    /// Mean length as a part of the longest, above which equal splits were measured as fast.
    const MOST_EQUAL: f64 = 0.9;
    let Some(pages) = p.pages.filter(|_| p.batch > 1) else { return false };
    // The cache has a row for every key.
    let rows = pages.blocks.saturating_mul(pages.block_size) / p.batch;
    let longest = p.most_keys();
    let lengths = kernels::Lengths { longest, mean: (rows as f64).min(f64::from(longest)) };
    if lengths.mean > MOST_EQUAL * f64::from(longest) {
        return false;
    }
    let key_bytes = (p.head_size * p.dtype.size()) as u32;
    let equal = kernels::Time { p: params, key_bytes, multiprocessors: device.multiprocessors };
    let divided = LatentParams { ctas, beginning: kernels::BEGINNING, ..*params };
    let divided = kernels::Time { p: &divided, ..equal };
    GAIN * divided.divided(lengths) <= equal.of_best_splits(lengths)
}

/// Whether CTAs of a kernel with tiles of 64 rows divide the keys of all sequences of a call in
/// which lengths differ, so that `latent_mma`, whose CTAs do not, is asked later.
pub(super) fn divides(p: &Problem, device: &DeviceInfo) -> bool {
    let Some(pages) = p.pages.filter(|_| device.has(Capability::Wgmma)) else { return false };
    let is_taken = p.quantized.is_none()
        && p.dtype != DType::F32
        && pages.block_size >= kernels::LEAST_BOX as usize
        && pages.block_size.is_power_of_two()
        && !p.batch_invariant
        && p.batch <= kernels::MOST_SEQUENCES as usize
        && scores_alone(p).is_ok();
    let Ok(params) = latent_params(p, Strides::default(), 1) else { return false };
    let [row_tiles, ..] = kernels::grid(&params, 1);
    let ctas = device.multiprocessors / row_tiles.max(1);
    is_taken && ctas > 0 && pays(p, &params, ctas, device)
}

/// Number of KV splits; tiles have `elements` elements per token.
pub(super) fn splits(call: &Call<'_>, params: &LatentParams, elements: usize, cluster: u32) -> u32 {
    let Call { problem: p, device, options, .. } = *call;
    let key_bytes = (elements * p.dtype.size()) as u32;
    let time = kernels::Time { p: params, key_bytes, multiprocessors: device.multiprocessors };
    let best = || time.best_splits(p.most_keys(), cluster);
    options.splits.unwrap_or_else(best)
}

/// The parameters of a call over a paged KV cache.
pub(super) fn latent_params(p: &Problem, queries: Strides, splits: u32) -> Result<LatentParams> {
    let pages = pages(p)?;
    let params = params(p, queries, splits)?;
    let out = Strides { batch: 0, ..params.out };
    Ok(LatentParams {
        attention: AttentionParams { out, ..params },
        tokens: u32_of("tokens", pages.tokens)?,
        per_sequence: u32_of("blocks of a sequence", pages.columns())?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        counts_new: pages.counts_new.into(),
        entries: 1,
        ctas: 0,
        beginning: 0,
    })
}

fn arguments(job: &Job<'_>) -> Vec<(&'static str, Arg)> {
    let p = job.problem;
    let tensor = |id| tensor(p, id, 0);
    vec![
        ("q", job.rows.query.arg),
        ("starts", tensor(TensorId::CumulativeSequenceLength)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("query_seqlens", tensor(TensorId::QuerySeqlens)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("lse", tensor(TensorId::Lse)),
        scale_tensors(p)[0],
        output(p)[0],
    ]
}

/// The tensor map of a paged cache: a box is one chunk of columns, and the rows of a tile or of a
/// smaller block.
pub(super) fn paged_map(job: &Job<'_>, cache: Arg, params: &LatentParams) -> Result<Arg> {
    let p = job.problem;
    let strides = pages_strides(p, pages(p)?, p.dtype.size());
    let rows = 1 << params.log_block_size;
    // Columns of 16 bits, also for float8.
    let [.., width] = p.key_cache_shape(0);
    let columns = u32_of("bytes of a row", width * p.key_cache_dtype().size() / p.dtype.size())?;
    let size = [columns, rows, params.attention.kv_heads, params.blocks];
    Ok(tensor_map(p, cache, strides, size, kernels::KEYS.min(rows)))
}
