//! A GPU: its primary context and the modules loaded into it.

use super::cust::{self, Context, Entered, Failure, Properties, RawFunction, RawStream};
use super::error::{CudaVersion, DriverError};
use super::modules::Modules;
use super::side::{Side, Sides};
use crate::plan::DeviceInfo;
use gqa_kernels::registry::Entry;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The CUDA version of the driver; [`DriverError::NoDriver`] where there is none.
pub fn driver_version() -> Result<CudaVersion, DriverError> {
    cust::init()
}

/// Number of GPUs that the driver finds.
pub fn device_count() -> Result<u32, DriverError> {
    cust::init()?;
    cust::device_count()
}

/// A GPU, opened. Clones are the same GPU.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

/// Modules and streams are dropped before their context.
struct Inner {
    modules: Mutex<Modules>,
    sides: Mutex<Sides>,
    context: Context,
    info: DeviceInfo,
    memory_bytes: usize,
}

impl Inner {
    fn new(ordinal: u32, version: CudaVersion) -> Result<Self, DriverError> {
        let context = Context::retain(ordinal)?;
        let properties = context.properties()?;
        if properties.sm < 70 {
            return Err(DriverError::UnsupportedDevice {
                name: properties.name,
                sm: properties.sm,
            });
        }
        let modules = Mutex::new(Modules::new(properties.sm, version));
        let memory_bytes = properties.memory_bytes;
        let sides = Mutex::default();
        Ok(Self { modules, sides, context, info: info(properties), memory_bytes })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let entered = self.context.enter();
        let modules = self.modules.get_mut().unwrap_or_else(PoisonError::into_inner);
        let sides = std::mem::take(self.sides.get_mut().unwrap_or_else(PoisonError::into_inner));
        match entered {
            Ok(_entered) => {
                drop(sides);
                modules.unload();
            }
            Err(failure) => tracing::error!("{} failed ({})", failure.call, failure.code),
        }
    }
}

impl Device {
    /// Opens GPU number `ordinal` through its primary context. A GPU that is open already is shared, with the kernels compiled for it.
    pub fn open(ordinal: u32) -> Result<Self, DriverError> {
        static OPEN: Mutex<Vec<(u32, Weak<Inner>)>> = Mutex::new(Vec::new());
        let version = cust::init()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, device)| device.strong_count() > 0);
        let known = open.iter().find(|(number, _)| *number == ordinal);
        if let Some(inner) = known.and_then(|(_, device)| device.upgrade()) {
            return Ok(Self(inner));
        }
        let inner = Arc::new(Inner::new(ordinal, version)?);
        open.push((ordinal, Arc::downgrade(&inner)));
        Ok(Self(inner))
    }

    /// What the planner needs to know of the GPU.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Bytes of device memory.
    pub fn memory_bytes(&self) -> usize {
        self.0.memory_bytes
    }

    /// Makes the GPU's context current for this thread as long as the guard lives.
    pub(super) fn enter(&self) -> Result<Entered, Failure> {
        self.0.context.enter()
    }

    /// A stream beside `stream`. The context must be entered.
    pub(super) fn beside(&self, stream: RawStream) -> Result<Arc<Side>, Failure> {
        self.0.sides.lock().unwrap_or_else(PoisonError::into_inner).of(stream)
    }

    /// The kernel, from its module, which is loaded when it is first asked for. The context must be entered.
    pub(super) fn function(&self, entry: &'static Entry) -> Result<RawFunction, DriverError> {
        self.0.modules.lock().unwrap_or_else(PoisonError::into_inner).function(entry)
    }
}

fn info(properties: Properties) -> DeviceInfo {
    let Properties {
        name,
        sm,
        multiprocessors,
        shared_bytes,
        l2_bytes,
        clock_hz,
        memory_clock_hz,
        memory_bus_bits,
        ..
    } = properties;
    let (tensor_flops, f32_flops) = DeviceInfo::peak_flops(sm, multiprocessors, clock_hz);
    // Two transfers per clock.
    let bandwidth = memory_clock_hz * 2.0 * memory_bus_bits / 8.0;
    let info = DeviceInfo {
        name: name.into(),
        sm,
        multiprocessors,
        shared_bytes,
        l2_bytes,
        bandwidth,
        tensor_flops,
        f32_flops,
    };
    info.with_known_rates()
}
