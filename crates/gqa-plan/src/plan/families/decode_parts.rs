//! Decode steps whose keys the lengths on the device divide among all CTAs (`decode/division.rs`),
//! over contiguous and over paged KV caches.

use super::decode;
use crate::plan::build::launch;
use crate::plan::cost::decode::{Lengths, Shape};
use crate::plan::family::{Call, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::{Pages, Problem};
use gqa_kernels::attention::decode as kernels;
use gqa_kernels::params::{DecodeScheduleParams, PagedDecodeParams};
use gqa_kernels::registry::{self, Entry, Role};
use gqa_tensor::Result;

/// The families whose kernels divide the keys of all sequences.
const DIVIDING: [registry::Family; 2] =
    [registry::Family::Decode, registry::Family::DecodeQuantized];

/// The same decode step with the keys of all sequences divided by the lengths on the device, if
/// that is estimated to be faster than equal splits of each sequence.
pub(in crate::plan) fn in_parts(kernel: &Kernel, call: &Call<'_>) -> Option<Kernel> {
    /// Most CTAs in y and z of a grid.
    const MOST: usize = 65_535;
    let (p, device, options) = (call.problem, call.device, call.options);
    // Over a contiguous cache few sequences keep their clusters, which were not measured against
    // it.
    let may_differ = p.pages.is_some() || p.mean_len.is_some() && kernel.cluster == 1;
    if !DIVIDING.contains(&kernel.entry.family) || !may_differ {
        return None;
    }
    let is_forced = options.splits.is_some() || options.cluster.is_some() || call.forced.is_some();
    if is_forced || p.batch_invariant || !(2..=kernels::MOST_DIVIDED as usize).contains(&p.batch) {
        return None;
    }
    let entry = decode::in_halves(kernel, device).unwrap_or(*kernel).entry;
    if !kernels::divides(entry.head_size, p.quantized.is_some()) {
        return None;
    }
    let columns = p.kv_heads.checked_mul(p.packed_rows().div_ceil(entry.rows as usize))?;
    let blocks = device.multiprocessors * entry.min_blocks;
    let parts = blocks as usize / columns;
    let tiles = p.batch.checked_mul(p.total_len.div_ceil(entry.keys as usize))?;
    let fits = (1..=MOST).contains(&parts) && columns <= MOST && tiles <= i32::MAX as usize;
    let Kernel { splits, cluster: ranks, .. } = *kernel;
    let equal = Shape { ranks, splits, together: kernel.entry.min_blocks };
    let pays = || Lengths::of(p, columns).favor_parts(equal, blocks, device);
    (fits && pays()).then(|| Kernel::in_parts(entry, parts as u32))
}

impl Lengths {
    /// Lengths of a call with `columns` row tiles per sequence, over all KV heads. The mean is the
    /// caller's, or follows from the size of a paged cache, which has a row for every key.
    fn of(p: &Problem, columns: usize) -> Self {
        let rows = |pages: Pages| pages.blocks.saturating_mul(pages.block_size);
        let mean = match (p.mean_len, p.pages) {
            (Some(mean), _) => mean as f64,
            (None, Some(pages)) => rows(pages) as f64 / p.batch as f64,
            (None, None) => f64::INFINITY,
        };
        let seen =
            p.window.map_or(p.total_len, |window| p.total_len.min(window.saturating_add(p.q_len)));
        let [.., width] = p.key_cache_shape(0);
        Self {
            row_tiles: p.batch.saturating_mul(columns) as f64,
            longest: seen as f64,
            mean: mean.min(seen as f64),
            key_bytes: (2 * width * p.key_cache_dtype().size()) as f64,
        }
    }
}

/// How `step` divides keys by lengths, if it does.
pub(in crate::plan) fn division(step: &Launch) -> Option<DecodeScheduleParams> {
    let is_step = DIVIDING.contains(&step.entry.family) && step.entry.role == Role::Attention;
    let params = step.params.get(..size_of::<PagedDecodeParams>()).filter(|_| is_step)?;
    let params: PagedDecodeParams = bytemuck::try_pod_read_unaligned(params).ok()?;
    let divides = (1..=kernels::MOST_SLOTS).contains(&params.decode.parts);
    divides.then_some(DecodeScheduleParams {
        step: params,
        keys: step.entry.keys,
        shortest: kernels::shortest_part(step.entry.rows, step.entry.threads),
    })
}

/// The launch that writes the schedule of `step`, if `step` reads one.
pub(in crate::plan) fn schedule(step: &Launch) -> Option<Result<Launch>> {
    let written = step.argument("schedule").filter(|arg| *arg != Arg::Null)?;
    let is_schedule =
        |entry: &&Entry| entry.family == registry::Family::Decode && entry.role == Role::Schedule;
    let entry = registry::entries().find(is_schedule)?;
    let params = division(step)?;
    let arguments = [
        ("starts", step.argument("starts")?),
        ("past_seqlens", step.argument("seqlens_k")?),
        ("schedule", written),
    ];
    Some(launch(entry, [1, 1, 1], &arguments, &params))
}
