//! `hopper_paged_quantized`: `hopper` over a paged and quantized KV cache, converted to float16 in
//! shared memory.

use super::hopper_paged::{self, PagedCall};
use super::hopper_quantized;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::params::scales;
use crate::plan::requirements;
use crate::{Error, Result};
use gqa_kernels::params::QuantizedPagedHopperParams;
use gqa_kernels::registry;

pub(in crate::plan) struct HopperPagedQuantized;

impl Family for HopperPagedQuantized {
    fn module(&self) -> registry::Family {
        registry::Family::HopperPagedQuantized
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn computes_all_rows(&self) -> bool {
        true
    }

    fn draws_tiles(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFusedKv]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        requirements::quantized_vectors(call.problem)?;
        requirements::no_row_scales(call.problem)?;
        let kernel = hopper_paged::choose(self, call)?;
        hopper_quantized::converting_pays(call, kernel.entry)?;
        Ok(kernel)
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let p = job.problem;
        let how = p
            .quantized
            .ok_or_else(|| Error::NoKernel("the KV cache is not quantized".to_owned()))?;
        let paged = PagedCall::new(job, kernel.entry)?;
        paged.launches(&QuantizedPagedHopperParams {
            paged: paged.params,
            format: how.format as u32,
            scales: scales(p),
        })
    }
}
