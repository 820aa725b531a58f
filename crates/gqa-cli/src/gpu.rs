//! A GPU on whose memory calls stay.

use std::sync::Arc;

use anyhow::{Context, Result};
use gqa_host::Problem;
use gqa_host::driver::{Call, Device, DeviceTensor, Stream};
use gqa_host::plan::{Plan, PlanOptions, Planner, TensorId};

use crate::shape::Tensors;

/// An open GPU.
pub struct Gpu {
    /// The device.
    pub device: Device,
    /// All work goes here.
    pub stream: Stream,
    options: PlanOptions,
}

impl Gpu {
    /// The first GPU.
    pub fn open() -> Result<Self> {
        let options = PlanOptions::from_env()?;
        let device = Device::open(0).map_err(gqa_host::Error::from)?;
        Ok(Self { stream: Stream::new(&device)?, device, options })
    }

    /// The plan of a call.
    pub fn plan(&self, problem: &Problem) -> Result<Arc<Plan>> {
        Ok(self.device.plan(problem, &self.options)?)
    }

    /// Makes plans as [`plan`](Self::plan) does, and keeps them.
    pub fn planner(&self) -> Planner {
        self.device.planner(self.options.clone())
    }

    /// A call with its tensors on the GPU. What kernels should write is filled with NaN first.
    pub fn call(&self, plan: &Arc<Plan>, tensors: &Tensors) -> Result<Arc<Call>> {
        let call = Call::new(&self.device, plan.clone())?;
        call.poison(&self.stream)?;
        self.upload(&call, tensors)?;
        Ok(Arc::new(call))
    }

    /// The same call in other memory of the GPU, where the same tensors are.
    pub fn another(&self, call: &Call) -> Result<Arc<Call>> {
        let other = Call::new(&self.device, call.plan().clone())?;
        other.poison(&self.stream)?;
        for (id, _) in call.plan().tensors().iter().filter(|(id, _)| *id != TensorId::Output) {
            if let (Some(to), Some(from)) = (other.tensor(*id), call.tensor(*id)) {
                to.copy_from(from, &self.stream)?;
            }
        }
        Ok(Arc::new(other))
    }

    /// Copies all that a call reads to the GPU, the shared cache included. Of a cache that is
    /// shorter than the call's the GPU makes copies until it is long enough.
    pub fn upload(&self, call: &Call, tensors: &Tensors) -> Result<()> {
        for (id, tensor) in tensors.iter().filter(|(id, _)| *id != TensorId::Output) {
            let memory = tensor_of(call, id)?;
            let is_cache = matches!(id, TensorId::PresentKey | TensorId::PresentValue);
            match is_cache && tensor.bytes().len() < memory.bytes() {
                true => memory.repeat(tensor, &self.stream)?,
                false => memory.upload(tensor, &self.stream)?,
            }
        }
        Ok(())
    }

    /// Copies what a call wrote to the host, into the tensors that are there if they have room.
    pub fn download(&self, call: &Call, tensors: &mut Tensors) -> Result<()> {
        use TensorId::{KRowScale, Output, PresentKey, PresentValue, VRowScale};
        let written = [Output, PresentKey, PresentValue, KRowScale, VRowScale];
        for id in written.into_iter().filter(|id| call.tensor(*id).is_some()) {
            let (memory, tensor) = (tensor_of(call, id)?, tensors.expect_mut(id)?);
            match tensor.bytes().len() < memory.bytes() {
                true => *tensor = memory.download(&self.stream)?,
                false => memory.download_to(tensor, &self.stream)?,
            }
        }
        Ok(())
    }
}

fn tensor_of(call: &Call, id: TensorId) -> Result<&DeviceTensor> {
    call.tensor(id).with_context(|| format!("no {}", id.name()))
}
