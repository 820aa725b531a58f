//! Where tensors are.

use crate::error::{invalid, ours};
#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::{Device, Error, Result};
use gqa_host::{DType, Tensor, TensorViewMut};

/// Keys or values of a KV cache.
pub(crate) enum Store {
    Cpu(Tensor),
    /// Quantized values as bytes.
    #[cfg(feature = "cuda")]
    Cuda(CudaStorage),
}

impl Store {
    /// Zeros.
    pub(crate) fn new(
        argument: &'static str,
        dtype: DType,
        shape: &[usize],
        device: &Device,
    ) -> Result<Self> {
        match device {
            Device::Cpu => Tensor::try_zeros(argument, dtype, shape).map(Self::Cpu).map_err(ours),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                use candle::backend::BackendDevice;
                let dtype = match dtype {
                    DType::F32 => candle::DType::F32,
                    DType::F16 => candle::DType::F16,
                    DType::BF16 => candle::DType::BF16,
                    _ => candle::DType::U8,
                };
                device.zeros_impl(&candle::Shape::from(shape), dtype).map(Self::Cuda)
            }
            device => Err(unsupported(device)),
        }
    }

    /// On the CPU, where the call's tensors are.
    pub(crate) fn on_cpu(&mut self) -> Result<TensorViewMut<'_>> {
        match self {
            Self::Cpu(tensor) => Ok(tensor.view_mut()),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => {
                Err(invalid("query", "a tensor on the CPU", "one where the KV cache is"))
            }
        }
    }

    /// On a GPU, likewise.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&mut self) -> Result<&mut CudaStorage> {
        match self {
            Self::Cuda(storage) => Ok(storage),
            Self::Cpu(_) => Err(invalid("query", "a tensor on a GPU", "one where the KV cache is")),
        }
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
