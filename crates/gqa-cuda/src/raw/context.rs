//! Contexts, and the driver's properties of their GPUs.

use super::super::sys::{self, Ordinal, RawContext};
use super::{Code, DriverError, Failure, call};
use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// A context of a GPU.
pub(in super::super) struct Context {
    device: Ordinal,
    raw: RawContext,
    /// Set for the GPU's primary context, which this value retains; otherwise its owner keeps it
    /// alive.
    retained: OnceLock<Retained>,
    /// Set for a context that this value has made.
    _made: Option<Made>,
}

/// A context of this process's own, destroyed when dropped. That waits for all of its kernels.
struct Made(RawContext);

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: created by `Context::create`, whose value is dropped with it.
        super::report(unsafe { call!(cuCtxDestroy_v2(self.0)) });
    }
}

/// A reference to a GPU's primary context, released when dropped.
struct Retained(Ordinal);

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: counted by `Context::retain`; the owner of the count is dropped with it.
        super::report(unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.0)) });
    }
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver's functions are thread-safe.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of GPU number `ordinal`, the one that the CUDA runtime and
    /// other libraries use too.
    pub(in super::super) fn retain(ordinal: u32) -> Result<Self, DriverError> {
        let (mut device, mut raw): (Ordinal, RawContext) = (0, null_mut());
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the driver stores one number.
        unsafe { call!(cuDeviceGet(&raw mut device, number)) }.map_err(
            |failure| match failure.code {
                Code::INVALID_DEVICE => {
                    DriverError::NoDevice { reason: format!("there is no GPU number {ordinal}") }
                }
                _ => failure.into(),
            },
        )?;
        // SAFETY: the driver stores one handle.
        unsafe { call!(cuDevicePrimaryCtxRetain(&raw mut raw, device)) }?;
        Ok(Self { device, raw, retained: Retained(device).into(), _made: None })
    }

    /// A new context of the same GPU. Its kernels run in turns with those of other contexts, which
    /// do not wait for it.
    pub(in super::super) fn create(device: Ordinal) -> Result<Self, Failure> {
        let (mut raw, mut popped): (RawContext, RawContext) = (null_mut(), null_mut());
        // SAFETY: the driver stores one handle. It makes the context current on top of the
        // thread's stack, from which it is taken again.
        unsafe {
            call!(cuCtxCreate_v2(&raw mut raw, 0, device))?;
            call!(cuCtxPopCurrent_v2(&raw mut popped))?;
        }
        Ok(Self { device, raw, retained: OnceLock::new(), _made: Some(Made(raw)) })
    }

    /// A context of another owner.
    ///
    /// # Safety
    /// It exists, and goes on to exist as long as this value.
    pub(in super::super) unsafe fn borrow(raw: RawContext) -> Result<Self, Failure> {
        let mut context = Self { device: 0, raw, retained: OnceLock::new(), _made: None };
        let entered = context.enter()?;
        // SAFETY: the context is current; the driver stores one number.
        unsafe { call!(cuCtxGetDevice(&raw mut context.device)) }?;
        drop(entered);
        Ok(context)
    }

    /// Keeps the context alive as `other`, a value for the same context, does. Releases the
    /// reference of `other` where this one has a reference already.
    pub(in super::super) fn keep_as(&self, other: Self) {
        if let Some(retained) = other.retained.into_inner() {
            drop(self.retained.set(retained));
        }
    }

    /// Its GPU.
    pub(in super::super) fn device(&self) -> Ordinal {
        self.device
    }

    /// The handle.
    pub(in super::super) fn raw(&self) -> RawContext {
        self.raw
    }

    /// Makes the context the thread's current one as long as the guard lives.
    pub(in super::super) fn enter(&self) -> Result<Entered, Failure> {
        let previous = current()?;
        if previous == self.raw {
            return Ok(Entered { previous: None });
        }
        set_current(self.raw)?;
        Ok(Entered { previous: Some(previous) })
    }

    /// What the driver says of the GPU.
    pub(in super::super) fn properties(&self) -> Result<Properties, Failure> {
        let kilohertz = |attribute| Ok::<_, Failure>(f64::from(self.attribute(attribute)?) * 1e3);
        let mut memory_bytes = 0;
        // SAFETY: the driver stores one size.
        unsafe { call!(cuDeviceTotalMem_v2(&raw mut memory_bytes, self.device)) }?;
        Ok(Properties {
            name: self.name()?,
            sm: self.attribute(COMPUTE_CAPABILITY_MAJOR)? * 10
                + self.attribute(COMPUTE_CAPABILITY_MINOR)?,
            multiprocessors: self.attribute(MULTIPROCESSOR_COUNT)?,
            shared_bytes: self.attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: self.attribute(L2_CACHE_SIZE)?.into(),
            clock_hz: kilohertz(CLOCK_RATE)?,
            memory_clock_hz: kilohertz(MEMORY_CLOCK_RATE)?,
            memory_bus_bits: self.attribute(GLOBAL_MEMORY_BUS_WIDTH)?.into(),
            memory_bytes,
        })
    }

    fn attribute(&self, attribute: c_int) -> Result<u32, Failure> {
        let mut value: c_int = 0;
        // SAFETY: the driver stores one number.
        unsafe { call!(cuDeviceGetAttribute(&raw mut value, attribute, self.device)) }?;
        Ok(value.unsigned_abs())
    }

    fn name(&self) -> Result<String, Failure> {
        let mut name = [0u8; 128];
        let (pointer, bytes) = (name.as_mut_ptr().cast::<c_char>(), name.len() as c_int);
        // SAFETY: the driver writes at most this many bytes, including a NUL.
        unsafe { call!(cuDeviceGetName(pointer, bytes, self.device)) }?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }
}

// CUdevice_attribute
const CLOCK_RATE: c_int = 13;
const MULTIPROCESSOR_COUNT: c_int = 16;
const MEMORY_CLOCK_RATE: c_int = 36;
const GLOBAL_MEMORY_BUS_WIDTH: c_int = 37;
const L2_CACHE_SIZE: c_int = 38;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;

/// What the driver says of a GPU.
pub(in super::super) struct Properties {
    pub(in super::super) name: String,
    pub(in super::super) sm: u32,
    pub(in super::super) multiprocessors: u32,
    pub(in super::super) shared_bytes: u32,
    pub(in super::super) l2_bytes: u64,
    pub(in super::super) clock_hz: f64,
    pub(in super::super) memory_clock_hz: f64,
    pub(in super::super) memory_bus_bits: f64,
    pub(in super::super) memory_bytes: usize,
}

/// Restores the thread's previous context when dropped.
pub(in super::super) struct Entered {
    previous: Option<RawContext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(previous) = self.previous {
            super::report(set_current(previous));
        }
    }
}

fn current() -> Result<RawContext, Failure> {
    let mut context: RawContext = null_mut();
    // SAFETY: the driver stores one handle.
    unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
    Ok(context)
}

fn set_current(context: RawContext) -> Result<(), Failure> {
    // SAFETY: null, or a context that was current, is retained, or whose caller vouches for it.
    unsafe { call!(cuCtxSetCurrent(context)) }
}

/// The greatest priority of a stream in the current context, which is the lowest number.
pub(in super::super) fn greatest_priority() -> Result<c_int, Failure> {
    let (mut least, mut greatest): (c_int, c_int) = (0, 0);
    // SAFETY: the driver stores two numbers.
    unsafe { call!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)) }?;
    Ok(greatest)
}
