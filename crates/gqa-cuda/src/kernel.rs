//! A compiled kernel.

use super::raw::module::Code;
use super::sys::RawFunction;

/// A kernel on a device; valid until the device unloads its modules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) code: Code,
    pub(super) function: RawFunction,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; the handles are only read.
unsafe impl Sync for Kernel {}
