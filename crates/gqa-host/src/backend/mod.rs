//! Back ends: they compute problems on host tensors.

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
/// With [`CacheBinding::Shared`](gqa_plan::CacheBinding) `past_*` are absent, and `present_*` and
/// per-token scales contain the past. With `Separate` every element of `present_*` is written.
/// Every element of the other outputs is always written.
pub struct Io<'a> {
    /// What the call reads, by role.
    pub inputs: Tensors<&'a Tensor>,
    /// output
    pub output: &'a mut Tensor,
    /// present_key
    pub present_key: &'a mut Tensor,
    /// present_value
    pub present_value: &'a mut Tensor,
    /// Per-token k_scale and v_scale
    pub row_scales: Option<[&'a mut Tensor; 2]>,
    /// output_qk
    pub output_qk: Option<&'a mut Tensor>,
    /// float32 (batch, query heads, rows)
    pub lse: Option<&'a mut Tensor>,
}

/// The tensors of one call, as in [`Io`], borrowed from the caller: the arguments of
/// [`cpu::Cpu::run_on`].
pub struct IoViews<'a> {
    /// What the call reads, by role.
    pub inputs: Tensors<TensorView<'a>>,
    /// output
    pub output: TensorViewMut<'a>,
    /// present_key
    pub present_key: CacheView<'a>,
    /// present_value
    pub present_value: CacheView<'a>,
    /// Per-token k_scale and v_scale
    pub row_scales: Option<[CacheView<'a>; 2]>,
    /// output_qk
    pub output_qk: Option<TensorViewMut<'a>>,
    /// float32 (batch, query heads, rows)
    pub lse: Option<TensorViewMut<'a>>,
}

/// Computes problems on host tensors.
pub trait Backend: Send + Sync {
    /// Its name for the program's `--backend`.
    fn name(&self) -> &'static str;

    /// Computes `problem` on `io`.
    ///
    /// # Errors
    ///
    /// Where tensors do not match the problem or are not part of it, where lengths, positions or
    /// block tables lead outside of the tensors that they index, where no kernel supports the
    /// problem, where memory is too small, and where the GPU fails.
    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()>;
}

/// A GPU, real or simulated, that runs plans. Code written against this trait can be tested on the
/// simulated one.
#[cfg(any(feature = "cuda", feature = "sim"))]
pub trait Machine: Backend {
    /// The device that its plans are made for.
    fn target(&self) -> &gqa_plan::plan::DeviceInfo;

    /// Runs a plan on host tensors, without a check of their contents: kernels stay within the
    /// tensors for any lengths, positions and block tables.
    ///
    /// # Errors
    ///
    /// Where tensors do not match the plan's problem, where the plan is for a newer device, where
    /// memory is too small, where the GPU fails, or where the simulator finds undefined behaviour
    /// of a kernel.
    fn execute(&self, plan: &gqa_plan::plan::Plan, io: &mut Io<'_>) -> Result<()>;
}

/// Runs `problem` on `backend`, for every operator of [`op`](crate::op): drops unused inputs,
/// writes a log line, and dumps the tensors if `GQA_DUMP` names a folder.
pub(crate) fn run(backend: &dyn Backend, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
    tracing::debug!(backend = backend.name(), call = %problem, "run");
    io.inputs = io.inputs.only_of(problem);
    match dump::folder()? {
        None => backend.run(problem, io),
        Some(folder) => dump::Dumped::new(backend, folder).run(problem, io),
    }
}
