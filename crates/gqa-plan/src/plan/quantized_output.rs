//! Output in float8e4m3fn with a scale: kernels write it, or one more launch quantizes the output
//! of kernels that do not.

use super::build::{element, find, launch, strides, tensor, u32_of};
use super::contiguous::Composed;
use super::device::DeviceInfo;
use super::launch::{Arg, Launch};
use super::rebind::Rebind;
use super::scratch::Scratch;
use crate::problem::{Problem, ProblemFields, Strided};
use crate::tensors::TensorId;
use gqa_kernels::params::{QuantizeOutputParams, Strides};
use gqa_kernels::registry::Role;
use gqa_kernels::registry::prologue_grid::quantize_output_grid;
use gqa_tensor::{Error, Result};

/// The launches of a call with quantized output; `compose` plans calls with other outputs.
pub(super) fn compose(
    problem: &Problem,
    device: &DeviceInfo,
    scratch: &mut Scratch,
    compose: impl Fn(&Problem, &mut Scratch) -> Result<Composed>,
) -> Result<Composed> {
    // Those that write it read no quantized cache.
    if problem.quantized.is_none() {
        let mut room = Scratch::default();
        match compose(problem, &mut room) {
            Ok(composed) => {
                *scratch = room;
                return Ok(composed);
            }
            Err(Error::NoKernel(_)) => {}
            Err(error) => return Err(error),
        }
    }
    let rounded = problem.derive(|call| ProblemFields {
        out_dtype: call.dtype,
        strided: Strided { output: None, ..call.strided },
        ..call
    })?;
    let call = compose(&rounded, scratch)?;
    let elements = problem.output_shape().iter().product();
    let rows = scratch.take(elements, problem.dtype.size())?;
    let rebind = Rebind(vec![(TensorId::Output, rows)]);
    let mut launches: Vec<_> =
        call.launches.into_iter().map(|launch| rebind.launch(launch)).collect();
    launches.push(quantize(problem, device, rows, strides(rounded.output_layout()))?);
    Ok(Composed { launches, ..call })
}

/// The launch that quantizes the output which attention left in scratch.
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
    let entry = find(Role::QuantizeOutput, element(p.dtype))?;
    launch(entry, quantize_output_grid(&params, device.multiprocessors), &arguments, &params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Dense, Heads, Layer};
    use gqa_tensor::DType;
    use std::cell::Cell;

    /// Only a missing kernel leads to the extra launch; other errors are returned.
    #[test]
    fn an_error_of_the_call_itself_is_its_error() {
        let layer = Layer::new(DType::BF16, Heads { query: 8, kv: 2, size: 128 });
        let problem = layer.dense(Dense::decode(1, 256).float8_output()).unwrap();
        let plan = |error: fn() -> Error| {
            let asked = Cell::new(0);
            let first_fails = |_: &Problem, _: &mut Scratch| {
                asked.set(asked.get() + 1);
                if asked.get() == 1 { Err(error()) } else { Ok(Composed::default()) }
            };
            let device = DeviceInfo::h200();
            let planned = compose(&problem, &device, &mut Scratch::default(), first_fails);
            (planned.map(|composed| composed.launches.len()), asked.get())
        };
        let (planned, asked) = plan(|| Error::NoKernel("none writes float8".into()));
        assert_eq!((planned.unwrap(), asked), (1, 2));
        let (planned, asked) = plan(|| Error::invalid("batch", 1u64 << 40, "what fits 32 bits"));
        assert!(planned.unwrap_err().to_string().starts_with("batch: got 1099511627776"));
        assert_eq!(asked, 1);
    }
}
