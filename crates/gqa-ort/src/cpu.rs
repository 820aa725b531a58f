//! Calls on the CPU.

use crate::api::Failure;
use crate::call::{Given, Made};
use crate::value::Value;
use gqa_host::backend::IoViews;
use gqa_host::backend::cpu::{Cpu, Executor};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{Error, Problem, Tensor, TensorViewMut};

/// Computes a call on those threads.
///
/// # Safety
///
/// Nobody else may use the call's tensors meanwhile.
pub unsafe fn run(
    cpu: Cpu,
    executor: &dyn Executor,
    problem: &Problem,
    given: &Given,
    made: &mut Made,
) -> Result<(), Failure> {
    tracing::debug!(backend = "cpu", call = %problem, "run");
    let mut inputs = Tensors::default();
    for (id, value) in given.by_role().filter(|(id, _)| is_read(*id, problem)) {
        // SAFETY: as the caller says
        inputs = inputs.with(id, unsafe { value.view(id) }?);
    }
    let mut spares = [
        spare(&made.output, TensorId::Output, problem)?,
        spare(&made.present_key, TensorId::PresentKey, problem)?,
        spare(&made.present_value, TensorId::PresentValue, problem)?,
        spare(&made.output_qk, TensorId::OutputQk, problem)?,
    ];
    let [output, present_key, present_value, output_qk] = &mut spares;
    // SAFETY: as the caller says; outputs have a memory each, and a past in the same memory was
    // left out above
    let mut io = unsafe {
        IoViews {
            inputs,
            output: place(&mut made.output, output, TensorId::Output)?,
            present_key: place(&mut made.present_key, present_key, TensorId::PresentKey)?.into(),
            present_value: place(&mut made.present_value, present_value, TensorId::PresentValue)?
                .into(),
            row_scales: None,
            output_qk: match TensorId::OutputQk.spec(problem) {
                Some(_) => Some(place(&mut made.output_qk, output_qk, TensorId::OutputQk)?),
                None => None,
            },
            lse: None,
        }
    };
    Ok(cpu.run_by(executor, problem, &mut io)?)
}

/// Whether an input is only read: a cache that past and present share is written, and for some
/// inputs a node's attributes have no use.
fn is_read(id: TensorId, problem: &Problem) -> bool {
    !id.is_output() && id.spec(problem).is_some()
}

/// Memory for what the node does not have as an output: it is computed and dropped.
fn spare(value: &Option<Value>, id: TensorId, problem: &Problem) -> Result<Tensor, Error> {
    match id.spec(problem) {
        Some(spec) if value.is_none() => Tensor::try_zeros(id.name(), spec.dtype, &spec.shape),
        _ => Ok(Tensor::zeros(problem.dtype, &[0])),
    }
}

/// # Safety
///
/// As for [`Value::view_mut`].
unsafe fn place<'a>(
    value: &'a mut Option<Value>,
    spare: &'a mut Tensor,
    id: TensorId,
) -> Result<TensorViewMut<'a>, Error> {
    match value {
        // SAFETY: as the caller says
        Some(value) => unsafe { value.view_mut(id) },
        None => Ok(spare.view_mut()),
    }
}
