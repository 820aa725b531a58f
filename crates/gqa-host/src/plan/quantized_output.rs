//! Output in float8e4m3fn times a scale: by kernels that write it, or by one launch behind those
//! that do not.

use super::build::{element, find, launch, strides, tensor, u32_of};
use super::contiguous::Composed;
use super::device::DeviceInfo;
use super::launch::{Arg, Launch};
use super::rebind::Rebind;
use super::scratch::Scratch;
use super::tensors::TensorId;
use crate::{Problem, ProblemFields, Result, Strided};
use gqa_kernels::params::{QuantizeOutputParams, Strides};
use gqa_kernels::prologue::quantize_output_grid;
use gqa_kernels::registry::Role;

/// The launches of a call with quantized output; `compose` makes those of other calls.
pub(super) fn compose(
    problem: &Problem,
    device: &DeviceInfo,
    scratch: &mut Scratch,
    compose: impl Fn(&Problem, &mut Scratch) -> Result<Composed>,
) -> Result<Composed> {
    // Those that write it read no quantized cache.
    if problem.quantized.is_none() {
        let mut room = Scratch::default();
        if let Ok(composed) = compose(problem, &mut room) {
            *scratch = room;
            return Ok(composed);
        }
    }
    let rounded = problem.derive(|call| ProblemFields {
        out_dtype: call.dtype,
        strided: Strided { output: None, ..call.strided },
        ..call
    });
    let call = compose(&rounded, scratch)?;
    let elements = problem.output_shape().iter().product();
    let rows = scratch.take(elements, problem.dtype.size())?;
    let rebind = Rebind(vec![(TensorId::Output, rows)]);
    let mut launches: Vec<_> =
        call.launches.into_iter().map(|launch| rebind.launch(launch)).collect();
    launches.push(quantize(problem, device, rows, strides(rounded.output_layout()))?);
    Ok(Composed { launches, ..call })
}

/// The launch behind attention that left its output in scratch.
fn quantize(p: &Problem, device: &DeviceInfo, from: Arg, rows: Strides) -> Result<Launch> {
    let params = QuantizeOutputParams {
        rows,
        out: strides(p.output_layout()),
        batch: u32_of("batch", p.batch)?,
        q_heads: u32_of("query heads", p.q_heads)?,
        q_len: u32_of("query rows", p.q_len)?,
        eighths: u32_of("head size", p.v_head_size / 8)?,
    };
    let arguments = [
        ("rows", from),
        ("out_scale", tensor(p, TensorId::OutputScale, 0)),
        ("out_f8", tensor(p, TensorId::Output, 0)),
    ];
    let entry = find(Role::QuantizeOutput, element(p.dtype), None)?;
    launch(entry, quantize_output_grid(&params, device.multiprocessors), &arguments, &params)
}
