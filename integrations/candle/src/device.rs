//! Where tensors are.

use crate::cpu;
use crate::error::invalid;
use candle::{DType, Device, Error, Result, Storage};

/// Memory for a KV cache: zeros.
pub(crate) fn store(
    argument: &'static str,
    dtype: DType,
    shape: &[usize],
    device: &Device,
) -> Result<Storage> {
    match device {
        Device::Cpu => cpu::zeros(argument, dtype, shape).map(Storage::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            use candle::backend::BackendDevice;
            crate::attention::element_type(argument, dtype)?;
            device.zeros_impl(&candle::Shape::from(shape), dtype).map(Storage::Cuda)
        }
        device => Err(unsupported(device)),
    }
}

/// The error for a device that is none of ours.
pub(crate) fn unsupported(device: &Device) -> Error {
    let allowed = match cfg!(feature = "cuda") {
        true => "the CPU or an NVIDIA GPU",
        false => "the CPU, or an NVIDIA GPU with feature cuda",
    };
    invalid("device", format!("{:?}", device.location()), allowed)
}
