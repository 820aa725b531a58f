//! A compiled kernel.

use super::sys::{RawFunction, RawModule};

/// A kernel on a device; valid until the device unloads its modules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) module: RawModule,
    pub(super) function: RawFunction,
}

// SAFETY: the driver takes handles from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; the handles are only read.
unsafe impl Sync for Kernel {}
