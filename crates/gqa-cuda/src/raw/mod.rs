//! The driver's functions with Rust types and results. Other files call the driver only for the
//! name of a result and for tensor maps.
//!
//! Except for [`start`] and [`context`], every function needs a current context, and handles that
//! belong to it.

pub(super) mod context;
pub(super) mod graph;
pub(super) mod memory;
pub(super) mod module;
pub(super) mod stream;

use super::error::{Code, CudaVersion, DriverError};
use super::sys::{self, Status};
use std::ffi::c_int;

/// A driver function that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) code: Code,
}

impl Failure {
    /// Errs unless the driver's answer is success.
    fn check(call: &'static str, status: Status) -> Result<(), Self> {
        if status == 0 { Ok(()) } else { Err(Self { call, code: Code(status) }) }
    }
}

impl From<Failure> for DriverError {
    fn from(failure: Failure) -> Self {
        let Failure { call, code } = failure;
        match code {
            Code::NO_DEVICE => Self::NoDevice { reason: "the driver finds no GPU".to_owned() },
            _ if code.is_kernel_fault() => {
                Self::LaunchFailed { kernel: format!("a kernel before {call}"), code }
            }
            _ => Self::Cuda { call, code },
        }
    }
}

impl From<Failure> for gqa_tensor::Error {
    fn from(failure: Failure) -> Self {
        DriverError::from(failure).into()
    }
}

/// Calls a driver function; anything but success is a [`Failure`].
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        Failure::check(stringify!($name), (sys::functions().$name)($($argument),*))
    };
}
use call;

/// A destructor cannot return its failure.
pub(super) fn report(result: Result<(), Failure>) {
    if let Err(failure) = result {
        tracing::error!("{} failed ({})", failure.call, failure.code);
    }
}

/// Finds and initialises the driver; returns its CUDA version.
pub(super) fn start() -> Result<CudaVersion, DriverError> {
    sys::load().map_err(|reason| DriverError::NoDriver { reason })?;
    let mut version: c_int = 0;
    // SAFETY: there are no flags; the driver stores one number.
    unsafe {
        call!(cuInit(0))?;
        call!(cuDriverGetVersion(&raw mut version))?;
    }
    Ok(CudaVersion(version.unsigned_abs()))
}

/// Number of GPUs.
pub(super) fn device_count() -> Result<u32, DriverError> {
    let mut count: c_int = 0;
    // SAFETY: the driver stores one number.
    unsafe { call!(cuDeviceGetCount(&raw mut count)) }?;
    Ok(count.unsigned_abs())
}
