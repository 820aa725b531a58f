//! `latent_mma`: attention over a latent KV cache by `mma.sync`, paged or contiguous, on GPUs from
//! compute capability 8.0 on. Over blocks `latent` takes calls on Hopper that have [more than few
//! tiles](has_few_tiles), or whose keys it divides by lengths.

use super::hopper_wide::wide_params;
use super::latent::{MOST_SEQUENCES, holds, launches, scores_alone};
use crate::plan::build::pages_strides;
use crate::plan::decision::Rejection;
use crate::plan::device::{Capability, DeviceInfo};
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::{requirements, select};
use crate::problem::{Problem, QuantFormat};
use crate::{DType, Result};
use gqa_kernels::attention::latent::VALUE_SIZE;
use gqa_kernels::attention::latent_mma as kernels;
use gqa_kernels::attention::split_kv::MAX_SPLITS;
use gqa_kernels::params::{AttentionParams, LatentParams, Strides};
use gqa_kernels::registry::{self, Entry, entries};

pub(in crate::plan) struct LatentMma {
    /// Over paged KV caches, or over contiguous ones.
    pub(in crate::plan) paged: bool,
}

impl Family for LatentMma {
    fn module(&self) -> registry::Family {
        registry::Family::LatentMma
    }

    fn is_paged(&self) -> bool {
        self.paged
    }

    fn takes_latent(&self) -> bool {
        true
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn follows_append(&self) -> bool {
        self.paged
    }

    fn options(&self) -> &'static [PlanOption] {
        use PlanOption::{DisableFlashAttention, DisableFusedKv, Splits};
        match self.paged {
            true => &[DisableFlashAttention, DisableFusedKv, Splits],
            false => &[DisableFlashAttention, Splits],
        }
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        let size = [kernels::KEY_SIZE, VALUE_SIZE].map(|size| size as usize);
        if !p.latent || [p.head_size, p.v_head_size] != size {
            return Err(Rejection::OtherHeadSize { got: p.head_size });
        }
        requirements::flash(p)?;
        scores_alone(p)?;
        if p.batch > MOST_SEQUENCES {
            return Err(Rejection::TooLarge);
        }
        requirements::blocks_of(p, 1)?;
        requirements::narrow_output(p)?;
        // A prologue dequantizes contiguous caches.
        let format = p.quantized.map(|how| how.format).filter(|_| self.paged);
        let reads = |entry: &Entry| {
            entry.holds(format) && (!has_wgmma(entry) || call.device.has(Capability::Wgmma))
        };
        let is_read = entries().any(|entry| entry.family == self.module() && reads(entry));
        if let Some(got) = format.filter(|_| !is_read) {
            return Err(Rejection::Format { got });
        }
        let rows = p.packed_rows();
        let is_small = has_few_tiles(p, call.device);
        let order = |entry: &Entry| {
            let [tile, threads] = [entry.rows, entry.threads].map(|n| n as usize);
            let reads = if is_small { 1 } else { rows.div_ceil(tile) };
            [reads, tile, usize::MAX - threads, usize::from(!has_wgmma(entry))]
        };
        let entry = select::among(self, call, reads, order)?;
        if self.paged {
            holds(entry, p)?;
        }
        let params = mma_params(p, Strides::default(), 1).map_err(|_| Rejection::TooLarge)?;
        let best = || splits(call, &params, entry);
        Ok(Kernel::split(entry, call.options.splits.unwrap_or_else(best)))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let params = mma_params(job.problem, job.rows.query.strides, kernel.splits)?;
        let cache = vec![("k", job.rows.attended[0])];
        let grid = kernels::grid(&params, kernel.entry.rows);
        launches(job, kernel, cache, &params, grid)
    }
}

/// Whether the kernels of this family are asked before `latent`: tiles of 16 rows are faster,
/// unless lengths differ, which only `latent` divides by.
pub(in crate::plan) fn comes_first(p: &Problem, device: &DeviceInfo) -> bool {
    has_few_tiles(p, device) && !super::latent::divides(p, device)
}

/// Whether tiles of 16 rows are faster than those of `latent` with 64: up to 16 rows, and of more
/// on Hopper while there are few. Bounds are from an H200
/// (`docs/results/2026-11-30-h200-e/latent.md`).
fn has_few_tiles(p: &Problem, device: &DeviceInfo) -> bool {
    const ROWS: usize = 16;
    const KEYS: u32 = 64;
    /// Tiles for each SM, where `wgmma` multiplies float8 keys, and else; rows in that case.
    const BY_WGMMA: usize = 20;
    const BY_MMA_SYNC: usize = 5;
    const ROWS_BY_WGMMA: usize = 32;
    let rows = p.packed_rows();
    if rows <= ROWS || !device.has(Capability::Wgmma) {
        return rows <= ROWS;
    }
    let by_wgmma = match p.quantized {
        None => false,
        Some(how) if p.dtype == DType::BF16 && how.format == QuantFormat::Float8 => true,
        Some(_) => return false,
    };
    let tiles = [rows.div_ceil(ROWS), p.most_keys().div_ceil(KEYS) as usize]
        .into_iter()
        .fold(p.batch, usize::saturating_mul);
    let most = if by_wgmma { BY_WGMMA } else { BY_MMA_SYNC };
    by_wgmma && rows <= ROWS_BY_WGMMA || tiles <= most * device.multiprocessors as usize
}

/// Whether the kernel multiplies by `wgmma`, so that it runs on Hopper alone.
fn has_wgmma(entry: &Entry) -> bool {
    !entry.runs_on(u32::MAX)
}

/// A batch entry of the cache is a block, whose strides count elements, or quantized values.
fn mma_params(p: &Problem, queries: Strides, splits: u32) -> Result<LatentParams> {
    let params = wide_params(p, queries, splits)?;
    let Some(pages) = p.pages else { return Ok(params) };
    let k = pages_strides(p, pages, p.key_cache_dtype().size());
    Ok(LatentParams { attention: AttentionParams { k, ..params.attention }, ..params })
}

/// Number of splits with the least estimated time, if all sequences are as long as the longest.
/// Constants are from an H200 (`docs/results/2026-11-30-h200-d/latent-mma.md`,
/// `docs/results/2026-11-30-h200-e/latent.md`).
fn splits(call: &Call<'_>, params: &LatentParams, entry: &Entry) -> u32 {
    /// Microseconds of a CTA besides its tiles; of a tile at least, and for each 8 keys of a warp,
    /// or where `wgmma` multiplies keys; to start the merge, and for each split of it.
    const START: f64 = 4.0;
    const TILE: f64 = 0.7;
    const KEYS: f64 = 0.9;
    const BY_WGMMA: f64 = 1.4;
    const MERGE: f64 = 3.0;
    const MERGED: f64 = 0.05;
    /// Attained fractions of the memory bandwidth and the tensor rate; bandwidth of L2 relative to
    /// memory.
    const MEMORY: f64 = 0.85;
    const TENSOR: f64 = 0.25;
    const L2: f64 = 2.5;
    let Call { problem: p, device, .. } = *call;
    let slots = slots(entry, device);
    let multiprocessors = f64::from(device.multiprocessors.max(1));
    let [row_tiles, _, batch] = kernels::grid(params, entry.rows).map(f64::from);
    let [keys, rows, threads] = [entry.keys, entry.rows, entry.threads].map(f64::from);
    let row = (kernels::KEY_SIZE as usize * p.key_cache_dtype().size()) as f64;
    let bytes = row * keys / row_tiles.min(L2);
    let operations = 2.0 * keys * rows * f64::from(kernels::KEY_SIZE + VALUE_SIZE);
    let warps = threads / 32.0 * 16.0 / rows;
    let by_mma_sync = TILE + KEYS * keys / (8.0 * warps);
    let least = if has_wgmma(entry) { BY_WGMMA } else { by_mma_sync };
    let tile = |blocks: f64| {
        // A few CTAs cannot use the whole memory bandwidth.
        let active = blocks.clamp(slots / 2.0, slots);
        let of_memory = bytes * active / (MEMORY * device.bandwidth / 1e6);
        // CTAs of an SM share its tensor cores, and those of the fullest one count.
        let together = (blocks.min(slots) / multiprocessors).ceil();
        let of_products =
            operations * together * multiprocessors / (TENSOR * device.tensor_flops / 1e6);
        of_memory.max(of_products).max(least)
    };
    let tiles = p.most_keys().div_ceil(entry.keys).max(1);
    let outputs = batch * p.packed_rows() as f64 * f64::from(VALUE_SIZE);
    let time = |splits: u32| {
        let blocks = row_tiles * batch * f64::from(splits);
        let waves = (blocks / slots).ceil();
        let attention = waves * (START + f64::from(tiles.div_ceil(splits)) * tile(blocks));
        let written = 8.0 * outputs / (device.bandwidth / 1e6);
        let merge = MERGE + f64::from(splits) * (MERGED + written);
        if splits > 1 { attention + merge } else { attention }
    };
    (1..=tiles.min(MAX_SPLITS)).min_by(|&a, &b| time(a).total_cmp(&time(b))).unwrap_or(1)
}

/// CTAs that are resident on the GPU at a time.
fn slots(entry: &Entry, device: &DeviceInfo) -> f64 {
    let twice = entry.min_blocks > 1 && select::fits_twice(entry, device);
    f64::from(device.multiprocessors.max(1) * if twice { 2 } else { 1 })
}
