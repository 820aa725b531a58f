//! A GPU: a context and the kernels loaded into it.

use super::deferred::Compile;
use super::error::{CudaVersion, DriverError};
use super::kernel::Kernel;
use super::modules::{Modules, Rewrite};
use super::raw::context::{Context, Entered, Properties};
use super::raw::{self, Failure, report};
use super::sys::RawContext;
use gqa_kernels::registry::Entry;
use gqa_plan::plan::DeviceInfo;
use gqa_ptx::Constants;
use gqa_tensor::{Error, Result};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The CUDA version of the driver; [`DriverError::NoDriver`] where there is none.
///
/// # Errors
///
/// Where there is no driver, or it does not start.
pub fn driver_version() -> Result<CudaVersion, DriverError> {
    raw::start()
}

/// Number of GPUs that the driver finds.
///
/// # Errors
///
/// Where there is no driver, or it does not start; no GPU is 0.
pub fn device_count() -> Result<u32, DriverError> {
    raw::start()?;
    raw::device_count()
}

/// A GPU, opened: one of its contexts. Clones are the same.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    modules: Modules,
    context: Context,
    info: DeviceInfo,
    memory_bytes: usize,
}

impl Inner {
    fn new(context: Context, modules: Modules) -> Result<Self, DriverError> {
        let properties = context.properties()?;
        if properties.sm < 70 {
            let Properties { name, sm, .. } = properties;
            return Err(DriverError::UnsupportedDevice { name, sm });
        }
        let memory_bytes = properties.memory_bytes;
        Ok(Self { modules, context, info: info(properties), memory_bytes })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Self { modules, context, .. } = self;
        report(context.enter().map(|_entered| modules.unload()));
    }
}

/// All open devices, so that a context's kernels are compiled once.
static OPEN: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

impl Device {
    /// Opens GPU number `ordinal` through its primary context, which the CUDA runtime, PyTorch and
    /// candle use, too, and keeps that alive. A context that is open already is shared, with the
    /// kernels compiled for it.
    ///
    /// # Errors
    /// Where there is no driver or no such GPU, or the GPU is older than the oldest kernel.
    pub fn open(ordinal: u32) -> Result<Self, DriverError> {
        let version = raw::start()?;
        Self::with_context(Context::retain(ordinal)?, version)
    }

    /// Opens a context of another owner, from its `CUcontext`. Dropping the device does not destroy
    /// it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Safety
    /// The context exists, and goes on to exist as long as the device and everything made with it.
    pub unsafe fn from_raw_context(context: *mut c_void) -> Result<Self, DriverError> {
        let version = raw::start()?;
        // SAFETY: the caller's.
        Self::with_context(unsafe { Context::borrow(context) }?, version)
    }

    fn with_context(context: Context, version: CudaVersion) -> Result<Self, DriverError> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|device| device.strong_count() > 0);
        let mut known = open.iter().filter_map(Weak::upgrade);
        if let Some(inner) = known.find(|inner| inner.context.raw() == context.raw()) {
            // The device that was opened first may only have borrowed the context.
            inner.context.keep_as(context);
            return Ok(Self(inner));
        }
        let inner = Arc::new(Inner::new(context, Modules::new(version))?);
        open.push(Arc::downgrade(&inner));
        Ok(Self(inner))
    }

    /// The same GPU through a separate context, for kernels with changed PTX. A kernel that does
    /// not end prevents that context from being dropped, but other contexts still work.
    pub(super) fn apart(&self, rewrite: Rewrite) -> Result<Self, DriverError> {
        let context = Context::create(self.0.context.device())?;
        let modules = Modules::new(self.0.modules.version()).rewritten(rewrite);
        Ok(Self(Arc::new(Inner::new(context, modules)?)))
    }

    /// The version of the driver.
    pub(super) fn version(&self) -> CudaVersion {
        self.0.modules.version()
    }

    /// What the planner needs to know of the GPU.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Bytes of device memory.
    pub fn memory_bytes(&self) -> usize {
        self.0.memory_bytes
    }

    /// The driver's handle, a `CUcontext`; valid as long as the device.
    pub fn raw_context(&self) -> RawContext {
        self.0.context.raw()
    }

    /// Makes the GPU's context current for this thread as long as the guard lives.
    pub(super) fn enter(&self) -> Result<Entered, Failure> {
        self.0.context.enter()
    }

    /// The loaded kernels. The caller enters the device before it loads another one.
    pub(super) fn modules(&self) -> &Modules {
        &self.0.modules
    }

    /// Errs unless `argument` belongs to this device.
    pub(super) fn expect_same(&self, argument: &'static str, other: &Self) -> Result<()> {
        if Arc::ptr_eq(&self.0, &other.0) {
            return Ok(());
        }
        let of = |device: &Self| format!("of {} {:?}", device.info().name, device.raw_context());
        Err(Error::invalid(argument, of(other), of(self)))
    }
}

impl Compile for Device {
    fn compile(
        &self,
        entry: &'static Entry,
        sm: u32,
        constants: &Constants,
    ) -> Result<(Kernel, bool)> {
        let _entered = self.enter()?;
        Ok(self.modules().kernel(entry, sm, constants)?)
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
