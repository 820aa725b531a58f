//! `decode_paged_quantized`: `decode` over a paged and quantized KV cache.

use super::{decode, decode_paged};
use crate::plan::decision::Rejection;
use crate::plan::family::{Call, Family, FusedPrologue, Job, Kernel};
use crate::plan::launch::Launch;
use crate::plan::options::PlanOption;
use crate::{Problem, Result};
use gqa_kernels::registry::{self, Entry};

pub(in crate::plan) struct DecodePagedQuantized;

impl Family for DecodePagedQuantized {
    fn module(&self) -> registry::Family {
        registry::Family::DecodePagedQuantized
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        decode::OPTIONS
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        decode_paged::choose(self.module(), call)
    }

    fn fuses(&self, problem: &Problem, entry: &Entry, fused: bool) -> FusedPrologue {
        FusedPrologue::of_new_rows(problem, entry, fused)
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        decode_paged::launches(kernel, job)
    }
}
