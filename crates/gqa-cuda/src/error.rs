//! Errors of the driver and of GPUs.

/// Why the GPU could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no NVIDIA driver on this machine.
    #[error("no NVIDIA driver: {reason}")]
    NoDriver {
        /// What the loader said.
        reason: String,
    },
    /// The driver is too old for the shipped PTX.
    #[error(
        "the NVIDIA driver supports CUDA {have}, but {module} needs CUDA {need} or newer: update the driver"
    )]
    DriverTooOld {
        /// CUDA version of the driver.
        have: CudaVersion,
        /// First CUDA version that knows the module's PTX.
        need: CudaVersion,
        /// PTX module.
        module: String,
    },
    /// The driver finds no GPU, or none with this ordinal.
    #[error("no CUDA device: {reason}")]
    NoDevice {
        /// What was asked for.
        reason: String,
    },
    /// The GPU is older than the oldest kernel.
    #[error("{name} has compute capability {have}; the kernels need 7.0 or newer", have = gqa_plan::plan::capability(*sm))]
    UnsupportedDevice {
        /// The driver's name for the GPU.
        name: String,
        /// Compute capability, times ten.
        sm: u32,
    },
    /// The GPU has not enough free memory.
    #[error("out of GPU memory: {requested} bytes were requested, {free} are free")]
    OutOfMemory {
        /// Bytes of the allocation that failed.
        requested: usize,
        /// Bytes that were free.
        free: usize,
    },
    /// The driver's compiler refuses a module.
    #[error("the driver refuses PTX module {module} ({code}): {log}")]
    PtxRejected {
        /// PTX module.
        module: String,
        /// The driver's result.
        code: Code,
        /// The compiler's log.
        log: String,
    },
    /// No shipped module holds the kernel.
    #[error("kernel {entry} is in no PTX module shipped for compute capability {have}", have = gqa_plan::plan::capability(*sm))]
    MissingKernel {
        /// Entry name.
        entry: &'static str,
        /// Compute capability of the device, times ten.
        sm: u32,
    },
    /// A kernel could not be launched, or failed while it ran.
    #[error("{kernel} failed ({code})")]
    LaunchFailed {
        /// Entry name, or the operation that reported an earlier failure.
        kernel: String,
        /// The driver's result.
        code: Code,
    },
    /// Any other failure of a driver function.
    #[error("{call} failed ({code})")]
    Cuda {
        /// Name of the driver function.
        call: &'static str,
        /// The driver's result.
        code: Code,
    },
}

impl From<DriverError> for gqa_tensor::Error {
    fn from(cause: DriverError) -> Self {
        Self::machine(cause)
    }
}

/// A CUDA version as the driver counts: 12080 is 12.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion(pub u32);

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl CudaVersion {
    /// First version whose driver compiles PTX of that instruction set version (87 is 8.7).
    pub fn for_ptx(isa: u32) -> Self {
        let minor = isa % 10;
        Self(match (isa / 10, minor) {
            (0..=6, 0..=2) => 9000 + minor * 10,
            (0..=6, _) => 10_000 + (minor - 3) * 10,
            (7, _) => 11_000 + minor * 10,
            (8, 0..=5) => 12_000 + minor * 10,
            (8, _) => 12_010 + minor * 10,
            (major, _) => (major + 4) * 1000 + minor * 10,
        })
    }
}

/// A driver function's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

impl Code {
    pub(super) const OUT_OF_MEMORY: Self = Self(2);
    pub(super) const INVALID_IMAGE: Self = Self(200);
    pub(super) const NO_DEVICE: Self = Self(100);
    pub(super) const INVALID_DEVICE: Self = Self(101);
    pub(super) const UNSUPPORTED_PTX_VERSION: Self = Self(222);
    pub(super) const NOT_READY: Self = Self(600);

    /// Whether a kernel that ran made the context unusable.
    pub(super) fn is_kernel_fault(self) -> bool {
        matches!(self.0, 700 | 702 | 710 | 714..=719)
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match super::sys::error_name(self.0) {
            Some(name) => f.write_str(&name),
            None => write!(f, "CUDA result {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_versions_name_the_first_driver_that_knows_them() {
        for (isa, cuda) in [
            (60, "9.0"),
            (63, "10.0"),
            (65, "10.2"),
            (70, "11.0"),
            (78, "11.8"),
            (80, "12.0"),
            (85, "12.5"),
        ]
        .into_iter()
        .chain([(86, "12.7"), (87, "12.8"), (88, "12.9"), (90, "13.0")])
        {
            assert_eq!(CudaVersion::for_ptx(isa).to_string(), cuda, "PTX {isa}");
        }
    }

    #[test]
    fn messages_say_what_was_found_and_what_is_needed() {
        let error = DriverError::DriverTooOld {
            have: CudaVersion(11_040),
            need: CudaVersion(12_080),
            module: "tiled.sm_90a".to_owned(),
        };
        assert_eq!(
            error.to_string(),
            "the NVIDIA driver supports CUDA 11.4, but tiled.sm_90a needs CUDA 12.8 or newer: update the driver"
        );
        let error = DriverError::UnsupportedDevice { name: "GTX 1080".to_owned(), sm: 61 };
        assert_eq!(
            error.to_string(),
            "GTX 1080 has compute capability 6.1; the kernels need 7.0 or newer"
        );
    }
}
