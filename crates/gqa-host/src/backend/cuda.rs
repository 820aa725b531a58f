//! The GPU back end for host tensors: copies them to the GPU and back.

use super::{Backend, Io, Machine};
use gqa_cuda::{Call, Device, Stream};
use gqa_plan::plan::{DeviceInfo, Plan, PlanOptions, TensorId, plan};
use gqa_plan::{CacheBinding, Problem};
use gqa_tensor::Result;
use std::borrow::Cow;
use std::sync::Arc;

/// The first GPU.
pub struct Cuda {
    device: Device,
    stream: Stream,
    options: PlanOptions,
    /// The device that plans are made for, if it is another one.
    other: Option<DeviceInfo>,
}

impl Cuda {
    /// Opens GPU number 0.
    ///
    /// # Errors
    ///
    /// [`DriverError`](gqa_cuda::DriverError) says why it cannot be used.
    pub fn new(options: PlanOptions) -> Result<Self> {
        Self::on(Device::open(0)?, options)
    }

    /// Uses an open GPU.
    ///
    /// # Errors
    ///
    /// Where the driver cannot make a stream.
    pub fn on(device: Device, options: PlanOptions) -> Result<Self> {
        let stream = Stream::new(&device)?;
        Ok(Self { device, stream, options, other: None })
    }

    /// Plans for another device, of this GPU's or an older compute capability and at most its
    /// shared memory, with the kernels of that device. None of them is tested first.
    pub fn with_device(self, info: DeviceInfo) -> Self {
        Self { other: Some(info), ..self }
    }

    fn plan(&self, problem: &Problem) -> Result<Arc<Plan>> {
        match &self.other {
            Some(other) => Ok(plan(problem, other, &self.options)?.into()),
            None => self.device.plan(problem, &self.options),
        }
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        io.check(problem)?;
        self.execute(&*self.plan(&problem.contiguous())?, io)
    }
}

impl Machine for Cuda {
    fn target(&self) -> &DeviceInfo {
        self.other.as_ref().unwrap_or_else(|| self.device.info())
    }

    fn execute(&self, given: &Plan, io: &mut Io<'_>) -> Result<()> {
        io.check_tensors(given.problem())?;
        // Host tensors have no rows apart.
        let plan = match given.problem().contiguous() {
            Cow::Borrowed(_) => Arc::new(given.clone()),
            Cow::Owned(problem) => self.plan(&problem)?,
        };
        let call = Call::of(self.device.load_deferred(plan)?)?;
        let problem = given.problem();
        call.poison(&self.stream)?;
        for id in TensorId::ALL {
            if let (Some(device), Some(host)) = (call.tensor(id), io.input(id)) {
                device.upload(host, &self.stream)?;
            }
        }
        let shared = problem.cache == CacheBinding::Shared;
        for (id, host) in io.outputs().filter(|(id, _)| shared && id.is_present()) {
            if let Some(device) = call.tensor(id) {
                device.upload(host, &self.stream)?;
            }
        }
        call.enqueue(&self.stream)?;
        for (id, host) in io.outputs() {
            if let Some(device) = call.tensor(id) {
                device.download_to(host, &self.stream)?;
            }
        }
        Ok(())
    }
}
