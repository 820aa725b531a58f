//! `blackwell`: flash attention with tensor memory, for prefill on data-center Blackwell GPUs.

use super::hopper::{key_maps, scores, tensor_map};
use crate::plan::build::{launch, seqlens, tensor};
use crate::plan::decision::Rejection;
use crate::plan::device::Capability;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::{l2_swizzled_params, output, value_size};
use crate::plan::{requirements, select};
use crate::tensors::TensorId;
use crate::{Problem, Result};
use gqa_kernels::attention::blackwell as kernels;
use gqa_kernels::params::{AttentionParams, PrefillParams};
use gqa_kernels::registry::{self, Entry};

pub(super) struct Blackwell;

impl Family for Blackwell {
    fn module(&self) -> registry::Family {
        registry::Family::Blackwell
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        let p = call.problem;
        requirements::flash(p)?;
        let entry = select::smallest(self, call)?;
        can_do(call, entry)?;
        requirements::narrow_output(p)?;
        if call.options.force.is_none() {
            fills_tiles(p)?;
        }
        Ok(Kernel::whole(entry))
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let (p, entry) = (job.problem, kernel.entry);
        let attention = l2_swizzled_params(&job, 1)?;
        let AttentionParams { head_size, q_len, q_heads, batch, .. } = attention;
        let queries = [head_size, q_len, q_heads, batch];
        let [k, v] = key_maps(p, &attention, &job.rows, entry)?;
        let mut arguments = vec![
            ("q", tensor_map(p, job.rows.query.arg, attention.q, queries, kernels::QUERY_BOX)),
            ("k", k),
            ("v", v),
            ("head_sink", tensor(p, TensorId::HeadSink, 0)),
            ("lse", tensor(p, TensorId::Lse, 0)),
        ];
        arguments.extend(seqlens(p));
        arguments.extend(output(p));
        let params = PrefillParams { attention, v_head_size: value_size(p)?, reserved: 0 };
        Ok(vec![launch(entry, kernels::grid(&attention), &arguments, &params)?])
    }
}

/// Query rows from which a work tile of one query head pays. Chosen, not measured: fewer leave more
/// than half of a tile empty.
const LEAST_ROWS: usize = 128;

/// Whether the device runs the family's kernels, and these compute the call's scores.
pub(super) fn can_do(call: &Call<'_>, entry: &Entry) -> Result<(), Rejection> {
    let (device, sm) = (call.device, call.device.sm);
    let needs = [Capability::Tcgen05, Capability::Tma, Capability::RegisterHandover];
    select::capabilities(&needs, device)?;
    if !entry.runs_on(sm) {
        return Err(Rejection::Target { sm });
    }
    scores(call.problem)
}

/// Whether query rows fill tiles.
pub(super) fn fills_tiles(p: &Problem) -> Result<(), Rejection> {
    match p.q_len < LEAST_ROWS {
        true => Err(Rejection::FewRows { got: p.q_len, min: LEAST_ROWS }),
        false => Ok(()),
    }
}
