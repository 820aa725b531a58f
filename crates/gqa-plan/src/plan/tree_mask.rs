//! Expands a tree mask for kernels without one: `tree_mask_rows` writes it as a mask over all keys.

use super::build::{find, launch, seqlens, tensor, u32_of};
use super::device::DeviceInfo;
use super::launch::{Arg, Launch};
use super::scratch::Scratch;
use crate::problem::{Bias, Phase, Problem, ProblemFields};
use crate::tensors::TensorId;
use gqa_kernels::params::TreeMaskParams;
use gqa_kernels::registry::Role;
use gqa_kernels::registry::prologue_grid::tree_mask_rows_grid;
use gqa_tensor::{DType, Result};

/// A mask over all keys.
pub(super) struct Expanded {
    /// The launch that writes the mask.
    pub(super) launch: Launch,
    /// The call with that mask.
    pub(super) problem: Problem,
    mask: Arg,
}

impl Expanded {
    /// Expands the tree mask of `given`, whose attention is `problem`.
    pub(super) fn new(
        given: &Problem,
        problem: &Problem,
        device: &DeviceInfo,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        let problem = masked(problem)?;
        let elements = problem.bias_shape().unwrap_or_default().iter().product();
        let mask = scratch.take(elements, DType::Bool.size())?;
        let launch = mask_rows(given, &problem, mask, device)?;
        Ok(Self { launch, problem, mask })
    }

    /// The tensor that the mask stands for, and its place in scratch memory.
    pub(super) fn mask(&self) -> (TensorId, Arg) {
        (TensorId::AttentionBias, self.mask)
    }
}

/// The call with a mask over all keys, with rows padded to whole vectors.
fn masked(problem: &Problem) -> Result<Problem> {
    let columns = problem.total_len.next_multiple_of(Problem::VECTOR_BYTES);
    let bias = Bias { batch: false, head: true, row: false, columns, boolean: true };
    problem.derive(|call| ProblemFields { tree_mask: false, bias: Some(bias), ..call })
}

fn mask_rows(given: &Problem, masked: &Problem, mask: Arg, device: &DeviceInfo) -> Result<Launch> {
    let (p, is_paged) = (given, given.pages.is_some());
    let arguments = [
        ("tree_mask", tensor(p, TensorId::TreeMask, 0)),
        ("starts", tensor(p, TensorId::CumulativeSequenceLength, 0)),
        ("past_seqlens", if is_paged { tensor(p, TensorId::SeqlensK, 0) } else { Arg::Null }),
        ("mask", mask),
    ];
    let lengths = if is_paged { seqlens(p).map(|(name, _)| (name, Arg::Null)) } else { seqlens(p) };
    let columns = masked.bias.map_or(0, |bias| bias.columns);
    let params = TreeMaskParams {
        batch: u32_of("batch", p.batch)?,
        q_len: u32_of("query rows", p.q_len)?,
        columns: u32_of("columns of the mask", columns)?,
        capacity: u32_of("rows of a sequence", p.capacity)?,
        tokens: u32_of("tokens", p.pages.map_or(0, |pages| pages.tokens))?,
        first_prompt: (p.phase == Phase::FirstPrompt).into(),
        counts_new: p.pages.is_some_and(|pages| pages.counts_new).into(),
    };
    let grid = tree_mask_rows_grid(&params, device.multiprocessors);
    launch(find(Role::TreeMaskRows, None)?, grid, &[&arguments[..], &lengths].concat(), &params)
}
