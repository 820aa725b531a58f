//! `decode_quantized`: `decode` over a quantized KV cache.

use super::decode;
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::plan::requirements;
use crate::{Problem, Result};
use gqa_kernels::registry::{self, Entry};

pub(super) struct DecodeQuantized {
    pub(super) paged: bool,
}

impl Family for DecodeQuantized {
    fn module(&self) -> registry::Family {
        registry::Family::DecodeQuantized
    }

    fn is_paged(&self) -> bool {
        self.paged
    }

    fn options(&self) -> &'static [PlanOption] {
        decode::OPTIONS
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        if !self.paged {
            requirements::shared_and_quantized(call.problem)?;
        }
        decode::choose(self.module(), call)
    }

    fn fuses(&self, problem: &Problem, entry: &Entry, fused: bool) -> FusedPrologue {
        FusedPrologue::of_new_rows(problem, entry, fused)
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        decode::launches(kernel, job)
    }
}
