//! `hopper_masked`: `hopper` with a bias or a mask.

use super::hopper::{self, arguments, key_maps, tensor_map};
use crate::plan::build::{launch, tensor};
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{bias_or_mask, l2_section, masked_params};
use crate::plan::{requirements, select};
use crate::tensors::TensorId;
use crate::{Problem, Result};
use gqa_kernels::attention::hopper as kernels;
use gqa_kernels::params::Strides;
use gqa_kernels::registry::{self, Entry};

pub(super) struct HopperMasked;

impl Family for HopperMasked {
    fn module(&self) -> registry::Family {
        registry::Family::HopperMasked
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::masked_flash(call.problem)?;
        requirements::mask_of_vectors(call.problem)?;
        let entry = select::smallest(self, call)?;
        hopper::suits(call, entry)?;
        requirements::narrow_output(call.problem)?;
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, device, entry) = (job.problem, job.device, kernel.entry);
        let mut params = masked_params(p, job.rows.query.strides, 1)?;
        params.attention.l2_section = l2_section(&job, &params.attention)?;
        let grid = kernels::grid(&params.attention, entry.rows, device.multiprocessors);
        let counter = job.scratch.count(1);
        let keys = key_maps(p, &params.attention, &job.rows, entry)?;
        let mut arguments = arguments(p, &params.attention, &job.rows, counter, keys);
        arguments.extend(bias_or_mask(p));
        arguments.extend(mask_map(p, entry).map(|map| ("tiles", map)));
        Ok(vec![launch(entry, grid, &arguments, &params)?])
    }
}

/// The map of a bias or mask in words of 16 bits. What is the same for all has one entry, whatever
/// its stride.
fn mask_map(p: &Problem, entry: &Entry) -> Option<Arg> {
    let (bias, shape) = p.bias.zip(p.bias_shape())?;
    let columns = if bias.boolean { shape[3] / 2 } else { shape[3] };
    let [batch, heads, rows, columns] =
        [shape[0], shape[1], shape[2], columns].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let row = u64::from(columns);
    let head = row * u64::from(rows);
    let strides = Strides { row, head, batch: head * u64::from(heads) };
    let arg = tensor(p, TensorId::AttentionBias, 0);
    Some(tensor_map(p, arg, strides, [columns, rows, heads, batch], entry.rows))
}
