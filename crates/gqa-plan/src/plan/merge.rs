//! Attention over splits of the keys, and the launch that merges them.

use super::build::launch;
use super::family::Job;
use super::launch::{Arg, Launch};
use super::requirements::writes;
use crate::problem::Problem;
use bytemuck::Pod;
use gqa_kernels::attention::{combine, split_kv};
use gqa_kernels::params::AttentionParams;
use gqa_kernels::registry::{Entry, Family, Role, entries};
use gqa_tensor::{Error, Result};

/// Blocks of the merge per SM: more only wait.
const WAVES: u32 = 16;

/// The attention, and its merge where `merges`.
pub(super) fn launches(
    job: Job<'_>,
    entry: &'static Entry,
    grid: [u32; 3],
    mut arguments: Vec<(&'static str, Arg)>,
    params: &(impl Pod + AsRef<AttentionParams>),
    merges: bool,
) -> Result<Vec<Launch>> {
    if !merges {
        arguments.extend([("partial_out", Arg::Null), ("partial_lse", Arg::Null)]);
        return Ok(vec![launch(entry, grid, &arguments, params)?]);
    }
    let merged = params.as_ref();
    let (out, lse) = split_kv::partial_elements(merged);
    arguments.push(("partial_out", job.scratch.take(out, size_of::<f32>())?));
    arguments.push(("partial_lse", job.scratch.take(lse, size_of::<f32>())?));
    let merge = merge_of(entry, job.problem)?;
    let merge_grid = combine::grid(merged, job.device.multiprocessors * WAVES);
    Ok(vec![
        launch(entry, grid, &arguments, params)?,
        launch(merge, merge_grid, &arguments, merged)?,
    ])
}

/// The merge for the element type of a kernel and the call's output.
fn merge_of(entry: &Entry, p: &Problem) -> Result<&'static Entry> {
    let is_it = |other: &&Entry| {
        other.family == Family::SplitKv
            && other.role == Role::Merge
            && other.dtype == entry.dtype
            && writes(other, p)
    };
    entries()
        .find(is_it)
        .ok_or_else(|| Error::NoKernel(format!("combine has no kernel for {}", p.dtype)))
}
