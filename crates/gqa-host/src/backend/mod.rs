//! Where a problem is computed.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dump;
mod io;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "sim")]
mod strided;

use gqa_plan::Problem;
use gqa_plan::plan::Tensors;
use gqa_tensor::{CacheView, Result, Tensor, TensorView, TensorViewMut};

/// The tensors of one validated call. Inputs are as the operator takes them; outputs have their
/// final shapes.
///
/// With [`CacheBinding::Shared`](gqa_plan::CacheBinding) `past_*` are absent and `present_*` arrive
/// holding the past, and so do the scales of rows; with `Separate` every element of `present_*` is
/// written. Every element of the other outputs is always written.
pub struct Io<'a> {
    /// What the call reads, by role.
    pub inputs: Tensors<&'a Tensor>,
    /// output
    pub output: &'a mut Tensor,
    /// present_key
    pub present_key: &'a mut Tensor,
    /// present_value
    pub present_value: &'a mut Tensor,
    /// k_scale and v_scale where each row of the cache has its own
    pub row_scales: Option<[&'a mut Tensor; 2]>,
    /// output_qk
    pub output_qk: Option<&'a mut Tensor>,
    /// float32 (batch, query heads, rows)
    pub lse: Option<&'a mut Tensor>,
}

/// The tensors of one call as [`Io`] has them, in memory of the caller's: what [`cpu::Cpu::run_on`]
/// takes.
pub struct IoViews<'a> {
    /// What the call reads, by role.
    pub inputs: Tensors<TensorView<'a>>,
    /// output
    pub output: TensorViewMut<'a>,
    /// present_key
    pub present_key: CacheView<'a>,
    /// present_value
    pub present_value: CacheView<'a>,
    /// k_scale and v_scale where each row of the cache has its own
    pub row_scales: Option<[CacheView<'a>; 2]>,
    /// output_qk
    pub output_qk: Option<TensorViewMut<'a>>,
    /// float32 (batch, query heads, rows)
    pub lse: Option<TensorViewMut<'a>>,
}

/// Computes problems on host tensors.
pub trait Backend: Send + Sync {
    /// Name as the program's `--backend` takes it.
    fn name(&self) -> &'static str;

    /// Computes `problem` on `io`.
    ///
    /// # Errors
    ///
    /// Unless the tensors are those of the problem, and lengths, positions and blocks in them lead
    /// into these; where no kernel takes the problem, memory is too small, or the GPU fails.
    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()>;
}

/// A GPU, real or simulated: what runs plans. Code over machines is tried on the simulated one
/// where there is no other.
#[cfg(any(feature = "cuda", feature = "sim"))]
pub trait Machine: Backend {
    /// The device that its plans are made for.
    fn target(&self) -> &gqa_plan::plan::DeviceInfo;

    /// Runs a plan on host tensors. What is in these is not looked at: kernels keep within them
    /// whatever lengths, positions and blocks there are.
    ///
    /// # Errors
    ///
    /// Unless the tensors are those of the plan's problem; where the plan is for a newer device,
    /// memory is too small, the GPU fails, or the simulator catches a kernel doing what hardware
    /// leaves undefined.
    fn execute(&self, plan: &gqa_plan::plan::Plan, io: &mut Io<'_>) -> Result<()>;
}

/// Runs `problem` on `backend`, as every operator of [`op`](crate::op) does: with a log line, and
/// with the tensors in the folder that `GQA_DUMP` names, if it names one.
pub(crate) fn run(backend: &dyn Backend, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
    tracing::debug!(backend = backend.name(), call = %problem, "run");
    match dump::folder()? {
        None => backend.run(problem, io),
        Some(folder) => dump::Dumped::new(backend, folder).run(problem, io),
    }
}
